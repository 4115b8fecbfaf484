"""What is compared with what, and how much is wanted: every figure is a ratio of runs taken in turn."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Result, Variant, ratio

PEERS = Path(__file__).parent / "peers"
EFFECTS = (sys.executable, "-m", "benchmarks.effects")
RAW = (sys.executable, "-m", "benchmarks.raw")
Python = Callable[[str], Path]
"""The interpreter of a peer's virtual environment, made if need be."""


@dataclass(frozen=True)
class Comparison:
    """`above` ÷ `below` by `figure`; `least` (or `most`) is what we want of the median."""

    name: str
    above: str
    below: str
    least: float | None = None
    most: float | None = None
    figure: str = "rate"

    def verdict(self, results: dict[str, list[Result]]) -> tuple[str, bool]:
        """The row of the report, and whether the target is reached."""
        found = ratio(results[self.above], results[self.below], self.figure)
        reached = (self.least is None or found.median >= self.least) and (
            self.most is None or found.median <= self.most
        )
        wanted = "" if self.most is None else f"≤ {self.most}"
        wanted = wanted if self.least is None else f"≥ {self.least}"
        spread = f"{found.low:.2f} to {found.high:.2f}"
        mark = "" if reached else " **short**"
        return f"| {self.name} | {wanted} | {found.median:.2f}{mark} | {spread} | {found.rounds} |", reached


@dataclass(frozen=True)
class Suite:
    """Variants that are run in turn, and what is read from them."""

    name: str
    variants: list[Variant]
    comparisons: list[Comparison] = field(default_factory=list)


def own(count: int) -> list[Suite]:
    """Ours beside FastStream's own dispatch and the raw driver (PostgreSQL); `count` messages a consuming run."""
    ways = {
        "publish_single": ("publish single ÷ raw asyncpg INSERT autocommit", 0.75, count // 6),
        "publish_concurrent": ("publish, 20 concurrent ÷ raw group commit", 0.8, count // 3),
        "publish_in_transaction": ("publish 1 000 in the caller's transaction ÷ raw", 0.7, count // 6),
        "publish_bulk": ("publish_batch(1 000) ÷ raw unnest insert", 0.5, count),
    }
    consuming = Suite(
        "consume",
        [
            Variant("FastStream's dispatch", "dispatch", None, options={"count": count}),
            Variant("typed, archive", "consume", options={"count": count}),
            Variant("typed, no archive", "consume", options={"count": count, "archive": False}),
            Variant("untyped, archive", "consume", options={"count": count, "shape": "untyped"}),
            Variant("msg annotation, archive", "consume", options={"count": count, "shape": "annotated"}),
            Variant("batch, archive", "consume", options={"count": count, "shape": "batch"}),
            Variant("raw claim + archive", "consume", program=RAW, options={"count": count}),
        ],
        [
            Comparison(
                "consume + archive, typed dict ÷ FastStream's own dispatch",
                "typed, archive", "FastStream's dispatch", 0.80,
            ),
            Comparison(
                "batch handler + archive ÷ raw claim + archive", "batch, archive", "raw claim + archive", 0.65
            ),
        ],
    )  # fmt: skip
    suites = [consuming]
    for scenario, (name, least, about) in ways.items():
        size = about - about % 1_000
        variants = [
            Variant("ours", scenario, options={"count": size}),
            Variant("raw asyncpg", scenario, program=RAW, options={"count": size}),
        ]
        suites.append(Suite(scenario, variants, [Comparison(name, "ours", "raw asyncpg", least)]))
    for kind in ("postgresql", "mariadb", "sqlite"):
        variants = [
            Variant(name, scenario, kind, EFFECTS, {"count": 2_000})
            for name, scenario in (("own transaction", "own"), ("transactional=True", "joined"))
        ]
        cost = Comparison(
            f"{kind}: transactional=True ÷ a transaction of the handler's own", *_names(variants)
        )
        suites.append(Suite(f"a handler that inserts a row, {kind}", variants, [cost]))
    return suites


def _names(variants: list[Variant]) -> tuple[str, str]:
    below, above = variants
    return above.name, below.name


def peers(count: int, python: Python) -> list[Suite]:
    """Ours beside the peers, each in its own environment with its authors' settings."""

    def peer(name: str, scenario: str, kind: str = "postgresql", **options: object) -> Variant:
        program = (str(python(name)), str(PEERS / f"peer_{name}.py"))
        return Variant(name, scenario, kind, program, dict(options))

    few = count // 3
    suites = [
        Suite(
            "consume + archive beside sqlbroker",
            [Variant("ours", "consume", options={"count": count}), peer("sqlbroker", "consume", count=few)],
            [Comparison("consume + archive ÷ faststream-sqlbroker 0.1.0a11", "ours", "sqlbroker", 4.5)],
        ),
        Suite(
            "consume without archive",
            [
                Variant("ours", "consume", options={"count": count, "archive": False}),
                peer("outbox", "consume", count=few),
                peer("pgqueuer", "consume", count=count),
            ],
            [
                Comparison("consume without archive ÷ faststream-outbox", "ours", "outbox", 2.0),
                Comparison("consume without archive ÷ pgqueuer", "ours", "pgqueuer", 1.3),
            ],
        ),
        Suite(
            "idle latency",
            [
                Variant("ours", "latency", options={"count": 50, "pause": 0.1}),
                peer("pgqueuer", "latency", count=50, pause=0.1),
            ],
            [
                Comparison(
                    "idle latency, p50 ÷ pgqueuer's", "ours", "pgqueuer", most=1.5, figure="p50"
                )
            ],
        ),
    ]  # fmt: skip
    for kind in ("mariadb", "sqlite"):
        name = f"{kind}: consume + archive ÷ faststream-sqlbroker 0.1.0a11"
        variants = [
            Variant("ours", "consume", kind, options={"count": few}),
            peer("sqlbroker", "consume", kind, count=few // 2),
        ]
        suites += [
            Suite(f"consume + archive on {kind}", variants, [Comparison(name, "ours", "sqlbroker", 3.0)])
        ]
    return suites

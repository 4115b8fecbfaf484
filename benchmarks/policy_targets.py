"""A queue under each policy compared with a plain one, and what is wanted of the ratio."""

import sys

from benchmarks.compare import Comparison, Reading, Round, Suite, over
from benchmarks.harness import Variant

PROGRAM = (sys.executable, "-m", "benchmarks.policies")
LEAST = {
    20: {
        "delay": 0.5,
        "window": 0.5,
        "throttle": 0.5,
        "concurrency": 0.5,
        "ordered": 0.4,
        "once": 0.25,
    },
    1: {"delay": 0.25, "window": 0.25, "throttle": 0.25, "concurrency": 0.25, "ordered": 0.25},
}
"""By the number of workers."""
UNTOLD = ("concurrency by key", "throttle by key", "debounce")
"""Without a target."""
SHOWN = ("rate", "cpu_each", "statements_each")
LIMITED = "throttle 10 000/s"


def policies(count: int) -> list[Suite]:
    """`count` messages in each run of 20 workers; a third, where `Once` claims each key by
    itself."""
    suites = [_compared_with_plain("postgresql", workers, count) for workers in LEAST]
    limited = [
        Variant(name, "consume", "postgresql", PROGRAM, {"count": count, "work": name} | options)
        for options in ({"workers": 50, "handler": 0.001},)
        for name in ("plain", LIMITED)
    ]
    reached = Comparison(
        "Throttle(10_000, per='1s'), 50 workers, 1 ms ÷ the lower of its rate and plain's",
        _of_the_possible,
        least=0.95,
    )
    suites.append(Suite("a rate within reach", limited, [reached], SHOWN))
    suites += [_compared_with_plain(kind, 20, count // 3) for kind in ("mariadb", "sqlite")]
    return suites


def _compared_with_plain(kind: str, workers: int, count: int) -> Suite:
    targets = LEAST[workers] if kind == "postgresql" else {}
    names = ["plain", *LEAST[20], *(UNTOLD if workers > 1 else ())]
    variants = [
        Variant(
            name,
            "consume",
            kind,
            PROGRAM,
            {"count": count // 3 if name == "once" else count, "work": name, "workers": workers},
        )
        for name in names
    ]
    where = f"{kind}, {workers} worker{'s' if workers > 1 else ''}"
    ratios = [
        Comparison(f"{where}: {name} ÷ plain", over(name, "plain"), least=targets.get(name))
        for name in names[1:]
    ]
    return Suite(f"policies on {where}", variants, ratios, SHOWN)


def _reading(runs: Round) -> float | None:
    return float(runs[LIMITED]["rate"] / min(10_000, runs["plain"]["rate"]))


_of_the_possible: Reading = _reading

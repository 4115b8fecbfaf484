"""A queue under each policy compared with a plain one, and what is wanted of the ratio."""

import sys
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.compare import Comparison, Reading, Round, Suite, alone, over
from benchmarks.harness import Variant
from faststream_sqlbroker.subscriber.pipeline.fingerprints import COMPILED

PROGRAM = (sys.executable, "-m", "benchmarks.policies")
PROCESSES = (sys.executable, "-m", "benchmarks.processes")
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
OTHER_KINDS = ("mariadb", "sqlite")
LEAST_OF_OTHERS = 0.5
"""The least ratio on these databases, compared with PostgreSQL's."""
SHOWN = ("rate", "cpu_each", "statements_each")
LIMITED = "throttle 10 000/s"


def policies(count: int) -> list[Suite]:
    """`count` messages in each run of 20 workers; a third, where `Once` claims each key by
    itself, and on databases other than PostgreSQL.

    All runs are through FastStream's own pipeline, but those of one suite without targets.
    """
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
    return [
        _compared_with_plain("20 workers", LEAST[20], _variants("postgresql", count, 20)),
        _compared_with_plain("1 worker", LEAST[1], _variants("postgresql", count, 1)),
        _compared_with_plain(
            "20 workers, compiled pipeline",
            {},
            _variants("postgresql", count, 20, pipeline=COMPILED),
        ),
        Suite("a rate within reach", limited, [reached], SHOWN),
        _three_processes(count),
        _large_debounce(count),
        _other_databases(count // 3),
    ]


def _variants(kind: str, count: int, workers: int, **more: str) -> list[Variant]:
    names = ["plain", *LEAST[20], *(UNTOLD if workers > 1 else ())]
    return [
        Variant(
            name,
            "consume",
            kind,
            PROGRAM,
            {
                "count": count // 3 if name == "once" else count,
                "work": name,
                "workers": workers,
                **more,
            },
        )
        for name in names
    ]


def _compared_with_plain(
    where: str, targets: Mapping[str, float], variants: list[Variant]
) -> Suite:
    ratios = [
        Comparison(
            f"{where}: {each.name} ÷ plain", over(each.name, "plain"), least=targets.get(each.name)
        )
        for each in variants[1:]
    ]
    return Suite(f"policies, {where}", variants, ratios, SHOWN)


def _other_databases(count: int) -> Suite:
    """The same rows on three databases in turn: what matters are ratios of ratios."""
    variants = [
        replace(each, name=f"{kind}: {each.name}")
        for kind in ("postgresql", *OTHER_KINDS)
        for each in _variants(kind, count, 20)
    ]

    def ratio(kind: str, work: str) -> Reading:
        return over(f"{kind}: {work}", f"{kind}: plain")

    def share(kind: str, work: str) -> Reading:
        ours, theirs = ratio(kind, work), ratio("postgresql", work)
        return lambda runs: (ours(runs) or 0.0) / (theirs(runs) or 1.0)

    works = [*LEAST[20], *UNTOLD]
    comparisons = [
        each
        for kind in OTHER_KINDS
        for work in works
        for each in (
            Comparison(f"{kind}: {work} ÷ plain", ratio(kind, work)),
            Comparison(
                f"{kind}: {work} ÷ plain, ÷ PostgreSQL's", share(kind, work), least=LEAST_OF_OTHERS
            ),
        )
    ]
    return Suite("policies on other databases", variants, comparisons, SHOWN, most_rounds=1)


SHARED = ("throttle", "concurrency by key")


def _three_processes(count: int) -> Suite:
    """What two more processes bring, compared with what they bring to a plain queue."""
    variants = [
        Variant(
            f"{work}, {n} process{'es' if n > 1 else ''}",
            "consume",
            "postgresql",
            PROCESSES,
            {"count": count, "work": work, "processes": n},
        )
        for work in ("plain", *SHARED)
        for n in (1, 3)
    ]

    def more(work: str) -> Reading:
        return over(f"{work}, 3 processes", f"{work}, 1 process")

    def share(work: str) -> Reading:
        return lambda runs: (more(work)(runs) or 0.0) / (more("plain")(runs) or 1.0)

    ratios = [Comparison("three processes ÷ one: plain", more("plain"))]
    ratios += [
        Comparison(f"three processes ÷ one: {work} ÷ plain's", share(work), least=0.9)
        for work in SHARED
    ]
    return Suite("three processes under policies", variants, ratios, ("rate", "cpu_each"))


def _large_debounce(count: int) -> Suite:
    """At the given size always: how long the first delivery takes depends on it."""
    plain = {"count": count, "work": "plain"}
    name = "200 000 messages of 50 000 keys"
    variants = [
        Variant("plain", "consume", "postgresql", PROGRAM, plain),
        Variant(name, "debounce", "postgresql", PROGRAM, {"count": 200_000, "keys": 50_000}),
    ]
    comparisons = [
        Comparison(
            f"Debounce, {name}: first delivery, s after the bursts", alone(name, "first"), most=3.0
        ),
        Comparison(f"Debounce, {name}: messages/s ÷ plain", over(name, "plain"), least=0.3),
    ]
    return Suite("a large debounce", variants, comparisons, ("rate", "cpu_each"))


def _reading(runs: Round) -> float | None:
    return float(runs[LIMITED]["rate"] / min(10_000, runs["plain"]["rate"]))


_of_the_possible: Reading = _reading

"""A queue under each policy compared with a plain one, and what is wanted of the ratio."""

import sys

from benchmarks.compare import Comparison, Reading, Round, Suite, alone, over
from benchmarks.harness import Variant

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
    suites += [_three_processes(count), _large_debounce(count)]
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

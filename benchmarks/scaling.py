"""What is compared when there are more rows, queues, bytes or processes, and at a fixed rate under
a held snapshot."""

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.compare import Comparison, Reading, Round, Suite, alone, over
from benchmarks.harness import Variant

SCALE = (sys.executable, "-m", "benchmarks.scale")
OPERATING = (sys.executable, "-m", "benchmarks.operating")
RATE = (sys.executable, "-m", "benchmarks.rate")
PROCESSES = (sys.executable, "-m", "benchmarks.processes")
SERVING = (sys.executable, "-m", "benchmarks.serving")
PATIENCE = 3 * 3_600.0
"""Seconds for one run: tens of millions of rows are filled first."""
MILLION = 1_000_000
CROWD = 100_000
"""Ready rows, and as many future ones, where something else varies."""
SIZES = {100: 20_000, 1_024: 10_000, 10_240: 4_000, 102_400: 1_000, 1_048_576: 200}
"""Messages that are handled, by the bytes of their bodies."""
STARTS_ENDS = ("p99_start", "p99_end", "claim_start", "claim_end")
ONE = "1 process"
TWO = "2 processes"
LONGEST_STATEMENT = 0.2
"""Seconds that a statement of an operator's action may take."""
ACTIONS = (
    "queues",
    "list",
    "search",
    "search_archive",
    "dead_letters",
    "dry_run",
    "move",
    "redrive",
    "prune",
    "verify",
)
CLAIMS = ("claim", "look", "claim_buffers", "look_buffers")


def _scenario(name: str, scenario: str, **options: Any) -> Variant:
    return Variant(name, scenario, program=SCALE, options=options, timeout=PATIENCE)


def claims(sizes: Sequence[int]) -> Suite:
    """The claim of 100 rows from one queue with as many ready rows, and as many future ones; the
    first is the measure."""
    variants = [_scenario(f"{n:,} ready", "claim", ready=n, future=n) for n in sizes]
    first, *others = (variant.name for variant in variants)
    comparisons = [
        Comparison(
            f"claim of 100 with {name} and as many future rows ÷ with {sizes[0]:,}",
            over(name, first, "claim"),
            most=1.3 if size <= MILLION else None,
        )
        for name, size in zip(others, sizes[1:], strict=True)
    ]
    return Suite("claims by ready rows", variants, comparisons, shows=CLAIMS, axis="ready")


def _queues() -> list[Suite]:
    one = "1 queue"
    many = "1,000 queues"
    crowd = {"ready": CROWD, "future": CROWD}
    spread = [_scenario(one, "claim", **crowd), _scenario(many, "claim", **crowd, queues=1_000)]
    cost = Comparison(
        "claim of 100 from one of 1,000 queues ÷ from the only one", over(many, one, "claim")
    )
    names = {n: f"{n} of 1,000 queues" for n in (1, 10, 100)}
    subscribed = [
        _scenario(name, "claim", **crowd, queues=1_000, subscribed=n) for n, name in names.items()
    ]
    costs = [
        Comparison(f"{what} at {names[n]} ÷ at one of them", over(names[n], names[1], figure))
        for n in (10, 100)
        for what, figure in (("claim of 100", "claim"), ("look", "look"))
    ]
    return [
        Suite("rows in many queues", spread, [cost], shows=CLAIMS),
        Suite("queues of one subscriber", subscribed, costs, shows=CLAIMS, axis="subscribed"),
    ]


def _archive(rows: int) -> list[Suite]:
    empty = "empty archive"
    full = f"archive of {rows:,}"
    crowd = {"ready": CROWD, "future": CROWD}
    claiming = [_scenario(empty, "claim", **crowd), _scenario(full, "claim", **crowd, archive=rows)]
    queue = {"ready": 40_000, "count": 20_000}
    consuming = [
        _scenario(empty, "throughput", **queue),
        _scenario(full, "throughput", **queue, archive=rows),
    ]
    slower = Comparison(f"claim of 100 with an {full} ÷ with none", over(full, empty, "claim"))
    rate = Comparison(f"consume + archive with an {full} ÷ with none", over(full, empty))
    return [
        Suite("claims by size of the archive", claiming, [slower], shows=CLAIMS),
        Suite("consume into an archive", consuming, [rate]),
    ]


def _throughput() -> list[Suite]:
    waiting = (40_000, 100_000, MILLION)
    behind = [_scenario(f"{n:,} ready", "throughput", ready=n, count=20_000) for n in waiting]
    bodies = [
        _scenario(f"{size:,} bytes", "throughput", ready=2 * count, count=count, payload=size)
        for size, count in SIZES.items()
    ]
    first, *_, last = (variant.name for variant in behind)
    rate = Comparison(f"consume + archive while {last} ÷ {first}", over(last, first))
    return [
        Suite("consume by ready rows", behind, [rate], axis="ready"),
        Suite("consume by size of body", bodies, axis="payload"),
    ]


def _speed_up(runs: Round) -> float | None:
    """How much more two processes do than one, of what two cores allow.

    With T of a process's and D of the server's CPU seconds a message, one process handles at most 1
    ÷ T messages a second, and two that share the cores with the server 2 ÷ (T + D).
    """
    one = runs[ONE]
    two = runs[TWO]
    if two["db_cpu_each"] is None:
        return None
    own = two["cpu_each"]
    server = two["db_cpu_each"]
    return float(two["rate"] / one["rate"] / (2 * own / (own + server)))


def _cost(runs: Round) -> float | None:
    """CPU a message, the server's included, with two processes ÷ with one."""
    if runs[ONE]["db_cpu_each"] is None:
        return None
    one, two = (runs[name]["cpu_each"] + runs[name]["db_cpu_each"] for name in (ONE, TWO))
    return float(two / one)


def two_processes(count: int) -> Suite:
    """One queue, one process and two."""
    variants = [
        Variant(name, "consume", program=PROCESSES, options={"count": count, "processes": n})
        for n, name in ((1, ONE), (2, TWO))
    ]
    comparisons = [
        Comparison("(2 processes ÷ 1) ÷ (2 × own CPU ÷ all CPU a message)", _speed_up, least=0.9),
        Comparison("CPU a message, the server's included, 2 processes ÷ 1", _cost, most=1.10),
    ]
    return Suite("processes", variants, comparisons, shows=("rate", "cpu_each", "db_cpu_each"))


def _operating(rows: int) -> list[Suite]:
    name = f"{rows:,} live and archived"
    options = {"live": rows, "archive": rows}
    actions = Variant(name, "operate", program=OPERATING, options=options, timeout=PATIENCE)
    longest = Comparison(
        f"longest statement (s) of an operator's actions, {name}",
        alone(name, "slowest"),
        most=LONGEST_STATEMENT,
        digits=3,
    )
    still = "no prune"
    pruned = "next to a prune"
    consuming = [
        Variant(
            each,
            "next_to_prune",
            program=OPERATING,
            options={"count": 20_000, "archive": rows, "pruning": each == pruned},
            timeout=PATIENCE,
        )
        for each in (still, pruned)
    ]
    kept = Comparison(
        "consume + archive next to a running prune ÷ without", over(pruned, still), least=0.9
    )
    return [
        Suite("operators' actions", [actions], [longest], shows=ACTIONS),
        Suite("consume next to a prune", consuming, [kept]),
    ]


def serving(count: int) -> Suite:
    """A consumer, alone and next to a process that serves pull clients and open pages."""
    quiet = "no HTTP"
    busy = "50 pull clients, 5 dashboards"
    variants = [
        Variant(
            name,
            "next_to_http",
            program=SERVING,
            options={"count": count, "clients": clients, "viewers": viewers},
        )
        for name, clients, viewers in ((quiet, 0, 0), (busy, 50, 5))
    ]
    kept = Comparison(f"consume + archive next to {busy} ÷ without", over(busy, quiet), least=0.8)
    return Suite("consume next to HTTP", variants, [kept])


def scale(count: int, *, large: bool) -> list[Suite]:
    """More rows, queues, bytes and processes; `large`: tens of millions of rows, which take 15 GB
    and an hour."""
    sizes = (1_000, CROWD, MILLION, *((10 * MILLION,) if large else ()))
    archived = 10 * MILLION if large else MILLION
    return [
        claims(sizes),
        *_queues(),
        *_archive(archived),
        *_throughput(),
        two_processes(count),
        # Long enough that each client takes some jobs.
        serving(3 * count),
        *_operating(MILLION),
    ]


def _at_rate(name: str, seconds: int, **options: Any) -> Variant:
    timeout = 3.0 * seconds + 120
    return Variant(
        name, "rate", program=RATE, options={"seconds": seconds, **options}, timeout=timeout
    )


def _growth(name: str, most: float | None = None) -> list[Comparison]:
    def of(what: str, figure: str) -> Comparison:
        read: Reading = alone(name, figure)
        return Comparison(f"{name}: {what} at the end ÷ at the start", read, most=most)

    return [of("claim", "claim_growth"), of("p99 of latency", "p99_growth")]


HELD = "held snapshot"
_SHOWS = (*STARTS_ENDS, "dead_rows", "wal_bytes", "cpu_each", "p50", "p95", "p99", "behind")


def held_snapshot(seconds: int) -> Suite:
    """A held snapshot alone; its end is compared with its own start, so one run is enough."""
    variants = [_at_rate(HELD, seconds, held=True)]
    return Suite("held snapshot", variants, _growth(HELD, 2.0), shows=_SHOWS, most_rounds=1)


def rate(seconds: int) -> list[Suite]:
    """1 000 messages a second: without a snapshot, with one, and with one but without what is done
    about it."""
    free = "no snapshot"
    off = "held snapshot, every claim from the beginning"
    variants = [
        _at_rate(free, seconds),
        _at_rate(HELD, seconds, held=True),
        _at_rate(off, seconds, held=True, begin=False),
    ]
    comparisons = [
        *_growth(HELD, 2.0),
        *_growth(free),
        *_growth(off),
        Comparison("claims at the end: held snapshot ÷ none", over(HELD, free, "claim_end")),
        Comparison(
            "claims at the end: held snapshot ÷ from the beginning", over(HELD, off, "claim_end")
        ),
    ]
    return [Suite("1,000 messages a second", variants, comparisons, shows=_SHOWS)]

"""The comparisons and their targets: with FastStream and the raw driver, and with other brokers."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import Comparison, Reading, Round, Suite, alone, over
from benchmarks.harness import Variant
from benchmarks.scaling import claims, held_snapshot, two_processes

PEERS = Path(__file__).parent / "peers"
EFFECTS = (sys.executable, "-m", "benchmarks.effects")
IDLE = (sys.executable, "-m", "benchmarks.idle")
REQUESTS = (sys.executable, "-m", "benchmarks.requests")
RAW = (sys.executable, "-m", "benchmarks.raw")
Python = Callable[[str], Path]
"""The interpreter of a peer's virtual environment, made if need be."""

DISPATCH, BARE = "FastStream's dispatch", "raw claim + archive"
OURS, UNARCHIVED, BATCH = "ours, archive", "ours, no archive", "ours, batch, archive"
UNTYPED, ANNOTATED = "ours, untyped, archive", "ours, msg annotation, archive"
COMPILED = "compiled dispatch"
WRAPPED, WRAPPED_DISPATCH = "ours, one middleware, archive", "FastStream's dispatch, one middleware"

TO_DISPATCH = Comparison(
    "consume + archive, typed dict ÷ FastStream's own dispatch", over(OURS, DISPATCH), least=1.5
)
TO_DISPATCH_ALONE = Comparison(
    "dispatch of a typed message, CPU ÷ FastStream's",
    over(COMPILED, DISPATCH, "cpu_each"),
    most=0.2,
)
TO_WITHOUT_MESSAGE = Comparison(
    "consume + archive with msg: SqlBrokerMessage ÷ without", over(ANNOTATED, OURS), least=0.85
)
TO_WRAPPED_DISPATCH = Comparison(
    "consume + archive with one middleware ÷ FastStream's dispatch with it",
    over(WRAPPED, WRAPPED_DISPATCH),
    least=1.1,
)
OF_THE_PIPELINE = [TO_DISPATCH, TO_DISPATCH_ALONE, TO_WITHOUT_MESSAGE, TO_WRAPPED_DISPATCH]
TO_RAW = [
    Comparison("consume + archive, typed dict ÷ raw claim + archive", over(OURS, BARE), least=0.45),
    Comparison("batch handler + archive ÷ raw claim + archive", over(BATCH, BARE), least=0.65),
]
TO_SQLBROKER = Comparison(
    "consume + archive ÷ faststream-sqlbroker 0.1.0a11", over(OURS, "sqlbroker"), least=11
)
TO_OUTBOX = Comparison(
    "consume without archive ÷ faststream-outbox", over(UNARCHIVED, "outbox"), least=8
)
TO_PGQUEUER = Comparison(
    "consume without archive ÷ pgqueuer", over(UNARCHIVED, "pgqueuer"), least=3.5
)

PUBLISHING = {
    "publish_single": ("publish single ÷ raw asyncpg INSERT autocommit", 0.85, 12),
    "publish_concurrent": ("publish, 20 concurrent ÷ raw group commit", 0.82, 3),
    "publish_in_transaction": ("publish 1 000 in the caller's transaction ÷ raw", 0.85, 12),
    "publish_bulk": ("publish_batch(1 000) ÷ raw unnest insert", 1.0, 1),
}
"""Of each way to publish: its name, what is wanted, and by how much fewer messages than when
consuming."""


def _ours(count: int) -> dict[str, Variant]:
    """Everything that consumes without a peer, by name."""
    few = count // 3
    # A start takes 0.1 s, which is 1.5 µs for each of 60 000 messages. What is quick gets more of
    # them, so that runs that are compared last about as long.
    many = 2 * count
    most = 3 * count
    variants = [
        Variant(DISPATCH, "dispatch", None, options={"count": many}),
        Variant(OURS, "consume", options={"count": many}),
        Variant(UNARCHIVED, "consume", options={"count": many, "archive": False}),
        Variant(UNTYPED, "consume", options={"count": few, "shape": "untyped"}),
        Variant(ANNOTATED, "consume", options={"count": many, "shape": "annotated"}),
        Variant(COMPILED, "dispatch_compiled", None, options={"count": many}),
        Variant(WRAPPED, "consume", options={"count": many, "shape": "middleware"}),
        Variant(WRAPPED_DISPATCH, "dispatch", None, options={"count": many, "shape": "middleware"}),
        Variant(BATCH, "consume", options={"count": most, "shape": "batch"}),
        Variant(BARE, "consume", program=RAW, options={"count": most}),
    ]
    return {variant.name: variant for variant in variants}


def _peer(
    python: Python, name: str, scenario: str, kind: str = "postgresql", **options: object
) -> Variant:
    # -E: an environment of its own knows nothing of ours, nor of PYTHONPATH.
    program = (str(python(name)), "-E", str(PEERS / f"peer_{name}.py"))
    return Variant(name, scenario, kind, program, dict(options))


def _publishing(count: int) -> list[Suite]:
    suites = []
    for scenario, (name, least, part) in PUBLISHING.items():
        size = max(1_000, count // part // 1_000 * 1_000)
        variants = [
            Variant("ours", scenario, options={"count": size}),
            Variant("raw asyncpg", scenario, program=RAW, options={"count": size}),
        ]
        suites.append(
            Suite(scenario, variants, [Comparison(name, over("ours", "raw asyncpg"), least)])
        )
    return suites


def effects(count: int) -> list[Suite]:
    """A handler that inserts a row, in a transaction of its own and in its message's; `count`
    messages."""
    suites = []
    for kind in ("postgresql", "mariadb", "sqlite"):
        variants = [
            Variant(name, scenario, kind, EFFECTS, {"count": count})
            for name, scenario in (("own transaction", "own"), ("transactional=True", "joined"))
        ]
        name = f"{kind}: transactional=True ÷ a transaction of the handler's own"
        cost = Comparison(name, over("transactional=True", "own transaction"))
        suites.append(Suite(f"a handler that inserts a row, {kind}", variants, [cost]))
    return suites


def requests(count: int) -> list[Suite]:
    """`count` requests to another process, and as many plain messages; each ratio is of one run."""
    return [_requests(kind, count) for kind in ("postgresql", "mariadb", "mysql", "sqlite")]


def _requests(kind: str, count: int) -> Suite:
    def read(runs: dict[str, Any]) -> float:
        return float(runs["ours"]["p50"] / runs["ours"]["p50_handler"])

    ratio = Comparison(
        f"{kind}: request ÷ publish to the handler's start, p50",
        read,
        most=2.5 if kind == "postgresql" else None,
    )
    return Suite(
        f"request to another process, {kind}",
        [Variant("ours", "ask", kind, REQUESTS, {"count": count})],
        [ratio],
        shows=("p50", "p95", "p99", "p50_handler", "p95_handler", "p99_handler", "p50_delivered"),
    )


def silence() -> list[Suite]:
    """What a process of five subscribers sends that has nothing to do."""
    usual = Variant("ours", "idle", program=IDLE, options={"count": 5, "seconds": 60.0})
    told = Variant(
        "ours", "idle", program=IDLE, options={"count": 5, "seconds": 600.0, "told": True}
    )
    a_minute = alone("ours", "statements_a_minute")
    shows = ("statements_a_minute", "statements")
    return [
        Suite(
            "idle with five subscribers",
            [usual],
            [Comparison("idle: statements a minute of five subscribers", a_minute, most=65)],
            shows=shows,
            most_rounds=1,
            aside=True,
        ),
        Suite(
            "idle for ten minutes, max_fetch_interval=None",
            [told],
            [
                Comparison(
                    "idle: statements in ten minutes with max_fetch_interval=None",
                    alone("ours", "statements"),
                    most=0,
                )
            ],
            shows=shows,
            most_rounds=1,
            aside=True,
        ),
    ]


def triggers(count: int) -> list[Suite]:
    """What the triggers of `max_fetch_interval=None` cost at publishing; fewer messages than
    `count`."""
    suites = []
    for scenario, (_, _, part) in PUBLISHING.items():
        size = max(1_000, count // part // 1_000 * 1_000)
        variants = [
            Variant("without", scenario, options={"count": size}),
            Variant("with triggers", scenario, options={"count": size, "triggers": True}),
        ]
        name = f"{scenario}: with triggers ÷ without"
        rate = Comparison(name, over("with triggers", "without"))
        suites.append(Suite(f"{scenario}, triggers", variants, [rate]))
    return suites


def own(count: int) -> list[Suite]:
    """Ours compared with FastStream's own dispatch and the raw driver; `count` messages in the
    runs that are compared."""
    variants = _ours(count)
    variants[UNARCHIVED] = Variant(
        UNARCHIVED, "consume", options={"count": count // 3, "archive": False}
    )
    consuming = Suite("consume", list(variants.values()), [*OF_THE_PIPELINE, *TO_RAW])
    return [
        consuming,
        *shapes(count),
        *_publishing(count),
        *watching(count),
        *triggers(count),
        *silence(),
    ]


SHAPES = {
    "annotated": "msg: SqlBrokerMessage",
    "model": "a Pydantic model",
    "depends": "an async Depends",
    "middleware": "one middleware",
    "logged": "an INFO logger",
}


def shapes(count: int) -> list[Suite]:
    """What a handler may ask for and have around it: consuming, compared with FastStream's dispatch
    of the same handler."""
    suites = []
    for shape, name in SHAPES.items():
        options = {"count": count, "shape": shape}
        variants = [
            Variant(DISPATCH, "dispatch", None, options=options),
            Variant(COMPILED, "dispatch_compiled", None, options=options),
            Variant(OURS, "consume", options=options),
        ]
        comparisons = [
            Comparison(f"{name}: consume + archive ÷ FastStream's dispatch", over(OURS, DISPATCH)),
            Comparison(
                f"{name}: CPU of the dispatch ÷ FastStream's", over(COMPILED, DISPATCH, "cpu_each")
            ),
        ]
        suites.append(Suite(f"handlers with {name}", variants, comparisons))
    return suites


MEASURED, WATCHED = "ours, own metrics", "ours, both middlewares"
WATCHED_DISPATCH = "FastStream's dispatch, both middlewares"


def _more(above: str, below: str) -> Reading:
    """CPU that a message of one variant takes more than one of another, in microseconds."""
    return lambda runs: 1e6 * (runs[above]["cpu_each"] - runs[below]["cpu_each"])


def _more_than_dispatch(runs: Round) -> float | None:
    """What the middlewares cost ours ÷ what they cost FastStream's dispatch."""
    ours = _more(WATCHED, OURS)(runs)
    dispatch = _more(WATCHED_DISPATCH, DISPATCH)(runs)
    return None if ours is None or not dispatch else ours / dispatch


def watching(count: int) -> list[Suite]:
    """What it costs to be watched: the broker's own metrics, and both of FastStream's middlewares
    with one trace of a hundred sampled.

    `count` messages with the middlewares, as the cost of a start is a part of every run; with the
    own metrics three times as many, as the queues are looked at once a run, not every 15 s.
    """
    many = 3 * count
    measured = [
        Variant(OURS, "consume", options={"count": many}),
        Variant(MEASURED, "consume", options={"count": many, "watch": "metrics"}),
    ]
    watched = [
        Variant(DISPATCH, "dispatch", None, options={"count": count}),
        Variant(OURS, "consume", options={"count": count}),
        Variant(WATCHED, "consume", options={"count": count, "watch": "middlewares"}),
        Variant(
            WATCHED_DISPATCH, "dispatch", None, options={"count": count, "watch": "middlewares"}
        ),
    ]
    cpu = over(MEASURED, OURS, "cpu_each")
    of_metrics = [
        Comparison("own metrics ÷ none, rate", over(MEASURED, OURS), least=0.97, digits=3),
        Comparison("own metrics ÷ none, CPU of the process", cpu, most=1.03, digits=3),
        Comparison("CPU that the own metrics add, µs a message", _more(MEASURED, OURS)),
    ]
    ratio = "CPU that both middlewares add ÷ what they add to FastStream's dispatch"
    of_middlewares = [
        Comparison(ratio, _more_than_dispatch, most=1.1),
        Comparison("CPU that both middlewares add, µs a message", _more(WATCHED, OURS)),
    ]
    return [
        Suite("own metrics", measured, of_metrics),
        Suite("both middlewares", watched, of_middlewares),
    ]


def _idle(python: Python, ours: int, pgqueuers: int) -> Suite:
    return Suite(
        "idle latency",
        [
            Variant("ours", "latency", options={"count": ours, "pause": 0.1}),
            _peer(python, "pgqueuer", "latency", count=pgqueuers, pause=0.1),
        ],
        [
            Comparison("idle latency, p50 ÷ pgqueuer's", over("ours", "pgqueuer", "p50"), most=1.2),
            Comparison("idle latency, p99, seconds", alone("ours", "p99"), most=0.010, digits=4),
        ],
        shows=("p50", "p95", "p99"),
    )


def _other_databases(python: Python, count: int, few: int) -> list[Suite]:
    """`count` messages of ours, `few` of the peer's, which takes three times as long for each."""
    suites = []
    for kind, least in (("mariadb", 4.0), ("sqlite", 5.5)):
        name = f"{kind}: consume + archive ÷ faststream-sqlbroker 0.1.0a11"
        variants = [
            Variant(OURS, "consume", kind, options={"count": count}),
            _peer(python, "sqlbroker", "consume", kind, count=few),
        ]
        comparison = Comparison(name, over(OURS, "sqlbroker"), least=least)
        suites.append(Suite(f"consume + archive on {kind}", variants, [comparison]))
    return suites


def _named(variants: dict[str, Variant], names: Sequence[str]) -> list[Variant]:
    return [variants[name] for name in names]


def peers(count: int, python: Python) -> list[Suite]:
    """Ours compared with the peers, each in its own environment with its authors' settings."""
    variants = _ours(count)
    for name in ("sqlbroker", "outbox", "pgqueuer"):
        variants[name] = _peer(python, name, "consume", count=count)
    return [
        Suite(
            "consume + archive, ours and sqlbroker",
            _named(variants, (OURS, "sqlbroker")),
            [TO_SQLBROKER],
        ),
        Suite(
            "consume without archive",
            _named(variants, (UNARCHIVED, "outbox", "pgqueuer")),
            [TO_OUTBOX, TO_PGQUEUER],
        ),
        _idle(python, 100, 100),
        *_other_databases(python, count // 2, count // 2),
    ]


def check(count: int, python: Python) -> list[Suite]:
    """Every target, quickly: what is compared with several others runs once a round."""
    variants = _ours(count)
    for name in ("sqlbroker", "outbox", "pgqueuer"):
        variants[name] = _peer(python, name, "consume", count=count)
    pipeline = (DISPATCH, OURS, COMPILED, ANNOTATED, WRAPPED, WRAPPED_DISPATCH)
    order = (*pipeline, "sqlbroker", "outbox", UNARCHIVED, "pgqueuer", BATCH, BARE)
    consuming = Suite(
        "consume",
        _named(variants, order),
        [*OF_THE_PIPELINE, TO_SQLBROKER, TO_OUTBOX, TO_PGQUEUER, *TO_RAW],
    )
    return [
        consuming,
        two_processes(count),
        *_publishing(count),
        _idle(python, 120, 60),
        _requests("postgresql", 60),
        *_other_databases(python, count, count // 3),
        claims((1_000, 100_000)),
        held_snapshot(60),
        *silence(),
    ]

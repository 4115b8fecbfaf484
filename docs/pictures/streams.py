"""Streams of messages through the real policies, in virtual time.

Each stream is published to a broker under `TestSqlBroker`. The picture shows what its handler and
the archive say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import select

from faststream_sqlbroker import (
    BlockingWait,
    Concurrency,
    ConstantRetryStrategy,
    Debounce,
    Delay,
    KeepLast,
    Once,
    SqlBroker,
    TestSqlBroker,
    Throttle,
    VirtualClock,
    Window,
)
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables

BEGIN = datetime(2030, 1, 1, tzinfo=timezone.utc)
QUEUE = "stream"


@dataclass(frozen=True)
class Arrival:
    """One message of a stream."""

    at: float
    """Units of the stream since its beginning."""
    key: str = "a"


@dataclass(frozen=True)
class Stream:
    """What is published, to which policies, and for how long it is watched."""

    name: str
    """Of the file, and of the block of the page."""
    policies: Sequence[Policy]
    arrivals: Sequence[Arrival]
    length: float
    """Units of time in the picture."""
    unit: float = 1.0
    """Seconds of one unit."""
    clock_hour: int | None = None
    """The hour of the day at which the picture begins; None: it counts seconds."""
    work: float = 0.0
    """How long a handler runs, in units."""
    fails: frozenset[int] = frozenset()
    """Messages whose first attempt fails, by number."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The policies as the log shows them."""
        ordered = ["ordered=True"] if self.options.get("ordered") else []
        return ", ".join([*map(str, self.policies), *ordered]) or "no policy"


@dataclass(frozen=True)
class Start:
    """A handler that began with a message, in units."""

    number: int
    at: float
    failed: bool


@dataclass(frozen=True)
class End:
    """A message that was not handled."""

    number: int
    at: float
    reason: str


@dataclass(frozen=True)
class Seen:
    """What became of a stream."""

    starts: tuple[Start, ...]
    ends: tuple[End, ...]
    closed: tuple[tuple[float, float], ...]
    """When its window was closed."""


def _keyed(text: str) -> list[Arrival]:
    """Arrivals as "0a 0.5b": times and keys."""
    return [Arrival(float(part[:-1]), part[-1]) for part in text.split()]


MIXED = _keyed("0a 0.6a 1b 1.4a 3.2b 3.8a 4.3a 7a")
"""Two keys, with crowds and pauses; most policies get these."""
CROWD = _keyed("0a 0.4a 0.8a 1.2a 1.6a 2a 6a 6.4a")
STREAMS = (
    Stream("plain", [], MIXED, 10),
    Stream("delay", [Delay("1.5s")], MIXED, 10),
    Stream("debounce", [Debounce("1s")], MIXED, 10),
    Stream("debounce_max_wait", [Debounce("1s", max_wait="1.5s")], CROWD, 10),
    Stream("debounce_leading", [Debounce("2s", edge="leading")], MIXED, 10),
    Stream("keep_last", [KeepLast("2s")], MIXED, 10),
    Stream("throttle", [Throttle(2, "2s", burst=1)], CROWD, 10),
    Stream("throttle_burst", [Throttle(2, "2s", burst=2)], CROWD, 10),
    Stream("throttle_key", [Throttle(1, "2s", key=True)], MIXED, 10),
    Stream("throttle_drop", [Throttle(2, "2s", when_exceeded="drop")], CROWD, 10),
    Stream("window", [Window("09:00", "17:00")], _keyed("1a 2b 5a 9b 11.5a 13b"), 14, 3600.0, 6),
    Stream("concurrency", [Concurrency(2)], CROWD, 10, work=1.5),
    Stream("concurrency_key", [Concurrency(1, per_key=True)], MIXED, 10, work=1.2),
    Stream("ordered", [], MIXED, 10, work=0.5, fails=frozenset({1}), options={"ordered": True}),
    Stream("once", [Once("4s")], MIXED, 10),
    Stream(
        "blocking_wait",
        [Concurrency(1), BlockingWait("2s")],
        CROWD,
        10,
        work=0.3,
        fails=frozenset({2}),
    ),
    Stream("debounce_throttle", [Debounce("800ms"), Throttle(1, "2s")], MIXED, 12.5),
)


async def run(stream: Stream) -> Seen:
    """Publish it in virtual time, and see what becomes of each message."""
    begin = BEGIN + timedelta(hours=stream.clock_hour or 0)
    clock = VirtualClock(begin, seed=1)
    broker = SqlBroker("postgresql+asyncpg://user@nowhere/none", logger=None)
    numbers: dict[int, int] = {}
    starts: list[Start] = []

    def units(at: datetime) -> float:
        return round((at - begin).total_seconds() / stream.unit, 3)

    @broker.subscriber(
        QUEUE,
        policies=stream.policies,
        retry_strategy=ConstantRetryStrategy(delay_seconds=1.5),
        **{"max_workers": 8, **stream.options},
    )
    async def handle(number: int) -> None:
        again = any(start.number == number for start in starts)
        failed = number in stream.fails and not again
        starts.append(Start(number, units(clock.now), failed))
        if stream.work:
            await clock.sleep(stream.work * stream.unit)
        if failed:
            raise ConnectionError

    async with TestSqlBroker(broker, connect_only=False, clock=clock):
        for number, arrival in enumerate(stream.arrivals, 1):
            await clock.advance_to(begin + timedelta(seconds=arrival.at * stream.unit))
            try:
                message_id = await broker.publish(number, QUEUE, key=arrival.key)
            except ConnectionError:
                continue  # it will be retried
            assert message_id is not None
            numbers[message_id] = number
        await clock.advance_to(begin + timedelta(seconds=stream.length * stream.unit))
        ends = [End(numbers[i], units(at), reason) for i, at, reason in await _discarded(broker)]
    return Seen(tuple(starts), tuple(ends), tuple(_closed(stream, begin)))


async def _discarded(broker: SqlBroker) -> list[tuple[int, datetime, str]]:
    """The messages that ended without a handler: id, when, and why."""
    archive = build_tables(SqlBrokerSchemaConfig()).archive
    assert archive is not None
    found = select(archive.c.id, archive.c.archived_at, archive.c.reason)
    async with broker.engine.connect() as connection:
        rows = await connection.execute(found.where(archive.c.state == "DISCARDED"))
        return [(row.id, row.archived_at, str(row.reason)) for row in rows]


def _closed(stream: Stream, begin: datetime) -> list[tuple[float, float]]:
    """When the windows of `stream` are closed, as the policy says."""
    found = []
    for window in (p for p in stream.policies if isinstance(p, Window)):
        first = round(begin.timestamp() * 1_000_000)
        now, end = first, first + round(stream.length * stream.unit * 1_000_000)
        while now < end:
            opens, closes = window.span(now)
            if opens > now:
                span = (now - first, min(opens, end) - first)
                found.append((span[0] / 1e6 / stream.unit, span[1] / 1e6 / stream.unit))
            now = closes
    return found

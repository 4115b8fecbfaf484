"""A broker belongs to one event loop, until that loop is closed."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faststream import AckPolicy
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import (
    Concurrency,
    Once,
    SetupError,
    SqlBroker,
    Throttle,
)
from tests.faststream.conftest import KINDS, QUICK, Look
from tests.helpers import eventually

REFUSED = "SqlProducer.*run_coroutine_threadsafe"
Way = Callable[[SqlBroker], Awaitable[Any]]


async def lock(broker: SqlBroker) -> None:
    async with broker.lock("k"):
        pass


async def publish_with(broker: SqlBroker) -> None:
    """On a connection that works in this event loop."""
    engine = create_async_engine(broker.engine.url)
    try:
        async with engine.begin() as connection:
            await broker.publish(1, "out", connection=connection)
    finally:
        await engine.dispose()


WAYS: dict[str, Way] = {
    "publish": lambda broker: broker.publish(1, "out"),
    "publish_batch": lambda broker: broker.publish_batch(1, 2, queue="out"),
    "publish with a large body": lambda broker: broker.publish("x" * 100_000, "out"),
    "publish with a dedup_id": lambda broker: broker.publish(1, "out", dedup_id="x"),
    "publish with a connection": publish_with,
    "request": lambda broker: broker.request(1, "out", timeout=60),
    "pop": lambda broker: broker.pop("out"),
    "reserve": lambda broker: broker.reserve("out"),
    "lock": lock,
    "admin, reading": lambda broker: broker.admin.queues(),
    "admin, writing": lambda broker: broker.admin.pause("out"),
    "ping": lambda broker: broker.ping(60.0),
    "create_tables": lambda broker: broker.create_tables(),
    "start": lambda broker: broker.start(),
    "stop": lambda broker: broker.stop(),
}

EVERYWHERE = ("publish", "publish with a connection", "pop", "start")
OF_TWO_DRIVERS = ("sqlite", "postgresql")
"""PostgreSQL's statements have a way of their own to the driver; the other databases share one."""


def in_own_loop(way: Way, broker: SqlBroker) -> None:
    """As synchronous code might do it."""

    async def run() -> None:
        await way(broker)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("way", "database"),
    [
        pytest.param(way, kind, id=f"{name}-{kind}")
        for name, way in WAYS.items()
        for kind in (KINDS if name in EVERYWHERE else OF_TWO_DRIVERS)
    ],
    indirect=["database"],
)
async def test_every_way_in_refuses_a_second_event_loop(
    broker: SqlBroker, look: Look, way: Way
) -> None:
    """Nothing is written, and the broker works on in its own."""
    heard: list[int] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: int) -> None:
        heard.append(body)

    await broker.start()
    with pytest.raises(SetupError, match=REFUSED):
        await asyncio.to_thread(in_own_loop, way, broker)
    await broker.publish(1, "q")
    await eventually(lambda: heard)
    assert await broker.pop("out") is None
    assert await broker.admin.paused() == []
    assert await broker.ping(60.0)


@pytest.mark.parametrize("way", ["publish", "request"])
async def test_a_synchronous_handler_has_two_ways_to_publish(
    broker: SqlBroker, database_url: str, way: str
) -> None:
    """What it did by itself before is an error of the handler."""
    loop = asyncio.get_running_loop()
    errors: list[str] = []
    heard: list[Any] = []

    @broker.subscriber("q", **QUICK, max_workers=4)
    def handle(body: int) -> None:
        try:
            in_own_loop(WAYS[way], broker)
        except SetupError as error:
            errors.append(str(error))
        asyncio.run_coroutine_threadsafe(broker.publish(body, "out"), loop).result(60)

    @broker.subscriber("out", **QUICK)
    async def out(body: int) -> None:
        heard.append(body)

    await broker.publish_batch(*range(20), queue="q")
    await broker.start()
    await eventually(lambda: len(heard) == 20)
    assert sorted(heard) == list(range(20))
    assert len(errors) == 20


async def test_several_threads_with_event_loops_of_their_own(broker: SqlBroker) -> None:
    """Each publish is refused, and none of them is written."""

    def publish() -> int:
        async def each() -> int:
            refused = 0
            for n in range(20):
                with contextlib.suppress(SetupError):
                    await broker.publish(n, "q")
                    continue
                refused += 1
            return refused

        return asyncio.run(each())

    await broker.publish(0, "q")
    assert await asyncio.gather(*(asyncio.to_thread(publish) for _ in range(4))) == [20] * 4
    assert await broker.pop("q") is not None
    assert await broker.pop("q") is None


def test_an_engine_that_was_disposed_of_is_free(database_url: str) -> None:
    """Its new pool has no connection of the event loop that is still open."""
    broker = SqlBroker(create_async_engine(database_url), logger=None)
    first = asyncio.new_event_loop()
    try:
        first.run_until_complete(broker.create_tables())
        with pytest.raises(SetupError, match=REFUSED):
            asyncio.run(broker.create_tables())
        first.run_until_complete(broker.engine.dispose())
        asyncio.run(broker.create_tables())
    finally:
        first.close()


def test_the_application_may_have_opened_the_connections(database_url: str) -> None:
    """Those of SQLite work in every event loop."""
    engine = create_async_engine(database_url)
    refused: Any = pytest.raises(SetupError, match=REFUSED)
    if engine.dialect.name == "sqlite":
        refused = contextlib.nullcontext()
    broker = SqlBroker(engine, logger=None)
    first = asyncio.new_event_loop()

    async def connect(engine: AsyncEngine) -> None:
        async with engine.connect():
            pass

    try:
        first.run_until_complete(connect(engine))
        with refused:
            asyncio.run(broker.create_tables())
        first.run_until_complete(engine.dispose())
    finally:
        first.close()


POLICIES = {"policies": [Throttle(1000, "1s"), Once("1h"), Concurrency(2)], "max_workers": 3}


@pytest.fixture
def swept() -> Iterator[None]:
    """Coroutines that nothing can end are closed here, and not in the middle of another test."""
    yield
    gc.collect()


@pytest.mark.usefixtures("swept")
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(
    ("options", "busy"),
    [
        ({}, False),
        ({}, True),
        ({"transactional": True}, True),
        ({"ack_policy": AckPolicy.ACK_FIRST}, True),
        ({"ordered": True, "max_workers": 3}, True),
        ({"batch": True}, True),
        (POLICIES, False),
        (POLICIES, True),
    ],
    ids=lambda given: next(iter(given), "plain") if isinstance(given, dict) else f"busy={given}",
)
def test_a_stop_after_an_event_loop_that_was_closed_with_all_its_tasks(
    database_url: str, options: dict[str, Any], busy: bool
) -> None:
    """It could not cancel them, unlike `asyncio.run`; then the broker works again.

    On SQLite a transaction that was cut off so keeps its lock for as long as the process lives.
    """
    # What was cut off may hold locks, for which the stop waits as long as for a statement.
    broker = SqlBroker(database_url, logger=None, graceful_timeout=60, statement_timeout=10)
    started: list[Any] = []
    hang = True

    @broker.subscriber("q", **(QUICK | options))
    async def handle(body: Any) -> None:
        started.append(body)
        if hang:
            await asyncio.Event().wait()

    @broker.schedule("0 0 1 1 *", queue="other", name="once a year")
    async def make() -> int:
        return 2

    async def begin() -> None:
        await broker.create_tables()
        await broker.start()
        if busy:
            await broker.publish(1, "q", key="a")
            await eventually(lambda: started)

    async def go_on() -> None:
        await broker.start()
        await broker.publish(2, "q", key="b")
        await eventually(lambda: 2 in started or [2] in started)
        await broker.stop()

    first = asyncio.new_event_loop()
    first.run_until_complete(begin())
    first.close()
    asyncio.run(broker.stop())
    hang = False
    if not database_url.startswith("sqlite"):
        asyncio.run(go_on())


async def test_an_engine_keeps_no_broker_that_has_stopped(tmp_path: Path) -> None:
    """Your engine may outlive many brokers."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
    brokers = []
    for _ in range(5):
        async with SqlBroker(engine, logger=None) as broker:
            await broker.create_tables()
        brokers.append(weakref.ref(broker))
    del broker
    gc.collect()
    assert not any(broker() for broker in brokers)
    await engine.dispose()

"""Starts and stops that overlap take turns: the last call wins."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.database.server import DatabaseServer
from faststream_sqlbroker.database.store import Store
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

Hook = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture
def in_start(monkeypatch: pytest.MonkeyPatch) -> list[Hook]:
    """Hooks that each start awaits, once each, when the subscribers have not started yet."""
    hooks: list[Hook] = []
    setup = DatabaseServer.setup

    async def hooked(self: DatabaseServer) -> None:
        await setup(self)
        while hooks:
            await hooks.pop()()

    monkeypatch.setattr(DatabaseServer, "setup", hooked)
    return hooks


def subscribe(broker: SqlBroker) -> list[Any]:
    handled: list[Any] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: Any) -> None:
        handled.append(body)

    return handled


def tasks_of(before: set[Any]) -> set[Any]:
    """Tasks that were not there before."""
    return asyncio.all_tasks() - before


async def is_stopped(broker: SqlBroker, look: Look, before: set[Any], waiting: int = 1) -> None:
    """Nothing of the broker runs: a message that is published now stays."""
    await eventually(lambda: not tasks_of(before))
    assert not broker.running
    await broker.publish("later", "q")
    await broker.stop()
    await eventually(lambda: not tasks_of(before))
    assert [row["state"] for row in await look.rows()] == ["PENDING"] * waiting


@pytest.mark.parametrize("moment", ["at once", "within"])
async def test_a_stop_during_a_start_wins(
    broker: SqlBroker, look: Look, in_start: list[Hook], moment: str
) -> None:
    """The stop waits for the start, and nothing runs afterwards."""
    subscribe(broker)
    before = asyncio.all_tasks()
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await go_on.wait()

    in_start.append(wait)
    start = asyncio.create_task(broker.start())
    await (asyncio.sleep(0) if moment == "at once" else reached.wait())
    stop = asyncio.create_task(broker.stop())
    await reached.wait()
    assert not stop.done()
    go_on.set()
    await asyncio.gather(start, stop)
    await is_stopped(broker, look, before)


@pytest.mark.parametrize("own_task", [False, True])
async def test_a_hook_of_a_start_may_stop_the_broker(
    broker: SqlBroker, look: Look, in_start: list[Hook], own_task: bool
) -> None:
    """It does not wait for its own start, from another task either."""
    subscribe(broker)
    before = asyncio.all_tasks()

    async def stop() -> None:
        await (asyncio.create_task(broker.stop()) if own_task else broker.stop())

    in_start.append(stop)
    await broker.start()
    await is_stopped(broker, look, before)


async def test_a_handler_may_stop_the_broker_while_it_starts(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start does not end before the handler, whose own stop cuts it off in the end."""
    broker.config.broker_config.graceful_timeout = 0.1
    stopped = asyncio.Event()
    before = asyncio.all_tasks()

    @broker.subscriber("q", **QUICK)
    async def handle() -> None:
        try:
            await broker.stop()
        finally:
            stopped.set()

    async def late(self: SqlBroker) -> None:
        await stopped.wait()

    monkeypatch.setattr(SqlBroker, "_start_archive_upkeep", late)
    await broker.publish("x", "q")
    await broker.start()
    await is_stopped(broker, look, before, waiting=2)


async def test_a_start_during_a_stop_wins(
    broker: SqlBroker, in_start: list[Hook], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits until the stop has ended; two stops do not wait for each other."""
    handled = subscribe(broker)
    await broker.start()
    closing, go_on = asyncio.Event(), asyncio.Event()
    close = Store.close

    async def wait(self: Store) -> None:
        closing.set()
        await go_on.wait()
        await close(self)

    monkeypatch.setattr(Store, "close", wait)
    stops = [asyncio.create_task(broker.stop()) for _ in range(2)]
    await closing.wait()
    starts = [asyncio.create_task(broker.start()) for _ in range(2)]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*stops, *starts)
    await broker.publish("x", "q")
    await eventually(lambda: handled == ["x"])
    assert broker.running
    assert len(await broker.admin.subscribers("q")) == 1


async def test_a_start_that_was_stopped_before_its_turn_starts_nothing(
    broker: SqlBroker, look: Look, in_start: list[Hook]
) -> None:
    """It waits for another start when the stop comes."""
    subscribe(broker)
    before = asyncio.all_tasks()
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await go_on.wait()

    in_start.append(wait)
    starts = [asyncio.create_task(broker.start())]
    await reached.wait()
    starts.append(asyncio.create_task(broker.start()))
    await asyncio.sleep(0)
    stop = asyncio.create_task(broker.stop())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*starts, stop)
    await is_stopped(broker, look, before)


async def test_a_cancelled_start_lets_the_stop_and_the_next_start_go_on(
    broker: SqlBroker, in_start: list[Hook]
) -> None:
    handled = subscribe(broker)
    reached = asyncio.Event()

    async def wait() -> None:
        reached.set()
        await asyncio.Event().wait()

    in_start.append(wait)
    start = asyncio.create_task(broker.start())
    await reached.wait()
    stop = asyncio.create_task(broker.stop())
    await asyncio.sleep(0)
    start.cancel()
    await stop
    with pytest.raises(asyncio.CancelledError):
        await start
    await broker.start()
    await broker.publish("x", "q")
    await eventually(lambda: handled == ["x"])

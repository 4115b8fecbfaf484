"""P5: pauses and resumes that run at the same time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.flow.fleet.registration import Registration
from tests.faststream.conftest import QUICK
from tests.helpers import eventually

pytestmark = pytest.mark.capability("pause and resume: a queue for the fleet, or one subscriber")

TURN = 0.3
"""Seconds that an answer is held back for one that should not be under way."""


@pytest.fixture
async def broker(engine: AsyncEngine) -> AsyncIterator[SqlBroker]:
    """It gives signs of life only when it is asked to."""
    broker = SqlBroker(engine, logger=None, presence_interval="1h")
    await broker.create_tables()
    yield broker
    await broker.stop()


@pytest.fixture
async def member(broker: SqlBroker) -> Registration:
    """A running subscriber of "a", "b" and "c", which are open."""

    @broker.subscriber(["a", "b", "c"], **QUICK)
    async def handle(_body: Any) -> None: ...

    await broker.start()
    [subscriber] = broker.subscribers
    member: Registration = subscriber.consumer.registration  # type: ignore[attr-defined]
    await eventually(lambda: member.open_queues == ("a", "b", "c"))
    return member


def answer_first_last(monkeypatch: pytest.MonkeyPatch, fleet: Any, name: str) -> None:
    """Hold back the first answer of `name` until the second was given, if one is under way."""
    change: Callable[..., Any] = getattr(fleet, name)
    second = asyncio.Event()
    calls = 0

    async def late(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        first = calls == 1
        answer = await change(*args)
        if first:
            with suppress(TimeoutError):
                await asyncio.wait_for(second.wait(), TURN)
        else:
            asyncio.get_running_loop().call_soon(second.set)
        return answer

    monkeypatch.setattr(fleet, name, late)


async def test_two_pauses_at_the_same_time_both_hold(
    broker: SqlBroker, member: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_first_last(monkeypatch, broker._store.live_subscribers, "pause")
    await asyncio.gather(broker.admin.pause("a"), broker.admin.pause("b"))
    assert member.open_queues == ("c",)


async def test_two_resumes_at_the_same_time_both_open(
    broker: SqlBroker, member: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.admin.pause("a")
    await broker.admin.pause("b")
    answer_first_last(monkeypatch, broker._store.live_subscribers, "resume")
    await asyncio.gather(broker.admin.resume("a"), broker.admin.resume("b"))
    assert member.open_queues == ("a", "b", "c")


async def test_a_late_answer_does_not_hide_newer_pauses_of_other_processes(
    database_url: str, broker: SqlBroker, member: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = broker._store.live_subscribers
    written = asyncio.Event()
    may_answer = asyncio.Event()
    pause = fleet.pause

    async def late(*args: Any) -> frozenset[str]:
        answer = await pause(*args)
        written.set()
        await may_answer.wait()
        return answer

    monkeypatch.setattr(fleet, "pause", late)
    engine = create_async_engine(database_url)
    here = asyncio.create_task(broker.admin.pause("a"))
    await written.wait()
    await SqlBroker(engine, logger=None).admin.pause("b")
    await engine.dispose()
    broker._heartbeat.wake()
    await eventually(lambda: member.open_queues == ("c",))
    may_answer.set()
    await here
    await eventually(lambda: member.open_queues == ("c",))

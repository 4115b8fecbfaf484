"""Schedules that operators run now, pause and resume."""

import asyncio
import logging
from datetime import datetime, timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SetupError, SqlBroker
from tests.faststream.conftest import Heard, Look
from tests.faststream.test_schedules import (
    EVERY_SECOND,
    at_rest,
    daily,
    fire_times,
    first_start,
    known,
    now,
    other,
    remember,
    remembered,
    rows_of,
)
from tests.helpers import eventually

pytestmark = pytest.mark.capability("cron schedules, each time once in the fleet")


async def actions(broker: SqlBroker) -> list[tuple[str, str]]:
    """What was done, the newest last."""
    return [(each.action, each.by) for each in reversed(await broker.admin.audit())]


async def test_a_run_is_published_once_in_the_fleet_and_moves_no_fire_time(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    expression, at = await daily(broker)
    broker.publish_on_schedule("s", expression, "q", "x")
    async with other(engine) as second:
        second.publish_on_schedule("s", expression, "q", "x")
        await broker.start()
        await second.start()
        await eventually(lambda: known(look, "s"))
        begun = await now(broker)
        assert await broker.admin.run_schedule("s", by="ola")
        second._scheduler.wake()
        [row] = await rows_of(look, 1)
        assert begun <= fire_times([row])[0] <= await now(broker)
        assert (await remembered(look)).next_at == at
        assert (await remembered(look)).last_at is None
        assert await second.admin.run_schedule("s")
        await rows_of(look, 2)
    assert (await actions(broker))[0] == ("run_schedule", "ola")
    assert not await broker.admin.run_schedule("none")
    assert len(await actions(broker)) == 2
    with pytest.raises(SetupError, match="cannot be the name of a schedule"):
        await broker.admin.run_schedule("")


async def test_a_run_waits_for_a_process_and_comes_with_what_is_due(
    broker: SqlBroker, look: Look
) -> None:
    broker.publish_on_schedule("s", "0 0 1 1 *", "q", "x")
    await first_start(broker, look)
    await broker.connect()
    for _ in range(2):  # The second finds the first, which waits.
        assert await broker.admin.run_schedule("s")
    [listed] = await broker.admin.schedules()
    assert listed.run_at is not None
    due = (await now(broker)).replace(microsecond=0)
    await remember(look, next_at=due)
    await broker.start()
    first, second = fire_times(await rows_of(look, 2))
    assert (first, second) == (listed.run_at, due)
    [listed] = await broker.admin.schedules()
    assert (listed.run_at, listed.last_fire_at) == (None, due)


async def test_a_run_whose_function_fails_is_tried_again(broker: SqlBroker, look: Look) -> None:
    calls = []

    @broker.schedule("0 0 1 1 *", queue="q", name="s")
    async def fails_once() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError
        return "made"

    await broker.start()
    await eventually(lambda: known(look, "s"))
    assert await broker.admin.run_schedule("s")
    [row] = await rows_of(look, 1)
    assert bytes(row["payload"]) == b"made"
    assert len(calls) == 2
    assert (await remembered(look)).failures_count == 0


async def test_a_paused_schedule_fires_nothing_and_leaves_out_what_was_due(
    broker: SqlBroker, engine: AsyncEngine, look: Look, heard: Heard
) -> None:
    expression, at = await daily(broker)
    broker.publish_on_schedule("s", expression, "q", "x", missed="all")
    await first_start(broker, look)
    await broker.connect()
    await broker.admin.run_schedule("s")
    assert await broker.admin.pause_schedule("s", by="ola")
    assert not await broker.admin.pause_schedule("s", by="eve")
    [listed] = await broker.admin.schedules()
    assert (listed.paused_by, listed.run_at) == ("ola", None)
    with pytest.raises(SetupError, match="paused by ola: resume it first"):
        await broker.admin.run_schedule("s")
    await remember(look, next_at=at - timedelta(days=3))
    async with other(engine) as second:
        # It is told of the pause by the database alone, and other schedules go on.
        second.publish_on_schedule("s", expression, "q", "x", missed="all")
        second.publish_on_schedule("t", EVERY_SECOND, "elsewhere", "x")
        await second.start()
        await eventually(lambda: _count(look, "elsewhere", 2))
        await second.stop()
    assert not await _count(look, "q", 1)
    await broker.start()
    assert await broker.admin.resume_schedule("s", by="ola")
    assert not await broker.admin.resume_schedule("s")

    async def goes_on() -> bool:
        return (await remembered(look)).next_at == at

    await eventually(goes_on, timeout=60)
    assert await at_rest(look)
    assert not await _count(look, "q", 1)
    assert (await remembered(look)).skipped_until is None
    assert not heard.texts("skips its fire times", logging.WARNING)
    did = [("run_schedule", "ola"), ("pause_schedule", "ola"), ("resume_schedule", "ola")]
    assert (await actions(broker))[1:] == did[1:]
    assert not await broker.admin.pause_schedule("none")
    assert not await broker.admin.resume_schedule("none")


async def test_what_is_due_after_the_pause_is_published(broker: SqlBroker, look: Look) -> None:
    broker.publish_on_schedule("s", EVERY_SECOND, "q", "x", missed="all")
    await first_start(broker, look)
    await broker.connect()
    before = len(await look.rows())
    assert await broker.admin.pause_schedule("s")
    await remember(look, next_at=(await now(broker)).replace(microsecond=0) - timedelta(hours=1))
    assert await broker.admin.resume_schedule("s")
    resumed = (await remembered(look)).skipped_until
    assert resumed is not None
    await broker.start()
    await eventually(lambda: _count(look, "q", before + 2))
    found = fire_times(await look.rows())[before:]
    first = resumed.replace(microsecond=0) + timedelta(seconds=1)
    assert found == [first + timedelta(seconds=n) for n in range(len(found))]


async def test_a_pause_outlives_a_new_expression(broker: SqlBroker, look: Look) -> None:
    broker.publish_on_schedule("s", "0 0 1 1 *", "q", "x")
    await first_start(broker, look)
    await broker.connect()
    await broker.admin.pause_schedule("s", by="ola")
    await remember(look, next_at=await now(broker) - timedelta(days=1))
    async with other(broker.engine) as second:
        second.publish_on_schedule("s", "0 0 2 2 *", "q", "x")
        await second.start()

        async def redefined() -> bool:
            return (await remembered(look)).expression == "0 0 2 2 *"

        await eventually(redefined, timeout=60)
        state = await remembered(look)
        assert (state.paused_by, state.decided_at) == ("ola", None)
        assert state.next_at is not None
        assert state.next_at > await now(broker)
    assert not await look.rows()


async def test_a_message_that_is_made_while_a_schedule_is_paused_is_not_published(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    inside = asyncio.Event()
    go = asyncio.Event()

    @broker.schedule("0 0 1 1 *", queue="q", name="s")
    async def slow() -> str:
        inside.set()
        await go.wait()
        return "slow"

    await first_start(broker, look)
    await remember(look, next_at=(await now(broker)).replace(microsecond=0))
    await broker.start()
    await asyncio.wait_for(inside.wait(), 60)
    assert await broker.admin.pause_schedule("s")
    go.set()
    await eventually(
        lambda: heard.texts("redefined, paused or requested", logging.WARNING), timeout=60
    )
    assert not await look.rows()
    assert await broker.admin.resume_schedule("s")
    await eventually(lambda: at_rest(look), timeout=60)
    assert not await look.rows()


async def test_nothing_is_published_once_a_pause_has_returned(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    """Rounds of a pause while two processes fire: what comes later is after the resume."""
    broker.publish_on_schedule("s", EVERY_SECOND, "q", "x")
    async with other(engine) as second:
        second.publish_on_schedule("s", EVERY_SECOND, "q", "x")
        await broker.start()
        await second.start()
        count = 0
        for n in range(4):
            await eventually(lambda: _count(look, "q", count + 1), timeout=60)
            # At each part of a second once, the moment of a fire time among them.
            await asyncio.sleep(1.0 - (await now(broker)).microsecond / 1e6 + (n - 2) * 0.01)
            assert await broker.admin.pause_schedule("s")
            paused = await now(broker)
            count = len(await look.rows())
            await passed(broker, paused.replace(microsecond=0) + timedelta(seconds=1.2))
            assert len(await look.rows()) == count
            assert await broker.admin.resume_schedule("s")
            second._scheduler.wake()
    found = fire_times(await look.rows())
    assert len(set(found)) == len(found)


async def passed(broker: SqlBroker, moment: datetime) -> None:
    """Wait until the database's clock has passed it."""

    async def look() -> bool:
        return await now(broker) > moment

    await eventually(look)


async def _count(look: Look, queue: str, least: int) -> bool:
    rows = await look.rows()
    return sum(row["queue"] == queue for row in rows) >= least

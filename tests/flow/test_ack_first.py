"""ACK_FIRST: what was cut off is listed, what has ended is not (promise 4)."""

import asyncio
import contextlib
from datetime import datetime
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
from sqlalchemy import select

from faststream_sqlbroker.core.outcome import Ack, Nack
from faststream_sqlbroker.core.rows import ClaimedMessage, UnknownOutcome
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from tests.flow.conftest import Rig
from tests.helpers import eventually

QUICK: dict[str, Any] = {"max_fetch_interval": 0.05, "flush_interval": 0.01}


async def unknown(rig: Rig) -> list[UnknownOutcome]:
    return await rig.store.ack_first_starts.list_unknown(None, 100)


async def marks(rig: Rig) -> int:
    async with rig.store.engine.connect() as connection:
        return len((await connection.execute(rig.store.tables.policy_state.select())).all())


async def overdue(rig: Rig) -> None:
    """Let the lease of every mark run out."""
    await rig.execute(f"UPDATE message_policy_state SET lease_expires_at = {rig.past(1)}")


async def listed(rig: Rig) -> list[int]:
    return [found.message_id for found in await unknown(rig)]


async def test_a_finished_handler_leaves_no_mark(rig: Rig) -> None:
    """Whether the handler succeeded or failed."""

    async def handle(row: ClaimedMessage) -> None:
        rig.handled.append(row)
        row.record_outcome(Nack(error=ValueError("no")) if row.id % 2 else Ack())

    await rig.put(6)
    await rig.consumer(handle, ack_first=True, max_workers=3, **QUICK).start()
    await eventually(lambda: len(rig.handled) == 6)

    async def none() -> bool:
        return await marks(rig) == 0

    await eventually(none)
    assert len(await rig.rows(archive=True)) == 6


async def test_a_handler_that_runs_for_long_is_not_listed(rig: Rig) -> None:
    go = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        await go.wait()
        await rig.ack(row)

    async def ends() -> list[datetime]:
        async with rig.store.engine.connect() as connection:
            state = rig.store.tables.policy_state
            return list((await connection.execute(select(state.c.lease_expires_at))).scalars())

    await rig.put(2)
    time = rig.shifted()
    consumer = rig.consumer(
        handle, ack_first=True, max_workers=2, release_stuck_timeout=600.0, **QUICK
    )
    await consumer.start()
    await eventually(lambda: consumer.inflight.running == 2)
    first = max(await ends())
    time.shift = 500.0
    assert consumer._starts_loop is not None
    consumer._starts_loop.wake()

    async def renewed() -> bool:
        assert await unknown(rig) == []
        return min(await ends()) > first

    await eventually(renewed)
    go.set()
    await consumer.stop()
    assert await marks(rig) == 0, "the stop writes what has ended"


async def test_a_handler_that_was_cancelled_is_listed(rig: Rig) -> None:
    async def handle(row: ClaimedMessage) -> None:
        rig.handled.append(row)
        await asyncio.Event().wait()

    [message_id] = await rig.put()
    consumer = rig.consumer(handle, ack_first=True, **QUICK)
    await consumer.start()
    await eventually(lambda: rig.handled)
    await consumer.stop(0.1)
    assert await listed(rig) == []
    await overdue(rig)
    assert await listed(rig) == [message_id]
    assert [row["state"] for row in await rig.rows(archive=True)] == ["COMPLETED"]


@pytest.mark.parametrize("committed", [True, False])
async def test_a_removal_without_an_answer_does_not_run_and_is_listed(
    rig: Rig, committed: bool
) -> None:
    """If it was committed. If not, the message comes back when its lease has run out."""
    starts = rig.store.ack_first_starts
    remove = starts.remove_first

    async def unanswered(*arguments: Any) -> Any:
        if committed:
            await remove(*arguments)
        raise UnknownOutcomeError("the answer was lost")

    ids = await rig.put()
    consumer = rig.consumer(ack_first=True, **QUICK)
    with patch.object(starts, "remove_first", unanswered):
        await consumer.start()
        await eventually(lambda: rig.logged("is not confirmed"))

    if committed:
        await overdue(rig)
        assert await listed(rig) == ids
        assert rig.handled == []
    else:
        await rig.expire()
        consumer._poller.forget_leases()  # it looks when the first lease ends
        consumer._release_loop.wake()
        await eventually(lambda: [row.id for row in rig.handled] == ids)

        async def none() -> bool:
            return await marks(rig) == 0

        await eventually(none)
        assert len(rig.handled) == 1


async def test_an_end_that_cannot_be_written_is_written_later(rig: Rig) -> None:
    starts = rig.store.ack_first_starts
    end = starts.end
    failures = 2

    async def failing(*arguments: Any) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise TransientStoreError("busy")
        await end(*arguments)

    await rig.put(3)
    with patch.object(starts, "end", failing):
        await rig.consumer(ack_first=True, **QUICK).start()
        await eventually(lambda: len(rig.handled) == 3 and failures < 0)

    async def none() -> bool:
        return await marks(rig) == 0

    await eventually(none)


@pytest.mark.parametrize("how", ["refused", "passing", "hangs"])
async def test_ends_are_written_at_a_stop_whatever_becomes_of_other_outcomes(
    rig: Rig, how: str
) -> None:
    """The handler ends during the stop, while an expired message's outcome cannot be written."""
    running = asyncio.Event()
    go = asyncio.Event()
    expired = asyncio.Event()
    over = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        running.set()
        await go.wait()
        await rig.ack(row)

    async def unwritable(_batch: Any, **_: Any) -> Any:
        expired.set()
        if how == "hangs":
            await over.wait()
        if over.is_set():
            raise TimeoutError  # as when the time of the stop is over
        raise TransientStoreError("not now") if how == "passing" else StoreError("no")

    options = {**QUICK, "flush_interval": 60.0}
    consumer = rig.consumer(handle, ack_first=True, max_workers=2, **options)

    async def none() -> bool:
        return await marks(rig) == 0

    with patch.object(rig.store, "settle", unwritable):
        await rig.put()
        await consumer.start()
        await running.wait()
        await rig.put(expires_in=0.0)
        await expired.wait()
        consumer._fetcher._claimer._unanswered.append(uuid4())
        stopped = consumer.request_stop()
        assert await marks(rig) == 1
        go.set()
        await eventually(none)
        over.set()
        await stopped
    assert consumer._fetcher._claimer._unanswered == []
    assert rig.logged("1 outcomes could not be written while stopping")
    assert [row.id for row in rig.handled] == [row["id"] for row in await rig.rows(archive=True)]


async def test_an_end_that_cannot_be_written_at_a_stop_is_logged(rig: Rig) -> None:
    running = asyncio.Event()
    go = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        running.set()
        await go.wait()
        await rig.ack(row)

    [message_id] = await rig.put()
    options = {**QUICK, "flush_interval": 60.0}
    consumer = rig.consumer(handle, ack_first=True, **options)
    with (
        patch.object(rig.store.ack_first_starts, "end", side_effect=TransientStoreError("not now")),
        patch("faststream_sqlbroker.flow.consumer.FINAL_FLUSH_TIMEOUT", 0.1),
    ):
        await consumer.start()
        await running.wait()
        stopped = consumer.request_stop()
        go.set()
        await stopped
    [text] = rig.logged("could not record that the handlers")
    assert f"[{message_id}]" in text
    assert not rig.logged("outcomes could not be written")


async def test_an_abandoned_handler_stays_listed(rig: Rig) -> None:
    """As after a crash: a stop writes nothing of what it could not wait for."""

    async def handle(row: ClaimedMessage) -> None:
        rig.handled.append(row)
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    [message_id] = await rig.put()
    consumer = rig.consumer(handle, ack_first=True, **QUICK)
    await consumer.start()
    await eventually(lambda: rig.handled)
    limits = {"CANCEL_GRACE": 0.5, "CLEAN_UP_TIMEOUT": 0.0}
    with patch.multiple("faststream_sqlbroker.flow.deliver.worker_ends", **limits):
        await consumer.stop(0.01)
    assert f"[{message_id}] of queue 'q' are listed" in rig.logged("is abandoned")[0]
    await overdue(rig)
    assert await listed(rig) == [message_id]


@pytest.mark.parametrize("farewell", [0, 0.3], ids=["at once", "slowly"])
async def test_a_stop_ends_every_loop_though_the_database_hangs(rig: Rig, farewell: float) -> None:
    """Also where a driver takes its time to be cancelled."""
    hanging = asyncio.Event()

    async def hang(*_: Any, **__: Any) -> None:
        hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(farewell)

    await rig.put(2, expires_in=0.0)
    consumer = rig.consumer(ack_first=True, **QUICK)
    with (
        patch.object(rig.store, "settle", hang),
        patch("faststream_sqlbroker.flow.consumer.FINAL_FLUSH_TIMEOUT", 0.2),
    ):
        await consumer.start()
        await hanging.wait()
        await consumer.stop(0.2)

    def left() -> set[str]:
        names = {task.get_name() for task in asyncio.all_tasks()}
        return {name for name in names if name.startswith("sqlbroker-")} - {"sqlbroker-listen"}

    await eventually(lambda: not left())

"""The flush loop: when it writes, and what it writes at once."""

import asyncio

import pytest
from sqlalchemy import text

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.deliver.flush import LOCKED_LOG_INTERVAL, Flusher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from tests.clock import ShiftedTime
from tests.flow.conftest import Rig
from tests.helpers import eventually


async def test_a_timer_that_found_nothing_is_started_again(rig: Rig) -> None:
    await rig.put(2)
    first, second = await rig.claim(2)
    inflight = Inflight()
    woken = asyncio.Event()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=100, interval=0.05)
    inflight.signals.flush_due = woken.set
    inflight.signals.outcome_added = flusher.on_outcome_added
    inflight.add([first, second])
    inflight.queue_outcome(settle(first, Ack(), SettleRules(), ended_after=0.0))
    inflight.lose([first], "renew", "")
    await eventually(lambda: flusher._timer is None)
    inflight.queue_outcome(settle(second, Ack(), SettleRules(), ended_after=0.0))
    await asyncio.wait_for(woken.wait(), 60)


async def test_the_rest_of_an_early_flush_does_not_wait_for_the_interval(rig: Rig) -> None:
    await rig.put(5)
    rows = await rig.claim(5)
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=3, interval=60.0)
    inflight.signals.outcome_added = flusher.on_outcome_added
    inflight.add(rows)
    while not inflight.waiting.empty():
        inflight.waiting.get_nowait()
    inflight.queue_outcomes([settle(row, Ack(), SettleRules(), ended_after=0.0) for row in rows])
    while await flusher.tick() == 0:
        pass
    assert inflight.queued == []
    assert len(await rig.rows(archive=True)) == 5


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_outcomes_whose_rows_stay_locked_are_logged(rig: Rig) -> None:
    """No statement fails, because locked rows are skipped."""
    await rig.put(2)
    rows = await rig.claim(2)
    store = Store(rig.store.engine, rig.store.tables, statement_timeout=1.0)
    shifted = ShiftedTime()
    inflight = Inflight(clock=Clock(shifted))
    flusher = Flusher(store, inflight, rig.log, batch_size=10, interval=60.0)
    inflight.add(rows)
    inflight.queue_outcomes([settle(row, Ack(), SettleRules(), ended_after=0.0) for row in rows])
    locked = "other sessions have locked their rows"
    async with rig.store.engine.connect() as other:
        await other.execute(text("SELECT id FROM message FOR UPDATE"))
        with pytest.raises(TransientStoreError):
            await flusher.flush_batch()
        assert not await flusher.flush_batch()
        assert not rig.logged(locked), "most locks are short"
        shifted.shift += LOCKED_LOG_INTERVAL
        assert not await flusher.flush_batch()
        assert len(rig.logged(locked)) == 1
        await other.rollback()

    async def all_written() -> bool:
        await flusher.flush_batch()
        return await rig.count(archive=True) == 2

    await eventually(all_written)

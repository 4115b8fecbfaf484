"""The flush loop: when it writes, and what it writes at once."""

import asyncio

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.flow.deliver.flush import Flusher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
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

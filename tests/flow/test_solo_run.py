"""Messages that may have killed their process run alone, and keep the rest waiting for a bounded
time only."""

import asyncio
from itertools import pairwise
from time import monotonic
from typing import Any
from unittest.mock import Mock, patch

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, SettleResult
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.deliver.solo_run import SOLO_LIMIT
from tests.flow.conftest import Rig, count_as_quick, ticks
from tests.helpers import eventually

TWICE_LOST = "UPDATE message SET deliveries_count = 2 WHERE state = 'PENDING'"


async def test_a_suspect_behind_a_long_handler_does_not_stop_the_rest(rig: Rig) -> None:
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        if row.payload == b"long":
            await go_on.wait()
        await rig.ack(row)

    await rig.store.insert([NewMessage("q", b"long")])
    consumer = rig.consumer(handle, max_workers=4, max_fetch_interval=0.05)
    with patch("faststream_sqlbroker.flow.deliver.solo_run.SOLO_WAIT", 0.5):
        await consumer.start()
        await eventually(lambda: consumer.inflight.running == 1)
        await rig.store.insert([NewMessage("q", b"suspect", delay=3600)])
        await rig.execute(TWICE_LOST)
        await rig.execute(
            f"UPDATE message SET next_attempt_at = {rig.past(1)} WHERE state = 'PENDING'"
        )
        await eventually(lambda: consumer._fetcher._solo_runs._suspects)
        await rig.put(20)
        await eventually(lambda: len(rig.handled) == 20)
        assert b"suspect" not in {row.payload for row in rig.handled}
        assert consumer.inflight.running == 1
        go_on.set()
        await eventually(lambda: len(rig.handled) == 22)

    async def all_written() -> list[dict[str, object]]:
        rows = await rig.rows(archive=True)
        return rows if len(rows) == 22 else []

    rows = await eventually(all_written)
    assert max(r["deliveries_count"] for r in rows) == 3, "it was charged once, when it ran"


async def test_the_log_names_a_suspect_once(rig: Rig) -> None:
    """Claims of other messages pause for it."""
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        if row.payload == b"0":
            await go_on.wait()
        await rig.ack(row)

    await rig.put()
    consumer = rig.consumer(handle, max_workers=2, max_fetch_interval=0.05)
    await consumer.start()
    await eventually(lambda: consumer.inflight.running == 1)
    [suspect] = await rig.put(delay=3600.0)
    await rig.execute(TWICE_LOST)
    await rig.execute(f"UPDATE message SET next_attempt_at = {rig.past(1)} WHERE state = 'PENDING'")
    await eventually(lambda: rig.logged(f"messages [{suspect}] of q ended without an outcome"))
    await ticks(consumer._fetch_loop)
    go_on.set()
    await eventually(lambda: len(rig.handled) == 2)
    assert len(rig.logged("may kill their process")) == 1


async def test_a_last_delivery_that_another_process_has_handled_holds_up_no_claim(
    rig: Rig,
) -> None:
    """The process was busy all the time; it would have paused its claims again and again."""
    shifted = rig.shifted()
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        await go_on.wait()
        await rig.ack(row)

    await rig.put()
    consumer = rig.consumer(handle, max_workers=2, max_fetch_interval=0.05, max_deliveries=2)
    await consumer.start()
    await eventually(lambda: consumer.inflight.running == 1)
    [suspect] = await rig.put(delay=3600.0)
    await rig.execute(f"UPDATE message SET deliveries_count = 1 WHERE id = {suspect}")
    await rig.execute(f"UPDATE message SET next_attempt_at = {rig.past(1)} WHERE state = 'PENDING'")
    await eventually(lambda: rig.logged(f"messages [{suspect}] of q ended without an outcome"))
    await rig.execute(f"DELETE FROM message WHERE id = {suspect}")
    shifted.shift += SOLO_LIMIT
    await eventually(lambda: not consumer._fetcher._solo_runs._suspects)
    await ticks(consumer._fetch_loop)
    assert not consumer._fetcher._solo_runs._suspects
    go_on.set()
    await eventually(lambda: len(rig.handled) == 1)


async def test_a_suspect_that_is_given_back_is_not_taken_for_its_older_outcome(rig: Rig) -> None:
    """That could not be written for longer than two leases. Its answer goes with its ack, or not at
    all."""
    settle = rig.store.settle
    out_of_reach = True

    async def failing(*arguments: Any, **options: Any) -> SettleResult:
        if out_of_reach:
            raise TransientStoreError("down")
        return await settle(*arguments, **options)

    async def handle(row: ClaimedMessage) -> None:
        row.chained = [NewMessage("out", b"answer")]
        await rig.ack(row)

    consumer = rig.consumer(handle, max_workers=1, max_fetch_interval=0.05, flush_interval=0.01)
    with patch.object(rig.store, "settle", failing):
        await rig.put()
        await consumer.start()
        await eventually(lambda: consumer.inflight.queued)
        suspects = consumer._fetcher._solo_runs
        met = Mock(wraps=suspects.add_suspects)
        suspects.add_suspects = met  # type: ignore[method-assign]
        # Its lease has run out twice, here and in another process.
        await rig.execute(
            "UPDATE message SET state = 'PENDING', deliveries_count = 2, acquired_at = NULL, "
            "lease_token = NULL, lease_expires_at = NULL"
        )
        # It may run at once, and be known for a moment only.
        await eventually(lambda: any(call.args[0] for call in met.call_args_list))
        out_of_reach = False
        await eventually(lambda: len(rig.handled) == 2)
        await eventually(lambda: consumer.inflight.is_empty)
    assert [row["queue"] for row in await rig.rows()] == ["out"], "one answer"
    assert (await rig.one(archive=True))["deliveries_count"] == 3
    assert rig.logged("lease lost"), "of the first delivery"


async def test_many_suspects_leave_every_other_claim_to_the_rest(rig: Rig) -> None:
    await rig.put(60)
    await rig.execute(TWICE_LOST)
    await rig.put(5, key="normal")
    # The time of the rest ends early where there is nothing else.
    with patch("faststream_sqlbroker.flow.deliver.solo_run.MIN_OTHERS_TIME", 600.0):
        await rig.consumer(fetch_batch_size=20, max_fetch_interval=0.05, max_workers=2).start()
        await eventually(lambda: len(rig.handled) == 65)
    first = [n for n, row in enumerate(rig.handled) if row.key]
    assert first[0] <= 2
    assert {row.deliveries_count for row in rig.handled if not row.key} == {3}


async def test_waiting_rows_are_given_back_so_that_a_suspect_can_run(rig: Rig) -> None:
    """A full buffer of slow messages would keep the process from ever being empty."""
    order: list[bytes] = []

    async def handle(row: ClaimedMessage) -> None:
        order.append(row.payload)
        if b"suspect" not in order:
            await eventually(lambda: not any(consumer.inflight.waiting.items))
        await rig.ack(row)

    await rig.store.insert([NewMessage("q", b"suspect")])
    await rig.execute(TWICE_LOST)
    await rig.put(30)
    consumer = rig.consumer(handle, max_workers=1, fetch_batch_size=20, max_fetch_interval=0.05)
    with (
        patch("faststream_sqlbroker.flow.deliver.solo_run.SOLO_WAIT", 120.0),
        patch("faststream_sqlbroker.flow.deliver.fetch.MAX_PREFETCH_WAIT", 120.0),
    ):
        await consumer.start()
        count_as_quick(consumer)
        await eventually(lambda: len(rig.handled) == 31)
    assert order.index(b"suspect") <= 3
    assert {row.deliveries_count for row in rig.handled} == {1, 3}, "giving back charges nothing"


async def test_the_rest_has_as_much_time_as_the_suspects(rig: Rig) -> None:
    await rig.put(4, key="suspect")
    await rig.execute(TWICE_LOST)
    await rig.put(600)  # one worker needs 50 ms for each: three rests do not empty it
    durations = [0.1, 0.5, 0.1, 0.1]
    least = 0.3
    suspects: list[tuple[float, float]] = []
    last = 0.0

    async def handle(row: ClaimedMessage) -> None:
        nonlocal last
        began = monotonic()
        await asyncio.sleep(durations[len(suspects)] if row.key else 0.05)
        if row.key:
            suspects.append((began, monotonic()))
        else:
            last = monotonic()
        await rig.ack(row)

    with patch("faststream_sqlbroker.flow.deliver.solo_run.MIN_OTHERS_TIME", least):
        await rig.consumer(handle, max_fetch_interval=0.05).start()
        await eventually(lambda: len(suspects) == 4)
    times = [
        (then - ended, max(least, ended - began))
        for (began, ended), (then, _) in pairwise(suspects)
        if then < last  # else there was no rest any more
    ]
    assert times
    assert all(rest > 0.9 * ran for rest, ran in times), times


async def test_a_full_buffer_does_not_hide_a_suspect_without_patience(rig: Rig) -> None:
    async def handle(row: ClaimedMessage) -> None:
        if not row.key:
            await asyncio.sleep(0.5)
        await rig.ack(row)

    await rig.put(1, key="suspect")
    await rig.execute(TWICE_LOST)
    await rig.put(100)
    names = {"SOLO_WAIT": 0.1, "SOLO_PAUSE": 0.3, "SOLO_LIMIT": 0.5}
    with patch.multiple("faststream_sqlbroker.flow.deliver.solo_run", **names):
        await rig.consumer(handle, max_fetch_interval=0.05, fetch_batch_size=20).start()
        await eventually(lambda: any(row.key for row in rig.handled))


async def test_a_slow_suspect_stops_the_rest_for_a_bounded_time(rig: Rig) -> None:
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        if row.payload == b"suspect":
            await go_on.wait()
        await rig.ack(row)

    await rig.store.insert([NewMessage("q", b"suspect")])
    await rig.execute(TWICE_LOST)
    consumer = rig.consumer(handle, max_workers=2, max_fetch_interval=0.05)
    with patch("faststream_sqlbroker.flow.deliver.solo_run.MAX_SOLO_TIME", 0.5):
        await consumer.start()
        await eventually(lambda: consumer.inflight.running == 1)
        await rig.put(5)
        await eventually(lambda: len(rig.handled) == 5)
        go_on.set()
        await eventually(lambda: len(rig.handled) == 6)


async def test_nothing_is_claimed_while_a_suspect_runs(rig: Rig) -> None:
    """Were it to kill the process now, others would be charged with it."""
    running = asyncio.Event()
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        running.set()
        await go_on.wait()
        await rig.ack(row)

    await rig.put()
    await rig.execute(TWICE_LOST)
    consumer = rig.consumer(handle, max_workers=4, max_fetch_interval=0.02)
    await consumer.start()
    await running.wait()
    await rig.put(5)
    looks = rig.store.find_ready_pairs
    with (
        patch.object(rig.store, "find_ready_pairs", wraps=looks) as looked,
        patch("faststream_sqlbroker.flow.deliver.solo_run.MAX_SOLO_TIME", 600.0),
    ):
        await ticks(consumer._fetch_loop, 10)
        assert not looked.called
    assert {r["deliveries_count"] for r in await rig.rows()} == {0, 3}
    go_on.set()
    await eventually(lambda: len(rig.handled) == 6)

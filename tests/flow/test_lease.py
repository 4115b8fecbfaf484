"""Promise 3: a worker whose lease is gone changes nothing; a live holder keeps its lease."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import text

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Ack, Defer, Nack, Outcome, Relocate
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, SettleResult
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.leases import LeaseKeeper, StuckReleaser
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping
from faststream_sqlbroker.flow.fleet.lookout import SharedPoller
from tests.flow.conftest import Rig, count_as_quick, ticks
from tests.helpers import eventually

pytestmark = pytest.mark.capability("leases: fenced, renewed, given back after a crash")

SHORT = {"release_stuck_interval": 0.05, "max_fetch_interval": 0.05}


async def test_a_handler_that_outlives_its_lease_is_renewed_and_delivered_once(rig: Rig) -> None:
    """F9: another process searching for expired leases finds nothing."""
    started: list[ClaimedMessage] = []
    go_on = asyncio.Event()
    time = rig.shifted()
    left = rig.past(-300)

    async def handle(row: ClaimedMessage) -> None:
        started.append(row)
        await go_on.wait()
        await rig.ack(row)

    async def renewed() -> bool:
        now = await rig.store.server.read_now()
        ends = [row["lease_expires_at"] - now for row in await rig.rows()]
        return min(ends) > timedelta(seconds=500)

    await rig.put(3)
    consumer = rig.consumer(handle, max_workers=3, release_stuck_timeout=600.0, **SHORT)
    await consumer.start()
    await eventually(lambda: len(started) == 3)
    for _ in range(2):
        # Half of the lease is over.
        await rig.execute(f"UPDATE message SET lease_expires_at = {left}")
        time.shift += 300.0
        consumer._lease_loop.wake()
        await eventually(renewed)
    await rig.consumer(handle, **SHORT).start()
    with (
        patch("faststream_sqlbroker.flow.fleet.lookout.MAX_LEASE_INFO_AGE", 0.1),
        patch.object(
            rig.store, "get_seconds_to_lease_end", wraps=rig.store.get_seconds_to_lease_end
        ) as searched,
    ):
        await eventually(lambda: searched.call_count > 2)
    go_on.set()
    rows = await eventually(lambda: _archived(rig, 3))
    assert len(started) == 3
    assert {r["deliveries_count"] for r in rows} == {1}
    assert not rig.logged("lease lost")


async def test_a_message_held_longer_than_max_lease_is_given_to_another(rig: Rig) -> None:
    """The first holder's late outcome is refused, logged and counted."""
    go_on = asyncio.Event()
    time = rig.shifted()

    async def hang(_row: ClaimedMessage) -> None:
        # Or it might take the message again itself.
        hung._fetcher.get_capacity = lambda _: 0  # type: ignore[method-assign]
        await go_on.wait()
        _row.record_outcome(Ack())

    async def end() -> Any:
        return (await rig.one())["lease_expires_at"]

    async def renewed() -> bool:
        return bool(await end() > first)

    await rig.put()
    hung = rig.consumer(hang, max_lease=900.0, release_stuck_timeout=600.0, **SHORT)
    await hung.start()
    await eventually(lambda: hung.inflight.running == 1)
    first = await end()
    time.shift = 500.0
    hung._lease_loop.wake()
    await eventually(renewed)
    last = await end()
    time.shift = 1_000.0
    await ticks(hung._lease_loop)
    assert await end() == last
    await rig.expire()
    await rig.consumer(**SHORT).start()
    [row] = await eventually(lambda: _archived(rig, 1))
    assert row["deliveries_count"] == 2
    go_on.set()
    await eventually(lambda: hung.inflight.lease_lost_count == 1)
    assert len(rig.logged("lease lost")) == 1
    assert await rig.rows(archive=True) == [row]


async def test_a_lost_lease_is_noticed_by_the_renewal(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row leaves the buffer: its handler does not start."""
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        await go_on.wait()
        await rig.ack(row)

    await rig.put(3)
    time = rig.shifted()
    consumer = rig.consumer(handle, release_stuck_timeout=600.0)
    monkeypatch.setattr("faststream_sqlbroker.flow.deliver.fetch.MAX_PREFETCH_WAIT", 6_000.0)
    await consumer.start()
    count_as_quick(consumer)
    await eventually(lambda: consumer.inflight.claimed_count == 3)
    await rig.execute(
        "UPDATE message SET state = 'PENDING', lease_token = NULL, lease_expires_at = NULL, "
        "acquired_at = NULL, queue = 'elsewhere'"
    )
    time.shift = 500.0
    consumer._lease_loop.wake()
    await eventually(lambda: consumer.inflight.lease_lost_count == 3)
    go_on.set()
    await rig.put(1, key="next")
    await eventually(lambda: len(rig.handled) == 2)
    await consumer.stop()
    assert [row.key for row in rig.handled] == [None, "next"], (
        "of the lost, only the one that had started"
    )
    assert consumer.inflight.lease_lost_count == 3, "its outcome was not even sent"
    assert {r["state"] for r in await rig.rows()} == {"PENDING"}
    assert [r["key"] for r in await rig.rows(archive=True)] == ["next"]


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_lease_that_a_lock_kept_from_renewal_is_renewed_soon(rig: Rig) -> None:
    """The lock may have been another statement's, for a moment; SQLite has no locks of rows."""
    await rig.put()
    [row] = await rig.claim()
    before = await rig.one()
    inflight = Inflight()
    inflight.add([row])
    keeper = LeaseKeeper(rig.store, inflight, rig.log, lease=600.0, max_lease=None)
    third = 600.0 / 3
    row.renewed_monotonic -= third
    async with rig.store.engine.connect() as other:
        await other.execute(text("SELECT id FROM message FOR UPDATE"))
        await keeper.tick()
        await other.rollback()
    assert (await rig.one(), row.lease_lost) == (before, False)
    assert inflight.list_due_for_renewal(600.0, None) == [], "not at each look: the lock may last"
    row.locked_monotonic -= third / 4
    await keeper.tick()
    assert (await rig.one())["lease_expires_at"] > before["lease_expires_at"]
    assert inflight.list_due_for_renewal(600.0, None) == []


async def test_a_hold_requested_during_a_renewal_is_in_the_database(rig: Rig) -> None:
    """Whichever has the row first, a yes means that the row is held for as long as was asked."""
    rounds = 40
    await rig.put(100)
    rows = await rig.claim(100)
    before = await rig.store.server.read_now()
    inflight = Inflight()
    inflight.add(rows)
    keeper = LeaseKeeper(rig.store, inflight, rig.log, lease=60.0, max_lease=None)

    async def hold(row: ClaimedMessage, pause: float) -> bool:
        await asyncio.sleep(pause)  # varies who is first; any order is right
        return await keeper.extend([row], 7200.0)

    for n in range(rounds):
        for row in rows:
            row.renewed_monotonic = float("-inf")
            row.locked_monotonic = float("-inf")
            row.held_until = 0.0
        assert len(inflight.list_due_for_renewal(60.0, None)) == len(rows)
        _, held = await asyncio.gather(keeper.tick(), hold(rows[n], n % 8 * 0.001))
        assert held
    left = {r["id"]: r["lease_expires_at"] - before for r in await rig.rows()}
    assert [n for n in range(rounds) if left[rows[n].id] < timedelta(seconds=7200)] == []


async def test_the_own_older_outcome_is_dropped_when_a_row_comes_back(rig: Rig) -> None:
    """A row claimed again by the same process is settled by its second delivery only."""
    await rig.put()
    consumer = rig.consumer()
    [first] = await rig.claim()
    consumer.inflight.add([first])
    consumer.inflight.waiting.get_nowait()
    await rig.expire()
    await rig.store.release_stuck(["q"], 10)
    [second] = await rig.claim()
    consumer.inflight.add([second])
    assert first.lease_lost
    assert not second.lease_lost
    assert consumer.inflight.held == {second.id: second}


@pytest.mark.parametrize(
    "outcome", [Nack(0.0), Defer(0.0), Relocate("r")], ids=lambda o: type(o).__name__
)
async def test_a_message_may_be_claimed_again_before_its_outcome_is_known_to_be_written(
    rig: Rig, outcome: Outcome
) -> None:
    """The answer of the write overtaken by that of the next claim: no lease is lost, and both are
    settled."""
    settle = rig.store.settle
    calls = 0
    handled_again = asyncio.Event()

    async def answered_late(batch: Sequence[Settlement], **options: Any) -> SettleResult:
        result = await settle(batch, **options)
        await handled_again.wait()
        return result

    async def handle(row: ClaimedMessage) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            row.record_outcome(outcome)
        else:
            await rig.ack(row)
            handled_again.set()

    await rig.put()
    consumer = rig.consumer(handle, ["q", "r"], max_fetch_interval=0.05, flush_interval=0.01)
    with patch.object(rig.store, "settle", answered_late):
        await consumer.start()
        await eventually(lambda: _archived(rig, 1))
        await eventually(lambda: not consumer.inflight.unwritten)
    inflight = consumer.inflight
    assert (inflight.settled_count, inflight.lease_lost_count, inflight.held) == (2, 0, {})
    assert rig.logged("lease lost") == []


async def test_expired_leases_come_back_when_a_process_has_gone(rig: Rig) -> None:
    """F9: the release runs right at the start."""
    await rig.put(5)
    assert len(await rig.claim(5)) == 5
    await rig.expire()
    await rig.consumer().start()
    rows = await eventually(lambda: _archived(rig, 5))
    assert {r["deliveries_count"] for r in rows} == {2}
    assert rig.logged("expired leases released")


@pytest.mark.parametrize("forgotten", [1_000, None], ids=["many", "an error"])
async def test_returned_leases_are_reported_even_if_old_states_fail(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, forgotten: int | None
) -> None:
    """States of policies that are forgotten afterwards are another matter."""

    async def forget_expired(_limit: int) -> int:
        if forgotten is None:
            raise TransientStoreError("the database is busy")
        return forgotten

    monkeypatch.setattr(rig.store, "remove_expired_states", forget_expired)
    await rig.put(1)
    await rig.claim(1)
    await rig.expire()
    told: list[None] = []
    lookout = SharedPoller(rig.store, Clock())
    releaser = StuckReleaser(
        rig.store,
        ["q"],
        rig.log,
        interval=60.0,
        on_released=lambda: told.append(None),
        poller=lookout,
        housekeeping=Housekeeping(rig.store, rig.log, Clock()),
    )
    assert await releaser.tick() == 0.0
    assert told == [None]
    if forgotten is None:
        with pytest.raises(TransientStoreError):
            await releaser.tick()
    else:
        assert await releaser.tick() == 0.0
    await rig.claim(1)
    await rig.expire()
    lookout.forget_leases()  # as after `LONGEST_TRUST`
    assert await releaser.tick() == 0.0
    assert told == [None] * 2
    assert rig.logged("1 expired leases released in q: ")


async def _archived(rig: Rig, count: int) -> list[dict[str, Any]] | None:
    rows = await rig.rows(archive=True)
    return rows if len(rows) == count else None


async def test_neighbours_of_a_poison_message_are_handled(rig: Rig) -> None:
    """Rows that lost their leases together run one at a time, uncharged until then."""
    company: list[int] = []

    async def handle(row: ClaimedMessage) -> None:
        company.append(sum(r["state"] == "PROCESSING" for r in await rig.rows()))
        await rig.ack(row)

    await rig.put(5)
    await rig.execute("UPDATE message SET deliveries_count = 2")
    await rig.put(5)
    with patch("faststream_sqlbroker.flow.deliver.solo_run.MAX_SOLO_TIME", 600.0):
        await rig.consumer(handle, max_workers=4, max_fetch_interval=0.05).start()
        rows = await eventually(lambda: _archived(rig, 10))
    suspects = {r["id"] for r in rows if r["deliveries_count"] == 3}
    assert len(suspects) == 5
    assert {r["deliveries_count"] for r in rows if r["id"] not in suspects} == {1}
    alone = [n for n, row in zip(company, rig.handled, strict=True) if row.id in suspects]
    assert alone == [1] * 5

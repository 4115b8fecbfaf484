"""Claiming: order, limits, concurrency, the lease."""

import asyncio
from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest
from sqlalchemy import text

from faststream_sqlbroker.core.rows import NewMessage, Prefetch, ReadyPair
from faststream_sqlbroker.core.suspects import Suspect, SuspectRule
from faststream_sqlbroker.database.parts.ordered import Cursors
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import TransientStoreError
from tests.contract.conftest import LEASE, Bench, done


async def test_a_claim_leases_the_row_and_counts_the_delivery(bench: Bench) -> None:
    """F3; PENDING → PROCESSING."""
    await bench.put()
    before = await bench.store.server.read_now()
    [message] = await bench.claim()
    after = await bench.store.server.read_now()
    row = await bench.one()
    assert row["state"] == "PROCESSING"
    assert row["deliveries_count"] == message.deliveries_count == 1
    assert row["attempts_count"] == message.attempts_count == 0
    assert row["acquired_at"] == message.acquired_at
    assert row["lease_token"] == message.lease_token
    lease = timedelta(seconds=LEASE)
    assert before + lease <= row["lease_expires_at"] <= after + lease
    assert before <= row["acquired_at"] <= after


async def test_a_leased_row_is_not_claimed_again(bench: Bench) -> None:
    await bench.put()
    assert len(await bench.claim()) == 1
    assert await bench.claim() == []


async def test_future_rows_wait(bench: Bench) -> None:
    await bench.put(1, delay=3600)
    pair = ReadyPair("q", 0, 0.0)
    assert await bench.store.claim([pair], 10, LEASE, uuid4()) == []


async def test_the_order_is_priority_then_due_time_then_id(bench: Bench) -> None:
    now = await bench.store.server.read_now()
    for name, priority, age in (("c", 0, 5), ("d", 0, 1), ("a", 9, 1), ("e", -9, 50), ("b", 0, 9)):
        await bench.store.insert(
            [
                NewMessage(
                    "q",
                    name.encode(),
                    priority=priority,
                    next_attempt_at=now - timedelta(seconds=age),
                )
            ]
        )
    assert b"".join(m.payload for m in await bench.claim()) == b"abcde"


async def test_the_limit_holds_over_several_queues_and_priorities(bench: Bench) -> None:
    for queue in ("a", "b", "c"):
        for priority in (1, 0):
            await bench.put(3, queue, priority=priority)
    claimed = await bench.claim(7, "a", "b", "c")
    assert [(m.queue, m.priority) for m in claimed] == [("a", 1)] * 3 + [("a", 0)] * 3 + [("b", 1)]


async def test_only_the_queues_asked_for_are_claimed(bench: Bench) -> None:
    await bench.put(2, "a")
    await bench.put(2, "b")
    assert {m.queue for m in await bench.claim(10, "b")} == {"b"}
    assert await bench.store.claim([], 10, LEASE, uuid4()) == []


async def test_two_claimers_never_get_the_same_row(bench: Bench) -> None:
    await bench.put(400)
    parts = await asyncio.gather(*(bench.claim(100) for _ in range(8)))
    while more := await bench.claim(100):
        parts.append(more)
    ids = [m.id for part in parts for m in part]
    assert len(ids) == len(set(ids)) == 400


with_row_locks = pytest.mark.parametrize(
    "database", ["postgresql", "mariadb", "mysql"], indirect=True
)


@pytest.mark.capability("rows locked elsewhere are skipped")
@with_row_locks
async def test_rows_locked_elsewhere_are_skipped(bench: Bench, store: Store) -> None:
    first, second = await bench.put(2)
    async with store.engine.connect() as connection:
        await connection.execute(
            text("SELECT id FROM message WHERE id = :id FOR UPDATE"), {"id": first}
        )
        assert [m.id for m in await bench.claim()] == [second]
        await connection.rollback()
    assert [m.id for m in await bench.claim()] == [first]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_claim_waits_for_the_one_writer(bench: Bench) -> None:
    """SQLite has no row locks: the claim waits for the other writer and skips no row."""
    await bench.put(2)
    async with bench.store.engine.connect() as connection:
        await connection.exec_driver_sql("BEGIN IMMEDIATE")
        claiming = asyncio.create_task(bench.claim())
        done, _ = await asyncio.wait([claiming], timeout=0.2)
        assert not done
        await connection.rollback()
    assert len(await claiming) == 2


async def test_an_expired_lease_goes_back_with_its_delivery_charged(bench: Bench) -> None:
    """F9; PROCESSING → PENDING, or RETRYABLE after an attempt."""
    await bench.put(2)
    first, second = await bench.claim()
    await bench.execute("UPDATE message SET attempts_count = 1 WHERE id = :id", id=second.id)
    assert await bench.store.release_stuck(["q"], 10) == 0
    await bench.expire()
    assert await bench.store.release_stuck(["other"], 10) == 0
    assert await bench.store.release_stuck(["q"], 10) == 2
    rows = await bench.rows()
    assert [r["state"] for r in rows] == ["PENDING", "RETRYABLE"]
    for row in rows:
        assert row["deliveries_count"] == 1
        assert (row["acquired_at"], row["lease_token"], row["lease_expires_at"]) == (
            None,
            None,
            None,
        )
    again = await bench.claim()
    assert [m.deliveries_count for m in again] == [2, 2]
    assert first.lease_token != again[0].lease_token


async def test_the_release_takes_at_most_its_limit(bench: Bench) -> None:
    await bench.put(5)
    await bench.claim()
    await bench.expire()
    assert await bench.store.release_stuck(["q"], 3) == 3
    assert await bench.store.release_stuck(["q"], 3) == 2


async def test_a_renewal_lengthens_only_leases_still_held(bench: Bench) -> None:
    await bench.put(3)
    kept, lost, settled = await bench.claim()
    await bench.store.settle([done(settled)])
    await bench.execute(
        "UPDATE message SET lease_token = :t WHERE id = :id", t=_other(bench), id=lost.id
    )
    before = {r["id"]: r["lease_expires_at"] for r in await bench.rows()}
    leases = [(m.id, m.lease_token) for m in (kept, lost, settled)]
    assert await bench.store.renew(leases, 600.0) == {kept.id}
    after = {r["id"]: r["lease_expires_at"] for r in await bench.rows()}
    assert after[kept.id] - before[kept.id] > timedelta(seconds=500)
    assert after[lost.id] == before[lost.id]


async def test_a_renewal_shortens_no_lease(bench: Bench) -> None:
    """A renewal for everything a process holds may have been sent before a handler asked for more,
    and arrive later."""
    await bench.put(2)
    leases = [(m.id, m.lease_token) for m in await bench.claim()]
    assert await bench.store.renew(leases[:1], 7200.0) == {leases[0][0]}
    asked = [r["lease_expires_at"] for r in await bench.rows()]
    assert await bench.store.renew(leases, 600.0) == {i for i, _ in leases}
    first, second = [r["lease_expires_at"] for r in await bench.rows()]
    assert first == asked[0]
    assert second - asked[1] > timedelta(seconds=500)


@with_row_locks
async def test_a_renewal_does_not_wait_for_a_locked_row_and_knows_it_is_held(bench: Bench) -> None:
    await bench.put(1)
    [message] = await bench.claim()
    async with bench.store.engine.connect() as connection:
        await connection.execute(text("SELECT id FROM message FOR UPDATE"))
        leases = [(message.id, message.lease_token)]
        renewal = bench.store.renew_free(leases, 60)
        assert await asyncio.wait_for(renewal, 60) == (set(), {message.id})
        await connection.rollback()


@with_row_locks
async def test_a_renewal_may_wait_for_a_locked_row_and_lengthens_its_lease_then(
    bench: Bench,
) -> None:
    """Locked by a shorter renewal, which writes the row anew: what waits must find the new one."""
    await bench.put(2)
    leases = [(m.id, m.lease_token) for m in await bench.claim()]
    store = bench.store
    before = await bench.store.server.read_now()
    async with store.engine.connect() as connection:
        await connection.run_sync(lambda c: store.dialect.renew_free(c, leases, 60.0))
        waiting = asyncio.create_task(store.renew(leases[:1], 7200.0))
        done_early, _ = await asyncio.wait({waiting}, timeout=0.5)
        await connection.commit()
    assert await waiting == {leases[0][0]}
    assert not done_early
    first, second = [r["lease_expires_at"] - before for r in await bench.rows()]
    assert second < timedelta(hours=1) < first


@with_row_locks
async def test_a_renewal_does_not_wait_for_the_next_holder_of_a_message(bench: Bench) -> None:
    await bench.put()
    [message] = await bench.claim()
    async with bench.store.engine.connect() as connection:
        await connection.execute(text("UPDATE message SET lease_token = :t"), {"t": _other(bench)})
        await connection.commit()
        await connection.execute(text("SELECT id FROM message FOR UPDATE"))
        renewal = bench.store.renew([(message.id, message.lease_token)], 60)
        assert await asyncio.wait_for(renewal, 60) == set()
        await connection.rollback()


@with_row_locks
async def test_a_renewal_that_times_out_on_a_locked_row_raises(bench: Bench) -> None:
    await bench.put()
    [message] = await bench.claim()
    impatient = Store(bench.store.engine, bench.store.tables, statement_timeout=0.5)
    before = await bench.one()
    async with bench.store.engine.connect() as connection:
        await connection.execute(text("SELECT id FROM message FOR UPDATE"))
        with pytest.raises(TransientStoreError):
            await impatient.renew([(message.id, message.lease_token)], 7200)
        await connection.rollback()
    assert await bench.one() == before


@with_row_locks
async def test_a_claim_is_given_back_while_others_have_rows_locked(bench: Bench) -> None:
    """A claim whose answer was lost, while handlers of the same queue work in transactions."""
    await bench.put(3)
    [locked], [ours], [other] = [await bench.claim(limit) for limit in (1, 1, 1)]
    async with bench.store.engine.connect() as connection:
        await connection.execute(
            text("SELECT id FROM message WHERE id = :id FOR UPDATE"), {"id": locked.id}
        )
        release = bench.store.release_claim(["q"], ours.lease_token)
        assert await asyncio.wait_for(release, 60) == 1
        await connection.rollback()
    states = {r["id"]: (r["state"], r["deliveries_count"]) for r in await bench.rows()}
    held = dict.fromkeys((locked.id, other.id), ("PROCESSING", 1))
    assert states == {ours.id: ("PENDING", 0), **held}


async def test_a_half_set_lease_is_refused_by_the_table(bench: Bench) -> None:
    from sqlalchemy.exc import DBAPIError

    await bench.put()
    for change in (
        "state = 'PROCESSING'",
        "lease_token = 'b5fdcd2df4964e3fb5ad0a3cc3f5a0f1'",
        "state = 'COMPLETED'",
        "attempts_count = -1",
        "priority = 101",
    ):
        with pytest.raises(DBAPIError):
            await bench.execute(f"UPDATE message SET {change}")


def _other(bench: Bench) -> object:
    token = uuid4()
    return token if bench.store.dialect_name == "postgresql" else token.hex


async def test_a_message_due_before_2000_is_claimed_first(bench: Bench) -> None:
    """PostgreSQL counts from there."""
    years = (2020, 1990, 2001, 1970, 1999)
    for year in years:
        at = datetime(year, 5, 5, tzinfo=timezone.utc)
        await bench.store.insert([NewMessage("q", b"%d" % year, next_attempt_at=at)])
    claimed = await bench.claim(10)
    assert [int(row.payload) for row in claimed] == sorted(years)
    assert [row.next_attempt_at.year for row in claimed] == sorted(years)


async def test_f6_a_claim_leaves_suspects_and_reports_them(bench: Bench) -> None:
    """A last delivery is never charged together with others; a claim of its own leases it. Attempts
    count for nothing.
    """
    ids = await bench.put(6)
    counts = {ids[0]: (1, 0), ids[2]: (8, 7), ids[3]: (9, 9), ids[4]: (22, 20)}
    for message_id, (deliveries, attempts) in counts.items():
        await bench.execute(
            f"UPDATE message SET deliveries_count = {deliveries}, attempts_count = {attempts} "
            f"WHERE id = {message_id}"
        )
    suspicion = SuspectRule.from_max_deliveries(2)
    before = await bench.rows()
    assert suspicion is not None
    pairs = await bench.store.find_ready_pairs(["q"])
    claimed = await bench.store.claim(pairs, 4, LEASE, uuid4(), suspect_rule=suspicion)
    assert [row.id for row in claimed] == [ids[1], ids[3]], (
        "suspects take room, so that they are found"
    )
    assert claimed.suspects == {ids[0]: Suspect(1, is_last=True), ids[2]: Suspect(1, is_last=True)}
    after = await bench.rows()
    assert [after[n] for n in (0, 2, 4, 5)] == [before[n] for n in (0, 2, 4, 5)]
    others = await bench.store.claim(pairs, 4, LEASE, uuid4(), suspect_rule=suspicion.as_silent())
    assert [row.id for row in others] == [ids[4], ids[5]], "what is over the limit just ends"
    assert others.suspects == {}
    [alone] = await bench.store.claim_one(ids[0], ["q"], LEASE, uuid4())
    assert (alone.id, alone.deliveries_count) == (ids[0], 2)
    assert [row.id for row in await bench.store.claim(pairs, 4, LEASE, uuid4())] == [ids[2]]


async def test_f6_a_claim_in_order_leaves_suspects_and_reports_them(bench: Bench) -> None:
    """And its key waits for it."""
    first, second = await bench.put(2, key="a")
    [other] = await bench.put(1, key="b")
    await bench.execute(f"UPDATE message SET deliveries_count = 1 WHERE id = {first}")
    pairs = await bench.store.find_ready_pairs(["q"])
    rows, again, _ = await bench.store.claim_ordered(
        pairs, 10, LEASE, uuid4(), Cursors(), suspect_rule=SuspectRule.from_max_deliveries(2)
    )
    assert [row.id for row in rows] == [other]
    assert rows.suspects == {first: Suspect(1, is_last=True)}
    assert again is None
    assert [r["state"] for r in await bench.rows()] == ["PENDING", "PENDING", "PROCESSING"]
    [alone] = await bench.store.claim_one(first, ["q"], LEASE, uuid4(), ordered=True)
    assert alone.deliveries_count == 2
    assert second


# -- leases of two lengths -------------------------------------------------------------------------


async def _lease_seconds(bench: Bench) -> list[int]:
    rows = await bench.rows()
    leased = [row for row in rows if row["state"] == "PROCESSING"]
    return [round((r["lease_expires_at"] - r["acquired_at"]).total_seconds()) for r in leased]


@pytest.mark.parametrize("after", [0, 2, 9])
async def test_rows_that_wait_for_a_worker_are_leased_for_less(bench: Bench, after: int) -> None:
    """The first ones in the order of the claim, over its pairs."""
    last = await bench.put(3)
    first = await bench.put(3, priority=1)
    pairs = await bench.store.find_ready_pairs(["q"])
    rows = await bench.store.claim(pairs, 5, LEASE, uuid4(), prefetch=Prefetch(after, 20.0))
    order = [*first, *last[:2]]
    assert [row.id for row in rows] == order
    assert [row.prefetched for row in rows] == [n >= after for n in range(5)]
    expected = {i: LEASE if n < after else 20.0 for n, i in enumerate(order)}
    assert await _lease_seconds(bench) == [round(expected[i]) for i in sorted(expected)]


async def test_rows_of_many_pairs_are_leased_by_two_lengths(bench: Bench) -> None:
    for n in range(12):
        await bench.put(2, queue=f"q{n}")
    pairs = await bench.store.find_ready_pairs([f"q{n}" for n in range(12)])
    rows = await bench.store.claim(pairs, 24, LEASE, uuid4(), prefetch=Prefetch(7, 20.0))
    assert [row.prefetched for row in rows] == [False] * 7 + [True] * 17
    lengths = await _lease_seconds(bench)
    assert (lengths.count(round(LEASE)), lengths.count(20)) == (7, 17)


async def test_the_end_of_the_first_lease_is_known_to_every_process(bench: Bench) -> None:
    assert await bench.store.get_seconds_to_lease_end(["q", "other"]) is None
    await bench.put(3)
    await bench.put(1, queue="other")
    assert await bench.store.get_seconds_to_lease_end(["q", "other"]) is None, "there is no lease"
    await bench.claim(1, lease=50_000.0)
    await bench.claim(1, lease=5_000.0)
    await bench.claim(1, "other", lease=500.0)
    ends = [
        await bench.store.get_seconds_to_lease_end(queues)
        for queues in (["q"], ["other"], ["q", "other"], ["x"])
    ]
    assert ends.pop() is None
    assert all(
        limit - 200 < (end or 0) <= limit
        for end, limit in zip(ends, (5_000, 500, 500), strict=True)
    ), ends
    await bench.expire()
    ended = await bench.store.get_seconds_to_lease_end(["q"])
    assert ended is not None
    assert ended < 0

"""Claims for ordered=True: one lease at a time for each key, in the order of ids (promise 7)."""

import asyncio
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.parts.ordered import KEYLESS_PAGE, MIN_WINDOW, Cursors
from faststream_sqlbroker.database.store import Store
from tests.contract.conftest import LEASE, Bench, done


async def claim(
    bench: Bench,
    limit: int = 10,
    *queues: str,
    cursors: Cursors | None = None,
    suspect_rule: SuspectRule | None = None,
) -> tuple[list[ClaimedMessage], float | None, Cursors]:
    pairs = [p for p in await bench.store.find_ready_pairs(queues or ("q",)) if p.due_in <= 0]
    given = cursors or Cursors()
    return await bench.store.claim_ordered(
        pairs, limit, LEASE, uuid4(), given, suspect_rule=suspect_rule
    )


async def ids(bench: Bench, limit: int = 10, *queues: str) -> list[int]:
    rows, again, _ = await claim(bench, limit, *queues)
    assert again != 0
    return [row.id for row in rows]


async def test_the_first_message_of_each_key_is_leased(bench: Bench) -> None:
    a = await bench.put(3, key="a")
    b = await bench.put(2, key="b")
    rows, _, _ = await claim(bench)
    assert [row.id for row in rows] == [a[0], b[0]]
    assert await ids(bench) == []
    await bench.store.settle([done(rows[0])])
    assert await ids(bench) == [a[1]]


async def test_messages_without_a_key_have_no_order(bench: Bench) -> None:
    free = await bench.put(3)
    assert await ids(bench) == free


async def test_the_limit_holds(bench: Bench) -> None:
    keyed = [(await bench.put(2, key=f"k{n}"))[0] for n in range(5)]
    assert await ids(bench, 3) == keyed[:3]
    assert await ids(bench, 3) == keyed[3:]


async def test_an_earlier_message_that_waits_holds_the_later_ones(bench: Bench) -> None:
    """Whether it is delayed, or to be tried again."""
    await bench.put(1, key="a", delay=3600)
    await bench.put(2, key="a")
    [b, later] = await bench.put(2, key="b")
    rows, _, _ = await claim(bench)
    assert [row.id for row in rows] == [b]
    await bench.store.settle([done(rows[0], state=MessageState.RETRYABLE, delay=3600.0)])
    assert await ids(bench) == []
    await bench.execute(f"DELETE FROM message WHERE id = {b}")
    assert await ids(bench) == [later]


async def test_an_expired_message_does_not_hold_its_key(bench: Bench) -> None:
    await bench.put(1, key="a", delay=3600, expires_in=0.0)
    [second] = await bench.put(1, key="a")
    assert await ids(bench) == [second]


async def test_priorities_order_keys_not_the_messages_of_one(bench: Bench) -> None:
    [low] = await bench.put(1, key="a", priority=0)
    await bench.put(1, key="a", priority=9)
    [high] = await bench.put(1, key="b", priority=5)
    assert await ids(bench) == [high, low]


async def test_queues_have_orders_of_their_own(bench: Bench) -> None:
    [one] = await bench.put(1, "q", key="a")
    [two] = await bench.put(1, "r", key="a")
    assert await ids(bench, 10, "q", "r") == [one, two]


async def test_a_key_with_a_lease_gives_no_second_one_to_a_late_commit(bench: Bench) -> None:
    """A lower id that is committed while a higher one is being handled waits for it."""
    [first, second] = await bench.put(2, key="a")
    await bench.execute(
        f"UPDATE message SET next_attempt_at = {bench.past(-60)} WHERE id = {first}"
    )
    await bench.execute(f"UPDATE message SET {bench.quoted('key')} = 'other' WHERE id = {first}")
    rows, _, _ = await claim(bench)
    assert [row.id for row in rows] == [second]
    # What a late commit looks like: a row with a lower id appears.
    await bench.execute(
        f"UPDATE message SET {bench.quoted('key')} = 'a', next_attempt_at = {bench.past(1)} "
        f"WHERE id = {first}"
    )
    assert await ids(bench) == []
    await bench.store.settle([done(rows[0])])
    assert await ids(bench) == [first]


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_one_claim_of_a_queue_runs_at_a_time(bench: Bench, store: Store) -> None:
    """Under READ COMMITTED the second would not see the first one's lease, and lease a late commit
    of the key.

    It does not wait, which would keep a connection from those who renew leases.
    """
    for queue in (
        "q",
        "r",
    ):  # the very first claim of a queue makes its row, and others wait for that
        await bench.put(1, queue)
        assert await ids(bench, 1, queue) != []
    late = create_async_engine(store.engine.url)
    async with late.connect() as publisher, late.connect() as claimer:
        await publisher.begin()
        [first] = await store.insert_in(publisher, [NewMessage("q", b"late", key="a")])
        [second] = await bench.put(1, key="a")
        await claimer.begin()
        pairs = await store.find_ready_pairs(("q",))
        rows, _ = await claimer.run_sync(
            lambda c: store.dialect.ordered.claim(c, pairs, 5, LEASE, uuid4(), Cursors())
        )
        assert [row.id for row in rows] == [second]
        await publisher.commit()
        [other] = await bench.put(1, "r", key="b")
        found, again, _ = await asyncio.wait_for(claim(bench, 5, "q", "r"), 60)
        assert ([row.id for row in found], again) == ([other], 0.0), "the other queue is free"
        assert await store.claim_one(first or 0, ("q",), LEASE, uuid4(), ordered=True) == []
        await claimer.commit()
        assert await ids(bench) == []
        await store.settle([done(rows[0])])
        assert await ids(bench) == [first]
    await late.dispose()


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_locked_head_does_not_keep_other_keys_waiting(bench: Bench, store: Store) -> None:
    [locked] = await bench.put(1, key="a")
    [free] = await bench.put(1, key="b")
    other = create_async_engine(store.engine.url)
    async with other.connect() as connection:
        await connection.execute(text(f"SELECT id FROM message WHERE id = {locked} FOR UPDATE"))
        assert await ids(bench, 1) == [free]
    await other.dispose()


async def test_claimers_at_once_never_lease_a_key_twice(bench: Bench) -> None:
    """Many claims, settled in random order: of no key two leases at a time, each in the order of
    ids."""
    for _ in range(12):
        for key in "abcd":
            await bench.put(1, key=key)
    leased: set[str] = set()
    order: dict[str, list[int]] = {}

    async def work() -> None:
        while sum(map(len, order.values())) < 48:
            rows, _, _ = await claim(bench, 2)
            for row in rows:
                assert row.key is not None
                assert row.key not in leased
                leased.add(row.key)
                order.setdefault(row.key, []).append(row.id)
            await asyncio.sleep(0.001)
            for row in rows:
                leased.discard(row.key or "")
                await bench.store.settle([done(row)])

    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(4))), 240)
    assert all(found == sorted(found) and len(found) == 12 for found in order.values())


async def all_of(bench: Bench, limit: int) -> tuple[list[int], int]:
    """The rows that one rotation through the queue finds, and the number of claims."""
    cursors = Cursors()
    found = list[int]()
    for turn in range(1, 40):
        rows, again, cursors = await claim(bench, limit, cursors=cursors)
        found += [row.id for row in rows]
        if not rows and again != 0:
            return sorted(found), turn
    pytest.fail("the rotation does not end")


async def test_messages_behind_a_blocked_head_are_not_scanned(bench: Bench) -> None:
    """The window is full of one key; its neighbours are found by their keys, a page at a time."""
    blocked = await bench.put(MIN_WINDOW + 50, key="m")
    assert await ids(bench, 1) == blocked[:1]
    behind = [(await bench.put(2, key=f"z{n:03}"))[0] for n in range(2 * MIN_WINDOW)]
    found, _ = await all_of(bench, 60)
    assert found == behind


async def test_messages_without_a_key_are_found_behind_a_blocked_one(bench: Bench) -> None:
    """Page by page, from where the last claim stopped."""
    blocked = await bench.put(KEYLESS_PAGE + 2 * MIN_WINDOW, key="m")
    assert await ids(bench, 1) == blocked[:1]
    free = await bench.put(5)
    found, turns = await all_of(bench, 10)
    assert found == free
    assert turns < 8


async def put_later(bench: Bench) -> None:
    """Messages of more keys than a claim looks at, which are due in an hour."""
    await bench.store.insert(
        [NewMessage("q", b"0", key=f"b{n:03}", delay=3600.0) for n in range(MIN_WINDOW + 5)]
    )


async def test_a_claim_reports_that_there_may_be_more(bench: Bench) -> None:
    """So that no worker waits for the next poll while keys have not been scanned."""
    await bench.put(MIN_WINDOW + 5, key="a")
    await ids(bench, 1)
    await put_later(bench)
    [ready] = await bench.put(1, key="c")
    rows, again, cursors = await claim(bench)
    assert (rows, again) == ([], 0.0)
    rows, again, _ = await claim(bench, cursors=cursors)
    assert [r.id for r in rows] == [ready]
    assert again is not None
    assert 3_000 < again <= 3600, "the first of the heads that wait"


async def test_a_claim_after_a_failed_one_scans_the_same_keys(bench: Bench) -> None:
    """The cursors move with the commit."""
    await bench.put(MIN_WINDOW + 5, key="a")
    await ids(bench, 1)
    await put_later(bench)
    cursors = Cursors()
    _, again, moved = await claim(bench, cursors=cursors)
    assert again == 0
    assert cursors == Cursors()
    assert moved.keys == {"q": f"b{MIN_WINDOW - 2:03}"}


async def test_a_claim_knows_when_a_waiting_head_is_due(bench: Bench) -> None:
    """Its followers are due already, so that the pair says nothing of it."""
    await bench.put(1, key="a", delay=3600)
    await bench.put(2, key="a")
    rows, again, _ = await claim(bench)
    assert rows == []
    assert again is not None
    assert 3_000 < again <= 3600


async def test_expired_messages_of_a_key_go_together(bench: Bench) -> None:
    """They will not be handled: one at a time would take a claim each."""
    old = await bench.put(40, key="a", expires_in=0.0)
    [head, _] = await bench.put(2, key="a")
    rows, _, _ = await claim(bench, 1)
    assert sorted(row.id for row in rows) == [*old, head]


async def test_suspects_are_left_alone_and_hold_their_key(bench: Bench) -> None:
    await bench.put(2, key="a")
    [b] = await bench.put(1, key="b")
    await bench.execute(
        f"UPDATE message SET deliveries_count = 2 WHERE {bench.quoted('key')} = 'a'"
    )
    rows, _, _ = await claim(bench, suspect_rule=SuspectRule(report=False))
    assert [row.id for row in rows] == [b]


async def test_a_suspect_is_claimed_only_as_the_head_of_its_key(bench: Bench) -> None:
    [first, second] = await bench.put(2, key="a")
    [free] = await bench.put(1)

    async def one(message_id: int, *queues: str) -> list[int]:
        rows = await bench.store.claim_one(
            message_id, queues or ("q",), LEASE, uuid4(), ordered=True
        )
        return [row.id for row in rows]

    assert await one(second) == []
    assert await one(first, "other") == []
    assert await one(first) == [first]
    assert await one(second) == []
    assert await one(free) == [free]
    assert await one(10**6) == []


async def test_an_expired_suspect_is_claimed(bench: Bench) -> None:
    """To be discarded: else it would be found and given back for ever."""
    [expired] = await bench.put(1, key="a", expires_in=0.0)
    [head] = await bench.put(1, key="a")
    for message_id in (head, expired):
        rows = await bench.store.claim_one(message_id, ("q",), LEASE, uuid4(), ordered=True)
        assert [row.id for row in rows] == [message_id]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_keys_that_are_not_text_do_not_stop_claims(bench: Bench) -> None:
    """A foreign producer may store anything in SQLite."""
    await bench.put(2, key="a")
    await bench.execute("UPDATE message SET \"key\" = CAST(x'ff' AS TEXT)")
    [free] = await bench.put(1, key="b")
    rows, again, _ = await claim(bench)
    assert {row.id for row in rows} == {1, free}
    assert again is None
    assert await bench.store.claim_one(2, ("q",), LEASE, uuid4(), ordered=True) != []


async def test_an_old_lease_that_was_given_back_keeps_its_place(bench: Bench) -> None:
    [first, _] = await bench.put(2, key="a")
    assert await ids(bench) == [first]
    await bench.expire()
    assert await bench.store.release_stuck(("q",), 10) == 1
    rows, _, _ = await claim(bench)
    assert [(row.id, row.deliveries_count) for row in rows] == [(first, 2)]
    assert rows[0].acquired_at - rows[0].created_at < timedelta(seconds=600)

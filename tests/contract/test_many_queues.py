"""One subscriber of many queues: the same rows in the same order as queue by queue, and no others
locked."""

import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest
from sqlalchemy import Connection, bindparam, text

from faststream_sqlbroker.core.rows import ClaimedMessage, ClaimRequest, NewMessage, ReadyPair
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.mysql.many_queues import FIRST_ROWS, MAX_SINGLE_PAIRS
from faststream_sqlbroker.database.store import Store
from tests.contract.conftest import LEASE, Bench

QUEUES = [f"q{n:02d}" for n in range(30)]
PRIORITIES = (5, 0, -100)
COUNTS = (0, 1, 3, FIRST_ROWS - 1, FIRST_ROWS, FIRST_ROWS + 1, 2 * FIRST_ROWS + 3)
Place = tuple[str, int]

with_row_locks = pytest.mark.parametrize(
    "database", ["postgresql", "mariadb", "mysql"], indirect=True
)


async def fill(bench: Bench, *, seed: int) -> None:
    """A number of due rows, and some of a later day, in some of the pairs of queue and priority."""
    pick = random.Random(seed)
    rows = list[NewMessage]()
    for queue, priority in itertools.product(QUEUES, PRIORITIES):
        if pick.random() < 0.4:
            continue
        rows += [NewMessage(queue, b"x", priority=priority)] * pick.choice(COUNTS)
        rows += [NewMessage(queue, b"x", priority=priority, delay=86400)] * pick.choice((0, 2))
    pick.shuffle(rows)
    await bench.store.insert(rows)


async def due_rows(bench: Bench) -> dict[Place, list[int]]:
    """The ids of the rows that can be claimed, of each pair in their order."""
    now = await bench.store.server.read_now()
    found = dict[Place, list[int]]()
    rows = [
        r for r in await bench.rows() if r["state"] == "PENDING" and r["next_attempt_at"] <= now
    ]
    for row in sorted(rows, key=lambda r: (r["next_attempt_at"], r["id"])):
        found.setdefault((row["queue"], row["priority"]), []).append(row["id"])
    return found


def first(pairs: Sequence[ReadyPair], due: dict[Place, list[int]], limit: int) -> list[int]:
    """The rows that a claim should lease."""
    return [each for pair in pairs for each in due.get((pair.queue, pair.priority), ())][:limit]


@pytest.mark.parametrize("limit", [1, FIRST_ROWS, 25, 1000])
async def test_claims_over_many_pairs_keep_their_order(bench: Bench, limit: int) -> None:
    """Pair after pair as they are given, of each what is due in order; whatever the number of rows,
    or of pairs."""
    await fill(bench, seed=limit)
    asked = [*QUEUES[7:], *QUEUES[:7], "none"]
    looked = await bench.store.find_ready_pairs(asked)
    rows = [r for r in await bench.rows() if r["queue"] in asked]
    have = {(r["queue"], r["priority"]) for r in rows}
    assert [(p.queue, p.priority) for p in looked] == [
        pair for pair in itertools.product(asked, PRIORITIES) if pair in have
    ]
    due = await due_rows(bench)
    assert {(p.queue, p.priority) for p in looked if p.due_in <= 0} == set(due)
    # Some of them have nothing due, or nothing at all, as where pairs are remembered.
    pairs = [*looked, *(ReadyPair("none", n, 0.0) for n in PRIORITIES)]
    random.Random(limit).shuffle(pairs)
    for _ in range(5):
        claimed = await bench.store.claim(pairs, limit, LEASE, uuid4())
        assert [m.id for m in claimed] == first(pairs, due, limit)
        assert all(m.deliveries_count == 1 for m in claimed)
        due = await due_rows(bench)


@pytest.mark.parametrize("count", [1, MAX_SINGLE_PAIRS, MAX_SINGLE_PAIRS + 1])
async def test_claims_over_few_pairs_keep_their_order(bench: Bench, count: int) -> None:
    await fill(bench, seed=1)
    pairs = [p for p in await bench.store.find_ready_pairs(QUEUES) if p.due_in <= 0][:count]
    wanted = first(pairs, await due_rows(bench), 1000)
    assert [m.id for m in await bench.store.claim(pairs, 1000, LEASE, uuid4())] == wanted


async def test_suspects_are_left_alone_in_many_pairs(bench: Bench) -> None:
    await fill(bench, seed=2)
    due = await due_rows(bench)
    suspects = [ids[0] for ids in due.values()]
    marked = text("UPDATE message SET deliveries_count = 5 WHERE id IN :ids")
    async with bench.store.engine.begin() as connection:
        await connection.execute(
            marked.bindparams(bindparam("ids", expanding=True)), {"ids": suspects}
        )
    others = {pair: ids[1:] for pair, ids in due.items()}
    pairs = await bench.store.find_ready_pairs(QUEUES)
    claimed = await bench.store.claim(
        pairs, 100, LEASE, uuid4(), suspect_rule=SuspectRule(report=False)
    )
    assert [m.id for m in claimed] == first(pairs, others, 100)


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb", "mysql"], indirect=True)
async def test_queues_of_any_name(bench: Bench) -> None:
    names = ["it's", 'a"b', "a\\b", "%s", ":x", "{}", "ü€", "😀", "NULL", "$[0]", "-1", "a,b"]
    for name in names:
        await bench.put(1, name)
    others = [f"none{n}" for n in range(10)]
    pairs = await bench.store.find_ready_pairs([*others, *names])
    assert [p.queue for p in pairs] == names
    assert [m.queue for m in await bench.store.claim(pairs, 100, LEASE, uuid4())] == names
    await bench.expire()
    assert await bench.store.release_stuck([*others, *names], 100) == len(names)


@with_row_locks
async def test_rows_locked_elsewhere_are_skipped_in_many_pairs(bench: Bench, store: Store) -> None:
    """The rows behind them come in their place, before those of the next pair."""
    await fill(bench, seed=3)
    due = await due_rows(bench)
    locked = {each for n, ids in enumerate(due.values()) for each in ids[: n % 3]}
    free = {pair: [each for each in ids if each not in locked] for pair, ids in due.items()}
    pairs = await bench.store.find_ready_pairs(QUEUES)
    lock = text("SELECT id FROM message WHERE id = :id FOR UPDATE")
    async with store.engine.connect() as connection:
        for each in sorted(locked):
            await connection.execute(lock, {"id": each})
        for limit in (5, 50, 1000):
            claimed = await bench.store.claim(pairs, limit, LEASE, uuid4())
            assert [m.id for m in claimed] == first(pairs, free, limit)
            taken = {m.id for m in claimed}
            free = {pair: [each for each in ids if each not in taken] for pair, ids in free.items()}
        await connection.rollback()


@asynccontextmanager
async def claiming(
    store: Store, pairs: Sequence[ReadyPair], limit: int
) -> AsyncIterator[list[ClaimedMessage]]:
    """A claim that is not committed yet."""

    def claim(connection: Connection) -> list[ClaimedMessage]:
        store.dialect.begin(connection)
        return store.dialect.build_claim(ClaimRequest(pairs, limit, LEASE, uuid4()))(connection)

    async with store._engine.connect() as connection:
        yield await connection.run_sync(claim)
        await connection.rollback()


@with_row_locks
@pytest.mark.parametrize("limit", [1, 20, 100])
async def test_a_claim_locks_what_it_leases_and_nothing_else(
    bench: Bench, store: Store, limit: int
) -> None:
    """It locks no row behind the limit, no later row and no row of another queue."""
    await fill(bench, seed=4)
    await bench.put(5, "another")
    due = await due_rows(bench)
    pairs = await bench.store.find_ready_pairs(QUEUES)
    rest = text("SELECT id FROM message WHERE id = :id FOR UPDATE SKIP LOCKED")
    async with claiming(store, pairs, limit) as claimed, store.engine.connect() as other:
        taken = {m.id for m in claimed}
        assert len(taken) == limit
        ids = [r["id"] for r in await bench.rows()]
        free = {
            each for each in ids if (await other.execute(rest, {"id": each})).first() is not None
        }
        behind = set(ids) - taken - free
        # MariaDB reads, and locks, the row that follows the last due one of a pair that is claimed
        # by itself.
        alone = 1 + sum(
            len(due[pair]) >= FIRST_ROWS for pair in {(m.queue, m.priority) for m in claimed}
        )
        assert len(behind) <= (alone if store.dialect_name == "mariadb" else 0), behind
        await other.rollback()


@with_row_locks
async def test_two_claims_of_many_queues_share_what_is_there(bench: Bench, store: Store) -> None:
    """Both have seen the same rows: the second takes those behind the first's."""
    await fill(bench, seed=5)
    due = await due_rows(bench)
    pairs = await bench.store.find_ready_pairs(QUEUES)
    async with claiming(store, pairs, 40) as claimed:
        taken = {m.id for m in claimed}
        rest = {pair: [each for each in ids if each not in taken] for pair, ids in due.items()}
        assert [m.id for m in await store.claim(pairs, 40, LEASE, uuid4())] == first(
            pairs, rest, 40
        )


MANY = [f"many{n}" for n in range(1200)]
"""More than MariaDB takes in one IN without making a join of it."""


async def test_leases_are_given_back_over_many_queues(bench: Bench, store: Store) -> None:
    held = ["many3", "many700", "many1199"]
    for name in (*held, "other"):
        await bench.put(4, name)
    token = uuid4()
    pairs = [p for p in await store.find_ready_pairs([*MANY, "other"]) if p.due_in <= 0]
    assert len(await store.claim(pairs, 100, LEASE, token)) == 16
    assert await store.release_stuck(MANY, 100) == 0
    assert await store.release_claim(MANY, uuid4()) == 0
    assert await store.release_claim(MANY, token) == 12
    assert {r["queue"]: r["deliveries_count"] for r in await bench.rows()} == {
        **dict.fromkeys(held, 0),
        "other": 1,
    }
    assert len(await store.claim(pairs, 100, LEASE, token)) == 12
    await bench.expire()
    assert await store.release_stuck(MANY, 5) == 5
    assert await store.release_stuck(MANY, 100) == 7
    assert {r["queue"] for r in await bench.rows() if r["state"] == "PROCESSING"} == {"other"}


async def test_one_message_of_many_queues_and_the_order_of_many(bench: Bench, store: Store) -> None:
    [message] = await bench.put(1, "many1199", key="k")
    assert await store.claim_one(message, MANY[:-1], LEASE, uuid4()) == []
    [row] = await store.claim_one(message, MANY, LEASE, uuid4(), ordered=True)
    assert (row.id, row.queue) == (message, "many1199")

    async with store._engine.connect() as connection:
        await connection.run_sync(store.dialect.begin)
        assert await connection.run_sync(store.dialect.lock_order, MANY) == set(MANY)
        await connection.commit()
        assert await connection.run_sync(store.dialect.lock_order, MANY) == set(MANY)
        await connection.rollback()

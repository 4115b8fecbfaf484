"""The exact cost of a message: statements, round trips and rows written."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import uuid4

import aiosqlite
import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.core.policies import (
    Concurrency,
    Delay,
    Once,
    Policy,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.rows import NewMessage, ReadyPair, Unit
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.database.store import Store
from tests.contract.conftest import Bench, done
from tests.helpers import eventually
from tests.proxy import Proxy, proxied

SIZE = 100


class Steps:
    """Publish, claim and settle `SIZE` messages."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._claimed = list[Any]()

    async def publish(self) -> None:
        await self._bench.store.insert([NewMessage("q", b"1")])

    async def publish_batch(self) -> None:
        await self._bench.put(SIZE - 1)

    async def look(self) -> None:
        self._pairs = await self._bench.store.find_ready_pairs(["q"])

    async def claim(self) -> None:
        self._claimed = await self._bench.store.claim(self._pairs, SIZE, 60.0, uuid4())
        assert len(self._claimed) == SIZE

    async def settle(self) -> None:
        result = await self._bench.store.settle([done(row) for row in self._claimed])
        assert len(result.settled_ids) == SIZE


NAMES = "publish", "publish_batch", "look", "claim", "settle"


async def counted(bench: Bench, count: Callable[[], int]) -> dict[str, int]:
    """The rise of `count` by each step, once statements are prepared and connections made."""
    steps = Steps(bench)
    costs = {}
    for _ in range(2):
        for name in NAMES:
            step: Callable[[], Awaitable[None]] = getattr(steps, name)
            before = count()
            await step()
            costs[name] = count() - before
            await asyncio.sleep(0.06)  # the next one makes its own way
    return costs


@pytest.fixture
async def far(bench: Bench) -> AsyncIterator[tuple[Proxy, Bench]]:
    """The same tables behind a proxy that counts."""
    async with proxied(bench.store.engine.url) as (proxy, url):
        engine = create_async_engine(url, pool_size=1, max_overflow=0)
        yield proxy, Bench(Store(engine, bench.store.tables))
        await engine.dispose()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_batch_takes_one_round_trip_a_step(far: tuple[Proxy, Bench]) -> None:
    proxy, bench = far
    assert await counted(bench, lambda: proxy.round_trips) == dict.fromkeys(NAMES, 1)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("archive", [True, False])
async def test_acks_that_publish_take_one_round_trip(
    far: tuple[Proxy, Bench], archive: bool
) -> None:
    """As acks alone do; a caller of `request` waits for it."""
    proxy, bench = far
    for _ in range(2):
        await bench.put(SIZE)
        rows = await bench.claim(limit=SIZE)
        before = proxy.round_trips
        unit_of = {row.id: Unit([NewMessage("out", b"1", expires_in=60.0)]) for row in rows[::2]}
        result = await bench.store.settle(
            [done(row, archive=archive, unit=unit_of.get(row.id)) for row in rows]
        )
        cost = proxy.round_trips - before
        assert len(result.settled_ids) == SIZE
        await bench.execute("DELETE FROM message WHERE queue = 'out'")
    assert cost == 1


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    "policies",
    [
        [Window("00:00", "24:00")],
        [Delay(0.000001)],
        [Throttle(1_000_000, per="1s")],
        [Concurrency(1_000), Throttle(1_000_000, per="1s"), Once("1h")],
    ],
    ids=str,
)
async def test_a_claim_under_policies_takes_two_round_trips(
    far: tuple[Proxy, Bench], policies: list[Policy]
) -> None:
    """One to read, one to write. The first claim of a queue makes its row, and Delay shifts new
    messages, in a claim with more; so does one that tells others of its limit, once a second."""
    proxy, bench = far
    memory = ScanPosition()
    claims, size = 10, SIZE // 4
    await bench.put(claims * size)
    costs = list[int]()
    for _ in range(claims):
        before = proxy.round_trips
        wanted = PolicyClaimRequest(["q"], size, 60.0, uuid4(), policies)
        claim, memory = await bench.store.policies.claim(wanted, memory)
        costs.append(proxy.round_trips - before)
        assert len(claim.rows) == size
    assert min(costs[1:]) == 2, costs


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_free_keys_are_claimed_in_one_round_trip(far: tuple[Proxy, Bench]) -> None:
    """Of all messages that start together."""
    proxy, bench = far
    for n in range(2):
        await bench.store.insert([NewMessage("q", b"1", key=f"{n} {i}") for i in range(SIZE)])
        rows = await bench.claim(limit=SIZE)
        before = proxy.round_trips
        assert len(await bench.store.policies.claim_free_keys(rows, 60.0)) == SIZE
        cost = proxy.round_trips - before
    assert cost == 1


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_publish_in_the_callers_transaction_takes_one_round_trip(
    far: tuple[Proxy, Bench],
) -> None:
    proxy, bench = far
    for _ in range(2):
        async with bench.store.engine.begin() as connection:
            await bench.store.insert_in(connection, [NewMessage("q", b"0")])
            await bench.store.insert_in(connection, [NewMessage("q", b"0")])
            before = proxy.round_trips
            for n in range(10):
                await bench.store.insert_in(connection, [NewMessage("q", b"%d" % n)])
            cost = proxy.round_trips - before
    assert cost == 10


STATEMENTS = {
    "mariadb": {"publish": 2, "publish_batch": 9, "look": 1, "claim": 4, "settle": 5},
    "mysql": {"publish": 2, "publish_batch": 14, "look": 1, "claim": 4, "settle": 5},
    "sqlite": {"publish": 1, "publish_batch": 8, "look": 1, "claim": 1, "settle": 3},
}
"""Of SQLAlchemy's cursors: what is set for a transaction and put back, too; neither COMMIT nor what
SQLite's thread takes together. MySQL does not return ids: the step between them is read after each
INSERT of several rows."""


@pytest.mark.parametrize("database", ["mariadb", "mysql", "sqlite"], indirect=True)
async def test_a_batch_takes_few_statements_a_step(bench: Bench, database: str) -> None:
    seen: list[str] = []

    @event.listens_for(bench.store.engine.sync_engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    assert await counted(bench, lambda: len(seen)) == STATEMENTS[database]


@pytest.mark.parametrize("database", ["mariadb", "mysql", "sqlite"], indirect=True)
async def test_a_thousand_queues_take_as_few_statements_as_one(bench: Bench) -> None:
    """Twice as many at most, whether each has a row or only the last; PostgreSQL has one for each
    step."""
    seen: list[str] = []

    @event.listens_for(bench.store.engine.sync_engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    async def steps(queues: list[str]) -> dict[str, int]:
        store = bench.store
        costs = dict[str, int]()
        token = uuid4()
        claimed: list[Any] = []

        async def cost(name: str, step: Awaitable[Any]) -> Any:
            seen.clear()
            result = await step
            costs[name] = len(seen)
            return result

        pairs = await cost("look", store.find_ready_pairs(queues))
        claimed = await cost("claim", store.claim(pairs, SIZE, 60.0, token))
        assert len(claimed) == SIZE
        known = [ReadyPair(queue, 0, 0.0) for queue in queues]
        assert len(await cost("claim of what is known", store.claim(known, SIZE, 60.0, token))) == 1
        assert await cost("nothing to give back", store.release_stuck(queues, SIZE)) == 0
        assert await cost("give back a claim", store.release_claim(queues, token)) == SIZE + 1
        await store.claim(pairs, SIZE, 60.0, token)
        await bench.expire()
        assert await cost("give back what has expired", store.release_stuck(queues, SIZE)) == SIZE
        return costs

    await bench.put(SIZE + 1, "alone")
    one = await steps(["alone"])
    names = [f"q{n}" for n in range(1000)]
    await bench.store.insert([NewMessage(name, b"1") for name in names[-SIZE - 1 :]])
    many = await steps(names)
    assert {name: cost for name, cost in many.items() if cost > 2 * one[name]} == {}, (one, many)


@pytest.mark.usefixtures("new_tables")
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_each_message_is_written_four_times(bench: Bench) -> None:
    """Inserted, claimed, deleted; inserted into the archive."""
    steps = Steps(bench)
    for name in NAMES:
        await getattr(steps, name)()

    async def writes() -> bool:
        sql = (
            "SELECT relname, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_user_tables "
            "WHERE relname IN ('message', 'message_archive')"
        )
        async with bench.store.engine.connect() as connection:
            found = {name: tuple(counts) for name, *counts in await connection.execute(text(sql))}
        return found == {"message": (SIZE, SIZE, SIZE), "message_archive": (SIZE, 0, 0)}

    await eventually(writes)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_transaction_begins_in_one_call_of_sqlites_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call waits until the event loop has its next turn."""
    await bench.put(1)
    calls = list[str]()
    execute = aiosqlite.Connection._execute

    async def counting(connection: Any, function: Any, *args: Any, **options: Any) -> Any:
        calls.append(" ".join(map(str, args)))
        return await execute(connection, function, *args, **options)

    monkeypatch.setattr(aiosqlite.Connection, "_execute", counting)
    await bench.put(1)
    begins = [call for call in calls if "PRAGMA" in call or "BEGIN" in call]
    assert len(begins) == 1, begins
    assert begins[0].endswith("BEGIN IMMEDIATE")

"""A Galera cluster whose two servers take writes: neither sees the row locks of the other."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.util import await_only

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.core.policies import Concurrency
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, ReadyPair
from faststream_sqlbroker.database.parts.ordered import Cursors
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.database.store import Store
from tests.conftest import DRIVERS
from tests.contract.conftest import LEASE, Bench, done
from tests.helpers import eventually
from tests.quick_tables import TABLES
from tools.galera import Node, cluster
from tools.private import CannotDownloadError, CannotStartError

pytestmark = [
    pytest.mark.capability("Galera with several writers: limits of policies, order by key"),
    pytest.mark.parametrize("database", ["mariadb"], indirect=True),
    pytest.mark.usefixtures("database"),
]

Claim = Callable[[], Awaitable[list[ClaimedMessage]]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """The two servers, with an empty database."""
    try:
        with cluster(2) as nodes:
            for node, statement in zip(nodes, ("CREATE DATABASE app", "DO 0"), strict=True):
                admin = create_engine(node.url, isolation_level="AUTOCOMMIT")
                with admin.connect() as connection:
                    connection.execute(text("SET SESSION wsrep_sync_wait = 15"))
                    connection.execute(text(statement))
                    connection.execute(text("SHOW DATABASES"))  # waits for what the others did
                admin.dispose()
            yield nodes
    except CannotStartError as error:
        if os.environ.get("CI") and not isinstance(error, CannotDownloadError):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
async def benches(nodes: list[Node]) -> AsyncIterator[list[Bench]]:
    """A store on each server, whose reads wait for earlier commits on the other."""
    benches: list[Bench] = []
    for node in nodes:
        url = make_url(node.url).set(drivername=f"mariadb+{DRIVERS['mariadb']}", database="app")
        first = {"init_command": "SET SESSION wsrep_sync_wait = 15"}
        benches.append(Bench(Store(create_async_engine(url, connect_args=first), TABLES)))
    await benches[0].store.server.create_tables()
    yield benches
    for bench in benches:
        await bench.store.engine.dispose()


async def hold(
    bench: Bench, claim: Claim, opened: asyncio.Event
) -> asyncio.Task[list[ClaimedMessage]]:
    """Begin `claim`, and wait until its next step is the COMMIT, which waits for `opened`."""
    decided = asyncio.Event()

    def wait(_connection: object) -> None:
        decided.set()
        await_only(opened.wait())

    event.listen(bench.store.engine.sync_engine, "commit", wait, once=True)
    task = asyncio.ensure_future(claim())
    deciding = asyncio.ensure_future(decided.wait())
    await asyncio.wait({task, deciding}, return_when=asyncio.FIRST_COMPLETED)
    deciding.cancel()
    assert decided.is_set(), f"the claim ended before its COMMIT: {task}"
    return task


def limited(bench: Bench, queue: str, policy: Concurrency) -> Claim:
    """Claims of `queue` under `policy`."""
    position = ScanPosition()

    async def claim() -> list[ClaimedMessage]:
        nonlocal position
        request = PolicyClaimRequest([queue], 10, LEASE, uuid4(), [policy])
        result, position = await bench.store.policies.claim(request, position)
        return result.rows

    return claim


def ordered(bench: Bench, queue: str) -> Claim:
    """Claims of `queue` in the order of keys."""

    async def claim() -> list[ClaimedMessage]:
        pairs = [ReadyPair(queue, 0, 0.0)]
        rows, _, _ = await bench.store.claim_ordered(pairs, 10, LEASE, uuid4(), Cursors())
        return list(rows)

    return claim


@pytest.mark.parametrize(
    ("policy", "late_queue", "queue"),
    [
        (Concurrency(1), "limited", "limited"),
        (Concurrency(1, per_key=True), "keyed", "keyed"),
        (Concurrency(1, scope="budget"), "shared", "also_shared"),
        (None, "ordered", "ordered"),
    ],
    ids=str,
)
async def test_of_two_claims_at_once_one_leases(
    benches: list[Bench], policy: Concurrency | None, late_queue: str, queue: str
) -> None:
    """A message that is committed late lets each server choose another one. The first claim is
    committed, and known to both servers, between the decision of the second and its COMMIT."""
    queues = [late_queue, queue]
    claims = [
        limited(bench, name, policy) if policy is not None else ordered(bench, name)
        for bench, name in zip(benches, queues, strict=True)
    ]
    for bench, name, claim in zip(benches, queues, claims, strict=True):  # makes the rows to lock
        await bench.put(1, name, key="k")
        await bench.store.settle([done(row) for row in await claim()])
    opened = asyncio.Event()
    late, other = benches
    async with late.store.engine.connect() as connection:
        message = NewMessage(late_queue, b"late", key="k")
        [late_id] = await connection.run_sync(lambda c: late.store.dialect.insert(c, [message]))
        assert late_id is not None
        await other.put(2, "spare")  # each server counts its ids on its own, in steps
        [other_id] = await other.put(1, queue, key="k")
        assert late_id < other_id
        second = await hold(other, claims[1], opened)
        await connection.commit()
    leased = await claims[0]()
    assert [row.id for row in leased] == [late_id]
    rows = [row for row in await other.rows() if row["queue"] in queues]
    assert [row["id"] for row in rows if row["state"] == "PROCESSING"] == [late_id]
    opened.set()
    assert await second == []
    await late.store.settle([done(row) for row in leased])

    async def rest() -> list[ClaimedMessage]:
        return [row for claim in claims for row in await claim()]

    leased += await eventually(rest)
    assert {row.id for row in leased} == {late_id, other_id}


class Seen:
    """What the handlers of all brokers see."""

    def __init__(self) -> None:
        self.handled = 0
        self.running: Counter[str] = Counter()
        self.overlaps: list[str] = []

    def subscribe(self, broker: SqlBroker, queue: str, **options: Any) -> None:
        """Handle the messages of `queue`, several at a time unless the options forbid it."""

        @broker.subscriber(queue, max_workers=2, max_fetch_interval=0.05, **options)
        async def handle(number: int) -> None:
            self.running[queue] += 1
            if self.running[queue] > 1:
                self.overlaps.append(queue)
            await asyncio.sleep(0.001)
            self.running[queue] -= 1
            self.handled += 1


async def test_brokers_on_both_servers(benches: list[Bench]) -> None:
    """Conflicts are repeated until every message was handled, one at a time."""
    seen = Seen()
    brokers = [SqlBroker(bench.store.engine, logger=None) for bench in benches]
    for number in range(20):
        for queue in ("by_limit", "by_order"):
            await brokers[number % 2].publish(number, queue, key="k")
    try:
        for broker in brokers:
            seen.subscribe(broker, "by_limit", policies=[Concurrency(1)])
            seen.subscribe(broker, "by_order", ordered=True)
            await broker.start()
        await eventually(lambda: seen.handled == 40)
    finally:
        for broker in brokers:
            await broker.stop()
    assert seen.overlaps == []

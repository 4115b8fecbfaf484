"""Claims of several processes at once, in random order: no limit is ever exceeded.

Some compare and swap, some hold the lock, some go by keys. All the time messages come, end, are
retried, and come back from lost leases. Without the comparison the same test finds too many.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from faststream_sqlbroker.core.policies import Concurrency, Policy, Throttle, Window
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.seen import CompareAndSwap
from faststream_sqlbroker.core.policies.throttle import MAX_START_DELAY
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.database.policies.store import can_swap
from faststream_sqlbroker.database.query import Work
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.policies.clock import Clock

postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
PROCESSES = 4
LIMIT = 3
LEASE = 10_000_000.0
CLAIMS = 32
"""By each process."""
ROUNDS = 4
HOUR = 3600 * MICROSECONDS


@dataclass(frozen=True)
class Way:
    """One way to claim the same queue under the same limit."""

    policies: Sequence[Policy]
    ordered: bool = False

    def wanted(self, limit: int) -> PolicyClaimRequest:
        return PolicyClaimRequest(["q"], limit, LEASE, uuid4(), self.policies, self.ordered)


def ways(limit: Policy) -> list[Way]:
    """Two of four need no lock."""
    open_window = Window("00:00", "24:00")
    keyed = Concurrency(100, per_key=True)
    return [
        Way([limit]),
        Way([limit, open_window]),
        Way([limit, keyed] if isinstance(limit, Throttle) else [limit, Throttle(9, 1, key=True)]),
        Way([limit], ordered=True),
    ]


class Encounters:
    """After each transaction its process waits until others have ended some: so claims that have
    read meet others that have written."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.running = 0
        self.waiting = 0
        self.ended = 0
        self.changed = asyncio.Condition()
        self.most = 0
        """Messages that were leased at the same time."""

    @asynccontextmanager
    async def process(self) -> AsyncIterator[None]:
        self.running += 1
        yield
        async with self.changed:
            self.running -= 1
            self.changed.notify_all()

    def after(self, store: Store, looks: AsyncConnection) -> Callable[..., Any]:
        run = store.policies._database.run

        async def and_wait(*args: Any, **kwargs: Any) -> Any:
            found = await run(*args, **kwargs)
            leased = text("SELECT count(*) FROM message WHERE state = 'PROCESSING'")
            self.most = max(self.most, (await looks.execute(leased)).scalar_one())
            async with self.changed:
                self.ended += 1
                self.waiting += 1
                self.changed.notify_all()
                wanted = self.ended + self.random.randrange(2 * PROCESSES)
                # If all wait, all go on.
                await self.changed.wait_for(
                    lambda: self.ended >= wanted or self.waiting >= self.running
                )
                self.waiting -= 1
            return found

        return and_wait


@dataclass
class Crowd:
    """Processes with engines of their own on one queue."""

    clock: Clock
    stores: list[Store]
    random: Random
    encounters: Encounters
    memory: dict[tuple[int, int], ScanPosition] = field(
        default_factory=lambda: defaultdict(ScanPosition)
    )
    """Of each process under each way."""
    held: dict[int, ClaimedMessage] = field(default_factory=dict)
    started: int = 0

    async def put(self, store: Store) -> None:
        """Often before all others, so that claims which read before and after it choose others."""
        key, priority = str(self.random.randrange(9)), self.random.randint(-100, 100)
        await store.insert([NewMessage("q", b"1", key=key, priority=priority)])

    async def claim(self, store: Store, way: Way, memory: ScanPosition) -> ScanPosition:
        wanted = way.wanted(self.random.randint(1, 3))
        claim, memory = await store.policies.claim(wanted, memory)
        for row in claim.rows:
            assert row.id not in self.held, "leased twice"
            self.held[row.id] = row
        self.started += len(claim.rows)
        return memory

    async def end_one(self, store: Store) -> None:
        """At random: it is done, or retried at once."""
        if self.held:
            row = self.held.pop(self.random.choice(list(self.held)))
            state = self.random.choice([MessageState.COMPLETED, MessageState.RETRYABLE])
            await store.settle([Settlement(row.id, row.lease_token, state)])

    async def lose_one(self, store: Store) -> None:
        """A lease runs out, and the message comes back."""
        if self.held:
            row = self.held.pop(self.random.choice(list(self.held)))
            async with store.engine.begin() as connection:
                await connection.execute(
                    text(
                        "UPDATE message SET lease_expires_at = statement_timestamp() "
                        "- interval '1 hour' WHERE id = :id AND lease_token = :token"
                    ),
                    {"id": row.id, "token": row.lease_token},
                )
            await store.release_stuck(["q"], 10)

    async def run(self, ways: Sequence[Way], claims: int) -> None:
        async def process(number: int, store: Store) -> None:
            async with self.encounters.process():
                for n in range(number, number + claims):
                    way = n % len(ways)
                    await self.put(store)
                    found = await self.claim(store, ways[way], self.memory[number, way])
                    self.memory[number, way] = found
                    await self.random.choice([self.end_one, self.lose_one])(store)

        await asyncio.gather(*(process(*each) for each in enumerate(self.stores)))


def uncompared(
    swapping: Callable[[CompareAndSwap], Work[Any]],
) -> Callable[[CompareAndSwap], Work[Any]]:
    """Also if others have written since."""

    def any_version(swap: CompareAndSwap) -> Work[Any]:
        def work(connection: Connection) -> Any:
            counter = text("SELECT counter FROM message_policy_state WHERE scope = 'ordered'")
            now = connection.execute(counter).scalar_one()
            return swapping(replace(swap, version=now))(connection)

        return work

    return any_version


@pytest.fixture
async def crowd(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Crowd]:
    clock = Clock(database_url)
    await clock.prepare()
    random = Random(20)
    encounters = Encounters(random)
    clocks = [Clock(database_url) for _ in range(PROCESSES)]
    stores = [Store(each.engine, build_tables(SqlBrokerSchemaConfig())) for each in clocks]
    await stores[0].server.create_tables()
    stack = AsyncExitStack()
    for store in stores:
        await store.server.setup()
        monkeypatch.setattr(store.policies, "_database", copy(store.policies._database))
        looks = await stack.enter_async_context(store.engine.connect())
        await looks.execution_options(isolation_level="AUTOCOMMIT")
        monkeypatch.setattr(store.policies._database, "run", encounters.after(store, looks))
    async with stack:
        yield Crowd(clock, stores, random, encounters)
    for each in [clock, *clocks]:
        await each.engine.dispose()


@postgresql
async def test_leases_stay_within_the_limit(crowd: Crowd) -> None:
    """Also while other claims of the queue hold its lock, and leases are lost."""
    several = ways(Concurrency(LIMIT))
    assert [can_swap(way.wanted(1)) for way in several] == [True, True, False, False]
    await crowd.run(several, CLAIMS)
    assert crowd.encounters.most == LIMIT
    assert crowd.started > 5 * LIMIT


@postgresql
async def test_slots_stay_within_the_rate(crowd: Crowd) -> None:
    """Each slot is for one attempt: retries, and messages that come back, take another."""
    several = ways(Throttle(LIMIT, per="1h"))
    assert [can_swap(way.wanted(1)) for way in several] == [True, True, False, False]
    for n in range(ROUNDS):
        await crowd.run(several, CLAIMS // ROUNDS)
        assert crowd.started == (n + 1) * LIMIT
        await crowd.clock.set(crowd.clock.now + HOUR + MAX_START_DELAY + 1_000)


@postgresql
@pytest.mark.parametrize("limit", [Concurrency(LIMIT), Throttle(LIMIT, per="1h")], ids=str)
async def test_without_the_comparison_the_same_claims_exceed_it(
    crowd: Crowd, limit: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for store in crowd.stores:
        monkeypatch.setattr(
            store.dialect,
            "build_compare_and_swap",
            uncompared(store.dialect.build_compare_and_swap),
        )
    for n in range(10 * ROUNDS):
        await crowd.run(ways(limit)[:2], CLAIMS // ROUNDS)
        most = (
            crowd.encounters.most if isinstance(limit, Concurrency) else crowd.started - n * LIMIT
        )
        if most > LIMIT:
            return
        await crowd.clock.set(crowd.clock.now + HOUR + MAX_START_DELAY + 1_000)
    pytest.fail("no claim was too late: this tests nothing")

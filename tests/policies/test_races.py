"""The race of two claims under READ COMMITTED, by hand: one has read and written but not committed,
the other runs.

Without the queue's lock each of these interleavings breaks its policy, which the same test shows.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, delete, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.util import await_only

from faststream_sqlbroker.core.policies import Concurrency, Debounce, Policy, Throttle
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.policies.claims import PolicyClaims
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.database.policies.rows import PolicyRows
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.policies.clock import MICROSECONDS, Clock

QUEUE = "q"
WRITES = "save_states", "shift", "discard"
SWAP = "build_compare_and_swap"


@dataclass(frozen=True)
class Race:
    """One message is leased by a claim that is not committed yet; then another becomes visible."""

    name: str
    policies: Sequence[Policy] = ()
    ordered: bool = False
    late: bool = False
    """The other was written before the claim, and its commit is late; else it is new, and of a
    higher priority."""
    wait: float = 0.0
    """Seconds from the message to its claim; the late one was written in the middle, else just
    before the message."""

    def __str__(self) -> str:
        return self.name


RACES = [
    Race("ordered", ordered=True, late=True),
    Race("concurrency", [Concurrency(1)]),
    Race("concurrency-per-key", [Concurrency(1, per_key=True)]),
    Race("throttle", [Throttle(1, per="1h")]),
    Race("throttle-per-key", [Throttle(1, per="1h", key=True)]),
    Race("leading-debounce", [Debounce("1m", edge="leading")], late=True),
    Race("trailing-debounce", [Debounce("1m")], late=True, wait=60),
]


def noted(clock: Clock) -> ScanPosition:
    """That of a process which has noted before what may put messages off: it does so now and then,
    and would do it before it reads."""
    position = ScanPosition()
    position.intake.noted_at[QUEUE] = clock.of_process().monotonic()
    return position


class Hand:
    """Two claims, a late publisher and the clock, driven by the test."""

    def __init__(self, clock: Clock, store: Store, race: Race) -> None:
        self.clock = clock
        self.store = store
        self.race = race

    def wanted(self) -> PolicyClaimRequest:
        return PolicyClaimRequest(
            [QUEUE], 5, 3600.0, uuid4(), self.race.policies, self.race.ordered
        )

    async def put(self, **fields: Any) -> int:
        [message] = await self.store.insert([NewMessage(QUEUE, b"1", key="a", **fields)])
        assert message is not None
        return message

    async def claim(self) -> list[int]:
        """Another process claims; it never waits for the first."""
        claim = self.store.policies.claim(self.wanted(), noted(self.clock))
        found, _ = await asyncio.wait_for(claim, 120)
        return [row.id for row in found.rows]

    async def claim_first(self, connection: AsyncConnection) -> list[ClaimedMessage]:
        """The claim that is not committed."""
        await connection.begin()

        def work(sync: Connection) -> list[ClaimedMessage]:
            self.store.dialect.begin(sync)
            claims = PolicyClaims(self.store.dialect, self.clock.of_process())
            return claims.claim(sync, self.wanted(), noted(self.clock)).rows

        return await connection.run_sync(work)

    async def begin(self) -> None:
        """Nothing but the row that claims lock: the very first claim of a queue makes it, and
        others wait for that."""
        async with self.clock.engine.begin() as connection:
            for table in self.store.tables.broker_tables:
                await connection.execute(delete(table))
        await self.put()
        # A limit is noted once, by the first claim under it.
        limits = [p for p in self.race.policies if isinstance(p, Concurrency)] or [Concurrency(1)]
        claim, _ = await self.store.policies.claim(
            PolicyClaimRequest([QUEUE], 1, 3600.0, uuid4(), limits), ScanPosition()
        )
        [row] = claim.rows
        await self.store.settle([Settlement(row.id, row.lease_token, MessageState.COMPLETED)])

    async def leases(self) -> list[int]:
        table = self.store.tables.message
        async with self.clock.engine.connect() as connection:
            rows = await connection.execute(select(table.c.id).where(table.c.state == "PROCESSING"))
            return sorted(rows.scalars())


@pytest.fixture
async def hands(database_url: str) -> AsyncIterator[list[Hand]]:
    """One for each race, on the same database."""
    clock = Clock(database_url)
    await clock.prepare()
    tables = build_tables(SqlBrokerSchemaConfig())
    store = Store(clock.engine, tables, clock=clock.of_process())
    await store.server.create_tables()
    await store.server.setup()
    yield [Hand(clock, store, race) for race in RACES]
    await store.close()
    await clock.engine.dispose()


def before_writes(
    monkeypatch: pytest.MonkeyPatch, hand: Hand, connection: AsyncConnection
) -> list[str]:
    """Commit the first claim when the second has read everything; which write that was."""
    reached: list[str] = []

    def hook(owner: Any, name: str) -> None:
        write = getattr(owner, name)

        def first(*args: Any, **kwargs: Any) -> Any:
            if not reached:
                reached.append(name)
                await_only(connection.commit())
            return write(*args, **kwargs)

        monkeypatch.setattr(owner, name, first)

    def hook_swap(swapping: Any) -> None:
        def first(*args: Any) -> Any:
            query = swapping(*args)

            def work(other: Connection) -> Any:
                if not reached:
                    reached.append(SWAP)
                    await_only(connection.commit())
                return query(other)

            return work

        monkeypatch.setattr(hand.store.dialect, SWAP, first)

    for name in WRITES:
        hook(PolicyRows, name)
    hook(hand.store.dialect, "claim_ids")
    hook_swap(hand.store.dialect.build_compare_and_swap)
    return reached


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
@pytest.mark.parametrize("locking", [True, False], ids=["locked", "unlocked"])
async def test_two_claims_at_once_do_not_break_a_policy(hands: list[Hand], locking: bool) -> None:
    """Promise 7, Z7, Z10: with the lock never two leases; without it each of these interleavings
    gives two."""
    for hand in hands:
        with pytest.MonkeyPatch.context() as patch:
            if not locking:
                patch.setattr(hand.store.dialect, "lock_order", lambda _, queues: set(queues))
            await hand.begin()
            await interleave(hand, patch, locking=locking)


async def interleave(hand: Hand, patch: pytest.MonkeyPatch, *, locking: bool) -> None:
    race = hand.race
    engine = hand.clock.engine
    clock = hand.clock
    async with engine.connect() as publisher, engine.connect() as claimer:
        first, other = await published(hand, publisher)
        assert [row.id for row in await hand.claim_first(claimer)] == [first], race
        if race.late:
            await publisher.commit()
        else:
            other = await hand.put(priority=5)
        reached = before_writes(patch, hand, claimer)
        found = await hand.claim()
        if locking:
            # A claim without a lock finds that the version is another.
            assert (found, set(reached) - {SWAP}) == ([], set()), f"{race}: it has passed the lock"
            await claimer.commit()
            assert await hand.claim() == [], f"{race}: it has not seen what the first has written"
    # A trailing burst that the second claim has opened would end now.
    await clock.set(clock.now + 61 * MICROSECONDS)
    await hand.claim()
    assert await hand.leases() == ([first] if locking else sorted([first, other])), race


async def published(hand: Hand, publisher: AsyncConnection) -> tuple[int, int]:
    """The message that is claimed first, and the late one; 0 if there is none yet."""
    race = hand.race
    clock = hand.clock
    half = round(race.wait * MICROSECONDS) // 2
    await publisher.begin()
    if half:
        first = await hand.put()
        await clock.set(clock.now + half)
    late = (
        await hand.store.insert_in(publisher, [NewMessage(QUEUE, b"late", key="a")])
        if race.late
        else [0]
    )
    await clock.set(clock.now + (half or 1_000))
    if not half:
        first = await hand.put()
    return first, late[0] or 0

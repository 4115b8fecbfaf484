"""A queue of a real database, its clock, and the processes that claim from it; for models, which
are synchronous."""

import asyncio
from collections.abc import Coroutine, Sequence
from datetime import datetime, timedelta, timezone
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import uuid4

from sqlalchemy import delete, select, update

from faststream_sqlbroker.core.outcome import Ack, Defer, Discard, Nack, Outcome, Reject, Release
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.policies.request import (
    PolicyClaim,
    PolicyClaimRequest,
    ScanPosition,
)
from faststream_sqlbroker.database.policies.slot_use import SlotUse
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.policies.clock import MICROSECONDS, START, Clock

T = TypeVar("T")
LEASE = 30 * 86_400.0
PROCESSES = 3
QUEUE = "q"
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class World:
    """Empty at each `begin`; times are microseconds since 1970."""

    suspicion: SuspectRule | None = SuspectRule()
    """How claims know suspects; None: they lease them with others."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self.run(self._open())
        return self

    async def _open(self) -> None:
        self.clock = Clock(self.url, threads=False)
        await self.clock.prepare()
        tables = build_tables(SqlBrokerSchemaConfig())
        self.process_clock = self.clock.of_process()
        self.store = Store(self.clock.engine, tables, clock=self.process_clock)
        await self.store.server.create_tables()
        await self.store.server.setup()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run(self.store.close())
        self.run(self.clock.engine.dispose())
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`."""
        return self._runner.run(work)

    @property
    def now(self) -> int:
        """The time of the database's clock."""
        return self.clock.now

    def begin(self, policies: Sequence[Policy], *, ordered: bool = False) -> None:
        """Empty the tables; the processes know nothing and have these policies."""
        self.policies = policies
        self.ordered = ordered
        self.memories = [self.new_memory() for _ in range(PROCESSES)]
        self.run(self._empty())

    def new_memory(self) -> ScanPosition:
        """Of a process whose claims have taken no time."""
        return ScanPosition(
            durations=[0.0], swap_durations=[0.0], slot_use=SlotUse(self.process_clock)
        )

    async def _empty(self) -> None:
        await self.clock.set(round(START.timestamp()) * MICROSECONDS)
        async with self.clock.engine.begin() as connection:
            for table in self.store.tables.broker_tables:
                await connection.execute(delete(table))

    def advance(self, length: int) -> None:
        """Let time pass."""
        self.run(self.clock.set(self.now + length))

    def put(
        self, key: str | None, *, delay: int = 0, ago: int = 0, ahead: int = 0, **fields: Any
    ) -> int:
        """Publish; `ago`: it was written so long ago, and its commit is seen only now; `ahead`: by
        a clock that is."""
        return self.put_many(1, key, delay=delay, ago=ago, ahead=ahead, **fields)[0]

    def put_many(
        self,
        count: int,
        key: str | None,
        *,
        delay: int = 0,
        ago: int = 0,
        ahead: int = 0,
        **fields: Any,
    ) -> list[int]:
        """Publish so many alike."""
        return self.put_each([key] * count, delay=delay, ago=ago, ahead=ahead, **fields)

    def put_each(
        self,
        keys: Sequence[str | None],
        *,
        delay: int = 0,
        ago: int = 0,
        ahead: int = 0,
        **fields: Any,
    ) -> list[int]:
        """Publish a message of each of `keys`, in one statement."""
        given = {"delay": delay / MICROSECONDS, **fields}
        messages = [NewMessage(QUEUE, b"1", key=key, **given) for key in keys]
        ids = [each for each in self.run(self.store.insert(messages)) if each is not None]
        assert len(ids) == len(keys)
        if ago or ahead:
            self.run(self._written(ids, ago, ahead, delay))
        return ids

    async def _written(self, ids: Sequence[int], ago: int, ahead: int, delay: int) -> None:
        at = EPOCH + timedelta(microseconds=self.now - ago)
        created = at + timedelta(microseconds=ahead)
        table = self.store.tables.message
        async with self.clock.engine.begin() as connection:
            await connection.execute(
                update(table)
                .where(table.c.id.in_(ids))
                .values(created_at=created, next_attempt_at=at + timedelta(microseconds=delay))
            )

    def claim(
        self,
        process: int,
        limit: int,
        starting: int | None = None,
        wave: int = 1,
        wave_time: float = 0.0,
    ) -> PolicyClaim:
        """A claim of one of the processes, of which `starting` workers are free; None: enough. What
        waits starts by `wave`s, `wave_time` seconds after each other.
        """
        wanted = PolicyClaimRequest(
            [QUEUE],
            limit,
            LEASE,
            uuid4(),
            self.policies,
            self.ordered,
            suspect_rule=self.suspicion,
            starting=starting,
            wave=wave,
            wave_time=wave_time,
        )
        claim, self.memories[process] = self.run(
            self.store.policies.claim(wanted, self.memories[process])
        )
        return claim

    def settle(self, row: ClaimedMessage, outcome: Outcome) -> None:
        """End a delivery."""
        self.settle_all([(row, outcome)])

    def settle_all(self, ended: Sequence[tuple[ClaimedMessage, Outcome]]) -> None:
        """End several."""
        written = [
            settle(
                row,
                outcome,
                SettleRules(),
                ended_after=0.0,
                attempted=isinstance(outcome, Ack | Nack | Reject),
            )
            for row, outcome in ended
        ]
        if written:
            settled = self.run(self.store.settle(written)).settled_ids
            assert settled == {row.id for row, _ in ended}

    def crash(self, row: ClaimedMessage) -> None:
        """Its worker is gone; the lease runs out, and the message is given back."""
        self.run(self._expire(row.id))
        assert self.run(self.store.release_stuck([QUEUE], 100)) == 1

    async def _expire(self, message: int) -> None:
        table = self.store.tables.message
        past = START - timedelta(days=1)
        async with self.clock.engine.begin() as connection:
            await connection.execute(
                update(table).where(table.c.id == message).values(lease_expires_at=past)
            )

    def live(self) -> dict[int, dict[str, Any]]:
        """The messages of the queue, by id."""
        return self.run(self._rows(self.store.tables.message))

    def archived(self) -> dict[int, dict[str, Any]]:
        """Those that have left it."""
        return self.run(self._rows(self.store.tables.archive))

    async def _rows(self, table: Any) -> dict[int, dict[str, Any]]:
        async with self.clock.engine.connect() as connection:
            rows = await connection.execute(select(table).order_by(table.c.id))
            return {row.id: dict(row._mapping) for row in rows}


def microseconds(at: datetime) -> int:
    """Since 1970."""
    return (at - EPOCH) // timedelta(microseconds=1)


def outcome(how: str, delay: int) -> Outcome:
    """How a delivery ends."""
    seconds = delay / MICROSECONDS
    return {
        "ack": Ack(),
        "nack": Nack(delay=seconds),
        "reject": Reject(),
        "postpone": Defer(seconds),
        "release": Release(),
        "expired": Discard("expired"),
    }[how]

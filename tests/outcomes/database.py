"""A database of messages in memory, which settles as all do (`parts.units`), and answers when it
is told to."""

import asyncio
import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock
from uuid import UUID, uuid4

from faststream_sqlbroker.core.rows import NewMessage, Settlement, SettleResult
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.parts.units import settle_units
from faststream_sqlbroker.exceptions import (
    AccessError,
    StoreError,
    TransientStoreError,
    UnknownOutcomeError,
)

Mark = tuple[int, UUID]
ACK = "acked or moved"
FAILED = "a failed attempt"
BACK = "back in its queue"


@dataclass
class Rows:
    """What is committed."""

    tokens: dict[int, UUID | None] = field(default_factory=dict)
    """Live messages, with the tokens of their leases."""
    written: dict[Mark, str] = field(default_factory=dict)
    """What came of each delivery that was settled."""
    answers: Counter[bytes] = field(default_factory=Counter)


class Database:
    """The dialect's side: what one transaction does."""

    outwaits_clients = False
    time_limit = 30.0

    def __init__(self) -> None:
        self.rows = Rows()
        self.locked: set[int] = set()
        """Rows that another session has locked."""
        self.held: set[bytes] = set()
        """Answers that wait for another session's open transaction: a passing failure, for as long
        as that lasts."""
        self.refused: set[bytes] = set()
        """Answers that a constraint refuses."""
        self.denied: set[bytes] = set()
        """Answers for which a right is missing."""
        self.refused_rows: set[int] = set()
        """Rows that a trigger keeps from being settled."""

    def limit_lock_wait(self, _connection: Any, _seconds: float) -> Any:
        return nullcontext()

    def lock(self, _connection: Any, leases: Any, *, skip_locked: bool = False) -> set[int]:
        held = self.find_held(None, leases)
        if held & self.locked and not skip_locked:
            raise TransientStoreError("waited for a lock for too long")
        return held - self.locked

    def find_held(self, _connection: Any, leases: Any) -> set[int]:
        return {i for i, token in leases if self.rows.tokens.get(i) == token}

    def settle(self, _connection: Any, settlements: Sequence[Settlement]) -> SettleResult:
        held = self.lock(None, [(s.id, s.lease_token) for s in settlements])
        for s in settlements:
            if s.id not in held:
                continue
            if s.id in self.refused_rows:
                raise StoreError("a trigger")
            assert (s.id, s.lease_token) not in self.rows.written, "written twice"
            gone = s.is_final or s.queue is not None
            acked = gone and s.state is not MessageState.FAILED
            self.rows.written[s.id, s.lease_token] = (
                ACK if acked else FAILED if s.attempted else BACK
            )
            if gone:
                del self.rows.tokens[s.id]
            else:
                self.rows.tokens[s.id] = None
        return SettleResult(held, {s.id for s in settlements} - held)

    def wait_for_dedup_ids(self, _connection: Any, _rows: Sequence[NewMessage]) -> None:
        """As where an insert waits by itself."""

    def insert(self, _connection: Any, rows: Sequence[NewMessage]) -> list[int | None]:
        for row in rows:
            if row.payload in self.held:
                raise TransientStoreError("somebody's open transaction")
            if row.payload in self.denied:
                error = AccessError("a right")
                error.only_answers = True
                raise error
            if row.payload in self.refused:
                raise StoreError("a constraint")
            self.rows.answers[row.payload] += 1
        return [None] * len(rows)

    def claim(self, limit: int) -> list[Mark]:
        """Lease what is free."""
        marks = [(i, uuid4()) for i, token in self.rows.tokens.items() if token is None][:limit]
        self.rows.tokens.update(marks)
        return marks

    def settle_whole(
        self, settlements: Sequence[Settlement], *, skip_locked: bool = False
    ) -> SettleResult:
        """One transaction."""
        dialect: Any = self
        before = copy.deepcopy(self.rows)
        try:
            return settle_units(dialect, Mock(), settlements, skip_locked=skip_locked)
        except StoreError:
            self.rows = before
            raise


class Store:
    """The store's side: each call waits until the machine lets it be answered."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.dialect = Mock(has_archive=True)
        self.calls: list[asyncio.Future[str]] = []

    async def settle(
        self, settlements: Sequence[Settlement], *, skip_locked: bool = False
    ) -> SettleResult:
        call = asyncio.get_running_loop().create_future()
        self.calls.append(call)
        try:
            mood = await call
        finally:
            self.calls.remove(call)
        if mood == "down":
            raise TransientStoreError("down")
        if mood == "unknown, not committed":
            raise UnknownOutcomeError("no answer")
        result = self.database.settle_whole(settlements, skip_locked=skip_locked)
        if mood == "unknown, committed":
            raise UnknownOutcomeError("no answer")
        return result

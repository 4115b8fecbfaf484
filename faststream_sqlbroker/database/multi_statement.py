"""The path of databases without DELETE … RETURNING inside INSERT: short statements in one
transaction.

MySQL, MariaDB and SQLite share the order of the steps; each brings its own SQL. Every settle first
reads (and locks) the rows whose lease is still held, then touches exactly those ids: an unlocked
INSERT … SELECT followed by DELETE duplicated a row that was released in between.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.rows import (
    Claimed,
    ClaimedMessage,
    Leases,
    NewMessage,
    Prefetch,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.handler_locks import ENDED, HandlerLock, HandlerLocks
from faststream_sqlbroker.database.parts.ordered import OrderedClaims
from faststream_sqlbroker.database.parts.sizes import SizeLimit, chunks, parts_that_fit
from faststream_sqlbroker.database.parts.units import settle_units
from faststream_sqlbroker.database.query import Work
from faststream_sqlbroker.database.rights import PUBLISHED
from faststream_sqlbroker.exceptions import TransactionEndedError
from faststream_sqlbroker.schema.tables import Tables

ROWS_PER_INSERT = (512, 64, 8, 1)
"""Sizes of multi-row inserts: few statements to compile and cache."""

_BIND = re.compile(r":\w+")


class MultiStatementDialect(Dialect):
    """Shared steps; the statements have the same names on each database."""

    row_locks = True
    """Whether rows are locked one by one."""
    insert_row: str
    """VALUES of one inserted row."""

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        super().__init__(tables, sqlalchemy_dialect)
        self.ordered = OrderedClaims(self)
        self.handler_locks = MarkedLocks(self)
        self._inserts: dict[tuple[int, str], TextClause] = {}

    def insert_statement(self, count: int, tail: str = "") -> TextClause:
        """The INSERT of `count` rows ending in `tail`, made once."""
        made = self._inserts.get((count, tail))
        if made is None:
            key = self.names["key_column"]
            columns = ", ".join(key if name == "key" else name for name in PUBLISHED)
            rows = (_BIND.sub(rf"\g<0>_{n}", self.insert_row) for n in range(count))
            values = ",\n".join(rows)
            # The dialect has quoted the names.
            head = f"INSERT INTO {self.names['message']} ({columns})"
            made = self._inserts[count, tail] = text(f"{head}\nVALUES {values}\n{tail}".strip())
        return made

    def insert_binds(self, rows: Sequence[NewMessage]) -> dict[str, Any]:
        """Binds of `insert_statement(len(rows))`."""
        binds: dict[str, Any] = {}
        for n, r in enumerate(rows):
            binds[f"queue_{n}"] = r.queue
            binds[f"payload_{n}"] = r.payload
            binds[f"headers_{n}"] = r.headers
            binds[f"priority_{n}"] = r.priority
            binds[f"key_{n}"] = r.key
            binds[f"dedup_id_{n}"] = r.dedup_id
            binds[f"at_{n}"] = (
                None if r.next_attempt_at is None else self.bind_time(r.next_attempt_at)
            )
            binds[f"delay_{n}"] = round((r.delay or 0.0) * 1_000_000)
            binds[f"expires_{n}"] = (
                None if r.expires_in is None else round(r.expires_in * 1_000_000)
            )
        return binds

    def delete_binds(self, ids: Sequence[int]) -> dict[str, Any]:
        """Binds of the statement "delete"."""
        return {"ids": ids}

    def removing(self, ids: Sequence[int]) -> Work[None]:
        """One DELETE by the primary key."""

        def remove(connection: Connection) -> None:
            connection.execute(self.sql["delete"], self.delete_binds(ids))

        return remove

    @abstractmethod
    def insert_plain(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int]:
        """Insert rows without dedup_id in one statement; ids in order."""

    @abstractmethod
    def insert_dedup(self, connection: Connection, row: NewMessage) -> int | None:
        """Insert one row with a dedup_id; None if it exists."""

    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """Multi-row inserts in the order given; rows with a dedup_id go one by one."""
        limit = self.size_limit(connection)
        limit.check(rows)
        ids: list[int | None] = []
        start = 0
        while start < len(rows):
            if rows[start].dedup_id is not None:
                ids.append(self.insert_dedup(connection, rows[start]))
                start += 1
                continue
            end = start
            while end < len(rows) and rows[end].dedup_id is None:
                end += 1
            plain = rows[start:end]
            while plain:
                sizes = [s for s in ROWS_PER_INSERT if s <= len(plain)]
                size = next(s for s in sizes if s == 1 or limit.together(plain[:s]))
                ids.extend(self.insert_plain(connection, plain[:size]))
                plain = plain[size:]
            start = end
        return ids

    def ready_pairs(
        self, connection: Connection, queues: Sequence[str], *, only_open: bool = False
    ) -> ReadyPairs:
        """One statement: a few index searches for each queue, however many rows there are. SQLite
        says of a pair, too, whether it has an invalid due time: it counts as due, and the claim
        repairs it.
        """
        statement = self.sql["open_pairs" if only_open else "ready_pairs"]
        rows = connection.execute(statement, {"queues": json.dumps(list(queues))})
        return ReadyPairs(
            ReadyPair(queue, priority, min(due_in, 0.0), unusable=True)
            if any(unusable)
            else ReadyPair(queue, priority, float(due_in))
            for queue, priority, due_in, *unusable in rows
            if due_in is not None
        )

    def held(self, connection: Connection, statement: str, leases: Leases) -> set[tuple[int, str]]:
        """The given (id, token) pairs that are still in the table, by `statement`."""
        wanted = {(i, token.hex) for i, token in leases}
        ids = sorted({i for i, _ in leases})
        found: set[tuple[int, str]] = set()
        for part in chunks(ids):
            rows = connection.execute(self.sql[statement], {"ids": list(part)})
            found |= {(row[0], row[1]) for row in rows}
        return wanted & found

    @abstractmethod
    def find(
        self,
        connection: Connection,
        statement: str,
        binds: dict[str, Any],
        token: UUID,
        suspicion: Suspicion | None,
    ) -> Claimed:
        """Lock (or lease at once) what `statement` finds, but no suspects; in the order of due time
        and id.
        """

    def take(
        self, connection: Connection, found: Sequence[ClaimedMessage], lease: float, token: UUID
    ) -> None:
        """Lease the rows found, unless `find` has leased them already."""

    def claim_ids(
        self,
        connection: Connection,
        ids: Sequence[int],
        queues: Sequence[str],
        lease: float,
        token: UUID,
        *,
        suspicion: Suspicion | None = None,
    ) -> Claimed:
        """As `claiming`, of these rows."""
        found = Claimed()
        for part in chunks(sorted(ids)):
            for names in chunks(queues):
                binds: dict[str, Any] = {
                    "ids": list(part),
                    "queues": list(names),
                    "limit": len(part),
                }
                binds |= lease_binds(lease, token)
                rows = self.find(connection, "claim_ids", binds, token, suspicion)
                found += rows
                found.suspects |= rows.suspects
        self.take(connection, found, lease, token)
        return found

    def renew(self, connection: Connection, leases: Leases, lease: float) -> set[int]:
        """Look, lock, lengthen.

        `lock` locks by id alone. A row whose lease was lost may be locked for long by its new
        holder, so only rows that are still held are locked.
        """
        held = self.still_held(connection, leases)
        locked = self.lock(connection, [each for each in leases if each[0] in held])
        self.lengthen(connection, locked, lease)
        return locked

    def renew_free(
        self, connection: Connection, leases: Leases, lease: float
    ) -> tuple[set[int], set[int]]:
        """Lock, lengthen; what is locked elsewhere is only looked up."""
        free = self.lock(connection, leases, skip_locked=True)
        self.lengthen(connection, free, lease)
        rest = [each for each in leases if each[0] not in free]
        return free, self.still_held(connection, rest) if rest else set()

    def lengthen(self, connection: Connection, ids: Collection[int], lease: float) -> None:
        """Lengthen the leases of `ids`, which the transaction has locked."""
        for part in chunks(sorted(ids)):
            connection.execute(
                self.sql["renew"], {"ids": list(part), "lease": round(lease * 1_000_000)}
            )

    def lock(
        self, connection: Connection, leases: Leases, *, skip_locked: bool = False
    ) -> set[int]:
        """Lock in the order of ids."""
        return {i for i, _ in self.held(connection, "lock_free" if skip_locked else "lock", leases)}

    def still_held(self, connection: Connection, leases: Leases) -> set[int]:
        """By ids."""
        return {i for i, _ in self.held(connection, "look", leases)}

    def settle(self, connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
        """Lock the rows still held in id order, and settle those."""
        held = self.held(connection, "lock", [(s.id, s.lease_token) for s in settlements])
        ours = [s for s in settlements if (s.id, s.lease_token.hex) in held]
        self.settle_locked(connection, ours)
        settled = {s.id for s in ours}
        return SettleResult(settled, {s.id for s in settlements} - settled)

    def settle_locked(self, connection: Connection, ours: Sequence[Settlement]) -> None:
        """Copy the rows that are kept, delete or update exactly those of `ours`, which the
        transaction has locked.
        """
        limit = self.size_limit(connection)
        leaving = [s for s in ours if s.leaves]
        kept = [s for s in leaving if s.archive and self.has_archive]
        for part in chunks(kept):
            for rows in parts_that_fit(limit, part, rows_json):
                connection.execute(self.sql["archive"], {"rows": rows})
        for part in chunks(leaving):
            connection.execute(self.sql["delete"], self.delete_binds([s.id for s in part]))
        self._update(connection, limit, [s for s in ours if not s.leaves])

    def _update(
        self, connection: Connection, limit: SizeLimit, staying: Sequence[Settlement]
    ) -> None:
        """Update rows that stay in the message table; then bodies and headers, which few change."""
        for part in chunks(staying):
            for rows in parts_that_fit(limit, part, rows_json):
                connection.execute(self.sql["update"], {"rows": rows})
        for s in staying:
            if s.payload is not None:
                limit.check_parts(s.payload)
                connection.execute(self.sql["payload"], {"id": s.id, "payload": s.payload})
        for part in chunks([s for s in staying if s.headers is not None]):
            for rows in parts_that_fit(limit, part, headers_json):
                connection.execute(self.sql["headers"], {"rows": rows})


def lease_binds(lease: float, token: UUID) -> dict[str, Any]:
    """The binds of what leases: the token, and microseconds."""
    return {"token": token.hex, "lease": round(lease * 1_000_000)}


def note_prefetched(
    found: Sequence[ClaimedMessage], prefetch: Prefetch
) -> Sequence[ClaimedMessage]:
    """Mark the rows that wait for a worker; returns the other rows."""
    for row in found[prefetch.after :]:
        row.prefetched = True
    return found[: prefetch.after]


def rows_json(settlements: Sequence[Settlement]) -> str:
    """The settlements as one JSON bind: arrays in the order the SQL reads them."""
    return json.dumps(
        [
            [
                s.id,
                s.state and s.state.name,
                int(s.attempted),
                -int(s.uncharge),
                round(s.ended_after * 1_000_000) if s.attempted or s.ran else None,
                s.reason,
                s.error,
                None if s.delay is None else round(s.delay * 1_000_000),
                s.queue,
                s.related_id,
                int(s.published_again),
                s.hop,
                s.fingerprint,
                s.key,
            ]
            for s in settlements
        ]
    )


def headers_json(settlements: Sequence[Settlement]) -> str:
    """The new headers of settlements as one JSON bind."""
    return json.dumps([[s.id, s.headers] for s in settlements])


def utc(value: datetime) -> datetime:
    """`value` in UTC."""
    return value.astimezone(timezone.utc)


class MarkedLocks(HandlerLocks):
    """A savepoint, and a mark in the rows: transactions have no numbers here."""

    def __init__(self, dialect: MultiStatementDialect) -> None:
        self._dialect = dialect

    def lock(self, connection: Connection, leases: Leases, idle_limit: float) -> HandlerLock:
        """Mark the rows, which locks them; if a lease was lost, find out which are still held."""
        self._dialect.begin(connection, idle_limit)
        marked = 0
        ordered = sorted(leases)
        for part in chunks(ordered):
            binds = {"ids": [i for i, _ in part], "pairs": [(i, token.hex) for i, token in part]}
            marked += connection.execute(self._dialect.sql["join"], binds).rowcount
        held = (
            {i for i, _ in leases}
            if marked == len(leases)
            else self._dialect.lock(connection, leases)
        )
        connection.exec_driver_sql("SAVEPOINT sqlbroker_joined")
        return HandlerLock(leases, held)

    def prove(self, connection: Connection, lock: HandlerLock) -> None:  # noqa: ARG002
        """Release the savepoint, and with it any that the handler has left open."""
        try:
            connection.exec_driver_sql("RELEASE SAVEPOINT sqlbroker_joined")
        except DBAPIError as error:
            if error.connection_invalidated or (
                error.orig and self._dialect.is_transient(error.orig)
            ):
                raise
            raise TransactionEndedError(ENDED) from error

    def settle(
        self, connection: Connection, lock: HandlerLock, settlements: Sequence[Settlement]
    ) -> SettleResult:
        """Settle as the flush does, without a search for the rows that are held: the lock knows."""
        self.prove(connection, lock)
        return settle_units(self._dialect, connection, settlements, settle=self._settle)

    def _settle(self, connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
        self._dialect.settle_locked(connection, settlements)
        return SettleResult({s.id for s in settlements})

    def was_committed(self, connection: Connection, lock: HandlerLock) -> bool:
        """Look for the marks in the rows."""
        return bool(self._dialect.held(connection, "joined", lock.leases))

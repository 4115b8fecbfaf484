"""Dialects of databases without DELETE … RETURNING inside INSERT: several short statements.

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
    ClaimedMessage,
    ClaimedMessages,
    Leases,
    NewMessage,
    Prefetch,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.handler_locks import (
    TRANSACTION_ENDED,
    HandlerLock,
    HandlerLocks,
)
from faststream_sqlbroker.database.parts.ordered import OrderedClaims
from faststream_sqlbroker.database.parts.sizes import SizeLimit, iter_chunks, split_to_fit
from faststream_sqlbroker.database.parts.units import settle_units
from faststream_sqlbroker.database.query import Work
from faststream_sqlbroker.database.rights import PUBLISH_COLUMNS
from faststream_sqlbroker.exceptions import TransactionEndedError
from faststream_sqlbroker.schema.tables import Tables

ROWS_PER_INSERT = (512, 64, 8, 1)
"""Sizes of multi-row inserts: few statements to compile and cache."""

_BIND = re.compile(r":\w+")


class MultiStatementDialect(Dialect):
    """The steps shared by MySQL, MariaDB and SQLite; the statements have the same names on each."""

    insert_row: str
    """VALUES of one inserted row."""

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        super().__init__(tables, sqlalchemy_dialect)
        self.ordered = OrderedClaims(self)
        self.handler_locks = MarkedLocks(self)
        self._inserts: dict[tuple[int, str], TextClause] = {}

    def get_insert_statement(self, count: int, tail: str = "") -> TextClause:
        """Return the INSERT of `count` rows with `tail`, such as a RETURNING; built once.

        Each row has its own binds, with the row's number at the end of their names.
        """
        statement = self._inserts.get((count, tail))
        if statement is None:
            key = self.names["key_column"]
            columns = ", ".join(key if name == "key" else name for name in PUBLISH_COLUMNS)
            rows = (_BIND.sub(rf"\g<0>_{n}", self.insert_row) for n in range(count))
            values = ",\n".join(rows)
            # The dialect has quoted the names.
            head = f"INSERT INTO {self.names['message']} ({columns})"
            statement = self._inserts[count, tail] = text(
                f"{head}\nVALUES {values}\n{tail}".strip()
            )
        return statement

    def build_insert_binds(self, rows: Sequence[NewMessage]) -> dict[str, Any]:
        """Build the binds of the INSERT of `rows`; each name ends with the row's number.

        Durations are in microseconds.
        """
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

    def build_delete_binds(self, ids: Sequence[int]) -> dict[str, Any]:
        """Build the binds of the statement "delete"."""
        return {"ids": ids}

    def build_remove(self, ids: Sequence[int]) -> Work[None]:
        """Build a DELETE by the primary key."""

        def remove(connection: Connection) -> None:
            connection.execute(self.sql["delete"], self.build_delete_binds(ids))

        return remove

    @abstractmethod
    def insert_plain(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int]:
        """Insert rows without dedup_id in a single statement; return their ids in order."""

    @abstractmethod
    def insert_dedup(self, connection: Connection, row: NewMessage) -> int | None:
        """Insert a row with a dedup_id; return None if the dedup_id exists."""

    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows` in order, several per statement; return the ids, None for duplicates.

        A row with a dedup_id is inserted alone: the result of a shared statement does not say which
        of its rows is a duplicate.
        """
        limit = self.get_size_limit(connection)
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
                # The largest of a few sizes that fits: each size is a statement to compile and
                # cache.
                sizes = [s for s in ROWS_PER_INSERT if s <= len(plain)]
                size = next(s for s in sizes if s == 1 or limit.can_share_statement(plain[:s]))
                ids.extend(self.insert_plain(connection, plain[:size]))
                plain = plain[size:]
            start = end
        return ids

    def find_ready_pairs(
        self, connection: Connection, queues: Sequence[str], *, only_open: bool = False
    ) -> ReadyPairs:
        """Find the pairs in a single statement: a few index searches per queue, however many rows.

        A pair is a queue and a priority with waiting messages. SQLite also reports whether a pair
        has an invalid due time: it counts as due, and the claim repairs it.
        """
        statement = self.sql["open_pairs" if only_open else "ready_pairs"]
        rows = connection.execute(statement, {"queues": json.dumps(list(queues))})
        return ReadyPairs(
            ReadyPair(queue, priority, min(due_in, 0.0), has_invalid_due=True)
            if any(unusable)
            else ReadyPair(queue, priority, float(due_in))
            for queue, priority, due_in, *unusable in rows
            if due_in is not None
        )

    def select_held_pairs(
        self, connection: Connection, statement: str, leases: Leases
    ) -> set[tuple[int, str]]:
        """Return the (id, token) pairs of `leases` that are still in the message table.

        A pair is missing if the lease was lost: the row is gone, or has the token of a later claim.
        `statement` reads the rows, and may also lock them.
        """
        pairs = {(i, token.hex) for i, token in leases}
        ids = sorted({i for i, _ in leases})
        stored: set[tuple[int, str]] = set()
        for part in iter_chunks(ids):
            rows = connection.execute(self.sql[statement], {"ids": list(part)})
            stored |= {(row[0], row[1]) for row in rows}
        return pairs & stored

    @abstractmethod
    def lock_claimable(
        self,
        connection: Connection,
        statement: str,
        binds: dict[str, Any],
        token: UUID,
        suspect_rule: SuspectRule | None,
    ) -> ClaimedMessages:
        """Lock (or lease at once) the rows of `statement` except suspects, by due time and id.

        First step of a claim. A database with row locks only locks here, and leases in
        `lease_rows`.
        """

    def lease_rows(
        self, connection: Connection, rows: Sequence[ClaimedMessage], lease: float, token: UUID
    ) -> None:
        """Write the leases of the locked `rows`, unless written by `lock_claimable`."""

    def claim_ids(
        self,
        connection: Connection,
        ids: Sequence[int],
        queues: Sequence[str],
        lease: float,
        token: UUID,
        *,
        suspect_rule: SuspectRule | None = None,
    ) -> ClaimedMessages:
        """Lease the unlocked rows of `ids` that are due in `queues`, in any order.

        Locks (SQLite: leases) the rows in chunks first, because a statement takes a limited number
        of binds. The transaction then leases all locked rows.
        """
        messages = ClaimedMessages()
        for part in iter_chunks(sorted(ids)):
            for names in iter_chunks(queues):
                binds: dict[str, Any] = {
                    "ids": list(part),
                    "queues": list(names),
                    "limit": len(part),
                }
                binds |= build_lease_binds(lease, token)
                rows = self.lock_claimable(connection, "claim_ids", binds, token, suspect_rule)
                messages += rows
                messages.suspects |= rows.suspects
        self.lease_rows(connection, messages, lease, token)
        return messages

    def renew(self, connection: Connection, leases: Leases, lease: float) -> set[int]:
        """Extend the leases that are still held; return their ids.

        Check without locks first, then lock only those rows: `lock` locks by id alone, and would
        wait for the new holder of a lost lease, which may have locked its row for long.
        """
        held_ids = self.find_held(connection, leases)
        locked = self.lock(connection, [pair for pair in leases if pair[0] in held_ids])
        self.extend_leases(connection, locked, lease)
        return locked

    def extend_free(self, connection: Connection, leases: Leases, lease: float) -> set[int]:
        """Lock the rows that no other transaction has locked, then extend their leases."""
        free = self.lock(connection, leases, skip_locked=True)
        self.extend_leases(connection, free, lease)
        return free

    def extend_leases(self, connection: Connection, ids: Collection[int], lease: float) -> None:
        """Extend the leases of `ids`, which the transaction has locked."""
        for part in iter_chunks(sorted(ids)):
            connection.execute(
                self.sql["renew"], {"ids": list(part), "lease": round(lease * 1_000_000)}
            )

    def lock(
        self, connection: Connection, leases: Leases, *, skip_locked: bool = False
    ) -> set[int]:
        """Lock the rows of `leases` in the order of ids; return the ids that are still held.

        A common order keeps two transactions that lock the same rows from deadlocking.
        """
        return {
            i
            for i, _ in self.select_held_pairs(
                connection, "lock_free" if skip_locked else "lock", leases
            )
        }

    def find_held(self, connection: Connection, leases: Leases) -> set[int]:
        """Return the ids of `leases` that are still held."""
        return {i for i, _ in self.select_held_pairs(connection, "look", leases)}

    def settle(self, connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
        """Lock and write the rows of `settlements` whose leases are still held.

        Returns:
            The settled ids, and the ids whose lease was lost, for which nothing is written.
        """
        held_pairs = self.select_held_pairs(
            connection, "lock", [(s.id, s.lease_token) for s in settlements]
        )
        owned = [s for s in settlements if (s.id, s.lease_token.hex) in held_pairs]
        self.settle_locked(connection, owned)
        owned_ids = {s.id for s in owned}
        return SettleResult(owned_ids, {s.id for s in settlements} - owned_ids)

    def settle_locked(self, connection: Connection, settlements: Sequence[Settlement]) -> None:
        """Write the settlements of rows whose leases the transaction has checked and locked.

        A final settlement archives the row and deletes it; any other updates it, as for a retry.
        """
        limit = self.get_size_limit(connection)
        leaving = [s for s in settlements if s.is_final]
        archived = [s for s in leaving if s.archive and self.has_archive]
        for part in iter_chunks(archived):
            for rows in split_to_fit(limit, part, dump_settlements):
                connection.execute(self.sql["archive"], {"rows": rows})
        for part in iter_chunks(leaving):
            connection.execute(self.sql["delete"], self.build_delete_binds([s.id for s in part]))
        self._update_rows(connection, limit, [s for s in settlements if not s.is_final])

    def _update_rows(
        self, connection: Connection, limit: SizeLimit, staying: Sequence[Settlement]
    ) -> None:
        """Update rows that stay in the message table, such as retries and forwards.

        All rows of a chunk take one statement. New bodies and headers are rare, and are written
        after.
        """
        for part in iter_chunks(staying):
            for rows in split_to_fit(limit, part, dump_settlements):
                connection.execute(self.sql["update"], {"rows": rows})
        for s in staying:
            if s.payload is not None:
                limit.check_parts(s.payload)
                connection.execute(self.sql["payload"], {"id": s.id, "payload": s.payload})
        for part in iter_chunks([s for s in staying if s.headers is not None]):
            for rows in split_to_fit(limit, part, dump_headers):
                connection.execute(self.sql["headers"], {"rows": rows})


def build_lease_binds(lease: float, token: UUID) -> dict[str, Any]:
    """Build the binds of a statement that leases: the token, and microseconds."""
    return {"token": token.hex, "lease": round(lease * 1_000_000)}


def mark_prefetched(rows: Sequence[ClaimedMessage], prefetch: Prefetch) -> Sequence[ClaimedMessage]:
    """Mark the claimed rows that wait for a worker as prefetched; return the rows that start now.

    `prefetch.start_count` says for how many rows a worker is free.
    """
    for row in rows[prefetch.start_count :]:
        row.prefetched = True
    return rows[: prefetch.start_count]


def dump_settlements(settlements: Sequence[Settlement]) -> str:
    """Return the settlements as a JSON bind: an array for each, in the order that the SQL reads.

    Times are in microseconds. A delivery that is uncharged is not counted, so its charge is -1.
    """
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


def dump_headers(settlements: Sequence[Settlement]) -> str:
    """Dump the new headers of settlements into a JSON bind."""
    return json.dumps([[s.id, s.headers] for s in settlements])


def to_utc(value: datetime) -> datetime:
    """Return `value` in UTC."""
    return value.astimezone(timezone.utc)


class MarkedLocks(HandlerLocks):
    """Handler locks by a savepoint and a flag in the rows.

    For databases without transaction numbers. The savepoint proves that the handler has not ended
    its transaction: it cannot be released in another one. The flag, which the settlement removes,
    shows other transactions that the handler committed without the settlement.
    """

    def __init__(self, dialect: MultiStatementDialect) -> None:
        self._dialect = dialect

    def lock(self, connection: Connection, leases: Leases, idle_limit: float) -> HandlerLock:
        """Lock the rows by setting the flag, and open the savepoint.

        The savepoint is gone if the handler ends its transaction. The flag is committed only if it
        does so without the settlement, which removes the flag. If a lease is lost, fewer rows are
        flagged than expected; then the rows still held are looked up.
        """
        self._dialect.begin(connection, idle_limit)
        flagged = 0
        ordered = sorted(leases)
        for part in iter_chunks(ordered):
            binds = {"ids": [i for i, _ in part], "pairs": [(i, token.hex) for i, token in part]}
            flagged += connection.execute(self._dialect.sql["join"], binds).rowcount
        held_ids = (
            {i for i, _ in leases}
            if flagged == len(leases)
            else self._dialect.lock(connection, leases)
        )
        connection.exec_driver_sql("SAVEPOINT sqlbroker_joined")
        return HandlerLock(leases, held_ids)

    def prove(self, connection: Connection, lock: HandlerLock) -> None:  # noqa: ARG002
        """Release the savepoint of `lock`, including savepoints that the handler has left open.

        Only the transaction that locked the rows has it.

        Raises:
            TransactionEndedError: the savepoint is gone, so the handler has ended the transaction.
        """
        try:
            connection.exec_driver_sql("RELEASE SAVEPOINT sqlbroker_joined")
        except DBAPIError as error:
            if error.connection_invalidated or (
                error.orig and self._dialect.is_transient(error.orig)
            ):
                raise
            raise TransactionEndedError(TRANSACTION_ENDED) from error

    def settle(
        self, connection: Connection, lock: HandlerLock, settlements: Sequence[Settlement]
    ) -> SettleResult:
        """Prove that this is the transaction with the row locks, then settle as the flush does.

        The flush is the task that writes the outcomes of other handlers. Here the rows are locked
        already, so their leases need no check.
        """
        self.prove(connection, lock)
        return settle_units(self._dialect, connection, settlements, settle=self._settle_locked)

    def _settle_locked(
        self, connection: Connection, settlements: Sequence[Settlement]
    ) -> SettleResult:
        """Settle without a check of the leases, because the transaction has the row locks."""
        self._dialect.settle_locked(connection, settlements)
        return SettleResult({s.id for s in settlements})

    def was_committed(self, connection: Connection, lock: HandlerLock) -> bool:
        """Return True if rows still have the flag: the handler's transaction was committed.

        `lock` has set the flag in the transaction, and a rollback or the settlement would have
        removed it.
        """
        return bool(self._dialect.select_held_pairs(connection, "joined", lock.leases))

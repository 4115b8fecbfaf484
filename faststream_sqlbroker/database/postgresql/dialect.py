"""PostgreSQL: one statement for each step, arrays for each batch."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from uuid import UUID

from sqlalchemy import Connection

from faststream_sqlbroker.core.policies.seen import CompareAndSwap, QueueSnapshots
from faststream_sqlbroker.core.rows import (
    ClaimedMessage,
    ClaimedMessages,
    ClaimRequest,
    HeartbeatData,
    Leases,
    NewMessage,
    PollResult,
    ReadyPairs,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts import once
from faststream_sqlbroker.database.parts.claimed_rows import (
    CLAIMED_COLUMNS,
    get_statement_suffix,
    split_suspects,
)
from faststream_sqlbroker.database.parts.handler_locks import (
    TRANSACTION_ENDED,
    HandlerLock,
    HandlerLocks,
)
from faststream_sqlbroker.database.parts.live_subscribers import RETENTION_SECONDS
from faststream_sqlbroker.database.parts.ordered import OrderedClaims
from faststream_sqlbroker.database.parts.policy_state import ONCE
from faststream_sqlbroker.database.parts.sizes import POSTGRESQL as POSTGRESQL_SIZE
from faststream_sqlbroker.database.parts.sizes import count_bytes, split_by_bytes
from faststream_sqlbroker.database.parts.units import settle_units
from faststream_sqlbroker.database.postgresql.binds import (
    build_insert,
    build_lease_binds,
    build_settle_on_ack,
    build_settle_queries,
    format_milliseconds,
)
from faststream_sqlbroker.database.postgresql.quick_jobs import SingleStatementJobs
from faststream_sqlbroker.database.postgresql.results import (
    PostgresqlErrors,
    build_settle_result,
    read_around,
    read_claimed,
    read_pairs,
    read_seen,
    read_swapped,
    sort_by_due_time,
)
from faststream_sqlbroker.database.query import Query, Work
from faststream_sqlbroker.exceptions import SetupError, TransactionEndedError
from faststream_sqlbroker.schema.tables import Tables


class PostgresqlDialect(PostgresqlErrors, Dialect):
    """All SQL for PostgreSQL ≥ 13."""

    name = "postgresql"
    isolation_level = "READ COMMITTED"
    can_listen = True
    has_row_ranges = True
    knows_implied = True
    known_size_limit = POSTGRESQL_SIZE
    claimed_expressions: ClassVar[Mapping[str, str]] = {
        **{name: f"m.{name}" for name in CLAIMED_COLUMNS},
        "headers": "m.headers::text",
        "created_at": "timestamptz_send(m.created_at)",
        "next_attempt_at": "timestamptz_send(m.next_attempt_at)",
        "acquired_at": "timestamptz_send(m.acquired_at)",
    }

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        super().__init__(tables, sqlalchemy_dialect)
        self.ordered = OrderedClaims(self)
        self.handler_locks = NumberedLocks(self)
        if self.has_archive:
            self.single_statement_jobs = SingleStatementJobs(self)

    def setup(self, connection: Connection) -> None:
        """Refuse a DateStyle that psycopg, which reads times as text, cannot read."""
        if connection.dialect.driver != "psycopg":
            return
        style = connection.exec_driver_sql("SHOW DateStyle").scalar_one()
        if not style.startswith("ISO"):
            msg = (
                f"DateStyle must be 'ISO' for psycopg to read times, got {style!r}; set it for "
                "the engine's connections: create_async_engine(url, "
                'connect_args={"options": "-c DateStyle=ISO"}), or use asyncpg'
            )
            raise SetupError(msg)

    def begin(self, connection: Connection, idle_limit: float | None = None) -> None:
        """Set the idle limit for the transaction alone, and leave the session's limit.

        If the client vanishes inside the transaction, the server then ends the session and its
        locks.
        """
        if idle_limit is not None:
            connection.execute(self.sql["idle_limit"], {"limit": format_milliseconds(idle_limit)})

    def begin_replanning(self, connection: Connection, idle_limit: float) -> None:
        """Set the idle limit and ignore cached plans in this transaction, in a single statement.

        A cached plan may be for the table as it was earlier, for example almost empty.
        """
        connection.execute(self.sql["idle_limit_anew"], {"limit": format_milliseconds(idle_limit)})

    def set_idle_limit(self, connection: Connection, seconds: float) -> None:
        """Change the idle limit of a handler's transaction, which `NumberedLocks.lock` has set,
        while it runs.

        A shorter limit of the administrator, which the lock may have kept, is no longer known here.
        """
        connection.execute(self.sql["allow_idling"], {"limit": format_milliseconds(seconds)})

    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert the rows in one statement, or in several if the bodies are too large for that."""
        self.known_size_limit.check(rows)
        return [
            i
            for part in split_by_bytes(rows, lambda row: count_bytes([row]))
            for i in self.build_insert(part)(connection)
        ]

    def build_insert(self, rows: Sequence[NewMessage]) -> Query[list[int | None]]:
        """Build an insert that draws the ids in the statement, so that each row's id is known."""
        return build_insert(self.sql, rows)

    def build_remove(self, ids: Sequence[int]) -> Query[None]:
        """Build a deletion of a single statement."""
        return Query(self.sql["remove"], {"ids": list(ids)}, lambda _rows: None)

    def find_ready_pairs(
        self, connection: Connection, queues: Sequence[str], *, only_open: bool = False
    ) -> ReadyPairs:
        """Find the pairs (queue and priority) by a loose index scan: a step per pair.

        The number of their rows does not matter. With `only_open`, paused queues are skipped.
        """
        statement = self.sql["open_pairs"] if only_open else self.sql["ready_pairs"]
        return Query(statement, {"queues": list(queues)}, read_pairs)(connection)

    def build_scan(self, queues: Sequence[str]) -> Query[ReadyPairs]:
        """Build a scan of a single statement."""
        return Query(self.sql["ready_pairs"], {"queues": list(queues)}, read_pairs)

    def build_poll(
        self, queues: Sequence[str], leased: Sequence[str], sign: HeartbeatData | None
    ) -> Query[PollResult]:
        """Build a poll of a single statement.

        `sign` is a heartbeat to write with it; None only reads.
        """
        binds: dict[str, Any] = {"queues": list(queues), "leased": list(leased)}
        if sign is None:
            return Query(self.sql["look_around"], binds, read_around)
        names = sorted(sign.descriptions)
        binds |= {
            "names": names,
            "infos": [json.dumps(dict(sign.descriptions[name])) for name in names],
            "changed": sorted(sign.changed_names),
            "lease": sign.lease_seconds,
            # A registration outlives its lease, so that `explain` can name a crashed subscriber.
            "kept": sign.lease_seconds + RETENTION_SECONDS,
        }
        return Query(self.sql["look_around_alive"], binds, read_around)

    def build_claim(self, request: ClaimRequest) -> Query[ClaimedMessages]:
        """Build a claim of a single statement.

        RETURNING has no order, so the rows are sorted here. With `prefetch`, rows that start now
        and rows that wait for a worker get leases of two lengths; a variant of the statement writes
        both.
        """
        pairs = request.pairs
        suspect_rule = request.suspect_rule
        prefetch = request.prefetch
        statement = "claim" + get_statement_suffix(suspect_rule)
        binds: dict[str, Any] = {
            "queues": [p.queue for p in pairs],
            "priorities": [p.priority for p in pairs],
            "since": [p.since for p in pairs],
            "limit": request.limit,
            "lease": request.lease,
            "token": request.token,
            **(suspect_rule.binds if suspect_rule is not None else {}),
        }
        if prefetch is not None and prefetch.start_count > 0:
            statement += "_two_lengths"
            binds |= {"free": prefetch.start_count, "waiting": prefetch.lease}
        elif prefetch is not None:
            binds["lease"] = prefetch.lease

        def read_rows(rows: Iterable[Sequence[Any]]) -> ClaimedMessages:
            """Convert the leased rows in the order of the pairs; mark prefetched rows."""
            other_rows, suspects = split_suspects(rows, suspect_rule)
            other_rows = sort_by_due_time(other_rows)
            messages = ClaimedMessages(self.to_messages(other_rows, request.token), suspects)
            if prefetch is not None:
                for row, message in zip(other_rows, messages, strict=True):
                    message.prefetched = row[-1] if prefetch.start_count > 0 else True
            if len(pairs) > 1:
                rank = {(p.queue, p.priority): n for n, p in enumerate(pairs)}
                messages.sort(key=lambda m: rank[m.queue, m.priority])
            return messages

        return Query(self.sql[statement], binds, read_rows)

    def to_messages(self, rows: Iterable[Sequence[Any]], token: UUID) -> list[ClaimedMessage]:
        """Convert rows to messages; values need no decoding, or are decoded on first use."""
        return read_claimed(rows, token)

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
        """Lease the rows in a single statement.

        With `suspect_rule`, the variant `_apart` skips suspects, messages that may have killed
        their process, and reports them in the result.
        """
        binds = {"ids": list(ids), "queues": list(queues), "lease": lease, "token": token}
        name = "claim_ids"
        if suspect_rule is not None:
            name, binds = "claim_ids_apart", {**binds, **suspect_rule.binds}
        rows, suspects = split_suspects(connection.execute(self.sql[name], binds), suspect_rule)
        return ClaimedMessages(self.to_messages(rows, token), suspects)

    def build_claim_free_keys(
        self, rows: Sequence[ClaimedMessage], ttl: float, worker: str
    ) -> Query[set[int]]:
        """Build a claim, in one statement, of keys that no message has claimed (policy `Once`).

        The result is the ids whose keys were claimed; keys that exist already are left unchanged.
        """
        binds = {
            "ids": [row.id for row in rows],
            "tokens": [row.lease_token for row in rows],
            "scopes": [ONCE + row.queue for row in rows],
            "keys": [row.once_key for row in rows],
            "deliveries": [once.get_delivery_token(row) for row in rows],
            "infos": [json.dumps(once.build_claim_info(row, ttl, worker)) for row in rows],
            "kept": ttl + once.RETENTION,
        }
        return Query(self.sql["claim_free_keys"], binds, lambda rows: {row[0] for row in rows})

    def lock_order(self, connection: Connection, queues: Sequence[str]) -> set[str]:
        """Lock the claims of free queues; return the locked queues.

        The version of each queue is raised: a claim that has read the queue before, without this
        lock, compares the version (`build_compare_and_swap`) and writes nothing. Missing rows are
        inserted.
        """
        lock = self.sql["lock_queues"]
        locked = set(connection.execute(lock, {"queues": list(queues)}).scalars())
        if len(locked) < len(queues):
            remaining = [queue for queue in queues if queue not in locked]
            if inserted := super().lock_order(connection, remaining):
                locked |= set(connection.execute(lock, {"queues": sorted(inserted)}).scalars())
        return locked

    def build_read_queues(
        self,
        queues: Sequence[str],
        *,
        size: int,
        max_running: int,
        scopes: Sequence[str],
        suspect_rule: SuspectRule | None,
    ) -> Query[QueueSnapshots]:
        """Build the read of a claim by compare and swap: one statement, which locks nothing.

        The claim is decided in Python, and written only if no other claim of the queue has been
        written since. With `suspect_rule`, messages that may have killed their process are skipped.
        """
        binds: dict[str, Any] = {
            "queues": list(queues),
            "scopes": list(scopes),
            "most": max_running,
            "size": size,
        }
        if suspect_rule is None:
            return Query(self.sql["look"], binds, read_seen)
        return Query(self.sql["look_others"], {**binds, **suspect_rule.binds}, read_seen)

    def build_compare_and_swap(self, swap: CompareAndSwap) -> Query[ClaimedMessages | None]:
        """Build a compare-and-swap of a single statement.

        Writes the claim of a queue only if the queue's version is still the one that was read, and
        no other claim has locked the queue; else the result is None.
        """
        binds = {
            "queue": swap.queue,
            "version": swap.version,
            "ids": list(swap.ids),
            "lease": swap.lease,
            "token": swap.token,
            "scopes": list(swap.states),
            "infos": [json.dumps(info) for info, _ in swap.states.values()],
            "expiries": [expires for _, expires in swap.states.values()],
        }
        return Query(self.sql["swap"], binds, lambda rows: read_swapped(rows, swap))

    def renew(self, connection: Connection, leases: Leases, lease: float) -> set[int]:
        """Extend the leases that are still held; wait for locked rows beforehand."""
        # The update joins on ctid. If it waited for a row that changes, it would search for the old
        # ctid and miss the row; so wait for the locks first.
        self.lock(connection, leases)
        return self.extend_free(connection, leases, lease)

    def extend_free(self, connection: Connection, leases: Leases, lease: float) -> set[int]:
        """Extend the leases by a single statement, which skips locked rows."""
        binds = {**build_lease_binds(leases), "lease": lease}
        return {r[0] for r in connection.execute(self.sql["renew"], binds)}

    def lock(
        self, connection: Connection, leases: Leases, *, skip_locked: bool = False
    ) -> set[int]:
        """Lock the rows in a single statement."""
        statement = self.sql["lock_free" if skip_locked else "lock"]
        return {r[0] for r in connection.execute(statement, build_lease_binds(leases))}

    def find_held(self, connection: Connection, leases: Leases) -> set[int]:
        """Return the ids that are still held, by a single statement."""
        return {r[0] for r in connection.execute(self.sql["held"], build_lease_binds(leases))}

    @contextmanager
    def limit_lock_wait(self, connection: Connection, seconds: float) -> Iterator[None]:
        """Limit the wait for the rest of the transaction."""
        connection.execute(self.sql["lock_wait"], {"limit": f"{round(seconds * 1000)}ms"})
        yield

    def settle(
        self,
        connection: Connection,
        settlements: Sequence[Settlement],
        *,
        inside: str | None = None,
    ) -> SettleResult:
        """Settle in at most four statements: acked, otherwise archived, deleted, updated rows.

        With `inside`, nothing is settled unless the transaction has this number: a handler may have
        ended its own transaction, and begun another.
        """
        settled: set[int] = set()
        archive = self.has_archive
        for query in build_settle_queries(self.sql, settlements, archive=archive, inside=inside):
            settled |= query(connection)
        return build_settle_result(settlements, settled)

    def build_settle(
        self, settlements: Sequence[Settlement], *, skip_locked: bool = False
    ) -> Work[SettleResult]:
        """Build a settlement of a single statement where possible, otherwise of a transaction.

        A single statement is enough if all rows end alike, and no row that stays has a lookup
        value. A unit is a set of rows that are settled together, or not at all, with messages
        published on ack; units need a transaction unless each has one row (`build_settle_on_ack`).
        """
        fallback = super().build_settle(settlements, skip_locked=skip_locked)
        if skip_locked:
            return fallback
        if any(True for s in settlements if s.unit is not None):
            archive = self.has_archive
            return build_settle_on_ack(self.sql, settlements, archive=archive) or fallback
        queries = build_settle_queries(self.sql, settlements, archive=self.has_archive)
        if len(queries) > 1 or (
            not settlements[0].is_final and any(s.lookup is not None for s in settlements)
        ):
            return fallback
        [query] = queries
        return _build_settle(settlements, query)

    def build_settle_one(self, settlement: Settlement) -> Query[SettleResult]:
        """Build a settlement of a single statement, with a new query plan.

        A plan that the session has cached may be for the table as it was earlier.
        """
        [query] = build_settle_queries(
            self.sql, [settlement], archive=self.has_archive, replan=True
        )
        return _build_settle([settlement], query)

    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """Release the rows by a single statement over the PROCESSING rows in `queues`."""
        binds = {"queues": list(queues), "token": token}
        return len(connection.execute(self.sql["release_claim"], binds).all())

    def build_notify(self, channel: str, queues: Sequence[str]) -> Query[None]:
        """Build a wake-up for each queue on `channel`."""
        return Query(
            self.sql["notify"], {"channel": channel, "queues": list(queues)}, lambda _rows: None
        )


def _build_settle(settlements: Sequence[Settlement], query: Query[set[int]]) -> Query[SettleResult]:
    """Return `query` with the result that a settlement has: written and lost ids."""
    read = query.read
    return Query(
        query.clause, query.binds, lambda rows: build_settle_result(settlements, read(rows))
    )


class NumberedLocks(HandlerLocks):
    """Handler locks that are identified by the number of the transaction.

    While a server runs, no two of its transactions get the same number. So another number in the
    same session proves that the handler has ended the transaction with the row locks.
    """

    def __init__(self, dialect: PostgresqlDialect) -> None:
        self._dialect = dialect

    def lock(self, connection: Connection, leases: Leases, idle_limit: float) -> HandlerLock:
        """Lock, read the transaction's number and set the idle limit, in a single statement.

        Without a locked row, all leases are lost and the number is empty.
        """
        binds = {
            "ids": [i for i, _ in leases],
            "tokens": [token for _, token in leases],
            "limit": format_milliseconds(idle_limit),
        }
        rows = connection.execute(self._dialect.sql["lock_numbered"], binds).all()
        proof = rows[0][1:4] if rows else ()
        return HandlerLock(leases, {row[0] for row in rows}, *proof)

    def prove(self, connection: Connection, lock: HandlerLock) -> None:
        """Compare the transaction's number with the lock's.

        Raises:
            TransactionEndedError: the handler has ended the transaction that locked the rows.
        """
        if connection.execute(self._dialect.sql["transaction"]).scalar_one() != lock.number:
            raise TransactionEndedError(TRANSACTION_ENDED)

    def settle(
        self, connection: Connection, lock: HandlerLock, settlements: Sequence[Settlement]
    ) -> SettleResult:
        """Settle by statements that compare the numbers themselves: no extra round trip.

        The number of the transaction shows that the handler has not ended the transaction itself.
        """
        dialect = self._dialect

        def settle(connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
            """Write within the numbered transaction; if nothing was written, check the number."""
            result = dialect.settle(connection, settlements, inside=lock.number)
            if not result.settled_ids:
                self.prove(connection, lock)
            return result

        return settle_units(dialect, connection, settlements, settle=settle)

    def was_committed(self, connection: Connection, lock: HandlerLock) -> bool:
        """Return True if the server reports the transaction as committed; False if unknown.

        Another server, such as a promoted standby, or this one after a crash may give the number
        to another transaction. So the server's start, the time of the lock and the lock left in the
        rows are checked, too.
        """
        binds: dict[str, Any] = {"number": lock.number, "since": lock.locked_at}
        binds |= {"started": lock.server_started_at, **build_lease_binds(lock.leases)}
        return bool(connection.execute(self._dialect.sql["was_committed"], binds).scalar_one())

"""The operations that every database implements, and the parts that they share.

A dialect holds all SQL of one database. Its methods are synchronous and take a SQLAlchemy
`Connection`, so that the same code serves asyncio (through `AsyncConnection.run_sync`) and
synchronous callers. None of them begins or commits; `store` does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import Connection, TextClause, text

from faststream_sqlbroker.core.outcome import Reject
from faststream_sqlbroker.core.policies.flags import KEPT
from faststream_sqlbroker.core.reasons import UNDECODABLE
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
from faststream_sqlbroker.core.text import load_text, short
from faststream_sqlbroker.dialects.policy_state import lock_order, note_started
from faststream_sqlbroker.dialects.query import Work
from faststream_sqlbroker.dialects.sizes import SizeLimit
from faststream_sqlbroker.dialects.units import settle_units
from faststream_sqlbroker.schema.tables import Tables

if TYPE_CHECKING:
    from faststream_sqlbroker.dialects.handler_locks import HandlerLocks
    from faststream_sqlbroker.dialects.ordered import OrderedClaims
    from faststream_sqlbroker.dialects.policy_claims import PolicyClaims
    from faststream_sqlbroker.dialects.postgresql.dead_sessions import DeadSessions


MESSAGE_COLUMNS = (
    "id, queue, priority, {key}, dedup_id, headers, payload, state, attempts_count, "
    "deliveries_count, publish_count, origin_id, created_at, next_attempt_at, expires_at, "
    "first_attempt_at, last_attempt_at, acquired_at, last_error, hops, policy_key"
)
CLAIMED_COLUMNS = (
    "id",
    "queue",
    "payload",
    "headers",
    "priority",
    "key",
    "attempts_count",
    "deliveries_count",
    "publish_count",
    "created_at",
    "next_attempt_at",
    "expires_at",
    "first_attempt_at",
    "last_attempt_at",
    "acquired_at",
    "hops",
)


UNREADABLE = (ArithmeticError, AttributeError, TypeError, ValueError)
"""Errors raised by reading a value that its column should not hold."""
NEEDED_TIMES = ("created_at", "next_attempt_at")
"""Times that every message has. An invalid one counts as now; any other invalid time as NULL."""
_TIMES = range(CLAIMED_COLUMNS.index("created_at"), CLAIMED_COLUMNS.index("acquired_at"))

_OPEN = """
  WHERE NOT EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = 'paused' AND s.{key} = q.queue AND (s.expires_at IS NULL \
OR s.expires_at > {now}))"""

UNRESTORED = "sqlbroker_unrestored"
"""Key in the `info` of a connection whose session settings the broker has changed; `restore`
changes them back and removes the key."""


class Dialect(ABC):
    """All SQL of one database over the tables of one broker."""

    name: str
    """SQLAlchemy's name of the database."""
    isolation_level: str | None = None
    """Isolation level of the broker's own transactions; None leaves the engine's."""
    cancel_once = False
    """Whether a second cancellation, while the driver closes a connection, can make it hang."""
    outwaits_clients = False
    """Whether the server goes on waiting for a lock after its client has given up. Such a wait
    blocks other transactions."""
    can_listen = False
    """Whether a wake-up can arrive from another process."""
    ordered: "OrderedClaims"
    """Claims that keep the order of each key."""
    scheduled: "PolicyClaims"
    """Claims under scheduling policies."""
    silent_sessions: "DeadSessions | None" = None
    """Finds sessions that no time limit of the server ends; None: the database has none such."""
    known_limit: SizeLimit | None = None
    """How large a message may be, if known without asking the server."""
    handler_locks: "HandlerLocks"
    """The locks that transactions of handlers begin with."""

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        """Prepare the statements of `tables`, quoted for `sqlalchemy_dialect`."""
        preparer = sqlalchemy_dialect.identifier_preparer
        self.tables = tables
        self.names = {
            "message": preparer.format_table(tables.message),
            "archive": preparer.format_table(tables.archive) if tables.archive is not None else "",
            "key": preparer.quote("key"),
            "kept_marks": str(KEPT),
            "materialized": "",
            "ready_index": preparer.quote(f"{tables.message.name}_ready"),
            "leased_index": preparer.quote(f"{tables.message.name}_leased"),
            "policy_state": preparer.format_table(tables.policy_state),
            "key_index": preparer.quote(f"{tables.message.name}_key"),
        }
        self.sql: dict[str, TextClause] = {}
        self.warn: Callable[[str], None] = lambda _text: None
        """Called with a warning about a row with an invalid time; set by the broker."""
        self.time_limit = 30.0
        """Seconds that a transaction of the broker may take; set by the store."""

    def add_statement(self, name: str, sql: str, *binds: Any, **extra: str) -> TextClause:
        """Fill the table names into `sql`, declare its binds and keep it under `name`."""
        clause = text(sql.format(**{**self.names, **extra}).strip())
        self.sql[name] = clause.bindparams(*binds) if binds else clause
        return self.sql[name]

    def add_looks(self, pairs: str, now: str, *binds: Any) -> None:
        """Add the scan for ready `pairs`, once for all queues and once without paused ones.

        `now` is the expression for the database's clock.
        """
        self.add_statement("ready_pairs", pairs, *binds, which_queues="")
        self.add_statement(
            "open_pairs", pairs, *binds, which_queues=_OPEN.format(**{**self.names, "now": now})
        )

    @property
    def has_archive(self) -> bool:
        """Whether finished messages can be kept."""
        return self.tables.archive is not None

    def begin(  # noqa: B027 - not every database needs something here
        self, connection: Connection, idle_limit: float | None = None
    ) -> None:
        """Prepare the transaction that `connection` has just begun for the broker's writes.

        With `idle_limit`, the server ends the session if the transaction is idle for that many
        seconds: a machine that vanishes without closing its sockets must not keep rows locked.
        `restore` undoes what this changes in the session.
        """

    def begin_anew(self, connection: Connection, idle_limit: float) -> None:
        """`begin`, and if the session caches plans, have new ones made for the current tables."""
        self.begin(connection, idle_limit)

    def allow_idling(self, connection: Connection, seconds: float) -> None:  # noqa: B027
        """Set the limit anew in a transaction that was begun with one."""

    def needs_restore(self, connection: Connection) -> bool:
        """Whether `begin` has left something in the session."""
        return UNRESTORED in connection.info

    def restore(self, connection: Connection) -> None:  # noqa: B027 - most databases need nothing here
        """Give the session its former settings; called after the end of the transaction."""

    def setup(self, connection: Connection) -> None:  # noqa: B027 - most databases need nothing here
        """Check what the broker relies on, and set what the database file keeps; once per start."""

    def size_limit(self, connection: Connection) -> SizeLimit:  # noqa: ARG002
        """How large a message may be that is sent on `connection`."""
        assert self.known_limit is not None  # noqa: S101 - a dialect that has to ask does
        return self.known_limit

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether repeating the transaction may succeed: deadlock, lock wait, full disk, …"""

    @abstractmethod
    def ends_session(self, error: BaseException) -> bool:
        """Whether the server ended the session: a COMMIT under way may have succeeded."""

    @abstractmethod
    def spoils(self, error: BaseException) -> bool:
        """Whether the connection must not be used again.

        Its session has ended, or its server is read-only.
        """

    def lock_wait_ended(self, error: BaseException) -> bool:  # noqa: ARG002
        """Whether a statement waited for a lock longer than `lock_wait_limit` allows."""
        return False

    @abstractmethod
    def now(self, connection: Connection) -> datetime:
        """The database's clock (aware, UTC)."""

    @abstractmethod
    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows`; their ids in the order given, None where dedup_id exists already."""

    def wait_for_dedup_ids(self, connection: Connection, rows: Sequence[NewMessage]) -> None:  # noqa: B027
        """Wait until no other transaction holds a dedup_id of `rows`.

        Only for databases on which an insert that waits for one blocks other inserts.
        """

    @abstractmethod
    def ready_pairs(
        self, connection: Connection, queues: Sequence[str], *, only_open: bool = False
    ) -> ReadyPairs:
        """The (queue, priority) pairs with claimable rows, queues in the order given, priority
        falling.

        With `only_open`, queues that are paused for the whole fleet are left out.
        """

    def mend_due_times(self, connection: Connection, pairs: Sequence[ReadyPair]) -> None:  # noqa: B027
        """Make rows of `pairs` with an invalid due time due now, with a warning.

        Only SQLite can hold such rows: its columns accept any value.
        """

    @abstractmethod
    def claim(
        self,
        connection: Connection,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        *,
        suspicion: Suspicion | None = None,
        prefetch: Prefetch | None = None,
    ) -> Claimed:
        """Lease up to `limit` due rows; ordered by pair, due time, id. Locked rows are skipped.

        With `prefetch`, the first `prefetch.after` rows are leased for `lease` seconds and the
        others for `prefetch.lease`; those have `ClaimedMessage.prefetched` set. With `suspicion`,
        no suspect is leased: a crash that another message causes would count against it.
        """

    @abstractmethod
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
        """Lease those of `ids` that are due in one of `queues` and not locked; unordered.

        With `suspicion`, no suspect is leased.
        """

    @abstractmethod
    def renew(
        self, connection: Connection, leases: Leases, lease: float, *, skip_locked: bool = False
    ) -> set[int]:
        """Extend `leases` to `lease` seconds from now; returns the ids that are still held.

        A lease is never shortened: if two renewals run at once, the database may execute the longer
        one first. With `skip_locked`, rows that another transaction has locked are not extended,
        but are among the ids.
        """

    @abstractmethod
    def lock(
        self, connection: Connection, leases: Leases, *, skip_locked: bool = False
    ) -> set[int]:
        """Lock the rows of `leases` that are still held; returns their ids.

        The locks last until the transaction ends.
        """

    @abstractmethod
    def still_held(self, connection: Connection, leases: Leases) -> set[int]:
        """The ids of `leases` that are still held, locked or not."""

    @abstractmethod
    def settle(self, connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
        """Write `settlements`, each only if its lease is still held."""

    @contextmanager
    def lock_wait_limit(self, connection: Connection, seconds: float) -> Iterator[None]:  # noqa: ARG002
        """A context in which statements wait at most `seconds` for a lock.

        SQLite has one lock only and waits for it in `begin`.
        """
        yield

    @abstractmethod
    def release_stuck(self, connection: Connection, queues: Sequence[str], limit: int) -> int:
        """Give back up to `limit` rows whose lease has expired; returns how many."""

    @abstractmethod
    def lease_ends_in(self, connection: Connection, queues: Sequence[str]) -> float | None:
        """Seconds until the first lease of any process in `queues` ends; None: there is no lease.

        Negative if that lease has ended.
        """

    @abstractmethod
    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """Give back, uncharged, the rows that a claim leased with `token`; returns their number."""

    def inserting(self, rows: Sequence[NewMessage]) -> Work[list[int | None]]:
        """`insert` as work for a transaction of its own."""
        return lambda connection: self.insert(connection, rows)

    def scan(self, queues: Sequence[str]) -> Work[ReadyPairs]:
        """`ready_pairs` as work for a transaction of its own."""
        return lambda connection: self.ready_pairs(connection, queues)

    def claiming(
        self,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        *,
        suspicion: Suspicion | None = None,
        prefetch: Prefetch | None = None,
    ) -> Work[Claimed]:
        """`claim` as work for a transaction of its own."""
        return lambda connection: self.claim(
            connection, pairs, limit, lease, token, suspicion=suspicion, prefetch=prefetch
        )

    def settling(
        self, settlements: Sequence[Settlement], *, skip_locked: bool = False
    ) -> Work[SettleResult]:
        """`settle_and_chain` as work for a transaction of its own."""
        return lambda connection: self.settle_and_chain(
            connection, settlements, skip_locked=skip_locked
        )

    def settling_one(self, settlement: Settlement) -> Work[SettleResult]:
        """`settling` of one row without a unit; a session that caches plans makes a new one."""
        return self.settling([settlement])

    def settle_and_chain(
        self,
        connection: Connection,
        settlements: Sequence[Settlement],
        *,
        skip_locked: bool = False,
    ) -> SettleResult:
        """`settle`, unit by unit, and insert the messages published with them; see `units`."""
        return settle_units(self, connection, settlements, skip_locked=skip_locked)

    def remove_first(
        self,
        connection: Connection,
        settlements: Sequence[Settlement],
        rows: Sequence[ClaimedMessage],
        holder: UUID,
        lease: float,
        worker: str,
    ) -> SettleResult:
        """`settle` for ACK_FIRST, and record that the handlers of the removed `rows` start.

        Both are one transaction, so every removed row has its record.
        """
        result = self.settle(connection, settlements)
        if started := [row for row in rows if row.id in result.settled]:
            note_started(connection, self.tables.policy_state, started, holder, lease, worker)
        return result

    def lock_order(self, connection: Connection, queues: Sequence[str]) -> set[str]:
        """Lock the claims of those of `queues` that no other claim has locked; returns those.

        An ordered claim of another process skips them until the transaction ends.
        """
        return lock_order(connection, self.tables.policy_state, queues)

    def claimed(self, rows: Iterable[Sequence[Any]], token: UUID) -> list[ClaimedMessage]:
        """Make messages of rows selected as `CLAIMED_COLUMNS`; unreadable ones are rejected."""
        return [self._claimed_row(row, token) for row in rows]

    def _claimed_row(self, r: Sequence[Any], token: UUID) -> ClaimedMessage:
        try:
            return self._read_row(r, token)
        except UNREADABLE:
            pass
        # Another program has written this row. It must not fail the claim, as then the other rows
        # of the claim would not be handled either.
        wrong = [
            n for n in _TIMES if not self._is_time(r[n], needed=CLAIMED_COLUMNS[n] in NEEDED_TIMES)
        ]
        usable = list(r)
        for n in wrong:
            usable[n] = r[14] if CLAIMED_COLUMNS[n] in NEEDED_TIMES else None
        try:
            row = self._read_row(usable, token)
        except UNREADABLE as error:
            now = self.time(r[14])
            return ClaimedMessage(
                r[0],
                r[1],
                b"",
                r[3],
                r[4],
                None,
                0,
                1,
                1,
                now,
                now,
                None,
                None,
                None,
                now,
                token,
                outcome=Reject(UNDECODABLE, error),
            )
        names = [CLAIMED_COLUMNS[n] for n in wrong]
        self.note_unusable(row.id, names)
        found = ", ".join(f"{name} is {short(r[n])}" for n, name in zip(wrong, names, strict=True))
        self.warn(
            f"message {row.id} of queue {row.queue!r} is delivered at once: its {found}, which is "
            "no time"
        )
        return row

    def note_unusable(self, message_id: int, names: Sequence[str]) -> None:  # noqa: B027
        """Record that these columns of a message that was just claimed hold invalid times."""

    def _is_time(self, value: Any, *, needed: bool) -> bool:
        if value is None:
            return not needed
        try:
            self.time(value).astimezone(timezone.utc)
        except UNREADABLE:
            return False
        return True

    def _read_row(self, r: Sequence[Any], token: UUID) -> ClaimedMessage:
        at = self.time
        return ClaimedMessage(
            r[0],
            r[1],
            load_payload(r[2]),
            r[3],
            r[4],
            load_text(r[5]),
            int(r[6]),
            int(r[7]),
            int(r[8]),
            at(r[9]),
            at(r[10]),
            None if r[11] is None else at(r[11]),
            None if r[12] is None else at(r[12]),
            None if r[13] is None else at(r[13]),
            at(r[14]),
            token,
            int(r[15]),
        )

    def time(self, value: Any) -> Any:
        """A selected time as an aware datetime (UTC)."""
        return value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)


def load_payload(value: Any) -> bytes:
    """The body as selected: bytes; SQLite also stores text and numbers there."""
    if isinstance(value, bytes):
        return value
    return bytes(value) if isinstance(value, bytearray | memoryview) else str(value).encode()

"""What every database must be able to do, and the parts of it they share.

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
"""What reading a value raises that is none of its column."""
NEEDED_TIMES = ("created_at", "next_attempt_at")
"""Times that every message has: where they are none they count as now, and any other as not there.
"""
_TIMES = range(CLAIMED_COLUMNS.index("created_at"), CLAIMED_COLUMNS.index("acquired_at"))

_OPEN = """
  WHERE NOT EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = 'paused' AND s.{key} = q.queue AND (s.expires_at IS NULL \
OR s.expires_at > {now}))"""

UNRESTORED = "sqlbroker_unrestored"
"""In the `info` of a connection whose session is not as the application had it; `restore` takes it
out."""


class Dialect(ABC):
    """All SQL of one database over the tables of one broker."""

    name: str
    """SQLAlchemy's name of the database."""
    isolation_level: str | None = None
    """Isolation level of the broker's own transactions; None leaves the engine's."""
    cancel_once = False
    """Whether the driver can hang when it is cancelled again while it ends a connection."""
    outwaits_clients = False
    """Whether the server goes on waiting for a lock, in the way of others, when its client has
    given up."""
    can_listen = False
    """Whether a wake-up can arrive from another process."""
    ordered: "OrderedClaims"
    """Claims that keep the order of each key."""
    scheduled: "PolicyClaims"
    """Claims under scheduling policies."""
    silent_sessions: "DeadSessions | None" = None
    """Finds sessions that no time limit of the server's ends; None where there are none."""
    known_limit: SizeLimit | None = None
    """How large a message may be, as far as is known without asking."""
    handler_locks: "HandlerLocks"
    """Locks that handlers' transactions begin with."""

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
        """Told of rows that a foreign producer has given a time that is none; set by the broker."""
        self.time_limit = 30.0
        """Seconds that a transaction of the broker's may take; set by the store."""

    def add_statement(self, name: str, sql: str, *binds: Any, **extra: str) -> TextClause:
        """Fill the table names into `sql`, declare its binds and keep it under `name`."""
        clause = text(sql.format(**{**self.names, **extra}).strip())
        self.sql[name] = clause.bindparams(*binds) if binds else clause
        return self.sql[name]

    def add_looks(self, pairs: str, now: str, *binds: Any) -> None:
        """Keep the look for ready `pairs` of all queues, and of those that are not paused at the
        database's `now`.
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

        A server ends the session if nothing is sent in the transaction for `idle_limit` seconds: a
        machine that vanishes without closing its sockets must not keep rows locked. What that
        leaves in the session, `restore` puts back.
        """

    def begin_anew(self, connection: Connection, idle_limit: float) -> None:
        """`begin` for statements whose plans are to be made for the tables as they are, where a
        session keeps plans.
        """
        self.begin(connection, idle_limit)

    def allow_idling(self, connection: Connection, seconds: float) -> None:  # noqa: B027
        """Set the limit anew in a transaction that was begun with one."""

    def needs_restore(self, connection: Connection) -> bool:
        """Whether `begin` has left something in the session."""
        return UNRESTORED in connection.info

    def restore(self, connection: Connection) -> None:  # noqa: B027 - most databases need nothing here
        """Leave the session as the application had it; after the end of the transaction."""

    def setup(self, connection: Connection) -> None:  # noqa: B027 - most databases need nothing here
        """Check (and set, where it is the database's own) what the broker relies on; once per
        start.
        """

    def size_limit(self, connection: Connection) -> SizeLimit:  # noqa: ARG002
        """How large a message may be that is sent on `connection`."""
        assert self.known_limit is not None  # noqa: S101 - a dialect that has to ask does
        return self.known_limit

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether repeating the transaction may succeed: deadlock, lock wait, full disk, …"""

    @abstractmethod
    def ends_session(self, error: BaseException) -> bool:
        """Whether the server has ended the session: what it was doing may have been done."""

    @abstractmethod
    def spoils(self, error: BaseException) -> bool:
        """Whether the connection must not be used again: its session has ended, or is a read-only
        server's.
        """

    def lock_wait_ended(self, error: BaseException) -> bool:  # noqa: ARG002
        """Whether a statement gave up waiting for a lock after the session's limit (see
        `lock_wait_limit`).
        """
        return False

    @abstractmethod
    def now(self, connection: Connection) -> datetime:
        """The database's clock (aware, UTC)."""

    @abstractmethod
    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows`; their ids in the order given, None where dedup_id exists already."""

    def wait_for_dedup_ids(self, connection: Connection, rows: Sequence[NewMessage]) -> None:  # noqa: B027
        """Wait until no other transaction holds a dedup_id of `rows`, where an insert that waits is
        in the way of others.
        """

    @abstractmethod
    def ready_pairs(
        self, connection: Connection, queues: Sequence[str], *, only_open: bool = False
    ) -> ReadyPairs:
        """The (queue, priority) pairs with claimable rows, queues in the order given, priority
        falling.

        With `only_open` those of queues that are paused for the whole fleet are left out.
        """

    def mend_due_times(self, connection: Connection, pairs: Sequence[ReadyPair]) -> None:  # noqa: B027
        """Make those rows of `pairs` due whose due time is none, where the database keeps such;
        with a warning.
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

        With `prefetch` its first rows are leased for `lease` seconds and the others for
        `prefetch.lease`, which `ClaimedMessage.prefetched` tells. With `suspicion` no suspect is
        leased: it would be charged with what happens to the others.
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
        """Lease those of `ids` that are due in one of `queues` and not locked, but no suspect; in
        no order.
        """

    @abstractmethod
    def renew(
        self, connection: Connection, leases: Leases, lease: float, *, skip_locked: bool = False
    ) -> set[int]:
        """Lengthen `leases` to `lease` seconds from now; the ids that are still held.

        Never shortens one: of two renewals under way at once, the database may execute the longer
        first. With `skip_locked` rows that somebody else has locked are among the ids, but stay as
        they are.
        """

    @abstractmethod
    def lock(
        self, connection: Connection, leases: Leases, *, skip_locked: bool = False
    ) -> set[int]:
        """Lock the rows of `leases` that are still held until the transaction ends; their ids."""

    @abstractmethod
    def still_held(self, connection: Connection, leases: Leases) -> set[int]:
        """The ids of `leases` that are still held, locked or not."""

    @abstractmethod
    def settle(self, connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
        """Write `settlements`, each only if its lease is still held."""

    @contextmanager
    def lock_wait_limit(self, connection: Connection, seconds: float) -> Iterator[None]:  # noqa: ARG002
        """Within it statements wait no longer than `seconds` for a lock; SQLite waits for its only
        one in `begin`.
        """
        yield

    @abstractmethod
    def release_stuck(self, connection: Connection, queues: Sequence[str], limit: int) -> int:
        """Give back up to `limit` rows whose lease has expired; how many."""

    @abstractmethod
    def lease_ends_in(self, connection: Connection, queues: Sequence[str]) -> float | None:
        """Seconds until the first lease in `queues` ends, whoever holds it, negative if it has
        ended; None without one.
        """

    @abstractmethod
    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """Give back, uncharged, what a claim with `token` has leased in `queues`; how many rows."""

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
        """`settling` what is no unit, with a plan for the tables as they are, where a session keeps
        plans.
        """
        return self.settling([settlement])

    def settle_and_chain(
        self,
        connection: Connection,
        settlements: Sequence[Settlement],
        *,
        skip_locked: bool = False,
    ) -> SettleResult:
        """`settle`, unit by unit, and insert what is chained to them; see `units`."""
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
        """`settle`, and note that the handlers of those `rows` that were written are about to
        start.
        """
        result = self.settle(connection, settlements)
        if started := [row for row in rows if row.id in result.settled]:
            note_started(connection, self.tables.policy_state, started, holder, lease, worker)
        return result

    def lock_order(self, connection: Connection, queues: Sequence[str]) -> set[str]:
        """Keep other ordered claims away from those of `queues` that nobody claims from now; which
        they are.
        """
        return lock_order(connection, self.tables.policy_state, queues)

    def claimed(self, rows: Iterable[Sequence[Any]], token: UUID) -> list[ClaimedMessage]:
        """Make `ClaimedMessage`s of rows selected as `CLAIMED_COLUMNS`; what cannot be read is
        rejected.
        """
        return [self._claimed_row(row, token) for row in rows]

    def _claimed_row(self, r: Sequence[Any], token: UUID) -> ClaimedMessage:
        try:
            return self._read_row(r, token)
        except UNREADABLE:
            pass
        # Rows of a foreign producer: one that cannot be read must not keep the others from being
        # handled.
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
        """These columns of a message that was just claimed hold no time."""

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

"""The operations that every database implements.

Their methods are synchronous and take an SQLAlchemy `Connection`, so that the same code serves
asyncio (through `AsyncConnection.run_sync`) and synchronous callers. None of them begins or
commits; `store` does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Select, Table

from faststream_sqlbroker.core.rows import (
    ClaimedMessages,
    Leases,
    NewMessage,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.constants import CONSTANTS
from faststream_sqlbroker.database.parts.claimed_rows import (
    CLAIMED_COLUMNS,
    ClaimedRows,
)
from faststream_sqlbroker.database.parts.policy_state import SCOPE, lock_order
from faststream_sqlbroker.database.parts.sizes import SizeLimit
from faststream_sqlbroker.database.statements import Statements
from faststream_sqlbroker.schema.tables import COPIED_COLUMNS, Tables
from faststream_sqlbroker.schema.types import MYSQL

UNRESTORED = "sqlbroker_unrestored"
"""Key in the `info` of a connection whose session settings the broker has changed; `restore`
changes them back and removes the key.
"""


T = TypeVar("T")
AnySelect = TypeVar("AnySelect", bound=Select[Any])


class DialectOperations(ClaimedRows, ABC):
    """The SQL of a database over the tables of a broker, operation by operation.

    Code built from operations, such as ordered claims, takes this class; `Dialect` has both.
    """

    name: str
    """SQLAlchemy's name of the database."""
    isolation_level: str | None = None
    """Isolation level of the broker's own transactions; None leaves the engine's."""
    cancel_once = False
    """True if a second cancellation, while the driver closes a connection, can make it hang."""
    outwaits_clients = False
    """True if the server continues to wait for a lock after its client has given up. Such a wait
    blocks other transactions.
    """
    one_writer = False
    """True if a transaction that writes keeps every other transaction from writing."""
    can_listen = False
    """True if a wake-up can arrive from another process."""
    has_row_ranges = False
    """True if a comparison of several columns at once is a range of their index."""
    knows_implied = False
    """True if a partial index serves conditions that imply the index's own condition. If both
    conditions are in the statement, such a database takes them for independent and expects far too
    few rows.
    """
    known_size_limit: SizeLimit | None = None
    """The maximum size of a message, if known without a query to the server."""
    claimed_expressions: ClassVar[Mapping[str, str]]
    """Expressions for the columns that a claim does not select by their plain names."""

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        """Prepare the statements of `tables`, quoted for `sqlalchemy_dialect`.

        `names` has the values for the names in braces in the SQL files: tables, columns and
        constants.
        """
        preparer = sqlalchemy_dialect.identifier_preparer
        self.tables = tables
        key = preparer.quote("key")
        schema = tables.message.schema
        message = preparer.format_table(tables.message)
        self.names = {
            **CONSTANTS,
            "message": message,
            "message_literal": "'" + message.replace("'", "''") + "'",
            "archived": ", ".join(key if name == "key" else name for name in COPIED_COLUMNS),
            "claimed": ", ".join(
                self.claimed_expressions.get(name, name) for name in CLAIMED_COLUMNS
            ),
            "key_column": key,
            "schema_prefix": "" if schema is None else preparer.quote(schema) + ".",
            "ready_index": preparer.quote(f"{tables.message.name}_ready"),
            "leased_index": preparer.quote(f"{tables.message.name}_leased"),
            "policy_state": preparer.format_table(tables.policy_state),
            "key_index": preparer.quote(f"{tables.message.name}_key"),
            "policy_key_index": preparer.quote(f"{tables.message.name}_policy_key"),
        }
        if tables.archive is not None:
            self.names["archive"] = preparer.format_table(tables.archive)
            self.names["archived_index"] = preparer.quote(f"{tables.archive.name}_archived")
            self.names["archive_queue_index"] = preparer.quote(f"{tables.archive.name}_queue")
            uncompleted = preparer.quote(f"{tables.archive.name}_uncompleted")
            self.names["uncompleted_index"] = uncompleted
        self.sql = self.load_statements(self.name)
        self._built_statements: dict[str, Any] = {}
        self.warn = lambda _text: None
        self.time_limit = 30.0
        """Seconds that a transaction of the broker may take; set by the store."""

    def load_statements(self, database: str) -> Statements:
        """Load the statements of `database` over the broker's tables."""
        return Statements(database, self.names)

    def get_or_build(self, name: str, build: Callable[[], T]) -> T:
        """Return the statement `name`, which `build` makes of SQLAlchemy's constructs on first use.

        Building a statement costs about as much CPU as sending it.
        """
        if name not in self._built_statements:
            self._built_statements[name] = build()
        statement: T = self._built_statements[name]
        return statement

    def add_index_hint(
        self, statement: AnySelect, table: Table, index: str | None, *, on_sqlite: bool = False
    ) -> AnySelect:
        """Add a hint to `statement` to read `table` by `index` (None: the primary key).

        Without it, old statistics may make the server read a whole table. The hint is for MySQL and
        MariaDB; with `on_sqlite` also for SQLite, which refuses the statement if the index cannot
        serve it.
        """
        name = self.names[index] if index else "PRIMARY"
        if self.name in MYSQL:
            return statement.with_hint(table, f"FORCE INDEX ({name})", self.name)
        if index and on_sqlite:
            return statement.with_hint(table, f"INDEXED BY {name}", "sqlite")
        return statement

    @property
    def has_archive(self) -> bool:
        """True if finished messages can be kept."""
        return self.tables.archive is not None

    @property
    def archive(self) -> Table:
        """The archive, which the caller knows to exist."""
        archive = self.tables.archive
        assert archive is not None  # noqa: S101 - the caller has looked
        return archive

    def begin(self, connection: Connection, idle_limit: float | None = None) -> None:
        """Prepare the transaction that `connection` has just begun for the broker's writes.

        With `idle_limit`, the server ends the session if the transaction is idle for that many
        seconds: a machine that vanishes without closing its sockets must not keep rows locked.
        `restore` undoes the changes to the session.
        """

    def begin_replanning(self, connection: Connection, idle_limit: float) -> None:
        """Prepare the transaction as `begin` does, and let it use no cached query plans.

        A cached plan may be for the table as it was earlier, for example almost empty.
        """
        self.begin(connection, idle_limit)

    def set_idle_limit(self, connection: Connection, seconds: float) -> None:
        """Change the idle limit of a transaction that was begun with such a limit."""

    def restore(self, connection: Connection) -> None:
        """Restore the former settings of the session; called after the end of the transaction."""

    def setup(self, connection: Connection) -> None:
        """Check the settings that the broker needs, and set the database file's settings.

        Runs once per start.
        """

    def get_size_limit(self, connection: Connection) -> SizeLimit:  # noqa: ARG002
        """Return the maximum size of a message that is sent on `connection`."""
        assert self.known_size_limit is not None  # noqa: S101 - a dialect that has to ask does
        return self.known_size_limit

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Return True if a repeat may succeed: deadlock, lock wait, full disk, …"""

    @abstractmethod
    def ends_session(self, error: BaseException) -> bool:
        """Return True if the server ended the session: a COMMIT under way may have succeeded."""

    @abstractmethod
    def is_denied(self, error: BaseException) -> bool:
        """Return True if a right or a table is missing; `error` is the driver's own."""

    @staticmethod
    def is_read_only(error: BaseException) -> bool:  # noqa: ARG004
        """Return True if the server takes no writes at all at present."""
        return False

    @abstractmethod
    def spoils_connection(self, error: BaseException) -> bool:
        """Return True if the connection must not be used again.

        Its session has ended, or its server is read-only.
        """

    @abstractmethod
    def was_never_sent(self, error: BaseException) -> bool:
        """Return True if the driver refused the statement before sending anything.

        Its connection is closed, or has not ended an earlier statement.
        """

    def is_lock_timeout(self, error: BaseException) -> bool:  # noqa: ARG002
        """Return True if a statement exceeded the lock timeout."""
        return False

    def bind_list(self, values: Sequence[Any]) -> Any:
        """Return a list in the form that a statement takes."""
        return list(values)

    def bind_time(self, value: datetime) -> Any:
        """Return an aware datetime in the form that this database stores."""
        return value

    def now(self, connection: Connection) -> datetime:
        """Return the database's time (aware, UTC)."""
        value: datetime = self.time(connection.execute(self.sql["now"]).scalar_one())
        return value

    @abstractmethod
    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows`; return their ids in order, None where the dedup_id exists already."""

    def wait_for_dedup_ids(self, connection: Connection, rows: Sequence[NewMessage]) -> None:
        """Wait until no other transaction holds a dedup_id of `rows`.

        Only for databases on which an insert that waits for a dedup_id blocks other inserts.
        """

    @abstractmethod
    def find_ready_pairs(
        self, connection: Connection, queues: Sequence[str], *, only_open: bool = False
    ) -> ReadyPairs:
        """Find the (queue, priority) pairs with claimable rows, and when the first is due.

        A claimable row waits in PENDING or RETRYABLE, due or not. The pairs are in the order of
        `queues`, priorities descending. With `only_open`, queues that are paused for the whole
        fleet are skipped.
        """

    def repair_due_times(self, connection: Connection, pairs: Sequence[ReadyPair]) -> None:
        """Make rows of `pairs` with an invalid due time due now, and log a warning.

        Only SQLite can hold such rows: its columns accept any value.
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
        suspect_rule: SuspectRule | None = None,
    ) -> ClaimedMessages:
        """Lease the unlocked rows of `ids` that are due in `queues`, in any order.

        With `suspect_rule`, no suspect is leased: a message that may have killed its process runs
        alone.
        """

    @abstractmethod
    def renew(self, connection: Connection, leases: Leases, lease: float) -> set[int]:
        """Extend the leases that are still held to `lease` seconds from now; return their ids.

        A lease is never shortened: if two renewals run at the same time, the database may execute
        the longer renewal first. Waits for rows that another transaction has locked.
        """

    def renew_free(
        self, connection: Connection, leases: Leases, lease: float
    ) -> tuple[set[int], set[int]]:
        """Extend `leases` as `renew` does, but only read rows that another transaction has locked.

        Returns:
            The extended ids, and the ids that are still held but locked.
        """
        free = self.extend_free(connection, leases, lease)
        remaining = [pair for pair in leases if pair[0] not in free]
        return free, self.find_held(connection, remaining) if remaining else set()

    @abstractmethod
    def extend_free(self, connection: Connection, leases: Leases, lease: float) -> set[int]:
        """Extend the held leases whose rows no other transaction has locked; return the ids."""

    @abstractmethod
    def lock(
        self, connection: Connection, leases: Leases, *, skip_locked: bool = False
    ) -> set[int]:
        """Lock the rows of `leases` that are still held; return their ids.

        The locks last until the transaction ends.
        """

    @abstractmethod
    def find_held(self, connection: Connection, leases: Leases) -> set[int]:
        """Return the ids of `leases` that are still held, locked or not."""

    @abstractmethod
    def settle(self, connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
        """Write each settlement whose lease is still held."""

    @contextmanager
    def limit_lock_wait(self, connection: Connection, seconds: float) -> Iterator[None]:  # noqa: ARG002
        """Limit the wait of statements in this context for a lock to `seconds`.

        SQLite has a single lock and waits for it in `begin`.
        """
        yield

    def release_stuck(
        self,
        connection: Connection,
        queues: Sequence[str],
        limit: int,
        before: datetime | None = None,
    ) -> int:
        """Release up to `limit` rows whose lease expired before `before` (None: before now).

        Their holder has probably died; the rows can be claimed again, and the lost delivery stays
        counted.

        Returns:
            The number of released rows.
        """
        bound_time = None if before is None else self.bind_time(before)
        binds = {"queues": self.bind_list(queues), "limit": limit, "before": bound_time}
        return len(connection.execute(self.sql["release_stuck"], binds).all())

    def get_seconds_to_lease_end(
        self, connection: Connection, queues: Sequence[str]
    ) -> float | None:
        """Return the seconds until the first lease in `queues` ends, None without a lease.

        Negative if that lease has ended.
        """
        binds = {"queues": self.bind_list(queues)}
        seconds: float | None = connection.execute(self.sql["lease_ends_in"], binds).scalar_one()
        return seconds

    @abstractmethod
    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """Release, uncharged, the rows that a claim leased with `token`; return their number.

        For a claim whose answer was lost: otherwise the rows would wait until their leases expire.
        """

    def lock_order(self, connection: Connection, queues: Sequence[str]) -> set[str]:
        """Lock the claims of each free queue of `queues`; return the locked queues.

        Serialises claims of one queue whose result depends on its other leases, as in `ordered`. A
        claim of another process skips locked queues until the transaction ends.
        """
        return lock_order(connection, self.tables.policy_state, queues)

    def lock_scopes(self, connection: Connection, names: Sequence[str]) -> set[str]:
        """Lock each of the budgets `names` that no other claim has locked; return the locked names.

        A budget is a rate or a number that several queues share (`scope`). To avoid deadlocks, lock
        budgets after the queues, and before any message.
        """
        return lock_order(connection, self.tables.policy_state, names, SCOPE)

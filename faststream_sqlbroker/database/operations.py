"""The operations that every database implements.

Their methods are synchronous and take a SQLAlchemy `Connection`, so that the same code serves
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
    Claimed,
    Leases,
    NewMessage,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.core.suspects import Suspicion
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
changes them back and removes the key."""


T = TypeVar("T")
AnySelect = TypeVar("AnySelect", bound=Select[Any])


class Operations(ClaimedRows, ABC):
    """The SQL of one database over the tables of one broker, operation by operation.

    What is built of operations, such as ordered claims, takes this class; `Dialect` has both.
    """

    name: str
    """SQLAlchemy's name of the database."""
    isolation_level: str | None = None
    """Isolation level of the broker's own transactions; None leaves the engine's."""
    cancel_once = False
    """Whether a second cancellation, while the driver closes a connection, can make it hang."""
    outwaits_clients = False
    """Whether the server goes on waiting for a lock after its client has given up. Such a wait
    blocks other transactions."""
    one_writer = False
    """Whether a transaction that writes keeps every other one from writing."""
    can_listen = False
    """Whether a wake-up can arrive from another process."""
    ranges_by_rows = False
    """Whether a comparison of several columns at once is a range of their index."""
    knows_implied = False
    """Whether a partial index serves conditions that its own follows from. Such a database takes
    both, if both are there, for independent ones, and expects far too few rows."""
    known_limit: SizeLimit | None = None
    """How large a message may be, if known without asking the server."""
    claimed_as: ClassVar[Mapping[str, str]]
    """How a claim selects a column that it does not select by its plain name."""

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        """Prepare the statements of `tables`, quoted for `sqlalchemy_dialect`."""
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
            "claimed": ", ".join(self.claimed_as.get(name, name) for name in CLAIMED_COLUMNS),
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
        self.sql = self.statements_of(self.name)
        self._built: dict[str, Any] = {}
        self.warn = lambda _text: None
        self.time_limit = 30.0
        """Seconds that a transaction of the broker may take; set by the store."""

    def statements_of(self, database: str) -> Statements:
        """The statements of `database` over these tables."""
        return Statements(database, self.names)

    def built(self, name: str, build: Callable[[], T]) -> T:
        """A statement of SQLAlchemy's constructs, built when it is first needed.

        To build one costs about as much CPU as to send it.
        """
        if name not in self._built:
            self._built[name] = build()
        found: T = self._built[name]
        return found

    def use_index(
        self, statement: AnySelect, table: Table, index: str | None, *, on_sqlite: bool = False
    ) -> AnySelect:
        """`statement` with a hint to read `table` by `index`, None: by the primary key, on MySQL
        and MariaDB; `on_sqlite` there, too, where the index must serve the statement.
        """
        name = self.names[index] if index else "PRIMARY"
        if self.name in MYSQL:
            return statement.with_hint(table, f"FORCE INDEX ({name})", self.name)
        if index and on_sqlite:
            return statement.with_hint(table, f"INDEXED BY {name}", "sqlite")
        return statement

    @property
    def has_archive(self) -> bool:
        """Whether finished messages can be kept."""
        return self.tables.archive is not None

    def begin(self, connection: Connection, idle_limit: float | None = None) -> None:
        """Prepare the transaction that `connection` has just begun for the broker's writes.

        With `idle_limit`, the server ends the session if the transaction is idle for that many
        seconds: a machine that vanishes without closing its sockets must not keep rows locked.
        `restore` undoes what this changes in the session.
        """

    def begin_anew(self, connection: Connection, idle_limit: float) -> None:
        """`begin`, and if the session caches plans, have new ones made for the current tables."""
        self.begin(connection, idle_limit)

    def allow_idling(self, connection: Connection, seconds: float) -> None:
        """Set the limit anew in a transaction that was begun with one."""

    def restore(self, connection: Connection) -> None:
        """Give the session its former settings; called after the end of the transaction."""

    def setup(self, connection: Connection) -> None:
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
    def is_denied(self, error: BaseException) -> bool:
        """Whether a right or a table is missing; `error` is the driver's own."""

    @abstractmethod
    def spoils(self, error: BaseException) -> bool:
        """Whether the connection must not be used again.

        Its session has ended, or its server is read-only.
        """

    @abstractmethod
    def was_never_sent(self, error: BaseException) -> bool:
        """Whether the driver refused the statement before it sent anything.

        Its connection is closed, or has not ended an earlier statement.
        """

    def lock_wait_ended(self, error: BaseException) -> bool:  # noqa: ARG002
        """Whether a statement waited for a lock longer than `lock_wait_limit` allows."""
        return False

    def listed(self, values: Sequence[Any]) -> Any:
        """A list as a statement takes it."""
        return list(values)

    def bind_time(self, value: datetime) -> Any:
        """An aware datetime as this database stores it."""
        return value

    def now(self, connection: Connection) -> datetime:
        """The database's clock (aware, UTC)."""
        value: datetime = self.time(connection.execute(self.sql["now"]).scalar_one())
        return value

    @abstractmethod
    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows`; their ids in the order given, None where dedup_id exists already."""

    def wait_for_dedup_ids(self, connection: Connection, rows: Sequence[NewMessage]) -> None:
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

    def mend_due_times(self, connection: Connection, pairs: Sequence[ReadyPair]) -> None:
        """Make rows of `pairs` with an invalid due time due now, with a warning.

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
        suspicion: Suspicion | None = None,
    ) -> Claimed:
        """Lease those of `ids` that are due in one of `queues` and not locked; unordered.

        With `suspicion`, no suspect is leased.
        """

    @abstractmethod
    def renew(self, connection: Connection, leases: Leases, lease: float) -> set[int]:
        """Extend those of `leases` that are still held to `lease` seconds from now; returns their
        ids.

        A lease is never shortened: if two renewals run at once, the database may execute the longer
        one first. Rows that another transaction has locked are waited for.
        """

    @abstractmethod
    def renew_free(
        self, connection: Connection, leases: Leases, lease: float
    ) -> tuple[set[int], set[int]]:
        """As `renew`, of the rows that no other transaction has locked; returns their ids, and
        those of the others that are still held.
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

    def release_stuck(
        self,
        connection: Connection,
        queues: Sequence[str],
        limit: int,
        before: datetime | None = None,
    ) -> int:
        """Give back up to `limit` rows whose lease ended before that moment, None: by now; returns
        how many.
        """
        moment = None if before is None else self.bind_time(before)
        binds = {"queues": self.listed(queues), "limit": limit, "before": moment}
        return len(connection.execute(self.sql["release_stuck"], binds).all())

    def lease_ends_in(self, connection: Connection, queues: Sequence[str]) -> float | None:
        """Seconds until the first lease of any process in `queues` ends; None: there is no lease.

        Negative if that lease has ended.
        """
        binds = {"queues": self.listed(queues)}
        found: float | None = connection.execute(self.sql["lease_ends_in"], binds).scalar_one()
        return found

    @abstractmethod
    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """Give back, uncharged, the rows that a claim leased with `token`; returns their number."""

    def lock_order(self, connection: Connection, queues: Sequence[str]) -> set[str]:
        """Lock the claims of those of `queues` that no other claim has locked; returns those.

        An ordered claim of another process skips them until the transaction ends.
        """
        return lock_order(connection, self.tables.policy_state, queues)

    def lock_scopes(self, connection: Connection, names: Sequence[str]) -> set[str]:
        """Lock those of the budgets `names` that no other claim has locked; returns those.

        After the queues, and before any message.
        """
        return lock_order(connection, self.tables.policy_state, names, SCOPE)

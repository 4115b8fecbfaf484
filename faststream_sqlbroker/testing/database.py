"""The private database of a test: a temporary SQLite file, whose clock is the test's."""

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import StaticPool

from faststream_sqlbroker.core.policies.flags import HELD_BURST
from faststream_sqlbroker.core.policies.standby import STANDBY
from faststream_sqlbroker.database.parts.mirror_rows import MIRROR
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.migrate import create_all
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.testing.clock import VirtualClock

_UNIX_EPOCH = 2440587.5
"""1970-01-01 as a Julian day."""
_DAY_SECONDS = 86_400
"""Seconds of a day."""
_CLOCK_KEY = "sqlbroker-test-clock"
_LIVE_STATES = "'PENDING', 'RETRYABLE'"
_DUE_SQL = (
    f"CASE WHEN next_attempt_at >= {STANDBY} AND policy_marks & {HELD_BURST} "
    f"THEN next_attempt_at - {STANDBY} ELSE next_attempt_at END"
)
"""SQL for the time when a message is due, or is checked if it stands by."""
_IS_MIRRORED_SQL = f"substr(scope, 1, {len(MIRROR)}) = '{MIRROR}'"
"""SQL condition for rows of the policy state that belong to messages with a lookup value."""
COPIED_COLUMNS = (
    "id",
    "queue",
    "key",
    "priority",
    "dedup_id",
    "headers",
    "payload",
    "created_at",
    "next_attempt_at",
    "expires_at",
)
"""Columns of a message for `outbox`, with the values at its publish."""


class TestNow:
    """SQLite's `julianday`: 'now' is the test's clock, and real time after the test."""

    __test__ = False

    def __init__(self, clock: VirtualClock) -> None:
        """Use `clock`."""
        self.clock: VirtualClock | None = clock
        self._original = sqlite3.connect(":memory:", check_same_thread=False)

    def __call__(self, moment: Any) -> Any:
        """Return the Julian day of `moment`: SQLite's form of a time, in days.

        Only 'now' is replaced; any other moment goes to SQLite's own function.
        """
        if moment != "now":
            return self._original.execute("SELECT julianday(?)", (moment,)).fetchone()[0]
        clock = self.clock
        seconds = time.time() if clock is None else clock.microseconds / 1_000_000
        return _UNIX_EPOCH + seconds / _DAY_SECONDS


InsertFunction = Callable[[AsyncConnection], Awaitable[list[int | None]]]


class LiveRow(NamedTuple):
    """A message that is not finished; rows sort by due time, priority, id."""

    due: int
    """Microseconds since 1970."""
    rank: int
    """The negated priority."""
    id: int
    queue: str
    lease_ends_at: int | None
    """None without a lease."""
    attempts: int
    error: str | None

    @property
    def next_time(self) -> int:
        """Time of the next event: the message is due, or the lease has ended."""
        return self.due if self.lease_ends_at is None else self.lease_ends_at + 1


class TestDatabase:
    """A SQLite file with the tables of all configurations of a test, and a separate reader.

    The reader needs no event loop: it reads the file while nothing else runs.
    """

    __test__ = False

    def __init__(self, clock: VirtualClock, engine: AsyncEngine | None = None) -> None:
        """Use `engine`, or a new file in a temporary folder.

        Each connection that leaves the engine's pool gets the test's clock.

        Raises:
            SetupError: `engine` is not SQLite with a file.
        """
        self._now = TestNow(clock)
        self._folder: Path | None = None
        self.is_external = engine is not None
        """True if the test passed its own engine."""
        if engine is None:
            self._folder = Path(tempfile.mkdtemp(prefix="sqlbroker-test-"))
            self.path = str(self._folder / "test.db")
            engine = create_async_engine(f"sqlite+aiosqlite:///{self.path}")
        else:
            self.path = _get_path(engine)
        self.engine = engine
        event.listen(engine.sync_engine, "checkout", self._install_clock)
        self._configs: set[SqlBrokerSchemaConfig] = set()
        self._reader: sqlite3.Connection | None = None
        self._live: dict[str, tuple[int, list[LiveRow]]] = {}

    def uses_connection(self, connection: Connection) -> bool:
        """Return True if `connection` belongs to the engine that the test has given."""
        return self.is_external and connection.engine.pool is self.engine.pool

    def create_tables(self, config: SqlBrokerSchemaConfig) -> None:
        """Create the missing tables of a configuration, and the outbox.

        In an empty file a cached script does this, much faster than the real creation. A private
        file needs no safety: it does not survive the test.
        """
        if config in self._configs:
            return
        self._configs.add(config)
        tables = build_tables(config)
        names = {table.name for table in (*tables.broker_tables, tables.version)}
        with closing(sqlite3.connect(self.path)) as connection:
            if not self.is_external:
                connection.execute("PRAGMA synchronous=OFF")
                connection.execute("PRAGMA journal_mode=WAL")
            existing = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            if not names & existing:
                connection.executescript(_build_script(config))
        if names & existing:
            _create_tables(self.path, config)

    def _install_clock(self, connection: Any, record: Any, _proxy: Any) -> None:
        """Make SQLite's current time the test's clock on a connection that leaves the pool.

        The broker's statements read the time by `julianday`. A given engine may have connections of
        an earlier test, so each is checked.
        """
        if record.info.get(_CLOCK_KEY) is not self._now:
            # Trap: statements that the connection has prepared before keep SQLite's own function
            # until a function with the same number of arguments is replaced, which the second call
            # does.
            for _ in range(2):
                connection.create_function("julianday", 1, self._now)
            if not self.is_external:
                connection.execute("PRAGMA synchronous=OFF")
            record.info[_CLOCK_KEY] = self._now

    async def close(self) -> None:
        """Remove the file; a given engine keeps its file, without the outbox.

        Its connections may go on after the test: they read real time from now on.
        """
        self._now.clock = None
        event.remove(self.engine.sync_engine, "checkout", self._install_clock)
        if self._reader is not None:
            self._reader.close()
        if self.is_external:
            async with self.engine.connect() as connection:
                for config in self._configs:
                    await connection.exec_driver_sql(f"DROP TABLE {_get_outbox_name(config)}")
                    await connection.exec_driver_sql(
                        f"DROP TRIGGER {_get_outbox_name(config)}_copy"
                    )
                await connection.commit()
        else:
            await self.engine.dispose()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- reading -------------------------------------------------------------------------------

    def read(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return committed rows of the file, by a connection that is opened at the first call.

        It is synchronous, so that failed assertions, and tests without an event loop, can read.
        """
        if self._reader is None:
            self._reader = sqlite3.connect(self.path, check_same_thread=False, timeout=10)
            self._reader.isolation_level = None
        return self._reader.execute(statement, values).fetchall()

    def list_live(self, table: str) -> "list[LiveRow]":
        """Return the live messages, by due time, priority, id; cached until the next commit."""
        # SQLite changes this number with each commit of another connection.
        [(version,)] = self.read("PRAGMA data_version")
        if self._live.get(table, (None,))[0] != version:
            rows = self.read(
                f"SELECT {_DUE_SQL}, -priority, id, queue, lease_expires_at, "
                f"attempts_count, last_error FROM {table} ORDER BY 1, 2, 3"
            )
            self._live[table] = version, [LiveRow(*row) for row in rows]
        return self._live[table][1]

    def list_published(
        self, table: str, queue: str | None, message_id: int | None = None
    ) -> list[Any]:
        """Return `COPIED_COLUMNS` of published messages, in order; None is any queue, or any id.

        They come from the outbox, which keeps each message as published.
        """
        return self.read(
            f"SELECT {', '.join(COPIED_COLUMNS)} FROM {table}_outbox "
            "WHERE queue = coalesce(?, queue) AND id = coalesce(?, id) ORDER BY id",
            (queue, message_id),
        )

    def get_last_id(self, table: str) -> int:
        """Return the id of the last published message; 0 if there was none."""
        [(last_id,)] = self.read(f"SELECT max(id) FROM {table}_outbox")
        return 0 if last_id is None else int(last_id)

    async def reserve_ids(self, insert: "InsertFunction", table: str) -> list[int | None]:
        """Return the ids that `insert` would use, without inserting; no later insert uses them.

        A publish in the caller's transaction in another database needs its ids now, although the
        messages are inserted here only after its COMMIT. The rollback also resets SQLite's counter
        of ids (`sqlite_sequence`), which is therefore set past these ids.
        """
        async with self.engine.begin() as connection:
            await connection.exec_driver_sql("BEGIN IMMEDIATE")
            savepoint = await connection.begin_nested()
            ids = await insert(connection)
            await savepoint.rollback()
            if last_id := max((id_ for id_ in ids if id_ is not None), default=None):
                await connection.exec_driver_sql(
                    "DELETE FROM sqlite_sequence WHERE name = ?", (table,)
                )
                await connection.exec_driver_sql(
                    "INSERT INTO sqlite_sequence VALUES (?, ?)", (table, last_id)
                )
        return ids

    async def insert_with_ids(
        self, reserved_ids: Sequence[int], insert: "InsertFunction", table: str
    ) -> list[int]:
        """Insert messages with the ids that their publishers have already received.

        The rows get new ids first. These are then replaced in the table, in the outbox and in the
        records of messages with a lookup value.

        Returns:
            The ids of the messages that were inserted.
        """
        async with self.engine.begin() as connection:
            await connection.exec_driver_sql("BEGIN IMMEDIATE")
            ids = dict(zip(reserved_ids, await insert(connection), strict=True))
            # An inserted id of None is a message that was not stored, for its dedup_id exists.
            for reserved_id, inserted_id in ids.items():
                for name in (table, f"{table}_outbox"):
                    await connection.exec_driver_sql(
                        f"UPDATE {name} SET id = ? WHERE id = ?", (reserved_id, inserted_id)
                    )
                await connection.exec_driver_sql(
                    f"UPDATE {table}_policy_state SET counter = ?, key = ? "
                    f"WHERE {_IS_MIRRORED_SQL} AND counter = ?",
                    (reserved_id, str(reserved_id), inserted_id),
                )
        return [reserved_id for reserved_id, inserted_id in ids.items() if inserted_id is not None]

    async def remove_messages(self, table: str, ids: Sequence[int]) -> None:
        """Remove the messages `ids`, except those that a handler works on or has finished."""
        async with self.engine.begin() as connection:
            await connection.exec_driver_sql(
                f"DELETE FROM {table} WHERE id IN ({_build_placeholders(ids)}) AND state IN "
                f"({_LIVE_STATES})",
                tuple(ids),
            )


def _build_placeholders(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _get_outbox_name(config: SqlBrokerSchemaConfig) -> str:
    return f"{config.message_table_name}_outbox"


def _create_tables(path: str, config: SqlBrokerSchemaConfig) -> None:
    """Create missing tables, and the outbox: a table that keeps every message as published.

    A trigger copies each new message, because the message's row changes and goes away. The outbox
    of an earlier test is replaced.
    """
    outbox = _get_outbox_name(config)
    message = config.message_table_name
    columns = ", ".join(COPIED_COLUMNS)
    values = ", ".join(f"new.{name}" for name in COPIED_COLUMNS)
    copy = f"INSERT INTO {outbox} ({columns}) VALUES ({values}); END"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        create_all(connection, build_tables(config))
        for statement in (
            f"DROP TABLE IF EXISTS {outbox}",
            f"CREATE TABLE {outbox} AS SELECT {columns} FROM {message} WHERE 0",
            f"CREATE TRIGGER IF NOT EXISTS {outbox}_copy AFTER INSERT ON {message} BEGIN {copy}",
        ):
            connection.exec_driver_sql(statement)
    engine.dispose()


@cache
def _build_script(config: SqlBrokerSchemaConfig) -> str:
    """Build a script that creates empty tables in milliseconds; cached for all tests.

    The script is the dump of a temporary file, in which the tables were created as in a real
    database.
    """
    with tempfile.TemporaryDirectory(prefix="sqlbroker-test-") as folder:
        path = f"{folder}/template.db"
        _create_tables(path, config)
        with closing(sqlite3.connect(path)) as connection:
            # With the rows, such as the version of the tables; SQLite creates its own table by
            # itself.
            return "\n".join(
                line for line in connection.iterdump() if "sqlite_sequence" not in line
            )


def _get_path(engine: AsyncEngine) -> str:
    """Return the file of the application's engine; refuse anything but a SQLite file.

    A database in memory has no file that a second connection, the test's reader, could open.
    """
    name = engine.dialect.name
    path = engine.url.database
    if name != "sqlite" or not path or ":memory:" in path or isinstance(engine.pool, StaticPool):
        raise SetupError(
            "TestSqlBroker's engine= must be an AsyncEngine of a SQLite file, such as "
            f"sqlite+aiosqlite:///test.db, got {engine.url.render_as_string()!r}: one file holds "
            "both the messages and the tables of the handlers"
        )
    return path

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
from faststream_sqlbroker.database.parts.mirror import MIRROR
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.migrate import create_all
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.testing.clock import VirtualClock

_UNIX_EPOCH = 2440587.5
"""As a Julian day."""
_DAY = 86_400
"""Seconds."""
_OURS = "sqlbroker-test-clock"
_LIVE = "'PENDING', 'RETRYABLE'"
_DUE = (
    f"CASE WHEN next_attempt_at >= {STANDBY} AND policy_marks & {HELD_BURST} "
    f"THEN next_attempt_at - {STANDBY} ELSE next_attempt_at END"
)
"""When a message is due, or is looked at as it stands by."""
_MIRRORED = f"substr(scope, 1, {len(MIRROR)}) = '{MIRROR}'"
"""A row of the policy state that is of a message with a lookup value."""
COPIED = (
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
"""Columns of a message that `outbox` needs, as they were when it was published."""


class TestNow:
    """SQLite's `julianday`: 'now' is the test's clock, and real time after the test."""

    __test__ = False

    def __init__(self, clock: VirtualClock) -> None:
        """Read `clock`."""
        self.clock: VirtualClock | None = clock
        self._plain = sqlite3.connect(":memory:", check_same_thread=False)

    def __call__(self, moment: Any) -> Any:
        """The Julian day of `moment`."""
        if moment != "now":
            return self._plain.execute("SELECT julianday(?)", (moment,)).fetchone()[0]
        clock = self.clock
        seconds = time.time() if clock is None else clock.microseconds / 1_000_000
        return _UNIX_EPOCH + seconds / _DAY


Insert = Callable[[AsyncConnection], Awaitable[list[int | None]]]


class LiveRow(NamedTuple):
    """A message that is not finished; in order they stand by due time, priority, id."""

    due: int
    """Microseconds since 1970."""
    rank: int
    """The negative priority."""
    id: int
    queue: str
    lease_ends: int | None
    """None if nothing has its lease."""
    attempts: int
    error: str | None

    @property
    def moment(self) -> int:
        """When something happens to it: it is due, or its lease is over."""
        return self.due if self.lease_ends is None else self.lease_ends + 1


class TestDatabase:
    """A SQLite file with the tables of one or several sets of names, and a reader of its own.

    The reader needs no event loop: it looks at the file while nothing else runs.
    """

    __test__ = False

    def __init__(self, clock: VirtualClock, engine: AsyncEngine | None = None) -> None:
        """Use `engine`, or a new file.

        Raises:
            SetupError: `engine` is not SQLite with a file.
        """
        self._now = TestNow(clock)
        self._folder: Path | None = None
        self.given = engine is not None
        """Whether the engine is the test's own."""
        if engine is None:
            self._folder = Path(tempfile.mkdtemp(prefix="sqlbroker-test-"))
            self.path = str(self._folder / "test.db")
            engine = create_async_engine(f"sqlite+aiosqlite:///{self.path}")
        else:
            self.path = _file_of(engine)
        self.engine = engine
        event.listen(engine.sync_engine, "checkout", self._checked_out)
        self._configs: set[SqlBrokerSchemaConfig] = set()
        self._reader: sqlite3.Connection | None = None
        self._live: dict[str, tuple[int, list[LiveRow]]] = {}

    def leads_here(self, connection: Connection) -> bool:
        """Whether `connection` is one of the engine that the test has given."""
        return self.given and connection.engine.pool is self.engine.pool

    def add(self, config: SqlBrokerSchemaConfig) -> None:
        """Make the tables of these names, if they are not there."""
        if config in self._configs:
            return
        self._configs.add(config)
        tables = build_tables(config)
        names = {table.name for table in (*tables.ours, tables.version)}
        with closing(sqlite3.connect(self.path)) as plain:
            if not self.given:
                plain.execute("PRAGMA synchronous=OFF")
                plain.execute("PRAGMA journal_mode=WAL")
            known = {name for (name,) in plain.execute("SELECT name FROM sqlite_master")}
            if not names & known:
                plain.executescript(_script(config))
        if names & known:
            _make(self.path, config)

    def _checked_out(self, connection: Any, record: Any, _proxy: Any) -> None:
        if record.info.get(_OURS) is not self._now:
            # Statements that the connection has prepared before keep SQLite's own function until
            # one of the same number of arguments is replaced, which the second call does.
            for _ in range(2):
                connection.create_function("julianday", 1, self._now)
            if not self.given:
                connection.execute("PRAGMA synchronous=OFF")
            record.info[_OURS] = self._now

    async def close(self) -> None:
        """Remove the file; a given engine stays as it is."""
        self._now.clock = None
        event.remove(self.engine.sync_engine, "checkout", self._checked_out)
        if self._reader is not None:
            self._reader.close()
        if self.given:
            async with self.engine.connect() as connection:
                for config in self._configs:
                    await connection.exec_driver_sql(f"DROP TABLE {_outbox(config)}")
                    await connection.exec_driver_sql(f"DROP TRIGGER {_outbox(config)}_copy")
                await connection.commit()
        else:
            await self.engine.dispose()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- reading -------------------------------------------------------------------------------

    def read(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Rows of the file as it is committed."""
        if self._reader is None:
            self._reader = sqlite3.connect(self.path, check_same_thread=False, timeout=10)
            self._reader.isolation_level = None
        return self._reader.execute(statement, values).fetchall()

    def live(self, table: str) -> "list[LiveRow]":
        """The live messages, by due time, priority, id."""
        # Another number after each commit.
        [(version,)] = self.read("PRAGMA data_version")
        if self._live.get(table, (None,))[0] != version:
            rows = self.read(
                f"SELECT {_DUE}, -priority, id, queue, lease_expires_at, "
                f"attempts_count, last_error FROM {table} ORDER BY 1, 2, 3"
            )
            self._live[table] = version, [LiveRow(*row) for row in rows]
        return self._live[table][1]

    def published(self, table: str, queue: str | None, message_id: int | None = None) -> list[Any]:
        """The columns `COPIED` of what was published, in order; None is any queue, or any id."""
        return self.read(
            f"SELECT {', '.join(COPIED)} FROM {table}_outbox "
            "WHERE queue = coalesce(?, queue) AND id = coalesce(?, id) ORDER BY id",
            (queue, message_id),
        )

    def last_id(self, table: str) -> int:
        """The id of the message that was published last; 0 if there was none."""
        [(found,)] = self.read(f"SELECT max(id) FROM {table}_outbox")
        return 0 if found is None else int(found)

    async def reserve(self, insert: "Insert", table: str) -> list[int | None]:
        """The ids that `insert` gives: its effect is undone, and they are not used again."""
        async with self.engine.begin() as connection:
            await connection.exec_driver_sql("BEGIN IMMEDIATE")
            inserted = await connection.begin_nested()
            ids = await insert(connection)
            await inserted.rollback()
            if last := max((i for i in ids if i is not None), default=None):
                await connection.exec_driver_sql(
                    "DELETE FROM sqlite_sequence WHERE name = ?", (table,)
                )
                await connection.exec_driver_sql(
                    "INSERT INTO sqlite_sequence VALUES (?, ?)", (table, last)
                )
        return ids

    async def insert_as(self, told: Sequence[int], insert: "Insert", table: str) -> list[int]:
        """Give the messages of `insert` the ids that their publishers were `told`; those that it
        has inserted.
        """
        async with self.engine.begin() as connection:
            await connection.exec_driver_sql("BEGIN IMMEDIATE")
            ids = dict(zip(told, await insert(connection), strict=True))
            for old, new in ids.items():
                for name in (table, f"{table}_outbox"):
                    await connection.exec_driver_sql(
                        f"UPDATE {name} SET id = ? WHERE id = ?",
                        (old, new),
                    )
                await connection.exec_driver_sql(
                    f"UPDATE {table}_policy_state SET counter = ?, key = ? "
                    f"WHERE {_MIRRORED} AND counter = ?",
                    (old, str(old), new),
                )
        return [old for old, new in ids.items() if new is not None]

    async def remove(self, table: str, ids: Sequence[int]) -> None:
        """Remove messages that no handler works on."""
        async with self.engine.begin() as connection:
            await connection.exec_driver_sql(
                f"DELETE FROM {table} WHERE id IN ({_marks(ids)}) AND state IN ({_LIVE})",
                tuple(ids),
            )


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _outbox(config: SqlBrokerSchemaConfig) -> str:
    return f"{config.message_table_name}_outbox"


def _make(path: str, config: SqlBrokerSchemaConfig) -> None:
    """The tables, as far as they are not there, and one that keeps every message as it was
    published.
    """
    outbox = _outbox(config)
    message = config.message_table_name
    columns = ", ".join(COPIED)
    values = ", ".join(f"new.{name}" for name in COPIED)
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
def _script(config: SqlBrokerSchemaConfig) -> str:
    """Makes empty tables: it takes milliseconds, where `_make` takes a hundred."""
    with tempfile.TemporaryDirectory(prefix="sqlbroker-test-") as folder:
        path = f"{folder}/template.db"
        _make(path, config)
        with closing(sqlite3.connect(path)) as plain:
            # With the rows, such as the version of the tables; SQLite makes its own by itself.
            return "\n".join(line for line in plain.iterdump() if "sqlite_sequence" not in line)


def _file_of(engine: AsyncEngine) -> str:
    name = engine.dialect.name
    path = engine.url.database
    if name != "sqlite" or not path or ":memory:" in path or isinstance(engine.pool, StaticPool):
        raise SetupError(
            "TestSqlBroker's engine= must be an AsyncEngine of a SQLite file, such as "
            f"sqlite+aiosqlite:///test.db, got {engine.url.render_as_string()!r}: the messages and "
            "the tables of the handlers are committed together, in that file"
        )
    return path

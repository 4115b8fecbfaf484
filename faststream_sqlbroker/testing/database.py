"""The private database of a test: a temporary SQLite file, whose clock is the test's."""

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
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
        self._given = engine is not None
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

    @property
    def given(self) -> bool:
        """Whether the engine is the test's own."""
        return self._given

    async def add(self, config: SqlBrokerSchemaConfig) -> None:
        """Make the tables of these names, if they are not there."""
        if config in self._configs:
            return
        first = not self._configs
        self._configs.add(config)
        if first and not self._given:
            Path(self.path).write_bytes(_template(config).file)  # noqa: ASYNC240 - a millisecond
            return
        async with self.engine.connect() as connection:
            await connection.run_sync(_make, config)
            await connection.commit()

    def _checked_out(self, connection: Any, record: Any, _proxy: Any) -> None:
        if record.info.get(_OURS) is not self._now:
            connection.create_function("julianday", 1, self._now)
            if not self._given:
                connection.execute("PRAGMA synchronous=OFF")
            record.info[_OURS] = self._now

    async def close(self) -> None:
        """Remove the file; a given engine stays as it is."""
        self._now.clock = None
        event.remove(self.engine.sync_engine, "checkout", self._checked_out)
        if self._reader is not None:
            self._reader.close()
        if self._given:
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

    def version(self) -> int:
        """Another number after each commit."""
        return int(self.read("PRAGMA data_version")[0][0])

    def due_pairs(self, table: str, queues: Sequence[str], now: int) -> list[tuple[str, int]]:
        """(queue, priority) of due messages, in the order of their first: by due time, priority,
        id.
        """
        rows = self.read(
            f"SELECT queue, priority, min({_DUE}), min(id) FROM {table} "
            f"WHERE state IN ({_LIVE}) AND queue IN ({_marks(queues)}) AND {_DUE} <= ? "
            "GROUP BY queue, priority ORDER BY 3, 2 DESC, 4",
            (*queues, now),
        )
        return [(queue, priority) for queue, priority, _, _ in rows]

    def head(self, table: str, queues: Sequence[str], now: int) -> tuple[int, int, int, str] | None:
        """(due time, -priority, id, queue) of the first due message, in this order."""
        rows = self.read(
            f"SELECT {_DUE}, -priority, id, queue FROM {table} "
            f"WHERE state IN ({_LIVE}) AND queue IN ({_marks(queues)}) AND {_DUE} <= ? "
            "ORDER BY 1, priority DESC, id LIMIT 1",
            (*queues, now),
        )
        return rows[0] if rows else None

    def are_due(self, table: str, ids: Collection[int], now: int) -> bool:
        """Whether one of the messages `ids` could be claimed."""
        rows = self.read(
            f"SELECT 1 FROM {table} WHERE id IN ({_marks(list(ids))}) "
            f"AND state IN ({_LIVE}) AND next_attempt_at <= ? LIMIT 1",
            (*ids, now),
        )
        return bool(rows)

    def next_due(self, table: str, queues: Sequence[str], after: int) -> int | None:
        """When the next message becomes due, in microseconds since 1970."""
        [(found,)] = self.read(
            f"SELECT min({_DUE}) FROM {table} "
            f"WHERE state IN ({_LIVE}) AND queue IN ({_marks(queues)}) AND {_DUE} > ?",
            (*queues, after),
        )
        return None if found is None else int(found)

    def next_lease_end(self, table: str, queues: Sequence[str]) -> int | None:
        """When the first lease ends."""
        [(found,)] = self.read(
            f"SELECT min(lease_expires_at) FROM {table} "
            f"WHERE state = 'PROCESSING' AND queue IN ({_marks(queues)})",
            tuple(queues),
        )
        return None if found is None else int(found)

    def live(self, table: str) -> list[Any]:
        """(id, queue, state, next_attempt_at, attempts_count, last_error, lease_expires_at) of all
        live messages, by due time, priority, id.
        """
        return self.read(
            f"SELECT id, queue, state, {_DUE}, attempts_count, last_error, "
            f"lease_expires_at FROM {table} ORDER BY 4, priority DESC, id"
        )

    def published(self, table: str, queue: str | None) -> list[Any]:
        """The columns `COPIED` of what was published, in order; of all queues if it is None."""
        where = "" if queue is None else "WHERE queue = ?"
        return self.read(
            f"SELECT {', '.join(COPIED)} FROM {table}_outbox {where} ORDER BY id",
            () if queue is None else (queue,),
        )

    def last_id(self, table: str) -> int:
        """The id of the message that was published last; 0 if there was none."""
        [(found,)] = self.read(f"SELECT max(id) FROM {table}_outbox")
        return 0 if found is None else int(found)

    async def renumber(self, table: str, ids: dict[int, int]) -> None:
        """Give new messages the ids that their publishers were told."""
        async with self.engine.begin() as connection:
            for new, told in ids.items():
                for name in (table, f"{table}_outbox"):
                    await connection.exec_driver_sql(
                        f"UPDATE {name} SET id = ? WHERE id = ?",
                        (told, new),
                    )
                await connection.exec_driver_sql(
                    f"UPDATE {table}_policy_state SET counter = ?, key = ? "
                    f"WHERE {_MIRRORED} AND counter = ?",
                    (told, str(told), new),
                )

    async def remove(self, table: str, ids: Sequence[int]) -> None:
        """Remove messages that no handler works on."""
        async with self.engine.begin() as connection:
            await connection.exec_driver_sql(
                f"DELETE FROM {table} WHERE id IN ({_marks(ids)}) AND state IN ({_LIVE})",
                tuple(ids),
            )

    async def forget(self, table: str, ids: Sequence[int]) -> None:
        """Remove messages as if they had never been published; their ids are not used again."""
        async with self.engine.begin() as connection:
            for name in (table, f"{table}_outbox"):
                await connection.exec_driver_sql(
                    f"DELETE FROM {name} WHERE id IN ({_marks(ids)})",
                    tuple(ids),
                )
            await connection.exec_driver_sql(
                f"DELETE FROM {table}_policy_state "
                f"WHERE {_MIRRORED} AND counter IN ({_marks(ids)})",
                tuple(ids),
            )


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _outbox(config: SqlBrokerSchemaConfig) -> str:
    return f"{config.message_table_name}_outbox"


def _make(connection: Connection, config: SqlBrokerSchemaConfig) -> None:
    """The tables in a file of the test's own: by `create_all` if any of them is there."""
    tables = build_tables(config)
    names = {table.name for table in (*tables.ours, tables.version)}
    found = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'")
    if names & set(found.scalars()):
        create_all(connection, tables)
        _copy_publishes(connection, config)
        return
    for statement in _template(config).statements:
        connection.exec_driver_sql(statement)


def _copy_publishes(connection: Connection, config: SqlBrokerSchemaConfig) -> None:
    """Keep every message as it was published."""
    outbox = _outbox(config)
    message = config.message_table_name
    columns = ", ".join(COPIED)
    connection.exec_driver_sql(f"DROP TABLE IF EXISTS {outbox}")
    connection.exec_driver_sql(f"CREATE TABLE {outbox} AS SELECT {columns} FROM {message} WHERE 0")
    connection.exec_driver_sql(
        f"CREATE TRIGGER IF NOT EXISTS {outbox}_copy AFTER INSERT ON {message} BEGIN "
        f"INSERT INTO {outbox} ({columns}) "
        f"VALUES ({', '.join(f'new.{name}' for name in COPIED)}); END"
    )


@dataclass(frozen=True)
class _Template:
    """Empty tables: to copy them takes milliseconds, to make them a hundred."""

    file: bytes
    statements: list[str]


@cache
def _template(config: SqlBrokerSchemaConfig) -> _Template:
    with tempfile.TemporaryDirectory(prefix="sqlbroker-test-") as folder:
        path = Path(folder) / "template.db"
        engine = create_engine(f"sqlite:///{path}")
        with engine.begin() as connection:
            create_all(connection, build_tables(config))
            _copy_publishes(connection, config)
        engine.dispose()
        plain = sqlite3.connect(path)
        # With the rows, such as the version of the tables; SQLite makes its own tables by itself.
        statements = [line for line in plain.iterdump() if _to_repeat(line)]
        plain.execute("PRAGMA journal_mode=WAL")
        plain.close()  # writes the log back into the file
        return _Template(path.read_bytes(), statements)


def _to_repeat(statement: str) -> bool:
    return "sqlite_sequence" not in statement and statement not in {
        "BEGIN TRANSACTION;",
        "COMMIT;",
    }


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

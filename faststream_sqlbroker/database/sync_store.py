"""Inserts of synchronous code, without an event loop: in an own transaction, or the caller's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.dialects import Dialect, dialect_for
from faststream_sqlbroker.database.django import connected, is_django
from faststream_sqlbroker.database.errors import ErrorClasses, NotConnectedError
from faststream_sqlbroker.database.parts.live_queues import due_messages
from faststream_sqlbroker.database.parts.mirror import insert_for_caller
from faststream_sqlbroker.database.pool import check_same_database
from faststream_sqlbroker.schema.tables import Tables

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

SQLITE_SETTINGS = ("busy_timeout", "synchronous")
"""What a transaction of the broker sets on a connection of SQLite."""
NO_LIMIT = 0.0
"""In place of `statement_timeout`: the engine's own limits hold."""


class SyncStore:
    """Writes messages by a synchronous engine, or by a connection of Django."""

    def __init__(self, database: Any, tables: Tables) -> None:
        """Write into `tables`, by `database`: an Engine, or one of `django.db.connections`."""
        self._database = database
        self._tables = tables
        self._dialects: dict[str, Dialect] = {}
        self.depths = self
        """What counts, for `PublishLimits`."""

    @property
    def of_django(self) -> bool:
        """Whether it writes by a connection of Django."""
        return is_django(self._database)

    @contextmanager
    def open(self, given: "Connection | Session | None") -> Iterator[Connection]:
        """The connection of `given`; or one with a transaction, which is committed at the end.

        Raises:
            PublishError: `given` is closed, leads to another database, or its transaction has
                ended.
            TransientStoreError: the database could not be reached, or a repeat may succeed.
            StoreError: the database refused a statement.
        """
        try:
            if given is not None:
                connection = given if isinstance(given, Connection) else given.connection()
                check_same_database(connection, self._engine)
                yield connection
            elif self.of_django:
                with connected(self._database) as connection:
                    yield connection
            else:
                with (
                    self._connect() as connection,
                    _kept_settings(connection),
                    connection.begin(),
                ):
                    self._dialect(connection).begin(connection)
                    yield connection
        except SQLAlchemyError as error:
            raise self._classed(error, inside=given is not None or self.of_django) from error

    def _connect(self) -> Connection:
        try:
            return self._engine.connect()
        except SQLAlchemyError as error:
            # Whatever the reason, no statement was sent.
            raise NotConnectedError(str(self._classed(error, inside=False))) from error

    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows`; their ids in order, None where a dedup_id exists already."""
        return insert_for_caller(self._dialect(connection), connection, rows)

    def read_sync(self, connection: Connection, queue: str, most: int) -> int:
        """The messages of `queue` that are due and not leased; `most` if there are more."""
        return due_messages(connection, self._dialect(connection), queue, most)

    def notify(self, connection: Connection, queues: Sequence[str]) -> None:
        """Tell listening subscribers of `queues` at the COMMIT (PostgreSQL; elsewhere nothing)."""
        dialect: Any = self._dialect(connection)
        if queues and dialect.can_listen:
            dialect.notifying(self._tables.config.channel, queues)(connection)

    @property
    def _engine(self) -> Engine:
        engine: Engine = self._database
        return engine

    def _dialect(self, connection: Connection) -> Dialect:
        name = connection.dialect.name
        if name not in self._dialects:
            self._dialects[name] = dialect_for(connection.dialect, self._tables)
        return self._dialects[name]

    def _classed(self, error: SQLAlchemyError, *, inside: bool) -> Exception:
        # Without a dialect the first connection has failed, which only an engine's can do here.
        known = [*self._dialects.values()] or [dialect_for(self._engine.dialect, self._tables)]
        errors = ErrorClasses(known[0], NO_LIMIT)
        return errors.of_caller(error) if inside else errors.of(error) or error


@contextmanager
def _kept_settings(connection: Connection) -> Iterator[None]:
    """SQLite: what our transactions set on the connection, which is the application's, ends with
    them.
    """
    if connection.dialect.name != "sqlite":
        yield
        return
    # By the driver: SQLAlchemy would begin a transaction, in which one of them cannot be set.
    driver: Any = connection.connection.driver_connection
    before = {name: driver.execute(f"PRAGMA {name}").fetchone()[0] for name in SQLITE_SETTINGS}
    try:
        yield
    finally:
        with suppress(driver.Error):
            for name, value in before.items():
                driver.execute(f"PRAGMA {name} = {value}")

"""Inserts of synchronous code, without an event loop: in a new transaction, or the caller's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.dialects import Dialect, create_dialect
from faststream_sqlbroker.database.django import is_django_connection, open_connection
from faststream_sqlbroker.database.errors import ErrorClasses, NotConnectedError
from faststream_sqlbroker.database.parts.live_queues import count_due
from faststream_sqlbroker.database.parts.mirror_rows import insert_for_caller
from faststream_sqlbroker.database.pool import check_same_database
from faststream_sqlbroker.schema.tables import Tables

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

SQLITE_SETTINGS = ("busy_timeout", "synchronous")
"""The settings that a transaction of the broker changes on a connection of SQLite."""
NO_LIMIT = 0.0
"""In place of `statement_timeout`: the engine's own limits hold."""


class SyncStore:
    """Writes messages through a synchronous engine, or a connection of Django."""

    def __init__(self, database: Any, tables: Tables) -> None:
        """Write through `database`: an Engine, or an item of `django.db.connections`."""
        self._database = database
        self._tables = tables
        self._dialects: dict[str, Dialect] = {}
        self.depths = self
        """The counter for `PublishLimits`."""

    @property
    def uses_django(self) -> bool:
        """True if messages are written through a connection of Django."""
        return is_django_connection(self._database)

    @contextmanager
    def open(self, caller_connection: "Connection | Session | None") -> Iterator[Connection]:
        """Open the connection of `caller_connection`, or a connection in a new transaction.

        A new transaction is committed at the end.

        Raises:
            PublishError: `caller_connection` is closed, leads to another database, or its
                transaction has ended.
            TransientStoreError: the database could not be reached, or a repeat may succeed.
            StoreError: the database refused a statement.
        """
        try:
            if caller_connection is not None:
                connection = (
                    caller_connection
                    if isinstance(caller_connection, Connection)
                    else caller_connection.connection()
                )
                check_same_database(connection, self._engine)
                yield connection
            elif self.uses_django:
                with open_connection(self._database) as connection:
                    yield connection
            else:
                with (
                    self._connect() as connection,
                    _preserve_settings(connection),
                    connection.begin(),
                ):
                    self._get_dialect(connection).begin(connection)
                    yield connection
        except SQLAlchemyError as error:
            raise self._convert_error(
                error, inside=caller_connection is not None or self.uses_django
            ) from error

    def _connect(self) -> Connection:
        """Connect, or raise a `NotConnectedError`, which counts as transient whatever the cause."""
        try:
            return self._engine.connect()
        except SQLAlchemyError as error:
            # Whatever the reason, no statement was sent.
            raise NotConnectedError(str(self._convert_error(error, inside=False))) from error

    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows`; return their ids in order, None where a dedup_id exists already."""
        return insert_for_caller(self._get_dialect(connection), connection, rows)

    def read_sync(self, connection: Connection, queue: str, limit: int) -> int:
        """Count the messages of `queue` that are due and not leased, up to `limit`."""
        return count_due(connection, self._get_dialect(connection), queue, limit)

    def notify(self, connection: Connection, queues: Sequence[str]) -> None:
        """Notify listening subscribers of `queues` at the COMMIT (PostgreSQL only)."""
        dialect: Any = self._get_dialect(connection)
        if queues and dialect.can_listen:
            dialect.build_notify(self._tables.config.channel, queues)(connection)

    @property
    def _engine(self) -> Engine:
        engine: Engine = self._database
        return engine

    def _get_dialect(self, connection: Connection) -> Dialect:
        """Return the dialect of the connection's database, created on first use.

        With Django the database is known only from a connection.
        """
        name = connection.dialect.name
        if name not in self._dialects:
            self._dialects[name] = create_dialect(connection.dialect, self._tables)
        return self._dialects[name]

    def _convert_error(self, error: SQLAlchemyError, *, inside: bool) -> Exception:
        """Return `error` as an exception of this package.

        With `inside`, the statement ran in the caller's transaction, which only the caller can
        repeat.
        """
        # Without a dialect the first connection has failed, which is possible here only with an
        # engine.
        dialects = [*self._dialects.values()] or [
            create_dialect(self._engine.dialect, self._tables)
        ]
        errors = ErrorClasses(dialects[0], NO_LIMIT)
        return (
            errors.convert_caller_error(error) if inside else errors.to_store_error(error) or error
        )


@contextmanager
def _preserve_settings(connection: Connection) -> Iterator[None]:
    """Restore the SQLite connection's settings at the end of the block.

    The broker's transaction changes them, but the connection belongs to the application.
    """
    if connection.dialect.name != "sqlite":
        yield
        return
    # Use the driver: SQLAlchemy would begin a transaction, in which `synchronous` cannot be set.
    driver: Any = connection.connection.driver_connection
    old_settings = {
        name: driver.execute(f"PRAGMA {name}").fetchone()[0] for name in SQLITE_SETTINGS
    }
    try:
        yield
    finally:
        with suppress(driver.Error):
            for name, value in old_settings.items():
                driver.execute(f"PRAGMA {name} = {value}")

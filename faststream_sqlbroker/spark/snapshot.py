"""One moment of the database for every connection that reads it (PostgreSQL)."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import URL, Connection
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.duration import Duration, positive_seconds
from faststream_sqlbroker.exceptions import NotSupportedError
from faststream_sqlbroker.spark.address import parse_address
from faststream_sqlbroker.spark.databases import database_of


@dataclass(frozen=True)
class Snapshot:
    """A moment that is held open.

    Attributes:
        number: PostgreSQL's name of it, valid until its context ends.
        taken_at: By the database's clock.
        connection: Who holds it, inside its transaction: queries on it see the same rows.
    """

    number: str
    taken_at: datetime
    connection: Connection

    @property
    def statement(self) -> str:
        """What another connection runs first to see the same rows."""
        return (
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; "
            f"SET TRANSACTION SNAPSHOT '{self.number}'"
        )


@contextmanager
def open_snapshot(url: str | URL, *, max_duration: Duration = "1h") -> Iterator[Snapshot]:
    """Hold one snapshot of PostgreSQL for all the connections of all the readers it is given to.

    Every action on the DataFrames must happen inside the context: they are lazy, and when it has ended they
    fail with "invalid snapshot identifier". While it is open vacuum cannot remove what others delete, so the
    server ends it after `max_duration`.

    Args:
        url: SQLAlchemy URL of the database that is read.
        max_duration: How long it may stay open, in seconds or as text such as "30m".

    Raises:
        NotSupportedError: MySQL, MariaDB and SQLite have no snapshot that connections can share; readers
            close their window by the database's clock there.
    """
    seconds = positive_seconds("max_duration", max_duration)
    database = database_of(parse_address(url))
    if not database.shares_snapshots:
        raise NotSupportedError(
            f"{database.kind} has no snapshot that connections share, PostgreSQL has: read closed windows "
            "(since=, until=) there"
        )
    with database.connect() as connection:
        connection.exec_driver_sql(f"SET idle_in_transaction_session_timeout = '{int(seconds * 1000)}ms'")
        connection.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            number = str(database.scalar(connection, "SELECT pg_export_snapshot()"))
            yield Snapshot(number, database.now(connection), connection)
        finally:
            # The server may have ended it; the readers' errors say so better than ours would.
            with suppress(DBAPIError):
                connection.exec_driver_sql("ROLLBACK")

"""One moment of the database for every connection that reads it (PostgreSQL)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from sqlalchemy import URL, Connection
from sqlalchemy.exc import SQLAlchemyError

from faststream_sqlbroker.core.times import Duration, positive_seconds
from faststream_sqlbroker.exceptions import NotSupportedError, StoreError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import database_of

LOCK_PATIENCE = 60
"""Seconds that a reader waits for a lock on the table.

A session that asked for an exclusive lock waits for the end of the snapshot, and a reader that
comes later queues behind that session: without a limit they would wait for each other."""


@dataclass(frozen=True)
class Snapshot:
    """A moment that is held open.

    Attributes:
        number: PostgreSQL's name for it, valid until its context ends.
        taken_at: When it was taken, by the database's clock.
        connection: Holds it in a transaction; queries on this connection see the same rows.
    """

    number: str
    taken_at: datetime
    connection: Connection

    @property
    def statement(self) -> str:
        """What another connection runs first to see the same rows."""
        return (
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; "
            f"SET TRANSACTION SNAPSHOT '{self.number}'; "
            f"SET LOCAL lock_timeout = '{LOCK_PATIENCE}s'"
        )

    def keep(self, table: str) -> None:
        """Lock `table` (quoted) and its partitions against DROP, TRUNCATE and rewrites.

        Rows are in a snapshot only as long as their table is there.
        """
        self.connection.exec_driver_sql(f"SELECT 1 FROM {table} LIMIT 0")


@contextmanager
def open_snapshot(url: str | URL, *, max_duration: Duration = "1h") -> Iterator[Snapshot]:
    """Hold one snapshot of PostgreSQL for all the connections of all the readers it is given to.

    Every action on the DataFrames must happen inside the context: they are lazy, and when it has
    ended they fail with "invalid snapshot identifier". While it is open vacuum cannot remove what
    others delete, so the server ends it when `Snapshot.connection` has been idle for
    `max_duration`; each statement on it begins that time anew, whatever the readers do.

    From the moment a DataFrame of a table is made, statements that drop the table or one of its
    partitions (`prune_archive` too), truncate it, or rewrite it (VACUUM FULL, CLUSTER) wait for the
    end of the context. A reader that begins while such a statement waits fails with "lock timeout"
    after a minute.

    Args:
        url: SQLAlchemy URL of the database that is read.
        max_duration: How long it stays open without a statement on its own connection, in seconds
            or as text such as "30m".

    Raises:
        StoreError: reading failed, and the server had ended the snapshot.
        NotSupportedError: MySQL, MariaDB and SQLite have no snapshot that connections can share;
            readers close their window by the database's clock there.
    """
    seconds = positive_seconds("max_duration", max_duration)
    database = database_of(parse_address(url))
    if not database.shares_snapshots:
        raise NotSupportedError(
            f"{database.kind} has no snapshot that connections share, PostgreSQL has: read closed "
            "windows (since=, until=) there"
        )
    with database.connect() as connection:
        connection.exec_driver_sql(
            f"SET idle_in_transaction_session_timeout = '{int(seconds * 1000)}ms'"
        )
        connection.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            number = str(database.scalar(connection, "SELECT pg_export_snapshot()"))
            yield Snapshot(number, database.now(connection), connection)
        except (SQLAlchemyError, PySparkException, Py4JError) as error:
            if _end(connection):
                raise
            msg = (
                f"the server has ended the snapshot, as a rule because it was idle for {seconds:g} "
                's: read less at a time (an export with window="hour", new_rows with max_window=, '
                "read_archive with since= and until=), or give open_snapshot a longer max_duration"
            )
            raise StoreError(msg) from error
        finally:
            _end(connection)


def _end(connection: Connection) -> bool:
    """End the transaction; whether the server still had it."""
    try:
        connection.exec_driver_sql("ROLLBACK")
    except SQLAlchemyError:
        return False
    return True

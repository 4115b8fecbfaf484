"""The horizon: the time before which no archived row can appear any more.

PostgreSQL and MySQL are queried for transactions that may still write; SQLite has one writer at a
time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from sqlalchemy import URL, Connection
from sqlalchemy.exc import OperationalError

from faststream_sqlbroker.core.times import Duration, parse_non_negative, parse_positive
from faststream_sqlbroker.exceptions import NotSupportedError
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.horizon import mysql, postgresql
from pyspark_sqlbroker.horizon.base import Horizon, HorizonQuery

__all__ = ("Horizon", "find_horizon")

MAX_LOCK_WAIT = 5.0
"""Maximum seconds to wait for the lock of another writer of SQLite."""


def find_horizon(
    database: ArchiveDatabase,
    connection: Connection,
    *,
    safety_lag: Duration = "5m",
    primary: str | URL | None = None,
    margin: Duration = "2s",
    patience: Duration = "1m",
    sleep: Callable[[float], object] = time.sleep,
) -> Horizon:
    """Find the time before which every archived row is committed, for ever.

    Call this before the data is read, and read with a statement or snapshot that begins later: it
    sees every row archived before the horizon, and no more rows will be added there.

    Requirements: rows get their `archived_at` from the database's clock in the statement that
    writes them, as the broker's rows do; the server's clock does not go backwards; a transaction
    that cannot be seen (`source` is "safety lag") lasts no longer than `safety_lag`; and on MySQL
    and MariaDB the statement that archives is not the first of its transaction if it waits for a
    table's lock for longer than `margin` (the broker's never is). The rows must also be read from
    the queried server: an address that spreads reads over replicas may lead to a replica that is
    behind, and rows are then lost without an error.

    Args:
        database: The database that is read.
        connection: A connection to it, in autocommit.
        safety_lag: Longest duration of a transaction where transactions cannot be seen: without the
            privilege, on a standby or replica, or if a transaction was prepared. On a replica of
            MySQL or MariaDB also the longest replication lag.
        primary: URL of the primary of a PostgreSQL standby: its transactions are queried, and then
            this waits until the standby has replayed their writes. It is not used on a primary.
        margin: Longest time from a statement's start until the server shows the statement.
        patience: How long to wait for the standby; for SQLite's writer, or until InnoDB has
            refreshed its list of transactions, 5 s at most.
        sleep: Sleeps for a number of seconds; an event loop's own function, if `connection` is one
            of asyncio.

    Raises:
        SetupError: A duration is invalid, or `primary` is not the standby's primary.
        NotSupportedError: `primary` was given and the database is not PostgreSQL.
        TransientStoreError: The standby did not replay far enough in time; or it has replayed
            nothing yet and no `primary` was given.
    """
    query = HorizonQuery(
        database,
        connection,
        timedelta(seconds=parse_non_negative("safety_lag", safety_lag)),
        timedelta(seconds=parse_non_negative("margin", margin)),
        parse_positive("patience", patience),
        sleep,
    )
    if database.kind == "postgresql":
        return postgresql.find_horizon(query, primary)
    if primary is not None:
        raise NotSupportedError(
            f"primary= is only for PostgreSQL standbys, and this database is {database.kind}: omit "
            "primary=, and set safety_lag above the replication lag"
        )
    if database.kind == "sqlite":
        return _find_by_lock(query)
    return mysql.find_horizon(query)


def _find_by_lock(query: HorizonQuery) -> Horizon:
    """Find SQLite's horizon by taking the only write lock for an instant.

    While this process holds the lock, no writer is active, and later writers archive rows at later
    times. If the lock is not free in time, or the file is read-only, the safety lag applies.
    """
    connection = query.connection
    database = query.database
    if getattr(connection.connection.driver_connection, "in_transaction", False):
        # A listener of the application has begun a transaction, which holds no lock yet.
        connection.exec_driver_sql("ROLLBACK")
    with _set_busy_timeout(connection, min(query.max_wait, MAX_LOCK_WAIT)):
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        except OperationalError as error:
            return query.create_lagging(
                database.get_time(connection),
                f"another process holds the write lock ({error.orig})",
            )
    try:
        # On a read-only file BEGIN IMMEDIATE succeeds without a lock, and only a write fails. This
        # write changes nothing.
        version = int(database.fetch_scalar(connection, "PRAGMA user_version"))
        connection.exec_driver_sql(f"PRAGMA user_version = {version}")
        clock = database.get_time(connection)
    except OperationalError as error:
        return query.create_lagging(
            database.get_time(connection), f"the file cannot be locked ({error.orig})"
        )
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql("ROLLBACK")
    return Horizon(clock, "transactions", "no other process was writing: the write lock was free")


@contextmanager
def _set_busy_timeout(connection: Connection, seconds: float) -> Iterator[None]:
    """Limit the wait for SQLite's lock within the block; then restore the caller's limit.

    A writer that holds the lock for long must not stop a reader that can do without the lock.
    """
    previous = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
    try:
        yield
    finally:
        # A cancelled statement has ended the connection.
        if not connection.invalidated:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {previous}")

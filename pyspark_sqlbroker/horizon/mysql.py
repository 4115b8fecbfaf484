"""The horizon of MySQL and MariaDB."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.times import from_microseconds
from pyspark_sqlbroker.horizon.base import Horizon, HorizonQuery, format_seconds, get_earlier

ACCESS_DENIED = 1227
"""The server's error number for a missing privilege (ER_SPECIFIC_ACCESS_DENIED_ERROR)."""

CANNOT_CONVERT = 3854
"""The server's error number for text of another character set (ER_CANNOT_CONVERT_STRING). MySQL 9
lists no statements while one has bytes that are not utf8mb3, whichever columns are read.
"""

MAX_REFRESH_WAIT = 5.0
"""Seconds to wait for lists of statements and transactions; then the lag is used."""

LIST_POLL_INTERVAL = 0.12
"""Seconds between two polls: InnoDB refreshes the list only if it was not read for 0.1 s."""

REASONS = {
    ACCESS_DENIED: "the user cannot see the transactions of other users (GRANT PROCESS ON *.* TO "
    "it)",
    CANNOT_CONVERT: "MySQL lists no statements while a session runs one with bytes that are no "
    "text",
}
"""Why an error of the server makes the safety lag apply."""

REPLICATION_VARIABLES_SQL = (
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('read_only', 'wsrep_on') AND Value = 'ON'"
)


def build_timestamp(local: str) -> str:
    """Return SQL that converts a DATETIME of the server's time zone to seconds since 1970.

    The session must use that zone. An hour occurs twice in autumn: the earlier time is assumed,
    because a horizon that is too early loses no rows.
    """
    utc = f"UNIX_TIMESTAMP({local})"
    earlier = (
        f"IF(FROM_UNIXTIME({utc} - {step}) = {local}, {utc} - {step}, {utc})"
        for step in (3600, 1800)
    )
    return f"LEAST({', '.join(earlier)})"


# The start of each running statement, as an age: TIME_MS is MariaDB's, TIME counts whole seconds.
STATEMENTS_SQL = (
    "SELECT MAX({age}), COUNT(*), COALESCE(SUM(user = 'system user'), 0) "
    "FROM information_schema.processlist WHERE id <> CONNECTION_ID() "
    "AND command NOT IN ('Sleep', 'Daemon', 'Binlog Dump', 'Binlog Dump GTID')"
)
# A transaction that has changed no row and runs no statement can only write with a later statement,
# and so with a later time: it does not count. Thread 0 is an XA transaction whose client has
# disconnected, or a transaction of InnoDB itself.
TRANSACTIONS_SQL = (
    "SELECT COALESCE(SUM(trx_mysql_thread_id = CONNECTION_ID() "
    "AND INSTR(trx_query, '{{marker}}') > 0), 0), "
    "MIN(IF({others} AND trx_mysql_thread_id <> 0, {start}, NULL)), "
    "MIN(IF(trx_mysql_thread_id = 0, {start}, NULL)), COALESCE(SUM({others}), 0) "
    "FROM information_schema.innodb_trx"
).format(
    others="trx_mysql_thread_id <> CONNECTION_ID() "
    "AND (trx_rows_modified > 0 OR trx_query IS NOT NULL OR trx_mysql_thread_id = 0)",
    start=build_timestamp("trx_started"),
)


def find_horizon(query: HorizonQuery) -> Horizon:
    """Return the start of the oldest statement or transaction that may still write.

    A row gets the time at which its statement began, so no row can appear before that time; the
    margin is subtracted. The safety lag applies instead if the server may apply rows of other
    servers (read_only, Galera), if the user lacks the privilege PROCESS, or if MySQL lists no
    statements for too long.
    """
    connection = query.connection
    database = query.database
    clock = database.get_time(connection)
    replicated = [str(row[0]) for row in connection.exec_driver_sql(REPLICATION_VARIABLES_SQL)]
    if replicated:
        reason = (
            f"{', '.join(replicated)} = ON: the server may apply rows of other servers, with their "
            "times"
        )
        return query.create_lagging(clock, reason)
    deadline = time.monotonic() + min(query.max_wait, MAX_REFRESH_WAIT)
    with _use_system_time_zone(connection):
        while True:
            is_last = time.monotonic() > deadline
            try:
                return _find_by_transactions(query, clock)
            except DBAPIError as error:
                number = error.orig.args[0] if error.orig and error.orig.args else None
                if number not in REASONS:
                    raise
            if is_last or number == ACCESS_DENIED:
                return query.create_lagging(clock, REASONS[number])
            # Such a statement is usually short. The older clock only makes the horizon earlier.
            query.sleep(LIST_POLL_INTERVAL)


def _find_by_transactions(query: HorizonQuery, clock: datetime) -> Horizon:
    """Return the horizon by the running statements and InnoDB's open transactions.

    An archived row has the time of its statement's start. So the horizon is the start of the oldest
    statement or writing transaction, less the margin. The safety lag applies instead if InnoDB's
    list is outdated, or if the server replicates rows of another server.

    An XA transaction that was prepared and then lost its client is `detached`: its start may be
    unknown, so the lag before it limits the horizon.
    """
    connection = query.connection
    statements, oldest_statement, replicating = _read_statements(query, clock)
    # Race: InnoDB shows a cached list. Our own transaction begins here: a list that contains it
    # with the querying statement was made later, and so has every transaction that was open at
    # `clock`.
    connection.exec_driver_sql("START TRANSACTION WITH CONSISTENT SNAPSHOT")
    try:
        transactions = _read_transactions(query)
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql("ROLLBACK")
    if transactions is None:
        return query.create_lagging(
            clock,
            "InnoDB did not refresh its list of transactions, because another session keeps "
            "reading it",
        )
    if replicating:
        return query.create_lagging(
            clock, "the server applies rows of another server, with the times of that server"
        )
    oldest, detached, writing_count = transactions
    margin = query.margin
    horizon_time = min(clock, oldest_statement, *([oldest] if oldest else [])) - margin
    detail = (
        f"{statements} running statements and {writing_count} transactions that may write; margin "
        f"{format_seconds(margin)}"
    )
    horizon = Horizon(horizon_time, "transactions", detail)
    if detached is None or not _has_prepared_transactions(connection):
        return horizon
    # After a restart of the server, InnoDB shows the restart as the transaction's start.
    reason = (
        "an XA transaction without a client is still open; its start is assumed to be at most "
        f"{format_seconds(query.lag)} before {detached.isoformat()}"
    )
    return get_earlier(horizon, Horizon(detached - query.lag, "safety lag", reason))


def _has_prepared_transactions(connection: Connection) -> bool:
    """Return True if XA transactions wait for their end.

    If not, thread 0 is InnoDB's own, such as its statistics.
    """
    try:
        return connection.exec_driver_sql("XA RECOVER").first() is not None
    except DBAPIError:  # on MySQL this needs XA_RECOVER_ADMIN
        if connection.invalidated:
            raise
        return True


def _read_statements(query: HorizonQuery, clock: datetime) -> tuple[int, datetime, bool]:
    """Return the number of running statements, the oldest start, and a replication flag.

    The start is computed from the statement's age, and may be up to a second too early. The flag is
    True if the server applies rows of another server.
    """
    connection = query.connection
    is_mariadb = "MariaDB" in str(query.database.fetch_scalar(connection, "SELECT VERSION()"))
    age = "CEIL(time_ms * 1000)" if is_mariadb else "(time + 1) * 1000000"
    max_age, count, is_replicating = connection.exec_driver_sql(
        STATEMENTS_SQL.format(age=age)
    ).one()
    # Ages are measured shortly after `clock` was read, so computed starts are too early, which is
    # safe.
    oldest_start = (
        clock if max_age is None else clock - timedelta(microseconds=max(int(max_age), 0))
    )
    return int(count), oldest_start, bool(is_replicating)


def _read_transactions(query: HorizonQuery) -> tuple[datetime | None, datetime | None, int] | None:
    """Return the oldest start, the oldest start without a client, and the number of transactions.

    InnoDB refreshes this list only if it was not read for 0.1 s. The list is new enough once it
    shows this query itself, found by a random marker in its text. None if that does not happen
    within `MAX_REFRESH_WAIT`.
    """
    # The connection's id alone could match an older list, which has the connection's previous
    # transaction.
    statement = TRANSACTIONS_SQL.format(marker=uuid.uuid4().hex)
    deadline = time.monotonic() + min(query.max_wait, MAX_REFRESH_WAIT)
    while True:
        # Poll once more after the deadline, however long this process was stopped.
        is_last = time.monotonic() > deadline
        result = query.connection.exec_driver_sql(statement)
        own_count, oldest, detached, count = result.one()
        if int(own_count):
            return _parse_time(oldest), _parse_time(detached), int(count)
        if is_last:
            return None
        query.sleep(LIST_POLL_INTERVAL)


def _parse_time(value: float | None) -> datetime | None:
    """Convert InnoDB's seconds since 1970 to a datetime; None stays None."""
    return None if value is None else from_microseconds(int(value * 1_000_000))


@contextmanager
def _use_system_time_zone(connection: Connection) -> Iterator[None]:
    """Use the server's time zone, in which InnoDB shows times, within the block.

    The connection is the caller's, so its own zone is restored.
    """
    zone = connection.exec_driver_sql("SELECT @@session.time_zone").scalar_one()
    connection.exec_driver_sql("SET time_zone = 'SYSTEM'")
    try:
        yield
    finally:
        # A cancelled statement has ended the session.
        if not connection.invalidated:
            connection.exec_driver_sql(f"SET time_zone = '{zone}'")

"""The horizon of MySQL and MariaDB."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.times import from_microseconds
from pyspark_sqlbroker.horizon.base import Horizon, Question, earlier, seconds

ACCESS_DENIED = 1227
"""The server's error number for a missing privilege (ER_SPECIFIC_ACCESS_DENIED_ERROR)."""

FRESH_WITHIN = 5.0
"""Seconds to wait for InnoDB to refresh its list of transactions; after them the lag is used."""

STEP = 0.12
"""Seconds between two looks: InnoDB refreshes the list only if it was not read for 0.1 s."""

VARIABLES = (
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('read_only', 'wsrep_on') AND Value = 'ON'"
)


def moment_of(local: str) -> str:
    """A DATETIME in the server's time zone as seconds since 1970, in a session of that zone.

    An hour (or half of one) that comes twice in autumn is taken to be the earlier.
    """
    utc = f"UNIX_TIMESTAMP({local})"
    earlier = (
        f"IF(FROM_UNIXTIME({utc} - {step}) = {local}, {utc} - {step}, {utc})"
        for step in (3600, 1800)
    )
    return f"LEAST({', '.join(earlier)})"


# The start of each statement under way, as an age: TIME_MS is MariaDB's, TIME counts whole seconds.
STATEMENTS = (
    "SELECT MAX({age}), COUNT(*), COALESCE(SUM(user = 'system user'), 0) "
    "FROM information_schema.processlist WHERE id <> CONNECTION_ID() "
    "AND command NOT IN ('Sleep', 'Daemon', 'Binlog Dump', 'Binlog Dump GTID')"
)
# A transaction that has changed no row and runs no statement can only write with a later statement,
# and so with a later time: it does not count. Thread 0 is an XA transaction whose client has gone,
# or one of InnoDB's own.
TRANSACTIONS = (
    "SELECT COALESCE(SUM(trx_mysql_thread_id = CONNECTION_ID() "
    "AND INSTR(trx_query, '{{look}}') > 0), 0), "
    "MIN(IF({others} AND trx_mysql_thread_id <> 0, {start}, NULL)), "
    "MIN(IF(trx_mysql_thread_id = 0, {start}, NULL)), COALESCE(SUM({others}), 0) "
    "FROM information_schema.innodb_trx"
).format(
    others="trx_mysql_thread_id <> CONNECTION_ID() "
    "AND (trx_rows_modified > 0 OR trx_query IS NOT NULL OR trx_mysql_thread_id = 0)",
    start=moment_of("trx_started"),
)


def find(question: Question) -> Horizon:
    """The start of the oldest statement or transaction that may still write."""
    connection = question.connection
    database = question.database
    clock = database.now(connection)
    replicated = [str(row[0]) for row in connection.exec_driver_sql(VARIABLES)]
    if replicated:
        why = (
            f"{' and '.join(replicated)} says that other servers' rows arrive here, with their "
            "times"
        )
        return question.lagging(clock, why)
    with _in_system_zone(connection):
        try:
            return _seen(question, clock)
        except DBAPIError as error:
            if error.orig is None or error.orig.args[:1] != (ACCESS_DENIED,):
                raise
    why = "the user may not see others' transactions (GRANT PROCESS ON *.* TO it)"
    return question.lagging(clock, why)


def _seen(question: Question, clock: datetime) -> Horizon:
    connection = question.connection
    statements, began, replicating = _statements(question, clock)
    # InnoDB shows a cached list. Our own transaction begins here: a list that contains it with the
    # statement that looks was made later, and so has every transaction that was open at `clock`.
    connection.exec_driver_sql("START TRANSACTION WITH CONSISTENT SNAPSHOT")
    try:
        found = _transactions(question)
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql("ROLLBACK")
    if found is None:
        return question.lagging(
            clock, "InnoDB's list of transactions stayed old: another session reads it all the time"
        )
    if replicating:
        return question.lagging(
            clock, "the server applies rows of another server, with their times"
        )
    oldest, detached, writing = found
    margin = question.margin
    moment = min(clock, began, *([oldest] if oldest else [])) - margin
    detail = (
        f"{statements} statements and {writing} transactions were seen; margin {seconds(margin)}"
    )
    horizon = Horizon(moment, "transactions", detail)
    if detached is None or not _prepared(connection):
        return horizon
    # After a restart of the server, InnoDB shows the restart as the transaction's start.
    why = (
        "an XA transaction whose client has gone is not ended; it is taken to have begun at most "
        f"{seconds(question.lag)} before {detached.isoformat()}"
    )
    return earlier(horizon, Horizon(detached - question.lag, "safety lag", why))


def _prepared(connection: Connection) -> bool:
    """Whether XA transactions wait for their end; if not, thread 0 is of InnoDB's own, such as its
    statistics.
    """
    try:
        return connection.exec_driver_sql("XA RECOVER").first() is not None
    except DBAPIError:  # on MySQL it needs XA_RECOVER_ADMIN
        if connection.invalidated:
            raise
        return True


def _statements(question: Question, clock: datetime) -> tuple[int, datetime, bool]:
    """How many, the oldest one's start, and whether the server applies those of another."""
    connection = question.connection
    mariadb = "MariaDB" in str(question.database.scalar(connection, "SELECT VERSION()"))
    age = "CEIL(time_ms * 1000)" if mariadb else "(time + 1) * 1000000"
    longest, count, applying = connection.exec_driver_sql(STATEMENTS.format(age=age)).one()
    # Ages are measured a moment after `clock` was read, so computed starts are too early, which is
    # safe.
    began = clock if longest is None else clock - timedelta(microseconds=max(int(longest), 0))
    return int(count), began, bool(applying)


def _transactions(question: Question) -> tuple[datetime | None, datetime | None, int] | None:
    """The oldest start, the oldest of detached ones, and how many; None if the list stayed old."""
    # By the connection alone it could be an older list, in which its transaction before is open.
    statement = TRANSACTIONS.format(look=uuid.uuid4().hex)
    deadline = time.monotonic() + min(question.patience, FRESH_WITHIN)
    while True:
        # One look comes after the time is over, however long this process stood still.
        is_last = time.monotonic() > deadline
        look = question.connection.exec_driver_sql(statement)
        ours, oldest, detached, count = look.one()
        if int(ours):
            return _moment(oldest), _moment(detached), int(count)
        if is_last:
            return None
        question.sleep(STEP)


def _moment(value: float | None) -> datetime | None:
    return None if value is None else from_microseconds(int(value * 1_000_000))


@contextmanager
def _in_system_zone(connection: Connection) -> Iterator[None]:
    """Set the session to the server's time zone, in which InnoDB shows its times."""
    zone = connection.exec_driver_sql("SELECT @@session.time_zone").scalar_one()
    connection.exec_driver_sql("SET time_zone = 'SYSTEM'")
    try:
        yield
    finally:
        # A cancelled statement has ended the session.
        if not connection.invalidated:
            connection.exec_driver_sql(f"SET time_zone = '{zone}'")

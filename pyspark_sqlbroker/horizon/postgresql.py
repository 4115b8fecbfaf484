"""The horizon of PostgreSQL: of a primary, and of a standby, which follows its primary.

A standby does not see transactions of its primary.
"""

import time
from dataclasses import replace
from datetime import datetime

from sqlalchemy import URL

from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.exceptions import SetupError, TransientStoreError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.horizon.base import Horizon, HorizonQuery, format_seconds, get_earlier

SESSIONS_SQL = """
SELECT
  (extract(epoch FROM min({start}) FILTER (WHERE {writing})) * 1000000)::bigint AS oldest,
  count(*) FILTER (WHERE {writing}) AS writing,
  count(*) FILTER (WHERE {hidden}) AS hidden
FROM pg_stat_activity
WHERE datid = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND pid <> pg_backend_pid()
""".format(
    # Rows get the start of their statement. A transaction without an xid has written nothing, so
    # only the running statement counts. A transaction with an xid may have written since its start;
    # a procedure that commits while it runs has transactions that are younger than its statement.
    start="CASE WHEN backend_xid IS NULL THEN query_start ELSE least(xact_start, query_start) END",
    # A session that is idle in a transaction and has no xid can only write with a later statement,
    # and so with a later time: reports and snapshots that are held for hours do not count.
    writing="(backend_xid IS NOT NULL OR state IN ('active', 'fastpath function call')) "
    "AND coalesce(backend_type, '') NOT IN ('walsender', 'autovacuum worker')",
    # The role may not see the sessions, or track_activities is off. Vacuum workers have no user.
    hidden="usesysid IS NOT NULL "
    "AND ((state IS NULL AND backend_type IS NULL) OR state = 'disabled')",
)

PREPARED_SQL = (
    "SELECT (extract(epoch FROM min(prepared)) * 1000000)::bigint FROM pg_prepared_xacts "
    "WHERE database = current_database()"
)

SUBSCRIPTIONS_SQL = (
    "SELECT count(*) FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid "
    "WHERE d.datname = current_database()"
)

RECOVERY_SQL = "SELECT pg_is_in_recovery()"

IDENTITY_SQL = "SELECT system_identifier || '/' || current_database() FROM pg_control_system()"

# Trap: the insert position may be after a page header that is written only with the next record, so
# that the standby would never reach it. No record ends inside a page header, so use the start of
# the page.
WAL_POSITION_SQL = """
SELECT lsn - CASE WHEN mod(lsn - '0/0', 8192) <= 40 THEN mod(lsn - '0/0', 8192) ELSE 0 END
FROM pg_current_wal_insert_lsn() lsn
"""

REPLAY_POLL_INTERVAL = 0.05
"""Seconds between two polls of the standby's replay position."""


def find_horizon(query: HorizonQuery, primary: str | URL | None) -> Horizon:
    """Return the horizon of a standby, by the primary, or of a primary itself.

    A standby replays the primary's log and does not see the transactions that are open there.
    """
    if query.database.fetch_scalar(query.connection, RECOVERY_SQL):
        return _find_on_standby(query, primary)
    return _find_on_primary(query)


def _find_on_primary(query: HorizonQuery) -> Horizon:
    """Return the start of the oldest transaction that may still write, less the margin.

    The margin covers statements that have begun, and that the server does not show yet. Where
    transactions are hidden from the role, prepared, or replicated by a subscription, the safety lag
    gives an earlier horizon, and the earliest counts.
    """
    connection = query.connection
    database = query.database
    # Race: the order matters. The clock is read first. PREPARE moves a transaction from the
    # sessions to the prepared transactions, so the sessions are read first: a transaction that
    # appears in neither has committed, or began after the clock was read.
    clock = database.get_time(connection)
    oldest, writing, hidden = connection.exec_driver_sql(SESSIONS_SQL).one()
    prepared = database.fetch_scalar(connection, PREPARED_SQL)
    subscribed = database.fetch_scalar(connection, SUBSCRIPTIONS_SQL)
    oldest_start = clock if oldest is None else min(clock, from_microseconds(oldest))
    horizon = _create_horizon(query, oldest_start - query.margin, writing)
    if hidden:
        reason = (
            f"the role cannot see {hidden} sessions of the database (GRANT pg_read_all_stats TO "
            "it, and keep track_activities on)"
        )
        horizon = get_earlier(horizon, query.create_lagging(clock, reason))
    if subscribed:
        reason = (
            "the database subscribes to another database, and rows keep the times of their origin"
        )
        horizon = get_earlier(horizon, query.create_lagging(clock, reason))
    if prepared is not None:
        horizon = get_earlier(horizon, _create_prepared_horizon(query, from_microseconds(prepared)))
    return horizon


def _create_horizon(query: HorizonQuery, time: datetime, writing: int) -> Horizon:
    """Return the horizon that was found by the sessions, with the reason for logs and people."""
    detail = f"{writing} transactions that may write; margin {format_seconds(query.margin)}"
    return Horizon(time, "transactions", detail)


def _create_prepared_horizon(query: HorizonQuery, prepared: datetime) -> Horizon:
    """Return the horizon for a prepared transaction.

    PostgreSQL shows when it was prepared but not when it began, so it is assumed to have begun at
    most the safety lag earlier.
    """
    detail = (
        f"a prepared transaction (PREPARE TRANSACTION) of {prepared.isoformat()} is still open; "
        f"its start is assumed to be at most {format_seconds(query.lag)} earlier"
    )
    return Horizon(prepared - query.lag, "safety lag", detail)


def _find_on_standby(query: HorizonQuery, primary: str | URL | None) -> Horizon:
    """Return the primary's horizon after waiting for the replay on this standby.

    A standby does not see the primary's open transactions. So the horizon is found on the primary,
    and then the standby must replay the primary's log up to a position read after that. Without
    `primary` the horizon is a lag behind the replay.
    """
    if primary is None:
        return _find_by_replay(query)
    primary_database = get_database(parse_address(primary))
    if primary_database.kind != "postgresql":
        raise SetupError(
            "primary must be the primary of this PostgreSQL standby, got a "
            f"{primary_database.kind} database"
        )
    with primary_database.connect() as connection:
        if primary_database.fetch_scalar(connection, RECOVERY_SQL):
            raise SetupError(
                "primary is itself a standby: give the URL of the server that it follows"
            )
        if primary_database.fetch_scalar(connection, IDENTITY_SQL) != query.database.fetch_scalar(
            query.connection, IDENTITY_SQL
        ):
            raise SetupError(
                "primary is another cluster or database than the standby: give the URL of the "
                "server that the standby follows"
            )
        horizon = _find_on_primary(replace(query, database=primary_database, connection=connection))
        position = str(primary_database.fetch_scalar(connection, WAL_POSITION_SQL))
    _wait_for_replay(query, position)
    source = "primary" if horizon.source == "transactions" else horizon.source
    return Horizon(
        horizon.time, source, f"found on the primary and replayed here: {horizon.detail}"
    )


def _wait_for_replay(query: HorizonQuery, position: str) -> None:
    """Wait until the standby has replayed the primary's log up to `position`.

    Then the standby has all rows that were committed on the primary before the position was read.
    """
    deadline = time.monotonic() + query.max_wait
    statement = f"SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn"
    while not query.database.fetch_scalar(query.connection, statement):
        if time.monotonic() > deadline:
            raise TransientStoreError(
                f"the standby did not replay the primary's position {position} within "
                f"{query.max_wait:g} s: check whether its replay is paused or slow, or omit "
                "primary= to use safety_lag"
            )
        query.sleep(REPLAY_POLL_INTERVAL)


def _find_by_replay(query: HorizonQuery) -> Horizon:
    """Return a horizon `lag` before the latest commit that this standby has replayed.

    Used without the primary's URL. Before the first commit since the standby's start nothing tells
    how far it is, so this raises TransientStoreError.
    """
    database = query.database
    connection = query.connection
    statement = f"SELECT {database.build_microseconds('pg_last_xact_replay_timestamp()')}"
    replayed = database.fetch_scalar(connection, statement)
    if replayed is None:
        raise TransientStoreError(
            "this standby has replayed no transaction since it started: try again after the "
            "primary's next commit, or give the primary's URL (primary= of the Spark readers)"
        )
    replayed_at = min(database.get_time(connection), from_microseconds(replayed))
    reason = f"this standby has replayed the commits up to {replayed_at.isoformat()}"
    return query.create_lagging(replayed_at, reason)

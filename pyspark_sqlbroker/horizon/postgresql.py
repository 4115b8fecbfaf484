"""The horizon of PostgreSQL: of a primary, and of a standby, which goes by its primary.

A standby sees no transaction of its primary.
"""

import time
from dataclasses import replace
from datetime import datetime

from sqlalchemy import URL

from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.exceptions import SetupError, TransientStoreError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import database_of
from pyspark_sqlbroker.horizon.base import Horizon, Question, earlier, seconds

SESSIONS = """
SELECT
  (extract(epoch FROM min({start}) FILTER (WHERE {writing})) * 1000000)::bigint AS oldest,
  count(*) FILTER (WHERE {writing}) AS writing,
  count(*) FILTER (WHERE {hidden}) AS hidden
FROM pg_stat_activity
WHERE datid = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND pid <> pg_backend_pid()
""".format(
    # Rows get the start of their statement. A transaction without an xid has written nothing, so
    # only the statement under way counts. One with an xid may have written since its start; a
    # procedure that commits on its way has transactions that are younger than its statement.
    start="CASE WHEN backend_xid IS NULL THEN query_start ELSE least(xact_start, query_start) END",
    # A session that is idle in a transaction and has no xid can only write with a later statement,
    # and so with a later time: reports and snapshots that are held for hours do not count.
    writing="(backend_xid IS NOT NULL OR state IN ('active', 'fastpath function call')) "
    "AND coalesce(backend_type, '') NOT IN ('walsender', 'autovacuum worker')",
    # The role may not see them, or track_activities is off. Vacuum workers have no user.
    hidden="usesysid IS NOT NULL "
    "AND ((state IS NULL AND backend_type IS NULL) OR state = 'disabled')",
)

PREPARED = (
    "SELECT (extract(epoch FROM min(prepared)) * 1000000)::bigint FROM pg_prepared_xacts "
    "WHERE database = current_database()"
)

SUBSCRIBED = (
    "SELECT count(*) FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid "
    "WHERE d.datname = current_database()"
)

RECOVERING = "SELECT pg_is_in_recovery()"

IDENTITY = "SELECT system_identifier || '/' || current_database() FROM pg_control_system()"

# The insert position may lie behind a page header that is written only with the next record, so
# that the standby would never reach it. No record ends inside a page header: the start of the page
# serves as well.
POSITION = """
SELECT lsn - CASE WHEN mod(lsn - '0/0', 8192) <= 40 THEN mod(lsn - '0/0', 8192) ELSE 0 END
FROM pg_current_wal_insert_lsn() lsn
"""

STEP = 0.05
"""Seconds between two looks at how far the standby has replayed."""


def find(question: Question, primary: str | URL | None) -> Horizon:
    """The horizon of a standby, by its primary, or of a primary itself."""
    if question.database.scalar(question.connection, RECOVERING):
        return _on_standby(question, primary)
    return _on_primary(question)


def _on_primary(question: Question) -> Horizon:
    """The start of the oldest transaction that may still write."""
    connection = question.connection
    database = question.database
    # The order matters. The clock is read first, and PREPARE moves a transaction from the sessions
    # to the prepared ones, so the sessions come first: a transaction that is seen in neither has
    # committed, or began after the clock was read.
    clock = database.now(connection)
    oldest, writing, hidden = connection.exec_driver_sql(SESSIONS).one()
    prepared = database.scalar(connection, PREPARED)
    subscribed = database.scalar(connection, SUBSCRIBED)
    found = clock if oldest is None else min(clock, from_microseconds(oldest))
    horizon = _seen(question, found - question.margin, writing)
    if hidden:
        why = (
            f"the role may not see {hidden} of the database's sessions (GRANT pg_read_all_stats TO "
            "it, and leave track_activities on)"
        )
        horizon = earlier(horizon, question.lagging(clock, why))
    if subscribed:
        why = "the database subscribes to another, whose rows come with the times of their origin"
        horizon = earlier(horizon, question.lagging(clock, why))
    if prepared is not None:
        horizon = earlier(horizon, _before_prepared(question, from_microseconds(prepared)))
    return horizon


def _seen(question: Question, moment: datetime, writing: int) -> Horizon:
    detail = f"{writing} transactions that may write were seen; margin {seconds(question.margin)}"
    return Horizon(moment, "transactions", detail)


def _before_prepared(question: Question, prepared: datetime) -> Horizon:
    detail = (
        f"a transaction was prepared (PREPARE TRANSACTION) at {prepared.isoformat()} and not "
        f"ended; it is taken to have begun at most {seconds(question.lag)} before"
    )
    return Horizon(prepared - question.lag, "safety lag", detail)


def _on_standby(question: Question, primary: str | URL | None) -> Horizon:
    """The primary's horizon once it has been replayed here; else a lag behind what was replayed."""
    if primary is None:
        return _replayed(question)
    there = database_of(parse_address(primary))
    if there.kind != "postgresql":
        raise SetupError(
            f"primary is a {there.kind} database: give the primary of this PostgreSQL standby"
        )
    with there.connect() as connection:
        if there.scalar(connection, RECOVERING):
            raise SetupError("primary is a standby itself: give the server that it follows")
        if there.scalar(connection, IDENTITY) != question.database.scalar(
            question.connection, IDENTITY
        ):
            raise SetupError(
                "primary is another cluster or database than the standby: give the one that it "
                "follows"
            )
        found = _on_primary(replace(question, database=there, connection=connection))
        position = str(there.scalar(connection, POSITION))
    _wait(question, position)
    source = "primary" if found.source == "transactions" else found.source
    return Horizon(found.moment, source, f"taken on the primary and replayed here: {found.detail}")


def _wait(question: Question, position: str) -> None:
    deadline = time.monotonic() + question.patience
    statement = f"SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn"
    while not question.database.scalar(question.connection, statement):
        if time.monotonic() > deadline:
            raise TransientStoreError(
                f"the standby has not replayed the primary's position {position} within "
                f"{question.patience:g} s: see whether its replay is paused or behind, or leave "
                "primary= out to go by the safety lag"
            )
        question.sleep(STEP)


def _replayed(question: Question) -> Horizon:
    database = question.database
    connection = question.connection
    statement = f"SELECT {database.microseconds('pg_last_xact_replay_timestamp()')}"
    replayed = database.scalar(connection, statement)
    if replayed is None:
        raise TransientStoreError(
            "this standby has replayed no transaction since it started: try again after the "
            "primary's next commit, or let the primary be asked (primary= of Spark's readers)"
        )
    upto = min(database.now(connection), from_microseconds(replayed))
    why = f"this is a standby, which has replayed what was committed by {upto.isoformat()}"
    return question.lagging(upto, why)

"""The horizon of PostgreSQL's primary."""

from datetime import datetime

from faststream_sqlbroker.core.times import from_microseconds
from pyspark_sqlbroker.horizon.base import Horizon, Question, seconds

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


def find(question: Question) -> Horizon:
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
        horizon = _earlier(horizon, question.lagging(clock, why))
    if subscribed:
        why = "the database subscribes to another, whose rows come with the times of their origin"
        horizon = _earlier(horizon, question.lagging(clock, why))
    if prepared is not None:
        horizon = _earlier(horizon, _before_prepared(question, from_microseconds(prepared)))
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


def _earlier(one: Horizon, other: Horizon) -> Horizon:
    return min(one, other, key=lambda horizon: horizon.moment)

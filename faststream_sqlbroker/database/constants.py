"""Numbers and expressions shared by SQL and Python; a statement uses them as `{name}`."""

from faststream_sqlbroker.core.policies.flags import (
    ADMITTED,
    HEADER_KEY,
    HELD_BURST,
    JOINED,
    PERSISTENT_MASK,
)
from faststream_sqlbroker.core.policies.standby import STANDBY, STANDBY_SECONDS
from faststream_sqlbroker.core.suspects import SUSPECT_AFTER
from faststream_sqlbroker.core.times import MAX_TIMESTAMP, MIN_TIMESTAMP, from_microseconds

SQLITE_NOW = "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)"
"""SQLite's clock in microseconds, with a resolution of a millisecond; constant within a statement.
"""
TRANSACTION_LOCK_KEY = 1936813154
"""First key of the advisory lock that marks a transaction of PostgreSQL as the broker's: "sqlb" in
ASCII. The second key is the transaction's limit in milliseconds.
"""
MAX_REPLIES = 500
"""Replies that one poll reads."""
MAX_SQLITE_COUNT = 500_000
"""Number of rows at which SQLite stops counting: some 100 ms."""
EXPIRED_JOB_GRACE = 60
"""Seconds after which a page of a pull consumer's jobs ends an expired job. Until then a client
that takes it from an older page gets the answer "expired"; later it would retry a dead job.
"""
MAX_SESSIONS = 20
"""Transactions that the health of a database lists."""
MAX_QUERY_CHARACTERS = 200
"""Characters of a session's query: enough to recognise it by, few enough for a line."""

CONSTANTS = {
    "first_moment": str(MIN_TIMESTAMP),
    "header_key": str(HEADER_KEY),
    "held_burst": str(HELD_BURST),
    "joined": str(JOINED),
    "kept_marks": str(PERSISTENT_MASK),
    "last_moment": str(MAX_TIMESTAMP),
    "let_in": str(ADMITTED),
    "long_ago": str(EXPIRED_JOB_GRACE),
    "max_counted": str(MAX_SQLITE_COUNT),
    "max_replies": str(MAX_REPLIES),
    "max_sessions": str(MAX_SESSIONS),
    "now": SQLITE_NOW,
    "query_characters": str(MAX_QUERY_CHARACTERS),
    "standby": str(STANDBY),
    "standby_seconds": str(STANDBY_SECONDS),
    "standby_time": f"{from_microseconds(STANDBY):%Y-%m-%d %H:%M:%S}",
    "suspect_after": str(SUSPECT_AFTER),
    "transaction_mark": str(TRANSACTION_LOCK_KEY),
}
"""The constants as text, by the names that statements use. `standby` is in microseconds since 1970,
as SQLite stores times; `standby_time` is the same time for the other databases.
"""

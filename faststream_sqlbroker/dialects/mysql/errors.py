"""Error numbers of MySQL and MariaDB, and of their clients, by what they mean for the broker."""

DUPLICATE_ENTRY = 1062
"""A unique index has the value already."""
LOCK_WAIT_TIMEOUT = 1205
"""A lock was waited for too long; only the statement is rolled back, not its transaction."""
TRANSIENT_CODES = frozenset(
    {
        1020,
        1021,
        1028,
        1040,
        1047,
        1053,
        1114,
        1129,
        1152,
        1159,
        1161,
        1180,
        1203,
        1205,
        1213,
        1226,
        1290,
        1317,
        1684,
        1792,
        1836,
        1927,
        1969,
        2002,
        2003,
        2006,
        2013,
        2055,
        3024,
        3032,
        3058,
        3100,
        3101,
        3572,
        4031,
    }
)
"""Deadlock, lock wait, lost connection, too many connections, shutdown, disk or table full, time
limit, and a cluster's node that is not ready, read-only, or refused the COMMIT; a table that
another session alters while its definition is read."""
SESSION_ENDED = frozenset({1053, 1152, 1159, 1161, 1927, 2006, 2013, 2055, 3032, 4031})
"""Shutdown, offline mode, a session that was killed or idle for too long, a connection that broke.
"""
READ_ONLY = frozenset({1047, 1290, 1792, 1836, 3100})
"""read_only, a READ ONLY session or server, a cluster's node that is not ready or has left."""
PACKET_TOO_LARGE = 1153
"""The server ends the session, but has not read the statement."""
SPOILING = READ_ONLY | SESSION_ENDED | {PACKET_TOO_LARGE}
"""After these the connection must not be used again."""


class MysqlErrors:
    """Judges errors for the dialect."""

    def is_transient(self, error: BaseException) -> bool:
        """By the server's or client's error number."""
        return _number(error) in TRANSIENT_CODES

    def lock_wait_ended(self, error: BaseException) -> bool:
        """By number."""
        return _number(error) == LOCK_WAIT_TIMEOUT

    def ends_session(self, error: BaseException) -> bool:
        """By number."""
        return _number(error) in SESSION_ENDED

    def spoils(self, error: BaseException) -> bool:
        """A session that was opened READ ONLY stays so, and so may its server, if another has taken
        its place.
        """
        return _number(error) in SPOILING


def _number(error: BaseException) -> int:
    """The server's or client's error number; 0 if it has none."""
    first = error.args[0] if error.args else None
    return first if isinstance(first, int) else 0

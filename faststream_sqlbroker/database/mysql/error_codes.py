"""Error numbers of MySQL and MariaDB, and of their clients, by their meaning for the broker."""

NO_TABLE = frozenset({1146})
NO_PROCESS = 1227
"""A right of the server is missing, such as PROCESS."""
DENIED = frozenset({1044, 1142, 1143, NO_PROCESS, 1370})
"""A right on a database, table, column, server or routine is missing."""
CANNOT_CONVERT = 3854
"""MySQL 9 lists no statements while one has bytes that are not utf8mb3."""
DUPLICATE_ENTRY = 1062
"""A unique index has the value already."""
LOCK_WAIT_TIMEOUT = 1205
"""The wait for a lock timed out; only the statement is rolled back, not its transaction."""
READ_ONLY = frozenset({1047, 1290, 1792, 1836, 1874, *range(3781, 3784), *range(3796, 3800), 4094})
"""The server takes no writes: read_only (1290), a READ ONLY transaction (1792), server (1836) or
InnoDB (1874); a node of Galera that is not ready (1047); a member of a replication group that
applies what the last primary has left (3781 to 3783), that waits for the group (3796 to 3799), or
whose primary is being changed (4094, also for reads).
"""
REFUSED_BY_GROUP = 3100
"""A replication group refused the COMMIT: this member has left it, or the write is too large."""
SESSION_ENDED = frozenset({1053, 1152, 1159, 1161, 1927, 2006, 2013, 2055, 3032, 4031, 4312, 4313})
"""A shutdown (1053), offline mode (3032, 4312, 4313), a session that was killed (1927) or idle for
too long (4031), a broken connection.
"""
CONFLICTS = frozenset({1020, 1180, 1205, 1213, 1684, 3058, REFUSED_BY_GROUP, 3101, 3572})
"""Another transaction changed a row (1020), made a cluster refuse the COMMIT (1180, 3101), held a
lock for too long (1205, 3572), was in a deadlock (1213, 3058), altered a table (1684).
"""
EXHAUSTED = frozenset({1021, 1028, 1040, 1114, 1129, 1203, 1226, 1317, 1969, 3024})
"""A limit: a full disk or table (1021, 1028, 1114), too many connections (1040, 1129, 1203), other
resources of the user (1226), time (1969, 3024), or an administrator who ended the query (1317).
"""
UNREACHABLE = frozenset({2002, 2003, 9001, 9002, 9004})
"""No connection, also of ProxySQL to any server of the group (9001, 9002, 9004)."""
TRANSIENT_CODES = READ_ONLY | SESSION_ENDED | CONFLICTS | EXHAUSTED | UNREACHABLE
"""Errors after which the same transaction may succeed."""
PACKET_TOO_LARGE = 1153
"""The server ends the session, but has not read the statement."""
SPOILING = READ_ONLY | SESSION_ENDED | {PACKET_TOO_LARGE, REFUSED_BY_GROUP}
"""Errors after which the connection must not be used again."""

_DRIVERS = frozenset({"aiomysql", "pymysql", "asyncmy"})
_UNSENT = ("Not connected", "Cancelled during execution")
"""In the messages of errors that a driver raises before it sends a statement. The second is raised
when an earlier statement has closed the connection.
"""


class MysqlErrors:
    """The classification of MySQL's and MariaDB's errors, for the dialect."""

    def is_transient(self, error: BaseException) -> bool:
        """Return True if a repeat may succeed, by the server's or client's error number."""
        return _get_error_number(error) in TRANSIENT_CODES

    def was_never_sent(self, error: BaseException) -> bool:
        """Return True if the connection was closed, by the message of aiomysql or asyncmy."""
        module = type(error).__module__.partition(".")[0]
        message = str(error.args[-1]) if error.args else ""
        return module in _DRIVERS and any(phrase in message for phrase in _UNSENT)

    def is_denied(self, error: BaseException) -> bool:
        """Return True if a right or a table is missing, by number."""
        return _get_error_number(error) in DENIED | NO_TABLE

    def is_lock_timeout(self, error: BaseException) -> bool:
        """Return True if the wait for a lock timed out, by number."""
        return _get_error_number(error) == LOCK_WAIT_TIMEOUT

    def ends_session(self, error: BaseException) -> bool:
        """Return True if the server ended the session, by number."""
        return _get_error_number(error) in SESSION_ENDED

    @staticmethod
    def is_read_only(error: BaseException) -> bool:
        """Return True if the server takes no writes at present, by number."""
        return _get_error_number(error) in READ_ONLY

    def spoils_connection(self, error: BaseException) -> bool:
        """Return True if the connection must not be used again, by number.

        A session that was opened READ ONLY stays so, and so may its server, if another has taken
        its place.
        """
        return _get_error_number(error) in SPOILING


def _get_error_number(error: BaseException) -> int:
    """Return the server's or client's error number, 0 if there is none."""
    first = error.args[0] if error.args else None
    return first if isinstance(first, int) else 0

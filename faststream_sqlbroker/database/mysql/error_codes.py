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
TRANSIENT_CODES = frozenset(
    {
        1020,  # row changed since it was read (MariaDB)
        1021,  # disk full
        1028,  # sort aborted
        1040,  # too many connections
        1047,  # Galera: the node is not ready
        1053,  # shutdown
        1114,  # table full
        1129,  # host blocked after failed connects
        1152,  # connection aborted
        1159,  # read timed out
        1161,  # write timed out
        1180,  # COMMIT failed; Galera: refused
        1203,  # too many connections of this user
        1205,  # lock wait
        1213,  # deadlock
        1226,  # user's resource limit
        1290,  # read_only
        1317,  # query interrupted
        1684,  # table altered while its definition was read
        1792,  # READ ONLY transaction
        1836,  # read-only mode
        1927,  # session killed (MariaDB)
        1969,  # time limit (MariaDB)
        2002,  # no connection by the socket
        2003,  # no connection to the host
        2006,  # connection gone
        2013,  # connection lost in a query
        2055,  # the same, with its cause
        3024,  # time limit (MySQL)
        3032,  # offline mode
        3058,  # deadlock of user locks
        3100,  # group replication refused the COMMIT
        3101,  # rolled back during the COMMIT
        3572,  # lock with NOWAIT
        4031,  # idle for too long
    }
)
"""Errors after which the same transaction may succeed."""
SESSION_ENDED = frozenset({1053, 1152, 1159, 1161, 1927, 2006, 2013, 2055, 3032, 4031})
"""Shutdown, offline mode, a session that was killed or idle for too long, a broken connection."""
READ_ONLY = frozenset({1047, 1290, 1792, 1836, 3100})
"""read_only, a READ ONLY session or server, a cluster's node that is not ready or has left."""
PACKET_TOO_LARGE = 1153
"""The server ends the session, but has not read the statement."""
SPOILING = READ_ONLY | SESSION_ENDED | {PACKET_TOO_LARGE}
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

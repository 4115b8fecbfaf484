"""SQLite's result codes, by what they mean for the broker."""

import sqlite3

READ_ONLY = 8
"""SQLITE_READONLY."""
LOCKED = frozenset({5, 6})
"""SQLITE_BUSY, SQLITE_LOCKED."""
TRANSIENT_CODES = LOCKED | {READ_ONLY, 9, 10, 13, 15}
"""SQLITE_READONLY, INTERRUPT, IOERR, FULL, and PROTOCOL, which is a race for the lock of the WAL.
"""
REOPENED = frozenset({READ_ONLY, 10})
"""SQLITE_READONLY and IOERR: a connection goes on with the file as it was when it was opened."""

_ERROR = 1
"""SQLITE_ERROR: the text tells what it is."""
_CLOSED = (ValueError, sqlite3.OperationalError, sqlite3.ProgrammingError)
_UNSENT = frozenset(
    {"no active connection", "connection closed", "cannot operate on a closed database"}
)


class SqliteErrors:
    """Judges errors for the dialect."""

    def is_transient(self, error: BaseException) -> bool:
        """Busy, locked, read-only, full disk or I/O error, by SQLite's code."""
        return result_code(error) in TRANSIENT_CODES

    def ends_session(self, error: BaseException) -> bool:  # noqa: ARG002
        """There is no server that could."""
        return False

    def was_never_sent(self, error: BaseException) -> bool:
        """By the text: aiosqlite, SQLAlchemy for it, and sqlite3 refuse a closed connection."""
        return type(error) in _CLOSED and str(error).rstrip(".").lower() in _UNSENT

    def is_denied(self, error: BaseException) -> bool:
        """By SQLite's code: read-only, or no such table."""
        code = result_code(error)
        return code == READ_ONLY or (code == _ERROR and str(error).startswith("no such table"))

    def spoils(self, error: BaseException) -> bool:
        """A file that was opened read-only stays so."""
        return result_code(error) in REOPENED


def is_locked(error: BaseException) -> bool:
    """Whether another connection has what this one needs."""
    return result_code(error) in LOCKED


def result_code(error: BaseException | None) -> int:
    """SQLite's primary result code (the lowest byte of the extended one); 0 if it is none of its
    errors.
    """
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF

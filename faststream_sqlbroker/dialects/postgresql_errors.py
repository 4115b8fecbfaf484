"""SQLSTATEs of PostgreSQL by what they mean for the broker."""

_TRANSIENT_CLASSES = frozenset({"08", "40", "53", "57", "58"})
_READ_ONLY = "25006"
_LOCK_NOT_AVAILABLE = "55P03"
_SESSION_ENDED = frozenset({"25P03", "25P04", "57P01", "57P02", "57P03", "57P04", "57P05"})
"""Time limits of idle sessions and of transactions, a shutdown, a crash, a dropped database."""
_TRANSIENT_CODES = frozenset({_READ_ONLY, "25P03", "25P04", _LOCK_NOT_AVAILABLE})


class PostgresqlErrors:
    """Judges errors for the dialect."""

    def is_transient(self, error: BaseException) -> bool:
        """By SQLSTATE: connection, rollback, resources, operator, system; lock wait, read-only, time limits."""
        code = _sqlstate(error)
        return code[:2] in _TRANSIENT_CLASSES or code in _TRANSIENT_CODES

    def lock_wait_ended(self, error: BaseException) -> bool:
        """By SQLSTATE."""
        return _sqlstate(error) == _LOCK_NOT_AVAILABLE

    def ends_session(self, error: BaseException) -> bool:
        """By SQLSTATE."""
        code = _sqlstate(error)
        return code[:2] == "08" or code in _SESSION_ENDED

    def spoils(self, error: BaseException) -> bool:
        """A standby's session stays one, as does that of a server set to default_transaction_read_only."""
        return _sqlstate(error) == _READ_ONLY or self.ends_session(error)


def _sqlstate(error: BaseException) -> str:
    return str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or "")

"""The database's errors, classed: worth repeating, or not."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

from sqlalchemy.exc import DBAPIError, InvalidRequestError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from faststream_sqlbroker.core.access import Access, Activities, Activity
from faststream_sqlbroker.dialects import Dialect
from faststream_sqlbroker.dialects.access import is_denied
from faststream_sqlbroker.dialects.sqlite import is_locked
from faststream_sqlbroker.exceptions import (
    AccessError,
    PublishError,
    SetupError,
    SqlBrokerError,
    StoreError,
    TransientStoreError,
)

_QUOTED_ROW = re.compile(r"\s*DETAIL:\s+Failing row contains .*", re.DOTALL)
DRIVERS = frozenset(
    {"asyncpg", "psycopg", "aiomysql", "pymysql", "asyncmy", "aiosqlite", "sqlite3"}
)

Doing = Activities | Callable[[], Activities]
"""What statements are for; called only when one of them was refused."""


async def _nothing_found(_activities: Activities) -> Access:
    return Access("")


class NotConnectedError(TransientStoreError):
    """No connection could be made, for whatever reason: a refused login may be allowed a moment
    later.
    """


class ErrorClasses:
    """Tells one database's errors apart."""

    def __init__(self, dialect: Dialect, statement_timeout: float) -> None:
        """`statement_timeout` in seconds is what the message of a time-out names."""
        self._dialect, self._statement_timeout = dialect, statement_timeout
        self.on_denied: Callable[[Activities], None] = lambda _activities: None
        """Called when a statement of these was refused because a right or a table is missing."""
        self.find_lacks: Callable[[Activities], Awaitable[Access]] = _nothing_found
        """Says what is missing for them, for the error's text."""

    @asynccontextmanager
    async def classed(
        self, doing: Doing = frozenset(), *, explained: bool = False
    ) -> AsyncIterator[None]:
        """Turn the database's errors into ours; others pass as they are.

        Args:
            doing: What the statements are for.
            explained: Whether an `AccessError` says what is missing. The database is asked by
                another connection: only for who holds none.
        """
        try:
            yield
        except SqlBrokerError:
            raise
        # A driver's error while connecting reaches us as it is, in a class of its own.
        except Exception as error:
            ours = self.of(error)
            if ours is None:
                raise
            if self._denied(error):
                activities = doing() if callable(doing) else doing
                self.on_denied(activities)
                if explained and isinstance(ours, AccessError):
                    ours = await self.explained(ours, activities)
            raise ours from error

    async def explained(self, error: AccessError, activities: Activities) -> AccessError:
        """`error` with what is missing for `activities`; as it is if that cannot be found out. For
        who holds no connection.
        """
        if not activities:
            return error
        try:
            access = await self.find_lacks(activities)
        except StoreError:
            return error
        if not access.lacks:
            return error
        named = AccessError(f"{error}\n{access.describe()}")
        named.only_answers = access.stopped & activities == {Activity.PUBLISH} != activities
        named.every_answer = named.only_answers and any(lack.every_publish for lack in access.lacks)
        return named

    @asynccontextmanager
    async def connecting(self) -> AsyncIterator[None]:
        """Turn every error of the database into `NotConnectedError`: no statement was sent yet.

        Raises:
            SetupError: SQLAlchemy refuses the server, as it is no MariaDB.
        """
        try:
            yield
        except Exception as error:
            if type(error) is InvalidRequestError and self._dialect.name == "mariadb":
                msg = f"{error} The URL begins with mariadb+: use mysql+, which leads to both databases"
                raise SetupError(msg) from error
            ours = self.of(error)
            if ours is None:
                raise
            raise NotConnectedError(str(ours)) from error

    def of(self, error: BaseException) -> StoreError | None:
        """`error` as one of ours; None if it is no error of the database."""
        if isinstance(error, PoolTimeout):
            return TransientStoreError(f"no free connection in the pool: {error}")
        if isinstance(error, TimeoutError) and not str(error):
            return TransientStoreError(f"no answer within {self._statement_timeout} seconds")
        if getattr(error, "connection_invalidated", False) or self._is_transient(error):
            return TransientStoreError(driver_text(error))
        if isinstance(error, SQLAlchemyError):
            return (AccessError if self._denied(error) else StoreError)(driver_text(error))
        if type(error).__module__.partition(".")[0] in DRIVERS:
            # Not translated by SQLAlchemy: it came out of connecting, or of a connection already
            # broken.
            return TransientStoreError(f"{type(error).__name__}: {error}")
        return None

    def of_caller(self, error: SQLAlchemyError) -> Exception:
        """`error` of a statement in the caller's transaction, which cannot be repeated here."""
        if isinstance(error, InvalidRequestError):
            msg = f"the transaction given cannot be used any more; publish before it ends ({error})"
            return PublishError(msg)
        if self._dialect.name == "sqlite" and any(is_locked(each) for each in _causes(error)):
            msg = (
                "SQLite refused to turn the caller's read transaction into a writing one because another "
                "connection has written meanwhile; begin such transactions with BEGIN IMMEDIATE "
                f"(see docs/howto/outbox.md) and repeat the whole transaction ({driver_text(error)})"
            )
            return TransientStoreError(msg)
        if self._denied(error):
            self.on_denied(frozenset({Activity.PUBLISH}))
        return self.of(error) or error

    def _denied(self, error: BaseException) -> bool:
        return any(is_denied(self._dialect, each) for each in _causes(error))

    def spoils(self, error: BaseException) -> bool:
        """Whether the connection that gave `error` must not be used again, though it may go on
        answering.
        """
        return any(self._dialect.spoils(each) for each in _causes(error))

    def was_rolled_back(self, error: BaseException) -> bool:
        """Whether the database itself undid the transaction and works: the repeat may start at
        once.
        """
        cause = error.__cause__
        if not isinstance(cause, DBAPIError) or isinstance(error, NotConnectedError):
            return False
        ended = any(self._dialect.ends_session(each) for each in _causes(cause))
        return not (cause.connection_invalidated or ended)

    def waited_for_lock(self, error: BaseException) -> bool:
        """Whether a lock of another transaction was not free within the session's limit."""
        return any(self._dialect.lock_wait_ended(each) for each in _causes(error))

    def needs_another(self, error: BaseException) -> bool:
        """Whether the statement may succeed on another connection: this one is broken, or must not
        be used again.
        """
        cause = error.__cause__
        if isinstance(error, NotConnectedError) or not isinstance(cause, DBAPIError):
            return False
        return cause.connection_invalidated or self.spoils(cause)

    def _is_transient(self, error: BaseException) -> bool:
        return any(isinstance(e, OSError) or self._dialect.is_transient(e) for e in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, and what it was made of: the driver's own error has the code."""
    while error is not None:
        yield error
        error = getattr(error, "orig", None) or error.__cause__


def driver_text(error: BaseException) -> str:
    """The driver's own words; SQLAlchemy's would add the statement and its parameters (payloads).

    Without the row that PostgreSQL quotes when a constraint refuses it: body and headers are in it.
    """
    orig = getattr(error, "orig", None)
    text = f"{type(orig).__name__}: {orig}" if orig is not None else str(error)
    return _QUOTED_ROW.sub("", text)

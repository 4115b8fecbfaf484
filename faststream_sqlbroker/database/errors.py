"""Classifies the database's errors: worth repeating or not."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

from sqlalchemy.exc import DBAPIError, InvalidRequestError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from faststream_sqlbroker.core.access import Access, Activities, Activity
from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.sqlite.dialect import is_locked
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
"""The activities that statements serve; a function is called only if one was refused."""


async def _nothing_found(_activities: Activities) -> Access:
    return Access("")


class NotConnectedError(TransientStoreError):
    """No connection could be made. Every cause counts as passing, even a refused login."""


class ErrorClasses:
    """Converts the errors of one database into those of this package."""

    def __init__(self, dialect: Dialect, statement_timeout: float) -> None:
        """`statement_timeout`, in seconds, is named in the text of a timeout."""
        self.dialect = dialect
        self._statement_timeout = statement_timeout
        self._on_denied: Callable[[Activities], None] = lambda _activities: None
        self._find_lacks: Callable[[Activities], Awaitable[Access]] = _nothing_found

    def tell_denied(
        self,
        on_denied: Callable[[Activities], None],
        find_lacks: Callable[[Activities], Awaitable[Access]],
    ) -> None:
        """Call `on_denied` with the activities of a statement that lacked a right or a table.

        `find_lacks` then finds out what is missing, for the error's text.
        """
        self._on_denied = on_denied
        self._find_lacks = find_lacks

    @asynccontextmanager
    async def classed(
        self, doing: Doing = frozenset(), *, explained: bool = False
    ) -> AsyncIterator[None]:
        """Convert the database's errors; other errors pass unchanged.

        Args:
            doing: The activities that the statements serve; a refusal of what serves none tells
                nothing of this process.
            explained: Name in an `AccessError` what is missing. That takes another connection, so
                the caller must hold none: with all of them held, it would wait for itself.
        """
        try:
            yield
        # Not only SQLAlchemy's: it does not wrap a driver's error while connecting.
        except Exception as error:
            await self.convert(error, doing, explained=explained)
            raise

    async def convert(
        self, error: Exception, doing: Doing = frozenset(), *, explained: bool = False
    ) -> None:
        """Raise what `error` is to users, as `classed` does; return if it is not the database's.

        For a caller for which a context that is entered each time would cost too much.
        """
        if isinstance(error, SqlBrokerError) or (ours := self.of(error)) is None:
            return
        if self._denied(error) and (activities := doing() if callable(doing) else doing):
            self._on_denied(activities)
            if explained and isinstance(ours, AccessError):
                ours = await self.explained(ours, activities)
        raise ours from error

    async def explained(self, error: AccessError, activities: Activities) -> AccessError:
        """`error` with what is missing for `activities`; unchanged if that cannot be found out.

        The caller must hold no connection.
        """
        if not activities:
            return error
        try:
            access = await self._find_lacks(activities)
        except StoreError:
            return error
        if not access.lacks:
            return error
        named = AccessError(f"{error}\n{access.describe()}")
        named.only_answers = access.stopped & activities == {Activity.PUBLISH} != activities
        named.every_answer = named.only_answers and any(lack.every_publish for lack in access.lacks)
        return named

    def of_connecting(self, error: Exception) -> Exception | None:
        """`error`, before any statement was sent, as a `NotConnectedError`, or as a `SetupError` if
        the URL begins with mariadb+ and the server is not MariaDB; None as `of`.
        """
        if type(error) is InvalidRequestError and self.dialect.name == "mariadb":
            advice = "The URL begins with mariadb+: use mysql+, which works for both databases"
            return SetupError(f"{error} {advice}")
        ours = self.of(error)
        return None if ours is None else NotConnectedError(str(ours))

    def of(self, error: BaseException) -> StoreError | None:
        """`error` as a StoreError; None if it is not an error of the database."""
        if isinstance(error, PoolTimeout):
            return TransientStoreError(f"no free connection in the pool: {error}")
        if isinstance(error, TimeoutError) and not str(error):
            return TransientStoreError(f"no answer within {self._statement_timeout} seconds")
        if getattr(error, "connection_invalidated", False) or self._is_transient(error):
            return TransientStoreError(driver_text(error))
        if isinstance(error, SQLAlchemyError):
            return (AccessError if self._denied(error) else StoreError)(driver_text(error))
        if type(error).__module__.partition(".")[0] in DRIVERS:
            # SQLAlchemy does not wrap errors while connecting, nor those of a broken connection.
            return TransientStoreError(f"{type(error).__name__}: {error}")
        return None

    def of_caller(self, error: SQLAlchemyError) -> Exception:
        """`error` of a statement in the caller's transaction, which cannot be repeated here."""
        if isinstance(error, InvalidRequestError):
            msg = f"the given transaction cannot be used any more; publish before it ends ({error})"
            return PublishError(msg)
        if self.dialect.name == "sqlite" and any(is_locked(each) for each in _causes(error)):
            msg = (
                "SQLite cannot turn your read transaction into a writing one, because another "
                "connection has written since it began; begin such transactions with BEGIN "
                "IMMEDIATE (see docs/howto/outbox.md) and repeat the whole transaction "
                f"({driver_text(error)})"
            )
            return TransientStoreError(msg)
        if self._denied(error):
            self._on_denied(frozenset({Activity.PUBLISH}))
        return self.of(error) or error

    def _denied(self, error: BaseException) -> bool:
        return any(self.dialect.is_denied(each) for each in _causes(error))

    def spoils(self, error: BaseException) -> bool:
        """Whether the connection that gave `error` must not be used again, though it may answer."""
        return any(self.dialect.spoils(each) for each in _causes(error))

    def was_never_sent(self, error: BaseException) -> bool:
        """Whether the driver refused the statement before it sent anything."""
        return any(self.dialect.was_never_sent(each) for each in _causes(error))

    def was_rolled_back(self, error: BaseException) -> bool:
        """Whether the database rolled the transaction back and works, so it can be repeated now."""
        cause = error.__cause__
        if not isinstance(cause, DBAPIError) or isinstance(error, NotConnectedError):
            return False
        ended = any(self.dialect.ends_session(each) for each in _causes(cause))
        return not (cause.connection_invalidated or ended)

    def wrote_nothing(self, error: BaseException) -> bool:
        """Whether a COMMIT that gave `error` was not carried out; else that is unknown."""
        return self.was_rolled_back(error) or self.was_never_sent(error)

    def waited_for_lock(self, error: BaseException) -> bool:
        """Whether the statement waited for another transaction's lock up to the session's limit."""
        return any(self.dialect.lock_wait_ended(each) for each in _causes(error))

    def needs_another(self, error: BaseException) -> bool:
        """Whether the statement may succeed on another connection: this one is broken or stale."""
        cause = error.__cause__
        if isinstance(error, NotConnectedError) or not isinstance(cause, DBAPIError):
            return False
        return cause.connection_invalidated or self.spoils(cause) or self.was_never_sent(cause)

    def _is_transient(self, error: BaseException) -> bool:
        return any(
            isinstance(each, OSError)
            or self.dialect.is_transient(each)
            or self.dialect.was_never_sent(each)
            for each in _causes(error)
        )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and its causes: the driver's own error is among them and has the code."""
    while error is not None:
        yield error
        error = getattr(error, "orig", None) or error.__cause__


def driver_text(error: BaseException) -> str:
    """The driver's text. SQLAlchemy's would add the statement and its parameters, so payloads.

    A row that PostgreSQL quotes for a violated constraint is left out: it has body and headers.
    """
    orig = getattr(error, "orig", None)
    text = f"{type(orig).__name__}: {orig}" if orig is not None else str(error)
    return _QUOTED_ROW.sub("", text)

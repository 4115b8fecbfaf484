"""Convert the database's errors into those of this package, transient or not."""

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

ActivitySource = Activities | Callable[[], Activities]
"""The activities that statements serve; a function is called only after a refusal."""


async def _find_nothing(_activities: Activities) -> Access:
    return Access("")


class UnavailableError(TransientStoreError):
    """The server takes no writes at all at present."""


class NotConnectedError(UnavailableError):
    """No connection could be made. Every cause counts as transient, even a refused login."""


class ErrorClasses:
    """Converts the errors of a database into the package's exceptions."""

    def __init__(self, dialect: Dialect, statement_timeout: float) -> None:
        """Convert the errors of `dialect`.

        The message of a timeout names `statement_timeout` (seconds).
        """
        self.dialect = dialect
        self._statement_timeout = statement_timeout
        self._on_denied: Callable[[Activities], None] = lambda _activities: None
        self._find_missing_rights: Callable[[Activities], Awaitable[Access]] = _find_nothing

    def set_denied_hooks(
        self,
        on_denied: Callable[[Activities], None],
        find_missing_rights: Callable[[Activities], Awaitable[Access]],
    ) -> None:
        """Set the functions to call when a statement lacks a right or a table.

        `on_denied` gets the activities of the statement. `find_missing_rights` then finds the
        missing rights for the error message.
        """
        self._on_denied = on_denied
        self._find_missing_rights = find_missing_rights

    @asynccontextmanager
    async def convert_errors(
        self, activity_source: ActivitySource = frozenset()
    ) -> AsyncIterator[None]:
        """Convert the database's errors as `convert` does; other errors pass unchanged."""
        try:
            yield
        # Catch any exception: SQLAlchemy does not wrap a driver's error while connecting.
        except Exception as error:
            await self.convert(error, activity_source)
            raise

    async def convert(
        self,
        error: Exception,
        activity_source: ActivitySource = frozenset(),
        *,
        explain: bool = False,
    ) -> None:
        """Raise `error` as an exception of this package; return for other errors.

        Other errors are not the database's or the driver's.

        Args:
            error: What a statement raised.
            activity_source: The activities that the statements serve; without any, a refusal says
                nothing about this process.
            explain: Name in an `AccessError` the missing rights. That takes another connection, so
                the caller must hold none: if callers held all of them, it would wait for itself.
        """
        if isinstance(error, SqlBrokerError) or (store_error := self.to_store_error(error)) is None:
            return
        if self._is_denied(error) and (
            activities := activity_source() if callable(activity_source) else activity_source
        ):
            self._on_denied(activities)
            if explain and isinstance(store_error, AccessError):
                store_error = await self.explain_denied(store_error, activities)
        raise store_error from error

    async def explain_denied(self, error: AccessError, activities: Activities) -> AccessError:
        """Return `error` with the rights missing for `activities`, or unchanged if unknown.

        The search takes a connection of its own, so the caller must hold none. Sets `only_answers`
        if the user may do everything but publish, so that only outcomes with messages published on
        ack fail, and `every_answer` if no message at all can be published.
        """
        if not activities:
            return error
        try:
            access = await self._find_missing_rights(activities)
        except StoreError:
            return error
        if not access.missing:
            return error
        explained_error = AccessError(f"{error}\n{access.describe()}")
        explained_error.only_answers = (
            access.impossible_activities & activities == {Activity.PUBLISH} != activities
        )
        explained_error.every_answer = explained_error.only_answers and any(
            lack.every_publish for lack in access.missing
        )
        return explained_error

    def convert_connect_error(self, error: Exception) -> Exception | None:
        """Convert `error`, raised before any statement was sent, to a `NotConnectedError`.

        A URL with mariadb+ that leads to another server gives a `SetupError`. None as in
        `to_store_error`.
        """
        if type(error) is InvalidRequestError and self.dialect.name == "mariadb":
            hint = "The URL begins with mariadb+: use mysql+, which works for both databases"
            return SetupError(f"{error} {hint}")
        store_error = self.to_store_error(error)
        return None if store_error is None else NotConnectedError(str(store_error))

    def to_store_error(self, error: BaseException) -> StoreError | None:
        """Return `error` as a StoreError, None if not from the database or the driver.

        A TransientStoreError says that a repeat may succeed, an AccessError that a right or a table
        is missing.
        """
        if isinstance(error, PoolTimeout):
            return TransientStoreError(f"no free connection in the pool: {error}")
        # asyncio's own timeouts have no text; those of sockets have.
        if isinstance(error, TimeoutError) and not str(error):
            return TransientStoreError(f"no answer within {self._statement_timeout} seconds")
        if getattr(error, "connection_invalidated", False) or self._is_transient(error):
            error_class = UnavailableError if self.is_read_only(error) else TransientStoreError
            return error_class(get_driver_message(error))
        if isinstance(error, SQLAlchemyError):
            return (AccessError if self._is_denied(error) else StoreError)(
                get_driver_message(error)
            )
        if type(error).__module__.partition(".")[0] in DRIVERS:
            # SQLAlchemy wraps neither errors while connecting nor errors of a broken connection.
            return TransientStoreError(f"{type(error).__name__}: {error}")
        return None

    def convert_caller_error(self, error: SQLAlchemyError) -> Exception:
        """Convert `error` of a statement in the caller's transaction, such as a publish.

        Only the caller can repeat its transaction, so the message says what the caller must do.
        """
        if isinstance(error, InvalidRequestError):
            msg = f"the given transaction is no longer usable; publish before it ends ({error})"
            return PublishError(msg)
        if self.dialect.name == "sqlite" and any(is_locked(cause) for cause in iter_causes(error)):
            msg = (
                "SQLite cannot let your read transaction write, because another connection has "
                f"written since it began ({get_driver_message(error)}). Repeat the whole "
                "transaction, and begin it with BEGIN IMMEDIATE (see docs/howto/outbox.md)."
            )
            return TransientStoreError(msg)
        if self._is_denied(error):
            self._on_denied(frozenset({Activity.PUBLISH}))
        return self.to_store_error(error) or error

    def _is_denied(self, error: BaseException) -> bool:
        return any(self.dialect.is_denied(cause) for cause in iter_causes(error))

    def is_read_only(self, error: BaseException) -> bool:
        """Return True if `error` is the answer of a server that takes no writes at present."""
        return any(self.dialect.is_read_only(cause) for cause in iter_causes(error))

    def spoils_connection(self, error: BaseException) -> bool:
        """Return True if the connection that gave `error` must not be used again.

        It may still answer: a server that became read-only does, but refuses all writes.
        """
        return any(self.dialect.spoils_connection(cause) for cause in iter_causes(error))

    def was_never_sent(self, error: BaseException) -> bool:
        """Return True if the driver refused the statement before sending anything."""
        return any(self.dialect.was_never_sent(cause) for cause in iter_causes(error))

    def was_rolled_back(self, error: BaseException) -> bool:
        """Return True if the database rolled the transaction back and still answers.

        For example after a deadlock. The transaction can be repeated at once, on the same
        connection.
        """
        cause = error.__cause__
        if not isinstance(cause, DBAPIError) or isinstance(error, NotConnectedError):
            return False
        session_ended = any(self.dialect.ends_session(chained) for chained in iter_causes(cause))
        return not (cause.connection_invalidated or session_ended)

    def wrote_nothing(self, error: BaseException) -> bool:
        """Return True if a COMMIT that gave `error` was not carried out; False means unknown."""
        return self.was_rolled_back(error) or self.was_never_sent(error)

    def waited_for_lock(self, error: BaseException) -> bool:
        """Return True if the statement waited for a lock up to the session's limit."""
        return any(self.dialect.is_lock_timeout(cause) for cause in iter_causes(error))

    def needs_new_connection(self, error: BaseException) -> bool:
        """Return True if the connection is broken or stale, so that a new connection may work.

        Not if the error came from connecting itself: then a new connection would fail, too.
        """
        cause = error.__cause__
        if isinstance(error, NotConnectedError) or not isinstance(cause, DBAPIError):
            return False
        return (
            cause.connection_invalidated
            or self.spoils_connection(cause)
            or self.was_never_sent(cause)
        )

    def _is_transient(self, error: BaseException) -> bool:
        """Return True if a later attempt may succeed: a network error, a deadlock, a full disk.

        The driver's own error, which SQLAlchemy's error wraps, has the code that decides.
        """
        return any(
            isinstance(cause, OSError)
            or self.dialect.is_transient(cause)
            or self.dialect.was_never_sent(cause)
            for cause in iter_causes(error)
        )


def iter_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and all causes, including the driver's own error, which has the code."""
    while error is not None:
        yield error
        error = getattr(error, "orig", None) or error.__cause__


def get_driver_message(error: BaseException) -> str:
    """Return the driver's message without the statement and parameters, so without payloads.

    A row that PostgreSQL quotes for a violated constraint is removed: it has body and headers.
    """
    orig = getattr(error, "orig", None)
    message = f"{type(orig).__name__}: {orig}" if orig is not None else str(error)
    return _QUOTED_ROW.sub("", message)

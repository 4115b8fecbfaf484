"""Checks of the engine, its connection pool, and connections that callers give."""

from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import StaticPool

from faststream_sqlbroker.exceptions import PublishError, SetupError
from faststream_sqlbroker.schema.types import MYSQL

AnyEngine = TypeVar("AnyEngine", AsyncEngine, Engine)

DEFAULT_SIZE = 5
"""Connections assumed of a pool that has no size (NullPool); SQLAlchemy's default pool_size."""


def refuse_shared(engine: AsyncEngine) -> None:
    """Refuse an engine with one connection for all tasks: transactions on it are not separate.

    Raises:
        SetupError: the engine has SQLite without a file, or a StaticPool.
    """
    database = engine.url.database
    memory = not database or ":memory:" in database or "mode=memory" in str(engine.url)
    if engine.dialect.name == "sqlite" and memory:
        msg = (
            "an in-memory SQLite database has one connection for all tasks, so transactions are "
            "not separate; give a file, for example sqlite+aiosqlite:///app.db"
        )
        raise SetupError(msg)
    if isinstance(engine.pool, StaticPool):
        msg = (
            "the engine's StaticPool has one connection for all tasks, so the application and the "
            "broker would commit and roll back each other's transactions: make the engine without "
            "poolclass, and with a file, also in tests, for example a temporary one"
        )
        raise SetupError(msg)


def size(engine: AsyncEngine) -> int:
    """Connections that the pool keeps open."""
    method: Any = getattr(engine.pool, "size", None)
    return int(method()) if callable(method) else DEFAULT_SIZE


def transactional(engine: AnyEngine, level: str | None) -> AnyEngine:
    """`engine` with the isolation level `level`, never AUTOCOMMIT, which has no transactions.

    It shares the pool of `engine`.

    Raises:
        SetupError: the engine's execution options have AUTOCOMMIT; they would override `level`.
    """
    if str(engine.get_execution_options().get("isolation_level")).upper() == "AUTOCOMMIT":
        msg = (
            "the engine has isolation_level='AUTOCOMMIT' among its execution options, so it has no "
            "transactions: give the engine that it was made from"
        )
        raise SetupError(msg)
    # Where create_engine keeps its isolation_level; there is no public way to it.
    given = getattr(engine.dialect, "_on_connect_isolation_level", None)
    if level is None and str(given).upper() == "AUTOCOMMIT":
        level = "SERIALIZABLE" if engine.dialect.name == "sqlite" else "READ COMMITTED"
    return engine if level is None else engine.execution_options(isolation_level=level)


def in_use(engine: AsyncEngine) -> int | None:
    """Connections that the pool has given out; None if it does not count (NullPool)."""
    method: Any = getattr(engine.pool, "checkedout", None)
    return int(method()) if callable(method) else None


def capacity(engine: AsyncEngine) -> int | None:
    """Most connections that the pool gives; None if it sets no limit."""
    # QueuePool has no public way to its limit.
    overflow: Any = getattr(engine.pool, "_max_overflow", None)
    return None if not isinstance(overflow, int) or overflow < 0 else size(engine) + overflow


def can_spare_one(engine: AsyncEngine) -> bool:
    """Whether the pool gives more than one connection, so that one can be kept for listening."""
    most = capacity(engine)
    return most is None or most > 1


def shortage(engine: AsyncEngine, for_subscribers: int, *, listening: bool) -> str | None:
    """The warning if the pool has fewer connections than the broker may use; else None."""
    most = capacity(engine)
    needed = for_subscribers + 1 + int(listening)
    if most is None or most >= needed:
        return None
    listen = ", one for LISTEN" if listening else ""
    return (
        f"the engine's pool gives at most {most} connections, but the broker may use {needed} "
        f"({for_subscribers} for subscribers, one for publishing{listen}) "
        "besides the application's own: raise pool_size or max_overflow"
    )


def handler_shortage(engine: AsyncEngine, places: int, handlers: int) -> str | None:
    """The warning if `handlers` may run and fewer transactions can be open; else None.

    SQLite has one writer at a time with any pool, so it gets no warning.
    """
    if places >= handlers or engine.dialect.name == "sqlite":
        return None
    most = capacity(engine)
    if most is None:
        pool = f"sets no limit, and counts for {DEFAULT_SIZE} connections,"
        cure = (
            f"Give it limits, such as pool_size={DEFAULT_SIZE} and max_overflow={handlers - places}"
        )
    else:
        pool = f"gives at most {most} connections,"
        cure = f"Raise its max_overflow by {handlers - places}"
    return (
        "transactional=True takes a connection for each handler that runs: by max_workers there "
        f"may be {handlers} at a time, but the engine's pool, which {pool} leaves {places} for "
        f"them besides the broker's own. The others wait. {cure}, or lower max_workers"
    )


def handler_places(
    engine: AsyncEngine, for_subscribers: int, *, listening: bool, one_writer: bool
) -> int:
    """Transactions that handlers may have open at a time; 0 if the pool is too small for one.

    The broker's own connections are not counted: its loops must work while all handlers have
    theirs. SQLite has one writer at a time, so one is enough.
    """
    most = capacity(engine)
    left = (DEFAULT_SIZE if most is None else most) - for_subscribers - 1 - int(listening)
    return max(0, min(left, 1) if one_writer else left)


def check_same_database(connection: Connection | None, engine: Engine) -> None:
    """Refuse a connection that is closed, or that leads to another database than `engine`.

    Raises:
        PublishError: the connection is such a one; the text has both URLs without passwords.
    """
    if connection is None or connection.closed:
        msg = "the given connection is closed; publish while its transaction is open"
        raise PublishError(msg)
    if connection.engine.pool is engine.pool:
        return
    theirs = connection.engine.url
    ours = engine.url
    alike = _family(theirs.get_backend_name()) == _family(ours.get_backend_name())
    same_place = (theirs.host, theirs.port, theirs.database) == (
        ours.host,
        ours.port,
        ours.database,
    )
    if not (alike and same_place):
        msg = (
            f"the given connection leads to {theirs.render_as_string()!r}, but the broker's tables "
            f"are in {ours.render_as_string()!r}; use a connection to the broker's database"
        )
        raise PublishError(msg)


def _family(backend: str) -> str:
    return MYSQL[0] if backend in MYSQL else backend

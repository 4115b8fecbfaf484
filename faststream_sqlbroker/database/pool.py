"""Check the engine, its connection pool, and connections that callers pass."""

from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import StaticPool

from faststream_sqlbroker.exceptions import PublishError, SetupError
from faststream_sqlbroker.schema.types import MYSQL

AnyEngine = TypeVar("AnyEngine", AsyncEngine, Engine)

DEFAULT_SIZE = 5
"""Connections assumed for a pool without a size (NullPool); SQLAlchemy's default pool_size."""


def refuse_shared_connection(engine: AsyncEngine) -> None:
    """Refuse an engine with a single connection for all tasks.

    Two tasks would share a transaction, and one would commit or roll back the other's writes.

    Raises:
        SetupError: the engine has SQLite without a file, or a StaticPool.
    """
    database = engine.url.database
    in_memory = not database or ":memory:" in database or "mode=memory" in str(engine.url)
    if engine.dialect.name == "sqlite" and in_memory:
        msg = (
            "an in-memory SQLite database has one connection for all tasks, so their transactions "
            "would mix: use a file, for example sqlite+aiosqlite:///app.db"
        )
        raise SetupError(msg)
    if isinstance(engine.pool, StaticPool):
        msg = (
            "the engine's StaticPool has one connection for all tasks, so the application and the "
            "broker would commit and roll back each other's transactions: create the engine "
            "without poolclass, and on SQLite with a file (in tests, a temporary file)"
        )
        raise SetupError(msg)


def get_size(engine: AsyncEngine) -> int:
    """Return the number of connections that the pool keeps open.

    A pool without a size (NullPool) counts as `DEFAULT_SIZE`.
    """
    method: Any = getattr(engine.pool, "size", None)
    return int(method()) if callable(method) else DEFAULT_SIZE


def ensure_transactional(engine: AnyEngine, level: str | None) -> AnyEngine:
    """Return `engine` with the isolation level `level`, but never AUTOCOMMIT.

    AUTOCOMMIT has no transactions. The result shares the pool of `engine`. If `level` is None, the
    engine keeps its level, unless that is AUTOCOMMIT.

    Raises:
        SetupError: the engine's execution options have AUTOCOMMIT; they would override `level`.
    """
    if str(engine.get_execution_options().get("isolation_level")).upper() == "AUTOCOMMIT":
        msg = (
            "the engine's execution options set isolation_level='AUTOCOMMIT', so it has no "
            "transactions: pass the original engine, without this option"
        )
        raise SetupError(msg)
    # create_engine stores its isolation_level here; there is no public attribute.
    engine_level = getattr(engine.dialect, "_on_connect_isolation_level", None)
    if level is None and str(engine_level).upper() == "AUTOCOMMIT":
        level = "SERIALIZABLE" if engine.dialect.name == "sqlite" else "READ COMMITTED"
    return engine if level is None else engine.execution_options(isolation_level=level)


def count_in_use(engine: AsyncEngine) -> int | None:
    """Return the connections in use, None if the pool does not count (NullPool)."""
    method: Any = getattr(engine.pool, "checkedout", None)
    return int(method()) if callable(method) else None


def get_capacity(engine: AsyncEngine) -> int | None:
    """Return the maximum number of connections, None if the pool sets no limit."""
    # QueuePool has no public attribute for its limit.
    overflow: Any = getattr(engine.pool, "_max_overflow", None)
    return None if not isinstance(overflow, int) or overflow < 0 else get_size(engine) + overflow


def can_spare_one(engine: AsyncEngine) -> bool:
    """Return True if the pool has at least two connections.

    Then a connection can be kept for listening.
    """
    max_connections = get_capacity(engine)
    return max_connections is None or max_connections > 1


def get_shortage(engine: AsyncEngine, for_subscribers: int, *, listening: bool) -> str | None:
    """Return a warning if the pool has fewer connections than the broker may use, or None.

    Args:
        engine: The application's engine.
        for_subscribers: Connections that the broker uses for everything but publishing and LISTEN.
        listening: LISTEN takes a connection of this pool.
    """
    max_connections = get_capacity(engine)
    needed = for_subscribers + 1 + int(listening)
    if max_connections is None or max_connections >= needed:
        return None
    listen = ", one for LISTEN" if listening else ""
    return (
        f"the engine's pool has at most {max_connections} connections, but the broker may use "
        f"{needed} ({for_subscribers} for subscribers, one for publishing{listen}) "
        "in addition to the application's: raise pool_size or max_overflow"
    )


def get_handler_shortage(engine: AsyncEngine, slots: int, handlers: int) -> str | None:
    """Return a warning if more handlers may run than transactions can be open, or None.

    `slots` transactions can be open at a time, and `handlers` is the sum of `max_workers` of the
    transactional subscribers. SQLite has one writer at a time with any pool, so it gets no warning.
    """
    if slots >= handlers or engine.dialect.name == "sqlite":
        return None
    max_connections = get_capacity(engine)
    if max_connections is None:
        pool = f"has no limit (counted as {DEFAULT_SIZE} connections)"
        remedy = f"Set limits, such as pool_size={DEFAULT_SIZE} and max_overflow={handlers - slots}"
    else:
        pool = f"has at most {max_connections} connections"
        remedy = f"Raise max_overflow by {handlers - slots}"
    return (
        "transactional=True needs a connection for each running handler. max_workers allows "
        f"{handlers} handlers at a time, but the engine's pool {pool} and the broker leaves them "
        f"{slots}, so the others wait. {remedy}, or lower max_workers."
    )


def count_handler_slots(
    engine: AsyncEngine, for_subscribers: int, *, listening: bool, one_writer: bool
) -> int:
    """Return the number of transactions that handlers may have open at a time, 0 without capacity.

    The broker's own connections are subtracted from the pool's: its loops must go on while all
    handlers have theirs. With `one_writer` (SQLite) one transaction is enough, because others would
    wait for it.
    """
    max_connections = get_capacity(engine)
    remaining = (
        (DEFAULT_SIZE if max_connections is None else max_connections)
        - for_subscribers
        - 1
        - int(listening)
    )
    return max(0, min(remaining, 1) if one_writer else remaining)


def check_same_database(connection: Connection | None, engine: Engine) -> None:
    """Refuse a connection that is closed, or that leads to another database than `engine`.

    Called before a publish in the caller's transaction: otherwise the row would go to a database
    that no subscriber reads. Connections of the engine's own pool are accepted without a look at
    the URL.

    Raises:
        PublishError: the connection is refused; the message has both URLs without passwords.
    """
    if connection is None or connection.closed:
        msg = "the given connection is closed; publish while its transaction is open"
        raise PublishError(msg)
    if connection.engine.pool is engine.pool:
        return
    other_url = connection.engine.url
    broker_url = engine.url
    same_family = _get_family(other_url.get_backend_name()) == _get_family(
        broker_url.get_backend_name()
    )
    same_location = (other_url.host, other_url.port, other_url.database) == (
        broker_url.host,
        broker_url.port,
        broker_url.database,
    )
    if not (same_family and same_location):
        msg = (
            f"the given connection is to {other_url.render_as_string()!r}, but the broker's tables "
            f"are in {broker_url.render_as_string()!r}; use a connection to the broker's "
            "database"
        )
        raise PublishError(msg)


def _get_family(backend: str) -> str:
    return MYSQL[0] if backend in MYSQL else backend

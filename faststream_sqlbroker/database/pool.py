"""Check the engine, its connection pool, and connections that callers pass."""

from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import Pool, StaticPool
from sqlalchemy.util.concurrency import in_greenlet

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


_SAME_DATABASE: WeakKeyDictionary[Pool, WeakSet[Pool]] = WeakKeyDictionary()
"""Pools by a broker's pool, whose connections were found to lead to the same database. That is
about addresses, so it holds after a failover of their cluster, too.
"""


def is_known_database(connection: Connection | None, engine: Engine) -> bool:
    """Return True if `connection` is known to lead to the database of `engine`.

    Raises:
        PublishError: it is closed.
    """
    if connection is None or connection.closed:
        msg = "the given connection is closed; publish while its transaction is open"
        raise PublishError(msg)
    pool = connection.engine.pool
    return pool is engine.pool or pool in _SAME_DATABASE.get(engine.pool, ())


def check_same_database(connection: Connection | None, engine: Engine) -> None:
    """Refuse a connection that is closed, or that leads to another database than `engine`.

    Called before a publish in the caller's transaction: otherwise the row would go to a database
    that no subscriber reads. Connections of the engine's own pool, and of an engine with the same
    URL, are accepted without a look. Otherwise both servers are asked once for each pool: different
    URLs, such as those of a cluster and of a proxy before it, may lead to one server.

    Raises:
        PublishError: the connection is refused; the message has both URLs without passwords.
    """
    if is_known_database(connection, engine) or connection is None:
        return
    other_url = connection.engine.url
    broker_url = engine.url
    is_same = _get_address(other_url) == _get_address(broker_url)
    if not is_same and not _is_same_server(connection, engine):
        msg = (
            f"the given connection is to {other_url.render_as_string()!r}, but the broker's tables "
            f"are in {broker_url.render_as_string()!r}; use a connection to the broker's database, "
            "or in synchronous code its host, port and options"
        )
        raise PublishError(msg)
    _SAME_DATABASE.setdefault(engine.pool, WeakSet()).add(connection.engine.pool)


def _is_same_server(connection: Connection, engine: Engine) -> bool:
    """Return True if both lead to one server, by what it says of itself.

    False if that is not known: synchronous code cannot ask by an asynchronous engine.
    """
    sql = _IDENTITIES.get(_get_name(engine.url)[0])
    can_ask = in_greenlet() or not engine.dialect.is_async
    if sql is None or not can_ask or _get_name(connection.engine.url) != _get_name(engine.url):
        return False
    identity = connection.exec_driver_sql(sql).all()
    for _ in range(2 if identity else 0):
        try:
            with engine.connect() as own:
                if own.exec_driver_sql(sql).all() == identity:
                    return True
                own.invalidate()  # it may be from before a failover; a new one is not
        except OSError as error:  # SQLAlchemy does not wrap a driver's error while connecting
            msg = f"cannot ask the broker's server whether the connection is to it: {error}"
            raise PublishError(msg) from error
    return False


_IDENTITIES = {
    "postgresql": "SELECT pg_postmaster_start_time(), current_database()",
    MYSQL[0]: "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('server_uuid', 'server_uid')",
}
"""Statements that every user may send, and that no two servers answer alike. A MariaDB without
these variables returns no row. SQLite needs no statement: paths tell its files apart.
"""
_ADDRESS_OPTIONS = ("host", "port", "service", "unix_socket")
"""Options of a URL that say where the server is; PostgreSQL's drivers take several hosts there."""


def _get_address(url: URL) -> list[object]:
    """Return what `url` says of the database's place; other drivers and users may lead there."""
    return [_get_name(url), url.host, url.port, *map(url.query.get, _ADDRESS_OPTIONS)]


def _get_name(url: URL) -> tuple[str, str | None]:
    """Return the kind of the database, one for MySQL and MariaDB, and its name."""
    backend = url.get_backend_name()
    return MYSQL[0] if backend in MYSQL else backend, url.database

"""The engine of a broker: passed by the caller, or created from a URL."""

from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Engine, event, make_url
from sqlalchemy.exc import ArgumentError, InvalidRequestError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.database.connections import ReadOnlyEvictions
from faststream_sqlbroker.database.dialects import create_dialect
from faststream_sqlbroker.exceptions import (
    MissingExtraError,
    NotSupportedError,
    SetupError,
    SqlBrokerError,
)
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables

if TYPE_CHECKING:
    from faststream.security import BaseSecurity

EXTRAS = {
    "asyncpg": "postgresql",
    "psycopg": "psycopg",
    "aiomysql": "mysql",
    "asyncmy": "asyncmy",
    "aiosqlite": "sqlite",
}
"""The extra that installs each driver."""
BACKENDS = frozenset({"postgresql", "mysql", "mariadb", "sqlite"})
URL_PREFIXES = (
    "postgresql+asyncpg, postgresql+psycopg, mysql+aiomysql, mysql+asyncmy, mariadb+aiomysql or "
    "sqlite+aiosqlite"
)
"""Valid beginnings of a URL, for error messages."""

PYMYSQL_LIMIT = (1, 2)
"""The first release of PyMySQL with which aiomysql 0.3.2 cannot bind bytes."""


def make_engine(
    source: Any, *, pgbouncer: bool = False, security: "BaseSecurity | None" = None
) -> tuple[AsyncEngine, bool]:
    """Return the engine, and True if the engine was created here and must be disposed of.

    `security` is used only with a URL; the caller's engine has its own.

    Raises:
        SetupError: `source` is neither an AsyncEngine nor a URL of a supported database, or
            `security` does not fit the URL.
        MissingExtraError: the URL's driver is not installed.
        NotSupportedError: `pgbouncer` is set and the database is not PostgreSQL, or the driver
            cannot use `security`.
    """
    engine = source if isinstance(source, AsyncEngine) else _create_engine(source, security)
    _check_driver_versions(engine)
    if pgbouncer:
        configure_for_pgbouncer(engine)
    return engine, engine is not source


def _create_engine(url: Any, security: "BaseSecurity | None") -> AsyncEngine:
    """Create an engine from a URL; each error names the fix, and none shows the password."""
    if isinstance(url, Engine):
        msg = (
            "the broker needs an AsyncEngine, got a synchronous Engine: create it with "
            "sqlalchemy.ext.asyncio.create_async_engine"
        )
        raise SetupError(msg)
    if not isinstance(url, str | URL):
        # Only the type is shown: the value may hold a password.
        raise SetupError(
            "engine must be an AsyncEngine or a database URL as text or URL, "
            f"got {type(url).__name__}"
        )
    try:
        parsed = make_url(url)
        _check_backend(parsed)
        if security is None:
            return create_async_engine(url)
        from faststream_sqlbroker.security import parse_security  # noqa: PLC0415

        login_url, arguments = parse_security(security, parsed)
        return create_async_engine(login_url, connect_args=arguments)
    except SqlBrokerError:
        raise
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(str(error.name), "")
        hint = f"pip install 'sqlbroker[{extra}]'" if extra else f"install {error.name}"
        msg = f"the driver {error.name!r} is not installed: {hint}"
        raise MissingExtraError(msg) from error
    except (ArgumentError, NoSuchModuleError) as error:
        # The text leaves out the URL, which may hold a password.
        msg = (
            "the database URL is not valid: use a URL like postgresql+asyncpg://user@host/name "
            f"({type(error).__name__})"
        )
        raise SetupError(msg) from error
    except InvalidRequestError as error:
        msg = (
            f"the database URL begins with {parsed.drivername}, whose driver is not asynchronous: "
            f"use {URL_PREFIXES}"
        )
        raise SetupError(msg) from error
    except Exception as error:  # noqa: BLE001 - a dialect may raise anything
        # The error may quote a part of the password, so it is neither shown nor chained.
        msg = (
            "cannot create an engine from the database URL: quote user and password with "
            f"urllib.parse.quote_plus, and write the port as a number ({type(error).__name__})"
        )
        raise SetupError(msg) from None


def _check_backend(url: URL) -> None:
    """Refuse unsupported databases before the driver is imported.

    An error that names the missing driver would make users install it in vain.
    """
    if url.get_backend_name() not in BACKENDS:
        raise SetupError(
            f"the database URL begins with {format_value(url.drivername)}, which the broker does "
            f"not support: use {URL_PREFIXES}"
        )


def make_listen_engine(url: Any, *, security: "BaseSecurity | None" = None) -> AsyncEngine | None:
    """Create an engine for LISTEN only; return None without a URL.

    PostgreSQL's LISTEN wakes up waiting subscribers. It needs a lasting connection, which PgBouncer
    in transaction mode does not provide, so `url` connects directly.

    Raises:
        SetupError: `url` is not a URL of PostgreSQL with asyncpg, or `security` does not fit it.
        MissingExtraError: asyncpg is not installed.
    """
    if url is None:
        return None
    if isinstance(url, AsyncEngine):
        raise SetupError("listen_url must be a database URL, got an engine")
    if not isinstance(url, str | URL):
        # Only the type is shown: the value may hold a password.
        raise SetupError(
            f"listen_url must be a database URL as text or URL, got {type(url).__name__}"
        )
    engine, _ = make_engine(url, security=security)
    if engine.dialect.driver != "asyncpg":
        got = f"{engine.dialect.name}+{engine.dialect.driver}"
        raise SetupError(f"listen_url must connect to PostgreSQL through asyncpg, got {got}")
    return engine


def configure_for_pgbouncer(engine: AsyncEngine) -> None:
    """Make new connections of the engine work through PgBouncer in transaction mode.

    In this mode each transaction may get another server connection, so a named prepared statement
    of an earlier transaction may not exist. Existing connections of the engine do not change.

    Raises:
        NotSupportedError: `engine` does not connect to PostgreSQL.
    """
    if engine.dialect.name != "postgresql":
        msg = f"pgbouncer=True is only for PostgreSQL, got {engine.dialect.name}: omit it"
        raise NotSupportedError(msg)
    options = _UNNAMED_STATEMENT_ARGS.get(engine.dialect.driver, {})

    @event.listens_for(engine.sync_engine, "do_connect")
    def connect(_dialect: Any, _record: Any, _args: Any, arguments: dict[str, Any]) -> None:
        arguments.update(options)


def evict_read_only_connections(engine: AsyncEngine | Engine) -> None:
    """Evict pooled connections of `engine` after an answer from a read-only server.

    After a failover a pool may lead to a server that takes no writes, such as a standby or a
    demoted primary. The statement that gets such an answer fails; the pool then replaces every
    connection opened before at its next checkout. Call this before the engine connects: only
    connections that are opened later are evicted. A broker does so for its own engine. SQLite
    has no such servers.

    Raises:
        SetupError: the database is not supported.
    """
    sync_engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
    dialect = create_dialect(sync_engine.dialect, build_tables(SqlBrokerSchemaConfig()))
    ReadOnlyEvictions.get_for(sync_engine, dialect.is_read_only)


_UNNAMED_STATEMENT_ARGS: dict[str, dict[str, Any]] = {
    "asyncpg": {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": lambda: "",
    },
    "psycopg": {"prepare_threshold": None},
}
"""Arguments of each driver's `connect` that prevent named prepared statements."""


def _check_driver_versions(engine: AsyncEngine) -> None:
    """Refuse versions of aiomysql and PyMySQL that do not work together.

    aiomysql 0.3.2 calls a function of PyMySQL that is a string since PyMySQL 1.2.

    Raises:
        SetupError: such versions are installed.
    """
    if engine.dialect.driver != "aiomysql":
        return
    import aiomysql  # noqa: PLC0415
    import pymysql  # noqa: PLC0415

    version = tuple(pymysql.VERSION[:2])
    if version >= PYMYSQL_LIMIT and aiomysql.__version__ <= "0.3.2":
        msg = (
            f"aiomysql {aiomysql.__version__} cannot bind bytes with PyMySQL "
            f"{pymysql.VERSION_STRING}: pip install 'pymysql<1.2'"
        )
        raise SetupError(msg)

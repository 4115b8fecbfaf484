"""The database's address: one SQLAlchemy URL, converted for JDBC and for Python."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from faststream_sqlbroker.exceptions import MissingExtraError, NotSupportedError, SetupError

DATABASE_KINDS = {
    "postgresql": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
DEFAULT_PORTS = {"postgresql": 5432, "mysql": 3306}
PYTHON_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}
CONNECT_TIMEOUT = 10
"""Seconds to wait for the server's answer, or for SQLite's lock; the URL may set another value."""

_SSL_MODES = {"true": "require", "1": "require", "false": "disable", "0": "disable"}
_POSTGRESQL_OPTIONS = (
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "application_name",
    "connect_timeout",
    "ssl",
)
_MYSQL_OPTIONS = ("ssl_ca", "connect_timeout", "charset")
_IGNORED_OPTIONS = {
    "prepared_statement_cache_size",
    "statement_cache_size",
    "prepared_statement_name_func",
    "async_fallback",
    "prepare_threshold",
    "command_timeout",
    "autocommit",
    "pool_recycle",
}
"""Options of the broker's own drivers that do not affect readers."""

_ALLOWED_OPTIONS = {
    "postgresql": _POSTGRESQL_OPTIONS,
    "mysql": _MYSQL_OPTIONS,
    "sqlite": ("timeout",),
}


@dataclass(frozen=True)
class Address:
    """One database, for JDBC and for Python; the password shows in no repr.

    Attributes:
        kind: "postgresql", "mysql" (MySQL and MariaDB) or "sqlite".
        jdbc_url: Without user and password.
        properties: Further properties for JDBC, such as user and password.
        python_url: For a synchronous SQLAlchemy engine; always with host and port.
    """

    kind: str
    jdbc_url: str
    properties: Mapping[str, str] = field(repr=False)
    python_url: URL

    @property
    def database(self) -> str:
        """Name of the database; for SQLite the path of the file."""
        name = str(self.python_url.database)
        return unquote(name.removeprefix("file:")) if self.kind == "sqlite" else name

    def create_engine(self) -> Engine:
        """Create a synchronous engine in autocommit that keeps no connection open.

        Raises:
            MissingExtraError: the driver is not installed.
        """
        arguments: dict[str, Any] = {}
        if self.kind != "sqlite" and "connect_timeout" not in self.python_url.query:
            arguments["connect_timeout"] = CONNECT_TIMEOUT
        try:
            return create_engine(
                self.python_url,
                poolclass=NullPool,
                isolation_level="AUTOCOMMIT",
                connect_args=arguments,
            )
        except ModuleNotFoundError as error:
            msg = f"the driver {error.name!r} is not installed: pip install 'sqlbroker[spark]'"
            raise MissingExtraError(msg) from error


def parse_address(url: str | URL) -> Address:
    """Parse a SQLAlchemy URL with any driver (asyncpg, aiomysql, …).

    Raises:
        SetupError: `url` is not a valid URL, one of its options is invalid or has no counterpart
            in JDBC, it names an in-memory SQLite database (which only its own process can see) or
            a Unix socket (which Java cannot use). The URL may hold a password, so the error
            repeats only the names of options.
        NotSupportedError: another database.
    """
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        msg = "the database URL is not valid: use a URL such as postgresql+asyncpg://user@host/name"
        raise SetupError(msg) from error
    kind = DATABASE_KINDS.get(backend)
    if kind is None:
        raise NotSupportedError(
            f"unsupported database {backend!r}: use one of {', '.join(DATABASE_KINDS)}"
        )
    _check_options(kind, parsed)
    if kind == "sqlite":
        return _build_sqlite(parsed)
    # For a missing host or port libpq would read its own environment variables; Java would not.
    parsed = parsed.set(host=parsed.host or "127.0.0.1", port=parsed.port or DEFAULT_PORTS[kind])
    options = {
        name: _get_text(value)
        for name, value in parsed.query.items()
        if name not in _IGNORED_OPTIONS
    }
    return (_build_postgresql if kind == "postgresql" else _build_mysql)(parsed, options)


def _check_options(kind: str, url: URL) -> None:
    """Refuse URL options that JDBC does not know, and Unix sockets, which Java cannot use.

    Options of the broker's own drivers that do not affect reading are ignored, so that one URL
    serves the broker and its readers.
    """
    socket = url.query.get("unix_socket") or url.query.get("host")
    if socket is not None:
        raise SetupError(
            "Java cannot connect through a Unix socket or ?host=: put host and port in the URL"
        )
    unknown = sorted(set(url.query) - set(_ALLOWED_OPTIONS[kind]) - _IGNORED_OPTIONS)
    if unknown:
        msg = (
            f"the URL option {unknown[0]!r} has no JDBC equivalent: remove it (allowed: "
            f"{', '.join(_ALLOWED_OPTIONS[kind])})"
        )
        raise SetupError(msg)


def _get_text(value: Any) -> str:
    """Return an option's value; of an option that the URL repeats, the last value."""
    return value if isinstance(value, str) else str(value[-1])


def _build_postgresql(url: URL, options: dict[str, str]) -> Address:
    """Convert the URL for pgjdbc and psycopg.

    asyncpg's option `ssl` becomes libpq's `sslmode`, unless the URL has both.
    """
    if "ssl" in options:
        mode = options.pop("ssl")
        options.setdefault("sslmode", _SSL_MODES.get(mode.lower(), mode))
    # Without -1 pgjdbc transfers a statement's first five runs as text, and Spark runs each
    # statement once.
    jdbc_options = {"prepareThreshold": "-1", "ApplicationName": "faststream_sqlbroker.spark"}
    names = {"connect_timeout": "connectTimeout", "application_name": "ApplicationName"}
    jdbc_options |= {names.get(name, name): value for name, value in options.items()}
    return Address(
        "postgresql",
        _build_jdbc_url(url, "postgresql", jdbc_options),
        _get_credentials(url),
        _build_python_url(url, options),
    )


def _build_mysql(url: URL, options: dict[str, str]) -> Address:
    """Convert the URL for MariaDB's Java driver, which serves MySQL too, and for PyMySQL.

    `options` are those of the URL's query; each driver has its own names and units for them.
    """
    options.pop("charset", None)  # always utf8mb4
    # MariaDB's driver under its own scheme makes Spark quote names as strings: filters then match
    # nothing.
    jdbc_options = {"permitMysqlScheme": "true", "tinyInt1isBit": "false"}
    if "ssl_ca" in options:
        jdbc_options |= {
            "useSSL": "true",
            "sslMode": "verify-ca",
            "serverSslCert": options["ssl_ca"],
        }
    if "connect_timeout" in options:
        jdbc_options["connectTimeout"] = str(
            _parse_connect_timeout(options["connect_timeout"]) * 1000
        )
    python_url = _build_python_url(url, options).update_query_dict({"charset": "utf8mb4"})
    return Address(
        "mysql", _build_jdbc_url(url, "mysql", jdbc_options), _get_credentials(url), python_url
    )


def _parse_connect_timeout(value: str) -> int:
    """Parse the option connect_timeout: whole seconds, at least 1, as PyMySQL needs."""
    if not re.fullmatch(r"[0-9]{1,6}", value) or int(value) == 0:
        raise SetupError(
            "the URL option connect_timeout must be whole seconds from 1 to 999999, such as "
            "connect_timeout=5"
        )
    return int(value)


def _build_sqlite(url: URL) -> Address:
    """Convert the path of a file; refuse databases that no other process can open."""
    database = url.database
    if not database or database == ":memory:" or database.startswith("file:"):
        raise SetupError(
            "Spark cannot read an in-memory or file: SQLite database: give the path of a file, "
            "such as sqlite:////data/shop.db"
        )
    path = Path(database).resolve()
    timeout = _parse_timeout(url)
    # 1 is SQLITE_OPEN_READONLY: a reader never blocks the writer.
    jdbc_options = {"open_mode": "1", "busy_timeout": str(round(timeout * 1000))}
    return Address("sqlite", f"jdbc:sqlite:{path}", jdbc_options, _build_file_url(path, timeout))


def _parse_timeout(url: URL) -> float:
    """Return the seconds that SQLite's drivers wait for a lock of the file.

    They are the option timeout of the URL, else `CONNECT_TIMEOUT`.
    """
    value = _get_text(url.query.get("timeout", str(CONNECT_TIMEOUT)))
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", value):
        raise SetupError(
            "the URL option timeout must be seconds from 0 to less than a million, such as "
            "timeout=2.5"
        )
    return float(value)


def _build_file_url(path: Path, timeout: float) -> URL:
    """Build the URL of a file: without mode=rw a wrong path would create an empty database."""
    query = {"mode": "rw", "uri": "true", "timeout": str(timeout)}
    return URL.create("sqlite+pysqlite", database=f"file:{quote(str(path))}", query=query)


def _get_credentials(url: URL) -> dict[str, str]:
    """Return user and password as JDBC properties, which keeps both out of the JDBC URL."""
    credentials = {
        "user": url.username,
        "password": None if url.password is None else str(url.password),
    }
    return {name: value for name, value in credentials.items() if value is not None}


def _build_jdbc_url(url: URL, kind: str, options: dict[str, str]) -> str:
    """Build the URL with the driver's options.

    As separate properties Spark would turn their names into lower case, which drivers ignore.
    """
    host = str(url.host)
    if not url.database:
        raise SetupError("the URL has no database name: add /name after the host")
    server = f"{f'[{host}]' if ':' in host else host}:{url.port}"
    name = (
        quote(url.database, safe="") if kind == "postgresql" else _validate_mysql_name(url.database)
    )
    return f"jdbc:{kind}://{server}/{name}?{urlencode(options)}"


def _validate_mysql_name(name: str) -> str:
    """Return the name unquoted, because MariaDB's Java driver decodes no %-escapes.

    Separators are refused: they would end the name, and the rest could set options of the driver.
    """
    if re.search("[?/#&]", name):
        raise SetupError(
            "the name of a MySQL or MariaDB database must not contain ?, /, # or &, which Java "
            "would misread in its URL: use a database with another name"
        )
    return name


def _build_python_url(url: URL, options: dict[str, str]) -> URL:
    """Return the URL with the synchronous driver of the readers.

    The user's URL may name one of the broker's asynchronous drivers, such as asyncpg.
    """
    kind = DATABASE_KINDS[url.get_backend_name()]
    return url.set(drivername=f"{kind}+{PYTHON_DRIVERS[kind]}", query=options)

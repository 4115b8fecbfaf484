"""The database's address: one SQLAlchemy URL, turned into one for JDBC and one for Python."""

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

KINDS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}
PORTS = {"postgresql": 5432, "mysql": 3306}
PYTHON_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}
CONNECT_TIMEOUT = 10
"""Seconds to wait for the server's answer, or for SQLite's lock; the URL may set another value."""

_SSL_MODES = {"true": "require", "1": "require", "false": "disable", "0": "disable"}
_POSTGRESQL = (
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "application_name",
    "connect_timeout",
    "ssl",
)
_MYSQL = ("ssl_ca", "connect_timeout", "charset")
_IGNORED = {
    "prepared_statement_cache_size",
    "statement_cache_size",
    "prepared_statement_name_func",
    "async_fallback",
    "prepare_threshold",
    "command_timeout",
    "autocommit",
    "pool_recycle",
}
"""Options of the broker's own drivers that do not affect what is read."""

_ALLOWED = {"postgresql": _POSTGRESQL, "mysql": _MYSQL, "sqlite": ("timeout",)}


@dataclass(frozen=True)
class Address:
    """One database, as JDBC and as Python reach it; the password shows in no repr.

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
        """Its name; of SQLite the path of its file."""
        name = str(self.python_url.database)
        return unquote(name.removeprefix("file:")) if self.kind == "sqlite" else name

    def engine(self) -> Engine:
        """A synchronous engine in autocommit that keeps no connection open.

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
    """Parse a SQLAlchemy URL; its driver (asyncpg, aiomysql, …) does not matter.

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
        msg = "the database URL cannot be read: give one like postgresql+asyncpg://user@host/name"
        raise SetupError(msg) from error
    kind = KINDS.get(backend)
    if kind is None:
        raise NotSupportedError(f"{backend!r} is not supported: {', '.join(KINDS)} are")
    _refuse_options(kind, parsed)
    if kind == "sqlite":
        return _sqlite(parsed)
    # For a missing host or port libpq would read its own environment variables; Java would not.
    parsed = parsed.set(host=parsed.host or "127.0.0.1", port=parsed.port or PORTS[kind])
    options = {name: _text(value) for name, value in parsed.query.items() if name not in _IGNORED}
    return (_postgresql if kind == "postgresql" else _mysql)(parsed, options)


def _refuse_options(kind: str, url: URL) -> None:
    socket = url.query.get("unix_socket") or url.query.get("host")
    if socket is not None:
        raise SetupError(
            "Java cannot connect by a Unix socket or by ?host=: give host and port in the URL"
        )
    unknown = sorted(set(url.query) - set(_ALLOWED[kind]) - _IGNORED)
    if unknown:
        msg = (
            f"the URL's option {unknown[0]!r} has no counterpart in JDBC: leave it out; allowed "
            f"are {', '.join(_ALLOWED[kind])}"
        )
        raise SetupError(msg)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value[-1])


def _postgresql(url: URL, options: dict[str, str]) -> Address:
    if "ssl" in options:
        mode = options.pop("ssl")
        options.setdefault("sslmode", _SSL_MODES.get(mode.lower(), mode))
    # Without -1 pgjdbc transfers a statement's first five runs as text, and Spark runs each once.
    java = {"prepareThreshold": "-1", "ApplicationName": "faststream_sqlbroker.spark"}
    names = {"connect_timeout": "connectTimeout", "application_name": "ApplicationName"}
    java |= {names.get(name, name): value for name, value in options.items()}
    return Address(
        "postgresql", _jdbc_url(url, "postgresql", java), _credentials(url), _python(url, options)
    )


def _mysql(url: URL, options: dict[str, str]) -> Address:
    options.pop("charset", None)  # always utf8mb4
    # MariaDB's driver under its own scheme makes Spark quote names as strings: filters then match
    # nothing.
    java = {"permitMysqlScheme": "true", "tinyInt1isBit": "false"}
    if "ssl_ca" in options:
        java |= {"useSSL": "true", "sslMode": "verify-ca", "serverSslCert": options["ssl_ca"]}
    if "connect_timeout" in options:
        java["connectTimeout"] = str(_connect_timeout(options["connect_timeout"]) * 1000)
    python = _python(url, options).update_query_dict({"charset": "utf8mb4"})
    return Address("mysql", _jdbc_url(url, "mysql", java), _credentials(url), python)


def _connect_timeout(given: str) -> int:
    """Whole seconds: Python's driver takes no fractions, and no 0."""
    if not re.fullmatch(r"[0-9]{1,6}", given) or int(given) == 0:
        raise SetupError(
            "the URL's option connect_timeout must be whole seconds, at least 1 and less than a "
            "million, such as connect_timeout=5"
        )
    return int(given)


def _sqlite(url: URL) -> Address:
    database = url.database
    if not database or database == ":memory:" or database.startswith("file:"):
        raise SetupError(
            "an in-memory or file: SQLite database cannot be read by Spark: give the path of a "
            "file, like sqlite:////data/shop.db"
        )
    path = Path(database).resolve()
    timeout = _timeout(url)
    # 1 is SQLITE_OPEN_READONLY: a reader never holds up the writer.
    java = {"open_mode": "1", "busy_timeout": str(round(timeout * 1000))}
    return Address("sqlite", f"jdbc:sqlite:{path}", java, _existing_file(path, timeout))


def _timeout(url: URL) -> float:
    """Seconds for which a lock of the file is waited for."""
    given = _text(url.query.get("timeout", str(CONNECT_TIMEOUT)))
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", given):
        raise SetupError(
            "the URL's option timeout must be seconds, at least 0 and less than a million, such as "
            "timeout=2.5"
        )
    return float(given)


def _existing_file(path: Path, timeout: float) -> URL:
    """Without mode=rw a wrong path would make an empty database there."""
    query = {"mode": "rw", "uri": "true", "timeout": str(timeout)}
    return URL.create("sqlite+pysqlite", database=f"file:{quote(str(path))}", query=query)


def _credentials(url: URL) -> dict[str, str]:
    found = {"user": url.username, "password": None if url.password is None else str(url.password)}
    return {name: value for name, value in found.items() if value is not None}


def _jdbc_url(url: URL, kind: str, options: dict[str, str]) -> str:
    """With the driver's options: Spark turns the names of properties into lower case, which drivers
    ignore.
    """
    host = str(url.host)
    if not url.database:
        raise SetupError("the URL names no database: add /name after the host")
    place = f"{f'[{host}]' if ':' in host else host}:{url.port}"
    name = quote(url.database, safe="") if kind == "postgresql" else _mysql_name(url.database)
    return f"jdbc:{kind}://{place}/{name}?{urlencode(options)}"


def _mysql_name(name: str) -> str:
    """As it is, which MariaDB's driver does not decode; nothing in it may begin options of JDBC."""
    if re.search("[?/#&]", name):
        raise SetupError(
            "the name of a MySQL or MariaDB database may hold no ?, /, # or & here, as it would "
            "change the URL for Java: give a database with another name"
        )
    return name


def _python(url: URL, options: dict[str, str]) -> URL:
    kind = KINDS[url.get_backend_name()]
    return url.set(drivername=f"{kind}+{PYTHON_DRIVERS[kind]}", query=options)

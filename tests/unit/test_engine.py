"""Engines a broker can and cannot work with, before anything is connected."""

import traceback
from types import SimpleNamespace
from typing import Any

import aiomysql
import pymysql
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool, StaticPool

from faststream_sqlbroker import MissingExtraError, SetupError, SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.broker import engine_factory as engines
from faststream_sqlbroker.database import pool
from faststream_sqlbroker.database.dialects import create_dialect
from faststream_sqlbroker.database.mysql.dialect import NO_LIMIT
from faststream_sqlbroker.schema.tables import build_tables

TABLES = build_tables(SqlBrokerSchemaConfig())
PLACE = "user:secret@127.0.0.1/name"


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_url: Any) -> Any:
        raise ModuleNotFoundError("No module named 'asyncpg'", name="asyncpg")

    monkeypatch.setattr(engines, "create_async_engine", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'sqlbroker\[postgresql\]'"):
        engines.make_engine(f"postgresql+asyncpg://{PLACE}")

    def unknown(_url: Any) -> Any:
        raise ModuleNotFoundError("No module named 'oddsql'", name="oddsql")

    monkeypatch.setattr(engines, "create_async_engine", unknown)
    with pytest.raises(MissingExtraError, match="install oddsql"):
        engines.make_engine("mysql+oddsql://")


@pytest.mark.parametrize(
    "url", [f"nonsense+x://{PLACE}", "no url", f"postgresql+psycopg2://{PLACE}"]
)
def test_a_wrong_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises((SetupError, MissingExtraError)) as info:
        SqlBroker(url)
    assert "secret" not in str(info.value)


@pytest.mark.parametrize(
    ("url", "begin"),
    [
        (f"mssql+pyodbc://{PLACE}", "'mssql+pyodbc', which the broker does not support"),
        ("sqlite:///shop.db", "sqlite, whose driver is not asynchronous"),
        (f"mysql+pymysql://{PLACE}", "mysql+pymysql, whose driver is not asynchronous"),
    ],
)
def test_a_wrong_beginning_of_a_url_is_told_with_the_right_ones(url: str, begin: str) -> None:
    with pytest.raises(SetupError) as info:
        SqlBroker(url)
    told = str(info.value)
    assert told.startswith(f"the database URL begins with {begin}: use postgresql+asyncpg")
    assert "sqlite+aiosqlite" in told
    assert "secret" not in told


def test_pymysql_that_cannot_bind_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pymysql, "VERSION", (1, 2, 0, "final"))
    monkeypatch.setattr(pymysql, "VERSION_STRING", "1.2.0")
    monkeypatch.setattr(aiomysql, "__version__", "0.3.2")
    with pytest.raises(SetupError, match=r"pip install 'pymysql<1.2'"):
        SqlBroker(create_async_engine(f"mysql+aiomysql://{PLACE}"))
    monkeypatch.setattr(aiomysql, "__version__", "0.4.0")
    SqlBroker(create_async_engine(f"mysql+aiomysql://{PLACE}"))


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite://",
        "sqlite+aiosqlite:///:memory:",
        "sqlite+aiosqlite:///file:x?mode=memory&uri=true",
    ],
)
def test_sqlite_in_memory_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="use a file"):
        SqlBroker(create_async_engine(url, poolclass=NullPool))


def test_another_database_is_refused() -> None:
    dialect = SimpleNamespace(name="oracle")
    with pytest.raises(
        SetupError, match="does not support 'oracle'; use one of postgresql, mysql, mariadb, sqlite"
    ):
        create_dialect(dialect, TABLES)


@pytest.mark.parametrize(
    "scheme",
    [
        "mysql+aiomysql",
        "mariadb+aiomysql",
        "mysql+asyncmy",
        "postgresql+asyncpg",
        "postgresql+psycopg",
    ],
)
def test_every_spelling_of_a_url_is_accepted(scheme: str) -> None:
    broker = SqlBroker(f"{scheme}://{PLACE}")
    assert broker.specification.protocol == scheme.partition("+")[0]
    assert broker.specification.url == [f"{scheme}://127.0.0.1/name"]


def test_the_pool_is_compared_with_what_may_be_used() -> None:
    small = create_async_engine("sqlite+aiosqlite:///x.db", pool_size=1, max_overflow=0)
    text = pool.get_shortage(small, 1, listening=True)
    assert text is not None
    assert "at most 1 connections" in text
    assert "may use 3" in text
    assert "one for LISTEN" in text
    enough = create_async_engine("sqlite+aiosqlite:///x.db", pool_size=2, max_overflow=1)
    assert pool.get_shortage(enough, 1, listening=True) is None
    unlimited = create_async_engine("sqlite+aiosqlite:///x.db", poolclass=NullPool)
    assert pool.get_shortage(unlimited, 50, listening=True) is None
    assert pool.get_size(unlimited) == pool.DEFAULT_SIZE


class Answers:
    """A connection that gives fixed answers."""

    dialect = SimpleNamespace(is_mariadb=True)

    def __init__(self, *row: Any) -> None:
        self.row = row
        self.connection = SimpleNamespace(driver_connection=None)
        self.info: dict[str, Any] = {}

    def execute(self, *_: Any) -> Any:
        return SimpleNamespace(one=lambda: self.row, scalar_one=lambda: self.row[0])

    exec_driver_sql = execute


@pytest.mark.parametrize(
    ("log_bin", "binlog_format", "fine"),
    [(1, "STATEMENT", False), (1, "MIXED", True), (0, "STATEMENT", True)],
)
def test_a_binary_log_of_statements_is_refused(
    log_bin: int, binlog_format: str, fine: bool
) -> None:
    dialect = create_dialect(create_engine(f"mariadb+pymysql://{PLACE}").dialect, TABLES)
    connection: Any = Answers(log_bin, binlog_format, NO_LIMIT, 0)
    if fine:
        dialect.setup(connection)
    else:
        with pytest.raises(SetupError, match="set binlog_format=ROW"):
            dialect.setup(connection)


def test_an_old_sqlite_is_refused() -> None:
    dialect = create_dialect(create_engine("sqlite://").dialect, TABLES)
    old: Any = Answers("3.34.1")
    with pytest.raises(SetupError, match=r"3\.34\.1 is too old"):
        dialect.setup(old)
    new: Any = Answers("3.35.0")
    dialect.setup(new)


@pytest.mark.parametrize("url", ["sqlite+aiosqlite:///shared.db", f"postgresql+asyncpg://{PLACE}"])
def test_one_connection_for_everybody_is_refused(url: str) -> None:
    with pytest.raises(
        SetupError, match=r"StaticPool has one connection for all tasks.* without poolclass"
    ):
        SqlBroker(create_async_engine(url, poolclass=StaticPool))


@pytest.mark.parametrize(
    "given",
    [
        f"postgresql+asyncpg://{PLACE}".encode(),
        bytearray(f"postgresql+asyncpg://{PLACE}".encode()),
        [f"postgresql+asyncpg://{PLACE}"],
        SimpleNamespace(url=f"postgresql+asyncpg://{PLACE}"),
        "postgresql+asyncpg://user@127.0.0.1:secret/name",
    ],
    ids=["bytes", "bytearray", "list", "object", "port"],
)
@pytest.mark.parametrize("option", ["engine", "listen_url"])
def test_no_error_shows_a_password(given: Any, option: str) -> None:
    options: Any = {"engine": f"postgresql+asyncpg://{PLACE}"} | {option: given}
    with pytest.raises(SetupError) as info:
        SqlBroker(**options)
    assert "secret" not in "".join(traceback.format_exception(info.value))

"""One SQLAlchemy URL for JDBC and for Python: nothing is lost on the way, and no password shows."""

from pathlib import Path

import pytest
from sqlalchemy import make_url

from faststream_sqlbroker import NotSupportedError, SetupError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.load.columns import Field
from pyspark_sqlbroker.load.rows import read_batches
from pyspark_sqlbroker.load.selection import ARCHIVE, MESSAGES, select_rows

SECRET = "p@ss:w/rd?&=%ö"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql+asyncpg://u@db/shop", "jdbc:postgresql://db:5432/shop?"),
        ("postgresql://u@db:6543/shop", "jdbc:postgresql://db:6543/shop?"),
        ("postgresql+psycopg://u@[::1]:6543/sh%20op", "jdbc:postgresql://[::1]:6543/sh%20op?"),
        ("mysql+aiomysql://u@db/shop", "jdbc:mysql://db:3306/shop?"),
        ("mariadb+asyncmy://u@db:33/shop", "jdbc:mysql://db:33/shop?"),
        ("mysql://u@db/my%20sh%C3%B6p%25x", "jdbc:mysql://db:3306/my shöp%x?"),
        ("sqlite+aiosqlite:////data/shop.db", "jdbc:sqlite:/data/shop.db"),
    ],
)
def test_hosts_ports_and_names(url: str, expected: str) -> None:
    assert parse_address(url).jdbc_url.startswith(expected)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql:///shop", "127.0.0.1:5432"),
        ("mysql:///shop", "127.0.0.1:3306"),
        ("mysql://db:9/shop", "db:9"),
    ],
)
def test_java_and_python_go_to_the_same_server(
    url: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever libpq's environment says: the horizon would be of another server than the rows."""
    monkeypatch.setenv("PGHOST", "elsewhere")
    monkeypatch.setenv("PGPORT", "1")
    address = parse_address(url)
    engine = address.create_engine()
    _, given = engine.dialect.create_connect_args(engine.url)
    assert f"{given['host']}:{given['port']}" == place
    assert f"//{place}/shop?" in address.jdbc_url


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql+asyncpg://u@db/shop", "shop"),
        ("sqlite:////data/the shop.db", "/data/the shop.db"),
    ],
)
def test_the_databases_name(url: str, name: str) -> None:
    assert parse_address(url).database == name


def test_the_options_that_drivers_need_are_in_the_url() -> None:
    """As properties it would arrive in lower case, which they ignore."""
    postgresql = parse_address(
        "postgresql+asyncpg://u@db/shop?ssl=require&application_name=x&connect_timeout=3"
    )
    for part in ("prepareThreshold=-1", "sslmode=require", "ApplicationName=x", "connectTimeout=3"):
        assert part in postgresql.jdbc_url
    assert postgresql.python_url.query == {
        "sslmode": "require",
        "application_name": "x",
        "connect_timeout": "3",
    }
    mysql = parse_address(
        "mysql+aiomysql://u@db/shop?charset=latin1&ssl_ca=/ca.pem&connect_timeout=2"
    )
    for part in (
        "permitMysqlScheme=true",
        "sslMode=verify-ca",
        "serverSslCert=%2Fca.pem",
        "connectTimeout=2000",
    ):
        assert part in mysql.jdbc_url
    assert mysql.python_url.query["charset"] == "utf8mb4"
    own = parse_address("postgresql+asyncpg://u@db/shop?prepared_statement_cache_size=0")
    assert (own.python_url.query, "cache" in own.jdbc_url) == ({}, False)
    assert parse_address("postgresql://u@db/shop?ssl=true").python_url.query["sslmode"] == "require"


def test_the_password_is_where_it_belongs_and_nowhere_else() -> None:
    for backend in ("postgresql+asyncpg", "mysql+aiomysql"):
        url = make_url(f"{backend}://ada@db/shop").set(password=SECRET)
        for given in (url, url.render_as_string(hide_password=False)):
            address = parse_address(given)
            assert dict(address.properties) == {"user": "ada", "password": SECRET}
            assert address.python_url.password == SECRET
            for shown in (
                repr(address),
                str(address),
                address.jdbc_url,
                repr(address.create_engine()),
            ):
                assert SECRET not in shown
                assert "w%2Frd" not in shown


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("not a url with hunter2", SetupError, "the database URL is not valid"),
        ("oracle://u:hunter2@db/x", NotSupportedError, "postgresql, mysql, mariadb, sqlite"),
        ("postgresql://u:hunter2@db", SetupError, "has no database name"),
        ("postgresql://u:hunter2@/shop?host=/run/postgresql", SetupError, "Unix socket"),
        ("mysql://u:hunter2@/shop?unix_socket=/run/mysqld.sock", SetupError, "Unix socket"),
        (
            "postgresql://u:hunter2@db/x?target_session_attrs=any",
            SetupError,
            "target_session_attrs",
        ),
        ("sqlite://", SetupError, "in-memory"),
        (
            "mysql://u:hunter2@db/x%3FallowLocalInfile=true",
            SetupError,
            r"must not contain \?, /, # or &",
        ),
        ("mysql://u:hunter2@db/x%26y", SetupError, "must not contain"),
        ("mysql://u:hunter2@db/x/y", SetupError, "must not contain"),
        ("mysql://u:hunter2@db/x%23y", SetupError, "must not contain"),
        (
            "mysql://u:hunter2@db/x?connect_timeout=abc",
            SetupError,
            "connect_timeout must be whole seconds",
        ),
        (
            "mysql://u:hunter2@db/x?connect_timeout=2.5",
            SetupError,
            "connect_timeout must be whole seconds",
        ),
        (
            "mysql://u:hunter2@db/x?connect_timeout=0",
            SetupError,
            "connect_timeout must be whole seconds",
        ),
        ("sqlite:////data/shop.db?timeout=hunter2", SetupError, "timeout must be seconds"),
        ("sqlite:////data/shop.db?timeout=-1", SetupError, "timeout must be seconds"),
        ("sqlite:///:memory:", SetupError, "in-memory"),
        ("sqlite:///file:x?mode=memory&uri=true", SetupError, "allowed: |in-memory"),
    ],
)
def test_addresses_that_java_cannot_reach_are_refused(
    url: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        parse_address(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "milliseconds"), [("", 10_000), ("?timeout=2.5", 2500), ("?timeout=0", 0)]
)
def test_how_long_a_lock_of_sqlite_is_waited_for(
    tmp_path: Path, option: str, milliseconds: int
) -> None:
    """By the engine, which also writes, by the reader without jars, and by Java."""
    path = tmp_path / "shop.db"
    path.touch()
    address = parse_address(f"sqlite+aiosqlite:///{path}{option}")
    with address.create_engine().connect() as connection:
        get_database(address).begin(connection)
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == milliseconds
    asked = Field("timeout", "bigint", True, "milliseconds")
    [batch] = read_batches(address, "SELECT timeout FROM pragma_busy_timeout", [asked], 1)
    assert batch.to_pylist() == [{"timeout": milliseconds}]
    assert address.properties["busy_timeout"] == str(milliseconds)


def test_a_wrong_path_makes_no_database(tmp_path) -> None:
    path = tmp_path / "missing ?#%.db"
    engine = parse_address(make_url("sqlite:///").set(database=str(path))).create_engine()
    with pytest.raises(Exception, match="unable to open"):
        engine.connect()
    assert not path.exists()
    path.touch()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"since": "yesterday"}, "ISO 8601"),
        ({"since": "2026-03-01T12:00:00"}, "no time zone"),
        ({"since": 5}, "must be a datetime"),
        ({"since": "2026-03-02", "until": "2026-03-01"}, "before since"),
        ({"states": ["pending"]}, "COMPLETED, FAILED, DISCARDED"),
        ({"queues": [5]}, "queues must contain only strings, got 5"),
        ({"table": 'x"; DROP TABLE y'}, "letter or underscore"),
        ({"schema": "a.b"}, "letter or underscore"),
    ],
)
def test_rows_that_cannot_be_chosen(options: dict, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        select_rows(ARCHIVE, **options)
    if "states" not in options:
        with pytest.raises(SetupError, match=words):
            select_rows(MESSAGES, **options)

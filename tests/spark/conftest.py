"""One Spark session for all tests, in a time zone that shows every mistake; a database with tables
each."""

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Connection, Engine, create_engine, func, make_url, select, text

from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_ddl
from pyspark_sqlbroker import build_session
from pyspark_sqlbroker.moments import MIN_TIME
from tests.conftest import Servers
from tests.quick_tables import built
from tests.spark.java import DRIVERS, need_spark
from tests.spark.lookups import remembered

NUMBERS = itertools.count()
NEW_YORK = "America/New_York"
START = datetime(2026, 3, 1, tzinfo=timezone.utc)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """With a MariaDB of our own: its horizon waits for statements in all databases, those of other
    tests too."""
    servers = Servers(own=("mariadb",))
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """`local[2]`; skip without Java or drivers that cannot be installed, fail in CI."""
    need_spark(*DRIVERS)
    folder = tmp_path_factory.mktemp("spark")
    config = {
        "spark.ui.showConsoleProgress": "false",
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.driver.extraJavaOptions": f"-Duser.timezone={NEW_YORK} -Dderby.system.home={folder}",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.memory": "1g",
        "spark.python.daemon.module": "tests.spark.daemon",
    }
    with remembered():
        session = build_session("tests", databases=DRIVERS, master="local[2]", config=config)
        yield session
        session.stop()


class Archive:
    """A database with the broker's tables, filled by tests with plain SQL."""

    def __init__(self, url: str, config: SqlBrokerSchemaConfig | None = None) -> None:
        self.url = url
        # The process that holds SQLite's lock may stand still.
        waits = {"timeout": 60} if make_url(url).get_backend_name() == "sqlite" else {}
        self.engine: Engine = create_engine(_synchronous(url), connect_args=waits)
        self.kind = (
            "postgresql" if self.engine.dialect.name == "postgresql" else self.engine.dialect.name
        )
        tables = built(config or SqlBrokerSchemaConfig(), self.engine.dialect.name)
        self.archive = tables.archive
        self.message = tables.message
        with self.engine.begin() as connection:
            for statement in build_ddl(tables, self.engine.dialect.name):
                connection.execute(statement)

    def add(self, *rows: Mapping[str, Any], connection: Connection | None = None) -> None:
        """Insert archived rows; what is not given has a value."""
        complete = [archived(**row) for row in rows]
        if connection is not None:
            connection.execute(self.archive.insert(), complete)
            return
        with self.engine.begin() as own:
            own.execute(self.archive.insert(), complete)

    def add_many(
        self, count: int, *, first: int = 1, step: timedelta = timedelta(seconds=1)
    ) -> None:
        """`count` rows, `step` apart, over three queues."""
        self.add(
            *(
                {"id": first + n, "queue": f"queue {n % 3}", "archived_at": START + step * n}
                for n in range(count)
            )
        )

    def add_days(self, days: int) -> None:
        """Five rows a day: ids 1 to 5, 11 to 15, …"""
        self.add(
            *(
                {"id": day * 10 + n, "archived_at": START + timedelta(days=day, hours=n)}
                for day in range(days)
                for n in range(1, 6)
            )
        )

    def ids(self) -> list[int]:
        """Those that the archive still has."""
        with self.engine.connect() as connection:
            found = select(self.archive.c.id).order_by(self.archive.c.id)
            return list(connection.execute(found).scalars())

    def count(self) -> int:
        """Rows of the archive."""
        with self.engine.connect() as connection:
            return int(
                connection.execute(select(func.count()).select_from(self.archive)).scalar_one()
            )

    def execute(self, statement: str, **values: Any) -> Any:
        """Run SQL in a transaction of its own."""
        with self.engine.begin() as connection:
            return connection.execute(text(statement), values)

    def analyze(self) -> None:
        """Let the database look at its rows."""
        if self.engine.dialect.name == "postgresql":
            self.execute("ANALYZE")
        elif self.engine.dialect.name != "sqlite":
            self.execute("ANALYZE TABLE message_archive, message")


def archived(**given: Any) -> dict[str, Any]:
    """A row of the archive, completed a second after it was published."""
    at = max(given.get("archived_at", START), MIN_TIME + timedelta(seconds=1))
    row: dict[str, Any] = {
        "queue": "orders",
        "priority": 0,
        "key": None,
        "dedup_id": None,
        "headers": {"content-type": "application/json"},
        "payload": b'{"user": 1, "amount": 9.5}',
        "state": "COMPLETED",
        "attempts_count": 1,
        "deliveries_count": 1,
        "publish_count": 1,
        "origin_id": None,
        "created_at": at - timedelta(seconds=1),
        "next_attempt_at": at - timedelta(seconds=1),
        "expires_at": None,
        "first_attempt_at": at - timedelta(milliseconds=500),
        "last_attempt_at": at - timedelta(milliseconds=500),
        "acquired_at": at - timedelta(milliseconds=600),
        "last_error": None,
        "archived_at": at,
        "reason": None,
    }
    return row | given


def _synchronous(url: str) -> str:
    parsed = make_url(url)
    driver = {"postgresql": "psycopg", "sqlite": "pysqlite"}.get(
        parsed.get_backend_name(), "pymysql"
    )
    return parsed.set(drivername=f"{parsed.get_backend_name()}+{driver}").render_as_string(
        hide_password=False
    )


@pytest.fixture
def database_url(database: str, database_url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SQLite's file has the same path in all tests, see `kept_lakes`."""
    if database != "sqlite":
        return database_url
    folder = tmp_path_factory.getbasetemp() / "sqlite"
    # What a test has left open keeps its own file.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return f"sqlite+aiosqlite:///{folder / 'test.db'}"


@pytest.fixture
def archive(database_url: str) -> Iterator[Archive]:
    """An empty archive on the database of the test."""
    archive = Archive(database_url)
    yield archive
    archive.engine.dispose()


@pytest.fixture
def new_database(servers: Servers, tmp_path: Path) -> Iterator[Any]:
    """A function that makes an empty archive on "postgresql", "mariadb" or "sqlite"."""
    made: list[tuple[Archive, str | None]] = []

    def make(kind: str, config: SqlBrokerSchemaConfig | None = None) -> Archive:
        number = next(NUMBERS)
        if kind == "sqlite":
            made.append((Archive(f"sqlite:///{tmp_path / f'{number}.db'}", config), None))
            return made[-1][0]
        admin = servers.admin(kind)
        name = f"sqlbroker_spark_{os.getpid()}_{number}"
        with admin.connect() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name}"))
            connection.execute(text(f"CREATE DATABASE {name}"))
        url = admin.url.set(database=name).render_as_string(hide_password=False)
        made.append((Archive(url, config), name))
        return made[-1][0]

    yield make
    for archive, name in made:
        kind = "postgresql" if archive.engine.dialect.name == "postgresql" else "mariadb"
        archive.engine.dispose()
        if name is not None:
            force = " WITH (FORCE)" if kind == "postgresql" else ""
            with servers.admin(kind).connect() as connection:
                connection.execute(text(f"DROP DATABASE IF EXISTS {name}{force}"))


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def database(request: pytest.FixtureRequest) -> str:
    """Readers are tested on these."""
    kind: str = request.param
    return kind

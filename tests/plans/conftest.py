"""A message table with crowds that no hot statement may walk through."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from faststream_sqlbroker.database.dialects import create_dialect
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.migrate import create_all
from faststream_sqlbroker.schema.tables import build_tables
from tests.conftest import Servers
from tests.helpers import mysql_numbers
from tests.kept_tables import EMPTIED

FOREIGN = 100_000
FUTURE = 100_000
DUE = 300
FEWER = 10
"""MySQL and MariaDB get a part of the crowds: they take ten seconds for all, and a walk shows as
clearly."""
TABLES = build_tables(SqlBrokerSchemaConfig())
SYNC_DRIVERS = {
    "postgresql": "postgresql+psycopg",
    "mariadb": "mariadb+pymysql",
    "mysql": "mysql+pymysql",
}
T = TypeVar("T")
Fill = Callable[[Engine], None]


class DatabaseOf:
    """In place of a `Database`: what a subject does runs on one connection, in its transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.dialect = create_dialect(connection.dialect, TABLES)
        self.tables = TABLES

    async def run(self, work: Callable[[Connection], T], *_: Any, **_options: Any) -> T:
        """Run `work`, and commit nothing."""
        return work(self._connection)


def crowd(dialect: str) -> list[str]:
    """INSERTs: other queues' due rows, our queue's future ones, and the few that are due."""

    def numbers(count: int) -> str:
        of = (
            f"generate_series(1, {count}) AS s(n)"
            if dialect == "postgresql"
            else f"{mysql_numbers(count)} s"
        )
        return f"FROM {of}"

    if dialect == "postgresql":
        future = "statement_timestamp() + s.n * interval '1 second' + interval '1 hour'"
    else:
        future = "UTC_TIMESTAMP(6) + INTERVAL s.n + 3600 SECOND"
    foreign, future_ones = (n if dialect == "postgresql" else n // FEWER for n in (FOREIGN, FUTURE))
    text_of = "CONCAT('other', MOD(s.n, 100))"
    insert = "INSERT INTO message (queue, payload, priority"
    return [
        f"{insert}) SELECT {text_of}, 'x', MOD(s.n, 3) {numbers(foreign)}",
        f"{insert}, next_attempt_at) SELECT 'q', 'x', MOD(s.n, 3), {future} {numbers(future_ones)}",
        f"{insert}) SELECT 'q', 'x', MOD(s.n, 3) {numbers(DUE)}",
    ]


class Crowds:
    """Full databases, each filled once for a module: to fill one takes seconds.

    On PostgreSQL each test has a copy. MySQL and MariaDB cannot copy a database: there tests share
    it until one has changed it.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._held: dict[tuple[str, str], object] = {}
        """What each database holds."""

    @contextmanager
    def of(self, kind: str, *fills: Fill) -> Iterator[Engine]:
        """An engine on a database that `fills` have filled one after the other."""
        name = self._filled(kind, fills)
        if kind == "postgresql":
            copy = f"{name}_copy"
            self._create(kind, copy, template=name)
            with self._engine(kind, copy) as engine:
                yield engine
            self._drop(kind, copy)
            return
        with self._engine(kind, name) as engine:
            yield engine
            if _checksums(engine) != self._held[kind, name]:
                del self._held[kind, name]

    def _filled(self, kind: str, fills: tuple[Fill, ...]) -> str:
        name = f"sqlbroker_test_{kind}_{os.getpid()}_{fills[-1].__name__}"
        if (kind, name) in self._held:
            return name
        missing = fills
        if kind == "postgresql" and len(fills) > 1:
            self._create(kind, name, template=self._filled(kind, fills[:-1]))
            missing = fills[-1:]
        else:
            self._create(kind, name)
        with self._engine(kind, name) as engine:
            for fill in missing:
                fill(engine)
            self._held[kind, name] = None if kind == "postgresql" else _checksums(engine)
        return name

    @contextmanager
    def _engine(self, kind: str, name: str) -> Iterator[Engine]:
        url = self._servers.admin(kind).url
        engine = create_engine(url.set(drivername=SYNC_DRIVERS[kind], database=name))
        yield engine
        engine.dispose()

    def _create(self, kind: str, name: str, template: str | None = None) -> None:
        self._drop(kind, name)
        of = f" TEMPLATE {template}" if template else ""
        with self._servers.admin(kind).connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}{of}"))

    def _drop(self, kind: str, name: str) -> None:
        force = " WITH (FORCE)" if kind == "postgresql" else ""
        with self._servers.admin(kind).connect() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name}{force}"))

    def close(self) -> None:
        """Drop them."""
        for kind, name in self._held:
            self._drop(kind, name)


def _checksums(engine: Engine) -> object:
    with engine.connect() as connection:
        return connection.execute(text(f"CHECKSUM TABLE {', '.join(EMPTIED)}")).all()


def fill_crowd(engine: Engine) -> None:
    """Statistics are fresh, nothing is PROCESSING."""
    with engine.begin() as connection:
        create_all(connection, TABLES)
        for statement in crowd(engine.dialect.name):
            connection.execute(text(statement))
    analyze(engine, "message")


def analyze(engine: Engine, table: str) -> None:
    """Fresh statistics, and no work left for later."""
    how = "VACUUM ANALYZE" if engine.dialect.name == "postgresql" else "ANALYZE TABLE"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"{how} {table}"))


@pytest.fixture(scope="module")
def crowds(servers: Servers) -> Iterator[Crowds]:
    crowds = Crowds(servers)
    yield crowds
    crowds.close()


@pytest.fixture
def crowded(database: str, crowds: Crowds) -> Iterator[Engine]:
    """A synchronous engine on the crowded tables."""
    with crowds.of(database, fill_crowd) as engine:
        yield engine

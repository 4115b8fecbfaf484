"""A message table with crowds that no hot statement may walk through."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text

from faststream_sqlbroker.database.dialects import dialect_for
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.migrate import create_all
from faststream_sqlbroker.schema.tables import build_tables
from tests.helpers import mysql_numbers

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


class DatabaseOf:
    """In place of a `Database`: what a subject does runs on one connection, in its transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.dialect = dialect_for(connection.dialect, TABLES)
        self.tables = TABLES

    async def run(self, work: Callable[[Connection], T], *_: Any, **_options: Any) -> T:
        """Run `work`, and commit nothing."""
        return work(self._connection)


def crowd(kind: str) -> list[str]:
    """INSERTs: other queues' due rows, our queue's future ones, and the few that are due."""

    def numbers(count: int) -> str:
        of = (
            f"generate_series(1, {count}) AS s(n)"
            if kind == "postgresql"
            else f"{mysql_numbers(count)} s"
        )
        return f"FROM {of}"

    if kind == "postgresql":
        future = "statement_timestamp() + s.n * interval '1 second' + interval '1 hour'"
    else:
        future = "UTC_TIMESTAMP(6) + INTERVAL s.n + 3600 SECOND"
    foreign, future_ones = (n if kind == "postgresql" else n // FEWER for n in (FOREIGN, FUTURE))
    text_of = "CONCAT('other', MOD(s.n, 100))"
    insert = "INSERT INTO message (queue, payload, priority"
    return [
        f"{insert}) SELECT {text_of}, 'x', MOD(s.n, 3) {numbers(foreign)}",
        f"{insert}, next_attempt_at) SELECT 'q', 'x', MOD(s.n, 3), {future} {numbers(future_ones)}",
        f"{insert}) SELECT 'q', 'x', MOD(s.n, 3) {numbers(DUE)}",
    ]


@pytest.fixture
def crowded(database: str, database_url: str) -> Engine:
    """A synchronous engine on the crowded tables; statistics are fresh, nothing is PROCESSING."""
    engine = create_engine(make_url(database_url).set(drivername=SYNC_DRIVERS[database]))
    with engine.begin() as connection:
        create_all(connection, TABLES)
        for statement in crowd(database):
            connection.execute(text(statement))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if database == "postgresql":
            connection.execute(text("VACUUM ANALYZE message"))
        else:
            connection.execute(text("ANALYZE TABLE message"))
    yield engine
    engine.dispose()

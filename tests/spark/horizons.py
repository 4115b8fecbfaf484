"""Transactions of other sessions, and horizons found during them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Table, create_engine, select

from faststream_sqlbroker.schema.types import clock
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.horizon import Horizon, find_horizon
from tests.helpers import eventually
from tests.spark.conftest import Archive, archived


def find(url: str, **options: Any) -> Horizon:
    """A horizon by a connection of its own; nothing is left for the margin unless asked for."""
    database = get_database(parse_address(url))
    with database.connect() as connection:
        return find_horizon(database, connection, **{"margin": 0, **options})


def settle(archive: Archive, connection: Connection, number: int) -> None:
    """Archive a message as the broker does: the statement takes the database's clock."""
    settle_in(archive.archive, connection, number)


def settle_in(table: Table, connection: Connection, number: int) -> None:
    """`settle` where there is only the table."""
    # As with the broker, it is not the transaction's first statement: a server may stand still
    # between the time of that and the moment from which others see it.
    connection.execute(table.insert().values(archived(id=number)))
    connection.execute(table.update().where(table.c.id == number).values(archived_at=clock()))


def archived_at(archive: Archive, connection: Connection, number: int) -> datetime:
    """The row's, as that connection sees it."""
    column = archive.archive.c
    found: datetime = connection.execute(
        select(column.archived_at).where(column.id == number)
    ).scalar_one()
    return found


def rows_before(
    archive: Archive, horizon: Horizon, connection: Connection | None = None
) -> set[int]:
    """Ids of what is archived before the horizon, as a new statement sees it."""
    columns = archive.archive.c
    statement = select(columns.id).where(columns.archived_at < horizon.time)
    if connection is not None:
        return set(connection.execute(statement).scalars())
    with archive.engine.connect() as own:
        return set(own.execute(statement).scalars())


async def passes(archive: Archive, rows: set[int]) -> None:
    """The horizon passes them soon; MariaDB's sees other databases of the server, which other tests
    use."""

    def look() -> bool:
        horizon = find(archive.url)
        return horizon.source == "transactions" and rows_before(archive, horizon) == rows

    await eventually(look)


async def stands_still(archive: Archive, detail: str) -> None:
    """The horizon is at the start of a statement for as long as that runs."""
    tenth = timedelta(seconds=0.1)
    database = get_database(parse_address(archive.url))
    with database.connect() as connection:
        before = database.get_time(connection)
        with held(archive, f"SELECT {GATES[archive.kind][0]}"):
            await eventually(lambda: find(archive.url).detail.startswith(detail))
            seen = database.get_time(connection)
            await eventually(lambda: database.get_time(connection) > seen + tenth)

            def at_its_start() -> bool:
                moment = find(archive.url).time
                assert moment <= seen
                # Ages in MariaDB's list of processes are measured later than the clock.
                return moment >= before - tenth

            await eventually(at_its_start)


GATES = {
    "postgresql": ("pg_advisory_lock(7)", "pg_advisory_unlock(7)"),
    "mariadb": ("GET_LOCK('gate', 600)", "RELEASE_LOCK('gate')"),
}
"""How a statement waits for `held`, and what lets it go on."""


@contextmanager
def held(archive: Archive, statement: str) -> Iterator[None]:
    """`statement` runs until the end of the block, as it waits for the lock of `GATES`."""
    take, give = GATES[archive.kind]
    engine = create_engine(archive.engine.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as keeper:
        keeper.exec_driver_sql(f"SELECT {take}")
        with running(archive, statement):
            try:
                yield
            finally:
                keeper.exec_driver_sql(f"SELECT {give}")
    engine.dispose()


@contextmanager
def running(archive: Archive, statement: str) -> Iterator[None]:
    """`statement` runs on a connection of its own until it ends."""
    engine = create_engine(archive.engine.url, isolation_level="AUTOCOMMIT")

    def work() -> None:
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        engine.dispose()

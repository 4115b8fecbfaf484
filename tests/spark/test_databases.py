"""The queries of readers, in sessions whose defaults are not ours; without Spark."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine, event, make_url

from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.databases.base import MAX_IDLE_SECONDS, TableRange
from pyspark_sqlbroker.lake.removal import ArchiveRows
from pyspark_sqlbroker.lake.windows import ExportWindow
from pyspark_sqlbroker.load.selection import ARCHIVE, select_rows
from tests.spark.conftest import START, Archive

pytestmark = pytest.mark.capability("Spark: the archive and the live table by JDBC")


def set_default(archive: Archive, name: str, value: str) -> None:
    """Of all sessions of the database that begin later (PostgreSQL)."""
    archive.execute(f"ALTER DATABASE {make_url(archive.url).database} SET {name} = '{value}'")


@pytest.mark.parametrize("pooled", [False, True], ids=["one session", "pooled"])
@pytest.mark.parametrize("number", [2, 3, 6])
def test_cuts_mean_the_same_in_every_session(new_database: Any, number: int, pooled: bool) -> None:
    """D4: JDBC's sessions write dates in the ISO style, whatever the database's default; months are
    no days."""
    archive = new_database("postgresql")
    archive.add_many(120, step=timedelta(hours=9))
    archive.analyze()
    set_default(archive, "DateStyle", "German")
    set_default(archive, "TimeZone", "Asia/Kolkata")  # its abbreviation is Israel's too
    database = get_database(parse_address(archive.url))
    since = f'"archived_at" >= {database.format_time(START)}'
    with database.connect() as connection:
        if pooled:  # the next statement goes to another session, which has the defaults
            connection.exec_driver_sql("RESET DateStyle")
        rows = TableRange("message_archive", None, "archived_at", since)
        cuts = database.build_predicates(connection, rows, number)
    jdbc = create_engine(archive.engine.url, connect_args={"options": "-c DateStyle=ISO"})
    with jdbc.connect() as connection:
        sizes = [
            connection.exec_driver_sql(
                f"SELECT count(*) FROM message_archive WHERE {cut}"
            ).scalar_one()
            for cut in cuts
        ]
    jdbc.dispose()
    assert sum(sizes) == 120
    assert len(sizes) == number
    assert max(sizes) < 2 * 120 / number


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_connection_may_wait_for_spark(new_database: Any, kind: str) -> None:
    """D5: an export's connection idles while a window is written, whatever the default allows."""
    archive = new_database(kind)
    if kind == "postgresql":
        set_default(archive, "idle_session_timeout", "1min")
    asked = {
        "postgresql": (
            "SELECT extract(epoch FROM current_setting('idle_session_timeout')::interval)"
        ),
        "mariadb": "SELECT @@session.wait_timeout",
    }
    database = get_database(parse_address(archive.url))
    with archive.engine.connect() as plain, database.connect() as connection:
        plain.invalidate()
        assert plain.exec_driver_sql(asked[kind]).scalar_one() < MAX_IDLE_SECONDS
        assert connection.exec_driver_sql(asked[kind]).scalar_one() == MAX_IDLE_SECONDS


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "sqlite"])
def test_a_window_that_no_index_serves_comes_in_pieces(new_database: Any, kind: str) -> None:
    """Drivers hold a whole result in memory otherwise: 3.5 GB of a day of 20 million rows."""
    archive = new_database(kind)
    archive.add_many(50, step=timedelta(hours=1))
    database = get_database(parse_address(archive.url))
    window = ExportWindow(START + timedelta(days=1), "day")
    cursors = list[str]()
    with database.connect() as connection:
        event.listen(
            connection.engine,
            "before_cursor_execute",
            lambda _, cursor, *__: cursors.append(type(cursor).__name__),
        )
        found = ArchiveRows(database, connection, select_rows(ARCHIVE))
        rows = found.list_window(window)
        assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1
        assert rows == found.between(window.start, window.end).list_ids()
    assert list(rows.ids) == list(range(25, 49))
    streaming = {"postgresql": "ServerCursor", "mariadb": "SSCursor", "sqlite": "Cursor"}
    assert cursors[1] == streaming[kind]

"""A snapshot of PostgreSQL shows one moment, even if the tables change."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from pyspark_sqlbroker import open_snapshot, read_archive
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.lake.removal import ArchiveRows
from pyspark_sqlbroker.load import read
from pyspark_sqlbroker.load.selection import ARCHIVE, select_rows
from tests.helpers import eventually
from tests.spark.conftest import Archive
from tests.spark.horizons import running
from tests.spark.test_prune import partition

pytestmark = [
    pytest.mark.capability("Spark: one snapshot for all connections of a load"),
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
]


@contextmanager
def first_partition(archive: Archive) -> Iterator[Callable[[], bool | None]]:
    """Our prune's way to drop the oldest one."""
    database = get_database(parse_address(archive.url))
    with database.connect() as connection:
        rows = ArchiveRows(database, connection, select_rows(ARCHIVE))
        part = rows.find_partitions()[0]
        figures = rows.between(part.start, part.end).list_ids().checksums
        yield lambda: rows.drop_partition(part, figures)


@pytest.mark.parametrize("default", [False, True], ids=["without", "with a default"])
def test_a_partition_is_dropped_after_the_snapshot(
    spark: SparkSession, archive: Archive, default: bool
) -> None:
    """D4: all tasks see the rows of a partition that a prune wants to drop at that time."""
    partition(archive, 0, 1, default=default)
    archive.add_many(20, step=timedelta(hours=2))
    with open_snapshot(archive.url) as now:
        frame = read_archive(spark, archive.url, snapshot=now, num_partitions=1)
        with first_partition(archive) as drop:
            assert not drop()
        assert frame.count() == 20
    with first_partition(archive) as drop:
        assert drop()
    assert read_archive(spark, archive.url).count() == 8


@pytest.mark.parametrize("statement", ["VACUUM FULL message_archive", "TRUNCATE message_archive"])
def test_an_exclusive_lock_on_the_table_waits_for_the_snapshot(
    archive: Archive, statement: str
) -> None:
    archive.add_many(3)
    impatient = create_engine(
        archive.engine.url,
        isolation_level="AUTOCOMMIT",
        connect_args={"options": "-c lock_timeout=100ms"},
    )
    with open_snapshot(archive.url) as now, impatient.connect() as other:
        now.lock_table("message_archive")
        with pytest.raises(OperationalError, match="lock timeout"):
            other.exec_driver_sql(statement)


async def test_a_reader_does_not_wait_for_a_lock_that_waits_for_its_snapshot(
    spark: SparkSession, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for each other until the server ends the snapshot, and then rows would be
    lost."""
    monkeypatch.setattr(read, "SNAPSHOT_LOCK_TIMEOUT", 0.2)
    archive.add_many(3)
    waiting = (
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'message_archive'::regclass"
    )
    with ExitStack() as later:
        with open_snapshot(archive.url) as now:
            frame = read_archive(spark, archive.url, snapshot=now)
            later.enter_context(running(archive, "TRUNCATE message_archive"))
            await eventually(lambda: now.connection.exec_driver_sql(waiting).scalar())
            with pytest.raises(Exception, match="lock timeout"):
                frame.count()
    assert archive.count() == 0

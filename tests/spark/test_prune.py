"""Pruning: nothing goes that no verified export has, unless its age alone was asked for."""

from array import array
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import NoRetryStrategy, SqlBroker
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.partitions import ArchivePartition
from pyspark_sqlbroker import export_archive, prune_archive, read_export
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.lake import prune as module
from pyspark_sqlbroker.lake import removal
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.removal import ArchiveRowIds, ArchiveRows
from pyspark_sqlbroker.lake.row_checksums import RowChecksums
from pyspark_sqlbroker.load.selection import ARCHIVE, select_rows
from tests.helpers import eventually
from tests.spark.conftest import START, Archive

pytestmark = pytest.mark.capability("Spark: the archive pruned by a verified export, or by age")

DAY = timedelta(days=1)
OF_POSTGRESQL = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
OF_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


def test_only_what_a_verified_export_has_is_removed(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves M5: later windows, and windows with a row that the export lacks, stay; a dry run
    removes nothing."""
    archive.add_days(4)
    monkeypatch.setattr("pyspark_sqlbroker.lake.removal.DELETE_CHUNK", 2)
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, until="2026-03-04")
    archive.add({"id": 99, "archived_at": START + DAY})  # late, in the second window
    archive.execute("DELETE FROM message_archive WHERE id = 21")  # retried by hand
    expected = [("2026-03-01", 5, False), ("2026-03-02", 6, True), ("2026-03-03", 4, False)]
    for dry_run in (True, False):
        assert len(archive.ids()) == 20
        result = prune_archive(archive.url, exported=path, spark=spark, dry_run=dry_run)
        assert [(one.name, one.rows, one.refused is not None) for one in result.windows] == expected
        assert result.windows[1].refused == (
            "1 of its rows are not in the export: export again with --since 2026-03-02"
        )
        assert (result.rows, result.partitions, result.dry_run) == (9, (), dry_run)
    assert archive.ids() == [11, 12, 13, 14, 15, 31, 32, 33, 34, 35, 99]
    # Exported again it may go; the lake has every row that ever was.
    export_archive(spark, archive.url, path, since="2026-03-02", until="2026-03-04")
    assert prune_archive(archive.url, exported=path, spark=spark).rows == 6
    assert prune_archive(archive.url, exported=path, spark=spark).windows == ()
    assert archive.ids() == [31, 32, 33, 34, 35]
    assert read_export(spark, path).count() == 16


def test_by_age_alone(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves M5: expiry by age, by the database's clock, without Spark."""
    monkeypatch.setattr(module, "DELETE_CHUNK", 3)
    archive.add_days(4)
    with archive.engine.begin() as connection:
        connection.execute(
            archive.archive.insert().from_select(
                [c.name for c in archive.archive.c if c.name != "archived_at"],
                archive.archive.select()
                .where(archive.archive.c.id == 1)
                .with_only_columns(
                    (archive.archive.c.id + 1000).label("id"),
                    *(c for c in archive.archive.c if c.name not in ("id", "archived_at")),
                ),
            )
        )
    age = timedelta(hours=1)
    dry = prune_archive(archive.url, older_than=age, dry_run=True)
    assert (dry.rows, dry.dry_run, len(archive.ids())) == (20, True, 21)
    assert prune_archive(archive.url, older_than=age, queues=["nobody's"]).rows == 0
    assert prune_archive(archive.url, older_than=age).rows == 20
    assert archive.ids() == [1001]


def test_rows_are_listed_by_pages(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves M5: no statement has more than a page, and every row is listed once, also of one
    moment."""
    monkeypatch.setattr(removal, "PAGE_ROWS", 3)
    moments = [START, *[START + timedelta(microseconds=1)] * 5, START + DAY, START + DAY * 2]
    archive.add(*({"id": 20 - n, "archived_at": moment} for n, moment in enumerate(moments)))
    statements = list[str]()
    database = get_database(parse_address(archive.url))
    with database.connect() as connection:
        event.listen(
            connection, "before_cursor_execute", lambda *given: statements.append(given[2])
        )
        rows = ArchiveRows(
            database, connection, select_rows(ARCHIVE, until=START + DAY * 2)
        ).list_ids()
        oldest = ArchiveRows(database, connection, select_rows(ARCHIVE)).list_ids(2)
    assert list(rows.ids) == [20, 15, 16, 17, 18, 19, 14]
    assert list(rows.times) == [to_microseconds(moment) for moment in moments[:-1]]
    assert list(oldest.ids) == [20, 15]
    assert [one.rpartition(" ")[2] for one in statements] == ["3", "3", "3", "2"]


def test_rows_that_others_lack_are_counted() -> None:
    rows = ArchiveRowIds(array("q", [7, 3, 4, 1]), array("q", [10, 20, 20, 30]))
    assert rows.count_missing([(7, 10), (4, 20), (4, 20), (3, 10), (1, 20), (5, 20), (9, 99)]) == 2
    assert rows.count_missing(zip(rows.ids, rows.times, strict=True)) == 0


@OF_SQLITE
def test_rows_that_come_while_it_deletes_stay(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.add_days(4)
    path = str(tmp_path / "lake")
    delete = ArchiveRows.delete
    export_archive(spark, archive.url, path, until="2026-03-02")

    def late(self: ArchiveRows, rows: ArchiveRowIds) -> int:
        archive.add({"id": 99, "archived_at": START + timedelta(hours=2)})
        return delete(self, rows)

    monkeypatch.setattr(ArchiveRows, "delete", late)
    assert prune_archive(archive.url, exported=path, spark=spark).rows == 5
    assert 99 in archive.ids()


@OF_SQLITE
def test_an_export_that_lost_a_file_age_and_wrong_options(
    spark: SparkSession, archive: Archive, new_database: Any, tmp_path: Path
) -> None:
    archive.add_days(4)
    path = tmp_path / "lake"
    export_archive(spark, archive.url, str(path), until="2026-03-03", rows_per_commit=5)
    young = prune_archive(archive.url, exported=str(path), spark=spark, older_than="1000000h")
    assert (young.rows, young.windows) == (0, ())
    lake = Lake(spark, str(path))
    (path / lake.files[0].path).unlink()
    result = prune_archive(archive.url, exported=str(path), spark=spark, older_than="1h")
    assert [(one.name, one.refused) for one in result.windows] == [
        ("2026-03-01", "its files are missing or differ from the verified files"),
        ("2026-03-02", None),
    ]
    assert archive.ids()[:6] == [1, 2, 3, 4, 5, 21]
    with pytest.raises(SetupError, match=r"exported=.*older_than="):
        prune_archive(archive.url)
    with pytest.raises(SetupError, match="exported= needs spark="):
        prune_archive(archive.url, exported=str(path))
    with pytest.raises(SetupError, match="nothing was removed"):
        prune_archive(new_database("sqlite").url, exported=str(path), spark=spark)


def partition(archive: Archive, *days: int, default: bool = False) -> None:
    """Make the archive anew, partitioned as docs/reference/tables.md says; a partition for each of
    `days` after START."""
    archive.execute("ALTER TABLE message_archive RENAME TO old_archive")
    archive.execute(
        "CREATE TABLE message_archive (LIKE old_archive INCLUDING DEFAULTS INCLUDING CONSTRAINTS, "
        "PRIMARY KEY (id, archived_at)) PARTITION BY RANGE (archived_at)"
    )
    archive.execute("DROP TABLE old_archive")
    archive.execute("CREATE INDEX message_archive_archived ON message_archive (archived_at, id)")
    archive.execute("CREATE INDEX message_archive_queue ON message_archive (queue, archived_at)")
    archive.execute(
        "CREATE INDEX message_archive_uncompleted ON message_archive (state, archived_at, id) "
        "WHERE state <> 'COMPLETED'"
    )
    for day in days:
        first = START + DAY * day
        end = START + DAY * (day + 1)
        archive.execute(
            f"CREATE TABLE archive_{first:%Y_%m_%d} PARTITION OF message_archive "
            f"FOR VALUES FROM ('{first.isoformat()}') TO ('{end.isoformat()}')"
        )
    if default:
        archive.execute("CREATE TABLE archive_rest PARTITION OF message_archive DEFAULT")


def partitions(archive: Archive) -> list[str]:
    """Of the archive."""
    found = archive_rows(
        archive,
        "SELECT inhrelid::regclass::text FROM pg_inherits "
        "WHERE inhparent = 'message_archive'::regclass",
    )
    return sorted(found)


def archive_rows(archive: Archive, statement: str) -> list[Any]:
    """The first column."""
    with archive.engine.connect() as connection:
        return list(connection.execute(text(statement)).scalars())


@OF_POSTGRESQL
@pytest.mark.capability("Spark: whole partitions of the archive pruned")
@pytest.mark.parametrize("default", [False, True], ids=["without", "with a default"])
def test_partitions_go_as_a_whole(
    spark: SparkSession, archive: Archive, tmp_path: Path, default: bool
) -> None:
    """Proves M5: partitions within verified windows are detached and dropped; other rows are
    deleted."""
    partition(archive, 0, 1, 3, default=default)
    archive.execute(
        "CREATE TABLE archive_wide PARTITION OF message_archive "
        f"FOR VALUES FROM ('{START + DAY * 2}') TO ('{START + DAY * 2 + timedelta(hours=3)}')"
    )
    if not default:
        archive.execute(
            "CREATE TABLE archive_half PARTITION OF message_archive FOR VALUES FROM "
            f"('{START + DAY * 2 + timedelta(hours=3)}') TO ('{START + DAY * 3}')"
        )
    archive.add_days(4)
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, until="2026-03-04")
    archive.add({"id": 99, "archived_at": START + DAY})
    going = ["archive_2026_03_01", "archive_wide"] + ([] if default else ["archive_half"])
    dry = prune_archive(archive.url, exported=path, spark=spark, dry_run=True)
    assert sorted(dry.partitions) == sorted(going)
    assert dry.rows == 10
    result = prune_archive(archive.url, exported=path, spark=spark)
    assert sorted(result.partitions) == sorted(going)
    assert [(one.name, one.rows, bool(one.refused)) for one in result.windows] == [
        ("2026-03-01", 5, False),
        ("2026-03-02", 6, True),
        ("2026-03-03", 5, False),
    ]
    assert archive.ids() == [11, 12, 13, 14, 15, 31, 32, 33, 34, 35, 99]
    assert not set(going) & set(partitions(archive))


@OF_POSTGRESQL
def test_a_partition_that_got_a_row_before_it_was_locked_stays(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves M5: and a prune that dies leaves it as it was."""
    partition(archive, 0, 1)
    archive.add_days(2)
    path = str(tmp_path / "lake")
    drop = ArchiveRows.drop_partition
    export_archive(spark, archive.url, path, until="2026-03-03")

    def late(self: ArchiveRows, part: ArchivePartition, expected: RowChecksums) -> bool | None:
        if part.name == "archive_2026_03_01":
            archive.add({"id": 99, "archived_at": START + timedelta(hours=2)})
        return drop(self, part, expected)

    with monkeypatch.context() as patched:
        patched.setattr(ArchiveRows, "drop_partition", late)
        result = prune_archive(archive.url, exported=path, spark=spark)
    assert (result.partitions, result.rows) == (("archive_2026_03_02",), 5)
    assert [one.refused for one in result.windows] == [
        "1 of its rows are not in the export: export again with --since 2026-03-01",
        None,
    ]
    assert archive.ids() == [1, 2, 3, 4, 5, 99]
    assert partitions(archive) == ["archive_2026_03_01"]
    export_archive(spark, archive.url, path, since="2026-03-01", until="2026-03-02")
    with monkeypatch.context() as patched:
        patched.setattr(ArchiveRows, "_query_checksums", die)
        with pytest.raises(KeyboardInterrupt):
            prune_archive(archive.url, exported=path, spark=spark)
    assert partitions(archive) == ["archive_2026_03_01"]
    assert prune_archive(archive.url, exported=path, spark=spark).rows == 6
    assert (partitions(archive), archive.ids()) == ([], [])


@OF_POSTGRESQL
def test_rows_that_went_with_a_partition_count_when_their_window_is_refused_later(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition(archive, 0, default=True)
    archive.add_days(1)
    path = str(tmp_path / "lake")
    drop = ArchiveRows.drop_partition
    export_archive(spark, archive.url, path, until="2026-03-02")

    def late(self: ArchiveRows, part: ArchivePartition, expected: RowChecksums) -> bool | None:
        dropped = drop(self, part, expected)
        archive.add({"id": 99, "archived_at": START + timedelta(hours=2)})
        return dropped

    monkeypatch.setattr(ArchiveRows, "drop_partition", late)
    result = prune_archive(archive.url, exported=path, spark=spark)
    assert (result.rows, result.partitions) == (5, ("archive_2026_03_01",))
    assert [(one.rows, one.refused) for one in result.windows] == [
        (
            1,
            (
                "1 of its rows are not in the export: export again with --since 2026-03-01 "
                "(5 more rows were dropped with a partition)"
            ),
        )
    ]
    assert archive.ids() == [99]


@OF_POSTGRESQL
@pytest.mark.parametrize("held", ["a reader", "another prune"])
def test_a_partition_that_cannot_be_locked_is_emptied(
    spark: SparkSession,
    archive: Archive,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    held: str,
) -> None:
    """Its rows are deleted, and the next prune drops it."""
    partition(archive, 0)
    archive.add_days(1)
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, until="2026-03-02")
    lock = {
        "a reader": "SELECT count(*) FROM message_archive",
        "another prune": "LOCK TABLE archive_2026_03_01 IN SHARE UPDATE EXCLUSIVE MODE",
    }
    with archive.engine.connect() as other:
        other.execute(text(lock[held]))
        result = prune_archive(archive.url, exported=path, spark=spark)
    assert (result.rows, result.partitions, archive.ids()) == (5, (), [])
    assert "archive_2026_03_01 cannot be dropped, so its rows are deleted" in caplog.text
    assert partitions(archive) == ["archive_2026_03_01"]
    result = prune_archive(archive.url, exported=path, spark=spark)
    assert (result.rows, result.partitions) == (0, ("archive_2026_03_01",))


def die(*_given: Any) -> bool:
    """As if the process were gone."""
    raise KeyboardInterrupt


@OF_POSTGRESQL
def test_bounds_of_other_columns_are_left_alone(archive: Archive) -> None:
    """Numbers may look like dates."""
    archive.execute("DROP TABLE message_archive")
    archive.execute("CREATE TABLE message_archive (id bigint) PARTITION BY RANGE (id)")
    archive.execute(
        "CREATE TABLE one PARTITION OF message_archive FOR VALUES FROM (20260301) TO (20260302)"
    )
    database = get_database(parse_address(archive.url))
    with database.connect() as connection:
        assert ArchiveRows(database, connection, select_rows(ARCHIVE)).find_partitions() == []


@OF_POSTGRESQL
def test_partitions_without_an_end_are_left_alone(archive: Archive) -> None:
    partition(archive, 0)
    archive.execute(
        f"CREATE TABLE archive_rest PARTITION OF message_archive FOR VALUES FROM ('{START + DAY}') "
        "TO ('infinity')"
    )
    archive.execute(
        "CREATE TABLE archive_old PARTITION OF message_archive FOR VALUES FROM ('0044-03-15 BC') "
        "TO ('2000-01-01')"
    )
    database = get_database(parse_address(archive.url))
    with database.connect() as connection:
        found = ArchiveRows(database, connection, select_rows(ARCHIVE)).find_partitions()
    assert [part.name for part in found] == ["archive_2026_03_01"]


@OF_POSTGRESQL
async def test_the_broker_settles_into_a_partitioned_archive(archive: Archive) -> None:
    """Real messages, also failed ones; the validation at the start finds no difference."""
    today = archive_rows(archive, "SELECT (now() AT TIME ZONE 'UTC')::date")[0]
    day = (datetime(today.year, today.month, today.day, tzinfo=timezone.utc) - START) // DAY
    partition(archive, day - 1, day, day + 1)
    engine = create_async_engine(archive.url)
    broker = SqlBroker(engine)

    @broker.subscriber("orders", retry_strategy=NoRetryStrategy())
    async def handle(body: int) -> None:
        if body == 3:
            raise ValueError(body)

    async with broker:
        await broker.start()
        await broker.publish_batch(1, 2, 3, queue="orders")
        await eventually(lambda: archive.count() == 3)
    await engine.dispose()
    named = "'archive_' || to_char(archived_at AT TIME ZONE 'UTC', 'YYYY_MM_DD')"
    assert (
        archive_rows(archive, f"SELECT tableoid::regclass::text = {named} FROM message_archive")
        == [True] * 3
    )
    states = archive_rows(archive, "SELECT state FROM message_archive ORDER BY state")
    assert states == ["COMPLETED", "COMPLETED", "FAILED"]

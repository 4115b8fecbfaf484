"""Exports record their windows in the database, and retention without Spark goes by them."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import make_url, text
from sqlalchemy.exc import OperationalError

from faststream_sqlbroker import Pruned, Retention, SqlBroker
from faststream_sqlbroker.exceptions import SetupError, StoreError
from pyspark_sqlbroker import export_archive, prune_archive, read_export
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.records import WindowRecords, open_records
from pyspark_sqlbroker.lake.row_checksums import RowChecksums
from tests.spark.conftest import START, Archive

pytestmark = pytest.mark.capability(
    "retention: only what a lake has recorded leaves the archive (`unless_loaded_by`)"
)

DAY = timedelta(days=1)
RETENTION = Retention(completed="1d", failed="1d", unless_loaded_by="shop")
ASYNC = {"postgresql": "asyncpg", "sqlite": "aiosqlite"}
OF_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


def scopes(archive: Archive) -> dict[str, str]:
    with archive.engine.connect() as connection:
        statement = text("SELECT * FROM message_policy_state WHERE scope LIKE 'lake%'")
        rows = connection.execute(statement).mappings()
        return {row["key"]: row["scope"] for row in rows}


def export(spark: SparkSession, archive: Archive, path: Path, **options: Any) -> Any:
    given = {"until": "2026-03-03", "record_as": "shop", "rows_per_commit": 5} | options
    return export_archive(spark, archive.url, str(path), **given)


def prune(archive: Archive) -> Pruned:
    """One pass, as a broker makes it."""
    url = make_url(archive.url)
    driver = ASYNC.get(url.get_backend_name(), "aiomysql")

    async def once() -> Pruned:
        broker = SqlBroker(url.set(drivername=f"{url.get_backend_name()}+{driver}"), logger=None)
        try:
            return await broker.admin.prune(RETENTION)
        finally:
            await broker.stop()

    return asyncio.run(once())


def test_what_an_export_has_recorded_goes(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Two exports record the same; the third day is not exported, and stays."""
    archive.add_days(3)
    for _ in range(2):
        export(spark, archive, tmp_path / "lake")
        assert scopes(archive) == {"2026-03-01": "lake:shop", "2026-03-02": "lake:shop"}
    assert prune(archive) == Pruned(completed=10)
    assert archive.ids() == [21, 22, 23, 24, 25]
    # After everything has gone an export finds nothing to do, and keeps what the lake has.
    result = export(spark, archive, tmp_path / "lake")
    assert [one.action for one in result.windows] == []
    assert read_export(spark, str(tmp_path / "lake")).count() == 10


def test_late_and_brought_back_rows_stay_until_an_export_has_looked_again(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    archive.add_days(3)
    export(spark, archive, tmp_path / "lake")
    archive.add({"id": 99, "archived_at": START + timedelta(hours=2)})  # late, in the first day
    archive.execute("DELETE FROM message_archive WHERE id = 11")  # brought back
    found = prune(archive)
    assert (found.rows, len(found.differing)) == (0, 2)
    assert set(scopes(archive).values()) == {"lake_differs:shop"}
    result = export(spark, archive, tmp_path / "lake", recheck=0)
    assert [one.action for one in result.windows] == ["again", "left"]
    assert set(scopes(archive).values()) == {"lake:shop"}
    assert prune(archive) == Pruned(completed=10)
    assert archive.ids() == [21, 22, 23, 24, 25]
    assert read_export(spark, str(tmp_path / "lake")).count() == 11


def test_nothing_of_a_damaged_window_goes(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Also if another export, which has read its record before, records it afterwards."""
    archive.add_days(3)
    export(spark, archive, tmp_path / "lake")
    lake = Lake(spark, str(tmp_path / "lake"))
    first, second = lake.list_windows()
    path = tmp_path / "lake" / lake.files[0].path
    whole = path.read_bytes()
    with open_records("shop", lake.id, archive.url, "message", None) as stale:
        path.write_bytes(whole[::-1])
        damaged = export(spark, archive, tmp_path / "lake")
        stale.write(first, RowChecksums(6, 21))
    assert list(damaged.damaged) == [lake.files[0].path]
    assert scopes(archive) == {first.name: "lake_differs:shop", second.name: "lake:shop"}
    assert prune(archive) == Pruned(completed=5)
    assert archive.ids() == [1, 2, 3, 4, 5, 21, 22, 23, 24, 25]
    path.write_bytes(whole)
    export(spark, archive, tmp_path / "lake", recheck=0)
    assert prune(archive) == Pruned(completed=5)


@OF_SQLITE
def test_an_export_that_dies_before_its_record_lets_nothing_go(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.add_days(3)

    def die(*_given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(WindowRecords, "write", die)
        with pytest.raises(KeyboardInterrupt):
            export(spark, archive, tmp_path / "lake")
    assert read_export(spark, str(tmp_path / "lake")).count() == 5
    assert (scopes(archive), prune(archive).rows) == ({}, 0)
    # The next one records that window, too, however old it is.
    export(spark, archive, tmp_path / "lake", recheck=0)
    assert prune(archive) == Pruned(completed=10)


@OF_SQLITE
def test_a_lake_that_was_exported_without_a_name_is_recorded_later(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    archive.add_days(3)
    export(spark, archive, tmp_path / "lake", record_as=None)
    assert prune(archive) == Pruned()
    export(spark, archive, tmp_path / "lake", recheck=0)
    # What Spark's own prune removes is no longer there: the window differs, and nothing is lost.
    archive.add({"id": 98, "archived_at": START + DAY * 2 - timedelta(hours=1)})
    prune_archive(archive.url, exported=str(tmp_path / "lake"), spark=spark)
    assert archive.ids() == [11, 12, 13, 14, 15, 21, 22, 23, 24, 25, 98]
    found = prune(archive)
    assert (found.rows, len(found.differing)) == (0, 1)


@OF_SQLITE
def test_names_are_of_one_lake(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    archive.add_days(3)
    export(spark, archive, tmp_path / "lake")
    with pytest.raises(SetupError, match="the name of another lake, which recorded window"):
        export(spark, archive, tmp_path / "another")
    export(spark, archive, tmp_path / "another", record_as="second")
    assert prune(archive) == Pruned(completed=10)
    with pytest.raises(SetupError, match="record_as= does not allow queues="):
        export(spark, archive, tmp_path / "third", queues=["orders"])
    with pytest.raises(SetupError, match="no table 'orders_policy_state'"):
        export(spark, archive, tmp_path / "lake", message_table="orders")


@OF_SQLITE
def test_a_record_that_was_lowered_during_the_export_is_left(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export has counted, and before it records rows are removed."""
    archive.add_days(3)
    export(spark, archive, tmp_path / "lake")
    archive.add({"id": 99, "archived_at": START + timedelta(hours=2)})
    write = WindowRecords.write

    def late(self: WindowRecords, window: Any, source: Any) -> None:
        archive.execute("UPDATE message_policy_state SET counter = counter + 1")
        write(self, window, source)

    with monkeypatch.context() as patched:
        patched.setattr(WindowRecords, "write", late)
        export(spark, archive, tmp_path / "lake", since="2026-03-01")
    assert prune(archive).rows == 5
    assert archive.ids() == [1, 2, 3, 4, 5, 21, 22, 23, 24, 25, 99]


@OF_SQLITE
def test_a_record_that_cannot_be_written_is_told(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.add_days(3)

    def fail(*_given: Any) -> None:
        raise OperationalError("INSERT", {}, Exception("read-only"))

    monkeypatch.setattr(WindowRecords, "_save", fail)
    with pytest.raises(StoreError, match=r"is in the lake, but cannot be recorded in .*read-only"):
        export(spark, archive, tmp_path / "lake")

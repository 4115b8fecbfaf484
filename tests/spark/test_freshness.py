"""How far a lake is behind, in Python and by `sqlbroker archive status --freshness`."""

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker import export_archive, measure_freshness
from tests.spark.conftest import START, Archive
from tests.spark.test_archive_cli import run

OF_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
DAY = timedelta(days=1)


def test_rows_behind_the_watermark_its_age_and_the_cap(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    archive.add_days(4)
    archive.add({"id": 99, "archived_at": datetime.now(timezone.utc) + DAY})  # it is not closed
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, until="2026-03-02")
    began = datetime.now(timezone.utc)
    found = measure_freshness(spark, archive.url, path)
    assert (found.watermark, found.rows_behind, found.capped) == (START + DAY, 15, False)
    assert found.watermark_age is not None
    assert found.watermark_age >= (began - START - DAY).total_seconds() - 5
    assert found.horizon > START + 4 * DAY
    for cap, rows, capped in ((14, 14, True), (15, 15, False), (16, 15, False)):
        counted = measure_freshness(spark, archive.url, path, cap=cap)
        assert (counted.rows_behind, counted.capped) == (rows, capped)
    export_archive(spark, archive.url, path)
    after = measure_freshness(spark, archive.url, path)
    assert (after.rows_behind, after.capped) == (0, False)
    assert after.watermark is not None
    assert after.watermark > START + 4 * DAY
    assert after.watermark_age is not None
    assert after.watermark_age < found.watermark_age


@OF_SQLITE
def test_gaps_count_and_what_lies_before_the_lake_does_not(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """The same rows as the next export brings."""
    archive.add_days(6)
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, since="2026-03-02", until="2026-03-03")
    export_archive(spark, archive.url, path, since="2026-03-05", until="2026-03-06")
    found = measure_freshness(spark, archive.url, path)
    assert (found.watermark, found.rows_behind) == (START + 2 * DAY, 15)
    assert measure_freshness(spark, archive.url, path, cap=7).capped
    assert export_archive(spark, archive.url, path).rows == 15


@OF_SQLITE
def test_only_the_lakes_queues_count(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    archive.add_days(2)
    archive.add({"id": 90, "queue": "other", "archived_at": START + DAY})
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, queues=["orders"], until="2026-03-02")
    assert measure_freshness(spark, archive.url, path).rows_behind == 5


@OF_SQLITE
def test_a_lake_without_rows_has_no_watermark(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path)
    empty = measure_freshness(spark, archive.url, path)
    assert (empty.watermark, empty.watermark_age, empty.rows_behind) == (None, None, 0)
    archive.add_days(2)
    assert measure_freshness(spark, archive.url, path).rows_behind == 10


@OF_SQLITE
def test_what_is_refused(
    spark: SparkSession, archive: Archive, new_database: Any, tmp_path: Path
) -> None:
    archive.add_days(1)
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path)
    other = new_database("sqlite")
    with pytest.raises(SetupError, match="of other rows: its database is"):
        measure_freshness(spark, other.url, path)
    with pytest.raises(SetupError, match="cap"):
        measure_freshness(spark, archive.url, path, cap=0)
    with pytest.raises(SetupError, match="has no table: give the path of an export"):
        measure_freshness(spark, archive.url, str(tmp_path / "none"))
    archive.execute("DROP TABLE message_archive")
    with pytest.raises(SetupError, match="there is no table 'message_archive'"):
        measure_freshness(spark, archive.url, path)


def test_the_command_shows_it(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    archive.add_days(3)
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, source="the shop", until="2026-03-03")
    fresh = [path, "--freshness", "--source", "the shop"]
    done = run("status", *fresh, "--json", SQLBROKER_URL=archive.url)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["freshness"]
    assert (found["rows_behind"], found["capped"]) == (5, False)
    assert found["watermark"] == "2026-03-03T00:00:00+00:00"
    assert found["watermark_age"] > 0
    assert found["horizon"] > found["watermark"]
    shown = run("status", *fresh, "--cap", "3", SQLBROKER_URL=archive.url)
    assert shown.exit_code == 0, shown.output
    assert "not in the export: more than 3 rows of closed windows" in shown.output
    assert (
        "not in the export: 5 rows of closed windows"
        in run("status", *fresh, SQLBROKER_URL=archive.url).output
    )


@OF_SQLITE
def test_without_the_option_no_database_is_asked(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    archive.add_days(1)
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path)
    done = run("status", path, "--json", SQLBROKER_URL="postgresql://shop@127.0.0.1:1/none")
    assert done.exit_code == 0, done.output
    assert "freshness" not in json.loads(done.stdout)
    refused = run("status", path, "--freshness")
    assert isinstance(refused.exception, SetupError)
    assert "--freshness reads the database: give --url or SQLBROKER_URL" in str(refused.exception)

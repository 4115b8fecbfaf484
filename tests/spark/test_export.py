"""The export: whole windows, equal to the database's rows."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType
from sqlalchemy import select

from faststream_sqlbroker.exceptions import (
    ConcurrentLoadError,
    ExportMismatchError,
    SetupError,
    StoreError,
)
from pyspark_sqlbroker import (
    describe_export,
    export_archive,
    new_rows,
    prune_archive,
    read_archive,
    read_export,
    verify_export,
)
from pyspark_sqlbroker.databases.sqlite import SQLite
from pyspark_sqlbroker.lake.delta import DataFile
from pyspark_sqlbroker.lake.entries import Entry, LakeState
from pyspark_sqlbroker.lake.lake import Lake, build_lake_schema
from pyspark_sqlbroker.lake.row_checksums import (
    NO_ROWS,
    RowChecksums,
    build_checksum_columns,
)
from pyspark_sqlbroker.lake.windows import parse_window
from pyspark_sqlbroker.load.columns import ARCHIVE_FIELDS
from pyspark_sqlbroker.load.frames import ARCHIVE_SCHEMA
from pyspark_sqlbroker.moments import MIN_TIME
from tests.spark.conftest import Archive
from tests.spark.frames import plain_frame

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to a Delta table, compared with the database"
)

NAMES = [field.name for field in ARCHIVE_FIELDS]
TIMES = [field.name for field in ARCHIVE_FIELDS if field.type == "timestamp"]
MARCH = datetime(2026, 3, 7, tzinfo=timezone.utc)
UNTIL = "2026-03-11"
AUTUMN = datetime(2025, 11, 2, 5, 30, tzinfo=timezone.utc)


def fill(archive: Archive) -> None:
    """Days around New York's spring change, one of them empty; times at the edges; hard values."""
    edge = timedelta(microseconds=1)
    moments = [MARCH, MARCH + timedelta(days=1) - edge, MARCH + timedelta(days=1)]
    moments += [MARCH + timedelta(days=1, hours=hour, minutes=30) for hour in (6, 7, 8)]
    moments += [MARCH + timedelta(days=3, hours=5), MARCH + timedelta(days=4)]
    archive.add(
        *(
            {
                "id": n,
                "queue": "00123" if n % 2 else "orders",
                "archived_at": moment,
                "payload": b"\xff\xfe\x00" + bytes([n]) if n % 3 else b"",
                "headers": None if n % 3 else {"content-type": "text/plain", "a": "ü☃"},
                "key": None if n % 2 else f"k{n}|=~\\'",
                "last_error": None if n % 4 else "ValueError: ☃\n",
                "state": "FAILED" if n % 4 == 0 else "COMPLETED",
                "priority": n - 4,
            }
            for n, moment in enumerate(moments, 1)
        )
    )


def of_table(archive: Archive, until: datetime) -> list[tuple[Any, ...]]:
    """The table's rows before `until`, as Python's driver reads them; times as moments."""
    table = archive.archive
    with archive.engine.connect() as connection:
        rows = connection.execute(
            select(*(table.c[name] for name in NAMES))
            .where(table.c.archived_at < until)
            .order_by(table.c.id)
        )
        return [tuple(row) for row in rows]


def of_lake(frame: DataFrame) -> list[tuple[Any, ...]]:
    """The same of the lake."""
    columns = [F.unix_micros(name).alias(name) if name in TIMES else F.col(name) for name in NAMES]
    found = []
    for row in frame.orderBy("id", "archived_at").select(*columns).collect():
        values = row.asDict()
        for name in TIMES:
            micros = values[name]
            values[name] = (
                None
                if micros is None
                else datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=micros)
            )
        values["headers"] = None if values["headers"] is None else json.loads(values["headers"])
        values["payload"] = bytes(values["payload"])
        found.append(tuple(values[name] for name in NAMES))
    return found


def contents(path: Path) -> dict[str, str]:
    """Every file of data, by its place."""
    return {
        str(file.relative_to(path)): hashlib.md5(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*.parquet"))
    }


def test_the_lake_has_the_rows_of_closed_windows_with_every_value(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Proves D4: every column on every database, over a change of the clocks, and again without a
    change."""
    fill(archive)
    path = tmp_path / "lake"
    seen = list[Any]()
    result = export_archive(spark, archive.url, str(path), until=UNTIL, on_window=seen.append)
    assert [(one.name, one.action, one.rows) for one in result.windows] == [
        ("2026-03-07", "exported", 2),
        ("2026-03-08", "exported", 4),
        ("2026-03-10", "exported", 1),
    ]
    assert tuple(seen) == result.windows
    assert result.watermark == datetime(2026, 3, 11, tzinfo=timezone.utc)
    assert of_lake(read_export(spark, str(path))) == of_table(archive, result.watermark)
    dates = read_export(spark, str(path)).groupBy("date").count().collect()
    assert {str(row[0]): row[1] for row in dates} == {
        "2026-03-07": 2,
        "2026-03-08": 4,
        "2026-03-10": 1,
    }
    before = contents(path)
    again = export_archive(spark, archive.url, str(path), since="2026-03-01", until=UNTIL)
    assert {one.action for one in again.windows} == {"unchanged"}
    assert contents(path) == before
    secret = archive.engine.url.password
    log = "".join(one.read_text() for one in (path / "_delta_log").glob("*.json"))
    assert secret is None or secret not in log
    # Any reader of Delta sees the same, with the columns by which it may skip files.
    other = DeltaTable(str(path))
    assert other.to_pyarrow_table().num_rows == 7
    assert '"minValues": {"id": 1, "archived_at": "2026-03-07T' in log.replace("\\", "")


YEARS = [
    *(datetime(year, 1, 1, tzinfo=timezone.utc) for year in (1, 99, 999, 1500, 1969)),
    datetime(1582, 10, 10, 12, tzinfo=timezone.utc),
    datetime(1883, 11, 18, 17, 0, 5, tzinfo=timezone.utc),
    datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=timezone.utc),
]
"""The first year, two- and three-digit years, days that the Julian calendar has not, local mean
time, and the last moment before 1970."""


def add_years(archive: Archive) -> None:
    """A row of each, with other times at the limits."""
    last = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=timezone.utc)
    limits = {"created_at": YEARS[0], "next_attempt_at": YEARS[2], "acquired_at": YEARS[1]}
    limits |= {"first_attempt_at": None, "last_attempt_at": None, "expires_at": last}
    archive.add(*({"id": n, "archived_at": at, **limits} for n, at in enumerate(YEARS)))


def test_the_years_from_1_on(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    """Every reader takes a moment of the year 1 for one: servers take `1-01-01` for 2001."""
    add_years(archive)
    if archive.kind == "postgresql":  # which no reader may take for a window
        archive.add({"id": 100, "archived_at": MARCH})
        archive.execute("UPDATE message_archive SET archived_at = 'infinity' WHERE id = 100")
    path = str(tmp_path / "lake")
    expected = of_years(archive)
    first = {"since": "0001-01-01", "until": "2026-03-01"}
    source = spark.read.format("sqlbroker").options(url=archive.url, numPartitions="3", **first)
    for frame in (read_archive(spark, archive.url, num_partitions=3, **first), source.load()):
        assert of_lake(frame) == expected
    with new_rows(spark, archive.url, state=str(tmp_path / "s.json"), since="0001-01-01") as load:
        assert load.name == "since=00010101T000000.000000Z"
        assert of_lake(load.frame) == expected
    result = export_archive(spark, archive.url, path, window="hour", until="2026-03-01")
    assert (result.rows, result.windows[0].name[:10]) == (len(YEARS), "0001-01-01")
    assert of_lake(read_export(spark, path)) == expected
    found = verify_export(spark, path, url=archive.url)
    assert (found.intact, found.rows) == (True, len(YEARS))
    assert found.uncovered == 0
    pruned = prune_archive(archive.url, exported=path, spark=spark)
    assert (pruned.rows, {one.refused for one in pruned.windows}) == (len(YEARS), {None})
    assert prune_archive(archive.url, older_than="1d").rows == 0


def of_years(archive: Archive) -> list[tuple[Any, ...]]:
    """The rows of `YEARS`: Python's driver cannot read those of PostgreSQL's infinity."""
    table = archive.archive
    with archive.engine.connect() as connection:
        rows = connection.execute(
            select(*(table.c[name] for name in NAMES))
            .where(table.c.id < len(YEARS))
            .order_by(table.c.id)
        )
        return [tuple(row) for row in rows]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_rows_that_an_export_has_passed_over_are_found(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in how moments are written, and a row that came too late to be seen."""
    add_years(archive)
    archive.execute("DELETE FROM message_archive WHERE id = 0")
    old = len(YEARS) - 1
    moment = SQLite.format_time

    def faulty(database: SQLite, value: datetime) -> str:
        wrong = MIN_TIME < value < YEARS[3]
        return moment(database, value.replace(year=2001) if wrong else value)

    path = str(tmp_path / "lake")
    archive.add({"id": 50, "archived_at": MARCH})
    with monkeypatch.context() as patched:
        patched.setattr(SQLite, "format_time", faulty)
        export_archive(spark, archive.url, path, until=UNTIL)
    assert verify_export(spark, path).intact
    archive.add({"id": 51, "archived_at": MARCH + timedelta(hours=3)})
    found = verify_export(spark, path, url=archive.url)
    late = "1 of the 2 rows that the database has are not in the lake: export again with --since "
    assert found.missing["2026-03-07"] == f"{late}2026-03-07"
    assert (found.intact, len(found.missing), found.uncovered) == (False, old + 1, 0)
    with monkeypatch.context() as patched:  # the check takes no part in what the fault is in
        patched.setattr(SQLite, "format_time", faulty)
        assert verify_export(spark, path, url=archive.url) == found
    export_archive(spark, archive.url, path, since="0001-01-01", until=UNTIL)
    done = verify_export(spark, path, url=archive.url)
    assert (done.intact, done.uncovered, done.rows) == (True, 0, old + 2)
    export_archive(spark, archive.url, f"{path}2", since=MARCH, until=UNTIL)
    part = verify_export(spark, f"{path}2", url=archive.url)
    assert (part.intact, part.uncovered, part.rows) == (True, old, 2)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
def test_rows_that_come_late_are_exported_and_lost_ones_stay(
    spark: SparkSession, archive: Archive, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Proves D5: a commit that the safety lag did not cover is found; a pruned row is not lost with
    it."""
    fill(archive)
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, until="2026-03-09")
    archive.execute("DELETE FROM message_archive WHERE id = 1")
    left = export_archive(spark, archive.url, path, since="2026-03-07", until="2026-03-09")
    assert [one.action for one in left.windows] == ["left", "unchanged"]
    archive.add({"id": 70, "archived_at": MARCH + timedelta(hours=1)})  # as many rows as there were
    with caplog.at_level(logging.WARNING, "faststream_sqlbroker.spark"):
        again = export_archive(spark, archive.url, path, since="2026-03-07", until="2026-03-09")
    assert [(one.action, one.rows) for one in again.windows] == [("again", 3), ("unchanged", 4)]
    assert "1 rows were archived after its export" in caplog.text
    rows = read_export(spark, path).select("id").collect()
    assert sorted(row[0] for row in rows) == [1, 2, 3, 4, 5, 6, 70]
    last = export_archive(spark, archive.url, path, since="2026-03-07", until="2026-03-09")
    assert {one.action for one in last.windows} == {"unchanged"}


def change_after_write(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[list[DataFile], int], None]
) -> list[int]:
    """Call `change` after each time that windows were staged; returns how often they were."""
    stage = Lake.stage
    calls = list[int]()

    def changed(lake: Lake, frame: DataFrame, **options: Any) -> Any:
        staged = stage(lake, frame, **options)
        calls.append(len(calls))
        change(staged[0], len(calls))
        return staged

    monkeypatch.setattr(Lake, "stage", changed)
    return calls


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
def test_a_source_that_changes_while_it_is_read_is_caught(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves D5: what is not what the database has does not count; PostgreSQL's snapshot does not
    change."""
    fill(archive)
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, until="2026-03-08")

    def touch(_files: list[DataFile], number: int) -> None:
        archive.execute(
            "UPDATE message_archive SET payload = :new WHERE id = 5", new=bytes([number])
        )

    with monkeypatch.context() as patched:
        calls = change_after_write(patched, touch)
        if archive.kind == "postgresql":
            assert export_archive(spark, archive.url, path, until="2026-03-09").rows == 4
            assert len(calls) == 1
            return
        with pytest.raises(
            ExportMismatchError, match=r"2026-03-08: expected rows=4.*payloads=\d+.*found rows=4"
        ):
            export_archive(spark, archive.url, path, until="2026-03-09")
        assert len(calls) == 2
        assert describe_export(spark, path).watermark == MARCH + timedelta(days=1)
        assert read_export(spark, path).count() == 2
    with monkeypatch.context() as patched:
        change_after_write(patched, lambda *given: touch(*given) if given[1] == 1 else None)
        assert export_archive(spark, archive.url, path, until="2026-03-09").rows == 4


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_file_that_is_gone_is_caught(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is looked for before a commit, as the log takes names of missing files."""
    fill(archive)
    path = tmp_path / "lake"

    def lose(files: list[DataFile], number: int) -> None:
        for file in files if number == 1 else ():
            (path / file.path).unlink()

    change_after_write(monkeypatch, lose)
    with pytest.raises(StoreError, match="and now has no file: nothing was committed"):
        export_archive(spark, archive.url, str(path), until="2026-03-08", verify="counts")
    assert read_export(spark, str(path)).count() == 0
    result = export_archive(spark, archive.url, str(path), until="2026-03-08", verify="counts")
    assert result.rows == read_export(spark, str(path)).count() == 2


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_hours_queues_and_a_lake_that_grows_at_both_ends(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    fill(archive)
    archive.add({"id": 90, "archived_at": AUTUMN, "queue": "00123"})
    given = {"window": "hour", "queues": ["00123"], "recheck": 0}
    path = str(tmp_path / "lake")
    result = export_archive(
        spark, archive.url, path, since="2026-03-08T06:40Z", until="2026-03-08T08:50Z", **given
    )
    assert [(one.name, one.rows) for one in result.windows] == [("2026-03-08T07", 1)]
    # Earlier ones later: the watermark goes back and the gap is closed next.
    back = export_archive(
        spark, archive.url, path, since="2026-03-08T00:00Z", until="2026-03-08T02:00Z", **given
    )
    assert back.watermark == datetime(2026, 3, 8, 2, tzinfo=timezone.utc)
    on = export_archive(spark, archive.url, path, until="2026-03-08T09:00Z", **given)
    assert on.windows == ()
    assert on.watermark == datetime(2026, 3, 8, 9, tzinfo=timezone.utc)
    rows = read_export(spark, path).where("hour = 7").select("id", "queue", "hour").collect()
    assert [tuple(row) for row in rows] == [(5, "00123", 7)]
    assert read_export(spark, path).where("queue <> '00123'").count() == 0


def test_the_window_that_since_lies_in_is_exported_with_its_earlier_rows(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """No later export would take it, as each goes on where the last ended."""
    archive.add({"id": 1, "archived_at": MARCH + timedelta(hours=10)})
    archive.add({"id": 2, "archived_at": MARCH + timedelta(hours=33)})
    given = {"since": MARCH + timedelta(hours=12), "until": MARCH + timedelta(days=2)}
    path = str(tmp_path / "lake")
    result = export_archive(spark, archive.url, path, verify="counts", **given)
    assert [(one.name, one.rows) for one in result.windows] == [
        ("2026-03-07", 1),
        ("2026-03-08", 1),
    ]


def test_every_column_changes_the_figures(spark: SparkSession) -> None:
    """The check can fail: a change of any one value shows."""
    row: dict[str, Any] = {
        field.name: {"string": "a", "binary": bytearray(b"a"), "timestamp": MARCH}.get(
            field.type, 1
        )
        for field in ARCHIVE_FIELDS
    }
    other = {
        "string": "b",
        "binary": bytearray(b"b"),
        "timestamp": MARCH + timedelta(microseconds=1),
    }
    rows = [row]
    for field in ARCHIVE_FIELDS:
        rows.append(row | {field.name: other.get(field.type, 2)})
        if not field.is_required:
            rows.append(row | {field.name: None})
    frame = plain_frame(
        spark,
        [(n, *(one[name] for name in NAMES)) for n, one in enumerate(rows)],
        "n int, " + ", ".join(f"{field.name} {field.type}" for field in ARCHIVE_FIELDS),
    )
    found = frame.groupBy("n").agg(*build_checksum_columns(checksums=True)).collect()
    sums = {RowChecksums(*(int(value) for value in one[1:])) for one in found}
    assert len(sums) == len(rows) == len(found)
    whole = frame.agg(*build_checksum_columns(checksums=True)).collect()[0]
    assert RowChecksums(*map(int, whole)) == sum(sums, NO_ROWS)


def lake_of_one(spark: SparkSession, path: Path, files: int = 3) -> tuple[Lake, Any]:
    """A lake with a window of `files` files, made without a database."""
    lake = Lake(spark, str(path))
    lake.prepare({"window": "day", "table": "message_archive"}, "ab")
    window = parse_window("2026-03-07", "day")
    put(lake, window, 10, files)
    return lake, window


def put(lake: Lake, window: Any, rows: int, files: int = 1) -> None:
    """Bring rows 1 to `rows` into the lake, as an export does."""
    numbers = lake.session.range(1, rows + 1).withColumn("archived_at", F.lit(window.start))
    known = {"id", "archived_at", "payload"}
    frame = numbers.withColumn("payload", F.lit(b"x")).select(
        *(
            name if name in known else F.lit(None).cast(ARCHIVE_SCHEMA[name].dataType).alias(name)
            for name in NAMES
        )
    )
    staged, figures = lake.stage(frame.repartition(files))
    entry = Entry(figures[window], figures[window].counts)
    lake.commit(LakeState({window.name: entry}, ((window.start, window.end),)), staged)


def test_of_two_plans_from_one_state_one_is_committed(spark: SparkSession, tmp_path: Path) -> None:
    """Also if both fill a window that was empty; the other sees it when it loads again."""
    first, window = lake_of_one(spark, tmp_path)
    second = Lake(spark, str(tmp_path))
    following = parse_window("2026-03-08", "day")
    put(second, following, 20)
    with pytest.raises(ConcurrentLoadError, match="another process committed"):
        put(first, following, 20)
    assert read_export(spark, str(tmp_path)).count() == 30
    first.load()
    assert first.list_windows() == [window, following]


def test_a_merge_by_another_program_during_an_export_is_planned_around(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that was made before it is not committed; the next one has each row once."""
    lake, window = lake_of_one(spark, tmp_path)
    following = parse_window("2026-03-08", "day")
    with monkeypatch.context() as patched:
        change_after_write(
            patched,
            lambda _, number: DeltaTable(str(tmp_path)).optimize.compact() if number == 1 else None,
        )
        with pytest.raises(ConcurrentLoadError):
            put(lake, following, 5)
        put(lake, following, 5)
    assert (lake.list_windows(), read_export(spark, str(tmp_path)).count()) == (
        [window, following],
        15,
    )
    assert verify_export(spark, str(tmp_path)).intact


def test_a_state_is_as_large_as_the_lake_and_old_ones_go(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Also the SHA-256 of files that others have replaced and removed."""
    lake, _ = lake_of_one(spark, tmp_path)
    put(lake, parse_window("2026-03-08", "day"), 5)
    table = DeltaTable(str(tmp_path))
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    states = list((tmp_path / "_state").iterdir())
    for file in states:
        os.utime(file, times=(1, 1))
    lake.load()
    lake.sweep()
    (kept,) = (tmp_path / "_state").iterdir()
    assert len(states) == 2
    assert kept.name in lake.table.state_path
    put(lake, parse_window("2026-03-09", "day"), 5)
    assert len(lake.state.digests) == 1


def test_files_that_are_not_as_they_were_committed_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake, _ = lake_of_one(spark, tmp_path)
    file = tmp_path / lake.files[0].path
    good = file.read_bytes()
    file.write_bytes(good + b"x")
    with pytest.raises(SetupError, match=rf"it has {len(good) + 1} bytes instead of {len(good)}"):
        read_export(spark, str(tmp_path))
    file.unlink()
    with pytest.raises(SetupError, match="it is missing; restore it from a copy"):
        read_export(spark, str(tmp_path))


def test_what_dead_attempts_have_left_is_removed_by_age(
    spark: SparkSession, tmp_path: Path
) -> None:
    """By the clock of the file system; never what a commit has named, however old."""
    lake, _ = lake_of_one(spark, tmp_path, 1)
    for name, age in (("dead", 3 * 86_400), ("alive", 3600)):
        folder = tmp_path / "data" / name
        (folder / "_temporary").mkdir(parents=True)
        for file in (folder / "a.parquet", folder / "_temporary/b.parquet"):
            file.write_bytes(b"x")
            os.utime(file, times=(file.stat().st_mtime - age,) * 2)
    (tmp_path / "data/dead/_temporary/b.parquet").unlink()
    # Of an attempt that was killed before Spark wrote a file.
    (tmp_path / "data/empty/_temporary/0").mkdir(parents=True)
    (tmp_path / "data/begun/_temporary/0").mkdir(parents=True)
    for name in ("dead/_temporary", "dead", "empty/_temporary/0", "empty/_temporary", "empty"):
        os.utime(tmp_path / "data" / name, times=(1, 1))
    os.utime(tmp_path / "data/begun", times=(1, 1))
    for file in tmp_path.rglob(lake.files[0].path):
        os.utime(file, times=(0, 0))
    assert lake.sweep() == ["dead", "empty"]
    assert (tmp_path / "data/alive").is_dir()
    assert (tmp_path / "data/begun").is_dir()
    assert read_export(spark, str(tmp_path)).count() == 10


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_path_that_holds_something_else_is_refused(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    fill(archive)
    path = tmp_path / "lake"
    (path / "date=2026-03-08").mkdir(parents=True)
    with pytest.raises(SetupError, match=r"contains date=2026-03-08 and is not a Delta table"):
        export_archive(spark, archive.url, str(path))
    (path / "date=2026-03-08").rmdir()
    export_archive(spark, archive.url, str(path), until="2026-03-08")
    with pytest.raises(
        SetupError,
        match=r"its queues is None, but \['other'\] was requested; give each export its own",
    ):
        export_archive(spark, archive.url, str(path), queues=["other"])
    other = tmp_path / "other"
    other.mkdir()
    write_deltalake(str(other), pa.table({"id": [1]}))
    with pytest.raises(SetupError, match="is a Delta table that no export created"):
        export_archive(spark, archive.url, str(other))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("format", 99, "has format 99, but this version reads only format 1"),
        ("windows", None, "of an export is damaged"),
        ("windows", {"last week": {}}, "of an export is damaged"),
        ("windows", {"2026-03-07": {"lake": {"rows": 1}}}, "of an export is damaged"),
        ("covered", [["2026-03-07"]], "of an export is damaged"),
    ],
)
def test_a_damaged_state_is_named(
    spark: SparkSession, tmp_path: Path, part: str, value: Any, message: str
) -> None:
    lake, _ = lake_of_one(spark, tmp_path, 1)
    content = json.loads(lake.state.pack()) | {part: value}
    lake.table.commit(lake.table.write_state(json.dumps(content).encode()), ())
    with pytest.raises(SetupError, match=rf"_state/\d+.json.gz {message}"):
        read_export(spark, str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"{}", b"[", b"\xff"])
def test_a_state_that_cannot_be_read_is_named(
    spark: SparkSession, tmp_path: Path, content: bytes
) -> None:
    lake, _ = lake_of_one(spark, tmp_path, 1)
    lake.table.commit(lake.table.write_state(content), ())
    with pytest.raises(
        SetupError, match=r"of an export is damaged .* or remove it and run sqlbroker"
    ):
        read_export(spark, str(tmp_path))


def test_columns_that_a_table_lacks_are_added_before_a_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A lake of an older version: its rows have NULL there."""
    lake, _ = lake_of_one(spark, tmp_path, 1)
    wider = StructType([*build_lake_schema("day").fields, StructField("new", StringType())])
    lake.table.add_columns(wider)
    lake.load()
    assert lake.table.get_schema().names[-1] == "new"
    put(lake, parse_window("2026-03-08", "day"), 5)
    assert read_export(spark, str(tmp_path)).where("new IS NULL").count() == 15


def test_deletion_vectors_are_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader by the list of files would bring deleted rows back."""
    lake_of_one(spark, tmp_path, 1)
    vectors = pa.table({"filepath": ["a"], "selection_vector": [[False]]})
    monkeypatch.setattr(DeltaTable, "deletion_vectors", lambda _self: vectors)
    with pytest.raises(SetupError, match="has deletion vectors, so reading its listed files"):
        read_export(spark, str(tmp_path))


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_empty_archive_and_wrong_options(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    path = str(tmp_path / "lake")
    with pytest.raises(SetupError, match="window must be one of 'day', 'hour', got 'week'"):
        export_archive(spark, archive.url, path, window="week")  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="verify"):
        export_archive(spark, archive.url, path, verify="no")  # type: ignore[arg-type]
    for look in (read_export, describe_export):
        with pytest.raises(SetupError, match="give the path of an export"):
            look(spark, path)
    result = export_archive(spark, archive.url, path)
    assert (result.windows, result.watermark) == ((), None)
    empty = read_export(spark, path)
    assert empty.columns == [*NAMES, "date"]
    assert empty.count() == 0
    # It lies in a window that is not closed, also if midnight has just passed.
    archive.add({"id": 1, "archived_at": result.horizon + timedelta(days=1)})
    assert export_archive(spark, archive.url, path).windows == ()

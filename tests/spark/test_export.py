"""The export: whole windows, equal to the database's rows."""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy import select

from faststream_sqlbroker.exceptions import ConcurrentLoadError, ExportMismatchError, SetupError
from faststream_sqlbroker.spark import compact_export, describe_export, export_archive, read_export
from faststream_sqlbroker.spark.lake import export
from faststream_sqlbroker.spark.lake.entries import Entry
from faststream_sqlbroker.spark.lake.lake import Lake
from faststream_sqlbroker.spark.lake.row_checksums import (
    NOTHING,
    RowChecksums,
    compute_figures,
    figure_columns,
)
from faststream_sqlbroker.spark.lake.windows import parse_window
from faststream_sqlbroker.spark.load.columns import ARCHIVE_FIELDS
from faststream_sqlbroker.spark.load.schemas import ARCHIVE_SCHEMA
from tests.spark.conftest import Archive
from tests.spark.frames import plain_frame

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to Parquet, compared with the database"
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
        ("2026-03-09", "exported", 0),
        ("2026-03-10", "exported", 1),
    ]
    assert tuple(seen) == result.windows
    assert result.watermark == datetime(2026, 3, 11, tzinfo=timezone.utc)
    assert of_lake(read_export(spark, str(path))) == of_table(archive, result.watermark)
    assert sorted(one.name for one in path.iterdir() if one.name != "_sqlbroker") == [
        "date=2026-03-07",
        "date=2026-03-08",
        "date=2026-03-10",
    ]
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
    assert secret is None or secret not in (path / "_sqlbroker/state.json").read_text()


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
    assert "1 rows came after it was exported" in caplog.text
    rows = read_export(spark, path).select("id").collect()
    assert sorted(row[0] for row in rows) == [1, 2, 3, 4, 5, 6, 70]
    last = export_archive(spark, archive.url, path, since="2026-03-07", until="2026-03-09")
    assert {one.action for one in last.windows} == {"unchanged"}


def change_after_write(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Lake, str, int], None]
) -> list[int]:
    """Call `change` after each time that a window was written; returns how often it was."""
    write = Lake.write
    calls = list[int]()

    def changed(lake: Lake, window: Any, frame: DataFrame) -> str:
        folder = write(lake, window, frame)
        calls.append(len(calls))
        change(lake, folder, len(calls))
        return folder

    monkeypatch.setattr(Lake, "write", changed)
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

    def touch(_lake: Lake, _folder: str, number: int) -> None:
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
        change_after_write(patched, lambda *given: touch(*given) if given[2] == 1 else None)
        assert export_archive(spark, archive.url, path, until="2026-03-09").rows == 4


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_file_that_is_gone_is_caught(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(archive)

    def lose(lake: Lake, folder: str, number: int) -> None:
        for file in (tmp_path / "lake" / folder).glob("*.parquet") if number == 1 else ():
            file.unlink()

    calls = change_after_write(monkeypatch, lose)
    result = export_archive(
        spark, archive.url, str(tmp_path / "lake"), until="2026-03-08", verify="counts"
    )
    assert (result.rows, len(calls)) == (2, 2)
    assert read_export(spark, str(tmp_path / "lake")).count() == 2


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
    assert (tmp_path / "lake/date=2026-03-08/hour=07").is_dir()
    # Earlier ones later: the watermark goes back and the gap is closed next.
    back = export_archive(
        spark, archive.url, path, since="2026-03-08T00:00Z", until="2026-03-08T02:00Z", **given
    )
    assert back.watermark == datetime(2026, 3, 8, 2, tzinfo=timezone.utc)
    on = export_archive(spark, archive.url, path, until="2026-03-08T09:00Z", **given)
    assert [one.name[-2:] for one in on.windows] == ["02", "03", "04", "05", "06", "08"]
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
    result = export_archive(spark, archive.url, str(tmp_path), verify="counts", **given)
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
        if not field.always:
            rows.append(row | {field.name: None})
    frame = plain_frame(
        spark,
        [(n, *(one[name] for name in NAMES)) for n, one in enumerate(rows)],
        "n int, " + ", ".join(f"{field.name} {field.type}" for field in ARCHIVE_FIELDS),
    )
    found = frame.groupBy("n").agg(*figure_columns(checksums=True)).collect()
    sums = {RowChecksums(*(int(value) for value in one[1:])) for one in found}
    assert len(sums) == len(rows) == len(found)
    assert compute_figures(frame, checksums=True) == sum(sums, NOTHING)


def lake_of_one(spark: SparkSession, path: Path, files: int = 3) -> tuple[Lake, Any]:
    """A lake with a window of `files` files, made without a database."""
    lake = Lake(spark, str(path))
    lake.begin({"window": "day", "table": "message_archive"})
    window = parse_window("2026-03-07", "day")
    put(lake, window, 10, files)
    return lake, window


def put(lake: Lake, window: Any, rows: int, files: int = 1) -> None:
    """Bring rows 1 to `rows` into the lake, as an export does."""
    numbers = lake.session.range(1, rows + 1).withColumn("archived_at", F.lit(MARCH))
    known = {"id", "archived_at", "payload"}
    frame = numbers.withColumn("payload", F.lit(b"x")).select(
        *(
            name if name in known else F.lit(None).cast(ARCHIVE_SCHEMA[name].dataType).alias(name)
            for name in NAMES
        )
    )
    figures = compute_figures(frame, checksums=True)
    folder = lake.write(window, frame.repartition(files))
    lake.publish(window, folder, Entry(figures, figures.counts))


def test_two_exports_of_one_path_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    first, window = lake_of_one(spark, tmp_path)
    lake_of_one(spark, tmp_path)
    with pytest.raises(ConcurrentLoadError, match="another process has begun"):
        put(first, window, 20)
    assert Lake(spark, str(tmp_path)).read(window).count() == 10
    # One that was opened before another ended begins from what that one has left.
    early = Lake(spark, str(tmp_path))
    second = Lake(spark, str(tmp_path))
    second.begin(second.need_state()["source"])
    second.note_empty(parse_window("2026-03-08", "day"))
    second.finish()
    early.begin(early.need_state()["source"])
    assert [one.name for one in Lake(spark, str(tmp_path)).windows()] == [
        "2026-03-07",
        "2026-03-08",
    ]


def test_compaction_makes_files_few_and_keeps_every_row(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake, window = lake_of_one(spark, tmp_path)
    before = compute_figures(lake.read(window), checksums=True)
    assert [one.files for one in compact_export(spark, str(tmp_path), since="2026-03-08")] == []
    done = compact_export(spark, str(tmp_path), until="2026-03-08")
    assert [(one.name, one.rows, one.files_before, one.files) for one in done] == [
        ("2026-03-07", 10, 3, 1)
    ]
    assert compute_figures(lake.read(window), checksums=True) == before
    kept = contents(tmp_path)
    assert compact_export(spark, str(tmp_path)) == []
    assert contents(tmp_path) == kept
    assert len(kept) == 1


def test_compaction_refuses_a_window_that_has_lost_a_file(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "PAUSES", ())
    lake_of_one(spark, tmp_path)
    next((tmp_path / "date=2026-03-07").glob("*.parquet")).unlink()
    kept = contents(tmp_path / "date=2026-03-07")
    with pytest.raises(
        SetupError, match=r"window 2026-03-07 of .* has 2 files, and not 3: read again"
    ):
        read_export(spark, str(tmp_path))
    with pytest.raises(ExportMismatchError, match="put the window's folder back"):
        compact_export(spark, str(tmp_path))
    assert contents(tmp_path / "date=2026-03-07") == kept


def test_a_window_counts_when_it_is_recorded(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a folder is copied to its place file by file, a reader finds some of them; it reads
    again."""
    monkeypatch.setattr(export, "time", SimpleNamespace(sleep=lambda _seconds: None))
    lake, _ = lake_of_one(spark, tmp_path)
    half = tmp_path / "date=2026-03-08"
    shutil.copytree(tmp_path / "date=2026-03-07", half)
    next(half.glob("*.parquet")).unlink()
    with pytest.raises(
        SetupError, match=r"date=2026-03-08 of .* has files that are not recorded: read again"
    ):
        read_export(spark, str(tmp_path))

    def move_the_rest(seconds: float) -> None:
        if seconds:
            shutil.rmtree(half)
            put(lake, parse_window("2026-03-08", "day"), 5)

    monkeypatch.setattr(export, "time", SimpleNamespace(sleep=move_the_rest))
    assert read_export(spark, str(tmp_path)).count() == 15


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_windows_unknown_to_the_state_are_never_replaced(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    fill(archive)
    path = tmp_path / "lake"
    (path / "date=2026-03-08").mkdir(parents=True)
    with pytest.raises(SetupError, match=r"has date=2026-03-08 and no _sqlbroker/state.json"):
        export_archive(spark, archive.url, str(path))
    (path / "date=2026-03-08").rmdir()
    export_archive(spark, archive.url, str(path), until="2026-03-08")
    (path / "date=2026-03-08").mkdir()
    with pytest.raises(SetupError, match="does not know it: move it away"):
        export_archive(spark, archive.url, str(path), until="2026-03-09")
    with pytest.raises(
        SetupError, match=r"its queues is None and here it is \['other'\]; give each export its own"
    ):
        export_archive(spark, archive.url, str(path), queues=["other"])
    state = path / "_sqlbroker/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 99}))
    with pytest.raises(SetupError, match="format 99"):
        read_export(spark, str(path))


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_empty_archive_and_wrong_options(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    path = str(tmp_path / "lake")
    with pytest.raises(SetupError, match="window must be one of 'day', 'hour', got 'week'"):
        export_archive(spark, archive.url, path, window="week")  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="verify"):
        export_archive(spark, archive.url, path, verify="no")  # type: ignore[arg-type]
    for look in (read_export, describe_export, compact_export):
        with pytest.raises(SetupError, match="give the path of an export"):
            look(spark, path)
    result = export_archive(spark, archive.url, path)
    assert (result.windows, result.watermark) == ((), None)
    empty = read_export(spark, path)
    assert empty.columns == [*NAMES, "date"]
    assert empty.count() == 0
    # What was archived now lies in a window that is not closed.
    archive.add({"id": 1, "archived_at": result.horizon})
    assert export_archive(spark, archive.url, path).windows == ()

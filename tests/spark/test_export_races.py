"""The export while others change the archive: rows that go while a window is read,
transactions that are open."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import ExportMismatchError
from pyspark_sqlbroker import (
    ExportResult,
    describe_export,
    export_archive,
    read_export,
    verify_export,
)
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.horizon import Horizon, find_horizon
from pyspark_sqlbroker.lake import export, transfer
from pyspark_sqlbroker.lake.delta import DeltaWriter
from pyspark_sqlbroker.lake.lake import Lake
from tests.helpers import eventually
from tests.spark.conftest import Archive
from tests.spark.horizons import archived_at, find, settle
from tests.spark.test_export import MARCH, of_lake, of_table

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to a Delta table, compared with the database"
)

WITHOUT_SNAPSHOTS = pytest.mark.parametrize("kind", ["mariadb", "sqlite"])
HOUR = timedelta(hours=1)


def ids(spark: SparkSession, path: str) -> list[int]:
    """Of the rows that the lake has."""
    return sorted(row.id for row in read_export(spark, path).select("id").collect())


def around(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[int], None],
    *,
    after: bool = False,
    seen: list[Any] | None = None,
) -> list[int]:
    """Call `change` before or after each call of a function of the transfer.

    Returns:
        Numbers of the calls; `seen` gets their last arguments.
    """
    original = getattr(transfer, name)
    calls = list[int]()

    def changed(*given: Any, **options: Any) -> Any:
        calls.append(len(calls) + 1)
        if seen is not None:
            seen.append(given[-1])
        if not after:
            change(calls[-1])
        result = original(*given, **options)
        if after:
            change(calls[-1])
        return result

    monkeypatch.setattr(transfer, name, changed)
    return calls


def first_exports(
    spark: SparkSession,
    archive: Archive,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    step: tuple[Any, str],
    **options: Any,
) -> list[ExportResult]:
    """Two exports to a new path; the second one runs from end to end before a step of the first."""
    owner, name = step
    original = getattr(owner, name)
    results = list[ExportResult]()

    def export() -> None:
        results.append(export_archive(spark, archive.url, path, until="2026-03-09", **options))

    def late(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        export()
        return original(*given, **more)

    monkeypatch.setattr(owner, name, late)
    export()
    return results


FIRST_STEPS = pytest.mark.parametrize(
    "step",
    [(Lake, "prepare"), (DeltaWriter, "create"), (DeltaWriter, "stage"), (DeltaWriter, "commit")],
    ids=lambda step: step[1],
)


@FIRST_STEPS
def test_of_two_first_exports_both_succeed(
    spark: SparkSession,
    new_database: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: tuple[Any, str],
) -> None:
    """Proves D5: also if the other makes the table after this one has looked for it."""
    archive: Archive = new_database("sqlite")
    archive.add(*({"id": n, "archived_at": MARCH + HOUR * 20 * n} for n in (1, 2)))
    path = str(tmp_path / "lake")
    other, this = first_exports(spark, archive, path, monkeypatch, step)
    assert other.watermark == this.watermark == MARCH + timedelta(days=2)
    assert ids(spark, path) == [1, 2]
    assert verify_export(spark, path, url=archive.url).intact


@WITHOUT_SNAPSHOTS
@pytest.mark.parametrize("moment", ["before its read", "before it is counted", "after that"])
def test_a_row_that_goes_while_its_window_is_exported_again_stays_in_the_lake(
    spark: SparkSession,
    new_database: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    moment: str,
) -> None:
    """Proves D5: rows of the lake are never removed, and the figures agree, at the second try if
    need be."""
    archive: Archive = new_database(kind)
    archive.add(*({"id": n, "archived_at": MARCH + HOUR * n} for n in (1, 2, 3)))
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, until="2026-03-08", verify="counts")
    archive.add({"id": 9, "archived_at": MARCH + HOUR})

    def remove(number: int) -> None:
        if number == 1:
            archive.execute("DELETE FROM message_archive WHERE id = 1")

    name = "_scan_rows" if moment == "before its read" else "query_window_checksums"
    with monkeypatch.context() as patched:
        calls = around(patched, name, remove, after=moment == "after that")
        result = export_archive(
            spark, archive.url, path, since=MARCH, until="2026-03-08", verify="counts"
        )
    assert [(one.action, one.rows) for one in result.windows] == [("again", 4)]
    assert len(calls) == (2 if moment == "after that" else 1)
    assert ids(spark, path) == [1, 2, 3, 9]
    last = export_archive(
        spark, archive.url, path, since=MARCH, until="2026-03-08", verify="counts"
    )
    assert {one.action for one in last.windows} <= {"unchanged", "left"}


@WITHOUT_SNAPSHOTS
def test_a_window_that_changes_each_time_is_refused(
    spark: SparkSession,
    new_database: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """The windows before it are in the lake, and nothing of it is."""
    archive: Archive = new_database(kind)
    archive.add(*({"id": n, "archived_at": MARCH + HOUR * 12 * n} for n in range(4)))
    path = str(tmp_path / "lake")

    def remove(number: int) -> None:
        archive.execute("DELETE FROM message_archive WHERE id = :id", id=3 if number == 1 else 2)

    with monkeypatch.context() as patched:
        around(
            patched,
            "query_window_checksums",
            lambda number: remove(number) if number != 2 else None,
        )
        with pytest.raises(ExportMismatchError, match=r"2026-03-08: expected rows=0.*found rows=1"):
            export_archive(spark, archive.url, path, until="2026-03-09", verify="counts")
    assert ids(spark, path) == [0, 1]
    assert describe_export(spark, path).watermark == MARCH + timedelta(days=1)
    archive.add({"id": 5, "archived_at": MARCH + HOUR * 30})
    result = export_archive(spark, archive.url, path, until="2026-03-09", verify="counts")
    assert ids(spark, path) == [0, 1, 5]
    assert result.watermark == MARCH + timedelta(days=2)


@WITHOUT_SNAPSHOTS
def test_a_window_that_changes_each_time_does_not_stop_the_others(
    spark: SparkSession,
    new_database: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Proves D5: windows of its batch and of later ones are in the lake, read by their own size."""
    archive: Archive = new_database(kind)
    archive.add(*({"id": n, "archived_at": MARCH + HOUR * 12 * n} for n in range(8)))
    path = str(tmp_path / "lake")
    options: Any = {"until": "2026-03-11", "verify": "counts", "rows_per_commit": 4}
    gone = {1: 3, 3: 2}

    def remove(number: int) -> None:
        archive.execute("DELETE FROM message_archive WHERE id = :id", id=gone.get(number, -1))

    done = list[str]()
    sizes = list[int]()
    with monkeypatch.context() as patched:
        around(patched, "_scan_rows", lambda _: None, seen=sizes)
        around(patched, "query_window_checksums", remove)
        with pytest.raises(ExportMismatchError, match=r"2026-03-08: expected rows=0.*found rows=1"):
            export_archive(
                spark, archive.url, path, on_window=lambda one: done.append(one.name), **options
            )
    assert done == ["2026-03-07", "2026-03-09", "2026-03-10"]
    assert sizes == [4, 2, 2, 4]
    assert ids(spark, path) == [0, 1, 4, 5, 6, 7]
    assert describe_export(spark, path).watermark == MARCH + timedelta(days=1)
    archive.add({"id": 9, "archived_at": MARCH + HOUR * 30})
    result = export_archive(spark, archive.url, path, **options)
    assert ids(spark, path) == [0, 1, 4, 5, 6, 7, 9]
    assert result.watermark == MARCH + timedelta(days=4)
    assert verify_export(spark, path, url=archive.url).intact


@WITHOUT_SNAPSHOTS
def test_no_export_begins_after_a_first_window_that_changed_each_time(
    spark: SparkSession,
    new_database: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Proves D5: an export without since= begins with the lake's first window."""
    archive: Archive = new_database(kind)
    archive.add(*({"id": n, "archived_at": MARCH + HOUR * 8 * n} for n in range(6)))
    path = str(tmp_path / "lake")

    def remove(number: int) -> None:
        gone = number if number < 3 else -1
        archive.execute("DELETE FROM message_archive WHERE id = :id", id=gone)

    with monkeypatch.context() as patched:
        around(patched, "query_window_checksums", remove)
        with pytest.raises(ExportMismatchError, match="2026-03-07"):
            export_archive(spark, archive.url, path, until="2026-03-09", verify="counts")
    assert ids(spark, path) == []
    result = export_archive(spark, archive.url, path, until="2026-03-09", verify="counts")
    assert [one.name for one in result.windows] == ["2026-03-07", "2026-03-08"]
    assert ids(spark, path) == [0, 3, 4, 5]


@WITHOUT_SNAPSHOTS
def test_a_window_whose_only_row_goes_before_it_is_read_has_no_rows(
    spark: SparkSession,
    new_database: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Proves D5: nothing is committed for it; a row that comes later is exported."""
    archive: Archive = new_database(kind)
    archive.add({"id": 1, "archived_at": MARCH + HOUR})
    path = tmp_path / "lake"
    with monkeypatch.context() as patched:
        around(patched, "_scan_rows", lambda _: archive.execute("DELETE FROM message_archive"))
        result = export_archive(spark, archive.url, str(path), until="2026-03-08")
    assert (result.windows, result.watermark) == ((), MARCH + timedelta(days=1))
    assert [one.name for one in path.rglob("*.parquet")] == []
    assert ids(spark, str(path)) == []
    archive.add({"id": 2, "archived_at": MARCH + HOUR})
    again = export_archive(spark, archive.url, str(path), since=MARCH, until="2026-03-08")
    assert [(one.action, one.rows) for one in again.windows] == [("again", 1)]
    assert ids(spark, str(path)) == [2]


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
async def test_a_window_stays_open_while_a_transaction_may_bring_rows_of_it(
    spark: SparkSession,
    new_database: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Proves D5: past midnight too; once it has committed, the window is exported with its row,
    once."""
    archive: Archive = new_database(kind)
    path = str(tmp_path / "lake")
    midnight = MARCH + timedelta(days=1)
    archive.add({"id": 1, "archived_at": midnight - HOUR})
    with archive.engine.connect() as transaction:
        settle(archive, transaction, 2)
        now = clock(archive)
        monkeypatch.setattr(export, "find_horizon", moved(midnight - now))
        before = archived_at(archive, transaction, 2) + (midnight - now)
        assert before < midnight
        rows = archive.archive
        transaction.execute(rows.update().where(rows.c.id == 2).values(archived_at=before))
        early = export_archive(spark, archive.url, path, safety_lag=0, verify="counts")
        assert (early.windows, early.watermark) == ((), None)
        transaction.commit()
    await eventually(lambda: find(archive.url).time > now)
    result = export_archive(spark, archive.url, path, safety_lag=0, verify="counts")
    assert [(one.name, one.action, one.rows) for one in result.windows] == [
        ("2026-03-07", "exported", 2)
    ]
    assert of_lake(read_export(spark, path)) == of_table(archive, midnight)


def clock(archive: Archive) -> datetime:
    """The database's."""
    database = get_database(parse_address(archive.url))
    with database.connect() as connection:
        return database.get_time(connection)


def moved(by: timedelta) -> Callable[..., Horizon]:
    """`find_horizon`, as if the database's clock were moved by so much; nothing is left for the
    margin."""

    def find_moved(*given: Any, **options: Any) -> Horizon:
        found = find_horizon(*given, **options | {"margin": 0})
        return replace(found, time=found.time + by)

    return find_moved

"""Damaged files of a lake are found, their windows are kept in the database, and read again."""

import json
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from faststream_sqlbroker.cli.app import app
from faststream_sqlbroker.core.times import TICK
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker import (
    erase_messages,
    export_archive,
    prune_archive,
    read_export,
    repair_export,
    verify_export,
)
from pyspark_sqlbroker.lake import repair as module
from pyspark_sqlbroker.lake import transfer
from pyspark_sqlbroker.lake.delta import DataFile
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.windows import ExportWindow
from tests.spark.conftest import START, Archive
from tests.spark.kept_lakes import export_days
from tests.spark.test_export import of_lake, of_table

pytestmark = pytest.mark.capability("Spark: damaged files of a lake found and read again")

OF_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
DAY = timedelta(days=1)


def run(*words: str, **variables: str) -> Any:
    """The command in this process."""
    return CliRunner().invoke(app, ["archive", *words], env={"COLUMNS": "200", **variables})


def made(spark: SparkSession, archive: Archive, path: Path) -> Lake:
    """A lake of three days, each in a file of its own, 1 March first."""
    export_days(spark, archive, path)
    return Lake(spark, str(path))


def reversed_bytes(path: Path) -> None:
    """Other bytes, of the same number."""
    path.write_bytes(path.read_bytes()[::-1])


def without_a_row(path: Path) -> None:
    """A file of Parquet that lacks a row."""
    pq.write_table(pq.read_table(path).slice(1), path)


def test_damage_is_found_kept_from_pruning_and_repaired(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Proves D4 and D5: a changed file, one that lacks a row, and one that is gone."""
    path = tmp_path / "lake"
    lake = made(spark, archive, path)
    whole = verify_export(spark, str(path))
    assert (whole.intact, whole.files, whole.windows, whole.rows) == (True, 3, 3, 15)
    first, second, third = (path / one.path for one in lake.files)
    reversed_bytes(first)
    without_a_row(second)
    third.unlink()
    found = verify_export(spark, str(path))
    assert not found.intact
    assert list(found.damaged) == [one.path for one in lake.files]
    assert list(found.damaged.values())[::2] == [
        "its bytes have changed (SHA-256)",
        "it is missing",
    ]
    assert list(found.differing) == ["2026-03-01", "2026-03-02", "2026-03-03"]
    for file, problem in zip(found.damaged, found.differing.values(), strict=True):
        missing = "5 of its 5 rows are missing, which may have been in "
        assert problem.startswith(f"{missing}{file}: the record says rows=5, ")
    refused = prune_archive(archive.url, exported=str(path), spark=spark)
    assert (refused.rows, archive.count()) == (0, 15)
    done = repair_export(spark, archive.url, str(path))
    assert (done.windows, done.unrepaired) == (dict.fromkeys(found.differing, 5), {})
    assert done.files == tuple(found.damaged)
    assert verify_export(spark, str(path)).intact
    assert of_lake(read_export(spark, str(path))) == of_table(archive, START + DAY * 3)
    again = repair_export(spark, archive.url, str(path))
    assert (again.windows, again.files) == ({}, ())
    assert prune_archive(archive.url, exported=str(path), spark=spark).rows == 15


def test_rows_that_the_database_has_lost_are_never_given_up(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """A window that shares its file with one that cannot be repaired waits for it; a copy helps."""
    archive.add_days(3)
    path = tmp_path / "lake"
    export_archive(spark, archive.url, str(path), until="2026-03-04")
    archive.execute("DELETE FROM message_archive WHERE id IN (1, 2)")
    file = path / Lake(spark, str(path)).files[0].path
    copy = file.read_bytes()
    file.write_bytes(copy[:-1])
    stays = repair_export(spark, archive.url, str(path))
    assert (stays.windows, stays.files) == ({}, ())
    assert list(stays.unrepaired) == ["2026-03-01", "2026-03-02", "2026-03-03"]
    assert re.search(
        r"the record says rows=5, .* intact files have rows=3", stays.unrepaired["2026-03-01"]
    )
    assert "shares a file with" in stays.unrepaired["2026-03-02"]
    with pytest.raises(SetupError, match="sqlbroker archive repair"):
        read_export(spark, str(path))
    assert list(verify_export(spark, str(path)).differing) == list(stays.unrepaired)
    assert prune_archive(archive.url, exported=str(path), spark=spark).rows == 0
    file.write_bytes(copy)
    assert verify_export(spark, str(path)).intact
    assert prune_archive(archive.url, exported=str(path), spark=spark).rows == 13


@OF_SQLITE
def test_a_lake_without_a_lost_file_can_be_read_and_names_what_is_missing(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """The file is taken out of the table by deltalake, as it is nowhere else."""
    path = tmp_path / "lake"
    lake = made(spark, archive, path)
    archive.execute("DELETE FROM message_archive WHERE id IN (1, 2)")
    (path / lake.files[0].path).unlink()
    assert DeltaTable(str(path)).repair()["files_removed"] == [lake.files[0].path]
    assert read_export(spark, str(path)).count() == 10
    for _ in range(2):
        found = verify_export(spark, str(path))
        assert (found.damaged, list(found.differing)) == ({}, ["2026-03-01"])
        assert found.differing["2026-03-01"].startswith(
            "5 of its 5 rows are missing: the record says"
        )
        assert list(repair_export(spark, archive.url, str(path)).unrepaired) == ["2026-03-01"]
        erase_messages(spark, archive.url, str(path), ids=[11], dry_run=False)
    assert read_export(spark, str(path)).count() == 9
    exported = export_archive(spark, archive.url, str(path), since="2026-03-01", until="2026-03-04")
    actions = {one.name: one.action for one in exported.windows}
    assert (actions["2026-03-01"], bool(exported.damaged)) == ("damaged", True)
    pruned = prune_archive(archive.url, exported=str(path), spark=spark)
    assert [one.name for one in pruned.windows if one.refused] == ["2026-03-01"]
    assert archive.ids() == [3, 4, 5]


def test_files_that_reach_into_a_common_window_are_repaired_together() -> None:
    """Neighbours that only touch are not; a file whose times the log does not say reaches into all
    windows."""
    days = [ExportWindow(START + DAY * number, "day") for number in range(6)]
    lake: Any = SimpleNamespace(size="day", list_windows=lambda: days)
    lake.get_file_span = partial(Lake.get_file_span, lake)

    def file(first: int, last: int) -> DataFile:
        return DataFile("", 1, 1, times=(START + DAY * first, START + DAY * (last + 1) - TICK))

    findings: Any = SimpleNamespace(checksums={}, differing=[days[5]])
    found = module._find_damaged_spans(
        lake, findings, [file(0, 1), file(2, 2), file(1, 1), file(3, 4)]
    )
    numbers = [tuple((moment - START) // DAY for moment in span) for span in found]
    assert numbers == [(0, 2), (2, 3), (3, 5), (5, 6)]
    found = module._find_damaged_spans(lake, findings, [file(0, 1), DataFile("", 1, 1)])
    assert found == [(START, START + DAY * 6)]


@OF_SQLITE
def test_what_only_the_lake_has_stays(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Of two files of a window one is damaged; the database has lost a row of the other."""
    path = tmp_path / "lake"
    made(spark, archive, path)
    archive.add({"id": 9, "archived_at": START + timedelta(hours=2)})
    export_archive(spark, archive.url, str(path), since="2026-03-01", until="2026-03-04")
    archive.execute("DELETE FROM message_archive WHERE id = 1")
    before = of_lake(read_export(spark, str(path)))
    late = [one for one in Lake(spark, str(path)).files if one.ids == (9, 9)]
    without_a_row(path / late[0].path)
    done = repair_export(spark, archive.url, str(path))
    assert (done.windows, done.files) == ({"2026-03-01": 6}, (late[0].path,))
    assert of_lake(read_export(spark, str(path))) == before


@OF_SQLITE
def test_a_damaged_window_to_which_a_row_came_late_stays_until_its_file_is_back(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    path = tmp_path / "lake"
    lake = made(spark, archive, path)
    archive.add({"id": 80, "archived_at": START + timedelta(hours=2)})
    file = path / lake.files[0].path
    copy = file.read_bytes()
    reversed_bytes(file)
    done = repair_export(spark, archive.url, str(path))
    assert (done.windows, list(done.unrepaired), done.files) == ({}, ["2026-03-01"], ())
    file.write_bytes(copy)
    again = export_archive(spark, archive.url, str(path), since="2026-03-01", until="2026-03-04")
    assert [one.action for one in again.windows] == ["again", "unchanged", "unchanged"]
    assert of_lake(read_export(spark, str(path))) == of_table(archive, START + DAY * 3)


@OF_SQLITE
@pytest.mark.parametrize("damage", [reversed_bytes, without_a_row, Path.unlink])
def test_a_damaged_file_is_repaired_next_to_copies_of_its_rows(
    spark: SparkSession, archive: Archive, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Another program has appended them. A file of ours had rows of recorded windows only."""
    path = tmp_path / "lake"
    lake = made(spark, archive, path)
    rows = DeltaTable(str(path)).to_pyarrow_table().sort_by("id")
    damage(path / lake.files[0].path)
    write_deltalake(str(path), rows.slice(0, 7), mode="append")
    done = repair_export(spark, archive.url, str(path))
    assert (done.windows, done.unrepaired) == ({"2026-03-01": 5, "2026-03-02": 5}, {})
    assert verify_export(spark, str(path)).intact
    assert of_lake(read_export(spark, str(path))) == of_table(archive, START + DAY * 3)


@OF_SQLITE
def test_a_row_that_goes_before_it_is_read_again_leaves_the_window_damaged(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lake"
    lake = made(spark, archive, path)
    reversed_bytes(path / lake.files[0].path)
    scan = transfer.scan_rows

    def late(*given: Any) -> Any:
        archive.execute("DELETE FROM message_archive WHERE id = 1")
        return scan(*given)

    monkeypatch.setattr(transfer, "scan_rows", late)
    done = repair_export(spark, archive.url, str(path))
    assert (done.windows, list(done.unrepaired), done.files) == ({}, ["2026-03-01"], ())
    assert Lake(spark, str(path)).files == lake.files
    assert len(list((path / "data").iterdir())) == 3


@OF_SQLITE
def test_a_span_and_wrong_paths(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    lake = made(spark, archive, path)
    (path / lake.files[0].path).unlink()
    later = verify_export(spark, str(path), since="2026-03-02")
    assert (later.intact, later.windows) == (True, 2)
    assert not verify_export(spark, str(path), until="2026-03-02").intact
    with pytest.raises(SetupError, match="give the path of an export"):
        verify_export(spark, str(tmp_path / "none"))
    with pytest.raises(SetupError, match="give the path of an export"):
        repair_export(spark, archive.url, str(tmp_path / "none"))


@OF_SQLITE
def test_the_commands(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    """Exit codes: 0 all is well, 1 something differs or stays damaged."""
    path = tmp_path / "lake"
    lake = made(spark, archive, path)
    good = run("verify", str(path))
    assert (good.exit_code, good.exception) == (0, None)
    assert "3 files, 3 windows and 15 rows compared: no differences" in good.output
    (path / lake.files[0].path).unlink()
    bad = run("verify", str(path))
    assert bad.exit_code == 1
    assert f"file {lake.files[0].path}: it is missing" in bad.output
    assert "1 damaged file, 1 differing window" in bad.output
    found = json.loads(run("verify", str(path), "--json").output)
    assert (found["intact"], list(found["differing"])) == (False, ["2026-03-01"])
    later = run("verify", str(path), "--since", "2026-03-02", "--until", "2026-03-03")
    assert "1 window and 5 rows" in later.output
    archive.execute("DELETE FROM message_archive WHERE id = 1")
    stays = run("repair", str(path), SQLBROKER_URL=archive.url)
    assert stays.exit_code == 1
    assert "0 windows repaired, 1 still damaged" in stays.output
    archive.add({"id": 1, "archived_at": START + timedelta(hours=1)})
    done = run("repair", str(path), "--json", SQLBROKER_URL=archive.url)
    assert (done.exit_code, json.loads(done.output)["windows"]) == (0, {"2026-03-01": 5})
    again = run("repair", str(path), SQLBROKER_URL=archive.url)
    assert (again.exit_code, "0 windows repaired" in again.output) == (0, True)

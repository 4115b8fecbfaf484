"""A lake that other programs have written to: nothing is taken for what an export has verified."""

import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession
from sqlalchemy import text

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker import (
    erase_messages,
    export_archive,
    prune_archive,
    read_export,
    repair_export,
    verify_export,
)
from pyspark_sqlbroker.lake.files import Folders
from pyspark_sqlbroker.lake.lake import Lake
from tests.spark.conftest import START, Archive
from tests.spark.kept_lakes import export_days
from tests.spark.test_export import of_lake, of_table

pytestmark = pytest.mark.capability("Spark: damaged files of a lake found and read again")

DAY = timedelta(days=1)
SPAN: dict[str, Any] = {"since": "2026-03-01", "until": "2026-03-04"}


@pytest.fixture
def database() -> str:
    """What is tested is the table."""
    return "sqlite"


def clean_up(path: Path) -> None:
    """Leave of the log a checkpoint and what came after it, as its clean-up does."""
    table = DeltaTable(str(path))
    table.create_checkpoint()
    for one in (path / "_delta_log").glob("*.json"):
        if int(one.stem) < table.version():
            one.unlink()


def lose_state(path: Path) -> None:
    """As a copy of the table does that takes its data alone."""
    shutil.rmtree(path / "_state")


@pytest.mark.parametrize("look", ["prune", "export", "erase"])
def test_files_that_another_program_has_merged_count_as_ours(
    spark: SparkSession, archive: Archive, tmp_path: Path, look: str
) -> None:
    """They lie at the table's root, and may hold the only copy of a row. The table is vacuumed, and
    its log cleaned up."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    before = of_lake(read_export(spark, str(path)))
    archive.execute("DELETE FROM message_archive WHERE id = 1")
    table = DeltaTable(str(path))
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    clean_up(path)
    (merged,) = Lake(spark, str(path)).files
    assert "/" not in merged.path
    assert [one.name for one in path.glob("[!_]*/**/*.parquet")] == []
    assert verify_export(spark, str(path)).intact
    assert of_lake(read_export(spark, str(path))) == before
    done = repair_export(spark, archive.url, str(path))
    assert (done.files, done.windows, done.unrepaired) == ((), {}, {})
    if look == "export":
        found = export_archive(spark, archive.url, str(path), **SPAN)
        assert [one.action for one in found.windows] == ["left", "unchanged", "unchanged"]
        assert (found.damaged, list(Lake(spark, str(path)).state.digests)) == ({}, [merged.path])
    elif look == "erase":
        assert erase_messages(spark, archive.url, str(path), ids=[1], dry_run=False).lake == 1
        assert verify_export(spark, str(path)).rows == 14
        assert not (path / merged.path).exists()
    assert prune_archive(archive.url, exported=str(path), spark=spark).rows == 14


def test_an_export_reads_files_of_other_programs_once(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only what lies in the same windows."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    DeltaTable(str(path)).update(predicate="id = 2", new_values={"id": "2"})
    compared = list[set[str]]()

    def reading(lake: Lake, files: Any) -> Any:
        places = list(files)
        compared.append({one.path for one in places})
        return read_files(lake, places)

    read_files = Lake.read_files
    monkeypatch.setattr(Lake, "read_files", reading)
    for _ in range(2):
        assert export_archive(spark, archive.url, str(path), **SPAN).damaged == {}
    first, *_ = Lake(spark, str(path)).files
    assert compared == [{first.path}]


def test_rows_that_another_program_has_changed_do_not_count_as_ours(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Nor are they written to a file of ours, whose rows would count as compared."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    DeltaTable(str(path)).update(predicate="id = 2", new_values={"queue": "'other'"})
    DeltaTable(str(path)).optimize.compact()
    assert list(verify_export(spark, str(path)).differing) == ["2026-03-01"]
    with pytest.raises(SetupError, match=r"another program wrote it.*nothing was erased"):
        erase_messages(spark, archive.url, str(path), ids=[3], dry_run=False)
    pruned = prune_archive(archive.url, exported=str(path), spark=spark, dry_run=True)
    # The others share its file.
    assert len([one for one in pruned.windows if one.refused]) == 3
    assert len(repair_export(spark, archive.url, str(path)).windows) == 3
    held_in(archive, path, spark)


def held_in(archive: Archive, path: Path, spark: SparkSession) -> None:
    """The lake is intact, and has what the database has of the three days."""
    assert verify_export(spark, str(path)).intact
    assert of_lake(read_export(spark, str(path))) == of_table(archive, START + DAY * 3)


def append(path: Path, rows: Any) -> None:
    """As another program does."""
    write_deltalake(str(path), rows, mode="append")


def test_rows_that_are_appended_again_are_taken_out(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Also where the database has a row that came late, and has lost others."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    rows = DeltaTable(str(path)).to_pyarrow_table()
    append(path, rows.slice(0, 7))
    found = repair_export(spark, archive.url, str(path))
    assert (set(found.windows.values()), found.unrepaired, len(found.files)) == ({5}, {}, 1)
    held_in(archive, path, spark)
    append(path, rows.slice(0, 7))
    archive.add({"id": 99, "archived_at": START})
    found = repair_export(spark, archive.url, str(path))
    assert (set(found.windows.values()), found.unrepaired, len(found.files)) == ({5}, {}, 1)
    export_archive(spark, archive.url, str(path), **SPAN)
    held_in(archive, path, spark)
    append(path, rows.slice(0, 7))
    before = of_table(archive, START + DAY * 3)
    archive.execute("DELETE FROM message_archive WHERE id < 90")
    assert repair_export(spark, archive.url, str(path)).unrepaired == {}
    assert of_lake(read_export(spark, str(path))) == before


def test_rows_without_a_time_are_taken_out(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """They are in no window, so that no figures show them."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    rows = DeltaTable(str(path)).to_pyarrow_table().slice(0, 2)
    time = rows.column_names.index("archived_at")
    field = rows.schema.field(time)
    append(path, rows.set_column(time, field, [[None, rows["archived_at"][1].as_py()]]))
    (strange,) = [one for one in Lake(spark, str(path)).files if "/" not in one.path]
    found = export_archive(spark, archive.url, str(path), **SPAN)
    assert strange.path in found.damaged
    problem = "it has 1 rows without id or archived_at, which no export writes"
    assert verify_export(spark, str(path)).damaged == {strange.path: problem}
    assert repair_export(spark, archive.url, str(path)).files == (strange.path,)
    held_in(archive, path, spark)


def test_rows_that_were_updated_are_read_again(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Where the database has lost a row of the window, the other program's file stays."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    before = of_lake(read_export(spark, str(path)))
    update: dict[str, Any] = {"predicate": "id = 2", "new_values": {"queue": "'other'"}}
    DeltaTable(str(path)).update(**update)
    found = repair_export(spark, archive.url, str(path))
    assert (found.windows, found.unrepaired, len(found.files)) == ({"2026-03-01": 5}, {}, 1)
    held_in(archive, path, spark)
    archive.execute("DELETE FROM message_archive WHERE id = 1")
    version = DeltaTable(str(path)).version()
    DeltaTable(str(path)).update(**update)
    found = repair_export(spark, archive.url, str(path))
    assert (found.windows, list(found.unrepaired), found.files) == ({}, ["2026-03-01"], ())
    assert read_export(spark, str(path)).count() == 15
    DeltaTable(str(path)).restore(version)
    assert of_lake(read_export(spark, str(path))) == before
    assert verify_export(spark, str(path)).intact


def test_updates_of_windows_that_were_only_counted_are_noticed(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """An update changes no count; the figures of the files that were written have all columns."""
    path = tmp_path / "lake"
    export_days(spark, archive, path, verify="counts")
    DeltaTable(str(path)).update(predicate="id = 2", new_values={"queue": "'other'"})
    found = export_archive(spark, archive.url, str(path), verify="counts", **SPAN)
    assert [one.action for one in found.windows] == ["damaged", "unchanged", "unchanged"]
    done = repair_export(spark, archive.url, str(path))
    assert (done.windows, done.unrepaired) == ({"2026-03-01": 5}, {})
    held_in(archive, path, spark)
    version = DeltaTable(str(path)).version()
    DeltaTable(str(path)).update(predicate="id = 12", new_values={"queue": "'other'"})
    archive.execute("DELETE FROM message_archive WHERE id = 11")
    done = repair_export(spark, archive.url, str(path))
    assert (list(done.unrepaired), done.files) == (["2026-03-02"], ())
    DeltaTable(str(path)).restore(version)
    assert verify_export(spark, str(path)).intact


def test_nothing_is_taken_out_that_the_database_cannot_replace(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """One file, merged by another program, has the only copy of a row; others have appended rows
    twice, strange ones, and ones of a window without a record; one is gone."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    archive.execute("DELETE FROM message_archive WHERE id IN (1, 11)")
    version = DeltaTable(str(path)).version()
    rows = DeltaTable(str(path)).to_pyarrow_table().sort_by("id")
    _, second, _ = Lake(spark, str(path)).files
    copy = (path / second.path).read_bytes()
    DeltaTable(str(path)).optimize.compact()
    append(path, rows.slice(0, 1))
    append(path, rows.slice(5, 3).set_column(0, rows.schema.field(0), [[71, 72, 73]]))
    later = rows.slice(0, 1)
    time = later.column_names.index("archived_at")
    moment = later["archived_at"][0].as_py() + DAY * 10
    append(path, later.set_column(time, later.schema.field(time), [[moment]]))
    files = Lake(spark, str(path)).files
    found = repair_export(spark, archive.url, str(path))
    assert (found.windows, found.files) == ({}, ())
    assert list(found.unrepaired) == ["2026-03-01", "2026-03-02", "2026-03-03", "2026-03-11"]
    assert Lake(spark, str(path)).files == files
    DeltaTable(str(path)).restore(version)
    (path / second.path).unlink()
    found = repair_export(spark, archive.url, str(path))
    assert (list(found.unrepaired), found.files) == (["2026-03-02"], ())
    (path / second.path).write_bytes(copy)
    assert verify_export(spark, str(path)).intact
    assert read_export(spark, str(path)).count() == 15


def test_files_are_in_the_order_of_their_times(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """October follows March and the 10th the 9th: only neighbours are merged, and the SHA-256 of
    the latest files are compared."""
    path = str(tmp_path / "lake")
    days = [0, 5, 9, 14, 30, 240]
    archive.add(*({"id": n, "archived_at": START + DAY * day} for n, day in enumerate(days)))
    export_archive(spark, archive.url, path, until="2026-11-20", rows_per_commit=1)
    files = Lake(spark, path).files
    assert [one.times and one.times[0] for one in files] == [START + DAY * day for day in days]
    assert of_lake(read_export(spark, path)) == of_table(archive, START + DAY * 300)


def recorded(archive: Archive) -> dict[str, str]:
    """The window's scope in the database: retention removes those of "lake:shop"."""
    with archive.engine.connect() as connection:
        found = connection.execute(text("SELECT key, scope FROM message_policy_state"))
        return {str(key): str(scope) for key, scope in found}


def test_an_export_notices_rows_that_another_program_has_removed(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """A file that is no longer in the log is not missed on disk; retention must keep its rows."""
    path = tmp_path / "lake"
    export_days(spark, archive, path, record_as="shop")
    assert set(recorded(archive).values()) == {"lake:shop"}
    DeltaTable(str(path)).delete("id > 20")
    found = export_archive(spark, archive.url, str(path), record_as="shop", **SPAN)
    assert [one.action for one in found.windows] == ["unchanged", "unchanged", "damaged"]
    assert found.damaged == {"_delta_log": "the rows of 2026-03-03 differ from the record"}
    assert recorded(archive)["2026-03-03"] == "lake_differs:shop"
    repair_export(spark, archive.url, str(path))
    again = export_archive(spark, archive.url, str(path), record_as="shop", **SPAN)
    assert (again.damaged, {one.action for one in again.windows}) == ({}, {"unchanged"})
    assert recorded(archive)["2026-03-03"] == "lake:shop"
    assert of_lake(read_export(spark, str(path))) == of_table(archive, START + DAY * 3)


def test_a_lake_whose_state_was_lost_is_not_exported_twice(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Without their records, its windows look as if the lake had none."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    lose_state(path)
    assert Lake(spark, str(path)).state.entries == {}
    archive.add({"id": 99, "archived_at": START + DAY * 5})
    given = SPAN | {"until": "2026-03-07"}
    found = export_archive(spark, archive.url, str(path), **given)
    assert [one.action for one in found.windows] == ["damaged", "damaged", "damaged", "exported"]
    done = repair_export(spark, archive.url, str(path))
    assert (set(done.windows.values()), done.unrepaired) == ({5}, {})
    again = export_archive(spark, archive.url, str(path), **given)
    assert {one.action for one in again.windows} == {"unchanged"}
    held = of_table(archive, START + DAY * 6)
    assert of_lake(read_export(spark, str(path))) == held


@pytest.mark.parametrize("lost", [False, True])
def test_an_altered_file_stays_if_no_record_says_what_it_had(
    spark: SparkSession, archive: Archive, tmp_path: Path, *, lost: bool
) -> None:
    """The record of its window is lost; the database has its rows, or has lost them, too."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    lose_state(path)
    files = Lake(spark, str(path)).files
    if lost:
        archive.execute("DELETE FROM message_archive")
    (path / files[0].path).unlink()
    done = repair_export(spark, archive.url, str(path))
    assert done.unrepaired["2026-03-01"].startswith("5 rows of its files may belong to windows")
    assert files[0].path not in done.files
    assert files[0] in Lake(spark, str(path)).files
    assert files[0].path in verify_export(spark, str(path)).damaged


def test_an_erasure_removes_files_that_a_checkpoint_has_forgotten(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Files at the root after a week: another program may still commit what it has written."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    table = DeltaTable(str(path))
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    table.optimize.compact()
    DeltaTable(str(path)).create_checkpoint()
    (live,) = (one.path for one in Lake(spark, str(path)).files)
    of_others = "inner/_delta_log/00000000000000000000.json"
    for name, days in (("old.parquet", 8), ("new.parquet", 6), (of_others, 9)):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")
        moment = time.time() - days * 86_400
        os.utime(path / name, times=(moment, moment))
    assert erase_messages(spark, archive.url, str(path), ids=[999], dry_run=False).files >= 1
    assert {one.name for one in path.rglob("*.parquet") if one.parent == path} == {
        live,
        "new.parquet",
    }
    assert list((path / "data").rglob("*.parquet")) == []
    assert (path / of_others).exists(), "a lake of its own below this one"


def test_an_erasure_that_keeps_files_removes_forgotten_ones(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """They were replaced long ago, though their SHA-256 is still known."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    table = DeltaTable(str(path))
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    table.optimize.compact()
    DeltaTable(str(path)).create_checkpoint()
    for one in (path / "data").rglob("*.parquet"):
        moment = time.time() - 86_400
        os.utime(one, times=(moment, moment))
    assert erase_messages(spark, archive.url, str(path), ids=[999], dry_run=False, keep="1h").files
    assert list((path / "data").rglob("*.parquet")) == []


@pytest.mark.parametrize("name", ["50%20off", "a[1]", "{a,b}", "a*", "a?", "a#b", "a\\b"])
def test_a_path_that_spark_or_deltalake_reads_otherwise_is_refused(
    spark: SparkSession, archive: Archive, tmp_path: Path, name: str
) -> None:
    """Nothing is written before."""
    with pytest.raises(SetupError, match="use a path without"):
        export_archive(spark, archive.url, str(tmp_path / name), **SPAN)
    assert [one for one in tmp_path.iterdir() if one.is_dir()] == []


def test_other_paths_and_a_log_without_a_commit(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """The log is what an export leaves that is killed while it makes the table. The session of the
    caller stays the active one."""
    path = tmp_path / "ünï 50% a+b=c ☃"
    log = path / "_delta_log"
    log.mkdir(parents=True)
    (log / "_commit_1.json.tmp").write_text("")
    spark.createDataFrame([], "id INT")  # makes it the active one
    assert SparkSession.getActiveSession() is spark
    archive.add_days(3)
    export_archive(spark, archive.url, str(path), rows_per_commit=5, **SPAN)
    assert verify_export(spark, str(path)).intact
    assert of_lake(read_export(spark, str(path))) == of_table(archive, START + DAY * 3)
    assert prune_archive(archive.url, exported=str(path), spark=spark).rows == 15
    assert SparkSession.getActiveSession() is spark


def test_folders_that_go_while_they_are_listed_are_left_out(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of another export do, which stages files or has failed."""
    for name in "abc":
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "file").write_text(name)
    folders = Folders(spark, str(tmp_path))
    listed = Folders._iter_entries

    def going(self: Folders, folder: Any) -> Any:
        found = list(listed(self, folder))
        shutil.rmtree(tmp_path / "data" / "b", ignore_errors=True)
        return found

    monkeypatch.setattr(Folders, "_iter_entries", going)
    assert sorted(folders.list_files("data")) == ["data/a/file", "data/c/file"]
    assert folders.list_files("none") == {}


def test_a_state_is_that_of_the_version_that_was_loaded(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Whatever has been committed since."""
    path = tmp_path / "lake"
    export_days(spark, archive, path)
    loaded = Lake(spark, str(path))
    before = loaded.table.read_states()
    archive.add({"id": 99, "archived_at": START + DAY})
    export_archive(spark, archive.url, str(path), **SPAN)
    assert loaded.table.read_states() == before
    assert Lake(spark, str(path)).table.read_states() != before

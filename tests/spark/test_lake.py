"""The commits of a lake: no row is lost or doubled if an export dies at any step."""

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from faststream_sqlbroker.core.loaded_windows import LOADED_SCOPE
from pyspark_sqlbroker import export_archive, prune_archive, read_export, verify_export
from pyspark_sqlbroker.lake.delta import DeltaWriter
from pyspark_sqlbroker.lake.files import Folders
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.records import WindowRecords
from pyspark_sqlbroker.lake.removal import ArchiveRows
from tests.spark.conftest import START, Archive, archived
from tests.spark.test_export import MARCH, of_lake, of_table

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to a Delta table, compared with the database"
)

STEPS = [
    (Folders, "list_files"),
    (Folders, "sha256"),
    (Folders, "delete"),
    (DeltaTable, "create"),
    (DeltaTable, "create_write_transaction"),
    (DeltaWriter, "write_state"),
    (DeltaWriter, "stage"),
    (DeltaWriter, "load"),
    (Lake, "stage"),
    (WindowRecords, "write"),
]


def contents(folder: Path) -> dict[str, bytes | None]:
    """All that lasts below a folder: its folders, and its files with their bytes."""
    return {
        str(one.relative_to(folder)): one.read_bytes() if one.is_file() else None
        for one in folder.rglob("*")
    }


class Moments:
    """What a process that is killed would leave, as copies of a folder.

    Attributes:
        copies: By the copy the step before or after which it was made.
    """

    def __init__(self, folder: Path, into: Path) -> None:
        self.copies: dict[Path, str] = {}
        self._folder = folder
        self._into = into
        self._last: dict[str, bytes | None] | None = None

    def look(self, step: str) -> None:
        """Copy the folder if it is not as it was at the step before: a process that dies where
        nothing has changed leaves the same."""
        now = contents(self._folder)
        if now == self._last:
            return
        self._last = now
        copy = self._into / str(len(self.copies))
        shutil.copytree(self._folder, copy)
        self.copies[copy] = step

    @contextmanager
    def kept(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Look before and after each step."""

        def looking(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def step(*given: Any, **options: Any) -> Any:
                self.look(f"before {name}")
                result = original(*given, **options)
                self.look(f"after {name}")
                return result

            return step

        with monkeypatch.context() as patched:
            for owner, name in STEPS:
                patched.setattr(owner, name, looking(name, getattr(owner, name)))
            yield


def recorded(database: Path) -> list[str]:
    """The windows that an export has recorded for retention."""
    query = "SELECT key FROM message_policy_state WHERE scope = ? ORDER BY key"
    with closing(sqlite3.connect(database)) as connection:
        return [key for (key,) in connection.execute(query, [f"{LOADED_SCOPE}shop"])]


@pytest.mark.timeout(1500)  # dozens of exports
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_an_export_that_dies_at_any_step_loses_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Proves D5: a first export and one with late rows; readers see whole commits, and the next
    export brings the rest. `test_export_killed.py` kills real processes."""
    live = tmp_path / "live"
    live.mkdir()
    archive = Archive(f"sqlite:///{live / 'shop.db'}")
    given: dict[str, Any] = {"since": MARCH, "until": "2026-03-11", "rows_per_commit": 3}
    given |= {"record_as": "shop", "source": "shop"}
    archive.add(*({"id": n, "archived_at": MARCH + timedelta(days=n)} for n in range(2)))
    if again:
        before = given | {"until": "2026-03-09", "record_as": None}
        export_archive(spark, archive.url, str(live / "lake"), **before)
    late = MARCH + timedelta(hours=1)
    archive.add(*({"id": 9 - n, "archived_at": late + timedelta(days=n)} for n in (0, 2, 3)))
    table = of_table(archive, MARCH + timedelta(days=4))
    archive.engine.dispose()
    moments = Moments(live, tmp_path / "moments")
    with moments.kept(monkeypatch):
        export_archive(spark, archive.url, str(live / "lake"), **given)
    moments.look("the end")
    names = {step.partition(" ")[2] for step in moments.copies.values()}
    assert names >= {"list_files", "delete", "write_state", "create_write_transaction", "write"}
    assert ("create" in names) is not again
    for copy, step in moments.copies.items():
        path = str(copy / "lake")
        lake = Lake(spark, path)
        seen = of_lake(read_export(spark, path)) if lake.source else []
        assert [one for one in seen if one not in table] == [], step
        assert len({one[0] for one in seen}) == len(seen), step
        export_archive(spark, f"sqlite:///{copy / 'shop.db'}", path, **given)
        assert of_lake(read_export(spark, path)) == table, step
        days = [f"2026-03-{day:02}" for day in (7, 8, 9, 10)]
        assert recorded(copy / "shop.db") == days, step
    assert seen == table, "the last copy is of an export that came to its end"


class Disk:
    """What is left of a folder when the power fails: what was synced, as it was then."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._synced: dict[Path, bytes | set[str]] = {}

    def sync(self, file: int) -> None:
        """In place of `os.fsync`."""
        path = Path(f"/proc/self/fd/{file}").readlink()
        self._synced[path] = (
            {one.name for one in path.iterdir()} if path.is_dir() else path.read_bytes()
        )

    def fail(self, into: Path) -> None:
        """Make the folder as it is after a failure of the power now."""
        for path in (self._root, *self._root.rglob("*")):
            copy = into / path.relative_to(self._root)
            if path.name not in self._synced.get(path.parent, ()) or not copy.parent.exists():
                continue  # its folder does not name it on the disk
            if path.is_dir():
                copy.mkdir()
            else:
                content = self._synced.get(path, b"")
                assert isinstance(content, bytes)
                copy.write_bytes(content)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_what_counts_as_exported_survives_a_failure_of_the_power(
    spark: SparkSession, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a window is recorded for retention, and when a prune removes its rows: also if another
    program has written the files anew, and if the exporting process dies before it has synced.
    """
    path = tmp_path / "lakes" / "shop"
    disk = Disk(path)
    failures = iter(range(1000))
    synced = True
    seen = list[tuple[str, int]]()

    def fsync(file: int) -> None:
        if synced:
            disk.sync(file)

    def failing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any) -> Any:
            copy = tmp_path / f"after the failure {next(failures)}"
            disk.fail(copy)
            verified = verify_export(spark, str(copy))
            assert (verified.intact, verified.rows) == (True, read_export(spark, str(copy)).count())
            seen.append((name, verified.rows))
            return original(*given)

        return step

    def export(**options: Any) -> None:
        export_archive(spark, archive.url, str(path), until="2026-03-03", **options)

    archive.add(*({"id": n, "archived_at": START + timedelta(hours=n)} for n in (1, 2, 30)))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(WindowRecords, "write", failing("record", WindowRecords.write))
    monkeypatch.setattr(ArchiveRows, "delete", failing("prune", ArchiveRows.delete))
    export(record_as="shop", rows_per_commit=2)
    synced = False
    archive.add({"id": 3, "archived_at": START + timedelta(hours=3)})
    export(since="2026-03-01")
    synced = True
    export(since="2026-03-01", record_as="shop")
    table = DeltaTable(str(path))
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    prune_archive(archive.url, exported=str(path), spark=spark)
    assert seen == [
        *[("record", 2), ("record", 3)],
        *[("record", 4), ("record", 4)],
        *[("prune", 4), ("prune", 4)],
    ]
    assert archive.count() == 0


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
def test_a_failover_that_loses_commits_leaves_the_lake_as_it_is(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """The new server, whose clock is behind, gives the id of a lost message to another one, and
    handles a message again; it never knew a third one."""
    archive.add_days(2)
    path = str(tmp_path / "lake")
    export_archive(spark, archive.url, path, until="2026-03-03")
    again = archived(archived_at=START + timedelta(days=1, hours=4))
    archive.execute("DELETE FROM message_archive WHERE id IN (13, 14, 15)")
    archive.add(
        {"id": 13, "archived_at": START + timedelta(days=1, hours=12)},
        {**again, "id": 14, "archived_at": START + timedelta(days=2, hours=1)},
    )
    behind = verify_export(spark, path, url=archive.url)
    assert (behind.differing, list(behind.missing)) == ({}, ["2026-03-02"])
    pruned = prune_archive(archive.url, exported=path, spark=spark, dry_run=True)
    assert [one.name for one in pruned.windows if one.refused] == ["2026-03-02"]
    done = export_archive(spark, archive.url, path, since="2026-03-02", until="2026-03-04")
    assert [(one.name, one.action, one.rows) for one in done.windows] == [
        ("2026-03-02", "again", 6),
        ("2026-03-03", "exported", 1),
    ]
    assert verify_export(spark, path, url=archive.url).intact
    lake = read_export(spark, path)
    ids = sorted(row.id for row in lake.select("id").collect())
    assert ids == [1, 2, 3, 4, 5, 11, 12, 13, 13, 14, 14, 15]
    messages = lake.select("id", "created_at").distinct().collect()
    assert sorted(row.id for row in messages) == [1, 2, 3, 4, 5, 11, 12, 13, 13, 14, 15]
    assert prune_archive(archive.url, exported=path, spark=spark).rows == 9
    assert archive.ids() == []
    assert read_export(spark, path).count() == 12

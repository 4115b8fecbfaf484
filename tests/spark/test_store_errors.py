"""What a reader, an export and a prune raise where the database or a disk does not do its part."""

import itertools
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from sqlalchemy import make_url
from sqlalchemy.exc import NoResultFound

from faststream_sqlbroker.exceptions import StoreError
from pyspark_sqlbroker import (
    describe_export,
    erase_messages,
    export_archive,
    measure_freshness,
    new_rows,
    open_snapshot,
    prune_archive,
    read_archive,
    read_messages,
    repair_export,
    replay,
    verify_export,
)
from pyspark_sqlbroker.lake import transfer
from pyspark_sqlbroker.lake.delta import DeltaWriter
from pyspark_sqlbroker.lake.files import Folders
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.load.frames import ARCHIVE_SCHEMA
from tests.faults.databases import small_disk
from tests.spark.conftest import START, Archive
from tests.spark.test_export_races import ids
from tools.private import CannotStartError

pytestmark = pytest.mark.capability(
    "Spark: an error of the database, of Spark or of a disk is a StoreError"
)


def entered(context: Any) -> Any:
    """What a context gives."""
    with context as value:
        return value


def test_a_missing_database(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    """Each function says so; the lake and the state of loads stay as they were."""
    lake = tmp_path / "lake"
    archive.add({"id": 1, "archived_at": START})
    named: dict[str, Any] = {"source": "shop"}
    export_archive(spark, archive.url, str(lake), until="2026-03-03", **named)
    version = describe_export(spark, str(lake)).version
    url = make_url(archive.url)
    gone = url.set(database=f"{url.database}_gone").render_as_string(hide_password=False)
    rows = spark.createDataFrame([], ARCHIVE_SCHEMA)
    state = str(tmp_path / "state.json")
    calls: list[Callable[[], Any]] = [
        lambda: read_archive(spark, gone),
        lambda: read_messages(spark, gone),
        lambda: entered(new_rows(spark, gone, state=state)),
        lambda: export_archive(spark, gone, str(lake), **named),
        lambda: export_archive(spark, gone, str(tmp_path / "other")),
        lambda: verify_export(spark, str(lake), url=gone, **named),
        lambda: measure_freshness(spark, gone, str(lake), **named),
        lambda: repair_export(spark, gone, str(lake), **named),
        lambda: prune_archive(gone, exported=str(lake), spark=spark, **named),
        lambda: prune_archive(gone, older_than="1d"),
        lambda: erase_messages(spark, gone, str(lake), ids=[1], **named),
        lambda: replay(rows, gone, job="again"),
    ]
    if archive.kind == "postgresql":
        calls.append(lambda: entered(open_snapshot(gone)))
    for call in calls:
        with pytest.raises(StoreError, match=r"^the database answered: [^\n]*$"):
            call()
    found = describe_export(spark, str(lake))
    assert (found.version, found.rows) == (version, 1)
    assert [one.name for one in tmp_path.iterdir() if one.suffix != ".db"] == ["lake"]


RAISED = "RAISE EXCEPTION 'No space left on device' USING ERRCODE = '53100'"
SIGNALLED = "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1021, MESSAGE_TEXT = 'Disk full'"
FUNCTION = f"RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {RAISED}; END $$"
TRIGGER = "CREATE TRIGGER full_disk BEFORE DELETE ON message_archive FOR EACH ROW"
FULL = {
    "postgresql": (
        f"CREATE FUNCTION full_disk() {FUNCTION}",
        f"{TRIGGER} WHEN (OLD.id = 12) EXECUTE FUNCTION full_disk()",
    ),
    "mariadb": (f"{TRIGGER} IF OLD.id = 12 THEN {SIGNALLED}; END IF",),
    "sqlite": (
        f"{TRIGGER} WHEN OLD.id = 12 BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END",
    ),
}
"""How a database is made to refuse a DELETE as it does when its disk is full."""


def test_a_full_disk_of_the_database(
    spark: SparkSession,
    archive: Archive,
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prune ends; what it has removed before it is in the lake, and the rest is there."""
    monkeypatch.setattr("pyspark_sqlbroker.lake.removal.DELETE_CHUNK", 3)
    archive.add_days(2)
    lake = str(tmp_path / "lake")
    export_archive(spark, archive.url, lake, until="2026-03-03")
    for statement in FULL[database]:
        archive.execute(statement)
    for given in ({"exported": lake, "spark": spark}, {"older_than": 0}):
        with pytest.raises(StoreError, match=r"^the database answered: .*(?i:disk|no space)"):
            prune_archive(archive.url, **given)
        assert archive.ids() == [11, 12, 13, 14, 15]
    assert describe_export(spark, lake).rows == 10
    assert verify_export(spark, lake, url=archive.url).intact


FAULTS = (
    (Lake, "_compute_file_stats", 0, OSError("no space left")),
    (transfer, "query_window_checksums", 0, KeyboardInterrupt()),
    (Folders, "sync", 1, OSError("no space left")),
)
"""Where and how an attempt fails after it has staged files, and how many calls come before: the
last one fails for the state."""


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_attempt_that_fails_leaves_no_files(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """Each retry would add a copy of its rows. A commit that has begun may count, so its files
    stay."""
    lake = tmp_path / "lake"
    archive.add(*({"id": n, "archived_at": START.replace(day=n)} for n in (1, 2)))
    export_archive(spark, archive.url, str(lake), until="2026-03-02")

    def files() -> set[Path]:
        return {one for one in lake.rglob("*") if "_delta_log" not in one.parts}

    def fail(owner: Any, name: str, passed: int, error: BaseException) -> set[Path]:
        calls = itertools.count()
        original = getattr(owner, name)
        stage = DeltaWriter.stage
        staged = list[Any]()

        def step(*given: Any, **options: Any) -> Any:
            if not staged or next(calls) < passed:
                return original(*given, **options)
            raise error

        def keep(*given: Any) -> Any:
            staged.append(stage(*given))
            assert files() > before
            return staged[-1]

        with pytest.MonkeyPatch.context() as patched, pytest.raises((StoreError, type(error))):
            patched.setattr(owner, name, step)
            patched.setattr(DeltaWriter, "stage", keep)
            export_archive(spark, archive.url, str(lake), until="2026-03-03")
        return files() - before

    before = files()
    for fault in FAULTS:
        assert fail(*fault) == set(), fault
    assert fail(DeltaTable, "create_write_transaction", 0, OSError("no answer")) != set()
    export_archive(spark, archive.url, str(lake), until="2026-03-03")
    assert ids(spark, str(lake)) == [1, 2]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_errors_of_the_callers_own_function_pass(
    spark: SparkSession, archive: Archive, tmp_path: Path
) -> None:
    """They are none of the file system that holds the lake, nor of its database."""
    lake = str(tmp_path / "lake")
    archive.add({"id": 1, "archived_at": START})
    errors = iter((FileNotFoundError("report.txt"), NoResultFound("of another database")))
    given: dict[str, Any] = {"on_window": Mock(side_effect=errors)}
    with pytest.raises(FileNotFoundError, match=r"^report\.txt$"):
        export_archive(spark, archive.url, lake, **given)
    with pytest.raises(NoResultFound, match=r"^of another database$"):
        prune_archive(archive.url, exported=lake, spark=spark, **given)
    assert (ids(spark, lake), archive.ids()) == ([1], [])


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_full_disk_of_the_lake(spark: SparkSession, archive: Archive, tmp_path: Path) -> None:
    """What was committed counts, and no more; nothing stays of the attempt. Once there is room,
    the rest comes."""
    archive.add(
        *(
            {"id": n, "archived_at": START.replace(day=n), "payload": os.urandom(2 << 20)}
            for n in (1, 2, 3)
        )
    )
    options: dict[str, Any] = {"until": "2026-03-04", "rows_per_commit": 1}
    with ExitStack() as stack:
        try:
            place = stack.enter_context(small_disk(tmp_path))
        except CannotStartError as error:
            pytest.skip(str(error))
        lake = str(place / "lake")
        room = place / "room"
        room.write_bytes(bytes(5 << 20))
        with pytest.raises(StoreError, match=r"No space left on device"):
            export_archive(spark, archive.url, lake, **options)
        assert ids(spark, lake) == [1]
        assert verify_export(spark, lake, url=archive.url).intact
        files = {one.parent.name for one in (place / "lake/data").rglob("*") if one.is_file()}
        assert len(files) == 1
        assert prune_archive(archive.url, exported=lake, spark=spark).rows == 1
        assert archive.ids() == [2, 3]
        room.unlink()
        export_archive(spark, archive.url, lake, **options)
        assert ids(spark, lake) == [1, 2, 3]
        assert verify_export(spark, lake, url=archive.url).intact

"""The commits of a lake: no row is lost or doubled if an export dies at any step."""

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

from faststream_sqlbroker.core.loaded_windows import LOADED
from pyspark_sqlbroker import export_archive, read_export
from pyspark_sqlbroker.lake.delta import DeltaWriter
from pyspark_sqlbroker.lake.files import Folders
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.records import Records
from tests.spark.conftest import Archive
from tests.spark.test_export import MARCH, of_lake, of_table

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to a Delta table, compared with the database"
)

STEPS = [
    (Folders, "files"),
    (Folders, "sha256"),
    (Folders, "delete"),
    (DeltaTable, "create"),
    (DeltaTable, "create_write_transaction"),
    (DeltaWriter, "_write_state"),
    (DeltaWriter, "stage"),
    (DeltaWriter, "load"),
    (Lake, "stage"),
    (Records, "write"),
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
        return [key for (key,) in connection.execute(query, [f"{LOADED}shop"])]


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
    given: dict[str, Any] = {"since": MARCH, "until": "2026-03-11", "rows_per_commit": 2}
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
    assert names >= {"files", "delete", "_write_state", "create_write_transaction", "write"}
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

"""The commits of a lake: no row is lost or doubled if an export dies at any step."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

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
    (DeltaWriter, "stage"),
    (DeltaWriter, "load"),
    (Lake, "stage"),
    (Records, "write"),
]


class Killed(BaseException):
    """As if the process were gone: nothing that follows runs."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, fatal: int, *, after: bool) -> Iterator[list[str]]:
    """Killed before or after the step of this number; yields the names of those that were
    begun."""
    begun = list[str]()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **options: Any) -> Any:
            begun.append(name)
            number = len(begun)
            if number > fatal or (number == fatal and not after):
                raise Killed
            result = original(*given, **options)
            if number == fatal:
                raise Killed
            return result

        return step

    with monkeypatch.context() as patched:
        for owner, name in STEPS:
            patched.setattr(owner, name, counted(name, getattr(owner, name)))
        try:
            yield begun
        except Killed:
            pass


@pytest.mark.timeout(1500)  # a hundred exports
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_export_that_dies_at_any_step_loses_and_doubles_nothing(
    spark: SparkSession,
    new_database: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: bool,
) -> None:
    """Proves D5: a first export and one with late rows; readers see whole commits, and the next
    export brings the rest."""
    archive: Archive = new_database("sqlite")
    given: dict[str, Any] = {"since": MARCH, "until": "2026-03-11", "rows_per_commit": 2}
    archive.add(*({"id": n, "archived_at": MARCH + timedelta(days=n)} for n in range(2)))
    prepared = tmp_path / "prepared"
    export_archive(spark, archive.url, str(prepared), **given | {"until": "2026-03-09"})
    late = MARCH + timedelta(hours=1)
    archive.add(*({"id": 9 - n, "archived_at": late + timedelta(days=n)} for n in (0, 2, 3)))
    table = of_table(archive, MARCH + timedelta(days=4))
    deaths = list[str]()
    for fatal in range(1, 80):
        path = str(tmp_path / str(fatal))
        if fatal % 2:  # every second one is a first export
            shutil.copytree(prepared, path)
        given["record_as"] = f"shop{fatal}"
        with dying(monkeypatch, fatal, after=after) as steps:
            export_archive(spark, archive.url, path, **given)
        if len(steps) < fatal:
            break
        deaths.append(steps[fatal - 1])
        lake = Lake(spark, path)
        seen = of_lake(read_export(spark, path)) if lake.source else []
        assert [one for one in seen if one not in table] == []
        assert len({one[0] for one in seen}) == len(seen)
        export_archive(spark, archive.url, path, **given)
        assert of_lake(read_export(spark, path)) == table
    else:
        raise AssertionError("it never came to its end")
    assert set(deaths) >= {"files", "sha256", "create_write_transaction", "stage", "load", "write"}
    assert of_lake(read_export(spark, path)) == table

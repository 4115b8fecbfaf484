"""A lake's folders: no window is lost if an export dies or is overtaken at any step."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import ConcurrentLoadError, SetupError
from faststream_sqlbroker.spark.lake import lake as module
from faststream_sqlbroker.spark.lake.folders import Folders
from faststream_sqlbroker.spark.lake.lake import Lake
from tests.spark.test_export import lake_of_one, put

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to Parquet, compared with the database"
)

STEPS = [(Folders, "move"), (Folders, "delete"), (module, "write_json")]


class Killed(BaseException):
    """As if the process were gone: nothing that follows runs."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, fatal: int) -> Iterator[list[str]]:
    """Killed before the operation on files of this number; yields the names of those that were
    begun."""
    begun = list[str]()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any) -> Any:
            begun.append(name)
            if len(begun) >= fatal:
                raise Killed
            return original(*given)

        return step

    with monkeypatch.context() as patched:
        for owner, name in STEPS:
            patched.setattr(owner, name, counted(name, getattr(owner, name)))
        try:
            yield begun
        except Killed:
            pass


def begun(spark: SparkSession, path: Path) -> Lake:
    """The lake at `path`, begun."""
    lake = Lake(spark, str(path))
    lake.begin(lake.need_state()["source"])
    return lake


def check(spark: SparkSession, path: Path, window: Any) -> int:
    """The next run finds a whole window, recorded as it is, and nothing else; returns its rows."""
    found = begun(spark, path)
    entry = found.entry(window)
    assert entry is not None
    sizes = found.folders.sizes(window.folder)
    assert (len(sizes), sum(sizes)) == (entry.files, entry.bytes)
    assert found.read(window).count() == entry.lake.rows
    assert found.need_state()["pending"] is None
    assert found.folders.names("_sqlbroker") == ["state.json"]
    return entry.lake.rows


def test_a_process_that_dies_at_any_step_of_a_replacement_loses_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves D5: killed before each operation on files, the next one finds the old rows or the new,
    and ends it."""
    ends = set()
    prepared = tmp_path / "prepared"
    _, window = lake_of_one(spark, prepared, 1)
    for fatal in range(1, 20):
        path = tmp_path / str(fatal)
        shutil.copytree(prepared, path)
        lake = begun(spark, path)
        with dying(monkeypatch, fatal) as steps:
            put(lake, window, 12)
        ends.add(check(spark, path, window))
        if len(steps) < fatal:
            break
    else:
        raise AssertionError("it never came to its end")
    assert fatal >= 6
    assert ends == {10, 12}


@pytest.mark.parametrize(
    ("lost", "expected"), [(False, 12), (True, 10)], ids=["forwards", "backwards"]
)
def test_a_process_that_dies_at_any_step_of_a_recovery_loses_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool, expected: int
) -> None:
    """One died between the two renames, the next while it ended that: with the new rows, or without
    them."""
    prepared = tmp_path / "prepared"
    _, window = lake_of_one(spark, prepared, 1)
    lake = begun(spark, prepared)
    with dying(monkeypatch, 3) as steps:
        put(lake, window, 12)
    assert steps == ["write_json", "move", "move"]
    if lost:
        shutil.rmtree(prepared / "_sqlbroker/staging")
    for fatal in range(1, 20):
        path = tmp_path / str(fatal)
        shutil.copytree(prepared, path)
        with dying(monkeypatch, fatal) as steps:
            begun(spark, path)
        assert check(spark, path, window) == expected
        if len(steps) < fatal:
            break
    else:
        raise AssertionError("it never came to its end")
    assert fatal >= 5


@pytest.mark.parametrize(
    ("rows", "owner", "name", "number"),
    [
        (12, Folders, "move", 1),
        (12, Folders, "move", 2),
        (12, Lake, "_record", 1),
        (10, Folders, "move", 2),
        (10, Lake, "_record", 1),
    ],
)
def test_an_export_that_is_overtaken_at_any_step_of_a_replacement_loses_nothing(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    owner: Any,
    name: str,
    number: int,
) -> None:
    """By one that has read the state before the replacement was noted in it; more rows, or fewer
    files."""
    first, window = lake_of_one(spark, tmp_path, 2)
    second = Lake(spark, str(tmp_path))
    calls = list[str]()
    original = getattr(owner, name)
    load = second._load
    early = [second._load()]
    monkeypatch.setattr(second, "_load", lambda: early.pop() if early else load())

    def overtaken(*given: Any) -> Any:
        calls.append(name)
        if len(calls) == number:
            second.begin(second.need_state()["source"])
        return original(*given)

    monkeypatch.setattr(owner, name, overtaken)
    with pytest.raises((ConcurrentLoadError, OSError)):
        put(first, window, rows)
    monkeypatch.undo()
    second.finish()
    assert Lake(spark, str(tmp_path)).read(window).count() == 10
    assert check(spark, tmp_path, window) == 10


def test_one_of_two_exports_that_begin_together_stops(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other writes in the same moment is not taken for one's own."""
    first, window = lake_of_one(spark, tmp_path, 1)
    write = module.write_json

    def late(session: SparkSession, path: str, content: dict[str, Any]) -> None:
        write(session, path, content)
        write(session, path, first.need_state())

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_json", late)
        with pytest.raises(ConcurrentLoadError, match="another process has begun"):
            begun(spark, tmp_path)
    put(first, window, 12)
    assert check(spark, tmp_path, window) == 12


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("windows", None),
        ("pending", ...),
        ("source", ...),
        ("windows", {"2026-03-07": {"lake": {"rows": 1}}}),
        ("windows", {"last week": {}}),
        ("pending", {"window": "2026-03-07", "folder": "a", "entry": {}}),
    ],
)
def test_a_damaged_state_is_named(
    spark: SparkSession, tmp_path: Path, part: str, value: Any
) -> None:
    """Every reader names it; `...` is a part that is missing."""
    path = tmp_path / "_sqlbroker/state.json"
    Lake(spark, str(tmp_path)).begin({"window": "day"})
    state = json.loads(path.read_text()) | {part: value}
    path.write_text(json.dumps({name: one for name, one in state.items() if one is not ...}))
    before = path.read_bytes()
    with pytest.raises(
        SetupError, match=r"state\.json is a damaged state of an export \(.*\): restore it"
    ):
        Lake(spark, str(tmp_path))
    assert path.read_bytes() == before

"""Exports that are killed, as real processes, while they replace a window: the next one ends what was begun."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.spark import export, export_archive, read_export
from tests.spark.dying_export import STEPS
from tests.spark.test_export import MARCH, of_lake, of_table

pytestmark = pytest.mark.capability("Spark: the archive exported to Parquet, compared with the database")

DAY: dict[str, Any] = {"since": "2026-03-07", "until": "2026-03-08", "verify": "counts"}
FOUND = {
    "it is noted": (True, False),
    "between the renames": (False, True),
    "before it is recorded": (True, True),
}
"""Whether there is a folder in the window's place, and the one that it replaces aside."""


def kill_exports(url: str, paths: Iterable[Path]) -> None:
    """Export to each path until the step of its name; all at once, as each starts a Java."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.spark.dying_export", url, str(path), path.name],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for path in paths
    ]
    for process in running:
        output = process.communicate()[0]
        assert process.returncode == -signal.SIGKILL, output


@pytest.mark.timeout(300)  # three Javas, on a machine that may be busy
def test_an_export_that_is_killed_while_it_replaces_a_window_is_ended_by_the_next(
    spark: SparkSession, new_database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves D5: no row is lost or doubled, and readers see the old window or the new one or are told to wait."""
    monkeypatch.setattr(export, "PAUSES", ())
    archive, prepared = new_database("sqlite"), tmp_path / "prepared"
    archive.add(*({"id": n, "archived_at": MARCH + timedelta(hours=n)} for n in (1, 2, 3)))
    export_archive(spark, archive.url, str(prepared), **DAY)
    archive.execute("DELETE FROM message_archive WHERE id = 1")
    archive.add({"id": 4, "archived_at": MARCH})
    gone = of_lake(read_export(spark, str(prepared)).where("id = 1"))
    paths = [tmp_path / step for step in STEPS]
    for path in paths:
        shutil.copytree(prepared, path)
    kill_exports(archive.url, paths)
    for path in paths:
        pending = json.loads((path / "_sqlbroker/state.json").read_text())["pending"]
        there = (path / "date=2026-03-07").exists(), (path / pending["aside"]).exists()
        assert there == FOUND[path.name], path.name
        try:
            assert read_export(spark, str(path)).count() in (3, 4)
        except SetupError:
            assert not there[0]
        result = export_archive(spark, archive.url, str(path), **DAY)
        assert [(one.action, one.rows, one.files) for one in result.windows] == [("unchanged", 4, 1)]
        assert of_lake(read_export(spark, str(path))) == gone + of_table(archive, MARCH + timedelta(days=1))
        assert [one.name for one in (path / "_sqlbroker").iterdir()] == ["state.json"]

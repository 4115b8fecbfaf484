"""An export that is killed, as a real process, while it replaces a window: the next one ends what
was begun."""

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.spark import export_archive, read_export
from faststream_sqlbroker.spark.lake import export
from tests.spark.test_export import MARCH, of_lake, of_table

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to Parquet, compared with the database"
)

DAY: dict[str, Any] = {"since": "2026-03-07", "until": "2026-03-08", "verify": "counts"}


def kill_export(url: str, path: Path) -> None:
    """Export to `path` until the old folder is aside and the new one not yet in its place."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.dying_export", url, str(path)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, output


@pytest.mark.timeout(300)  # a Java of its own, on a machine that may be busy
def test_an_export_that_is_killed_while_it_replaces_a_window_is_ended_by_the_next(
    spark: SparkSession, new_database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves D5: no row is lost or doubled, and readers are told to wait; tests/spark/test_lake.py
    dies at every step."""
    monkeypatch.setattr(export, "PAUSES", ())
    archive = new_database("sqlite")
    path = tmp_path / "lake"
    archive.add(*({"id": n, "archived_at": MARCH + timedelta(hours=n)} for n in (1, 2, 3)))
    export_archive(spark, archive.url, str(path), **DAY)
    archive.execute("DELETE FROM message_archive WHERE id = 1")
    archive.add({"id": 4, "archived_at": MARCH})
    gone = of_lake(read_export(spark, str(path)).where("id = 1"))
    kill_export(archive.url, path)
    pending = json.loads((path / "_sqlbroker/state.json").read_text())["pending"]
    assert not (path / "date=2026-03-07").exists()
    assert (path / pending["aside"]).exists()
    with pytest.raises(SetupError):
        read_export(spark, str(path))
    result = export_archive(spark, archive.url, str(path), **DAY)
    assert [(one.action, one.rows, one.files) for one in result.windows] == [("unchanged", 4, 1)]
    assert of_lake(read_export(spark, str(path))) == gone + of_table(
        archive, MARCH + timedelta(days=1)
    )
    assert [one.name for one in (path / "_sqlbroker").iterdir()] == ["state.json"]

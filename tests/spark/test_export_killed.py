"""An export that is killed, as a real process, at each step of a commit: the next one brings the
rest.
"""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from faststream_sqlbroker.spark import export_archive, read_export
from tests.spark.conftest import Archive
from tests.spark.dying_export import STEPS
from tests.spark.test_export import MARCH, of_lake, of_table

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to a Delta table, compared with the database"
)


def kill_export(archive: Archive, path: Path, step: str) -> None:
    """Export to `path` until `step`."""
    root = Path(__file__).parents[2]
    url = archive.engine.url.render_as_string(hide_password=False)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.dying_export", url, str(path), step],
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
@pytest.mark.parametrize("step", ["after staging", "after the commit"])
def test_an_export_that_is_killed_is_ended_by_the_next(
    spark: SparkSession, new_database: Any, tmp_path: Path, step: str
) -> None:
    """Proves D5: a row that the database has lost stays, late rows come once."""
    assert step in STEPS
    archive = new_database("sqlite")
    path = tmp_path / "lake"
    archive.add(*({"id": n, "archived_at": MARCH + timedelta(hours=n)} for n in (1, 2, 3)))
    given: dict[str, Any] = {"since": MARCH, "until": "2026-03-08"}
    export_archive(spark, archive.url, str(path), **given)
    archive.execute("DELETE FROM message_archive WHERE id = 1")
    archive.add({"id": 4, "archived_at": MARCH})
    gone = of_lake(read_export(spark, str(path)).where("id = 1"))
    kill_export(archive, path, step)
    there = read_export(spark, str(path)).count()
    assert there == (4 if step == "after the commit" else 3)
    result = export_archive(spark, archive.url, str(path), **given)
    assert [one.rows for one in result.windows] == [4]
    assert of_lake(read_export(spark, str(path))) == gone + of_table(
        archive, MARCH + timedelta(days=1)
    )

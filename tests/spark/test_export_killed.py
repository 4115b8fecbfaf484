"""An export that is killed, as a real process, at each step of a commit: the next one brings the
rest.
"""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.dying_export import STEPS
from tests.spark.kill_rounds import Rounds

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to a Delta table, compared with the database"
)


@pytest.mark.timeout(600)  # up to two Javas of their own, on a machine that may be busy
@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("postgresql", ["after staging", "after the commit"]),
        ("mariadb", ["before the commit"]),
    ],
)
def test_an_export_that_is_killed_is_ended_by_the_next(
    spark: SparkSession, new_database: Any, tmp_path: Path, kind: str, steps: list[str]
) -> None:
    """Proves D5: rows that the database has lost stay, late ones and those that are archived again
    come once; no output has the password. A round costs a Java: `just test-lake-kills` runs more of
    them on each database, with other exports at the same time. What a kill leaves of SQLite's file
    is copied at each step in `test_lake.py`."""
    rounds = Rounds(spark, new_database(kind), tmp_path / "lake", seed=1, days=2)
    assert set(steps) < set(STEPS)
    for step in steps:
        rounds.round(step)
    assert rounds.deaths == dict.fromkeys(steps, 1)

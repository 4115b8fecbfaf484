"""Lakes that earlier versions of the code have written go on as they are.

Each folder of `lakes` was written by the code of a commit, from `Archive.add_days(2)` on SQLite,
by two exports with `source="shop"`.
"""

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pyspark_sqlbroker import export_archive, prune_archive, read_export, verify_export
from pyspark_sqlbroker.lake.lake import Lake
from tests.spark.conftest import START, Archive
from tests.spark.test_export import of_lake, of_table

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to a Delta table, compared with the database"
)
LAKES = Path(__file__).parent / "lakes"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("layout", ["notes", "states"])
def test_a_lake_of_earlier_code_is_read_exported_to_verified_and_pruned_by(
    spark: SparkSession, archive: Archive, tmp_path: Path, layout: str
) -> None:
    """`notes`: records in the log's commits (08e925c4); `states`: files next to it (4a1adeab)."""
    path = tmp_path / "lake"
    shutil.copytree(LAKES / layout, path)
    archive.add_days(3)
    held = of_table(archive, START.replace(month=4))
    assert of_lake(read_export(spark, str(path))) == held[:10]
    assert verify_export(spark, str(path)).intact
    span = {"since": "2026-03-01", "until": "2026-03-04", "source": "shop"}
    done = export_archive(spark, archive.url, str(path), record_as="shop", **span)
    assert [one.action for one in done.windows] == ["unchanged", "unchanged", "exported"]
    assert Lake(spark, str(path)).state.digests.keys() == {
        one.path for one in Lake(spark, str(path)).files
    }
    verified = verify_export(spark, str(path))
    assert (verified.intact, verified.rows) == (True, 15)
    prune_archive(archive.url, exported=str(path), spark=spark, source="shop")
    assert archive.count() == 0
    assert of_lake(read_export(spark, str(path))) == held

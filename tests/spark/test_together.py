"""Exports of one path that run at the same time: nothing is stubbed, the interleaving is the
machine's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import ConcurrentLoadError
from pyspark_sqlbroker import export_archive, read_export
from tests.spark.test_export import MARCH, UNTIL, fill, of_lake, of_table

pytestmark = pytest.mark.capability(
    "Spark: the archive exported to a Delta table, compared with the database"
)

RUNS = 3
WINDOWS_TO_REPLACE = (0, 1, 3)


@contextmanager
def whatever_happens(event: Event) -> Iterator[None]:
    try:
        yield
    finally:
        event.set()


@pytest.mark.parametrize("begin", ["together", "within"])
def test_exports_of_one_path_at_once_lose_nothing_and_double_nothing(
    spark: SparkSession, new_database: Any, tmp_path: Path, begin: str
) -> None:
    """Proves D5: they replace the same windows, from the start or one within another; one alone
    then ends it."""
    archive = new_database("sqlite")
    path = str(tmp_path / "lake")
    fill(archive)
    export_archive(spark, archive.url, path, until=UNTIL)
    late = [
        {"id": 100 + day, "archived_at": MARCH + timedelta(days=day)} for day in WINDOWS_TO_REPLACE
    ]
    archive.add(*late)
    starts = [Event() for _ in range(RUNS + 1)]
    starts[0].set()

    def run(number: int) -> str:
        mine = starts[number]
        next_one = starts[number + 1]
        if begin == "within":
            assert mine.wait(120)
        with whatever_happens(next_one):
            try:
                export_archive(
                    spark,
                    archive.url,
                    path,
                    since=MARCH,
                    until=UNTIL,
                    on_window=lambda _: next_one.set(),
                )
            except ConcurrentLoadError:
                return "overtaken"
        return "done"

    with ThreadPoolExecutor(RUNS) as pool:
        ended = list(pool.map(run, range(RUNS)))
    result = export_archive(spark, archive.url, path, since=MARCH, until=UNTIL)
    assert result.watermark is not None
    assert of_lake(read_export(spark, path)) == of_table(archive, result.watermark)
    assert "done" in ended, "the one that began last has no other to stop for"

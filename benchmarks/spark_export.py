"""How long the first export of an archive takes, compared with a plain copy of the same rows.

    python -m benchmarks.spark_export --rows 500000 --window day

The rows of PostgreSQL's archive are spread over a year. The copy is `read_archive` and Spark's own
Parquet, without a comparison with the database. Both take turns.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

from pyspark.sql import SparkSession
from sqlalchemy import create_engine, make_url, text

from benchmarks.spark_fill import fill_archive
from pyspark_sqlbroker import build_session, export_archive, read_archive
from tools.java import install_spark

ADDRESS = "SQLBROKER_TEST_POSTGRESQL_URL"
YEAR = 365 * 86_400


def main() -> None:
    """Print the seconds of both, and the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--window", choices=("day", "hour"), default="day")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if reason := install_spark("postgresql"):
        parser.error(reason)
    admin = make_url(os.environ[ADDRESS])
    name = f"sqlbroker_export_{os.getpid()}"
    engine = create_engine(admin.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    url = admin.set(drivername="postgresql", database=name).render_as_string(hide_password=False)
    spark = build_session("export", databases=["postgresql"], master="local[2]")
    try:
        fill_archive(url, "postgresql", given.rows)
        _spread(url, given.rows)
        _compare(spark, url, given.window, given.rounds)
    finally:
        spark.stop()
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))


def _spread(url: str, rows: int) -> None:
    """Over the year 2025, in the order of their ids."""
    engine = create_engine(
        make_url(url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        connection.execute(
            text(
                "UPDATE message_archive SET archived_at = timestamptz '2025-01-01 00:00+00' "
                "+ id * CAST(:step AS double precision) * interval '1 second'"
            ),
            {"step": (YEAR - 1) / rows},
        )
        connection.execute(text("VACUUM FULL ANALYZE message_archive"))


def _compare(spark: SparkSession, url: str, window: str, rounds: int) -> None:
    copies = list[float]()
    exports = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            copy = f"{folder}/copy{number}"
            copies.append(_timed(lambda: read_archive(spark, url).write.parquet(copy)))  # noqa: B023
            lake = f"{folder}/lake{number}"
            exports.append(
                _timed(lambda: export_archive(spark, url, lake, window=window))  # noqa: B023
            )
            _say(f"round {number + 1}: copy {copies[-1]:.1f} s, export {exports[-1]:.1f} s")
        again = _timed(lambda: export_archive(spark, url, lake, window=window))
    ratio = median(exports) / median(copies)
    _say(f"{window}s: medians {median(copies):.1f} s and {median(exports):.1f} s: {ratio:.2f}")
    _say(f"a second export, which finds nothing: {again:.1f} s")


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""One Spark session that reads what it is told, line by line: python -m benchmarks.spark_runner
HEAP.

A line of JSON on stdin is one load: {"way": "ours" | "plain" | "format", "url": …, "partitions": …,
"count": …}; the answer is a line of JSON with the seconds.
"""

import json
import sys
import time
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from faststream_sqlbroker.spark import build_session, read_archive
from faststream_sqlbroker.spark.address import parse_address
from faststream_sqlbroker.spark.drivers import DRIVERS


def ours(spark: SparkSession, load: dict[str, Any]) -> DataFrame:
    """By `read_archive`."""
    return read_archive(spark, load["url"], num_partitions=load["partitions"])


def plain(spark: SparkSession, load: dict[str, Any]) -> DataFrame:
    """As Spark's documentation shows it, nothing tuned; only what does not work without."""
    address = parse_address(load["url"])
    options = dict(address.properties) | {
        "driver": DRIVERS[address.kind].class_name,
        "dbtable": "message_archive",
    }
    options["url"] = address.jdbc_url.partition("?")[0]
    if address.kind == "mysql":
        options["url"] += "?permitMysqlScheme"  # the driver refuses the URL else
    if address.kind == "sqlite":
        options["customSchema"] = "headers STRING"  # is taken for a number else
    return spark.read.format("jdbc").options(**options).load()


def data_source(spark: SparkSession, load: dict[str, Any]) -> DataFrame:
    """By `format("sqlbroker")`: Python workers and Arrow."""
    options = {"url": load["url"], "numPartitions": load["partitions"]}
    return spark.read.format("sqlbroker").options(**options).load()


WAYS = {"ours": ours, "plain": plain, "format": data_source}


def main() -> None:
    """Answer line by line until stdin ends."""
    config = {
        "spark.driver.memory": sys.argv[1],
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": "-Duser.timezone=UTC",
    }
    spark = build_session(
        "bench", databases=("postgresql", "mysql", "sqlite"), master="local[2]", config=config
    )
    spark.sparkContext.setLogLevel("ERROR")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        load = json.loads(line)
        begin = time.perf_counter()
        frame = WAYS[load["way"]](spark, load)
        # Every column of every row is decoded, and none kept.
        frame.write.format("noop").mode("overwrite").save()
        seconds = time.perf_counter() - begin
        if load.get("check") and frame.count() != load["count"]:
            sys.exit(f"{frame.count()} rows in place of {load['count']}")
        print(json.dumps({"seconds": seconds}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()

"""One Spark session that reads what it is told, line by line: python -m benchmarks.spark_runner
HEAP [MASTER EXECUTORS].

With a master it runs on that cluster, in so many executors of one core each. A line of JSON on
stdin is one load: {"way": "ours" | "plain" | "format", "url": …, "partitions": …, "count": …}; with
"lake", a folder, the way "export" writes the archive's rows until "until" to it as a Delta table.
The answer is a line of JSON with the seconds.
"""

import json
import sys
import time
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from pyspark_sqlbroker import build_session, export_archive, read_archive
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.drivers import DRIVERS


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


def take(spark: SparkSession, load: dict[str, Any]) -> None:
    """Run one load to its end."""
    if load["way"] == "export":
        written = export_archive(spark, load["url"], load["lake"], until=load["until"]).rows
        if written != load["count"]:
            sys.exit(f"{written} rows exported in place of {load['count']}")
        return
    frame = WAYS[load["way"]](spark, load)
    # Every column of every row is decoded, and none kept.
    frame.write.format("noop").mode("overwrite").save()


def on_cluster(executors: str) -> dict[str, str]:
    """The settings of a session that gets so many executors."""
    return {
        "spark.cores.max": executors,
        "spark.executor.cores": "1",
        "spark.executor.memory": "1g",
        "spark.executor.extraJavaOptions": "-Duser.timezone=UTC",
        "spark.driver.host": "127.0.0.1",
        # Tasks wait for all executors, or the first run is one executor's.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    }


def main() -> None:
    """Answer line by line until stdin ends."""
    heap, *cluster = sys.argv[1:]
    config = {
        "spark.driver.memory": heap,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": "-Duser.timezone=UTC",
    }
    master = "local[2]"
    if cluster:
        master = cluster[0]
        config |= on_cluster(cluster[1])
    spark = build_session(
        "bench", databases=("postgresql", "mysql", "sqlite"), master=master, config=config
    )
    spark.sparkContext.setLogLevel("ERROR")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        load = json.loads(line)
        begin = time.perf_counter()
        take(spark, load)
        seconds = time.perf_counter() - begin
        if load.get("check"):
            _check(spark, load)
        print(json.dumps({"seconds": seconds}), flush=True)
    spark.stop()


def _check(spark: SparkSession, load: dict[str, Any]) -> None:
    """An export has checked its own count."""
    if load["way"] in WAYS and (found := WAYS[load["way"]](spark, load).count()) != load["count"]:
        sys.exit(f"{found} rows in place of {load['count']}")


if __name__ == "__main__":
    main()

"""A nightly Spark job: new rows, whole days, a stream, and failed messages once more.

spark-submit runs it as docs/howto/spark.md says. DB_URL is the database's address, LAKE a folder
that the driver and every executor reach.
"""

import os

from faststream_sqlbroker.spark import (
    build_session,
    export_archive,
    new_rows,
    read_archive,
    replay,
)


def main() -> None:
    """Run every step once and print what it has done."""
    url = os.environ["DB_URL"]
    lake = os.environ["LAKE"]
    spark = build_session("nightly")
    exported = export_archive(spark, url, f"{lake}/days")
    print(f"exported: {exported.rows} rows")
    with new_rows(spark, url, state=f"{lake}/new_rows.json") as load:
        load.frame.write.mode("overwrite").parquet(f"{lake}/loads/{load.name}")
    print(f"loaded: {spark.read.parquet(f'{lake}/loads/{load.name}').count()} rows")
    if os.environ.get("PYTHON_IN_EXECUTORS", "yes") == "yes":
        archived = spark.readStream.format("sqlbroker").option("url", url).load()
        stream = archived.writeStream.option("checkpointLocation", f"{lake}/checkpoint")
        stream.trigger(availableNow=True).start(f"{lake}/stream").awaitTermination()
        print(f"streamed: {spark.read.parquet(f'{lake}/stream').count()} rows")
        failed = read_archive(spark, url, states=["failed"])
        again = replay(failed, url, job="nightly", dry_run=False)
        print(f"replayed: {again.messages} messages, {again.already} before")
    spark.stop()


if __name__ == "__main__":
    main()

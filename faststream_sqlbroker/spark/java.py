"""Spark's own Java, where there is one."""

from typing import Any

from pyspark.sql import SparkSession


def java_of(spark: SparkSession) -> Any:
    """Py4J's view of the driver's Java; None with Spark Connect, which does not show it.

    Ask it for classes by their whole name, as in `getattr(java, "java.util.TimeZone")`: for each part of
    `java.java.util` it would look through all of Spark's jars for a class of that name, some 20 ms each.
    """
    context = getattr(spark, "_sc", None)
    return None if context is None else context._jvm  # noqa: SLF001 - the only way to it

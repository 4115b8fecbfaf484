"""Build a Spark session with all settings that must be made before Java starts."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.drivers import (
    DRIVERS,
    find_jar,
    get_java,
    parse_kinds,
    require_jar,
    require_java,
    to_paths,
)
from pyspark_sqlbroker.source import DefaultSource

UTC_OPTION = "-Duser.timezone=UTC"
_LIST_SEPARATORS = {
    "spark.jars": ",",
    "spark.jars.packages": ",",
    "spark.driver.extraJavaOptions": " ",
    "spark.executor.extraJavaOptions": " ",
}
"""Settings that hold several values, and the separator between the values."""


def build_session(
    app_name: str = "faststream_sqlbroker",
    *,
    databases: str | Iterable[str] | None = None,
    master: str | None = None,
    jars: str | Path | Sequence[str | Path] = (),
    packages: bool = False,
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start (or get) a Spark session that can read the broker's tables.

    The session has the JDBC drivers, uses UTC in Java and in Spark, reads directory names such as
    `queue=00123` as text, overwrites Parquet partition by partition, and runs Python workers with
    this Python.

    Args:
        app_name: The application's name.
        databases: "postgresql", "mysql" (and MariaDB), "sqlite", one or several; each must have its
            driver. None takes all drivers that are found.
        master: Such as "local[*]"; None uses spark-submit's master, else "local[*]".
        jars: Paths of JDBC drivers; other drivers are searched in SQLBROKER_SPARK_JARS, Debian's
            folder and Maven's cache, in this order.
        packages: Let Spark fetch drivers that were not found from its package repositories.
        config: More of Spark's settings; they win, also over those of spark-submit.

    Returns:
        The session. A running session is returned unchanged, if it has the drivers. Settings of
        spark-submit stay: its jars and Java options are extended, its other settings win.

    Raises:
        SetupError: Java is missing, older than 17 or too new for this Spark, a driver is missing or
            too old, an unknown database, or Java is running already and was started without the
            drivers. The session runs on then.
    """
    kinds = parse_kinds(databases)
    running = _get_running()
    required_kinds = kinds if databases is not None else []
    if running is not None:
        _require_drivers(running, required_kinds)
        register_format(running)
        return running
    require_java()
    paths, coordinates = _resolve(
        kinds, to_paths(jars), packages=packages, strict=databases is not None
    )
    # Otherwise workers would run the python3 of PATH, which may lack pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = merge_settings(_build_settings(paths, coordinates), _get_submitted()) | dict(
        config or {}
    )
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    # Java outlives a stopped session, and cannot load jars that are added later.
    _require_drivers(session, required_kinds)
    register_format(session)
    return session


def register_format(spark: SparkSession) -> None:
    """Register the format "sqlbroker" in the session.

    Spark finds the format by itself if the environment variable PYSPARK_PYTHON of its Java names a
    Python that has this package. spark-submit's `spark.pyspark.python` does not count.
    """
    java = get_java(spark)
    if java is None or getattr(java, "java.lang.System").getenv("PYSPARK_PYTHON"):
        return
    manager = spark._jsparkSession.sessionState().dataSourceManager()  # noqa: SLF001 - no public way
    if not manager.dataSourceExists(DefaultSource.name()):
        spark.dataSource.register(DefaultSource)


def _get_running() -> SparkSession | None:
    """Return the session of this thread, else the session that another thread started.

    None if there is no session, for which Spark raises an error.
    """
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


def _get_submitted() -> dict[str, str]:
    """Return the settings of spark-submit; empty if spark-submit did not start this Java."""
    # Without a running Java this would start Java before its options are set.
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    SparkContext._ensure_initialized()  # noqa: SLF001 - else SparkConf does not see that Java
    return dict(SparkConf().getAll())


def merge_settings(defaults: Mapping[str, str], submitted: Mapping[str, str]) -> dict[str, str]:
    """Merge `defaults` with the `submitted` settings, which win.

    Lists are joined, defaults first: of two equal Java options the last one wins.
    """
    values = {
        name: [value for value in (defaults[name], submitted.get(name)) if value]
        for name in defaults
    }
    joined = {
        name: separator.join(values[name])
        for name, separator in _LIST_SEPARATORS.items()
        if name in values
    }
    return {name: values[-1] for name, values in values.items()} | joined


def _resolve(
    kinds: list[str], jars: list[Path], *, packages: bool, strict: bool
) -> tuple[list[str], list[str]]:
    """Return the paths of jars, and the Maven coordinates of drivers that Spark is to fetch.

    With `strict`, when the user has named the databases, a missing driver is an error, unless Spark
    may fetch it as a package.
    """
    paths = [str(jar.resolve()) for jar in jars]
    coordinates = []
    for kind in kinds:
        find = require_jar if strict and not packages else find_jar
        jar = find(kind, jars)
        if jar is not None:
            paths.append(str(jar.path.resolve()))
        elif packages:
            coordinates.append(DRIVERS[kind].coordinate)
    return list(dict.fromkeys(paths)), coordinates


def _build_settings(paths: list[str], coordinates: list[str]) -> dict[str, str]:
    """Return the settings that must be made before Java starts.

    Times are read in UTC, folders such as `queue=00123` as text, and a write with "overwrite"
    replaces only the partitions that it writes.
    """
    settings = {
        "spark.driver.extraJavaOptions": UTC_OPTION,
        "spark.executor.extraJavaOptions": UTC_OPTION,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
        "spark.sql.sources.partitionOverwriteMode": "dynamic",
    }
    if paths:
        settings["spark.jars"] = ",".join(paths)
    if coordinates:
        settings["spark.jars.packages"] = ",".join(coordinates)
    return settings


def _require_drivers(spark: SparkSession, kinds: list[str]) -> None:
    """Check that the session's Java has the drivers of the given kinds."""
    for kind in kinds:
        require_driver(spark, DRIVERS[kind].class_name, kind)


def require_driver(spark: SparkSession, class_name: str, kind: str) -> None:
    """Check that the session's Java has the driver.

    Spark Connect gives no access to its Java, so the check is skipped there.

    Raises:
        SetupError: the driver is missing; the message says how to start a session with it.
    """
    java = get_java(spark)
    if java is None:
        return
    utils = getattr(java, "org.apache.spark.util.Utils")
    try:
        # Spark's loader also searches the jars of `spark.jars`; the class is not initialized.
        utils.classForName(class_name, False, False)
    except Exception as error:
        msg = (
            f"this Spark session was started without the JDBC driver {class_name}: restart the "
            f"Python process or kernel and call build_session(databases=[{kind!r}]), or give the "
            "jar in spark.jars, as with spark-submit --jars (before Java starts: it outlives a "
            "stopped session)"
        )
        raise SetupError(msg) from error

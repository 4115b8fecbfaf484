"""A Spark session with everything that must be set before Java starts."""

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
    java_of,
    need_jar,
    need_java,
    paths_of,
    wanted_kinds,
)
from pyspark_sqlbroker.source import DefaultSource

UTC = "-Duser.timezone=UTC"
_LISTS = {
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

    It brings the JDBC drivers, lets Java and the session think in UTC, keeps directory names such
    as `queue=00123` text, overwrites Parquet partition by partition, and lets Python workers run
    this Python.

    Args:
        app_name: The application's name.
        databases: "postgresql", "mysql" (and MariaDB), "sqlite", one or several; each must have its
            driver. None brings those whose drivers are found.
        master: Such as "local[*]"; None leaves it to spark-submit, or "local[*]" where nothing
            says.
        jars: Paths of JDBC drivers; those not given are looked for in SQLBROKER_SPARK_JARS,
            Debian's folder and Maven's cache, in this order.
        packages: Let Spark fetch drivers that were not found from its package repositories.
        config: More of Spark's settings; they win, also over what spark-submit was given.

    Returns:
        The session. If one is running already it is returned as it is, when it has what is needed.
        What spark-submit was given stays: its jars and Java options are added to, its other
        settings win.

    Raises:
        SetupError: Java is missing or older than 17, a driver is missing or too old, an unknown
            database, or Java is running already and was started without the drivers. The session
            runs on then.
    """
    wanted = wanted_kinds(databases)
    running = _running()
    checked = wanted if databases is not None else []
    if running is not None:
        _need_drivers(running, checked)
        register_format(running)
        return running
    need_java()
    paths, coordinates = _resolve(
        wanted, paths_of(jars), packages=packages, strict=databases is not None
    )
    # Otherwise workers would run the python3 of PATH, which may lack pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = complete(_settings(paths, coordinates), _submitted()) | dict(config or {})
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    # Java outlives a stopped session, and cannot load jars that are added later.
    _need_drivers(session, checked)
    register_format(session)
    return session


def register_format(spark: SparkSession) -> None:
    """Let the session know the format "sqlbroker".

    Spark finds it by itself where the environment variable PYSPARK_PYTHON of its Java names a
    Python that has this package. spark-submit's `spark.pyspark.python` does not count.
    """
    java = java_of(spark)
    if java is None or getattr(java, "java.lang.System").getenv("PYSPARK_PYTHON"):
        return
    known = spark._jsparkSession.sessionState().dataSourceManager()  # noqa: SLF001 - no public way
    if not known.dataSourceExists(DefaultSource.name()):
        spark.dataSource.register(DefaultSource)


def _running() -> SparkSession | None:
    """The session of this thread, else the one that another thread started."""
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


def _submitted() -> dict[str, str]:
    """The settings that spark-submit was given; Java, which it started before us, knows them."""
    # Without a running Java this would start one, before its options are set.
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    SparkContext._ensure_initialized()  # noqa: SLF001 - else SparkConf knows nothing of that Java
    return dict(SparkConf().getAll())


def complete(ours: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Merge our settings with the `given` ones, which win.

    Lists are joined, ours first: of two equal Java options the last one wins.
    """
    both = {name: [value for value in (ours[name], given.get(name)) if value] for name in ours}
    joined = {name: sign.join(both[name]) for name, sign in _LISTS.items() if name in both}
    return {name: values[-1] for name, values in both.items()} | joined


def _resolve(
    kinds: list[str], jars: list[Path], *, packages: bool, strict: bool
) -> tuple[list[str], list[str]]:
    """Paths of jars and coordinates of packages."""
    paths = [str(jar.resolve()) for jar in jars]
    coordinates = []
    for kind in kinds:
        need = need_jar if strict and not packages else find_jar
        found = need(kind, jars)
        if found is not None:
            paths.append(str(found.path.resolve()))
        elif packages:
            coordinates.append(DRIVERS[kind].coordinate)
    return list(dict.fromkeys(paths)), coordinates


def _settings(paths: list[str], coordinates: list[str]) -> dict[str, str]:
    settings = {
        "spark.driver.extraJavaOptions": UTC,
        "spark.executor.extraJavaOptions": UTC,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
        "spark.sql.sources.partitionOverwriteMode": "dynamic",
    }
    if paths:
        settings["spark.jars"] = ",".join(paths)
    if coordinates:
        settings["spark.jars.packages"] = ",".join(coordinates)
    return settings


def _need_drivers(spark: SparkSession, kinds: list[str]) -> None:
    for kind in kinds:
        need_driver(spark, DRIVERS[kind].class_name, kind)


def need_driver(spark: SparkSession, class_name: str, kind: str) -> None:
    """Check that the session's Java has the driver.

    Spark Connect does not show its Java, so the check is skipped there.

    Raises:
        SetupError: the driver is missing; says how to start a session with it.
    """
    java = java_of(spark)
    if java is None:
        return
    utils = getattr(java, "org.apache.spark.util.Utils")
    try:
        utils.classForName(class_name, False, False)
    except Exception as error:
        msg = (
            f"this Spark session was started without the JDBC driver {class_name}: restart the "
            f"Python process or kernel and start one with build_session(databases=[{kind!r}]), or "
            "give the jar in spark.jars, as with spark-submit --jars (it must be there before Java "
            "starts, which outlives a stopped session)"
        )
        raise SetupError(msg) from error

"""Find Java and the JDBC drivers, and check their versions."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JARS_VARIABLE = "SQLBROKER_SPARK_JARS"
"""Environment variable with paths of jars, separated as PATH is."""

MIN_JAVA = 17
"""Minimum version of Java for Spark 4."""

MAX_SUBJECT_JAVA = 23
"""Maximum version of Java with `Subject.getSubject`."""
SUBJECT_CLASS = "org/apache/hadoop/security/authentication/util/SubjectUtil.class"

DEBIAN_JARS = Path("/usr/share/java")
UNKNOWN_VERSION = "unknown"
ARGUMENT_SOURCE = "argument"


@dataclass(frozen=True)
class Driver:
    """A JDBC driver.

    Attributes:
        database: The database's name, for people.
        class_name: Java's name of the driver.
        pattern: Matches the jar's file name; the group is the version, which may be missing.
        package: The Debian package that contains the jar.
        coordinate: The Maven coordinate, for `spark.jars.packages`.
        min_version: The oldest version that works.
    """

    database: str
    class_name: str
    pattern: str
    package: str
    coordinate: str
    min_version: tuple[int, ...]


DRIVERS: Mapping[str, Driver] = {
    "postgresql": Driver(
        "PostgreSQL",
        "org.postgresql.Driver",
        r"postgresql(?:-([0-9][0-9.]*))?\.jar",
        "libpostgresql-jdbc-java",
        "org.postgresql:postgresql:42.7.7",
        (42, 2),
    ),
    "mysql": Driver(
        "MySQL and MariaDB",
        "org.mariadb.jdbc.Driver",
        r"mariadb-java-client(?:-([0-9][0-9.]*))?\.jar",
        "libmariadb-java",
        "org.mariadb.jdbc:mariadb-java-client:3.5.3",
        (2, 7),
    ),
    "sqlite": Driver(
        "SQLite",
        "org.sqlite.JDBC",
        r"(?:xerial-)?sqlite-jdbc(?:-([0-9][0-9.]*))?\.jar",
        "libxerial-sqlite-jdbc-java",
        "org.xerial:sqlite-jdbc:3.50.3.0",
        (3, 36),
    ),
}
"""JDBC drivers by kind of database."""


@dataclass(frozen=True)
class DriverJar:
    """A driver's jar.

    Attributes:
        path: Path of the file.
        version: The version in the file's name, or "unknown".
        source: The origin of the path: "argument", an environment variable, or a folder.
    """

    path: Path
    version: str
    source: str


def find_jar(kind: str, jars: str | Path | Sequence[str | Path] = ()) -> DriverJar | None:
    """Find the driver's jar in `jars`, SQLBROKER_SPARK_JARS, Debian's folder or Maven's cache.

    If a source has several, the newest is taken. A jar without a version in its name is taken only
    if there is no other; its version is not checked. A jar found in a folder that is too old is
    ignored.

    Raises:
        SetupError: a jar that the user named does not exist, or is too old.
    """
    jar = _find_latest_jar(kind, jars)
    if jar is None or not _is_too_old(kind, jar):
        return jar
    if jar.source in (ARGUMENT_SOURCE, JARS_VARIABLE):
        raise _create_age_error(kind, jar)
    return None


def _find_latest_jar(kind: str, jars: str | Path | Sequence[str | Path]) -> DriverJar | None:
    """Return the newest jar of the first source that has any, even if too old.

    Sources are the user's arguments, the environment variable, Debian's folder and Maven's cache,
    in this order.
    """
    driver = DRIVERS[kind]
    for source, paths in _iter_sources(driver, to_paths(jars)):
        matching = [
            (match[1] or UNKNOWN_VERSION, path)
            for path in paths
            if (match := re.fullmatch(driver.pattern, path.name))
        ]
        if matching:
            version, path = max(matching, key=lambda pair: _parse_version(pair[0]))
            return DriverJar(path, version, source)
    return None


def _is_too_old(kind: str, jar: DriverJar) -> bool:
    """Return True if the jar's version is known and below the driver's minimum."""
    return (
        jar.version != UNKNOWN_VERSION and _parse_version(jar.version) < DRIVERS[kind].min_version
    )


def _create_age_error(kind: str, jar: DriverJar) -> SetupError:
    """Create the error about a jar that is too old."""
    driver = DRIVERS[kind]
    oldest = ".".join(map(str, driver.min_version))
    return SetupError(
        f"{jar.path} is too old for {driver.database}: use version {oldest} or newer, e.g. "
        f"{driver.coordinate}"
    )


def to_paths(jars: str | Path | Sequence[str | Path]) -> list[Path]:
    """Convert a path or several paths to a list."""
    return [Path(jar) for jar in ([jars] if isinstance(jars, str | Path) else jars)]


def parse_kinds(databases: str | Iterable[str] | None) -> list[str]:
    """Parse a kind of database or several kinds; None means all.

    Raises:
        SetupError: there is no such kind.
    """
    names = [databases] if isinstance(databases, str) else databases
    kinds = [
        "mysql" if kind == "mariadb" else kind for kind in (DRIVERS if names is None else names)
    ]
    for kind in kinds:
        if kind not in DRIVERS:
            raise SetupError(
                f"databases must contain only {', '.join((*DRIVERS, 'mariadb'))}, got {kind!r}"
            )
    return kinds


def require_jar(kind: str, jars: str | Path | Sequence[str | Path] = ()) -> DriverJar:
    """Find the driver's jar as `find_jar` does, or raise an error.

    Raises:
        SetupError: there is none, or it is too old; the message says what to install.
    """
    jar = _find_latest_jar(kind, jars)
    if jar is None:
        raise SetupError(f"no JDBC driver for {DRIVERS[kind].database} was found: {get_hint(kind)}")
    if _is_too_old(kind, jar):
        raise _create_age_error(kind, jar)
    return jar


def get_hint(kind: str) -> str:
    """Return the remedies for a missing driver, for an error message."""
    driver = DRIVERS[kind]
    return (
        f"install the Debian package {driver.package}, give the jar as jars=[...] or in "
        f"{JARS_VARIABLE}, or let Spark fetch {driver.coordinate} with packages=True"
    )


def _iter_sources(driver: Driver, user_paths: list[Path]) -> Iterator[tuple[str, list[Path]]]:
    """Yield the sources of jars with their files, in order of preference.

    A generator, so that a folder is read only if no earlier source has the driver.
    """
    variable = [Path(jar) for jar in os.environ.get(JARS_VARIABLE, "").split(os.pathsep) if jar]
    for source, paths in (("jars", user_paths), (JARS_VARIABLE, variable)):
        missing = [str(path) for path in paths if not path.is_file()]
        if missing:
            raise SetupError(f"{source} contains {missing[0]}, which is not a file")
    yield ARGUMENT_SOURCE, user_paths
    yield JARS_VARIABLE, variable
    yield str(DEBIAN_JARS), sorted(DEBIAN_JARS.glob("*.jar"))
    cache = Path.home() / ".m2" / "repository"
    group, artifact, _ = driver.coordinate.split(":")
    yield str(cache), sorted(cache.joinpath(*group.split("."), artifact).glob("*/*.jar"))


def _parse_version(version: str) -> tuple[int, ...]:
    """Parse a version into numbers to compare; parts that are not numbers are skipped."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


@dataclass(frozen=True)
class JavaRuntime:
    """The Java that Spark will start.

    Attributes:
        path: Path of the program.
        version: Its main version.
    """

    path: str
    version: int


def find_java() -> JavaRuntime | None:
    """Find JAVA_HOME's java, else the java on PATH; None if neither exists and answers."""
    home = os.environ.get("JAVA_HOME")
    path = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if path is None:
        return None
    process = subprocess.run([path, "-version"], capture_output=True, text=True, check=False)  # noqa: S603
    match = re.search(r'version "(?:1\.)?(\d+)', process.stderr + process.stdout)
    return JavaRuntime(path, int(match[1])) if match else None


def require_java() -> JavaRuntime:
    """Find Java as `find_java` does, or raise an error.

    Raises:
        SetupError: there is none, it is older than 17, or too new for the Spark that is installed;
            the message says what to install.
    """
    java = find_java()
    searched = f"JAVA_HOME={os.environ['JAVA_HOME']}" if "JAVA_HOME" in os.environ else "PATH"
    hint = f"install Java {MIN_JAVA} or newer, e.g. Debian's default-jre-headless, or set JAVA_HOME"
    if java is None:
        raise SetupError(f"Spark needs Java, but found none ({searched}): {hint}")
    if java.version < MIN_JAVA:
        raise SetupError(
            f"Spark needs Java {MIN_JAVA} or newer, but {java.path} is version {java.version} "
            f"({searched}): {hint}"
        )
    spark = _find_spark_without_subject() if java.version > MAX_SUBJECT_JAVA else None
    if spark is not None:
        raise SetupError(
            f"{spark} does not start on Java {java.version} ({searched}), which has no getSubject: "
            f"install Java {MIN_JAVA} to {MAX_SUBJECT_JAVA} and set JAVA_HOME, or a newer pyspark"
        )
    return java


def _find_spark_without_subject() -> str | None:
    """Return the name of a Spark whose Hadoop calls `getSubject`, or None."""
    module = find_spec("pyspark")
    home = os.environ.get("SPARK_HOME") or Path((module and module.origin) or "").parent
    for jar in Path(home, "jars").glob("hadoop-client-api-*.jar"):
        with ZipFile(jar) as classes:
            if SUBJECT_CLASS not in classes.namelist():
                core = next(jar.parent.glob("spark-core_*.jar"), None)
                return f"Spark {core.stem.rpartition('-')[2]}" if core else f"Spark with {jar.name}"
    return None


# The Java of a running Spark session.


def get_java(spark: "SparkSession") -> Any:
    """Return Py4J's view of the driver's Java; None with Spark Connect, which gives no access to
    it.

    Get classes by their full name, as in `getattr(java, "java.util.TimeZone")`: for each part of
    `java.java.util` Py4J would search all of Spark's jars for a class of that name, some 20 ms
    each.
    """
    context = getattr(spark, "_sc", None)
    return None if context is None else context._jvm  # noqa: SLF001 - there is no public access

"""Find Java and the JDBC drivers, and check their versions."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JARS_VARIABLE = "SQLBROKER_SPARK_JARS"
"""Environment variable with paths of jars, separated as PATH is."""

OLDEST_JAVA = 17
"""The oldest Java that Spark 4 runs on."""

DEBIAN_JARS = Path("/usr/share/java")
UNKNOWN = "unknown"
ARGUMENT = "argument"


@dataclass(frozen=True)
class Driver:
    """A JDBC driver.

    Attributes:
        database: The database's name, for people.
        class_name: Java's name of it.
        pattern: Matches its jar's file name; the group is the version, which may be missing.
        package: The Debian package that contains it.
        coordinate: The Maven coordinate, for `spark.jars.packages`.
        oldest: The oldest version that works.
    """

    database: str
    class_name: str
    pattern: str
    package: str
    coordinate: str
    oldest: tuple[int, ...]


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
"""By the kind of database."""


@dataclass(frozen=True)
class FoundJar:
    """A driver's jar: where, its version, and who named it ("argument", an environment variable, a
    folder).

    The version is that of the file's name, or "unknown".
    """

    path: Path
    version: str
    source: str


def find_jar(kind: str, jars: str | Path | Sequence[str | Path] = ()) -> FoundJar | None:
    """The driver's jar for `kind`: of `jars`, of SQLBROKER_SPARK_JARS, of Debian's folder, of
    Maven's cache.

    If a place has several, the newest is taken. A jar without a version in its name is taken only
    if there is no other; its version is not checked. A jar found in a folder that is too old is
    ignored.

    Raises:
        SetupError: a jar that the user named does not exist, or is too old.
    """
    found = _newest(kind, jars)
    if found is None or not _too_old(kind, found):
        return found
    if found.source in (ARGUMENT, JARS_VARIABLE):
        raise _age_error(kind, found)
    return None


def _newest(kind: str, jars: str | Path | Sequence[str | Path]) -> FoundJar | None:
    """The newest jar of the first place that has any; it may be too old."""
    driver = DRIVERS[kind]
    for source, paths in _places(driver, paths_of(jars)):
        matching = [
            (m[1] or UNKNOWN, path)
            for path in paths
            if (m := re.fullmatch(driver.pattern, path.name))
        ]
        if matching:
            version, path = max(matching, key=lambda pair: _numbers(pair[0]))
            return FoundJar(path, version, source)
    return None


def _too_old(kind: str, jar: FoundJar) -> bool:
    return jar.version != UNKNOWN and _numbers(jar.version) < DRIVERS[kind].oldest


def _age_error(kind: str, jar: FoundJar) -> SetupError:
    driver = DRIVERS[kind]
    oldest = ".".join(map(str, driver.oldest))
    return SetupError(
        f"{jar.path} is too old for {driver.database}: version {oldest} or newer is needed, "
        f"e.g. {driver.coordinate}"
    )


def paths_of(jars: str | Path | Sequence[str | Path]) -> list[Path]:
    """One path or several."""
    return [Path(jar) for jar in ([jars] if isinstance(jars, str | Path) else jars)]


def wanted_kinds(databases: str | Iterable[str] | None) -> list[str]:
    """The kinds that are named, one or several; all of them for None.

    Raises:
        SetupError: there is no such kind.
    """
    given = [databases] if isinstance(databases, str) else databases
    wanted = [
        "mysql" if kind == "mariadb" else kind for kind in (DRIVERS if given is None else given)
    ]
    for kind in wanted:
        if kind not in DRIVERS:
            raise SetupError(f"databases has {kind!r}: {', '.join(DRIVERS)} are allowed")
    return wanted


def need_jar(kind: str, jars: str | Path | Sequence[str | Path] = ()) -> FoundJar:
    """As `find_jar`.

    Raises:
        SetupError: there is none, or one that is too old; says what to install.
    """
    found = _newest(kind, jars)
    if found is None:
        raise SetupError(f"no JDBC driver for {DRIVERS[kind].database} was found: {advice(kind)}")
    if _too_old(kind, found):
        raise _age_error(kind, found)
    return found


def advice(kind: str) -> str:
    """What to do to get a driver."""
    driver = DRIVERS[kind]
    return (
        f"install Debian's {driver.package}, give the jar as jars=[...] or in {JARS_VARIABLE}, or "
        f"let Spark fetch {driver.coordinate} with packages=True"
    )


def _places(driver: Driver, named: list[Path]) -> Iterator[tuple[str, list[Path]]]:
    """Places with their jars; a generator, so that a folder is read only when it is needed."""
    variable = [Path(jar) for jar in os.environ.get(JARS_VARIABLE, "").split(os.pathsep) if jar]
    for source, paths in (("jars", named), (JARS_VARIABLE, variable)):
        missing = [str(path) for path in paths if not path.is_file()]
        if missing:
            raise SetupError(f"{source} names {missing[0]}, which is no file")
    yield ARGUMENT, named
    yield JARS_VARIABLE, variable
    yield str(DEBIAN_JARS), sorted(DEBIAN_JARS.glob("*.jar"))
    cache = Path.home() / ".m2" / "repository"
    group, artifact, _ = driver.coordinate.split(":")
    yield str(cache), sorted(cache.joinpath(*group.split("."), artifact).glob("*/*.jar"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


@dataclass(frozen=True)
class Java:
    """The Java that Spark will start: the program and its main version."""

    path: str
    version: int


def find_java() -> Java | None:
    """JAVA_HOME's java, else the one on PATH; None if there is none or it does not answer."""
    home = os.environ.get("JAVA_HOME")
    path = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if path is None:
        return None
    done = subprocess.run([path, "-version"], capture_output=True, text=True, check=False)  # noqa: S603
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return Java(path, int(match[1])) if match else None


def need_java() -> Java:
    """As `find_java`.

    Raises:
        SetupError: none is there, or it is older than 17; says what to install.
    """
    java = find_java()
    where = f"JAVA_HOME={os.environ['JAVA_HOME']}" if "JAVA_HOME" in os.environ else "PATH"
    hint = (
        f"install Java {OLDEST_JAVA} or newer, e.g. Debian's default-jre-headless, or set JAVA_HOME"
    )
    if java is None:
        raise SetupError(f"Spark needs Java and none was found ({where}): {hint}")
    if java.version < OLDEST_JAVA:
        raise SetupError(
            f"Spark needs Java {OLDEST_JAVA}, {java.path} is version {java.version} ({where}): "
            f"{hint}"
        )
    return java


# Spark's own Java, where there is one.


def java_of(spark: "SparkSession") -> Any:
    """Py4J's view of the driver's Java; None with Spark Connect, which does not show it.

    Ask it for classes by their whole name, as in `getattr(java, "java.util.TimeZone")`: for each
    part of `java.java.util` it would look through all of Spark's jars for a class of that name,
    some 20 ms each.
    """
    context = getattr(spark, "_sc", None)
    return None if context is None else context._jvm  # noqa: SLF001 - the only way to it

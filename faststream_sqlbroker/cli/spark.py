"""`sqlbroker spark`: check Java, the packages and the JDBC drivers that Spark needs."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from faststream_sqlbroker.cli.output import print_table
from faststream_sqlbroker.cli.shared_options import Jars
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.drivers import DRIVERS, parse_kinds, require_jar, require_java

MIN_SPARK = (4, 0)
PACKAGES = ("pyspark", "pandas", "pyarrow", "psycopg", "pymysql", "adbc-driver-postgresql")


def check(
    database: Annotated[
        list[str] | None,
        typer.Option(help="postgresql, mysql (or mariadb) or sqlite. Default: all."),
    ] = None,
    jar: Jars = None,
) -> None:
    """Show which Java, packages and JDBC drivers Spark finds, and what to install.

    The exit code is 1 if anything is missing.
    """
    rows: list[tuple[str, str, str]] = []
    missing = False
    for name, run_check in _iter_checks(parse_kinds(database or None), jar or []):
        try:
            rows.append((name, *run_check()))
        except SetupError as error:
            rows.append((name, "no", str(error)))
            missing = True
    print_table("Spark", ["", "found", "location, or remedy"], rows, full_text=True)
    raise typer.Exit(1 if missing else 0)


def _iter_checks(
    kinds: list[str], jars: list[Path]
) -> Iterator[tuple[str, Callable[[], tuple[str, str]]]]:
    """Yield the name of each check, and a function that returns the version and the location.

    The function raises SetupError, with the remedy, if the component is missing.
    """
    yield "Java", _check_java
    for package in PACKAGES:
        yield package, partial(_check_package, package)
    for kind in kinds:
        yield f"JDBC: {DRIVERS[kind].database}", partial(_check_jar, kind, jars)


def _check_java() -> tuple[str, str]:
    """Return the version and the path of the Java that Spark would start."""
    java = require_java()
    return str(java.version), java.path


def _check_package(name: str) -> tuple[str, str]:
    """Return the version of an installed package, and an empty text in place of a location."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise SetupError("pip install 'sqlbroker[spark]'") from error
    if name == "pyspark" and tuple(int(part) for part in version.split(".")[:2]) < MIN_SPARK:
        raise SetupError(f"{version} is too old: pip install 'sqlbroker[spark]'")
    return version, ""


def _check_jar(kind: str, jars: list[Path]) -> tuple[str, str]:
    """Return the version of a JDBC driver's jar, with the path and the path's origin."""
    jar = require_jar(kind, jars)
    return jar.version, f"{jar.path} ({jar.source})"

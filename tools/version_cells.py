"""The versions of which `tools.versions` runs the tests."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tools import embedded_postgresql, oldest, unstable

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
FOLDERS = ("contract", "flow", "plans", "outcomes", "schema", "processes")
"""Of the tests: what they show depends on the database."""
OF_PYTHON = tuple(folder for folder in FOLDERS if folder != "plans")


@dataclass(frozen=True)
class Cell:
    """One version of one thing, and the tests that run with it.

    Attributes:
        what: The thing, as the table names it.
        version: Which; what runs must be of it.
        databases: Kinds that the tests run on.
        folders: Of the tests.
        programs: Makes the folder of the server's programs, for the first of `databases`.
        python: An interpreter other than that of `.venv`.
        wanted: Requirements that replace what `.venv` has.
        startup: A line that each interpreter of the environment runs first.
        variables: For the tests.
        missing: Why it cannot be had at all.
    """

    what: str
    version: str
    databases: tuple[str, ...] = ()
    folders: tuple[str, ...] = FOLDERS
    programs: Callable[[], Path] | None = None
    python: str | None = None
    wanted: tuple[str, ...] = ()
    startup: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""

    @property
    def name(self) -> str:
        """As the command takes it."""
        return f"{self.what}-{self.version}".lower().rstrip("-")

    def is_version(self, used: str) -> bool:
        """Whether `used` is of this version, or any is; a free-threaded Python ends with "t"."""
        if not self.version:
            return True
        free, number = self.version.endswith("t"), self.version.rstrip("t")
        return used.endswith("t") == free and f"{used.rstrip('t')}.".startswith(f"{number}.")


def read_project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    return dict(tomllib.loads(PROJECT.read_text())["project"])


def _lowest(name: str) -> Requirement:
    """The requirement of the lower bound of `name`, as `just test-oldest` installs it."""
    bounds = map(Requirement, oldest.lower_bounds(oldest.requirements(read_project())))
    return next(bound for bound in bounds if bound.name == name)


def _driver(name: str, database: str) -> Cell:
    folders = ("contract", "flow")
    return Cell(name, "", (database,), folders, variables={"SQLBROKER_TEST_DRIVERS": name})


def cells() -> list[Cell]:
    """All, in the order of the table."""
    lowest = _lowest("sqlalchemy")
    return [
        *(
            Cell(
                "PostgreSQL",
                version,
                ("postgresql",),
                programs=partial(embedded_postgresql.programs, version),
            )
            for version in embedded_postgresql.VERSIONS
        ),
        Cell(
            "MariaDB", "11.8", ("mariadb",), programs=partial(unstable.unpacked, unstable.MARIADB)
        ),
        *(
            Cell("MySQL", version, missing="Debian, PyPI and npm have no server of this version")
            for version in ("8.0", "8.4")
        ),
        Cell(
            "SQLite",
            "3.53",
            ("sqlite",),
            wanted=("pysqlite3==0.6.1",),
            # A module of the same interface, which brings a newer library.
            startup="import sys, pysqlite3.dbapi2 as d; sys.modules['sqlite3.dbapi2'] = d; "
            "sys.modules['sqlite3'] = sys.modules['pysqlite3']",
        ),
        *(
            Cell("Python", version, ("sqlite", "postgresql"), OF_PYTHON, python=version)
            for version in ("3.12", "3.13", "3.14", "3.14t")
        ),
        Cell(
            "SQLAlchemy",
            str(lowest.specifier).lstrip("="),
            ("sqlite", "postgresql", "mariadb"),
            ("contract", "outcomes", "schema"),
            wanted=(str(lowest),),
        ),
        _driver("psycopg", "postgresql"),
        _driver("asyncmy", "mariadb"),
        Cell(
            "uvloop",
            "0.23.0",
            ("sqlite", "postgresql"),
            ("contract", "flow", "processes"),
            wanted=("uvloop==0.23.0",),
            startup="import uvloop; uvloop.install()",
        ),
    ]

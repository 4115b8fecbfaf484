"""The table of databases and capabilities, from the tests that are there.

A test marked `@pytest.mark.capability("...")` stands for a capability on every database it runs on.

    python -m tools.capabilities [--check]
"""

import contextlib
import io
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.files import update_block

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "databases.md"
DATABASES = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL", "sqlite": "SQLite"}
IN_FRONT = {"pgbouncer": "postgresql"}
"""What tests call a database that they reach through something else."""
WITHOUT_MYSQL = "tests/spark/"
"""Tests that run on no MySQL, even where they name no database."""


class Collector:
    """A pytest plugin that notes which capability is tested on which database."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Read the marks of all tests."""
        self.found = read(session.items)


def read(items: Sequence[pytest.Item]) -> dict[str, set[str]]:
    """Which capability is tested on which database by these."""
    found: dict[str, set[str]] = defaultdict(set)
    for item in items:
        for mark in item.iter_markers("capability"):
            callspec: Any = getattr(item, "callspec", None)
            database: str | None = callspec.params.get("database") if callspec is not None else None
            database = IN_FRONT.get(database or "", database)
            everywhere = set(DATABASES) - (
                {"mysql"} if item.nodeid.startswith(WITHOUT_MYSQL) else set()
            )
            found[mark.args[0]] |= {database} if database else everywhere
    return found


def table(found: dict[str, set[str]]) -> str:
    """Markdown."""
    lines = ["| | " + " | ".join(DATABASES.values()) + " |", "|---|" + "---|" * len(DATABASES)]
    for name in sorted(found):
        cells = (_cell(found[name], database) for database in DATABASES)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(tested: set[str], database: str) -> str:
    """MySQL can what MariaDB can, by the same code; whether it was tried is another matter."""
    if database in tested:
        return "yes"
    return "untested" if database == "mysql" and "mariadb" in tested else "–"


def collect() -> dict[str, set[str]]:
    """Collect the tests without running any."""
    collector = Collector()
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main(["--collect-only", "-qq", "tests"], plugins=[collector])
    if code != pytest.ExitCode.OK:
        sys.exit(f"the tests cannot be collected ({code!r}): run pytest to see why")
    return collector.found


if __name__ == "__main__":
    sys.exit(update_block(PAGE, "capabilities", table(collect()), check="--check" in sys.argv))

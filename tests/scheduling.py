"""The order of the tests, and which stay together when several processes share them."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TOGETHER = ("tests/spark/",)
"""Folders whose tests have one owner: a Spark session is started once."""

APART = (
    "tests/spark/test_cluster.py",
    "tests/spark/test_databases.py",
    "tests/spark/test_horizon.py",
    "tests/spark/test_horizon_servers.py",
)
"""Files of such folders that need no session."""

UNKNOWN = 600.0
"""Seconds that a file is taken to need until its time is recorded: it begins early."""

ROOT = Path(__file__).parent.parent
TIMES = ROOT / "tests" / "times.json"
"""The seconds that each file took: `just record-times` writes it."""


def scope(nodeid: str) -> str:
    """The tests that one process runs: those of a file, or of a folder that has one owner."""
    file = nodeid.split("::", 1)[0]
    if file in APART:
        return file
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same tests, those of the longest scopes first; within one as they were.

    What begins late is short then, so that all processes end at about the same time.
    """
    known = recorded()
    seconds: Counter[str] = Counter()
    for file in dict.fromkeys(item.nodeid.partition("::")[0] for item in items):
        seconds[scope(file)] += known.get(file, UNKNOWN)
    return sorted(items, key=lambda item: -seconds[scope(item.nodeid)])


def recorded() -> dict[str, float]:
    """Seconds by file, as they were recorded; a new file is not among them."""
    times: dict[str, float] = json.loads(TIMES.read_text())
    return times


def record(seconds: dict[str, float]) -> None:
    """Keep the seconds that each file took; of others what was known before."""
    known = {**recorded(), **{file: round(taken, 1) for file, taken in seconds.items()}}
    kept = {file: taken for file, taken in sorted(known.items()) if (ROOT / file).exists()}
    TIMES.write_text(json.dumps(kept, indent=0) + "\n")


def scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's scheduler of files, which keeps our order and our scopes."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False
    return Files(config, log)

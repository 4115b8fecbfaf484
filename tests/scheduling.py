"""The order of the tests, and which stay together when several processes share them."""

from collections.abc import Sequence
from typing import Any

import pytest

TOGETHER = ("tests/spark/",)
"""Folders whose tests have one owner: a Spark session is started once."""

LONGEST_FIRST = (
    "tests/faults/",
    "tests/spark/",
    "tests/processes/",
    "tests/docs/",
    "tests/flow/",
    "tests/faststream/",
)
"""What takes long begins early: else one process works on it alone at the end."""


def scope(nodeid: str) -> str:
    """The tests that one process runs: those of a file, or of a folder that has one owner."""
    file = nodeid.split("::", 1)[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same tests, the longest folders' first; within a folder as they were."""

    def place(item: pytest.Item) -> int:
        return next(
            (n for n, folder in enumerate(LONGEST_FIRST) if item.nodeid.startswith(folder)),
            len(LONGEST_FIRST),
        )

    return sorted(items, key=place)


def scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's scheduler of files, which keeps our order and our scopes."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False
    return Files(config, log)

"""Failovers: two rounds of those that CI has time for, and planted defects that only they show.

`just test-failover` runs all of them, and measures how long recovery takes.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.failover import FAILOVERS
from tests.faults.failover.run import run_failover
from tests.faults.failover.topology import Topology
from tests.faults.plan import LIMITED
from tools.private import CannotDownloadError, CannotStartError

pytestmark = pytest.mark.timeout(900)
ROUNDS = 2
SEEDS = 8
"""Runs in one of which a planted defect must show: not each has the moment that it needs."""
PLANTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "numbers of any server": (
        "asynchronous standby, behind",
        "8 no FAILED without a cause",
        {"queues": ("tx",)},
    ),
    "ids alone": (
        "asynchronous standby, behind",
        "2 message_id of one message",
        {"queues": ("plain",)},
    ),
    "ready without writes": ("planned switchover", "health told", {"queues": ("plain",)}),
    "locks of one server": ("Galera, three writers", "policies", {"queues": LIMITED}),
}
"""The failover that shows a defect, the rule that must be broken, and options of the cell."""


@contextmanager
def servers_of(name: str) -> Iterator[Topology]:
    """The servers of a failover; skip if they cannot start, fail in CI."""
    with ExitStack() as stack:
        try:
            topology = stack.enter_context(FAILOVERS[name].topology())
        except CannotStartError as error:
            if os.environ.get("CI") and not isinstance(error, CannotDownloadError):
                pytest.fail(str(error))
            pytest.skip(str(error))
        yield topology


@pytest.mark.parametrize("name", [name for name, one in FAILOVERS.items() if one.short])
async def test_no_promise_is_broken(name: str, tmp_path: Path) -> None:
    with servers_of(name) as topology:
        seen = await run_failover(name, topology, tmp_path, seed=1, rounds=ROUNDS)
    found = {rule: broken for rule, broken in seen.broken.items() if broken}
    assert not found
    assert FAILOVERS[name].lossy or not seen.lost


@pytest.mark.parametrize("defect", PLANTED)
async def test_a_planted_defect_is_caught(defect: str, tmp_path: Path) -> None:
    name, rule, options = PLANTED[defect]
    for seed in range(1, SEEDS + 1):
        with servers_of(name) as topology:
            seen = await run_failover(
                name, topology, tmp_path, seed, rounds=1, defect=defect, **options
            )
        if seen.broken[rule]:
            return
    pytest.fail(f"{defect!r} was not caught by {rule!r}: {seen.broken}")

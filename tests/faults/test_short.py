"""The short pass: every fault, one round each, on those of its databases that CI has time for.

`just test-faults` runs all cells.
"""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import Servers
from tests.faults.databases import place_for
from tests.faults.faults import FAULTS
from tests.faults.run import run_cell
from tools.private import CannotDownloadError, CannotStartError

pytestmark = pytest.mark.timeout(240)
CELLS = [
    (name, kind)
    for name, fault in FAULTS.items()
    for kind in fault.databases
    if kind in fault.short
]


@pytest.mark.parametrize(("name", "kind"), CELLS, ids=[f"{name} - {kind}" for name, kind in CELLS])
async def test_no_promise_is_broken(name: str, kind: str, servers: Servers, tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            place = stack.enter_context(place_for(FAULTS[name], kind, servers.admin, tmp_path))
        except CannotStartError as error:
            # Not even every CI may mount: a full disk needs a file system of its own.
            excused = FAULTS[name].small_disk or isinstance(error, CannotDownloadError)
            if os.environ.get("CI") and not excused:
                pytest.fail(str(error))
            pytest.skip(str(error))
        broken = await run_cell(name, place, tmp_path, seed=1, rounds=1)
    assert {rule: found for rule, found in broken.items() if found} == {}

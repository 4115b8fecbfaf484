"""The short pass: every fault on every database, one round each. `just test-faults` runs the long one."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import Servers
from tests.faults.databases import fresh_database
from tests.faults.faults import FAULTS
from tests.faults.run import run_cell, small_disk

pytestmark = pytest.mark.timeout(240)
CELLS = [(name, kind) for name, fault in FAULTS.items() for kind in fault.databases]


@pytest.mark.parametrize(("name", "kind"), CELLS, ids=[f"{name} - {kind}" for name, kind in CELLS])
async def test_no_promise_is_broken(name: str, kind: str, servers: Servers, tmp_path: Path) -> None:
    with ExitStack() as stack:
        place = tmp_path
        if name == "disk full":
            place = _small_disk(stack, tmp_path)
        url = stack.enter_context(fresh_database(kind, servers.admin, place))
        broken = await run_cell(name, url, tmp_path, seed=1, rounds=1)
    assert {rule: found for rule, found in broken.items() if found} == {}


def _small_disk(stack: ExitStack, folder: Path) -> Path:
    try:
        return stack.enter_context(small_disk(folder))
    except RuntimeError as error:
        # Not even every CI may mount; the fault needs a file system of its own.
        pytest.skip(str(error))

"""The short pass: every fault, one round each, on those of its databases that CI has time for.

`just test-faults` runs all cells.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from faststream_sqlbroker.subscriber.pipeline.fingerprints import GENERIC
from tests.conftest import Servers
from tests.faults.databases import place_for
from tests.faults.faults import FAULTS
from tests.faults.faults.soak import SOAK
from tests.faults.run import run_cell
from tools.private import CannotDownloadError, CannotStartError

pytestmark = pytest.mark.timeout(900)
CELLS = [
    (name, kind)
    for name, fault in FAULTS.items()
    for kind in fault.databases
    if kind in fault.short
]

LOAD = 18.0
"""Seconds of a soak, on each database: long enough for a kill, an end and a stop."""
CALM: dict[str, Any] = {"max_fetch_interval": 0.6}
"""Of a soak's twelve subscribers in each process: most of its CPU time would be looks."""
KILLED = "kill -9 in a handler"
"""Runs with FastStream's own pipeline, too."""


@pytest.mark.parametrize(("name", "kind"), CELLS, ids=[f"{name} - {kind}" for name, kind in CELLS])
async def test_no_promise_is_broken(name: str, kind: str, servers: Servers, tmp_path: Path) -> None:
    await _keeps_its_promises(name, kind, servers, tmp_path, **(CALM if name == SOAK else {}))


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_no_promise_is_broken_with_faststreams_own_pipeline(
    kind: str, servers: Servers, tmp_path: Path
) -> None:
    await _keeps_its_promises(KILLED, kind, servers, tmp_path, pipeline=GENERIC)


async def _keeps_its_promises(
    name: str, kind: str, servers: Servers, folder: Path, **options: Any
) -> None:
    with ExitStack() as stack:
        try:
            place = stack.enter_context(place_for(FAULTS[name], kind, servers.admin, folder))
        except CannotStartError as error:
            # Not even every CI may mount: a full disk needs a file system of its own.
            excused = FAULTS[name].small_disk or isinstance(error, CannotDownloadError)
            if os.environ.get("CI") and not excused:
                pytest.fail(str(error))
            pytest.skip(str(error))
        broken = await run_cell(name, place, folder, seed=1, rounds=1, load=LOAD, **options)
    assert {rule: found for rule, found in broken.items() if found} == {}

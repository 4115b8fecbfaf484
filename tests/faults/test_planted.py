"""Each defect planted in the broker is found, by the rule of the promise that it breaks, and by the
second checker."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Servers
from tests.faults import cell
from tests.faults.databases import place_for
from tests.faults.faults import FAULTS
from tests.faults.faults.soak import SOAK
from tests.faults.run import run_cell
from tests.faults.second_checker import AGREE

pytestmark = pytest.mark.timeout(1200)

PLANTED: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "read-only sessions stay": ("server read-only for a while", "postgresql", "1 nothing lost", {}),
    "no idle limit": ("machine that vanishes without a word", "mariadb", "1 nothing lost", {}),
    "answers on one row": (
        "answers that the database refuses",
        "postgresql",
        "3 stale workers change nothing",
        {"queues": ("batch",)},
    ),
    "unproven transactions": (
        "deadlocks that handlers catch",
        "mariadb",
        "5 transactions",
        {"queues": ("catching",)},
    ),
    "no fence": (
        "leases given back under their handlers",
        "postgresql",
        "3 stale workers change nothing",
        {"queues": ("plain",)},
    ),
    "no renewal": (
        # Here no lease is renewed, however busy the machine is.
        "nothing",
        "postgresql",
        "3 live holders keep their leases",
        {"queues": ("plain",), "processor": False},
    ),
    "blind repeat": (
        "connection cut between COMMIT and its answer",
        "postgresql",
        "6 answers",
        {"queues": ("plain",)},
    ),
    "forgotten outcomes": (
        "database out of reach",
        "postgresql",
        "2 no repeat without a reason",
        {},
    ),
    "claims without locks": ("nothing", "postgresql", "3 stale workers change nothing", {}),
    "lost claims": ("nothing", "postgresql", "1 nothing lost", {}),
    "unnoted starts": (
        "kill -9 in a handler",
        "postgresql",
        "4 cut-off starts are listed",
        {"queues": ("once",)},
    ),
    "claims without order": ("nothing", "postgresql", "7 order", {"queues": ("ordered",)}),
    "no slot is met": (SOAK, "sqlite", "1 nothing lost", {"load": 3.0}),
    "forgotten slots": (
        SOAK,
        "postgresql",
        "policies",
        {"load": 3.0, "queues": ("throttled",)},
    ),
    "commit before effects": ("nothing", "postgresql", "5 transactions", {"queues": ("tx",)}),
}
"""The fault that shows a defect, the database, the rule that must be broken, and options of the
cell."""


@pytest.mark.parametrize("defect", PLANTED)
async def test_a_planted_defect_is_caught(
    defect: str, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, kind, rule, options = PLANTED[defect]
    monkeypatch.setattr(cell, "DRAIN", 8.0)
    monkeypatch.setattr(cell, "WORKING", 8.0)
    for seed in range(1, 11):
        with place_for(FAULTS[fault], kind, servers.admin, tmp_path) as place:
            broken = await run_cell(
                fault, place, tmp_path, seed, rounds=2, defect=defect, **options
            )
        assert broken[AGREE] == []
        if broken[rule]:
            return
    pytest.fail(f"{defect!r} was not caught by {rule!r}: {broken}")

"""Budgets that several queues share, over a fleet: never more than the limit in all processes."""

import pytest

from tests.helpers import eventually
from tests.processes import policy_checks as checks
from tests.processes.conftest import Fleet
from tests.processes.policy_checks import SECOND
from tests.processes.policy_fleet import PolicyFleet

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.capability("one budget over several queues: `scope=` of policies"),
]

PROCESSES = 3
QUEUES = ("a", "b", "c")
OPTIONS = {"release_stuck_timeout": 60.0, "max_fetch_interval": 0.25, "max_workers": 10}
EACH = 20


async def test_a_throttle_of_several_queues_is_exact(fleet: Fleet) -> None:
    """Three processes with three queues each; one is killed while it runs handlers."""
    policies = PolicyFleet(fleet)
    throttle = ["Throttle", [20, "1s"], {"scope": "email-provider"}]
    subscribers = {
        queue: {"policies": [throttle], "options": OPTIONS, "seconds": 0.05} for queue in QUEUES
    }
    workers = [policies.start(subscribers) for _ in range(PROCESSES)]
    await fleet.live(PROCESSES)
    await policies.put({queue: [None] * EACH for queue in QUEUES})

    async def half_way() -> bool:
        return await fleet.count("state = 'COMPLETED'", archive=True) >= EACH

    await eventually(half_way, timeout=120, step=0.05)
    last = policies.starts()[-1].pid
    policies.kill(next(worker for worker in workers if worker.pid == last))
    await fleet.settled(EACH * len(QUEUES))
    await fleet.stop()
    left = await policies.left()
    slots = [start.slot for of in left.values() for start in of.starts if start.slot is not None]
    assert len(slots) >= EACH * len(QUEUES)
    assert checks.over_rate(slots, 20, SECOND) == []
    assert {row["state"] for of in left.values() for row in of.rows} == {"COMPLETED"}


async def test_a_concurrency_of_several_queues_is_exact(fleet: Fleet) -> None:
    """Three processes that race for four leases of three queues."""
    policies = PolicyFleet(fleet)
    given = ["Concurrency", [4], {"scope": "email-provider"}]
    subscribers = {
        queue: {"policies": [given], "options": OPTIONS, "seconds": 0.03} for queue in QUEUES
    }
    for _ in range(PROCESSES):
        policies.start(subscribers)
    await fleet.live(PROCESSES)
    times = await policies.shared({queue: [None] * EACH for queue in QUEUES})
    await fleet.stop()
    rows = [row for of in (await policies.left()).values() for row in of.rows]
    assert len(rows) == times * EACH * len(QUEUES)
    assert checks.most_at_once(rows) == 4
    assert all(row["deliveries_count"] == 1 for row in rows)

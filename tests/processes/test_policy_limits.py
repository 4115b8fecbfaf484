"""Limits of a fleet, exactly: leases at a time, slots in any period."""

import pytest

from tests.helpers import eventually
from tests.processes import policy_checks as checks
from tests.processes.conftest import Fleet
from tests.processes.policy_checks import SECOND
from tests.processes.policy_fleet import PolicyFleet

pytestmark = pytest.mark.timeout(600)

PROCESSES = 4
LEASE = {"release_stuck_timeout": 60.0, "max_fetch_interval": 0.25}


async def test_a_concurrency_is_exact(fleet: Fleet) -> None:
    """Z10: 4 processes with 20 workers each never hold a fourth lease, of the queue or of a key."""
    policies = PolicyFleet(fleet)
    subscribers = {
        "q": {"policies": [["Concurrency", [3], {}]], "seconds": 0.02},
        "by_key": {"policies": [["Concurrency", [3], {"per_key": True}]], "seconds": 0.1},
    }
    for given in subscribers.values():
        given["options"] = {**LEASE, "max_workers": 20}
    for _ in range(PROCESSES):
        policies.start(subscribers)
    await fleet.live(PROCESSES)
    async with policies.watched() as seen:
        times = await policies.shared(
            {"q": [f"k{n % 2}" for n in range(60)], "by_key": [f"k{n % 4}" for n in range(60)]}
        )
    await fleet.stop()
    once = "deliveries_count = 1 AND state = 'COMPLETED'"
    assert await fleet.count(once, archive=True) == 120 * times
    assert seen.looks
    assert seen.most["q", None] <= 3
    assert (
        max(n for (queue, key), n in seen.most.items() if queue == "by_key" and key is not None)
        <= 3
    )
    left = await policies.left()
    assert checks.most_at_once(left["q"].rows) == 3
    assert {
        key: checks.most_at_once(rows) for key, rows in left["by_key"].by_key.items()
    } == dict.fromkeys([f"k{n}" for n in range(4)], 3)


RATE = 100
SECONDS = 3


@pytest.mark.parametrize("burst", [1, RATE], ids=["spaced", "together"])
async def test_a_throttle_is_exact_and_used(fleet: Fleet, burst: int) -> None:
    """Z10: 100 starts a second over 4 processes: never more in any second, whether slots are
    spaced, or all of a second may come together.

    Who stands still misses slots, and nothing starts in a slot that is over. How many of them are
    used is a matter of speed: `just bench-policies` wants 95 % of a rate, of one process that may
    use them together.
    """
    policies = PolicyFleet(fleet)
    throttle = ["Throttle", [RATE, "1s"], {"burst": burst}]
    subscribers = {"q": {"policies": [throttle], "options": {**LEASE, "max_workers": 20}}}
    for _ in range(PROCESSES):
        policies.start(subscribers)
    await fleet.live(PROCESSES)
    await policies.shared({"q": [None] * RATE * SECONDS})
    await fleet.stop()
    left = (await policies.left())["q"]
    assert not checks.nothing_lost(left, policies.published["q"])
    assert not checks.throttled(left, RATE, SECOND)
    slots = [start.slot for start in left.starts if start.slot is not None]
    assert len(slots) >= SECONDS * RATE
    if burst == 1:
        assert len(set(slots)) == len(slots)


SLOW_RATE = 20
COMMIT = 0.8
"""Seconds that the COMMIT of a claim takes."""
BEFORE = 60
"""Slots before the kill; the first claims do not know yet how long they take."""
AFTER = 20


@pytest.mark.parametrize("key", [False, True], ids=["queue", "key"])
async def test_a_throttle_holds_with_slow_commits(fleet: Fleet, database: str, key: bool) -> None:
    """Z10: starts are at most `rate` in any period, and slots are later than a slow COMMIT, else
    each would be missed; also when one of two processes is killed while it runs handlers.
    """
    policies = PolicyFleet(fleet)
    subscribers = {
        "q": {
            "policies": [["Throttle", [SLOW_RATE, "1s"], {"burst": 1, "key": key}]],
            "seconds": 0.3,
            "options": {
                "max_workers": 40,
                "release_stuck_timeout": 600.0,
                "release_stuck_interval": 0.5,
                "max_fetch_interval": 0.1,
            },
        }
    }
    await policies.put({"q": ["a"] * (BEFORE + AFTER)})
    workers = [policies.start(subscribers, env={"TEST_WORKER_COMMITS": str(COMMIT)}) for _ in "ab"]
    await eventually(lambda: len(policies.starts("q")) >= BEFORE, timeout=120)
    victim = await policies.kill_at_work(workers, lambda: {"q": ["a"]})
    await fleet.settled(len(policies.published["q"]))
    await fleet.stop()
    left = (await policies.left())["q"]
    assert not checks.nothing_lost(left, policies.published["q"])
    assert not checks.throttled(left, SLOW_RATE, SECOND)
    again = {start.id for start in left.starts if start.delivery > 1}
    interrupted = {start.id for start in left.starts if start.pid == victim.pid} & again
    assert interrupted, "the killed process was not running any handler"

"""Limits of a fleet, exactly: leases at a time, slots in any period."""

import logging
import os
from statistics import median

import pytest

from tests.helpers import eventually
from tests.processes import policy_checks as checks
from tests.processes.conftest import Fleet
from tests.processes.policy_checks import SECOND
from tests.processes.policy_fleet import PolicyFleet

pytestmark = pytest.mark.timeout(180)

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
        await policies.put(
            {"q": [f"k{n % 2}" for n in range(120)], "by_key": [f"k{n % 4}" for n in range(120)]}
        )
        await fleet.settled(240)
    await fleet.stop()
    assert await fleet.count("deliveries_count = 1 AND state = 'COMPLETED'", archive=True) == 240
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
    starts = [start for of in left.values() for start in of.starts]
    assert len({start.pid for start in starts}) > 1, "the work was not shared"


RATE = 100
SECONDS = int(os.environ.get("SQLBROKER_TEST_THROTTLE_SECONDS", "0"))


@pytest.mark.parametrize("burst", [1, RATE], ids=["spaced", "together"])
async def test_a_throttle_is_exact_and_used(fleet: Fleet, burst: int) -> None:
    """Z10: 100 slots a second over 4 processes: never more in any second, starts within max_lag, 95
    % of them used; whether slots are spaced, or all of a second may come together.

    A machine that is busy with something else may start late and miss slots, and still none is
    given twice.
    """
    policies = PolicyFleet(fleet)
    seconds = SECONDS or 6
    throttle = ["Throttle", [RATE, "1s"], {"burst": burst}]
    subscribers = {"q": {"policies": [throttle], "options": {**LEASE, "max_workers": 20}}}
    for _ in range(PROCESSES):
        policies.start(subscribers)
    await fleet.live(PROCESSES)
    for _ in range(seconds):
        await policies.put({"q": [None] * RATE})
    async with policies.watched() as seen:
        await fleet.settled(seconds * RATE, timeout=120)
    await fleet.stop()
    left = (await policies.left())["q"]
    assert not checks.nothing_lost(left, policies.published["q"])
    max_lag = None if seen.busy else SECOND // 10
    assert not checks.throttled(left, RATE, SECOND, max_lag=max_lag)
    slots = [start.slot for start in left.starts if start.slot is not None]
    assert len(slots) >= seconds * RATE
    if burst == 1:
        assert len(set(slots)) == len(slots)
    assert len({start.pid for start in left.starts}) > 1, "the work was not shared"
    # The first burst needs no time.
    reached = (len(slots) - burst) / (max(slots) - min(slots)) * SECOND / RATE
    lags = sorted(start.at - start.slot for start in left.starts if start.slot is not None)
    told = (
        f"{reached:.3f} of the rate; lag {median(lags)} µs, {lags[-len(lags) // 100]} for 1 %, "
        f"most {lags[-1]}; {seen}"
    )
    logging.getLogger(__name__).info(told)
    # With a busy loop on each core and other tests (load 14) it was 0.28.
    assert reached >= (0.2 if seen.busy else 0.95), told


SLOW_RATE = 20
COMMIT = 0.8
"""Seconds that the COMMIT of a claim takes: eight times max_lag."""
BEFORE = 120
"""Slots before the kill; the first claims do not know yet how long they take."""
AFTER = 40
KNOWN_AFTER = 3 * SECOND


@pytest.mark.parametrize("key", [False, True], ids=["queue", "key"])
async def test_a_throttle_holds_with_slow_commits(fleet: Fleet, database: str, key: bool) -> None:
    """Z10: slots are exact, starts are at most `rate` in any `per` − `max_lag`, and no slot is lost
    to a slow COMMIT; also when one of two processes is killed while it runs handlers.
    """
    policies = PolicyFleet(fleet)
    policies.lease = 4 * SECOND
    subscribers = {
        "q": {
            "policies": [["Throttle", [SLOW_RATE, "1s"], {"burst": 1, "key": key}]],
            "seconds": 0.3,
            "options": {
                "max_workers": 40,
                "release_stuck_timeout": 4.0,
                "release_stuck_interval": 0.5,
                "max_fetch_interval": 0.1,
            },
        }
    }
    await policies.put({"q": ["a"] * (BEFORE + AFTER)})
    workers = [policies.start(subscribers, env={"TEST_WORKER_COMMITS": str(COMMIT)}) for _ in "ab"]

    async with policies.watched() as seen:
        await eventually(lambda: len(policies.starts("q")) >= BEFORE, timeout=90)
        victim = await policies.kill_at_work(workers, "q")
        await fleet.settled(BEFORE + AFTER, timeout=90)
    await fleet.stop()
    left = (await policies.left())["q"]
    assert not checks.nothing_lost(left, policies.published["q"])
    max_lag = SECOND // 10
    assert not checks.throttled(left, SLOW_RATE, SECOND, max_lag=None if seen.busy else max_lag)
    again = {start.id for start in left.starts if start.delivery > 1}
    interrupted = {start.id for start in left.starts if start.pid == victim.pid} & again
    assert interrupted, "the killed process was not running any handler"
    if not seen.busy:
        moments = [start.at for start in left.starts]
        assert not checks.over_rate(moments, SLOW_RATE, SECOND - max_lag - checks.SLACK)
    slots = sorted(start.slot for start in left.starts if start.slot is not None)[:BEFORE]
    steady = [slot for slot in slots if slot >= slots[0] + KNOWN_AFTER]
    reached = (len(steady) - 1) / (steady[-1] - steady[0]) * SECOND / SLOW_RATE
    told = f"{reached:.3f} of the rate with commits of {COMMIT} s; {seen}"
    logging.getLogger(__name__).info(told)
    assert reached >= (0.2 if seen.busy else 0.9), told

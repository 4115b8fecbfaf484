"""Z10: in no period are there more starts than a Throttle allows, and none starves, whatever
disturbs the processes; in virtual time, against the product's own decisions.
"""

import pytest

from faststream_sqlbroker.core.policies import Throttle
from tests.policies.slot_world import Disturbance, World

SECONDS = 30
DISTURBANCES = {
    "none": (Disturbance(), 0.95),
    "30 ms a statement": (Disturbance((0.03, 0.03)), 0.85),
    "20 to 150 ms": (Disturbance((0.02, 0.15)), 0.7),
    "blocked": (Disturbance(blocked=(0.32, 0.3)), 0.6),
    "stopped half of each second": (Disturbance(blocked=(1.0, 0.5)), 0.7),
    "stopped for 5 s": (Disturbance(blocked=(12.0, 5.0)), 0.5),
    "killed": (Disturbance(kill_every=5.0), 0.7),
    "clocks of another speed": (Disturbance((0.01, 0.05), skew=0.0004), 0.8),
}
"""What happens, and the part of the rate that is left at least: a deterministic figure."""


@pytest.mark.parametrize("name", DISTURBANCES)
def test_no_period_has_too_many_and_the_rate_is_used(name: str) -> None:
    disturbance, least = DISTURBANCES[name]
    for seed, burst in enumerate([10, 1, 3]):
        throttle = Throttle(10, per="1s", burst=burst)
        world = World([throttle], disturbance, seed)
        world.run(SECONDS)
        assert world.most(throttle.per) <= throttle.rate
        reached = len(world.starts) / (throttle.rate * SECONDS)
        assert reached >= least


def test_two_throttles_both_hold() -> None:
    per_second, per_minute = Throttle(10, per="1s"), Throttle(100, per="20s")
    world = World([per_second, per_minute], Disturbance((0.02, 0.15)), 1)
    world.run(SECONDS)
    assert world.most(per_second.per) <= per_second.rate
    assert world.most(per_minute.per) <= per_minute.rate
    assert len(world.starts) >= 180

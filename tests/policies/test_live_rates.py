"""The rates of all subscribers that live hold, also of those that get no slot; those of others soon
do no more.
"""

from collections.abc import Mapping

import pytest

from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.live_rates import UNREPORTED_LIFETIME, LiveRates
from faststream_sqlbroker.core.policies.throttle import OTHER_LIMITS_LIFETIME
from faststream_sqlbroker.core.status import build_description
from tests.policies.world import QUEUE, World

LOW = 2
HIGH = 50
KINDS = {
    "queue": {},
    "scope": {"scope": "mail"},
    "key": {"key": True},
    "dropping": {"when_exceeded": "drop"},
    "backing off by key": {"key": True, "when_exceeded": "backoff"},
}


def tell(world: World, live: Mapping[str, Throttle | None], lease: float = 20.0) -> None:
    """These subscribers live, and give signs of life; those of None have stopped."""
    says = {
        name: build_description(
            queues=[QUEUE],
            max_workers=1,
            ordered=False,
            policies=[throttle],
            paused=False,
            stopping=False,
        )
        for name, throttle in live.items()
        if throttle is not None
    }
    subscribers = world.store.live_subscribers
    if stopped := [name for name in live if name not in says]:
        world.run(subscribers.remove(stopped))
    world.run(subscribers.write_heartbeat(says, set(says), lease, clean=False))


def started(world: World, throttle: Throttle) -> int:
    """How many of a backlog start now; looked at anew."""
    world.policies = [throttle]
    world.advance(1_100_000)
    return len(world.claim(0, HIGH).rows)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_lower_rate_counts_without_any_slot(world: World, kind: dict[str, str]) -> None:
    """The other process is quicker, and takes all of them."""
    high, low = Throttle(HIGH, "1h", **kind), Throttle(LOW, "1h", **kind)  # type: ignore[arg-type]
    world.put_many(HIGH, "a")
    tell(world, {"old": high, "new": low})
    assert started(world, high) == LOW


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_raised_rate_holds_when_the_others_have_stopped(
    world: World, kind: dict[str, str]
) -> None:
    high, low = Throttle(HIGH, "1h", **kind), Throttle(LOW, "1h", **kind)  # type: ignore[arg-type]
    world.put_many(LOW, "a")
    tell(world, {"old": low})
    assert started(world, low) == LOW
    tell(world, {"old": None, "new": high})
    world.advance(UNREPORTED_LIFETIME)
    world.put_many(LOW, "a")
    assert started(world, high) == LOW


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_slots_are_known_for_the_longest_period(world: World, kind: dict[str, str]) -> None:
    """The one with the short period has written them; its own would be over."""
    quick, slow = Throttle(HIGH, "1s", **kind), Throttle(LOW, "1h", **kind)  # type: ignore[arg-type]
    world.put_many(HIGH, "a")
    tell(world, {"quick": quick, "slow": slow})
    assert started(world, quick) == LOW
    world.advance(60_000_000)
    world.run(world.store.remove_expired_states(100))
    tell(world, {"quick": quick, "slow": slow})
    world.put_many(HIGH, "a")
    assert started(world, quick) == 0


def test_of_a_subscriber_that_tells_seldom_its_slots_count(world: World) -> None:
    """It may have ended long ago, so its rate holds no longer than without signs of life."""
    high, low = Throttle(HIGH, "1h"), Throttle(LOW, "1h")
    world.put_many(HIGH, "a")
    tell(world, {"old": low}, lease=7200.0)
    tell(world, {"new": high})
    assert started(world, low) == LOW
    world.advance(UNREPORTED_LIFETIME)
    assert started(world, high) == 0
    world.advance(OTHER_LIMITS_LIFETIME)
    tell(world, {"new": high})
    assert started(world, high) == HIGH - LOW


def test_without_signs_of_life_slots_tell() -> None:
    noted = {(1, 2, 3): 4}
    assert LiveRates().get_limits(("throttle0:q", ""), noted, 5) == noted

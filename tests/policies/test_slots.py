"""Unused and used slots, on every database (Z10)."""

from collections.abc import Iterator

import pytest

from faststream_sqlbroker.core.policies import Throttle, Window
from tests.policies.world import World

SECOND = 1_000_000


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with World(database_url) as world:
        yield world


def test_unused_slots_are_free_and_used_ones_are_spent(world: World) -> None:
    """One database for all of them: making it takes the time."""
    a_free_slot_keeps_no_message_waiting(world)
    a_message_that_only_expires_leaves_its_slot(world)
    a_crash_gives_the_slot_up(world)
    slots_are_granted_for_the_time_of_the_answer(world)
    what_waits_for_a_worker_gets_a_slot_only_if_it_comes_soon(world)
    what_waits_for_a_worker_does_not_start_after_its_window(world)


def a_free_slot_keeps_no_message_waiting(world: World) -> None:
    """The next message may start at once, so the queue is claimed as if it had no throttle."""
    world.begin([Throttle(4, per="2s", burst=2)])
    first = world.put("a")
    claim = world.claim(0, 20)
    assert [row.id for row in claim.rows] == [first]
    assert not claim.gated
    second = world.put("a")
    third = world.put("a")
    claim = world.claim(0, 20)
    assert [row.id for row in claim.rows] == [second]
    assert claim.gated
    assert claim.again is not None
    assert 0.8 < claim.again <= 1
    assert third in world.live()


def a_message_that_only_expires_leaves_its_slot(world: World) -> None:
    """Expired messages do not hold a throttled queue up: the slot is the next one's, at once."""
    world.begin([Throttle(1, per="1h")])
    expired = world.put("a", expires_in=1)
    second = world.put("a")
    world.advance(2 * SECOND)
    claim = world.claim(0, 20)
    assert [row.id for row in claim.rows] == [expired]
    assert (claim.again, claim.gated) == (0.0, False)
    claim = world.claim(0, 20)
    assert [(row.id, row.slot and row.slot.at) for row in claim.rows] == [(second, world.now)]


def a_crash_gives_the_slot_up(world: World) -> None:
    """The handler may have started, so the next attempt needs a slot of its own."""
    world.begin([Throttle(1, per="10s", key=True, max_lag="1h")])
    message = world.put("a")
    [row] = world.claim(0, 5).rows
    world.crash(row)
    assert world.claim(0, 5).rows == []
    world.advance(9 * SECOND)
    assert world.claim(1, 5).rows == []
    world.advance(2 * SECOND)
    assert [row.id for row in world.claim(2, 5).rows] == [message]


def slots(world: World, **claim: int) -> list[float]:
    """Of a claim of process 0: seconds from now."""
    found = []
    for row in world.claim(0, 20, **claim).rows:
        assert row.slot is not None
        assert row.slot.at is not None
        found.append((row.slot.at - world.now) / SECOND)
    return found


def slots_are_granted_for_the_time_of_the_answer(world: World) -> None:
    """Where a COMMIT takes 0.8 s, the slots of that time would pass by before the handlers start;
    and those that come during the next claim must be granted by this one."""
    world.begin([Throttle(10, per="1s")])
    for _ in range(30):
        world.put("a")
    world.memories[0].took = [0.8]
    assert slots(world) == pytest.approx([0.8 + n / 10 for n in range(10)], abs=0.001)
    world.memories[1].took = [0.04]
    assert world.claim(1, 20).rows == [], "the slots of two processes overlap"


def what_waits_for_a_worker_gets_a_slot_only_if_it_comes_soon(world: World) -> None:
    """A handler that takes longer than usual must not make it miss the slot."""
    world.begin([Throttle(10, per="1s", max_lag="1s")])
    for _ in range(30):
        world.put("a")
    claim = world.claim(0, 20, starting=0)
    assert [row.slot and row.slot.at for row in claim.rows] == [world.now, world.now + 100_001]
    assert claim.gated
    world.begin([Throttle(10, per="1s")])
    for _ in range(30):
        world.put("a")
    claim = world.claim(0, 20, starting=1)
    assert [row.slot and row.slot.at for row in claim.rows] == [world.now]
    assert claim.again == pytest.approx(0.075, abs=0.001)


def what_waits_for_a_worker_does_not_start_after_its_window(world: World) -> None:
    """It is given back, and waits for the window to open."""
    world.begin([Window("00:00", "01:00")])
    world.put("a")
    [row] = world.claim(0, 20, starting=0).rows
    assert row.slot is not None
    assert row.slot.latest == world.now / SECOND + 3600
    world.begin([Window("00:00", "01:00"), Throttle(1, per="1s", max_lag="2h")])
    world.put("a")
    [row] = world.claim(0, 20).rows
    assert row.slot is not None
    assert row.slot.latest == world.now / SECOND + 3600

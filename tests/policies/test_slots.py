"""Unused and used slots, on every database (Z10)."""

from collections.abc import Iterator

import pytest

from faststream_sqlbroker.core.policies import Throttle
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
    assert [(row.id, row.slot and row.slot[0]) for row in claim.rows] == [(second, 0.0)]


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

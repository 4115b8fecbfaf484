"""Unused and used slots, on every database (Z10)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faststream_sqlbroker.core.policies import Throttle, Window, checked_policies
from faststream_sqlbroker.core.policies.throttle import Exceeded
from tests.policies.world import World, microseconds, outcome

SECOND = 1_000_000
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "reference" / "policies.md"


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
    what_is_within_the_rate_is_neither_refused_nor_delayed(world)
    what_was_let_in_is_not_refused_any_more(world)
    a_retry_takes_its_slot_when_its_turn_has_come(world)
    what_backs_off_comes_back_at_the_next_free_slots(world)
    the_throttles_of_the_documentation_do_what_they_say(world)


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
    world.begin([Throttle(10, per="1s", burst=1)])
    for _ in range(30):
        world.put("a")
    world.memories[0].took = [0.8]
    assert slots(world) == pytest.approx([0.8 + n / 10 for n in range(10)], abs=0.001)
    world.memories[1].took = [0.04]
    assert world.claim(1, 20).rows == [], "the slots of two processes overlap"


def what_waits_for_a_worker_gets_a_slot_only_if_it_comes_soon(world: World) -> None:
    """A handler that takes longer than usual must not make it miss the slot."""
    world.begin([Throttle(10, per="1s", burst=1, max_lag="1s")])
    for _ in range(30):
        world.put("a")
    claim = world.claim(0, 20, starting=0)
    assert [row.slot and row.slot.at for row in claim.rows] == [world.now, world.now + 100_001]
    assert claim.gated
    world.begin([Throttle(10, per="1s", burst=1)])
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


def what_is_within_the_rate_is_neither_refused_nor_delayed(world: World) -> None:
    """Whatever becomes of what is above it, and whenever it comes."""
    refused: dict[Any, str] = {
        "drop": "DISCARDED",
        "dead_letter": "FAILED",
        "backoff": "",
        "wait": "",
    }
    for key in (False, True):
        for exceeded, end in refused.items():
            world.begin([Throttle(7, per="1h", key=key, when_exceeded=exceeded)])
            first = [world.put("a") for _ in range(5)]
            assert [row.id for row in world.claim(0, 20).rows] == first
            world.advance(SECOND)
            rest = [world.put("a") for _ in range(4)]
            rows = world.claim(1, 20).rows
            assert [row.id for row in rows if row.outcome is None] == rest[:2]
            refuse = [row.id for row in rows if row.outcome is not None] or [*world.archived()]
            assert sorted(refuse) == (rest[2:] if end else [])


REFUSING: list[Exceeded] = ["drop", "dead_letter", "backoff"]


def what_was_let_in_is_not_refused_any_more(world: World) -> None:
    """A worker that was late gives messages back, and a process dies with some: they were within
    the rate, and go before what is new.
    """
    for exceeded in REFUSING:
        for key in (False, True):
            world.begin([Throttle(2, per="10s", key=key, when_exceeded=exceeded)])
            ids = [world.put("a") for _ in range(2)]
            late, lost = world.claim(0, 20).rows
            world.settle(late, outcome("release", 0))
            world.crash(lost)
            world.put("a", priority=-1)
            for _ in range(3):
                assert [row.id for row in world.claim(1, 20).rows if row.outcome is None] == []
                world.advance(SECOND)
            assert not set(ids) & set(world.archived())
            world.advance(8 * SECOND)
            new = [world.put("a") for _ in range(2)]
            starting = [row.id for row in world.claim(2, 20).rows if row.outcome is None]
            assert starting == ids, "what is new went before"
            assert exceeded != "drop" or set(new) <= set(world.archived())


def a_retry_takes_its_slot_when_its_turn_has_come(world: World) -> None:
    """Not when it arrives: what is urgent goes first, and another rate holds for it, too."""
    for exceeded in REFUSING:
        policy = Throttle(1, per="1h", when_exceeded=exceeded)
        world.begin([policy])
        retried = world.put("a")
        [row] = world.claim(0, 20).rows
        world.settle(row, outcome("nack", 0))
        assert world.claim(0, 20).rows == []
        world.advance(3601 * SECOND)
        urgent = world.put("a", priority=100)
        assert [row.id for row in world.claim(1, 20).rows] == [urgent]
        world.advance(59 * SECOND)
        assert world.claim(1, 20).rows == []
        world.advance(62 * SECOND)
        world.policies = [Throttle(1, per="1m", when_exceeded=exceeded)]
        assert [row.id for row in world.claim(2, 20).rows] == [retried]


def what_backs_off_comes_back_at_the_next_free_slots(world: World) -> None:
    """Not before, and a tenth of an interval later at most."""
    throttle = Throttle(2, per="10s", when_exceeded="backoff")
    world.begin([throttle])
    ids = [world.put("a") for _ in range(6)]
    begin = world.now
    assert [row.id for row in world.claim(0, 20).rows] == ids[:2]
    due = [round(microseconds(world.live()[i]["next_attempt_at"]) - begin) for i in ids[2:]]
    slots = [throttle.per + 1] * 2 + [2 * (throttle.per + 1)] * 2
    assert all(0 <= at - slot <= throttle.backoff for at, slot in zip(due, slots, strict=True))
    for wave in (ids[2:4], ids[4:]):
        world.advance(throttle.per + throttle.backoff)
        assert sorted(row.id for row in world.claim(0, 20).rows) == wave


def the_throttles_of_the_documentation_do_what_they_say(world: World) -> None:
    """Ten a second go, though only 10 000 a day may: the second throttle does not space them."""
    [shown] = re.findall(r"`(\[Throttle\(.*?\)\])`", DOCUMENTATION.read_text())
    policies = checked_policies(eval(shown, {"Throttle": Throttle}))
    world.begin(policies)
    for _ in range(40):
        world.put("a")
    for _ in range(3):
        assert slots(world) == [0.0] * 10
        world.advance(SECOND + 1_000)

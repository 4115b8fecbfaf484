"""Unused and used slots, on every database (Z10)."""

import re
from pathlib import Path
from typing import Any

import pytest

from faststream_sqlbroker.core.policies import Throttle, Window, validate_policies
from faststream_sqlbroker.core.policies.flags import BACKOFF_BITS
from faststream_sqlbroker.core.policies.throttle import Exceeded
from faststream_sqlbroker.database.policies.slot_use import MIN_START_DELAY
from tests.policies.world import World, microseconds, outcome

SECOND = 1_000_000
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "reference" / "policies.md"


def test_unused_slots_are_free_and_used_ones_are_spent(world: World) -> None:
    """One database for all of them: making it takes the time."""
    a_free_slot_keeps_no_message_waiting(world)
    a_message_that_only_expires_leaves_its_slot(world)
    a_crash_gives_the_slot_up(world)
    slots_are_granted_for_the_time_of_the_answer(world)
    what_waits_for_a_worker_gets_the_slot_of_when_it_has_one(world)
    what_waits_for_a_worker_does_not_start_after_its_window(world)
    what_is_within_the_rate_is_neither_refused_nor_delayed(world)
    what_was_let_in_is_not_refused_any_more(world)
    a_retry_takes_its_slot_when_its_turn_has_come(world)
    what_backs_off_does_so_for_twice_as_long_each_time(world)
    a_claim_tells_what_became_of_the_slots_before(world)
    a_clock_that_was_set_back_holds_nothing_up(world)
    the_throttles_of_the_documentation_do_what_they_say(world)


def a_free_slot_keeps_no_message_waiting(world: World) -> None:
    """The next message may start at once, so the queue is claimed as if it had no throttle."""
    world.begin([Throttle(4, per="2s", burst=2)])
    first = world.put("a")
    claim = world.claim(0, 20)
    assert [row.id for row in claim.rows] == [first]
    assert not claim.is_blocked
    second = world.put("a")
    third = world.put("a")
    claim = world.claim(0, 20)
    assert [row.id for row in claim.rows] == [second]
    assert claim.is_blocked
    assert claim.next_claim_in is not None
    assert 0.8 < claim.next_claim_in <= 1
    assert third in world.live()


def a_message_that_only_expires_leaves_its_slot(world: World) -> None:
    """Expired messages do not hold a throttled queue up: the slot is the next one's, at once."""
    world.begin([Throttle(1, per="1h")])
    expired = world.put("a", expires_in=1)
    second = world.put("a")
    world.advance(2 * SECOND)
    claim = world.claim(0, 20)
    assert [row.id for row in claim.rows] == [expired]
    assert (claim.next_claim_in, claim.is_blocked) == (0.0, False)
    claim = world.claim(0, 20)
    assert [(row.id, row.slot and row.slot.granted_at) for row in claim.rows] == [
        (second, world.now)
    ]


def a_crash_gives_the_slot_up(world: World) -> None:
    """The handler may have started, so the next attempt needs a slot of its own."""
    world.begin([Throttle(1, per="10s", key=True)])
    message = world.put("a")
    [row] = world.claim(0, 5).rows
    world.crash(row)
    assert world.claim(0, 5).rows == []
    world.advance(9 * SECOND)
    assert world.claim(1, 5).rows == []
    world.advance(2 * SECOND)
    assert [row.id for row in world.claim(2, 5).rows] == [message]


def slots(world: World, **claim: Any) -> list[float]:
    """Of a claim of process 0: seconds from now."""
    found = []
    for row in world.claim(0, 20, **claim).rows:
        assert row.slot is not None
        assert row.slot.granted_at is not None
        found.append((row.slot.granted_at - world.now) / SECOND)
    return found


def slots_are_granted_for_the_time_of_the_answer(world: World) -> None:
    """Where a COMMIT takes 0.8 s, the slots of that time would pass by before the handlers start;
    and those that come during the next claim must be granted by this one."""
    world.begin([Throttle(10, per="1s", burst=1)])
    world.put_many(30, "a")
    world.memories[0].durations = world.memories[0].swap_durations = [0.8]
    assert slots(world) == pytest.approx([0.8 + n / 10 for n in range(10)], abs=0.001)
    world.memories[1].durations = world.memories[1].swap_durations = [0.04]
    assert world.claim(1, 20).rows == [], "the slots of two processes overlap"
    world.begin([Throttle(10, per="1s", burst=1)])
    world.put_many(30, "a")
    memory = world.memories[0]
    # The next claim has to wait for the lock before it grants its first slot.
    memory.durations, memory.total_durations, memory.swap_durations = [0.4], [0.8], [0.8]
    assert 1.65 < slots(world)[-1] <= 1.8


def what_waits_for_a_worker_gets_the_slot_of_when_it_has_one(world: World) -> None:
    """It would miss an earlier one."""
    world.begin([Throttle(10, per="1s")])
    world.put_many(30, "a")
    assert slots(world, starting=3, wave=2, wave_time=0.05) == pytest.approx(
        [0, 0, 0, 0.05, 0.05, 0.1, 0.1, 0.15, 0.15, 0.2], abs=1e-5
    )
    world.begin([Throttle(10, per="1s", burst=1)])
    world.put_many(30, "a")
    assert slots(world, starting=0) == pytest.approx([0, 0.1], abs=0.001)


def what_waits_for_a_worker_does_not_start_after_its_window(world: World) -> None:
    """It is given back, and waits for the window to open."""
    world.begin([Window("00:00", "01:00")])
    world.put("a")
    [row] = world.claim(0, 20, starting=0).rows
    assert row.slot is not None
    assert row.slot.latest == world.now / SECOND + 3600
    world.begin([Window("00:00", "01:00"), Throttle(1, per="1s")])
    world.put("a")
    world.advance(3599 * SECOND + 999_000)
    [row] = world.claim(0, 20).rows
    assert row.slot is not None
    assert row.slot.latest <= world.now / SECOND + 0.001


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
            first = world.put_many(5, "a")
            assert [row.id for row in world.claim(0, 20).rows] == first
            world.advance(SECOND)
            rest = world.put_many(4, "a")
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
            ids = world.put_many(2, "a")
            late, lost = world.claim(0, 20).rows
            world.settle(late, outcome("release", 0))
            world.crash(lost)
            world.put("a", priority=-1)
            for _ in range(3):
                assert [row.id for row in world.claim(1, 20).rows if row.outcome is None] == []
                world.advance(SECOND)
            assert not set(ids) & set(world.archived())
            world.advance(8 * SECOND)
            new = world.put_many(2, "a")
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


def what_backs_off_does_so_for_twice_as_long_each_time(world: World) -> None:
    """By chance half of it more or less; a start begins anew."""
    world.begin([Throttle(60, per="600s", when_exceeded="backoff")])
    *first, other = world.put_many(61, "a")
    assert [row.id for row in world.claim(0, 100).rows] == first
    for before in range(5):
        due = microseconds(world.live()[other]["next_attempt_at"])
        mean = 10 * 2**before * SECOND
        assert mean / 2 - 1_000 <= due - world.now <= mean * 1.5 + 1_000
        assert world.live()[other]["policy_marks"] >> BACKOFF_BITS == before + 1
        world.advance(due - world.now + 1_000)
        assert world.claim(1, 100).rows == []
    world.advance(700 * SECOND)
    [row] = world.claim(1, 100).rows
    assert row.id == other
    world.settle(row, outcome("nack", 0))
    assert world.live()[other]["policy_marks"] >> BACKOFF_BITS == 0


def a_claim_tells_what_became_of_the_slots_before(world: World) -> None:
    """A start counts from when it was, a slot that was not used not at all; each told once."""
    for key in (False, True):
        world.begin([Throttle(2, per="10s", key=key)])
        world.put_many(4, "a")
        use = world.memories[0].slot_use
        started, unused = world.claim(0, 20).rows
        begin = world.now
        assert use.start(started)
        use.record_end(unused)
        world.settle(unused, outcome("release", 0))
        # Another process does not know that it was not used.
        assert world.claim(1, 20).rows == []
        [again] = world.claim(0, 20).rows
        assert world.claim(0, 20).rows == []
        world.advance(2 * MIN_START_DELAY)
        assert not use.start(again)
        world.settle(again, outcome("release", 0))
        world.advance(5 * SECOND)
        [last] = world.claim(0, 20).rows
        assert use.start(last)
        world.advance(begin + 9 * SECOND - world.now)
        assert world.claim(0, 20).rows == []
        world.advance(SECOND + 2_000)  # so exactly the clock is known
        [first] = world.claim(0, 20).rows
        assert first.slot is not None
        assert first.slot.granted_at is not None
        assert begin + 10 * SECOND < first.slot.granted_at <= world.now
        assert use.counts == {"started": 2, "missed": 1, "unused": 1}


def a_clock_that_was_set_back_holds_nothing_up(world: World) -> None:
    """A log that is far ahead of the clock is moved to it: the limit holds from now on."""
    hour = 3600 * SECOND
    for key in (False, True):
        world.begin([Throttle(2, per="10s", key=key)])
        for _ in range(6):
            world.put("a", ago=hour)
        assert len(world.claim(0, 20).rows) == 2
        world.advance(-hour)
        assert world.claim(0, 20).rows == []
        [(_, back)] = world.memories[0].slot_use.steps
        assert abs(back - hour) <= SECOND
        world.advance(10 * SECOND + 1_000)
        assert len(world.claim(0, 20).rows) == 2
        assert world.claim(1, 20).rows == []
        assert not world.memories[1].slot_use.steps


def the_throttles_of_the_documentation_do_what_they_say(world: World) -> None:
    """Ten a second go, though only 10 000 a day may: the second throttle does not space them."""
    [shown] = re.findall(r"`(\[Throttle\(.*?\)\])`", DOCUMENTATION.read_text())
    policies = validate_policies(eval(shown, {"Throttle": Throttle}))
    world.begin(policies)
    world.put_many(40, "a")
    for _ in range(3):
        # The starts are not told, so each may have been as late as it might.
        assert slots(world) == pytest.approx([0.0] * 10, abs=3 * MIN_START_DELAY / SECOND)
        world.advance(SECOND + 1_000)

"""Every pair of options of each policy: one after the other, as deployments change them, and side
by side. What debounces is in test_changed_options.py.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from faststream_sqlbroker.core.policies import (
    Concurrency,
    Debounce,
    Delay,
    KeepLast,
    Policy,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.policies.scopes import MEMBER_LIFETIME
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.status import build_description
from faststream_sqlbroker.database.parts.once import OnceStatus
from faststream_sqlbroker.database.policies import policy_holds
from tests.policies.covering import pairs
from tests.policies.slots import allowed, limits
from tests.policies.world import QUEUE, World, microseconds, outcome

SECOND = 1_000_000
HOUR = 3600 * SECOND
DELAYS = [Delay("1h"), Delay("3h"), Delay("24h")]
WINDOWS = [Window("02:00", "04:00"), Window("03:00", "09:00"), Window("05:00", "06:00")]
CONCURRENCIES = [
    [Concurrency(1), Concurrency(3), Concurrency(7)],
    [Concurrency(n, per_key=True) for n in (1, 2, 5)],
]
TTLS = [1.0, 60.0, 3600.0]
THROTTLES = [
    [
        Throttle(rate, "10s", key=key, when_exceeded=exceeded)
        for rate, exceeded in (
            (2, "wait"),
            (5, "wait"),
            (3, "drop"),
            (1, "dead_letter"),
            (4, "backoff"),
        )
    ]
    for key in (False, True)
]
HOLDERS: list[list[Policy]] = [
    [Delay("1h")],
    [Debounce("1h")],
    [KeepLast("1h")],
    [Throttle(1, "1h", when_exceeded="drop")],
    [Throttle(1, "1h", when_exceeded="backoff")],
    [Throttle(1, "1h", key=True, when_exceeded="dead_letter")],
    [Delay("1h"), Debounce("1h")],
]


def test_every_pair(world: World, database: str) -> None:
    """One database for all of them: making it takes the time."""
    for old, new in pairs(DELAYS, database):
        the_first_claimer_says_how_long_a_message_waits(world, old, new)
        a_shorter_delay_holds_for_what_waits(world, old, new)
    for old, new in pairs(WINDOWS, database):
        a_window_is_the_claimers(world, old, new)
    for same in CONCURRENCIES:
        for old, new in pairs(same, database):
            the_lower_limit_holds_while_both_claim(world, old, new)
    for before, after in pairs(TTLS, database):
        a_key_stays_claimed_as_it_was_claimed(world, before, after)


@pytest.mark.parametrize("throttles", THROTTLES, ids=["queue", "key"])
def test_every_pair_of_throttles(
    world: World, database: str, throttles: Sequence[Throttle]
) -> None:
    """Slots that were taken count under the new options, and while both take some the lower rate
    holds."""
    for old, new in pairs(throttles, database):
        slots_count_for_the_next_options(world, old, new)


def claim(world: World, process: int, *policies: Policy, limit: int = 20) -> list[ClaimedMessage]:
    world.policies = list(policies)
    return world.claim(process, limit).rows


def due_in(world: World, message: int) -> int:
    """Microseconds."""
    return microseconds(world.live()[message]["next_attempt_at"]) - world.now


def tell(world: World, *policies: Policy) -> None:
    """There is one live subscriber, which has these policies."""
    says = build_description(
        queues=[QUEUE],
        max_workers=1,
        ordered=False,
        policies=policies,
        paused=False,
        stopping=False,
    )
    world.run(
        world.store.live_subscribers.write_heartbeat(
            {"w:1": says}, {"w:1"}, 10_000_000, clean=False
        )
    )


def free(world: World) -> list[int | None]:
    """What a start of a new deployment does after a while."""
    found = world.run(
        world.store.policy_holds.find_removed(
            world.run(world.store.policy_holds.load_holds([QUEUE]))
        )
    )
    return [world.run(world.store.policy_holds.free_removed(hold)) for hold in found]


def the_first_claimer_says_how_long_a_message_waits(world: World, old: Delay, new: Delay) -> None:
    world.begin([old])
    first = world.put("a")
    assert claim(world, 0, old) == []
    second = world.put("a")
    assert claim(world, 1, new) == []
    assert claim(world, 0, old) == []
    assert (due_in(world, first), due_in(world, second)) == (old.delay, new.delay)
    world.advance(max(old.delay, new.delay))
    assert {row.id for row in claim(world, 1, new)} == {first, second}


def a_shorter_delay_holds_for_what_waits(world: World, old: Delay, new: Delay) -> None:
    world.begin([old])
    first = world.put("a")
    later = world.put("a", delay=30 * 24 * HOUR)
    assert claim(world, 0, old) == []
    tell(world, new)
    world.advance(600 * SECOND)
    waits = due_in(world, first)
    free(world)
    shorter = min(old.delay, new.delay)
    if new.delay > old.delay:
        assert due_in(world, first) == waits, "it has been delayed already"
    else:
        assert 0 <= due_in(world, first) - (shorter - 600 * SECOND) <= 3 * SECOND
    assert due_in(world, later) == 30 * 24 * HOUR - 600 * SECOND
    assert free(world) == [], "it is done once"


def a_window_is_the_claimers(world: World, old: Window, new: Window) -> None:
    """Nothing of a message is written, so nothing is to be converted."""
    world.begin([old])
    message = world.put("a")
    assert claim(world, 0, old) == []
    for _ in range(24 * 2):
        opens, closes = new.span(world.now)
        rows = claim(world, 1, new)
        assert bool(rows) is (opens <= world.now < closes)
        if rows:
            assert [row.id for row in rows] == [message]
            return
        world.advance(HOUR // 2)
    pytest.fail("it was lost")


def the_lower_limit_holds_while_both_claim(
    world: World, old: Concurrency, new: Concurrency
) -> None:
    world.begin([old])
    world.put_many(20, "a")
    rows = claim(world, 0, old)
    assert len(rows) == old.limit
    assert claim(world, 1, new) == []
    world.settle_all([(row, outcome("ack", 0)) for row in rows])
    world.advance(2 * SECOND)
    lower = min(old.limit, new.limit)
    rows = claim(world, 0, old)
    assert len(rows) == lower, "both claim, and the limit is the lower one"
    assert claim(world, 1, new) == []
    world.advance(MEMBER_LIFETIME)
    rows += claim(world, 1, new)
    assert len(rows) == max(lower, new.limit), "the old processes are gone"


def a_key_stays_claimed_as_it_was_claimed(world: World, before: float, after: float) -> None:
    world.begin([])

    def verdict(ttl: float) -> OnceStatus:
        world.put("a")
        [row] = claim(world, 0)
        found = world.run(world.store.policies.claim_keys([row], ttl))[row.id][0]
        world.settle(row, outcome("ack", 0))
        return found

    assert verdict(before) is OnceStatus.START
    world.advance(round(before * SECOND) - SECOND // 2)
    assert verdict(after) is OnceStatus.DUPLICATE
    world.advance(SECOND)
    assert verdict(after) is OnceStatus.START
    world.advance(round(after * SECOND) - SECOND // 2)
    assert verdict(before) is OnceStatus.DUPLICATE
    world.advance(SECOND)
    assert verdict(before) is OnceStatus.START


def slots_count_for_the_next_options(world: World, old: Throttle, new: Throttle) -> None:
    world.begin([old])
    ids: list[int] = []
    slots: list[int] = []
    together: list[int] = []
    """Since the process with the lower rate has taken a slot, and while both take some."""
    lower, higher = sorted((old, new), key=lambda each: each.rate)
    let_in: set[int] = set()
    for step in range(40):
        if step < 24:
            ids += world.put_many(2, "a")
        both = 8 <= step < 16
        policy = (old, new)[step % 2] if both else old if step < 8 else new
        rows = claim(world, step % 2, policy)
        for row in rows:
            if row.outcome is None:
                assert row.slot is not None
                assert row.slot.granted_at is not None
                slots.append(row.slot.granted_at)
                if both and (together or policy is lower):
                    together.append(row.slot.granted_at)
                let_in.add(row.id)
        world.settle_all([(row, row.outcome or outcome("ack", 0)) for row in rows])
        world.advance(3 * SECOND)
        if step > 24 and not world.live():
            break
    assert allowed(limits([higher]), slots), f"{old} to {new}"
    assert allowed(limits([lower]), together), f"{old} and {new}"
    gone = world.archived()
    refused = {i for i, row in gone.items() if row["reason"] == "throttled"}
    assert refused.isdisjoint(let_in)
    assert sorted([*let_in, *refused, *world.live()]) == ids
    if {old.when_exceeded, new.when_exceeded} <= {"wait", "backoff"}:
        assert not refused


@pytest.mark.parametrize("policies", HOLDERS, ids=str)
def test_what_waits_for_a_removed_policy_is_freed(world: World, policies: list[Policy]) -> None:
    """Not before a minute has passed since a process with it has claimed, nor while a subscriber
    has it; and never what waits for its own time."""
    world.begin(policies)
    held = world.put_many(3, "a")
    own = world.put("a", delay=50 * HOUR)
    for _ in range(2):
        rows = claim(world, 0, *policies)
        world.settle_all([(row, row.outcome or outcome("nack", 0)) for row in rows])
    waiting = [i for i in held if i in world.live()]
    assert waiting
    assert claim(world, 0, *policies) == []
    assert free(world) == []
    tell(world, *policies)
    world.advance(policy_holds.NOTE_VALIDITY + SECOND)
    assert free(world) == []
    assert claim(world, 1, *policies) == []
    world.advance(policy_holds.NOTE_VALIDITY + SECOND)
    tell(world)
    # What a throttle has let in asks for a slot every few seconds, so it is due already.
    later = [i for i in waiting if due_in(world, i) > 0]
    assert sum(n or 0 for n in free(world)) == len(later)
    assert [row.id for row in claim(world, 2)] == waiting
    assert own in world.live()
    assert free(world) == []


def test_a_large_backlog_is_freed_in_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind as many messages that wait for their own time, of one moment."""
    monkeypatch.setattr(policy_holds, "STEP_SIZE", 4)
    monkeypatch.setattr(policy_holds.FreeProgress, "__init__", _with_steps_of(4))
    world.begin([Delay("2h")])
    held = [world.put("a", priority=n % 2) for n in range(10)]
    assert claim(world, 0, Delay("2h")) == []
    at = {"delay": HOUR}
    own = world.put_many(10, "a", **at)
    world.advance(2 * 60 * SECOND)
    assert free(world) == [10]
    assert sorted(row.id for row in claim(world, 1)) == held
    assert set(own) <= set(world.live())


def _with_steps_of(size: int) -> Any:
    original = policy_holds.FreeProgress.__init__

    def init(self: Any, *arguments: Any, **fields: Any) -> None:
        original(self, *arguments, **fields)
        if not arguments and not fields:
            self.size = size

    return init

"""The database's clock goes ahead by hours and back: what policies put off does not wait for it to
come there again."""

from collections.abc import Set as AbstractSet

import pytest

from faststream_sqlbroker.core.policies import Debounce, Delay, KeepLast, Policy, Throttle
from tests.policies.world import QUEUE, World, microseconds, outcome

SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
STEP = 3 * HOUR
POLICIES: list[list[Policy]] = [
    [Delay("5m")],
    [Delay("10h")],
    [Debounce("5m")],
    [Debounce("5m", edge="leading")],
    [KeepLast("5m")],
    [Throttle(1, "5m", when_exceeded="backoff")],
    [Throttle(1, "5m", key=True, when_exceeded="backoff")],
    [Debounce("5m"), Throttle(1, "5m", key=True, when_exceeded="backoff")],
]


WAITING = [[Throttle(1, "5m")], [Throttle(1, "5m", key=True)]]
"""They give no message another due time: only their slots are ahead of the clock."""


class Steps:
    """A world whose clock can be set; those of the processes go on."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._set_by = 0
        world.process_clock.monotonic = lambda: (world.now - self._set_by) / SECOND

    def set_clock(self, by: int) -> None:
        """All of a sudden."""
        self._set_by += by
        self.world.advance(by)

    def mend(self) -> list[int]:
        """What a heartbeat does now and then: by how much the clock was set back, as it seems."""
        policy_holds = self.world.store.policy_holds
        holds = self.world.run(policy_holds.load_holds([QUEUE]))
        found = []
        for queue in {hold.queue for hold in holds if hold.is_ahead}:
            step = self.world.run(policy_holds.repair_clock_step(queue))
            assert step is not None
            found.append(step.back)
        return found

    def set_back(self) -> None:
        """By a step that is seen half a minute later."""
        self.set_clock(-STEP)
        self.handle_for(30 * SECOND)
        [back] = self.mend()
        assert STEP - 2 * MINUTE < back <= STEP

    def handle_for(self, length: int, stays: AbstractSet[int] | None = None) -> set[int]:
        """What two processes handle until then, one message after the other. They look every ten
        seconds, or sixty times, and no more once only `stays` are live.
        """
        done: set[int] = set()
        pause = max(10 * SECOND, length // 60)
        end = self.world.now + length
        while self.world.now < end:
            before = len(done)
            for process in (0, 1):
                rows = self.world.claim(process, 20).rows
                self.world.settle_all([(row, outcome("ack", 0)) for row in rows])
                done |= {row.id for row in rows}
            if stays is not None and len(done) > before and self.world.live().keys() <= stays:
                # Nothing of it comes back, and what stays does not come too early.
                self.world.advance(end - self.world.now)
                assert not any(self.world.claim(process, 20).rows for process in (0, 1))
                break
            self.world.advance(pause)
        return done


@pytest.mark.parametrize("newer", [False, True], ids=["alone", "with newer ones"])
@pytest.mark.parametrize("policies", POLICIES, ids=lambda p: " + ".join(map(str, p)))
def test_what_was_put_off_waits_as_long_as_it_would_have(
    world: World, policies: list[Policy], newer: bool
) -> None:
    """Z4: and what a publish has delayed stays as it was written."""
    world.begin(policies)
    steps = Steps(world)
    steps.set_clock(STEP)
    waiting = set(world.put_many(2, "a")) | {world.put("b")}
    own = world.put("c", delay=50 * HOUR)
    own_due = world.live()[own]["next_attempt_at"]
    handled = steps.handle_for(10 * SECOND)

    steps.set_clock(-STEP)
    if newer:
        waiting |= {world.put("a"), world.put("b")}
    # The claims of half a minute leave what proves the step.
    handled |= steps.handle_for(30 * SECOND)
    [back, *others] = steps.mend() or [STEP]
    assert STEP - MINUTE < back <= STEP
    assert others == []
    assert steps.mend() == []
    long = any(isinstance(policy, Delay) and policy.delay > STEP for policy in policies)
    if long:
        assert handled == set()
        dues = [microseconds(world.live()[i]["next_attempt_at"]) for i in waiting]
        assert max(dues) <= world.now + 10 * HOUR
        steps.set_clock(9 * HOUR + 50 * MINUTE)
        assert steps.handle_for(30 * SECOND) == set()
    handled |= steps.handle_for(35 * MINUTE, {own})
    assert set(world.live()) == {own}
    assert world.live()[own]["next_attempt_at"] == own_due
    ended = world.archived()
    assert ended.keys() == waiting
    assert {i for i, row in ended.items() if row["state"] == "COMPLETED"} == handled


@pytest.mark.parametrize("policies", WAITING, ids=str)
def test_slots_do_not_wait_for_the_clock(world: World, policies: list[Policy]) -> None:
    """Z10: the log of slots is set back as it is read."""
    world.begin(policies)
    steps = Steps(world)
    waiting = set(world.put_many(3, "a")) | {world.put("b")}
    steps.set_clock(STEP)
    assert len(steps.handle_for(10 * SECOND)) in {1, 2}
    steps.set_clock(-STEP)
    assert steps.mend() == []
    steps.handle_for(30 * MINUTE, set())
    assert world.archived().keys() == waiting


def test_a_backlog_that_was_due_already_goes_on(world: World) -> None:
    """Z4: its Delay is over, and it waits for slots."""
    world.begin([Delay("5m"), Throttle(1, "1m")])
    steps = Steps(world)
    steps.set_clock(STEP)
    waiting = set(world.put_many(30, "a"))
    assert 10 < len(steps.handle_for(20 * MINUTE)) < 30
    steps.set_back()
    steps.handle_for(20 * MINUTE, set())
    assert world.archived().keys() == waiting


def test_nothing_that_was_put_off_since_is_early(world: World) -> None:
    """Z4: also where a policy puts off for as long as the clock was set back."""
    for policy in (Delay("3h"), Debounce("3h"), KeepLast("3h"), Throttle(1, "3h", key=True)):
        world.begin([policy])
        steps = Steps(world)
        steps.set_clock(STEP)
        world.put("x")
        steps.handle_for(10 * SECOND)
        steps.set_clock(-STEP)
        first = {world.put("a")}
        handled = steps.handle_for(10 * SECOND)
        late = {world.put("a")} if handled & first else first
        steps.handle_for(10 * SECOND)
        steps.mend()
        assert not steps.handle_for(MINUTE) & late
        steps.world.advance(2 * HOUR + 50 * MINUTE)
        assert not steps.handle_for(MINUTE) & late
        assert late <= world.live().keys()


def test_what_waited_behind_another_waits_no_longer_for_it(world: World) -> None:
    """Z6: that one has run for long while the clock was ahead."""
    world.begin([Debounce("1m")])
    steps = Steps(world)
    steps.set_clock(STEP)
    world.put("a")
    world.claim(0, 5)
    world.advance(61 * SECOND)
    [row] = world.claim(0, 5).rows
    behind = world.put("a")
    assert steps.handle_for(20 * MINUTE) == set()
    steps.set_back()
    world.settle(row, outcome("ack", 0))
    assert steps.handle_for(5 * MINUTE, set()) == {behind}


def test_a_delayed_publish_that_joined_a_burst_comes(world: World) -> None:
    """Z6: it was due only by the clock that was ahead."""
    world.begin([Debounce("5m")])
    steps = Steps(world)
    message = world.put("a", delay=STEP + MINUTE)
    steps.set_clock(STEP)
    assert steps.handle_for(2 * MINUTE) == set()
    steps.set_back()
    assert steps.handle_for(10 * MINUTE, set()) == {message}


def test_a_burst_of_a_clock_that_was_ahead_discards_nothing(world: World) -> None:
    """Z6: `edge="leading"`."""
    world.begin([Debounce("5m", edge="leading")])
    steps = Steps(world)
    steps.set_clock(STEP)
    first = world.put("a")
    assert steps.handle_for(10 * SECOND) == {first}
    steps.set_clock(-STEP)
    steps.handle_for(40 * MINUTE)
    second = world.put("a")
    assert steps.handle_for(5 * MINUTE, set()) == {second}

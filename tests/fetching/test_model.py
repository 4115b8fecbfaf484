"""Whatever happens, no row that is due is forgotten: wake-ups, lost ones, pauses, full buffers,
slow and failing looks, claims that fail or have no answer, retries that are due later."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from faststream_sqlbroker.flow.deliver import ready
from faststream_sqlbroker.flow.deliver.claim import Claimer, Pace
from faststream_sqlbroker.flow.deliver.ready import (
    MAX_SCAN_INTERVAL,
    TRANSITIONS,
    Mode,
    ModeEvent,
    ReadyTracker,
    get_next_mode,
)
from tests.fetching.world import LONGEST, OUTCOMES, QUEUES, World
from tests.policies.machine import LONGER

HEALED = 60.0
"""Seconds in which pauses after failures, and of slow looks, are over."""
LATE = LONGEST + 0.05
"""Seconds within which a row is claimed while nothing fails and workers are free."""
LATE_WHILE_SLOW = MAX_SCAN_INTERVAL + LATE
EXAMPLES = 60
"""Each of the planted defects is found by 40 of them."""
MOST_IDLE_CALLS = 3 * HEALED
"""Statements in `HEALED` seconds without messages: one look a second, and those of slow looks."""

queues = st.sampled_from(QUEUES)
priorities = st.sampled_from([0, 0, 0, 7, -3])
lengths = st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.5, 4.0])


class Fetching(RuleBasedStateMachine):
    """Rules in any order; at the end everything works again, without a single wake-up."""

    options: dict[str, Any] = {}  # noqa: RUF012 - each kind has its own
    most_idle_calls = MOST_IDLE_CALLS

    def __init__(self) -> None:
        super().__init__()
        self.world = World(**self.options)

    def happening(self, data: st.DataObject) -> Callable[[], None]:
        """Something that may come at any time, also while a call is under way."""
        kind = data.draw(
            st.sampled_from(["put", "put", "lost", "lost", "late", "hint", "close", "open"]),
            "happening",
        )
        queue = data.draw(queues, "queue")
        priority = data.draw(priorities, "priority")
        due_in = data.draw(lengths, "due in")
        world = self.world

        def happen() -> None:
            if kind in {"put", "lost"}:
                world.put(queue, priority, due_in)
            if kind == "late":
                world.put(queue, priority, 0.0, ago=due_in)
            if kind in {"put", "hint"}:
                world.hint(frozenset((queue,)))
            if kind in {"close", "open"}:
                world.close(world.closed | {queue} if kind == "close" else set())

        return happen

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One thing happens, or time passes."""
        world = self.world
        kind = data.draw(
            st.sampled_from(
                ["now", "during_look", "mood", "wait", "wait", "take", "end", "end", "flush"]
            ),
            "kind",
        )
        if kind == "now":
            self.happening(data)()
        if kind == "during_look":
            world.during_look.append(self.happening(data))
        if kind == "mood":
            call = data.draw(st.sampled_from(["look", "look", "claim"]), "call")
            moods = {
                "look": ["slow", "slow", "fails", "hangs", "broken"],
                "claim": ["fails", "unknown, committed", "unknown, not committed"],
            }
            world.moods[call].append(data.draw(st.sampled_from(moods[call]), "mood"))
        if kind == "wait":
            world.advance(data.draw(lengths, "seconds"))
        if kind == "take":
            world.take()
        if kind == "end":
            world.end(OUTCOMES[data.draw(st.sampled_from(sorted(OUTCOMES)), "outcome")])
        if kind == "flush":
            world.flush()

    def teardown(self) -> None:
        world = self.world
        world.moods.clear()
        world.during_look.clear()
        world.close(set())
        world.work()
        world.advance(HEALED, world.work)
        assert not world.rows, f"forgotten: {world.rows}"
        self.check_pace(world)

    def check_pace(self, world: World) -> None:
        """As nothing fails now, each row comes in time without a wake-up, and little is sent."""
        for queue, priority, due_in in (("a", 0, 0.0), ("b", 0, 0.7), ("a", 99, 0.0)):
            row = world.put(queue, priority, due_in)
            blind = world.fetcher.ready.mode is Mode.BLIND
            world.advance(due_in + (LATE_WHILE_SLOW if blind else LATE), world.work)
            assert row.id not in world.rows, f"late: {row}"
        world.advance(HEALED, world.work)
        before = world.calls
        world.advance(HEALED)
        assert world.calls - before <= self.most_idle_calls


class Paced(Fetching):
    """Little room, and a pause after each full claim."""

    options = {"min_fetch_interval": 0.3, "max_workers": 1, "fetch_batch_size": 2}  # noqa: RUF012


class Weighted(Fetching):
    """A claim compares all queues."""

    options = {"queues": {"a": 3, "b": 1}}  # noqa: RUF012


class Told(Fetching):
    """A trigger tells of each row that becomes claimable, now or later; while nothing happens,
    nothing is sent."""

    options = {"max_fetch_interval": None}  # noqa: RUF012
    most_idle_calls = 0


def check(machine: type[Fetching]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=EXAMPLES * LONGER,
            stateful_step_count=40,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            derandomize=LONGER == 1,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate] if LONGER == 1 else [Phase.generate, Phase.shrink],
        ),
    )


@pytest.mark.parametrize("machine", [Fetching, Paced, Weighted, Told])
def test_no_due_row_is_forgotten(machine: type[Fetching]) -> None:
    check(machine)


@pytest.mark.parametrize("longest", [LONGEST, None])
def test_a_look_of_another_is_not_waited_for_in_a_spin(longest: float | None) -> None:
    world = World(max_fetch_interval=longest)
    world.advance(HEALED)
    row = world.put("a", 0, 0.7)
    world.advance(0.6)
    with patch.object(world.fetcher._poller, "is_polling_for", lambda _: True):
        if longest is not None:
            world.fetcher.pace.idle_wait = LONGEST
        world.advance(0.3)  # fails if the loop spins
    world.advance(LATE, world.work)
    assert row.id not in world.rows


async def _no_look(_: ReadyTracker) -> None:
    return None


def _without(source: Mode, event: ModeEvent) -> Any:
    table = {(a, e): b for a, e, b in TRANSITIONS if (a, e) != (source, event)}
    return patch.object(ready, "_NEXT", table)


def _longer_each_time(pace: Pace) -> float:
    pace.idle_wait *= 1.5
    return pace.idle_wait


async def _released(_: Claimer) -> None:
    return None


DEFECTS = {
    "slow looks do not go on in the background": [
        patch.object(ReadyTracker, "scan_in_background", _no_look)
    ],
    "an empty queue is claimed from what an old look found": [
        _without(Mode.FOLLOW, ModeEvent.FEWER),
        patch.object(ReadyTracker, "age", 0.0),
    ],
    "pauses grow without limit": [patch.object(Pace, "advance_idle_pause", _longer_each_time)],
    "claims without an answer are not given back": [
        patch.object(Claimer, "try_release_unanswered", _released)
    ],
    "a failed look counts as one that found nothing": [
        patch.object(ready, "_NEXT", dict.fromkeys(ready._NEXT, Mode.BLIND)),
        patch.object(ReadyTracker, "scan_in_background", _no_look),
    ],
}


TOLD_DEFECTS = {
    "triggers do not tell": patch.object(World, "_trigger", lambda *_: None),
    "no timer for later due times": patch.object(ReadyTracker, "list_next_due", lambda _: []),
}


@pytest.mark.parametrize("name", TOLD_DEFECTS)
def test_the_model_finds_what_makes_a_told_subscriber_forget(name: str) -> None:
    with TOLD_DEFECTS[name], pytest.raises(AssertionError, match=r"forgotten|late"):
        check(Told)


@pytest.mark.parametrize("name", DEFECTS)
def test_the_model_finds_planted_defects(name: str) -> None:
    with ExitStack() as stack:
        for defect in DEFECTS[name]:
            stack.enter_context(defect)
        with pytest.raises(AssertionError):
            check(Fetching)


def test_the_table_has_one_way_for_each_event() -> None:
    assert len({(source, event) for source, event, _ in TRANSITIONS}) == len(TRANSITIONS)
    assert {target for _, _, target in TRANSITIONS} == set(Mode) - {Mode.START}
    assert {event for _, event, _ in TRANSITIONS} == set(ModeEvent)
    assert get_next_mode(Mode.BLIND, ModeEvent.WOKEN) is Mode.BLIND, (
        "what is not in the table changes nothing"
    )

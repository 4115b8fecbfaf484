"""Throttle's slots against a model that knows all of them (Z10)."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies import throttle as of_throttle
from faststream_sqlbroker.core.policies.slot_log import SlotLog, Times
from faststream_sqlbroker.core.policies.throttle import (
    GROUPS_PER_PERIOD,
    dump_slots,
    find_first_slot,
    grant_slots,
    load_slots,
)
from tests.policies.slots import allowed, earliest, limits

SECOND = 1_000_000

throttles = st.integers(1, 9).flatmap(
    lambda rate: st.builds(
        Throttle,
        st.just(rate),
        # Periods that the rate divides and such as it does not, to the microsecond.
        st.sampled_from([1.0, 0.000007, 0.000010, 0.333333, 60.0]).filter(
            lambda per: per * SECOND >= rate
        ),
        burst=st.none() | st.integers(1, rate),
    )
)
steps = st.lists(st.integers(0, 20), min_size=1, max_size=40)
"""Times between two requests, in tenths of an interval."""


def log_of(throttle: Throttle, slots: Iterable[int] = ()) -> SlotLog:
    """Of slots whose starts were at them."""
    log = load_slots(throttle, None)
    for slot in slots:
        log.add(slot, slot)
    return log


def stored(throttle: Throttle, log: SlotLog, now: int) -> SlotLog:
    """What the next claim reads."""
    return load_slots(throttle, json.loads(json.dumps(dump_slots(throttle, log, now))))


def times(throttle: Throttle, waits: list[int]) -> list[int]:
    at = 1_000 * SECOND
    found = list[int]()
    for wait in waits:
        at += wait * throttle.per // throttle.rate // 10
        found.append(at)
    return found


@settings(deadline=None)
@given(throttles, steps)
@example(Throttle(5, per=1, burst=3), [0] * 20)
@example(Throttle(7, per="1m", burst=7), [0, 0, 0, 20, 0, 0, 0, 0, 0, 0])
def test_a_slot_is_the_earliest_that_the_rate_allows(throttle: Throttle, waits: list[int]) -> None:
    """Never more than `rate` in any period (its end included), never more than a burst at once, and
    none is idle."""
    granted: list[int] = []
    kept = log_of(throttle)
    for at in times(throttle, waits):
        slot = throttle.next_slot(kept, at)
        assert slot == earliest([throttle], granted, at)
        granted.append(slot)
        # Only what is stored is known to the next claim.
        kept.add(slot, slot)
        kept = stored(throttle, kept, at)
    assert allowed(limits([throttle]), granted)


@settings(deadline=None)
@given(throttles, steps)
def test_no_period_has_more_than_the_rate(throttle: Throttle, waits: list[int]) -> None:
    """As the issue says it: any half-open window of length `per`, wherever it begins."""
    granted: list[int] = []
    for at in times(throttle, waits):
        granted.append(throttle.next_slot(log_of(throttle, granted), at))
    for begin in {at for slot in granted for at in (slot - throttle.per + 1, slot)}:
        assert sum(begin <= slot < begin + throttle.per for slot in granted) <= throttle.rate


@settings(deadline=None)
@given(
    st.lists(throttles, min_size=1, max_size=3),
    st.integers(0, 20),
    st.integers(0, 5 * SECOND),
    st.data(),
)
def test_slots_are_such_as_all_throttles_grant(
    given_throttles: list[Throttle], most: int, ahead: int, data: st.DataObject
) -> None:
    """Several at a time, by several throttles: each is the earliest; the logs are not changed."""
    at = 1_000 * SECOND
    before: list[int] = []
    for wait in data.draw(steps, label="before"):
        before.append(earliest(given_throttles, before, at - wait * 50_000))
    logs = [log_of(each, before) for each in given_throttles]
    found = grant_slots(given_throttles, logs, at, at + ahead, most, 0)
    expected: list[int] = []
    while (
        len(expected) < most
        and (slot := earliest(given_throttles, before + expected, at)) <= at + ahead
    ):
        expected.append(slot)
    assert found == expected
    assert find_first_slot(given_throttles, logs, at) == earliest(
        given_throttles, before + expected, at
    )


def test_an_exact_rate_is_reached() -> None:
    """Rounding costs no more than a microsecond a slot."""
    for rate, burst in ((100, 1), (600, 1), (7, 3), (1_000, 10), (1_000, None)):
        throttle = Throttle(rate, per="1s", burst=burst)
        granted = log_of(throttle)
        for _ in range(10 * rate + 1):
            slot = throttle.next_slot(granted, 0)
            granted.add(slot, slot)
        assert 10 * SECOND <= granted.starts.last <= 10 * SECOND + len(granted)


@pytest.mark.parametrize("exceeded", ["wait", "backoff", "drop", "dead_letter"])
def test_what_is_within_the_rate_starts_at_once(exceeded: Any) -> None:
    """A rate of N means that any N of a period may go, whichever and whenever they come."""
    throttle = Throttle(1_000, per="1h", when_exceeded=exceeded)
    log = log_of(throttle)
    for at in (*[5] * 400, *range(10_000, 10_600)):
        assert throttle.next_slot(log, at) == at
        log.add(at, at)
    assert throttle.next_slot(log, 20_000) == 5 + throttle.per + 1


@settings(deadline=None)
@given(
    st.integers(3, 9),
    st.none() | st.integers(1, 3),
    st.sampled_from([1_500, 60 * SECOND]),
    st.lists(st.integers(0, 400), min_size=1, max_size=60),
)
def test_coarse_slots_keep_the_rate_and_are_a_grain_late_at_most(
    rate: int, burst: int | None, per: int, waits: list[int]
) -> None:
    """What a throttle of more than 10 000 slots does, with a few."""
    throttle = Throttle(rate, per=per / SECOND, burst=burst)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_throttle, "MAX_EXACT_STARTS", 2)
        coarse = throttle.rate > 2
        assert throttle.grain == (
            per // GROUPS_PER_PERIOD + (per % GROUPS_PER_PERIOD > 0) if coarse else 1
        )
        granted: list[int] = []
        log = log_of(throttle)
        at = 1_000 * SECOND
        for wait in waits:
            at += wait * per // 1_000
            slot = throttle.next_slot(log, at)
            best = earliest([throttle], granted, at)
            assert best <= slot <= best + (throttle.grain if coarse else 0)
            granted.append(slot)
            log.add(slot, slot)
            log = stored(throttle, log, at)
        assert allowed(limits([throttle]), granted)


def test_fifty_thousand_a_day_go_at_once_and_are_kept_in_little_space() -> None:
    """Above 10 000 slots the rate holds exactly, too; a slot is free again 0.2 % of a day late."""
    throttle = Throttle(50_000, per="24h")
    day = throttle.per
    log = log_of(throttle)
    for n in range(50_000):
        assert throttle.next_slot(log, n * 1_000) == n * 1_000
        log.add(n * 1_000, n * 1_000)
    log = stored(throttle, log, 50 * SECOND)
    assert day < throttle.next_slot(log, 50 * SECOND) <= day + throttle.grain
    for n in range(50_000):
        slot = throttle.next_slot(log, day + n * day // 40_000)
        log.add(slot, slot)
    now = log.starts.last
    text = json.dumps(dump_slots(throttle, log, now))
    assert len(text) < 20_000
    needs = throttle.needs(log, now)
    again = load_slots(throttle, json.loads(text))
    assert again.starts.to_runs(needs, now) == log.starts.to_runs(needs, now)


def test_a_quick_throttle_is_not_slowed_by_a_large_one_of_the_same_slots() -> None:
    """What the quick one needs is kept exactly, whichever of the two stores it; what only the large
    one needs is kept in little space.
    """
    large = Throttle(50_000, per="24h")
    quick = Throttle(10, per="1s")
    info: Any = None
    at = 1_000 * SECOND
    granted: list[int] = []
    while len(granted) < 2_000:
        throttle = (large, quick)[len(granted) % 2]
        log = load_slots(throttle, info)
        at = throttle.next_slot(log, at + 10_000)
        assert at == earliest([quick, large] if granted[1:] else [throttle], granted, at)
        granted.append(at)
        log.add(at, at)
        info = json.loads(json.dumps(dump_slots(throttle, log, at)))
    assert granted[-1] - granted[0] <= 200 * SECOND
    assert len(json.dumps(info)) < 2_000


PAIRS = [
    Throttle(2, per="10s"),
    Throttle(4, per="10s"),
    Throttle(4, per="10s", burst=1),
    Throttle(12, per="60s", burst=5),
    Throttle(3, per="2s"),
]


@pytest.mark.parametrize("old", PAIRS, ids=str)
@pytest.mark.parametrize("new", PAIRS, ids=str)
def test_old_and_new_options_side_by_side_keep_to_both(old: Throttle, new: Throttle) -> None:
    """And when the old process has taken none for a minute, the new one goes by its own."""
    granted: list[int] = []
    takers: list[Throttle] = []
    info: Any = None

    def take(throttle: Throttle, at: int) -> None:
        nonlocal info
        log = load_slots(throttle, info)
        slot = throttle.next_slot(log, at)
        if slot > at:
            return  # a claim that finds no slot writes none
        granted.append(slot)
        takers.append(throttle)
        log.add(slot, slot)
        info = json.loads(json.dumps(dump_slots(throttle, log, at)))

    for tick in range(400):
        take((old, new)[tick % 2], 1_000 * SECOND + tick * SECOND // 4)
    # Neither knows of the other before that has taken a slot.
    both = max(takers.index(throttle) for throttle in {old, new} & set(takers))
    assert allowed(limits([*set(takers)]), granted[both:])
    for tick in range(1_000):
        take(new, 1_100 * SECOND + tick * SECOND // 4)
    alone = [slot for slot in granted if slot > 1_161 * SECOND]
    assert allowed(limits([new]), alone)
    longest = 189 * SECOND * new.rate // new.per
    assert len(alone) >= 0.8 * min(longest, 189 * 4)


@pytest.mark.parametrize("info", [None, 5, "slots", [1], {}, {"other": [[1, 1]]}])
def test_an_invalid_state_counts_as_no_slots(info: object) -> None:
    assert len(load_slots(Throttle(1, per="1s"), info)) == 0


changes = st.lists(
    st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 30), st.integers(1, 3)),
    max_size=60,
)


@settings(deadline=None)
@given(changes, st.integers(0, 40))
def test_times_are_what_a_sorted_list_is(steps: list[tuple[str, int, int]], since: int) -> None:
    """In whatever order they come and go; also after they were stored."""
    times = Times()
    known: list[int] = []
    for what, at, count in steps:
        if what == "add":
            times.add(at, count)
            known = sorted([*known, *[at] * count])
        else:
            assert times.remove(at, 1) is (at in known)
            if at in known:
                known.remove(at)
    for each in (times, Times().add_runs(times.to_runs([(100, 1)], 100)), times.copy()):
        assert len(each) == len(known)
        assert each.last == (known[-1] if known else 0)
        assert each.count_since(since) == sum(at >= since for at in known)
        assert [each.get_nth_last(n) for n in range(1, len(known) + 1)] == known[::-1]
    assert len(Times().add_runs(times.to_runs([(5, 1)], 10))) == sum(at >= 5 for at in known)


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.data())
def test_what_is_merged_with_others_can_be_taken_out(ats: list[int], data: st.DataObject) -> None:
    """One of the group goes, and the others count as late as they did at least."""
    grain = 10
    times = Times(sorted(ats))
    merged = Times().add_runs(times.to_runs([(100, grain)], 100))
    at = data.draw(st.sampled_from(ats))
    assert merged.remove(at, grain)
    ats.remove(at)
    assert len(merged) == len(ats)
    assert all(
        merged.get_nth_last(n) >= known
        for n, known in enumerate(sorted(ats, reverse=True), start=1)
    )

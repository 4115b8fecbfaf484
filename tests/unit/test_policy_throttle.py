"""Throttle's slots against a model that knows all of them (Z10)."""

import json
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.throttle import (
    dump_slots,
    first_slot,
    load_slots,
    next_slots,
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
        burst=st.integers(1, rate),
    )
)
steps = st.lists(st.integers(0, 20), min_size=1, max_size=40)
"""Times between two requests, in tenths of an interval."""


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
    kept: list[int] = []
    for at in times(throttle, waits):
        slot = throttle.next_slot(kept, at)
        assert slot == earliest([throttle], granted, at)
        granted.append(slot)
        # Only what is stored is known to the next claim.
        kept = load_slots(json.loads(json.dumps(dump_slots(throttle, [*kept, slot]))))
        assert len(kept) <= throttle.kept
    assert allowed(limits([throttle]), granted)


@settings(deadline=None)
@given(throttles, steps)
def test_no_period_has_more_than_the_rate(throttle: Throttle, waits: list[int]) -> None:
    """As the issue says it: any half-open window of length `per`, wherever it begins."""
    granted: list[int] = []
    for at in times(throttle, waits):
        granted.append(throttle.next_slot(granted, at))
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
    logs = [list(before) for _ in given_throttles]
    found = next_slots(given_throttles, logs, at, at + ahead, most)
    assert all(log == before for log in logs)
    expected: list[int] = []
    while (
        len(expected) < most
        and (slot := earliest(given_throttles, before + expected, at)) <= at + ahead
    ):
        expected.append(slot)
    assert found == expected
    later = [[*log, *found] for log in logs]
    assert first_slot(given_throttles, later, at) == earliest(
        given_throttles, before + expected, at
    )


def test_an_exact_rate_is_reached() -> None:
    """Rounding costs no more than a microsecond a slot."""
    for rate, burst in ((100, 1), (600, 1), (7, 3), (1_000, 10)):
        throttle = Throttle(rate, per="1s", burst=burst)
        granted = list[int]()
        for _ in range(10 * rate):
            granted.append(throttle.next_slot(granted, 0))
        assert granted[-1] <= 10 * SECOND + len(granted)
        assert Fraction(granted[-1], SECOND) >= 9


@pytest.mark.parametrize("info", [None, 5, "slots", [1], {}, {"other": [[1, 1]]}])
def test_an_invalid_state_counts_as_no_slots(info: object) -> None:
    assert load_slots(info) == []

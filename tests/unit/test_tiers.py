"""Delay tiers: the largest that fits, else the shortest."""

from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker import Hops, SetupError, next_hop, plan_hops

waits = st.floats(0.001, 1e9) | st.integers(0, 10**9)
tiers = st.lists(st.floats(0.001, 1e6) | st.integers(1, 10**6), min_size=1, max_size=6)


def test_p8_eight_minutes_over_five_and_one() -> None:
    """P8."""
    assert plan_hops("8m", ["1m", "5m"]) == [Hops(300.0, 1), Hops(60.0, 3)]
    assert plan_hops(timedelta(minutes=8), [300, 60]) == [(300.0, 1), (60.0, 3)]


@pytest.mark.parametrize(
    ("wait", "over", "plan"),
    [
        ("0s", ["1m"], []),
        ("-5m", ["1m"], []),
        ("1ms", ["5m", "1m"], [(60.0, 1)]),
        ("5m1s", ["5m", "1m"], [(300.0, 1), (60.0, 1)]),
        ("59m59s", ["1h", "1m"], [(60.0, 60)]),
        ("10m", ["5m", "5m"], [(300.0, 2)]),
        (0.3, [0.1], [(0.1, 3)]),
        ("7m", ["5m", "3m"], [(300.0, 1), (180.0, 1)]),
    ],
)
def test_the_plan_of_a_wait(wait: Any, over: Any, plan: list[tuple[float, int]]) -> None:
    assert plan_hops(wait, over) == plan


@given(waits, tiers)
def test_hops_cover_the_wait_and_exceed_it_by_less_than_the_shortest(
    wait: float, over: list[float]
) -> None:
    plan = plan_hops(wait, over)
    total = sum((Fraction(hop.seconds) * hop.times for hop in plan), Fraction())
    assert total >= Fraction(float(wait))
    assert total - Fraction(float(wait)) < Fraction(float(min(over)))
    assert len(plan) <= len(over) + 1
    assert all(hop.times >= 1 and hop.seconds in map(float, over) for hop in plan)
    sizes = [hop.seconds for hop in plan]
    assert sizes == sorted(set(sizes), reverse=True), "each tier once, the longest first"


@given(st.integers(0, 5_000), st.lists(st.integers(1, 900), min_size=1, max_size=4))
def test_the_plan_is_what_single_hops_come_to(wait: int, over: list[int]) -> None:
    """By the rule itself: the largest duration ≤ remaining wait, else the shortest, until nothing
    remains."""
    left = wait
    taken = []
    while (hop := next_hop(left, over)) is not None:
        fitting = [size for size in over if size <= left]
        assert hop == (max(fitting) if fitting else min(over))
        taken.append(hop)
        left -= int(hop)
    assert taken == [hop.seconds for hop in plan_hops(wait, over) for _ in range(hop.times)]


@pytest.mark.parametrize("over", [[], ["0s"], ["1m", -1], "5m", 5, None, ["soon"], [True]])
def test_invalid_tiers_are_refused(over: Any) -> None:
    with pytest.raises(SetupError, match=r"tier"):
        plan_hops("1m", over)


def test_an_invalid_wait_is_refused() -> None:
    with pytest.raises(SetupError, match=r"^wait cannot be 'soon'"):
        next_hop("soon", ["1m"])

"""What a measured Throttle came to: the rate, the most starts in a period, targets, the table."""

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.rates import (
    LEAST,
    RATE,
    SECONDS,
    Kept,
    middle,
    most_in_a_period,
    steady_rate,
)
from tools.reliability.rates import render

BURSTS = [float(second) for second in range(int(SECONDS)) for _ in range(RATE)]
GOOD = Kept(rate=9.8, lag=0.0, most=10, plain=900.0)


def test_bursts_and_single_starts_have_the_same_rate() -> None:
    spaced = [n / RATE for n in range(150)]
    assert steady_rate(BURSTS, SECONDS) == pytest.approx(RATE)
    assert steady_rate(spaced, SECONDS) == pytest.approx(RATE)


def test_a_queue_that_stands_still_has_a_lower_rate() -> None:
    assert steady_rate(BURSTS[:50], SECONDS) == pytest.approx(40 / (SECONDS - 2))
    assert steady_rate(BURSTS[:RATE], SECONDS) == 0.0


def test_the_most_in_a_period() -> None:
    assert most_in_a_period(BURSTS, []) == RATE
    assert most_in_a_period([0.0, 0.9], []) == 2
    early = [0.0] * RATE + [0.9]
    assert most_in_a_period(early, []) == RATE + 1
    # The first ten had started when their process was stopped, half a second before their notes.
    assert most_in_a_period(early, [(-0.5, -0.01)]) == RATE


def test_medians_and_the_worst_of_all_runs() -> None:
    runs = [GOOD, replace(GOOD, rate=5.0, most=11), replace(GOOD, rate=9.0, lag=0.3, plain=40.0)]
    assert middle(runs) == Kept(rate=9.0, lag=0.0, most=11, plain=900.0)


def test_targets() -> None:
    assert all(GOOD.missed(how) == [] for how in LEAST)
    assert replace(GOOD, most=11).missed("none") == ["at most 10 in 1 s"]
    blocked = replace(GOOD, rate=7.5, lag=0.3)
    assert blocked.missed("blocked") == []
    assert blocked.missed("jitter") == ["0.8 of N"]
    assert replace(blocked, lag=0.1).missed("blocked") == ["0.9 of N / (per + lag)"]
    assert GOOD.measured
    assert not replace(GOOD, plain=19.0).measured


def case(problem: str = "", **changed: Any) -> dict[str, Any]:
    runs = [vars(replace(GOOD, **changed))] * 3
    return {
        "disturbance": "jitter",
        "kind": "sqlite",
        "runs": runs,
        "problem": problem,
        "ran_on": "2026-01-01, SQLite 3.40.1",
        "code": "new",
    }


def test_the_table_keeps_what_was_missed_or_not_finished() -> None:
    reached, missed, unfinished = render("new", [case(), case(rate=6.0), case("too busy")])[-3:]
    assert "| jitter | sqlite | 0.980 | 0.980 | 0.00 s | 10 | 900 a second | reached |" in reached
    assert "**missed: 0.8 of N**" in missed
    assert "**not finished: too busy**" in unfinished
    assert "other code" not in reached
    [other] = render("old", [{**case("nothing started"), "runs": []}])[-1:]
    assert "| – | – | – | – | – | **not finished: nothing started** |" in other
    assert "**other code**" in other

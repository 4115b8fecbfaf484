"""What a measured Throttle came to: the rate, its worst time, targets, the table."""

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.rates import (
    LEAST,
    RATE,
    SECONDS,
    Case,
    Kept,
    steady_rate,
    worst_rate,
)
from tools.reliability.rates import render

BURSTS = [float(second) for second in range(int(SECONDS)) for _ in range(RATE)]
GOOD = Kept(rate=9.8, lag=0.0, over=0, plain=900.0)


def test_bursts_and_single_starts_have_the_same_rate() -> None:
    spaced = [n / RATE for n in range(150)]
    assert steady_rate(BURSTS, SECONDS) == pytest.approx(RATE)
    assert steady_rate(spaced, SECONDS) == pytest.approx(RATE)


def test_a_queue_that_stands_still_has_a_lower_rate() -> None:
    assert steady_rate(BURSTS[:50], SECONDS) == pytest.approx(40 / (SECONDS - 2))
    assert steady_rate(BURSTS[:RATE], SECONDS) == 0.0


def test_the_worst_time_of_the_plain_queue() -> None:
    assert worst_rate(BURSTS, 0.0, SECONDS) == RATE
    gap = [at for at in BURSTS if not 6 <= at < 8]
    assert worst_rate(gap, 0.0, SECONDS) == RATE / 2
    assert worst_rate([], 0.0, SECONDS) == 0.0


def test_medians_and_the_worst_of_all_runs() -> None:
    runs = [GOOD, replace(GOOD, rate=5.0, over=2), replace(GOOD, rate=9.0, lag=0.3, plain=40.0)]
    with_lag = pytest.approx(0.98)
    assert Case.of(runs) == Case(share=0.9, share_with_lag=with_lag, lag=0.0, over=2, plain=40.0)


def test_targets() -> None:
    def missed(how: str, **changed: Any) -> list[str]:
        return Case.of([replace(GOOD, **changed)]).missed(how)

    assert all(missed(how) == [] for how in LEAST)
    assert missed("none", over=1) == ["at most 10 in 1 s"]
    assert missed("blocked", rate=7.5, lag=0.3) == []
    assert missed("jitter", rate=7.5, lag=0.3) == ["0.8 of N"]
    assert missed("blocked", rate=7.5, lag=0.1) == ["0.9 of N / (per + lag)"]


def test_a_slow_plain_queue_excuses_missed_targets_only() -> None:
    slow = replace(GOOD, plain=9.0)
    assert all(run.is_conclusive("jitter") for run in (GOOD, slow, replace(GOOD, rate=6.0)))
    assert not replace(slow, rate=6.0).is_conclusive("jitter")
    assert replace(slow, over=1).is_conclusive("jitter")


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
    assert "| jitter | sqlite | 0.980 | 0.980 | 0.00 s | 0 | 900 a second | reached |" in reached
    assert "**missed: 0.8 of N**" in missed
    assert "**not finished: too busy**" in unfinished
    assert "code `" not in reached
    [other] = render("old", [{**case("nothing started"), "runs": []}])[-1:]
    assert "| – | – | – | – | – | **not finished: nothing started** |" in other
    assert "code `new`" in other

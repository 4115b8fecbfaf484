"""Retry strategies: formulas, limits, extreme attempts and arguments."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker.core.retry import (
    ConstantRetryStrategy,
    ConstantWithJitterRetryStrategy,
    ExponentialBackoffRetryStrategy,
    ExponentialBackoffWithJitterRetryStrategy,
    LinearRetryStrategy,
    NoRetryStrategy,
    RetryStrategyTemplate,
    compute_delay,
    default_retry_strategy,
    is_retried,
)
from faststream_sqlbroker.core.retry.base import MAX_DELAY_SECONDS
from faststream_sqlbroker.exceptions import SetupError

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
LAST = FIRST + timedelta(minutes=1)
Make = Callable[..., RetryStrategyTemplate]

ALL: list[tuple[Make, dict[str, Any]]] = [
    (ConstantRetryStrategy, {"delay_seconds": 2}),
    (ConstantWithJitterRetryStrategy, {"base_delay_seconds": 2, "jitter_seconds": 1}),
    (LinearRetryStrategy, {"initial_delay_seconds": 1, "step_seconds": 3}),
    (ExponentialBackoffRetryStrategy, {"initial_delay_seconds": 1}),
    (ExponentialBackoffWithJitterRetryStrategy, {"initial_delay_seconds": 1}),
]


def ask(strategy: Any, attempts: int = 1, exception: BaseException | None = None) -> float | None:
    return compute_delay(
        strategy,
        first_attempt_at=FIRST,
        last_attempt_at=LAST,
        attempts_count=attempts,
        exception=exception,
    )


def test_constant_delays() -> None:
    strategy = ConstantRetryStrategy(delay_seconds=2)
    assert [ask(strategy, n) for n in (1, 2, 50)] == [2.0, 2.0, 2.0]


def test_linear_delays() -> None:
    strategy = LinearRetryStrategy(initial_delay_seconds=1, step_seconds=3)
    assert [ask(strategy, n) for n in (1, 2, 3)] == [1.0, 4.0, 7.0]


def test_exponential_is_capped() -> None:
    strategy = ExponentialBackoffRetryStrategy(
        initial_delay_seconds=1, multiplier=3, max_delay_seconds=20
    )
    assert [ask(strategy, n) for n in (1, 2, 3, 4, 5)] == [1.0, 3.0, 9.0, 20.0, 20.0]


@given(
    seed=st.integers(),
    base=st.floats(0, 1e6),
    jitter=st.floats(0, 1e6),
    attempts=st.integers(1, 10**9),
)
def test_constant_jitter_stays_in_its_bounds(
    seed: int, base: float, jitter: float, attempts: int
) -> None:
    strategy = ConstantWithJitterRetryStrategy(
        base_delay_seconds=base, jitter_seconds=jitter, _random=Random(seed)
    )
    assert max(0.0, base - jitter) <= strategy.get_delay_seconds(attempts) <= base + jitter


@given(
    seed=st.integers(),
    attempts=st.integers(1, 10**9),
    factor=st.floats(0, 3),
    cap=st.floats(0, 1e6),
)
def test_exponential_jitter_stays_in_its_bounds(
    seed: int, attempts: int, factor: float, cap: float
) -> None:
    plain = ExponentialBackoffRetryStrategy(initial_delay_seconds=1, max_delay_seconds=cap)
    strategy = ExponentialBackoffWithJitterRetryStrategy(
        initial_delay_seconds=1, max_delay_seconds=cap, jitter_factor=factor, _random=Random(seed)
    )
    delay = plain.get_delay_seconds(attempts)
    assert delay <= strategy.get_delay_seconds(attempts) <= min(cap, delay * (1 + factor) + 1e-9)


def test_jitter_differs_between_instances_and_calls() -> None:
    draws = {
        ConstantWithJitterRetryStrategy(base_delay_seconds=5, jitter_seconds=1).get_delay_seconds(1)
        for _ in range(20)
    }
    assert len(draws) > 15


def test_jitter_is_repeatable_with_a_seed() -> None:
    def draw() -> float:
        return ConstantWithJitterRetryStrategy(
            base_delay_seconds=5, jitter_seconds=1, _random=Random(7)
        ).get_delay_seconds(1)

    assert draw() == draw()


@pytest.mark.parametrize(("make", "arguments"), ALL)
@pytest.mark.parametrize("attempts", [10**9, 10**30, 10**400])
def test_extreme_attempts_do_not_overflow(
    make: Make, arguments: dict[str, Any], attempts: int
) -> None:
    strategy = make(**arguments)
    assert 0 <= strategy.get_delay_seconds(attempts) <= MAX_DELAY_SECONDS
    assert ask(strategy, attempts) is not None


@pytest.mark.parametrize("multiplier", [1, 1.0, 1e300])
def test_extreme_multipliers(multiplier: float) -> None:
    none = ExponentialBackoffRetryStrategy(initial_delay_seconds=0, multiplier=multiplier)
    assert none.get_delay_seconds(10**9) == 0
    one = ExponentialBackoffRetryStrategy(initial_delay_seconds=1, multiplier=multiplier)
    assert one.get_delay_seconds(10**9) == (1.0 if multiplier == 1 else MAX_DELAY_SECONDS)


@pytest.mark.parametrize(("make", "arguments"), ALL)
def test_the_limits_of_strategies(make: Make, arguments: dict[str, Any]) -> None:
    assert ask(make(**arguments), 1000) is not None
    limited = make(**arguments, max_attempts=3)
    assert ask(limited, 2) is not None
    assert ask(limited, 3) is None
    assert ask(limited, 4) is None
    # A minute has passed already.
    assert ask(make(**arguments, max_total_delay_seconds=60), 1) is None
    assert ask(make(**arguments, max_total_delay_seconds=70), 1) is not None


def test_the_total_delay_may_be_used_up_to_its_end() -> None:
    assert ask(ConstantRetryStrategy(delay_seconds=2, max_total_delay_seconds=62)) == 2.0
    assert ask(ConstantRetryStrategy(delay_seconds=2.001, max_total_delay_seconds=62)) is None


def test_naive_times_work_too() -> None:
    strategy = ConstantRetryStrategy(delay_seconds=2, max_total_delay_seconds=100)
    naive = datetime(2026, 1, 1)
    due = strategy.get_next_attempt_at(
        first_attempt_at=naive, last_attempt_at=naive, attempts_count=1
    )
    assert due == naive + timedelta(seconds=2)


def test_durations_are_taken_in_any_form() -> None:
    strategy = ExponentialBackoffRetryStrategy(
        initial_delay_seconds="500ms",
        max_delay_seconds=timedelta(minutes=1),
        max_total_delay_seconds="2h45m",
    )
    assert (strategy.initial_delay_seconds, strategy.max_delay_seconds) == (0.5, 60.0)
    assert strategy.max_total_delay_seconds == 9900.0


@pytest.mark.parametrize(("make", "arguments"), ALL)
@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), "5", "-1s", True, None])
def test_wrong_lengths_are_refused(make: Make, arguments: dict[str, Any], wrong: Any) -> None:
    for name in arguments:
        with pytest.raises(SetupError, match=f"^{name} "):
            make(**{**arguments, name: wrong})
    if wrong is not None:
        with pytest.raises(SetupError, match=r"^max_total_delay_seconds "):
            make(**arguments, max_total_delay_seconds=wrong)


@pytest.mark.parametrize(("make", "arguments"), ALL)
@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3"])
def test_wrong_attempts_are_refused(make: Make, arguments: dict[str, Any], wrong: Any) -> None:
    with pytest.raises(
        SetupError, match=r"^max_attempts must be a whole number of 1 or more, or None"
    ):
        make(**arguments, max_attempts=wrong)


@pytest.mark.parametrize("wrong", [0.5, 0, -2, float("nan"), float("inf"), 10**400, True, "2"])
def test_wrong_multipliers_are_refused(wrong: Any) -> None:
    with pytest.raises(SetupError, match=r"^multiplier must be a finite number of 1 or more"):
        ExponentialBackoffRetryStrategy(initial_delay_seconds=1, multiplier=wrong)


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf"), True, "2"])
def test_wrong_jitter_factors_are_refused(wrong: Any) -> None:
    with pytest.raises(SetupError, match=r"^jitter_factor must be a finite number of 0 or more"):
        ExponentialBackoffWithJitterRetryStrategy(initial_delay_seconds=1, jitter_factor=wrong)


def test_a_wrong_cap_is_refused() -> None:
    with pytest.raises(SetupError, match=r"^max_delay_seconds must be 0 or more seconds, got -1$"):
        ExponentialBackoffRetryStrategy(initial_delay_seconds=1, max_delay_seconds=-1)


def test_arguments_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        ConstantRetryStrategy(5)  # type: ignore[call-arg]


@pytest.mark.parametrize(("make", "arguments"), ALL)
def test_strategies_are_asked_only_about_attempts_made(
    make: Make, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="attempts_count must be 1 or more"):
        make(**arguments).get_delay_seconds(0)
    assert ask(make(**arguments), 0) is not None  # next_delay asks about the first


@pytest.mark.parametrize(("make", "arguments"), ALL)
def test_only_some_errors_are_worth_a_retry(make: Make, arguments: dict[str, Any]) -> None:
    strategy = make(**arguments, retry_on=OSError, no_retry_on=[PermissionError, KeyError])
    for retried in (None, OSError(), ConnectionError()):
        assert ask(strategy, exception=retried) is not None
    for final in (ValueError(), PermissionError(), KeyError(), KeyboardInterrupt()):
        assert ask(strategy, exception=final) is None


GROUP = ExceptionGroup


@pytest.mark.parametrize(
    ("options", "error", "retried"),
    [
        ({"no_retry_on": ValueError}, ValueError(), False),
        ({"no_retry_on": (ValueError, KeyError)}, UnicodeError(), False),
        ({"no_retry_on": [ValueError]}, KeyError(), True),
        ({"retry_on": (OSError,)}, TimeoutError(), True),
        ({"retry_on": (OSError,)}, ValueError(), False),
        ({"retry_on": Exception, "no_retry_on": ValueError}, ValueError(), False),
        ({"retry_on": ValueError, "no_retry_on": ValueError}, ValueError(), False),
        ({"no_retry_on": ValueError}, GROUP("g", [KeyError(), ValueError()]), False),
        ({"no_retry_on": ValueError}, GROUP("g", [GROUP("h", [ValueError()])]), False),
        ({"no_retry_on": ExceptionGroup}, GROUP("g", [KeyError()]), False),
        ({"retry_on": OSError}, GROUP("g", [OSError(), GROUP("h", [TimeoutError()])]), True),
        ({"retry_on": OSError}, GROUP("g", [OSError(), ValueError()]), False),
        ({"retry_on": (OSError, ExceptionGroup)}, GROUP("g", [ValueError()]), True),
    ],
)
def test_subclasses_and_groups_count(
    options: dict[str, Any], error: Exception, retried: bool
) -> None:
    strategy = ConstantRetryStrategy(delay_seconds=1, **options)
    assert (ask(strategy, exception=error) is not None) is retried
    assert is_retried(strategy, error) is retried


def test_a_cause_does_not_count() -> None:
    error = RuntimeError()
    error.__cause__ = ValueError()
    assert (
        ask(ConstantRetryStrategy(delay_seconds=1, no_retry_on=ValueError), exception=error) == 1.0
    )


@pytest.mark.parametrize(
    "wrong", [(), [], 5, "ValueError", ValueError(), [ValueError, 5], {"a": 1}, int]
)
@pytest.mark.parametrize("option", ["retry_on", "no_retry_on"])
def test_an_invalid_error_class_is_refused(option: str, wrong: Any) -> None:
    with pytest.raises(
        SetupError,
        match=rf"^{option} must be an exception class, or a tuple or list of one or more",
    ):
        ConstantRetryStrategy(delay_seconds=1, **{option: wrong})


def test_a_custom_strategy_may_decide_which_errors_are_retried() -> None:
    class Own:
        def retries(self, exception: BaseException) -> bool:
            return "again" in str(exception)

    assert is_retried(Own(), ValueError("again"))  # type: ignore[arg-type]
    assert not is_retried(Own(), ValueError("never"))  # type: ignore[arg-type]
    assert is_retried(None, ValueError())
    assert is_retried(NoRetryStrategy(), ValueError())


def test_no_retry_never_retries() -> None:
    strategy = NoRetryStrategy()
    assert strategy.max_attempts == 1
    assert ask(strategy) is None
    assert ask(None) is None
    with pytest.raises(ValueError, match="attempts_count must be 1 or more"):
        strategy.get_next_attempt_at(first_attempt_at=FIRST, last_attempt_at=LAST, attempts_count=0)
    with pytest.raises(
        SetupError, match="max_attempts of NoRetryStrategy must be 1, got 3; use Constant"
    ):
        NoRetryStrategy(max_attempts=3)


def test_the_default_is_the_documented_one() -> None:
    strategy = default_retry_strategy()
    for attempts in range(1, 10):
        delay = ask(strategy, attempts)
        assert delay is not None
        assert 2 ** (attempts - 1) <= delay <= min(300, 1.5 * 2 ** (attempts - 1))
    assert ask(strategy, 10) is None
    assert strategy.max_delay_seconds == 300

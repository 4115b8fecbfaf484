"""How strategies are called: with and without the exception, and which results are valid."""

import functools
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from faststream_sqlbroker.core.retry import (
    ConstantRetryStrategy,
    RetryStrategyProto,
    RetryStrategyTemplate,
    compute_delay,
)
from faststream_sqlbroker.core.retry.base import MAX_DELAY_SECONDS

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
LAST = FIRST + timedelta(minutes=1)


def ask(strategy: Any, attempts: int = 1, exception: BaseException | None = None) -> float | None:
    return compute_delay(
        strategy,
        first_attempt_at=FIRST,
        last_attempt_at=LAST,
        attempts_count=attempts,
        exception=exception,
    )


class Old:
    """A strategy written for the three arguments."""

    def get_next_attempt_at(
        self, *, first_attempt_at: datetime, last_attempt_at: datetime, attempts_count: int
    ) -> datetime | None:
        assert first_attempt_at <= last_attempt_at
        return last_attempt_at + timedelta(seconds=attempts_count)


class Branching:
    def get_next_attempt_at(
        self, *, last_attempt_at: datetime, exception: Any, **_: Any
    ) -> datetime | None:
        return None if isinstance(exception, KeyError) else last_attempt_at


class AnyKeyword:
    def get_next_attempt_at(self, **asked: Any) -> datetime | None:
        return None if asked["exception"] is not None else FIRST


def test_a_strategy_of_three_arguments_still_works() -> None:
    assert ask(Old(), 3, KeyError()) == 3.0


def test_a_wrapped_strategy_of_three_arguments_still_works() -> None:
    class Wrapped:
        @functools.wraps(Old.get_next_attempt_at)
        def get_next_attempt_at(self, **asked: Any) -> datetime | None:
            return Old().get_next_attempt_at(**asked)

    assert ask(Wrapped(), 3, KeyError()) == 3.0


def test_the_strategy_sees_the_exception() -> None:
    assert ask(Branching(), 1, KeyError()) is None
    assert ask(Branching(), 1, ValueError()) == 0.0
    assert ask(Branching(), 1) == 0.0
    assert ask(AnyKeyword(), 1, ValueError()) is None


def test_a_due_time_in_the_past_is_now() -> None:
    assert ask(AnyKeyword()) == 0.0


def test_a_subclass_may_branch_on_the_exception() -> None:
    @dataclass(kw_only=True)
    class OnlyTimeouts(ConstantRetryStrategy):
        def get_next_attempt_at(
            self, *, exception: BaseException | None = None, **asked: Any
        ) -> datetime | None:
            if not isinstance(exception, TimeoutError):
                return None
            return super().get_next_attempt_at(exception=exception, **asked)

    assert ask(OnlyTimeouts(delay_seconds=1), 1, TimeoutError()) == 1.0
    assert ask(OnlyTimeouts(delay_seconds=1), 1, ValueError()) is None


def test_a_subclass_of_the_template_only_says_how_long() -> None:
    class Fibonacci(RetryStrategyTemplate):
        def get_delay_seconds(self, attempts_count: int) -> float:
            before = 0
            now = 1
            for _ in range(attempts_count - 1):
                before, now = now, before + now
            return now

    strategy: RetryStrategyProto = Fibonacci(max_attempts=6)
    assert [ask(strategy, n) for n in range(1, 7)] == [1.0, 1.0, 2.0, 3.0, 5.0, None]


@pytest.mark.parametrize(
    ("delay", "result"),
    [(-5.0, 0.0), (float("inf"), MAX_DELAY_SECONDS), (1e308, MAX_DELAY_SECONDS)],
)
def test_delays_of_subclasses_are_bounded(delay: float, result: float) -> None:
    class Odd(RetryStrategyTemplate):
        def get_delay_seconds(self, attempts_count: int) -> float:
            return delay

    assert ask(Odd()) == result


def test_a_strategy_that_fails_is_heard() -> None:
    class NotANumber(RetryStrategyTemplate):
        def get_delay_seconds(self, attempts_count: int) -> float:
            return float("nan")

    class Seconds:
        def get_next_attempt_at(self, **_: Any) -> float:
            return 5.0

    with pytest.raises(ValueError, match="a delay must be a number of seconds, got nan"):
        ask(NotANumber())
    with pytest.raises(
        TypeError, match="get_next_attempt_at must return a datetime or None, got float"
    ):
        ask(Seconds())


def test_a_callable_without_a_signature_is_asked_with_three_arguments() -> None:
    class Opaque:
        __signature__ = "none"

        def __call__(self, **asked: Any) -> None:
            assert asked == {
                "first_attempt_at": FIRST,
                "last_attempt_at": LAST,
                "attempts_count": 1,
            }

    class Strategy:
        get_next_attempt_at = Opaque()

    assert ask(Strategy(), 1, ValueError()) is None

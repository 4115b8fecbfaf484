"""What a retry strategy is, and the one question that is put to it."""

import inspect
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, Protocol

from faststream_sqlbroker.core.retry.checks import bounded


class RetryStrategyProto(Protocol):
    """Decides whether and when a failed message is tried again.

    `exception` is what the handler raised, or None after a plain nack. It may be left out of the
    signature: strategies with the three other arguments are called without it. A strategy that raises
    ends the message as FAILED.
    """

    def get_next_attempt_at(
        self,
        *,
        first_attempt_at: datetime,
        last_attempt_at: datetime,
        attempts_count: int,
        exception: BaseException | None = None,
    ) -> datetime | None:
        """Return when to try again, or None to give up; of the same awareness as `last_attempt_at`."""
        ...


def attempts_limit(strategy: RetryStrategyProto | None) -> int | None:
    """Return `strategy.max_attempts`; None if there is none, or it is no whole number of 1 or more."""
    limit = getattr(strategy, "max_attempts", None)
    return limit if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1 else None


def retries_after(strategy: RetryStrategyProto | None, exception: BaseException | None) -> bool:
    """Whether `strategy` tries again after `exception` at all; one without a method `retries` does.

    Raises:
        Exception: Whatever that method raises.
    """
    retries = getattr(strategy, "retries", None)
    return exception is None or not callable(retries) or bool(retries(exception))


def next_delay(
    strategy: RetryStrategyProto | None,
    *,
    first_attempt_at: datetime,
    last_attempt_at: datetime,
    attempts_count: int,
    exception: BaseException | None = None,
) -> float | None:
    """Ask `strategy` how long to wait before the next attempt; `attempts_count` 0 is asked about as 1.

    Returns:
        Seconds from `last_attempt_at`, 0 or more; None to give up (always so without a strategy).

    Raises:
        TypeError: The strategy returned something else than a datetime or None.
        Exception: Whatever the strategy raises.
    """
    if strategy is None:
        return None
    method: Any = strategy.get_next_attempt_at
    extra = (
        {"exception": exception} if _takes_exception(getattr(method, "__func__", method)) else {}
    )
    due = method(
        first_attempt_at=first_attempt_at,
        last_attempt_at=last_attempt_at,
        attempts_count=max(attempts_count, 1),
        **extra,
    )
    if due is None:
        return None
    if not isinstance(due, datetime):
        raise TypeError(
            f"{type(strategy).__name__}.get_next_attempt_at must return a datetime or None, "
            f"got {type(due).__name__}"
        )
    return bounded((due - last_attempt_at).total_seconds())


@lru_cache(maxsize=256)
def _takes_exception(function: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    found = parameters.get("exception")
    return found is not None and found.kind is not found.POSITIONAL_ONLY

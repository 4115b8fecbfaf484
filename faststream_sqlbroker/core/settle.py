"""Decide what a finished delivery means for its row. Pure: no clock, no I/O.

Table of decisions: `core.states.TRANSITIONS`.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from faststream_sqlbroker.core.outcome import (
    Abandon,
    Ack,
    Discard,
    Move,
    Nack,
    Outcome,
    Postpone,
    Reject,
    Release,
)
from faststream_sqlbroker.core.retry import attempts_limit, next_delay
from faststream_sqlbroker.core.rows import Acked, ClaimedMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import clean_text, describe_exception

NO_OUTCOME = "no_outcome"
UNKNOWN_OUTCOME = "unknown_outcome"
MAX_ATTEMPTS = "max_attempts"
MAX_DELIVERIES = "max_deliveries"
EXPIRED = "expired"
REJECTED = "rejected"
RETRY_STRATEGY_ERROR = "retry_strategy_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRules:
    """What a subscriber says about endings: its retry strategy and what it keeps in the archive."""

    retry_strategy: Any = None
    retain_on_ack: bool = True
    retain_on_reject: bool = True


def settle(
    row: ClaimedMessage,
    outcome: Outcome | None,
    rules: SettleRules,
    *,
    ended_after: float,
    attempted: bool = True,
) -> Settlement:
    """Turn `outcome` (None: the handler recorded none) into what the database is told.

    Args:
        row: The delivery that ended.
        outcome: What it ended in.
        rules: The subscriber's rules.
        ended_after: Seconds from the claim to the end.
        attempted: Whether a handler was started.
    """
    base = Settlement(row.id, row.lease_token, None, attempted=attempted, ended_after=ended_after)
    match outcome:
        case Ack():
            return _final(base, MessageState.COMPLETED, rules.retain_on_ack)
        case Nack():
            return _nack(base, row, outcome, rules)
        case Reject():
            return _fail(base, rules, outcome.reason or REJECTED, outcome.error)
        case Postpone():
            base.state, base.delay = MessageState.PENDING, max(0.0, outcome.delay)
            base.attempted, base.uncharge = False, True
        case Release():
            base.attempted, base.uncharge = False, True
        case Abandon():
            base.state, base.attempted = MessageState.PENDING, False
        case Move():
            base.state, base.queue, base.payload = MessageState.PENDING, outcome.queue, outcome.payload
            base.delay = max(0.0, outcome.delay)
        case Discard():
            base.reason = clean_text(outcome.reason, limit=255)
            return _final(base, MessageState.DISCARDED, rules.retain_on_reject)
        case None:
            return _fail(base, rules, NO_OUTCOME, None)
    return base


def acked(row: ClaimedMessage, rules: SettleRules, *, ended_after: float) -> Settlement:
    """`settle` of an Ack after an attempt, which nearly all of them are."""
    return Acked(row.id, row.lease_token, ended_after, rules.retain_on_ack)


def _final(base: Settlement, state: MessageState, keep: bool) -> Settlement:
    base.state, base.archive = state, keep
    return base


def _fail(base: Settlement, rules: SettleRules, reason: str, error: BaseException | None) -> Settlement:
    base.reason = clean_text(reason, limit=255)
    if error is not None:
        base.error = describe_exception(error)
    return _final(base, MessageState.FAILED, rules.retain_on_reject)


def _nack(base: Settlement, row: ClaimedMessage, outcome: Nack, rules: SettleRules) -> Settlement:
    attempts = row.attempts_count + (1 if base.attempted else 0)
    strategy = rules.retry_strategy
    try:
        delay = _delay_after(base, row, outcome, strategy, attempts)
    except Exception as error:  # noqa: BLE001 - a user's strategy may raise anything; the row must not hang
        error.__context__ = outcome.error
        return _fail(base, rules, RETRY_STRATEGY_ERROR, error)
    if delay is None:
        limit = attempts_limit(strategy)
        reason = MAX_ATTEMPTS if limit is not None and attempts >= limit else "retries_exhausted"
        return _fail(base, rules, reason, outcome.error)
    base.state, base.delay = MessageState.RETRYABLE, delay
    if outcome.error is not None:
        base.error = describe_exception(outcome.error)
    return base


def _delay_after(
    base: Settlement, row: ClaimedMessage, outcome: Nack, strategy: Any, attempts: int
) -> float | None:
    limit = attempts_limit(strategy)
    if outcome.delay is not None:
        # The handler's own delay replaces the strategy's, but never its limit on attempts.
        return None if limit is not None and attempts >= limit else max(0.0, outcome.delay)
    last = row.acquired_at + timedelta(seconds=base.ended_after)
    return next_delay(
        strategy,
        first_attempt_at=row.first_attempt_at or last,
        last_attempt_at=last,
        attempts_count=attempts,
        exception=outcome.error,
    )

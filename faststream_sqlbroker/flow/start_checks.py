"""What must not start: unreadable, delivered or attempted too often, expired."""

from datetime import timedelta

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Discard, Outcome, Reject
from faststream_sqlbroker.core.reasons import CANCELLED, EXPIRED, MAX_ATTEMPTS, MAX_DELIVERIES
from faststream_sqlbroker.core.retry import attempts_limit
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules


def refusal(
    row: ClaimedMessage, rules: SettleRules, most_deliveries: float, clock: Clock
) -> Outcome | None:
    """What `row` ends in without a handler; None if one may start."""
    if row.cancelled is not None:
        return Discard(CANCELLED, text=row.cancelled)
    if row.outcome is not None:
        return row.outcome  # it could not be read, or a policy says so
    if row.deliveries_count > most_deliveries:
        return Reject(MAX_DELIVERIES)
    attempts = attempts_limit(rules.retry_strategy)
    if attempts is not None and row.attempts_count >= attempts:
        return Reject(MAX_ATTEMPTS)
    if row.expires_at is not None:
        # The database's clock: its time of the claim plus what has passed here since.
        now = row.acquired_at + timedelta(seconds=clock.monotonic() - row.claimed_monotonic)
        if row.expires_at <= now:
            return Discard(EXPIRED)
    return None


def refusal_text(row: ClaimedMessage, outcome: Reject) -> str:
    """What to log of it."""
    if outcome.error is not None:
        return (
            f"message {row.id} of queue {row.queue!r} cannot be read and is rejected: "
            f"{outcome.error}"
        )
    if outcome.reason not in {MAX_DELIVERIES, MAX_ATTEMPTS}:
        return (
            f"message {row.id} of queue {row.queue!r} becomes a dead letter by a policy: "
            f"{outcome.reason}"
        )
    return (
        f"Message delivery limit was exceeded for message {row.id} of queue {row.queue!r} "
        f"({outcome.reason}: {row.deliveries_count} deliveries, {row.attempts_count} attempts)"
    )

"""Decide the next state of a message when a delivery ends. Pure: no clock, no I/O.

Each error gets a fingerprint: a hash that is equal for errors of one cause, even if their
texts differ.

The state transitions are listed in `core.states.TRANSITIONS`.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

from faststream_sqlbroker.core.access import Activities, Activity
from faststream_sqlbroker.core.outcome import (
    Abandon,
    Ack,
    Defer,
    Discard,
    Nack,
    NotReady,
    Outcome,
    Reject,
    Release,
    Relocate,
    Skip,
)
from faststream_sqlbroker.core.reasons import (
    CANCELLED,
    MAX_ATTEMPTS,
    NO_OUTCOME,
    NOT_READY,
    NOT_RETRIED,
    REJECTED,
    RETRY_STRATEGY_ERROR,
    SKIPPED,
)
from faststream_sqlbroker.core.retry import (
    compute_delay,
    get_max_attempts,
    get_strategy_limit,
    is_retried,
)
from faststream_sqlbroker.core.rows import AckSettlement, ClaimedMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import clean_text, describe_exception, replace_headers

_FINGERPRINT_FRAMES = 3
"""Innermost stack frames in a fingerprint: where the error was raised, and from where it was
called."""
_FINGERPRINT_MEMBERS = 5
"""Members of an exception group in a fingerprint; a group may have any number."""
FINGERPRINT_LENGTH = 16
"""Hexadecimal digits (64 bits), so that a million different errors hardly ever collide."""


def compute_fingerprint(error: BaseException) -> str:
    """Return 16 hexadecimal digits, equal for errors of the same type raised at the same place.

    The hash covers the module and function of the three innermost frames of the traceback. It does
    not cover the text, which often contains an id, nor the line number, which changes with the next
    release.
    """
    try:
        parts = "\n".join(_iter_fingerprint_parts(error))
    except Exception:  # noqa: BLE001 - the error's class may run its own code here
        # Read the name without running code of the error's class.
        parts = type.__getattribute__(type(error), "__qualname__")
    return hashlib.sha256(parts.encode(errors="replace")).hexdigest()[:FINGERPRINT_LENGTH]


def _iter_fingerprint_parts(error: BaseException) -> Iterator[str]:
    """Yield the type of `error`, and module and function of the three innermost frames.

    The fingerprints of the first members of an exception group follow, because the group itself
    says nothing about the cause.
    """
    yield f"{type(error).__module__}.{type(error).__qualname__}"
    traceback = error.__traceback__
    frames: deque[str] = deque(maxlen=_FINGERPRINT_FRAMES)
    while traceback is not None:
        frame = traceback.tb_frame
        frames.append(f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}")
        traceback = traceback.tb_next
    yield from frames
    if isinstance(error, BaseExceptionGroup):
        for member in islice(error.exceptions, _FINGERPRINT_MEMBERS):
            yield compute_fingerprint(member)


DEAD_LETTER = "dead-letter"
"""Header of a message in a dead letter queue: its origin and the reason."""
ARCHIVED_BEFORE = "archived-before"
"""Header of a message that an undo has returned to the archive: `at` is the time of its first
archiving, `publish_count` its count at that time. A different count means that the message has been
published again since."""
MAX_HEADER_ERROR_BYTES = 1024
"""Maximum length in bytes of the error text in that header. Every claim reads the headers, so they
stay short; the column last_error has the complete text."""
_FINAL_OUTCOMES = Ack | Reject | Discard
"""Outcomes that remove the message from the message table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRules:
    """A subscriber's options for settling: retries, archive and dead letters."""

    retry_strategy: Any = None
    retain_on_ack: bool = True
    retain_on_reject: bool = True
    dead_letter_queue: str | None = None
    """Queue for messages that would be FAILED. If None, they are archived as FAILED."""


def settle(  # noqa: C901 - the table of decisions
    row: ClaimedMessage,
    outcome: Outcome | None,
    rules: SettleRules,
    *,
    ended_after: float,
    attempted: bool = True,
) -> Settlement:
    """Turn an outcome into the settlement to write: the message's next state in the database.

    Called when a delivery ends. A delivery that is counted without an attempt is later taken for a
    lost lease, of which `max_deliveries` allows few.

    Args:
        row: The delivery that ended.
        outcome: The outcome of the delivery, or None if the handler recorded none.
        rules: The subscriber's options.
        ended_after: Seconds from the claim to the end.
        attempted: True if a handler was started.
    """
    base = Settlement(row.id, row.lease_token, None, attempted=attempted, ended_after=ended_after)
    # One match over all outcomes: it is the table of decisions, so it is not split.
    outcome = _apply_cancellation(row, outcome)
    match outcome:
        case Skip():
            base.reason = SKIPPED
            return _set_final_state(base, MessageState.COMPLETED, rules.retain_on_ack)
        case Ack():
            return _set_final_state(base, MessageState.COMPLETED, rules.retain_on_ack)
        case Nack():
            return _apply_nack(base, row, outcome, rules)
        case Reject():
            return _fail(base, row, rules, outcome.reason or REJECTED, outcome.error)
        case Defer() | NotReady():
            return _postpone(base, row, outcome, rules)
        case Release():
            # No handler has run, or an HTTP client has released the message, so neither an attempt
            # nor a delivery counts.
            base.attempted = False
            base.uncharge = True
        case Abandon():
            base.state = MessageState.PENDING
            # With a limit on attempts, none is charged, and the delivery counts as a lost lease.
            # Without a limit, a charged attempt costs nothing and keeps it from counting as such.
            base.attempted = get_max_attempts(rules.retry_strategy) is None
            base.delay = outcome.delay
            _set_error(base, outcome.error)
        case Relocate():
            base.state = MessageState.PENDING
            base.queue = outcome.queue
            base.delay = max(0.0, outcome.delay)
            base.payload = outcome.payload
            base.headers = outcome.headers
            base.key = outcome.key
            base.lookup = outcome.lookup
            base.published_again = outcome.published_again
            # A hop is a move by forward_to. A move by a handler restarts their count; a move to the
            # dead letter queue leaves the count unchanged.
            base.hop = int(outcome.is_hop)
        case Discard():
            base.reason = outcome.reason
            base.related_id = outcome.related_id
            base.error = outcome.text
            return _set_final_state(base, MessageState.DISCARDED, rules.retain_on_reject)
        case None:
            return _fail(base, row, rules, NO_OUTCOME, None)
    return base


def _apply_cancellation(row: ClaimedMessage, outcome: Outcome | None) -> Outcome | None:
    """Replace an outcome that would bring a cancelled message back by a Discard.

    An operator requested the cancellation during the delivery. A final outcome, or a move to
    another queue, stays: the handler ended first.
    """
    if row.cancelled is None or isinstance(outcome, _FINAL_OUTCOMES):
        return outcome
    if isinstance(outcome, Relocate) and outcome.queue != row.queue:
        return outcome
    return Discard(CANCELLED, text=row.cancelled)


def build_ack_settlement(
    row: ClaimedMessage, rules: SettleRules, *, ended_after: float
) -> Settlement:
    """Build the settlement of an Ack after an attempt: a shortcut for the most frequent outcome."""
    return AckSettlement(row.id, row.lease_token, ended_after, rules.retain_on_ack)


def get_required_activities(settlements: Iterable[Settlement]) -> Activities:
    """Return the activities whose rights are needed to write `settlements` and their messages.

    An activity is a kind of database access, such as archiving. If the database refuses a write,
    the error names the missing rights of these activities.
    """
    activities = {Activity.CONSUME}
    for settlement in settlements:
        if settlement.is_final and settlement.archive:
            activities.add(Activity.ARCHIVE)
        if settlement.unit is not None and settlement.unit.on_ack:
            # Messages that the handler published together with its ack.
            activities.add(Activity.PUBLISH)
        if settlement.lookup is not None:
            # This move takes a mirrored message to its destination, and its record is removed with
            # the move.
            activities.add(Activity.STATE)
    return frozenset(activities)


def _set_final_state(base: Settlement, state: MessageState, archive: bool) -> Settlement:
    """Let the row leave the message table as `state`, for the archive if `archive`."""
    base.state = state
    base.archive = archive
    return base


def _fail(
    base: Settlement,
    row: ClaimedMessage,
    rules: SettleRules,
    reason: str,
    error: BaseException | None,
) -> Settlement:
    """Settle a message that failed for good: FAILED, or moved to the dead-letter queue.

    `base` is the settlement to complete. The header of a dead letter keeps the origin and the
    counts, which the move resets.
    """
    base.reason = clean_text(reason, limit=255)
    _set_error(base, error)
    if rules.dead_letter_queue is None:
        return _set_final_state(base, MessageState.FAILED, rules.retain_on_reject)
    base.state = MessageState.PENDING
    base.queue = rules.dead_letter_queue
    base.delay = 0.0
    origin = {
        "queue": row.queue,
        "reason": base.reason,
        "error": None
        if base.error is None
        else clean_text(base.error, limit=MAX_HEADER_ERROR_BYTES),
        "attempts": row.attempts_count + int(base.attempted),
        "deliveries": row.deliveries_count,
    }
    base.headers = replace_headers(row.stored_headers, {DEAD_LETTER: origin})
    return base


def _set_error(base: Settlement, error: BaseException | None) -> None:
    """Record the text and the fingerprint of `error`, if there is an error."""
    if error is not None:
        base.error = describe_exception(error)
        base.fingerprint = compute_fingerprint(error)


def _postpone(
    base: Settlement, row: ClaimedMessage, outcome: Defer | NotReady, rules: SettleRules
) -> Settlement:
    """Settle a Defer or NotReady: due again later, without charging an attempt or a delivery.

    `base` is the settlement to complete. A NotReady fails when `give_up_after` has passed since the
    end of the handler's first run, in this delivery or an earlier one.
    """
    if isinstance(outcome, Defer):
        delay = outcome.delay
    else:
        waited = 0.0
        if row.first_attempt_at is not None:
            waited = max(
                0.0, (row.acquired_at - row.first_attempt_at).total_seconds() + base.ended_after
            )
        remaining = outcome.give_up_after - waited
        if remaining <= 0:
            return _fail(base, row, rules, NOT_READY, outcome.error)
        # The last try is exactly at the end of give_up_after.
        delay = min(outcome.retry_in, remaining)
        base.ran = True
    base.state = MessageState.PENDING
    base.delay = max(0.0, delay)
    base.attempted = False
    base.uncharge = True
    _set_error(base, outcome.error)
    return base


def _apply_nack(
    base: Settlement, row: ClaimedMessage, outcome: Nack, rules: SettleRules
) -> Settlement:
    """Settle a Nack: RETRYABLE after a delay, or failed for good.

    `base` is the settlement to complete. The strategy may be the user's code. If it raises, the
    message fails with that error, with the handler's error as its context.
    """
    attempts = row.attempts_count + (1 if base.attempted else 0)
    strategy = rules.retry_strategy
    try:
        if not _can_retry(strategy, outcome):
            return _fail(base, row, rules, NOT_RETRIED, outcome.error)
        delay = _compute_retry_delay(base, row, outcome, strategy, attempts)
    except Exception as error:  # noqa: BLE001 - a user's strategy may raise anything
        error.__context__ = outcome.error
        return _fail(base, row, rules, RETRY_STRATEGY_ERROR, error)
    if delay is None:
        return _fail(base, row, rules, MAX_ATTEMPTS, outcome.error)
    base.state = MessageState.RETRYABLE
    base.delay = delay
    _set_error(base, outcome.error)
    return base


def _can_retry(strategy: Any, outcome: Nack) -> bool:
    """Return True if the handler asked for a retry, or if `strategy` retries the error."""
    requested = outcome.delay is not None or outcome.retry_possible
    return requested or is_retried(strategy, outcome.error)


def _compute_retry_delay(
    base: Settlement, row: ClaimedMessage, outcome: Nack, strategy: Any, attempts: int
) -> float | None:
    """Return the seconds until the next attempt, or None to give up.

    `attempts` includes the attempt that just ended.
    """
    limit = get_strategy_limit(strategy)
    if outcome.delay is not None:
        # The handler's own delay replaces the strategy's, but never its limit on attempts.
        return None if limit is not None and attempts >= limit else max(0.0, outcome.delay)
    ended_at = row.acquired_at + timedelta(seconds=base.ended_after)
    return compute_delay(
        strategy,
        # Without a charged attempt, first_attempt_at is the time of a NotReadyYet. A strategy must
        # not count from that time.
        first_attempt_at=(row.first_attempt_at if row.attempts_count else None) or ended_at,
        last_attempt_at=ended_at,
        attempts_count=attempts,
        # The handler may ask for a retry of an error that the strategy does not retry
        # (RetryPossible). Then do not pass the error, because the strategy would give up.
        exception=outcome.error if is_retried(strategy, outcome.error) else None,
    )

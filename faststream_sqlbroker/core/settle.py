"""Decide what a finished delivery means for its row. Pure: no clock, no I/O.

An error gets a fingerprint: what errors of one cause have in common, though their texts differ.

Table of decisions: `core.states.TRANSITIONS`.
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
    attempts_limit,
    most_attempts,
    next_delay,
    retries_after,
)
from faststream_sqlbroker.core.rows import Acked, ClaimedMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import clean_text, describe_exception, replace_headers

_FINGERPRINT_FRAMES = 3
"""Innermost stack frames that count: the place that raised, and how it was reached."""
_FINGERPRINT_MEMBERS = 5
"""Members of a group that count; there may be any number."""
FINGERPRINT_LENGTH = 16
"""Hexadecimal digits: 64 bits, so a million different errors hardly ever collide."""


def error_fingerprint(error: BaseException) -> str:
    """16 hexadecimal digits, the same for errors of one type from the same place in the code.

    The place is the module and the function of the innermost three frames of the traceback. Not in
    it are the text, which often names an id, and the line, which changes with the next release.
    """
    try:
        parts = "\n".join(_fingerprint_parts(error))
    except Exception:  # noqa: BLE001 - reads what the error's own class may compute
        parts = type.__getattribute__(type(error), "__qualname__")
    return hashlib.sha256(parts.encode(errors="replace")).hexdigest()[:FINGERPRINT_LENGTH]


def _fingerprint_parts(error: BaseException) -> Iterator[str]:
    yield f"{type(error).__module__}.{type(error).__qualname__}"
    traceback = error.__traceback__
    last: deque[str] = deque(maxlen=_FINGERPRINT_FRAMES)
    while traceback is not None:
        frame = traceback.tb_frame
        last.append(f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}")
        traceback = traceback.tb_next
    yield from last
    if isinstance(error, BaseExceptionGroup):
        for member in islice(error.exceptions, _FINGERPRINT_MEMBERS):
            yield error_fingerprint(member)


DEAD_LETTER = "dead-letter"
"""Header of a message in a dead letter queue: its origin and its reason."""
ARCHIVED_BEFORE = "archived-before"
"""Header of a message that an undo has put back into the archive: `at`, when it was archived first,
and the `publish_count` of then; with another count the message has been published again since."""
LONGEST_ERROR = 1024
"""Bytes of the error's text in that header. Each claim reads the headers, so they stay short; the
column last_error has the whole text."""
_FINAL = Ack | Reject | Discard
"""Outcomes after which a message is not live any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRules:
    """A subscriber's options for settling: retries, the archive, dead letters."""

    retry_strategy: Any = None
    retain_on_ack: bool = True
    retain_on_reject: bool = True
    dead_letter_queue: str | None = None
    """The queue for messages that would be FAILED; None: they are archived as FAILED."""


def settle(  # noqa: C901 - the table of decisions
    row: ClaimedMessage,
    outcome: Outcome | None,
    rules: SettleRules,
    *,
    ended_after: float,
    attempted: bool = True,
) -> Settlement:
    """Turn `outcome` (None: the handler recorded none) into the write for the database.

    Args:
        row: The delivery that ended.
        outcome: What it ended in.
        rules: The subscriber's rules.
        ended_after: Seconds from the claim to the end.
        attempted: Whether a handler was started.
    """
    base = Settlement(row.id, row.lease_token, None, attempted=attempted, ended_after=ended_after)
    # One match over all outcomes: it is the table of decisions, so it is not split.
    outcome = _unless_cancelled(row, outcome)
    match outcome:
        case Skip():
            base.reason = SKIPPED
            return _final(base, MessageState.COMPLETED, rules.retain_on_ack)
        case Ack():
            return _final(base, MessageState.COMPLETED, rules.retain_on_ack)
        case Nack():
            return _nack(base, row, outcome, rules)
        case Reject():
            return _fail(base, row, rules, outcome.reason or REJECTED, outcome.error)
        case Defer() | NotReady():
            return _later(base, row, outcome, rules)
        case Release():
            base.attempted = False
            base.uncharge = True
        case Abandon():
            base.state = MessageState.PENDING
            # Where attempts are not limited it costs one: else it would count as a lost lease.
            base.attempted = most_attempts(rules.retry_strategy) is None
            base.delay = outcome.delay
            _describe(base, outcome.error)
        case Relocate():
            base.state = MessageState.PENDING
            base.queue = outcome.queue
            base.delay = max(0.0, outcome.delay)
            base.payload = outcome.payload
            base.headers = outcome.headers
            base.key = outcome.key
            base.lookup = outcome.lookup
            base.published_again = outcome.published_again
            base.hop = int(outcome.is_hop)
        case Discard():
            base.reason = outcome.reason
            base.related_id = outcome.related_id
            base.error = outcome.text
            return _final(base, MessageState.DISCARDED, rules.retain_on_reject)
        case None:
            return _fail(base, row, rules, NO_OUTCOME, None)
    return base


def _unless_cancelled(row: ClaimedMessage, outcome: Outcome | None) -> Outcome | None:
    """`outcome`, but nothing that brings a message back which an operator has cancelled."""
    if row.cancelled is None or isinstance(outcome, _FINAL):
        return outcome
    if isinstance(outcome, Relocate) and outcome.queue != row.queue:
        return outcome
    return Discard(CANCELLED, text=row.cancelled)


def acked(row: ClaimedMessage, rules: SettleRules, *, ended_after: float) -> Settlement:
    """`settle` of an Ack after an attempt, which nearly all of them are."""
    return Acked(row.id, row.lease_token, ended_after, rules.retain_on_ack)


def needed_to_write(settlements: Iterable[Settlement]) -> Activities:
    """The activities whose rights are needed to write `settlements` and their messages."""
    done = {Activity.CONSUME}
    for settlement in settlements:
        if settlement.leaves and settlement.archive:
            done.add(Activity.ARCHIVE)
        if settlement.unit is not None and settlement.unit.on_ack:
            done.add(Activity.PUBLISH)
        if settlement.lookup is not None:
            done.add(Activity.STATE)
    return frozenset(done)


def sent_back(settlement: Settlement) -> Settlement:
    """The settlement to write if `settlement` cannot be written.

    As after an Abandon, the message is PENDING and the attempt is not charged.
    """
    return Settlement(
        settlement.id,
        settlement.lease_token,
        MessageState.PENDING,
        attempted=False,
        ended_after=settlement.ended_after,
    )


def _final(base: Settlement, state: MessageState, keep: bool) -> Settlement:
    base.state = state
    base.archive = keep
    return base


def _fail(
    base: Settlement,
    row: ClaimedMessage,
    rules: SettleRules,
    reason: str,
    error: BaseException | None,
) -> Settlement:
    base.reason = clean_text(reason, limit=255)
    _describe(base, error)
    if rules.dead_letter_queue is None:
        return _final(base, MessageState.FAILED, rules.retain_on_reject)
    base.state = MessageState.PENDING
    base.queue = rules.dead_letter_queue
    base.delay = 0.0
    origin = {
        "queue": row.queue,
        "reason": base.reason,
        "error": None if base.error is None else clean_text(base.error, limit=LONGEST_ERROR),
        "attempts": row.attempts_count + int(base.attempted),
        "deliveries": row.deliveries_count,
    }
    base.headers = replace_headers(row.stored_headers, {DEAD_LETTER: origin})
    return base


def _describe(base: Settlement, error: BaseException | None) -> None:
    if error is not None:
        base.error = describe_exception(error)
        base.fingerprint = error_fingerprint(error)


def _later(
    base: Settlement, row: ClaimedMessage, outcome: Defer | NotReady, rules: SettleRules
) -> Settlement:
    if isinstance(outcome, Defer):
        delay = outcome.delay
    else:
        waited = 0.0
        if row.first_attempt_at is not None:
            waited = max(
                0.0, (row.acquired_at - row.first_attempt_at).total_seconds() + base.ended_after
            )
        left = outcome.give_up_after - waited
        if left <= 0:
            return _fail(base, row, rules, NOT_READY, outcome.error)
        # The last try is when give_up_after is over, not later.
        delay = min(outcome.retry_in, left)
        base.ran = True
    base.state = MessageState.PENDING
    base.delay = max(0.0, delay)
    base.attempted = False
    base.uncharge = True
    _describe(base, outcome.error)
    return base


def _nack(base: Settlement, row: ClaimedMessage, outcome: Nack, rules: SettleRules) -> Settlement:
    attempts = row.attempts_count + (1 if base.attempted else 0)
    strategy = rules.retry_strategy
    try:
        if not _may_retry(strategy, outcome):
            return _fail(base, row, rules, NOT_RETRIED, outcome.error)
        delay = _delay_after(base, row, outcome, strategy, attempts)
    except Exception as error:  # noqa: BLE001 - a user's strategy may raise anything
        error.__context__ = outcome.error
        return _fail(base, row, rules, RETRY_STRATEGY_ERROR, error)
    if delay is None:
        return _fail(base, row, rules, MAX_ATTEMPTS, outcome.error)
    base.state = MessageState.RETRYABLE
    base.delay = delay
    _describe(base, outcome.error)
    return base


def _may_retry(strategy: Any, outcome: Nack) -> bool:
    """Whether to retry: the handler asked for it, or `strategy` retries after the error."""
    asked = outcome.delay is not None or outcome.retry_possible
    return asked or retries_after(strategy, outcome.error)


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
        # Without a charged attempt, first_attempt_at is the time of a NotReadyYet. That is not an
        # attempt that a strategy should count from.
        first_attempt_at=(row.first_attempt_at if row.attempts_count else None) or last,
        last_attempt_at=last,
        attempts_count=attempts,
        # The handler may ask for a retry of an error that the strategy does not retry
        # (RetryPossible). Then the strategy is asked without the error, else it would give up.
        exception=outcome.error if retries_after(strategy, outcome.error) else None,
    )

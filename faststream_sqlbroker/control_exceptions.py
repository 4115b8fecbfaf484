"""Exceptions that a handler raises to choose the outcome of its message.

All of them are FastStream HandlerExceptions, so each produces one log line at the broker's log
level and never an error. They work with every AckPolicy except ACK_FIRST, including MANUAL. In a
batch handler they apply to every message that is not settled yet. A message that already has an
outcome keeps it.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from faststream.exceptions import AckMessage, HandlerException, NackMessage

from faststream_sqlbroker.core import outcome as outcomes
from faststream_sqlbroker.core.checks import validate_queue
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.text import replace_headers
from faststream_sqlbroker.core.times import Duration, parse_delay, parse_positive
from faststream_sqlbroker.exceptions import SetupError

__all__ = ("ControlException", "Move", "NotReadyYet", "Postpone", "RetryPossible")


class _Unchanged:
    """The type of `UNCHANGED`."""

    def __repr__(self) -> str:
        return "<the same body>"


UNCHANGED: Any = _Unchanged()
"""Marks an unchanged body, because None is a valid new body."""


class ControlException(HandlerException):
    """Base of all control exceptions; use `except ControlException: raise` to let them pass."""

    extra_options: dict[str, Any]
    """Keyword arguments that FastStream passes to `ack` or `nack` of the message."""


class Postpone(NackMessage, ControlException):
    """Deliver the message again after `delay`, without counting an attempt or a delivery."""

    def __init__(self, delay: Duration) -> None:
        """Create the exception; `raise Postpone(...) from error` stores the error in `last_error`.

        Args:
            delay: Seconds, a timedelta or text like "1.5h"; a negative value means now.

        Raises:
            SetupError: `delay` is not a valid duration.
        """
        self.delay = parse_delay(delay)
        # FastStream passes this option to `nack` of the message.
        super().__init__(instead=outcomes.Defer(self.delay))

    def __str__(self) -> str:
        return f"Message was postponed by {self.delay} s"


class NotReadyYet(NackMessage, ControlException):
    """Try the message again after `retry_in`, because a precondition is not met yet.

    Works like `Postpone(retry_in)` until `give_up_after` has passed since the end of the handler's
    first run for this message. Then the message is FAILED with reason "not_ready". The last attempt
    is made at the deadline. A failed first run counts, too; a run that ended in Postpone does not.
    All times are by the database's clock.
    """

    def __init__(self, retry_in: Duration, give_up_after: Duration) -> None:
        """Create the exception; `raise NotReadyYet(...) from error` sets `last_error`.

        Args:
            retry_in: Time until the next attempt: seconds, a timedelta or text like "1.5h"; a
                negative value means now.
            give_up_after: Time after which the message is FAILED; greater than 0.

        Raises:
            SetupError: one of the arguments is not a valid duration, or `give_up_after` is not
                greater than 0.
        """
        self.retry_in = parse_delay(retry_in, name="retry_in")
        self.give_up_after = parse_positive("give_up_after", give_up_after)
        # FastStream passes this option to `nack` of the message.
        super().__init__(instead=outcomes.NotReady(self.retry_in, self.give_up_after))

    def __str__(self) -> str:
        return (
            f"Message was not ready: retry in {self.retry_in} s, for at most {self.give_up_after} s"
        )


class Move(AckMessage, ControlException):
    """Move the message to another queue, in the transaction that settles the message.

    The message keeps its id, key, priority, headers, publishing time and expiry. Attempts and
    deliveries restart at 0, and the dedup_id is dropped. Messages published with the ack are
    written together with the move, as are the changes of a handler with transactional=True.
    """

    def __init__(self, queue: str, *, body: Any = UNCHANGED, delay: Duration = 0.0) -> None:
        """Create the exception; the body is encoded after the handler has ended.

        Args:
            queue: The full name of the queue, to which no router adds a prefix.
            body: A new body, encoded with its content type as by `publish`. By default the message
                keeps its body.
            delay: Time until the message is due in that queue: seconds, a timedelta or text like
                "1.5h"; a negative value means now.

        Raises:
            SetupError: `queue` is not a valid name, or `delay` is not a valid duration.
        """
        self.place = MoveTarget(queue, body, delay)
        # FastStream passes this option to `ack` of the message.
        super().__init__(instead=self.place)

    def __str__(self) -> str:
        return f"Message was moved to queue {self.place.queue!r}"


class RetryPossible(NackMessage, ControlException):
    """Allow another attempt: a nack, even with policies that end a message on an error.

    With `Once`, the key becomes free again; any other error ends the message there.
    """

    def __init__(self, *, delay: Duration | None = None) -> None:
        """Create the exception; `raise RetryPossible() from error` passes the error on.

        The retry strategy and `last_error` then receive the error.

        Args:
            delay: Time until the next attempt, instead of the delay of the retry strategy; a
                negative value means now.

        Raises:
            SetupError: `delay` is not a valid duration.
        """
        self.delay = None if delay is None else parse_delay(delay)
        # FastStream passes this option to `nack` of the message.
        super().__init__(instead=outcomes.Nack(self.delay, retry_possible=True))

    def __str__(self) -> str:
        return "Message may be retried"


@dataclass(frozen=True, slots=True)
class MoveTarget:
    """The queue, body and delay of a move or of a republish.

    Raises:
        SetupError: as for `Move`.
    """

    queue: str | None
    """None keeps the message in its queue; allowed only for a republish."""
    body: Any
    delay: Duration
    is_republish: bool = False

    def __post_init__(self) -> None:
        keeps_queue = self.is_republish and self.queue is None
        if not keeps_queue:
            validate_queue(self.queue)
        object.__setattr__(self, "delay", parse_delay(self.delay))


Decision = outcomes.Outcome | MoveTarget
"""The decision carried by a control exception or recorded by a method of the message."""


async def apply_decision(rows: Sequence[ClaimedMessage], decision: Decision) -> None:
    """Record `decision` for the rows that have no outcome yet.

    Raises:
        SetupError: ACK_FIRST acked the rows before their handler started.
        Exception: the codec cannot encode the body; nothing was recorded.
    """
    if any(row.services is not None and row.services.ack_first for row in rows):
        raise SetupError(_ALREADY_ACKED)
    if isinstance(decision, MoveTarget):
        await _record_move([row for row in rows if row.outcome is None], decision)
        return
    if isinstance(decision, outcomes.Defer | outcomes.NotReady | outcomes.Nack):
        decision = replace(decision, error=get_current_error())
    for row in rows:
        row.record_outcome(decision)


async def apply_raised(rows: Sequence[ClaimedMessage], decision: Decision) -> None:
    """Apply a decision after the handler has ended; on an error, nack the rows for a retry.

    The handler has raised an exception such as Postpone. Without an outcome the rows would fail for
    good.

    Raises:
        Exception: as for `apply_decision`.
    """
    try:
        await apply_decision(rows, decision)
    except Exception as error:
        for row in rows:
            row.record_outcome(outcomes.Nack(error=error))
        raise


async def apply_unacknowledged(
    raw: Any, exception: ControlException, log: Callable[..., None]
) -> None:
    """Apply a control exception under AckPolicy.MANUAL, where FastStream acknowledges nothing.

    Errors are only logged, as in FastStream's acknowledgement.

    Args:
        raw: A row, or a tuple of rows.
        exception: The exception that the handler raised.
        log: The subscriber's log function.
    """
    rows: Sequence[ClaimedMessage] = raw if isinstance(raw, tuple) else (raw,)
    try:
        await apply_raised(rows, exception.extra_options["instead"])
    except Exception as error:  # noqa: BLE001 - the message is nacked, or was acked before
        text = f"{type(exception).__name__} could not be applied to message {rows[0].id}: {error}"
        log(logging.ERROR, text, message_id=rows[0].id)


async def _record_move(rows: Sequence[ClaimedMessage], target: MoveTarget) -> None:
    """Record a move for all rows, with the new body encoded once.

    An error of the codec is raised before any row has an outcome.
    """
    payload = None
    changes = None
    if rows and target.body is not UNCHANGED:
        services = rows[0].services
        if services is None or services.encode is None:
            msg = (
                "a new body needs the codec of a broker's subscriber, which this message does not "
                "have: omit body"
            )
            raise SetupError(msg)
        payload, content_type = await services.encode(target.body)
        changes = {"content-type": content_type or None}
    for row in rows:
        headers = None if changes is None else replace_headers(row.stored_headers, changes)
        delay = float(target.delay)  # type: ignore[arg-type] # checked
        queue = row.queue if target.queue is None else target.queue
        row.record_outcome(outcomes.Relocate(queue, payload, headers, delay, target.is_republish))


def record_skip(raw: Any) -> None:
    """Record for a row or a tuple of rows that SkipMessage was raised."""
    for row in raw if isinstance(raw, tuple) else (raw,):
        row.record_outcome(outcomes.Skip())


def warn_ignored_options(
    rows: Sequence[ClaimedMessage], method: str, options: Mapping[str, Any], supported: str
) -> None:
    """Warn once per subscriber that `method` was called with options of other brokers.

    FastStream passes options of `NackMessage` and the like to the method, too.

    Raises:
        SetupError: the handler itself passed `requeue`, which selects between two methods in other
            brokers. For the options of an exception an error would come too late.
    """
    if "requeue" in options and not isinstance(sys.exception(), HandlerException):
        raise SetupError(
            f"{method}() of a message does not take requeue=: use nack(), optionally with delay=, "
            "to retry it, or reject() to end it"
        )
    services = rows[0].services
    names = ", ".join(sorted(options))
    if services is None or (key := f"{method}({names})") in services.warned:
        return
    services.warned.add(key)
    text = (
        f"{method}() of a message takes {supported}: {names} is ignored, but the message is settled"
    )
    services.log(logging.WARNING, text, message_id=rows[0].id)


async def extend_leases(rows: Sequence[ClaimedMessage], duration: Duration) -> bool:
    """Extend the leases of `rows` to `duration` from now; return True if all are still held.

    Raises:
        SetupError: `duration` is not a duration greater than 0, no running subscriber holds the
            rows, or ACK_FIRST acked the rows before their handler started.
        StoreError: the database did not answer, or another transaction locked a row for too long.
    """
    seconds = parse_positive("duration", duration)
    services = rows[0].services
    if services is None:
        msg = "only a message that a running subscriber has claimed has a lease to extend"
        raise SetupError(msg)
    if services.ack_first:
        raise SetupError(_ALREADY_ACKED)
    return await services.extend(rows, seconds)


def get_current_error() -> BaseException | None:
    """Return the exception being handled in a handler's `except` or by FastStream.

    It is stored with the outcome, in the column last_error.
    """
    error = sys.exception()
    while isinstance(error, HandlerException):
        # `raise NackMessage() from error` chooses an outcome; its cause is the actual error.
        error = error.__cause__ or error.__context__
    return error


def build_nack(delay: Duration | None, settle: Callable[[outcomes.Outcome], Any]) -> outcomes.Nack:
    """Build a nack; with an invalid `delay`, record a plain nack first, so the message is retried.

    `settle` records it. The error is then raised in the handler, or logged by FastStream.

    Raises:
        SetupError: `delay` is not a valid duration.
    """
    try:
        if delay is None:
            return outcomes.Nack(error=get_current_error())
        return outcomes.Nack(delay=parse_delay(delay), error=get_current_error())
    except SetupError as error:
        settle(outcomes.Nack(error=error))
        raise


def build_reject(reason: str | None, error: BaseException | None) -> outcomes.Reject:
    """Build a reject with `error`, by default with the exception being handled.

    Raises:
        SetupError: `reason` is not a string, or `error` is not an exception.
    """
    if reason is not None and not isinstance(reason, str):
        raise SetupError(f"reason must be a string or None, got {reason!r}")
    if error is not None and not isinstance(error, BaseException):
        raise SetupError(f"error must be an exception or None, got {error!r}: give text as reason")
    return outcomes.Reject(reason=reason, error=error or get_current_error())


_ALREADY_ACKED = (
    "AckPolicy.ACK_FIRST acked the message before its handler started, so its outcome is final: "
    "use another policy for handlers that postpone, move or extend their messages"
)

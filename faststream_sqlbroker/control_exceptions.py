"""Exceptions that a handler raises to choose the outcome of its message.

They are FastStream's HandlerExceptions: one log line at the broker's log level, never an error.
They work under every AckPolicy except ACK_FIRST, MANUAL included. In a batch handler they apply to
every message that is not settled yet. A message that has an outcome already keeps it.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from faststream.exceptions import AckMessage, HandlerException, NackMessage

from faststream_sqlbroker.core import outcome as outcomes
from faststream_sqlbroker.core.checks import checked_queue
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.text import replace_headers
from faststream_sqlbroker.core.times import Duration, delay_seconds, positive_seconds
from faststream_sqlbroker.exceptions import SetupError

__all__ = ("ControlException", "Move", "NotReadyYet", "Postpone", "RetryPossible")


class _Kept:
    """The type of KEPT."""

    def __repr__(self) -> str:
        return "<the same body>"


KEPT: Any = _Kept()
"""Stands for the body that the message has; None is a body of its own."""


class ControlException(HandlerException):
    """Base of these exceptions; `except ControlException: raise` lets all of them pass."""

    extra_options: dict[str, Any]
    """Keyword arguments with which FastStream calls the message's `ack` or `nack`."""


class Postpone(NackMessage, ControlException):
    """The message is due again after `delay`; neither the attempt nor the delivery is counted."""

    def __init__(self, delay: Duration) -> None:
        """`raise Postpone(...) from error` keeps the error in `last_error`.

        Args:
            delay: Seconds, a timedelta or text like "1.5h"; a negative value means now.

        Raises:
            SetupError: `delay` is not a valid duration.
        """
        self.delay = delay_seconds(delay)
        super().__init__(instead=outcomes.Defer(self.delay))

    def __str__(self) -> str:
        return f"Message was postponed by {self.delay} s"


class NotReadyYet(NackMessage, ControlException):
    """A precondition of the message is not met yet: try again after `retry_in`, up to a deadline.

    Works like `Postpone(retry_in)` until `give_up_after` has passed since the handler's first run
    for this message ended. Then the message is FAILED with reason "not_ready". The last try is at
    the deadline. A first run that failed counts, too; one that ended in Postpone does not. All
    times are by the database's clock.
    """

    def __init__(self, retry_in: Duration, give_up_after: Duration) -> None:
        """`raise NotReadyYet(...) from error` keeps the error in `last_error`.

        Args:
            retry_in: Time until the next try: seconds, a timedelta or text like "1.5h"; a negative
                value means now.
            give_up_after: Time after which the message is FAILED; longer than 0.

        Raises:
            SetupError: one of them is not a valid duration, or `give_up_after` is not above 0.
        """
        self.retry_in = delay_seconds(retry_in, name="retry_in")
        self.give_up_after = positive_seconds("give_up_after", give_up_after)
        super().__init__(instead=outcomes.NotReady(self.retry_in, self.give_up_after))

    def __str__(self) -> str:
        return (
            f"Message was not ready: again in {self.retry_in} s, for at most {self.give_up_after} s"
        )


class Move(AckMessage, ControlException):
    """The message moves to another queue, in the transaction that settles it.

    It keeps its id, key, priority, headers, publishing time and expiry. Attempts and deliveries
    start again from 0, and the dedup_id is dropped. Messages published with the ack are written
    with the move, and so is what a handler with transactional=True wrote.
    """

    def __init__(self, queue: str, *, body: Any = KEPT, delay: Duration = 0.0) -> None:
        """The body is encoded after the handler has ended.

        Args:
            queue: Its full name; no router adds a prefix.
            body: A new body, encoded as by `publish`, with its content type. Without it the message
                keeps its body.
            delay: Time until the message is due there: seconds, a timedelta or text like "1.5h"; a
                negative value means now.

        Raises:
            SetupError: `queue` is not a valid name, or `delay` is not a valid duration.
        """
        self.place = MoveTarget(queue, body, delay)
        super().__init__(instead=self.place)

    def __str__(self) -> str:
        return f"Message was moved to queue {self.place.queue!r}"


class RetryPossible(NackMessage, ControlException):
    """The message may be tried again: a nack, also with policies that end a message on an error.

    With `Once` the key becomes free again; any other error ends the message there.
    """

    def __init__(self, *, delay: Duration | None = None) -> None:
        """`raise RetryPossible() from error` gives the retry strategy and `last_error` the error.

        Args:
            delay: Time until the next attempt, in place of the retry strategy's; a negative value
                means now.

        Raises:
            SetupError: `delay` is not a valid duration.
        """
        self.delay = None if delay is None else delay_seconds(delay)
        super().__init__(instead=outcomes.Nack(self.delay, retry_possible=True))

    def __str__(self) -> str:
        return "Message may be tried again"


@dataclass(frozen=True, slots=True)
class MoveTarget:
    """The queue, body and delay of a move or of a republish.

    Raises:
        SetupError: as `Move`.
    """

    queue: str | None
    """None, allowed with `published_again` only: the message stays in its queue."""
    body: Any
    delay: Duration
    published_again: bool = False

    def __post_init__(self) -> None:
        stays = self.published_again and self.queue is None
        if not stays:
            checked_queue(self.queue)
        object.__setattr__(self, "delay", delay_seconds(self.delay))


Said = outcomes.Outcome | MoveTarget
"""The decision that an exception carries, and that the message's methods build."""


async def follow(rows: Sequence[ClaimedMessage], said: Said) -> None:
    """Record `said` for those of `rows` that have no outcome yet.

    Raises:
        SetupError: ACK_FIRST acked them before their handler started.
        Exception: the codec cannot encode the body; nothing was recorded.
    """
    if any(row.holder is not None and row.holder.ack_first for row in rows):
        raise SetupError(_GONE)
    if isinstance(said, MoveTarget):
        await _move([row for row in rows if row.outcome is None], said)
        return
    if isinstance(said, outcomes.Defer | outcomes.NotReady | outcomes.Nack):
        said = replace(said, error=current_error())
    for row in rows:
        row.settle_as(said)


async def follow_raised(rows: Sequence[ClaimedMessage], said: Said) -> None:
    """`follow`, after the handler has ended. On an error the rows are nacked, so they are retried.

    Raises:
        Exception: as `follow`.
    """
    try:
        await follow(rows, said)
    except Exception as error:
        for row in rows:
            row.settle_as(outcomes.Nack(error=error))
        raise


async def follow_unacknowledged(raw: Any, said: ControlException, log: Callable[..., None]) -> None:
    """`follow_raised` for AckPolicy.MANUAL, where FastStream does not acknowledge the message.

    Errors are only logged, as FastStream's acknowledgement does.

    Args:
        raw: A row, or a tuple of rows.
        said: The exception that the handler raised.
        log: The subscriber's log function.
    """
    rows: Sequence[ClaimedMessage] = raw if isinstance(raw, tuple) else (raw,)
    try:
        await follow_raised(rows, said.extra_options["instead"])
    except Exception as error:  # noqa: BLE001 - the message is nacked, or was acked before
        text = f"{type(said).__name__} of message {rows[0].id} could not be carried out: {error}"
        log(logging.ERROR, text, message_id=rows[0].id)


async def _move(rows: Sequence[ClaimedMessage], place: MoveTarget) -> None:
    payload = None
    changes = None
    if rows and place.body is not KEPT:
        holder = rows[0].holder
        if holder is None or holder.encode is None:
            msg = (
                "a new body needs the codec of a broker's subscriber, and this message has none: "
                "leave body out"
            )
            raise SetupError(msg)
        payload, content_type = await holder.encode(place.body)
        changes = {"content-type": content_type or None}
    for row in rows:
        headers = None if changes is None else replace_headers(row.stored_headers, changes)
        delay = float(place.delay)  # type: ignore[arg-type] # checked
        queue = row.queue if place.queue is None else place.queue
        row.settle_as(outcomes.Relocate(queue, payload, headers, delay, place.published_again))


def skip(raw: Any) -> None:
    """Record for `raw`, a row or a tuple of rows, that SkipMessage was raised."""
    for row in raw if isinstance(raw, tuple) else (raw,):
        row.settle_as(outcomes.Skip())


def warn_of_ignored(
    rows: Sequence[ClaimedMessage], method: str, options: Mapping[str, Any], known: str
) -> None:
    """Warn, once per subscriber, that `method` was called with options that only others have.

    Raises:
        SetupError: the handler itself gave `requeue`, with which other brokers choose between
            methods that are two here. An exception's options come too late for an error.
    """
    if "requeue" in options and not isinstance(sys.exception(), HandlerException):
        raise SetupError(
            f"{method} of a message does not take requeue=: use nack(), also with delay=, to try "
            "it again, or reject() to end it"
        )
    holder = rows[0].holder
    names = ", ".join(sorted(options))
    if holder is None or (key := f"{method}({names})") in holder.warned:
        return
    holder.warned.add(key)
    text = (
        f"{method} of a message takes {known}; {names} is ignored, and the message is settled "
        "without it"
    )
    holder.log(logging.WARNING, text, message_id=rows[0].id)


async def extend(rows: Sequence[ClaimedMessage], duration: Duration) -> bool:
    """Extend the leases of `rows` to `duration` from now; whether all of them are still held.

    Raises:
        SetupError: `duration` is not a duration above 0; no running subscriber holds the rows; or
            ACK_FIRST acked them before their handler started.
        StoreError: the database did not answer, or another transaction locked a row for too long.
    """
    seconds = positive_seconds("duration", duration)
    holder = rows[0].holder
    if holder is None:
        msg = "only a message that a subscriber has claimed has a lease"
        raise SetupError(msg)
    if holder.ack_first:
        raise SetupError(_GONE)
    return await holder.extend(rows, seconds)


def current_error() -> BaseException | None:
    """The exception being handled, in a handler's `except` or in FastStream's acknowledgement."""
    error = sys.exception()
    while isinstance(error, HandlerException):
        # `raise NackMessage() from error` chooses an outcome; its cause is the actual error.
        error = error.__cause__ or error.__context__
    return error


def nack_or_refuse(
    delay: Duration | None, settle: Callable[[outcomes.Outcome], Any]
) -> outcomes.Nack:
    """The nack. With an invalid `delay` a plain nack is recorded first, so the message is retried.

    Raises:
        SetupError: `delay` is not a valid duration.
    """
    try:
        if delay is None:
            return outcomes.Nack(error=current_error())
        return outcomes.Nack(delay=delay_seconds(delay), error=current_error())
    except SetupError as error:
        settle(outcomes.Nack(error=error))
        raise


def reject_outcome(reason: str | None, error: BaseException | None) -> outcomes.Reject:
    """The reject, with `error` or the one that is being handled.

    Raises:
        SetupError: `reason` is not a string, or `error` is not an exception.
    """
    if reason is not None and not isinstance(reason, str):
        raise SetupError(f"reason must be a string or None, got {reason!r}")
    if error is not None and not isinstance(error, BaseException):
        raise SetupError(f"error must be an exception or None, got {error!r}: give text as reason")
    return outcomes.Reject(reason=reason, error=error or current_error())


_GONE = (
    "AckPolicy.ACK_FIRST acked the message before its handler started, so its outcome is final: "
    "use another policy for handlers that postpone, move or hold their messages"
)

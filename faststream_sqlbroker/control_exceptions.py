"""What a handler may raise to say what becomes of its message, where neither return nor error says
it.

They are FastStream's HandlerExceptions: logged in one line at the log level of the broker, never as
errors. They count under every AckPolicy but ACK_FIRST, MANUAL included; in a batch handler for all
messages that are not settled yet. A message that has an outcome already keeps it.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from faststream.exceptions import AckMessage, HandlerException, NackMessage

from faststream_sqlbroker.core import outcome as outcomes
from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.text import replace_headers, short
from faststream_sqlbroker.core.times import Duration, delay_seconds, positive_seconds
from faststream_sqlbroker.exceptions import SetupError

__all__ = ("Instruction", "Move", "NotReadyYet", "Postpone", "RetryPossible")


class _Kept:
    """The body that a message has."""

    def __repr__(self) -> str:
        return "<the same body>"


KEPT: Any = _Kept()


class Instruction(HandlerException):
    """Base of what a handler may raise; `except Instruction: raise` lets all of them through."""

    extra_options: dict[str, Any]
    """What FastStream hands to the message's `ack` or `nack`."""


class Postpone(NackMessage, Instruction):
    """The message is due again after `delay`; neither the attempt nor the delivery is charged."""

    def __init__(self, delay: Duration) -> None:
        """`raise Postpone(...) from error` keeps the error in `last_error`.

        Args:
            delay: Seconds, a timedelta or text like "1.5h"; a negative one is at once.

        Raises:
            SetupError: `delay` is no length of time.
        """
        self.delay = delay_seconds(delay)
        super().__init__(instead=outcomes.Defer(self.delay))

    def __str__(self) -> str:
        return f"Message was postponed by {self.delay} s"


class NotReadyYet(NackMessage, Instruction):
    """What the message needs is not there yet: look again after `retry_in`, and give up at last.

    As `Postpone(retry_in)`, until `give_up_after` has passed since the end of the handler's first
    run for this message; then it is FAILED with reason "not_ready". The last look is when that time
    is over. First runs that failed count too; those that ended in Postpone do not. All times are
    the database's.
    """

    def __init__(self, retry_in: Duration, give_up_after: Duration) -> None:
        """`raise NotReadyYet(...) from error` keeps the error in `last_error`.

        Args:
            retry_in: Time until the next look: seconds, a timedelta or text like "1.5h"; a negative
                one is at once.
            give_up_after: Time after which it is FAILED, longer than 0.

        Raises:
            SetupError: one of them is no length of time, or `give_up_after` is too short.
        """
        self.retry_in = delay_seconds(retry_in, name="retry_in")
        self.give_up_after = positive_seconds("give_up_after", give_up_after)
        super().__init__(instead=outcomes.NotReady(self.retry_in, self.give_up_after))

    def __str__(self) -> str:
        return (
            f"Message was not ready: again in {self.retry_in} s, for at most {self.give_up_after} s"
        )


class Move(AckMessage, Instruction):
    """The message goes to another queue, in the transaction that settles it.

    It keeps its id, key, priority, headers and times of publishing and expiry. Attempts and
    deliveries begin anew, and its dedup_id is dropped. What was published with its ack is written
    with the move, as are the effects of a handler with transactional=True.
    """

    def __init__(self, queue: str, *, body: Any = KEPT, delay: Duration = 0.0) -> None:
        """Nothing is encoded before the handler has ended.

        Args:
            queue: Its name, to which no router adds a prefix.
            body: Another body, encoded as `publish` does, with its content type; left out, it stays
                as it is.
            delay: Time until it is due there: seconds, a timedelta or text like "1.5h"; a negative
                one is at once.

        Raises:
            SetupError: a queue that cannot be one, or a delay that is no length of time.
        """
        self.place = MoveTarget(queue, body, delay)
        super().__init__(instead=self.place)

    def __str__(self) -> str:
        return f"Message was moved to queue {self.place.queue!r}"


class RetryPossible(NackMessage, Instruction):
    """The message may be tried again: a nack, under every policy that can.

    With `Once` the key is given back; any other error ends its message there.
    """

    def __init__(self, *, delay: Duration | None = None) -> None:
        """`raise RetryPossible() from error` tells the retry strategy and `last_error` of the
        error.

        Args:
            delay: Time until the next attempt in place of the retry strategy's; a negative one is
                at once.

        Raises:
            SetupError: `delay` is no length of time.
        """
        self.delay = None if delay is None else delay_seconds(delay)
        super().__init__(instead=outcomes.Nack(self.delay, retry_possible=True))

    def __str__(self) -> str:
        return "Message may be tried again"


@dataclass(frozen=True, slots=True)
class MoveTarget:
    """Where a message is to go.

    Raises:
        SetupError: as `Move`.
    """

    queue: str | None
    """None, of what is published again: where it is."""
    body: Any
    delay: Duration
    published_again: bool = False

    def __post_init__(self) -> None:
        """Check."""
        stays = self.published_again and self.queue is None
        if not stays and (problem := name_problem(self.queue)) is not None:
            msg = f"{short(self.queue)} cannot be the name of a queue: {problem}"
            raise SetupError(msg)
        object.__setattr__(self, "delay", delay_seconds(self.delay))


Said = outcomes.Outcome | MoveTarget
"""What an instruction carries, and what the message's methods make of their arguments."""


async def follow(rows: Sequence[ClaimedMessage], said: Said) -> None:
    """Record `said` for those of `rows` that have no outcome yet.

    Raises:
        SetupError: they were acked before their handler started.
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
    """`follow`, after the handler: what cannot be followed is a nack, so that the message is tried
    again.

    Raises:
        Exception: as `follow`.
    """
    try:
        await follow(rows, said)
    except Exception as error:
        for row in rows:
            row.settle_as(outcomes.Nack(error=error))
        raise


async def follow_unacknowledged(raw: Any, said: Instruction, log: Callable[..., None]) -> None:
    """`follow_raised` where FastStream's acknowledgement is not there to do it; as there, errors
    are only logged.

    Args:
        raw: A row, or a tuple of them.
        said: What the handler has raised.
        log: The subscriber's.
    """
    rows: Sequence[ClaimedMessage] = raw if isinstance(raw, tuple) else (raw,)
    try:
        await follow_raised(rows, said.extra_options["instead"])
    except Exception as error:  # noqa: BLE001 - the message is nacked, or was acked before
        text = f"{type(said).__name__} of message {rows[0].id} cannot be followed: {error}"
        log(logging.ERROR, text, message_id=rows[0].id)


async def _move(rows: Sequence[ClaimedMessage], place: MoveTarget) -> None:
    payload, changes = None, None
    if rows and place.body is not KEPT:
        holder = rows[0].holder
        if holder is None or holder.encode is None:
            msg = "only the message of a broker's subscriber can be moved with another body: leave body out"
            raise SetupError(msg)
        payload, content_type = await holder.encode(place.body)
        changes = {"content-type": content_type or None}
    for row in rows:
        headers = None if changes is None else replace_headers(row.stored_headers, changes)
        delay = float(place.delay)  # type: ignore[arg-type] # checked
        queue = row.queue if place.queue is None else place.queue
        row.settle_as(outcomes.Relocate(queue, payload, headers, delay, place.published_again))


def warn_of_ignored(
    rows: Sequence[ClaimedMessage], method: str, options: Mapping[str, Any], known: str
) -> None:
    """Say once for each subscriber that `method` has been given options that it does not have, as
    of another broker.
    """
    holder, names = rows[0].holder, ", ".join(sorted(options))
    if holder is None or (key := f"{method}({names})") in holder.warned:
        return
    holder.warned.add(key)
    text = f"{method} of a message takes {known}; {names} is ignored, and the message is settled without it"
    holder.log(logging.WARNING, text, message_id=rows[0].id)


async def extend(rows: Sequence[ClaimedMessage], duration: Duration) -> bool:
    """Hold `rows` for `duration` from now; whether all of them are still held.

    Raises:
        SetupError: `duration` is no length of time above 0; the rows are not held by a running
            subscriber, or were acked before their handler started.
        StoreError: the database could not be asked, or somebody else had the row locked for too
            long.
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
    """The exception being handled: in a handler's `except`, and in FastStream's acknowledgement."""
    error = sys.exception()
    while isinstance(error, HandlerException):
        # `raise NackMessage() from error` is an instruction; what went wrong is behind it.
        error = error.__cause__ or error.__context__
    return error


def nack_or_refuse(
    delay: Duration | None, settle: Callable[[outcomes.Outcome], Any]
) -> outcomes.Nack:
    """The nack; one that is refused still records that the delivery failed, so that it is tried
    again.

    Raises:
        SetupError: `delay` is no length of time.
    """
    try:
        if delay is None:
            return outcomes.Nack(error=current_error())
        return outcomes.Nack(delay=delay_seconds(delay), error=current_error())
    except SetupError as error:
        settle(outcomes.Nack(error=error))
        raise


def reject_outcome(reason: str | None) -> outcomes.Reject:
    """The reject.

    Raises:
        SetupError: `reason` is not a string.
    """
    if reason is not None and not isinstance(reason, str):
        raise SetupError(f"reason must be a string or None, got {reason!r}")
    return outcomes.Reject(reason=reason, error=current_error())


_GONE = (
    "AckPolicy.ACK_FIRST has acked the message before its handler started, so nothing else can become of it: use "
    "another policy for handlers that postpone, move or hold their messages"
)

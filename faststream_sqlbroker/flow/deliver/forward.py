"""Subscribers without a handler: each message is moved to the next queue, as it is.

The move is the settlement of its delivery, one fenced UPDATE for a whole batch: a message is in one
queue or in the next, never in both and never in none. Bodies are not looked at.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Outcome, Reject, Relocate
from faststream_sqlbroker.core.policies import Header
from faststream_sqlbroker.core.reasons import DESTINATION_NOT_ALLOWED, NO_DESTINATION, TOO_MANY_HOPS
from faststream_sqlbroker.core.routing import (
    DESTINATION_HEADER,
    LOOKUP_HEADER,
    MOST_HOPS,
    PUBLISH_AFTER_HEADER,
    destination_of,
    due_of,
)
from faststream_sqlbroker.core.rows import NO_KEY, ClaimedMessage
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.settings import ConsumerSettings

CLOCK_STEP = 0.001
"""Seconds that a database's clock may be behind itself: SQLite's has milliseconds."""

_LOOKUP = Header(LOOKUP_HEADER)
Named = Callable[[str, ClaimedMessage, Log], None]


class Forward:
    """A consumer's `handle`, for batches, that decides where each message goes."""

    def __init__(
        self, settings: ConsumerSettings, log: Log, named: Named, clock: Clock | None = None
    ) -> None:
        """`settings` are the subscriber's; `log` is told of messages that cannot go on, or say
        nothing usable.

        `named` is told of destinations that only messages name: see `heartbeat.Destinations.named`.
        """
        self._queues = frozenset(settings.queues)
        self._log = log
        self._named = named
        self._clock = clock or Clock()
        self._dead_letter_queue = settings.dead_letter_queue
        self._allowed = None if settings.destinations is None else frozenset(settings.destinations)
        to = settings.forward_to
        self._key = settings.forward_key
        self._to = to if isinstance(to, str) else None

    async def __call__(self, rows: Sequence[ClaimedMessage]) -> None:
        """Give each of `rows` its outcome."""
        undated: list[ClaimedMessage] = []
        for row in rows:
            row.settle_as(self._next(row, undated))
        if undated:
            self._say_undated(undated)

    def _next(self, row: ClaimedMessage, undated: list[ClaimedMessage]) -> Outcome:
        if row.hops < MOST_HOPS:
            if self._to is not None:
                return Relocate(self._to, is_hop=True, key=self._new_key(row))
            return self._by_headers(row, undated)
        text = (
            f"forward_to has moved it on {row.hops} times since a handler last did, so its queues "
            "lead round: look where they go"
        )
        return self._dead_letter(row, TOO_MANY_HOPS, ValueError(text))

    def _by_headers(self, row: ClaimedMessage, undated: list[ClaimedMessage]) -> Outcome:
        headers = row.headers
        try:
            queue = destination_of(headers, self._queues)
        except ValueError as error:
            return self._dead_letter(row, NO_DESTINATION, error)
        if self._allowed is None:
            self._named(queue, row, self._log)
        elif queue not in self._allowed:
            text = (
                f"its header {DESTINATION_HEADER!r} names {short(queue)}, which is not among the "
                "subscriber's destinations"
            )
            return self._dead_letter(row, DESTINATION_NOT_ALLOWED, ValueError(text))
        try:
            # Of a producer whose clock is ahead the time of its row is to come.
            due = due_of(headers, min(row.created_at, row.acquired_at))
            if due is None and row.next_attempt_at <= row.created_at:
                undated.append(row)
        except ValueError as error:
            self._say(row, logging.WARNING, f"it is moved at once: {error}")
            due = None
        delay = 0.0 if due is None else _until(due, row, self._clock)
        # One that has to wait there is not published yet: it can be looked up until it leaves.
        lookup = None if delay else _LOOKUP.key(headers)
        return Relocate(queue, delay=delay, is_hop=True, key=self._new_key(row), lookup=lookup)

    def _new_key(self, row: ClaimedMessage) -> str | None:
        key = self._key
        return (key.key(row.headers) or NO_KEY) if isinstance(key, Header) else key

    def _dead_letter(self, row: ClaimedMessage, reason: str, error: Exception) -> Reject:
        end = "is archived as FAILED"
        if self._dead_letter_queue is not None:
            end = f"goes to the dead letter queue {self._dead_letter_queue!r}"
        self._say(row, logging.ERROR, f"it {end} ({reason}): {error}")
        return Reject(reason, error)

    def _say_undated(self, rows: Sequence[ClaimedMessage]) -> None:
        """`rows` of a foreign producer do not say when; those of `publish` do."""
        first = rows[0]
        others = "" if len(rows) == 1 else f" and {len(rows) - 1} more claimed with it"
        self._say(
            first,
            logging.WARNING,
            f"it is moved at once{others}: no header {PUBLISH_AFTER_HEADER!r} and no "
            "next_attempt_at after created_at says when; the header with 0 says at once",
        )

    def _say(self, row: ClaimedMessage, level: int, text: str) -> None:
        self._log(level, f"message {row.id} of queue {row.queue!r}: {text}", message_id=row.id)


def _until(due: datetime, row: ClaimedMessage, clock: Clock) -> float:
    """Seconds, by the database's clock: its time of the claim, plus what has passed here since;
    never too few.
    """
    passed = clock.monotonic() - row.claimed_monotonic
    left = (due - row.acquired_at).total_seconds() - passed
    return left + CLOCK_STEP if left > -CLOCK_STEP else 0.0

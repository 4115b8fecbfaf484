"""Subscribers without a handler: each message is moved unchanged to the next queue.

The move is the settlement of its delivery, one fenced UPDATE for a whole batch: a message is in one
queue or in the next, never in both and never in none. Bodies are not read.
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
    MAX_HOPS,
    PUBLISH_AFTER_HEADER,
    get_destination,
    parse_publish_after,
)
from faststream_sqlbroker.core.rows import REMOVED_KEY, ClaimedMessage
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.settings import ConsumerSettings

CLOCK_STEP = 0.001
"""Seconds that a database's clock may lag behind itself: SQLite's has milliseconds."""

_LOOKUP = Header(LOOKUP_HEADER)
RecordDestination = Callable[[str, ClaimedMessage, Log], None]


class ForwardHandler:
    """A handler for batches that decides where each message goes."""

    def __init__(
        self,
        settings: ConsumerSettings,
        log: Log,
        record_destination: RecordDestination,
        clock: Clock | None = None,
    ) -> None:
        """Take the subscriber's `settings`; `log` gets messages that cannot go on.

        `record_destination` is called for destinations that only messages name: see
        `heartbeat.Destinations.record`.
        """
        self._queues = frozenset(settings.queues)
        self._log = log
        self._record_destination = record_destination
        self._clock = clock or Clock()
        self._dead_letter_queue = settings.dead_letter_queue
        self._allowed_queues = (
            None if settings.destinations is None else frozenset(settings.destinations)
        )
        target = settings.forward_to
        self._key_option = settings.forward_key
        self._target = target if isinstance(target, str) else None

    async def __call__(self, rows: Sequence[ClaimedMessage]) -> None:
        """Set the outcome of each of `rows`."""
        undated: list[ClaimedMessage] = []
        for row in rows:
            row.record_outcome(self._get_outcome(row, undated))
        if undated:
            self._log_undated(undated)

    def _get_outcome(self, row: ClaimedMessage, undated: list[ClaimedMessage]) -> Outcome:
        """Return the move of `row` to the next queue, or a reject after too many moves.

        Moves without a handler in between are counted (`hops`), so that queues that forward in a
        circle do not move a message for ever. Rows without a due time are added to `undated`.
        """
        if row.hops < MAX_HOPS:
            if self._target is not None:
                return Relocate(self._target, is_hop=True, key=self._get_new_key(row))
            return self._route_by_headers(row, undated)
        text = (
            f"forward_to has moved the message {row.hops} times without a handler in between, so "
            "its queues probably form a cycle: check where they forward to"
        )
        return self._reject(row, TOO_MANY_HOPS, ValueError(text))

    def _route_by_headers(self, row: ClaimedMessage, undated: list[ClaimedMessage]) -> Outcome:
        """Return the move of `row` to the queue, and at the time, that the headers name.

        A missing or disallowed queue rejects the message. An unreadable time moves it immediately.
        Rows that have no time at all are added to `undated`, and moved immediately with a warning.
        """
        headers = row.headers
        try:
            queue = get_destination(headers, self._queues)
        except ValueError as error:
            return self._reject(row, NO_DESTINATION, error)
        if self._allowed_queues is None:
            self._record_destination(queue, row, self._log)
        elif queue not in self._allowed_queues:
            text = (
                f"its header {DESTINATION_HEADER!r} names {format_value(queue)}, which is not "
                "among the subscriber's destinations"
            )
            return self._reject(row, DESTINATION_NOT_ALLOWED, ValueError(text))
        try:
            # If the producer's clock is ahead, the row's creation time lies in the future.
            due = parse_publish_after(headers, min(row.created_at, row.acquired_at))
            if due is None and row.next_attempt_at <= row.created_at:
                undated.append(row)
        except ValueError as error:
            self._log_row(row, logging.WARNING, f"it is moved immediately: {error}")
            due = None
        delay = 0.0 if due is None else _get_delay(due, row, self._clock)
        # A message that waits there is not published yet: it can be looked up until it leaves.
        lookup = None if delay else _LOOKUP.key(headers)
        return Relocate(queue, delay=delay, is_hop=True, key=self._get_new_key(row), lookup=lookup)

    def _get_new_key(self, row: ClaimedMessage) -> str | None:
        """Return the key of `row` in the next queue; None keeps the old key.

        The option `forward_key` is a fixed key, or a header whose value becomes the key. Without
        that header the key is removed (REMOVED_KEY).
        """
        key = self._key_option
        return (key.key(row.headers) or REMOVED_KEY) if isinstance(key, Header) else key

    def _reject(self, row: ClaimedMessage, reason: str, error: Exception) -> Reject:
        """Return the reject of `row`, and log the reason and the consequence."""
        action = "is rejected"
        if self._dead_letter_queue is not None:
            action = f"goes to the dead letter queue {self._dead_letter_queue!r}"
        self._log_row(row, logging.ERROR, f"it {action} ({reason}): {error}")
        return Reject(reason, error)

    def _log_undated(self, rows: Sequence[ClaimedMessage]) -> None:
        """Log that `rows` have no due time: a foreign producer wrote the rows, not `publish`."""
        first = rows[0]
        suffix = "" if len(rows) == 1 else f", like {len(rows) - 1} more claimed with it"
        self._log_row(
            first,
            logging.WARNING,
            f"it is moved immediately{suffix}: neither a header {PUBLISH_AFTER_HEADER!r} nor a "
            "next_attempt_at after created_at sets its time; set the header to 0 to confirm",
        )

    def _log_row(self, row: ClaimedMessage, level: int, text: str) -> None:
        self._log(level, f"message {row.id} of queue {row.queue!r}: {text}", message_id=row.id)


def _get_delay(due: datetime, row: ClaimedMessage, clock: Clock) -> float:
    """Return the seconds until `due` by the database's clock, never too few.

    The database's time of the claim counts, plus the time that has passed in this process since;
    the clock of this process may be wrong. A time in the past gives 0.
    """
    elapsed = clock.monotonic() - row.claimed_monotonic
    remaining = (due - row.acquired_at).total_seconds() - elapsed
    return remaining + CLOCK_STEP if remaining > -CLOCK_STEP else 0.0

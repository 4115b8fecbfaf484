"""States of an outcome, their transitions, batches of outcomes, and reports of lost deliveries."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from uuid import UUID

from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, Unit
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.metrics import SubscriberMetrics

DeliveryKey = tuple[int, UUID]
"""Key of a delivery: message id and lease token."""

MAX_PARTS = 8
"""Maximum parts of a batch while nothing else can be written: enough to find one culprit among 100.

"""
SPLIT_AFTER = 10
"""Failures, in about 40 seconds, after which a batch is split although nothing else can be written.

"""


class DeliveryState(Enum):
    """State of a delivery."""

    WAITING = "claimed, waits for a worker"
    RUNNING = "a worker is processing it"
    QUEUED = "has an outcome that waits for the flush"
    WRITING = "its outcome was sent to the database, which has not answered yet"
    QUARANTINED = (
        "its write failed for a transient reason; repeated unchanged, apart from the queue"
    )
    REFUSED = "refused by the database; repeated apart from the queue, later in a reduced version"
    WRITTEN = "the outcome is committed"
    LOST = "the lease is lost; its outcome will not be written"


class OutcomeEvent(Enum):
    """Event that changes the state of a delivery."""

    CLAIMED = "claim"
    TAKEN = "a worker takes it"
    GIVEN_BACK = "released unstarted"
    ENDED = "its handler ends"
    SENT = "flush"
    SENT_AGAIN = "its pause ends"
    SENT_BY_WORKER = "commit with its handler, removal before its start"
    ROLLED_BACK = "rolled back, not removed"
    ANSWERED = "committed"
    PUT_BACK = "transient failure, row locked elsewhere"
    FAILED = "repeated transient failures"
    REFUSED = "refused on its own"
    ANSWER_DENIED = "its publish on ack is denied"
    BROKEN = "another row of its unit is lost"
    LOST = "lease lost"


_W = DeliveryState.WAITING
_R = DeliveryState.RUNNING
_Q = DeliveryState.QUEUED
_SENT = DeliveryState.WRITING
_QUARANTINED = DeliveryState.QUARANTINED
_REFUSED = DeliveryState.REFUSED

TRANSITIONS: tuple[tuple[DeliveryState | None, OutcomeEvent, DeliveryState], ...] = (
    (None, OutcomeEvent.CLAIMED, _W),
    (_W, OutcomeEvent.TAKEN, _R),
    (_W, OutcomeEvent.GIVEN_BACK, _Q),
    (_R, OutcomeEvent.ENDED, _Q),
    (_R, OutcomeEvent.SENT_BY_WORKER, _SENT),
    (_SENT, OutcomeEvent.ROLLED_BACK, _R),
    (_Q, OutcomeEvent.SENT, _SENT),
    (_SENT, OutcomeEvent.ANSWERED, DeliveryState.WRITTEN),
    (_SENT, OutcomeEvent.PUT_BACK, _Q),
    (_SENT, OutcomeEvent.FAILED, _QUARANTINED),
    (_SENT, OutcomeEvent.REFUSED, _REFUSED),
    (_SENT, OutcomeEvent.ANSWER_DENIED, _Q),
    (_QUARANTINED, OutcomeEvent.SENT_AGAIN, _SENT),
    (_REFUSED, OutcomeEvent.SENT_AGAIN, _SENT),
    *((state, OutcomeEvent.BROKEN, _Q) for state in (_Q, _SENT, _QUARANTINED, _REFUSED)),
    *(
        (state, OutcomeEvent.LOST, DeliveryState.LOST)
        for state in (_W, _R, _Q, _SENT, _QUARANTINED, _REFUSED)
    ),
)
"""(from, event, to); None means "not held yet". The diagram of INTERNALS.md is generated from it.

"""

_NEXT = {(source, event): target for source, event, target in TRANSITIONS}
QUARANTINE_STATES = (_QUARANTINED, _REFUSED)


def get_next_state(state: DeliveryState, event: OutcomeEvent) -> DeliveryState:
    """Return the state to which `event` leads from `state`.

    Raises:
        RuntimeError: there is no such transition; a bug.
    """
    try:
        return _NEXT[state, event]
    except KeyError:
        msg = f"state {state.name} of an outcome has no transition for event {event.name}"
        raise RuntimeError(msg) from None


@dataclass(slots=True, eq=False)
class OutcomeBatch:
    """Outcomes that are sent together, and wait together to be sent again; units are whole."""

    parts: list[Settlement]
    """Outcomes that the database has not dealt with."""
    state: DeliveryState
    origin: DeliveryState
    """State before the batch was sent."""
    tries: int = 0
    """Number of failures since the batch was quarantined."""
    due: float = 0.0
    """Time of the next try (monotonic seconds)."""
    settled_count: int = 0
    """`Outcomes.settled_count` at the last failure."""

    @property
    def delivery_keys(self) -> set[DeliveryKey]:
        """Keys of the deliveries in this batch."""
        return {(s.id, s.lease_token) for s in self.parts}

    def apply_event(self, event: OutcomeEvent) -> None:
        """Change the state by `event`."""
        self.state = get_next_state(self.state, event)

    def restart(self) -> None:
        """Set state WRITING for another try, and remember the current state as `origin`.

        The origin decides what happens to the batch if this try fails, too.
        """
        self.origin = self.state
        self.apply_event(OutcomeEvent.SENT_AGAIN)

    def set_parts(self, parts: list[Settlement]) -> None:
        """Replace the outcomes by `parts`, which the database has not dealt with yet."""
        self.parts = parts

    def schedule_retry(self, retry_at: float, settled_count: int) -> None:
        """Schedule the next try at `retry_at` (monotonic seconds), and note `settled_count`."""
        self.due = retry_at
        self.settled_count = settled_count


def find_unit_end(parts: Sequence[Settlement], end: int) -> int:
    """Return `end`, or a later index so that `parts[:end]` splits no unit.

    A unit is the set of outcomes that are written together with the messages published on ack. Its
    outcomes follow each other.
    """
    end = min(max(end, 1), len(parts))
    while (
        end < len(parts) and (unit := parts[end - 1].unit) is not None and parts[end].unit is unit
    ):
        end += 1
    return end


def split_parts(parts: list[Settlement]) -> list[list[Settlement]]:
    """Split `parts`, whose write has failed, into two of whole units, if there are several units.

    Outcomes that carry additional data, which may be the cause, are separated from plain ones
    first; otherwise the parts are halves. A unit is a set of outcomes that are written together.
    """
    plain = [s for s in parts if not _has_extras(s)]
    if plain and len(plain) < len(parts):
        return [plain, [s for s in parts if _has_extras(s)]]
    return split_in_halves(parts)


def split_in_halves(parts: list[Settlement]) -> list[list[Settlement]]:
    """Split `parts` into halves of whole units; a single unit is returned alone."""
    half = find_unit_end(parts, len(parts) // 2)
    if half == len(parts):
        # The second half is a single unit that begins before the middle: cut after the first unit.
        half = find_unit_end(parts, 1)
    return [parts[:half], parts[half:]] if half < len(parts) else [parts]


def _has_extras(settlement: Settlement) -> bool:
    """Return True if the outcome carries additional data that may make the write fail.

    That is a move to another queue, an error text, or messages published on ack.
    """
    return (
        settlement.unit is not None or settlement.queue is not None or settlement.error is not None
    )


def find_least_tried(batches: Iterable[OutcomeBatch], now: float) -> OutcomeBatch | None:
    """Return the due quarantined batch with the fewest tries; None if none is due at `now`.

    A quarantined batch has failed before, and a write may hang for the full timeout. So batches
    that have failed least, and then those with plain outcomes only, come first.
    """
    due = [b for b in batches if b.state in QUARANTINE_STATES and b.due <= now]
    return min(due, key=lambda b: (b.tries, any(map(_has_extras, b.parts)), b.due), default=None)


def can_split(batch: OutcomeBatch, batches: Iterable[OutcomeBatch], settled_count: int) -> bool:
    """Return True if `batch`, which has failed once more, may be split to find the culprit.

    During an outage every batch fails, and splitting would leave each outcome with a transaction of
    its own. So it is split only if other outcomes have been written since (`settled_count` counts
    these), if there are few parts yet, or if it has failed for long.
    """
    if settled_count > batch.settled_count or batch.tries + 1 >= SPLIT_AFTER:
        return True
    return sum([DeliveryState.QUARANTINED in (b.origin, b.state) for b in batches]) < MAX_PARTS


Units = dict[Unit, set[int]]
"""Units that must not be written any more, each with its lost messages."""


CLAIMED_AGAIN = "this process has claimed it again, and the older outcome will not be written"


def add_unit(units: Units, lost: Settlement) -> None:
    """Add the unit of `lost`, if any."""
    if lost.unit is not None:
        units.setdefault(lost.unit, set()).add(lost.id)


class LostLeaseLog:
    """Lost deliveries of a subscriber, each logged once and counted."""

    def __init__(self, log: Log, metrics: SubscriberMetrics) -> None:
        self._log = log
        self._metrics = metrics
        self.unanswered: set[DeliveryKey] = set()
        """Deliveries with an unanswered COMMIT: they may be written already."""
        self.lost_count = 0
        self.unknown_count = 0

    def report(
        self,
        delivery: Settlement | ClaimedMessage,
        row: ClaimedMessage | None,
        phase: str,
        consequence: str,
    ) -> None:
        """Log and count `delivery`, which the database does not know any more.

        After a COMMIT without an answer that is a "settle unknown": the outcome may have been
        written. Otherwise the lease is lost: it has expired, or the message was claimed again.

        Args:
            delivery: The settlement that was sent, or the row that is held.
            row: The same delivery as it was claimed, if it is still known.
            phase: The operation that noticed the loss.
            consequence: The consequence, for the log.
        """
        key = delivery.id, delivery.lease_token
        if key in self.unanswered:
            self.unanswered.discard(key)
            self.unknown_count += 1
            event = "settle unknown"
        else:
            self.lost_count += 1
            event = "lease lost"
        self._metrics.record_lost(
            "" if row is None else row.queue, unknown=event == "settle unknown"
        )
        details = (
            ""
            if row is None
            else f" of queue {row.queue!r} (delivery {row.deliveries_count}, phase {phase})"
        )
        self._log(
            logging.WARNING,
            f"{event}: message {delivery.id}{details}; {consequence}",
            message_id=delivery.id,
        )

    def report_broken(self, broken: Sequence[Settlement], units: Units) -> None:
        """Log that the `broken` outcomes are sent back, because their units have lost rows."""
        lost_ids = sorted(set[int]().union(*(units[s.unit] for s in broken if s.unit is not None)))
        self._log(
            logging.WARNING,
            format_broken([s.id for s in broken], lost_ids),
            message_id=broken[0].id,
        )


def format_broken(ids: Sequence[int], lost: Sequence[int]) -> str:
    """Format the log text for messages `ids`, delivered again because `lost` have no lease.

    The handler acked all of these messages in one call, so that their outcomes form a unit.
    """
    return (
        f"messages {list(ids)} are delivered again: the handler's work is committed with all "
        f"messages that it acked or not at all, and messages {list(lost)} have lost their leases"
    )

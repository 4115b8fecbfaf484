"""The states of an outcome, the only ways from one to another, what is sent together, and what
is said of lost deliveries.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from uuid import UUID

from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, Unit
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.metrics import SubscriberMetrics

Mark = tuple[int, UUID]
"""A delivery: message and token."""

FEW_PARTS = 8
"""Parts into which a batch may be cut while nothing else can be written: enough to find one culprit
among 100."""
CUT_ANYWAY = 10
"""Failures, in about 40 seconds, after which a batch is cut although nothing else can be written.
"""


class State(Enum):
    """The place of a delivery."""

    WAITING = "claimed, waits for a worker"
    RUNNING = "a worker has it"
    QUEUED = "has an outcome, which waits for the flush"
    WRITING = "the database has its outcome, and has not answered"
    SET_APART = "has failed for a passing reason; repeated as it is, apart from the queue"
    REFUSED = "refused by the database; repeated apart from the queue, later in a lesser version"
    WRITTEN = "the outcome is committed"
    LOST = "the lease is gone; nothing of it will be written"


class Event(Enum):
    """A way from one state to another."""

    CLAIMED = "claim"
    TAKEN = "a worker takes it"
    GIVEN_BACK = "given back unstarted"
    ENDED = "its handler ends"
    SENT = "flush"
    SENT_AGAIN = "its pause is over"
    SENT_BY_WORKER = "commit with its handler, removal before its start"
    ROLLED_BACK = "rolled back, not removed"
    ANSWERED = "committed"
    PUT_BACK = "passing failure, row locked elsewhere"
    FAILED = "fails for a passing reason again and again"
    REFUSED = "refused by itself"
    ANSWER_DENIED = "its answer may not be published"
    BROKEN = "another row of its unit is lost"
    LOST = "lease lost"


_W = State.WAITING
_R = State.RUNNING
_Q = State.QUEUED
_SENT = State.WRITING
_APART = State.SET_APART
_REFUSED = State.REFUSED

TRANSITIONS: tuple[tuple[State | None, Event, State], ...] = (
    (None, Event.CLAIMED, _W),
    (_W, Event.TAKEN, _R),
    (_W, Event.GIVEN_BACK, _Q),
    (_R, Event.ENDED, _Q),
    (_R, Event.SENT_BY_WORKER, _SENT),
    (_SENT, Event.ROLLED_BACK, _R),
    (_Q, Event.SENT, _SENT),
    (_SENT, Event.ANSWERED, State.WRITTEN),
    (_SENT, Event.PUT_BACK, _Q),
    (_SENT, Event.FAILED, _APART),
    (_SENT, Event.REFUSED, _REFUSED),
    (_SENT, Event.ANSWER_DENIED, _Q),
    (_APART, Event.SENT_AGAIN, _SENT),
    (_REFUSED, Event.SENT_AGAIN, _SENT),
    *((state, Event.BROKEN, _Q) for state in (_Q, _SENT, _APART, _REFUSED)),
    *((state, Event.LOST, State.LOST) for state in (_W, _R, _Q, _SENT, _APART, _REFUSED)),
)
"""(from, event, to); None is "not ours yet". The diagram of INTERNALS.md is generated from it."""

_NEXT = {(source, event): target for source, event, target in TRANSITIONS}
APART_STATES = (_APART, _REFUSED)


def after(state: State, event: Event) -> State:
    """The state to which `event` leads from `state`.

    Raises:
        RuntimeError: nowhere; a bug.
    """
    try:
        return _NEXT[state, event]
    except KeyError:
        msg = f"an outcome cannot leave {state.name} by {event.name}"
        raise RuntimeError(msg) from None


@dataclass(slots=True, eq=False)
class Batch:
    """Outcomes that were sent together, and wait together to be sent again; whole units."""

    parts: list[Settlement]
    """What the database has not dealt with."""
    state: State
    origin: State
    """Where they were before they were sent."""
    tries: int = 0
    """How often they have failed since they were set apart or refused."""
    due: float = 0.0
    """When to send them again (monotonic seconds)."""
    settled_then: int = 0
    """`Outcomes.settled_count` when they failed last."""

    @property
    def marks(self) -> set[Mark]:
        """Its deliveries."""
        return {(s.id, s.lease_token) for s in self.parts}

    def move(self, event: Event) -> None:
        """Go where `event` leads."""
        self.state = after(self.state, event)

    def send_again(self) -> None:
        """It is sent again, from where it waits."""
        self.origin = self.state
        self.move(Event.SENT_AGAIN)

    def keep(self, parts: list[Settlement]) -> None:
        """Only `parts` of it are left."""
        self.parts = parts

    def wait(self, until: float, settled_count: int) -> None:
        """Wait `until` then (monotonic seconds) to be sent again; so many outcomes are written."""
        self.due = until
        self.settled_then = settled_count


def unit_end(parts: Sequence[Settlement], end: int) -> int:
    """`end`, or further, so that no unit is cut."""
    end = min(max(end, 1), len(parts))
    while (
        end < len(parts) and (unit := parts[end - 1].unit) is not None and parts[end].unit is unit
    ):
        end += 1
    return end


def cut(parts: list[Settlement]) -> list[list[Settlement]]:
    """Two parts of whole units, if there are several: what carries something of its own that may be
    the cause, and the rest.
    """
    plain = [s for s in parts if not _carries(s)]
    if plain and len(plain) < len(parts):
        return [plain, [s for s in parts if _carries(s)]]
    half = unit_end(parts, len(parts) // 2)
    if half == len(parts):
        half = unit_end(parts, 1)
    return [parts[:half], parts[half:]] if half < len(parts) else [parts]


def _carries(settlement: Settlement) -> bool:
    """Whether it has something of its own that may be why it cannot be written."""
    return (
        settlement.unit is not None or settlement.queue is not None or settlement.error is not None
    )


def least_tried(batches: Iterable[Batch], now: float) -> Batch | None:
    """Of what is apart and due, the least tried: it may not hang like others."""
    due = [b for b in batches if b.state in APART_STATES and b.due <= now]
    return min(due, key=lambda b: (b.tries, any(map(_carries, b.parts)), b.due), default=None)


def may_cut(batch: Batch, batches: Iterable[Batch], settled_count: int) -> bool:
    """Whether to cut `batch`, one of `batches` that has failed once more, though it may be a whole
    outage.

    Others have been written since, or there are few parts yet, or it has failed for long.
    """
    if settled_count > batch.settled_then or batch.tries + 1 >= CUT_ANYWAY:
        return True
    return sum([State.SET_APART in (b.origin, b.state) for b in batches]) < FEW_PARTS


Units = dict[Unit, set[int]]
"""Units that must not be written any more, each with the messages of it that are lost."""


CAME_BACK = "it came back to us, and the older outcome will not be written"


def note_unit(units: Units, lost: Settlement) -> None:
    """Add the unit of `lost`, if it is one of several."""
    if lost.unit is not None:
        units.setdefault(lost.unit, set()).add(lost.id)


class LostLeases:
    """What one subscriber has lost: told once for each delivery, and counted."""

    def __init__(self, log: Log, metrics: SubscriberMetrics) -> None:
        self._log = log
        self._metrics = metrics
        self.unanswered: set[Mark] = set()
        """Deliveries with an earlier COMMIT that was not answered: they may be written already."""
        self.lost_count = 0
        self.unknown_count = 0

    def tell(
        self,
        delivery: Settlement | ClaimedMessage,
        row: ClaimedMessage | None,
        phase: str,
        rest: str,
    ) -> None:
        """The database does not know `delivery` any more.

        Args:
            delivery: What was sent, or is held.
            row: The same as it was claimed, if it is still known.
            phase: What was done when this was noticed.
            rest: What it means.
        """
        mark = delivery.id, delivery.lease_token
        if mark in self.unanswered:
            self.unanswered.discard(mark)
            self.unknown_count += 1
            what = "settle unknown"
        else:
            self.lost_count += 1
            what = "lease lost"
        self._metrics.lost("" if row is None else row.queue, unknown=what == "settle unknown")
        which = (
            ""
            if row is None
            else f" of queue {row.queue!r} (delivery {row.deliveries_count}, phase {phase})"
        )
        self._log(
            logging.WARNING, f"{what}: message {delivery.id}{which}; {rest}", message_id=delivery.id
        )

    def tell_broken(self, broken: Sequence[Settlement], units: Units) -> None:
        """`broken`, of `units`, go back."""
        lost = sorted(set[int]().union(*(units[s.unit] for s in broken if s.unit is not None)))
        self._log(
            logging.WARNING, broken_text([s.id for s in broken], lost), message_id=broken[0].id
        )


def broken_text(ids: Sequence[int], lost: Sequence[int]) -> str:
    """What to say of messages `ids`, which go back because `lost` of the same batch are lost."""
    return (
        f"messages {list(ids)} go back: what their handler did is written with "
        f"all messages that it acked or not at all, and {list(lost)} of them have lost their lease"
    )

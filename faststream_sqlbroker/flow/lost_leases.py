"""Tell each lost delivery, once, and count it."""

import logging
from collections.abc import Sequence

from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, Unit
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.metrics import SubscriberMetrics
from faststream_sqlbroker.flow.outcome_states import Mark

Units = dict[Unit, set[int]]
"""Units that must not be written any more, each with the messages of it that are lost."""


CAME_BACK = "it came back to us, and the older outcome will not be written"


def note_unit(units: Units, lost: Settlement) -> None:
    """Add the unit of `lost`, if it is one of several."""
    if lost.unit is not None:
        units.setdefault(lost.unit, set()).add(lost.id)


class LostLeases:
    """What one subscriber has lost."""

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
        f"messages {list(ids)} go back without an attempt: what their handler did is written with "
        f"all messages that it acked or not at all, and {list(lost)} of them have lost their lease"
    )

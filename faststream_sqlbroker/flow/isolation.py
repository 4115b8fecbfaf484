"""Keep a message that may have killed its process away from the others.

A process that dies costs every message it held a delivery. Without care, the neighbours of a poison message
would reach the delivery limit together with it, unhandled. So a message with two or more lost leases runs
alone: only in a process that holds nothing else, one at a time, those with the fewest losses first (most of
them are neighbours), and at most every other claim that also finds others. The price: until the process
holds nothing, it claims nothing, however long its running handlers take.
"""

from collections.abc import Sequence

from faststream_sqlbroker.core.rows import ClaimedMessage

SUSPECT_AFTER = 2
"""Lost leases; one is normal when a process is killed or a machine restarts."""


def lost_leases(row: ClaimedMessage) -> int:
    """Earlier deliveries of `row` that ended without an attempt."""
    return row.deliveries_count - 1 - row.attempts_count


class Isolation:
    """Decides which of the rows of a claim are kept."""

    def __init__(self) -> None:
        """Nothing is suspected."""
        self.hold = False
        """Whether nothing may be claimed until everything held has been written."""
        self._last_was_alone = False

    def keep(self, rows: Sequence[ClaimedMessage], *, alone: bool) -> Sequence[ClaimedMessage]:
        """The rows to work on; the others are to be given back.

        Args:
            rows: What one claim has found.
            alone: Whether the process held nothing before it.
        """
        suspects = [row for row in rows if lost_leases(row) >= SUSPECT_AFTER]
        self.hold = bool(suspects)
        if not suspects:
            if rows:
                self._last_was_alone = False
            return rows
        others = [row for row in rows if lost_leases(row) < SUSPECT_AFTER]
        if alone and not (others and self._last_was_alone):
            self._last_was_alone = True
            return [min(suspects, key=lost_leases)]
        self._last_was_alone = False
        return others

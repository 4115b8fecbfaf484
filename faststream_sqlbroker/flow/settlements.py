"""What the outcomes of one call of the handler mean for their rows."""

import logging
from time import monotonic

from faststream_sqlbroker.core.outcome import Abandon, Ack, Move, Nack, Outcome, Release
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.settle import SettleRules, acked, settle
from faststream_sqlbroker.exceptions import PublishError
from faststream_sqlbroker.flow.loop import Log


class Settlements:
    """Makes settlements by a subscriber's rules."""

    def __init__(self, rules: SettleRules, log: Log) -> None:
        """`log` is told of messages without an outcome."""
        self._rules, self._log = rules, log

    def __call__(self, rows: list[ClaimedMessage]) -> list[Settlement]:
        """What the outcomes of one call of the handler mean; an acked call brings what is chained to it."""
        chained = rows[0].chained if rows else ()
        if not chained and all(type(row.outcome) is Ack for row in rows):
            now = monotonic()
            return [
                acked(row, self._rules, ended_after=now - row.claimed_monotonic)
                for row in rows
                if not row.lease_lost
            ]
        settlements = []
        for row in rows:
            if row.outcome is None:
                self._log(
                    logging.ERROR,
                    f"message {row.id} of queue {row.queue!r} was not updated after processing: the handler "
                    "neither acked, nacked nor rejected it; it is archived as FAILED",
                    message_id=row.id,
                )
            attempted = not isinstance(row.outcome, Release | Abandon)
            if not row.lease_lost:
                settlements.append(self.one(row, row.outcome, attempted=attempted))
        if chained and settlements and all(isinstance(row.outcome, Ack | Move) for row in rows):
            settlements[0].chained = chained
            refused = PublishError("what the handler published with its ack was refused by the database")
            first = next(row for row in rows if not row.lease_lost)
            settlements[0].fallback = self.one(first, Nack(error=refused), attempted=True)
            for settlement in settlements[:-1]:
                settlement.with_next = True
        return settlements

    def one(self, row: ClaimedMessage, outcome: Outcome | None, *, attempted: bool) -> Settlement:
        """What `outcome` of `row`, which ends now, means."""
        ended_after = monotonic() - row.claimed_monotonic
        return settle(row, outcome, self._rules, ended_after=ended_after, attempted=attempted)

"""What rows end in: without a handler, if they must not start, or by the outcomes of its call."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import (
    Abandon,
    Ack,
    Discard,
    Nack,
    Outcome,
    Reject,
    Release,
    Relocate,
)
from faststream_sqlbroker.core.reasons import CANCELLED, EXPIRED, MAX_ATTEMPTS, MAX_DELIVERIES
from faststream_sqlbroker.core.retry import attempts_limit
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement, Unit
from faststream_sqlbroker.core.settle import SettleRules, acked, settle
from faststream_sqlbroker.exceptions import AccessError, PublishError
from faststream_sqlbroker.flow.deliver.outcome_states import broken_text
from faststream_sqlbroker.flow.loop import Log


def refusal(
    row: ClaimedMessage, rules: SettleRules, most_deliveries: float, clock: Clock
) -> Outcome | None:
    """What `row` ends in without a handler; None if one may start.

    Unreadable, delivered or attempted too often, and expired messages must not.
    """
    if row.cancelled is not None:
        return Discard(CANCELLED, text=row.cancelled)
    if row.outcome is not None:
        return row.outcome  # it could not be read, or a policy says so
    if row.deliveries_count - row.attempts_count > most_deliveries:
        return Reject(MAX_DELIVERIES)
    attempts = attempts_limit(rules.retry_strategy)
    if attempts is not None and row.attempts_count >= attempts:
        return Reject(MAX_ATTEMPTS)
    if row.expires_at is not None:
        # The database's clock: its time of the claim plus what has passed here since.
        now = row.acquired_at + timedelta(seconds=clock.monotonic() - row.claimed_monotonic)
        if row.expires_at <= now:
            return Discard(EXPIRED)
    return None


def refusal_text(row: ClaimedMessage, outcome: Reject) -> str:
    """What to log of it."""
    if outcome.error is not None:
        return (
            f"message {row.id} of queue {row.queue!r} cannot be read and is rejected: "
            f"{outcome.error}"
        )
    if outcome.reason not in {MAX_DELIVERIES, MAX_ATTEMPTS}:
        return (
            f"message {row.id} of queue {row.queue!r} becomes a dead letter by a policy: "
            f"{outcome.reason}"
        )
    return (
        f"Message delivery limit was exceeded for message {row.id} of queue {row.queue!r} "
        f"({outcome.reason}: {row.deliveries_count} deliveries, {row.attempts_count} attempts)"
    )


_OR_DROP = "or drop the answers that producers ask for by reply_to: no_reply=True on the subscriber"


class Settlements:
    """Makes settlements by a subscriber's rules."""

    def __init__(self, rules: SettleRules, log: Log, clock: Clock | None = None) -> None:
        """`log` is told of messages without an outcome."""
        self._rules = rules
        self._log = log
        self._clock = clock or Clock()

    def __call__(self, rows: list[ClaimedMessage]) -> list[Settlement]:
        """What the outcomes of one call of the handler mean.

        What it publishes on ack is written with all rows that it acked or moved, which are a
        unit; if one of them has lost its lease, the others go back. The rest is settled row by row.
        """
        on_ack = rows[0].chained if rows else ()
        # Nearly all calls: every row is acked, and nothing is published on ack.
        if not on_ack and all(type(row.outcome) is Ack for row in rows):
            now = self._clock.monotonic()
            return [
                acked(row, self._rules, ended_after=now - row.claimed_monotonic)
                for row in rows
                if not row.lease_lost
            ]
        self._tell_unsettled(rows)
        return self._of_mixed(rows, on_ack)

    def _of_mixed(
        self, rows: Sequence[ClaimedMessage], on_ack: Sequence[NewMessage]
    ) -> list[Settlement]:
        """Settlements of `rows` of which not all are plain acks."""
        unit = self._unit(rows) if on_ack else []
        settlements = self._joined(unit, on_ack) if unit else []
        joined_ids = {row.id for row in unit}
        for row in rows:
            if not row.lease_lost and row.id not in joined_ids:
                attempted = not isinstance(row.outcome, Release | Abandon)
                settlements.append(self.one(row, row.outcome, attempted=attempted))
        return settlements

    def _tell_unsettled(self, rows: Sequence[ClaimedMessage]) -> None:
        for row in rows:
            if row.outcome is None:
                self._log(
                    logging.ERROR,
                    f"message {row.id} of queue {row.queue!r} was not updated after processing: "
                    "the handler neither acked, nacked nor rejected it; it is archived as FAILED",
                    message_id=row.id,
                )

    def _joined(
        self, rows: Sequence[ClaimedMessage], on_ack: Sequence[NewMessage]
    ) -> list[Settlement]:
        """Settlements of `rows` that are written together with the messages `on_ack`."""
        settlements = [self.one(row, row.outcome, attempted=True) for row in rows]
        ended = [settlement.ended_after for settlement in settlements]
        unit = Unit(on_ack, partial(self._without_answer, rows, ended))
        for settlement in settlements:
            settlement.unit = unit
        return settlements

    def _unit(self, rows: Sequence[ClaimedMessage]) -> list[ClaimedMessage]:
        """The acked and moved `rows`, if all their leases are held; else they are abandoned."""
        unit = [row for row in rows if isinstance(row.outcome, Ack | Relocate)]
        lost = [row.id for row in unit if row.lease_lost]
        if not lost:
            return unit
        for row in unit:
            row.settle_anew(Abandon())
        if others := [row.id for row in unit if not row.lease_lost]:
            self._log(logging.WARNING, broken_text(others, lost), message_id=others[0])
        return []

    def _without_answer(
        self, rows: Sequence[ClaimedMessage], ended: Sequence[float], error: BaseException | None
    ) -> list[Settlement]:
        """Nacks of all `rows`, to be written in place of their unit, which the database has refused
        with `error`.
        """
        text = "what the handler published with its ack was refused by the database"
        if isinstance(error, AccessError):
            text = f"{text}: {error}\n{_OR_DROP}"
        refused = Nack(error=PublishError(text))
        # A unit again: a batch's answer was for all of these rows, so they fail together.
        unit = Unit()
        settlements = []
        for row, ended_after in zip(rows, ended, strict=True):
            settlement = settle(row, refused, self._rules, ended_after=ended_after)
            settlement.unit = unit
            settlements.append(settlement)
        return settlements

    def one(self, row: ClaimedMessage, outcome: Outcome | None, *, attempted: bool) -> Settlement:
        """What `outcome` of `row`, which ends now, means."""
        ended_after = self._clock.monotonic() - row.claimed_monotonic
        return settle(row, outcome, self._rules, ended_after=ended_after, attempted=attempted)

"""Outcomes and settlements of rows, without a handler or by the result of its call."""

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
from faststream_sqlbroker.core.retry import get_strategy_limit
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement, Unit
from faststream_sqlbroker.core.settle import SettleRules, build_ack_settlement, settle
from faststream_sqlbroker.exceptions import AccessError, PublishError
from faststream_sqlbroker.flow.deliver.outcome_states import format_broken
from faststream_sqlbroker.flow.loop import Log


def get_refusal(
    row: ClaimedMessage, rules: SettleRules, max_deliveries: float, clock: Clock
) -> Outcome | None:
    """Return the outcome of `row` if no handler may start, else None.

    Unreadable, cancelled and expired messages must not start, nor those delivered or attempted too
    often. A worker calls this right before the handler, because a row may have waited for long.
    """
    if row.cancelled is not None:
        return Discard(CANCELLED, text=row.cancelled)
    if row.outcome is not None:
        return row.outcome  # unreadable, or decided by a policy
    # Deliveries that ended without an attempt, such as lost leases, and this delivery.
    if row.deliveries_count - row.attempts_count > max_deliveries:
        return Reject(MAX_DELIVERIES)
    max_attempts = get_strategy_limit(rules.retry_strategy)
    if max_attempts is not None and row.attempts_count >= max_attempts:
        return Reject(MAX_ATTEMPTS)
    if row.expires_at is not None:
        # The database's clock: its time of the claim plus the time that has passed here since.
        now = row.acquired_at + timedelta(seconds=clock.monotonic() - row.claimed_monotonic)
        if row.expires_at <= now:
            return Discard(EXPIRED)
    return None


def format_refusal(row: ClaimedMessage, outcome: Reject) -> str:
    """Format the log line for a message whose handler may not start.

    `outcome` is a reject that `get_refusal` has returned.
    """
    if outcome.error is not None:
        return (
            f"message {row.id} of queue {row.queue!r} cannot be read and is rejected: "
            f"{outcome.error}"
        )
    if outcome.reason not in {MAX_DELIVERIES, MAX_ATTEMPTS}:
        return (
            f"message {row.id} of queue {row.queue!r} becomes a dead letter because of a policy: "
            f"{outcome.reason}"
        )
    return (
        f"Message delivery limit was exceeded for message {row.id} of queue {row.queue!r} "
        f"({outcome.reason}: {row.deliveries_count} deliveries, {row.attempts_count} attempts)"
    )


_OR_DROP = "or set no_reply=True on the subscriber, which drops replies requested by reply_to"


class Settlements:
    """Creates settlements by a subscriber's rules."""

    def __init__(self, rules: SettleRules, log: Log, clock: Clock | None = None) -> None:
        """Report messages without an outcome to `log`."""
        self._rules = rules
        self._log = log
        self._clock = clock or Clock()

    def __call__(self, rows: list[ClaimedMessage]) -> list[Settlement]:
        """Return the settlements, which the database writes, for the outcomes of a handler call.

        Messages published on ack are written with all rows that the handler acked or moved, which
        form a unit; if one of them has lost its lease, the others are delivered again. Other rows
        are settled one by one. Rows without a lease get no settlement.
        """
        # The messages that the handler publishes with its ack wait on the first row.
        on_ack = rows[0].chained if rows else ()
        # The usual case: every row is acked, and nothing is published on ack.
        if not on_ack and all(type(row.outcome) is Ack for row in rows):
            now = self._clock.monotonic()
            return [
                build_ack_settlement(row, self._rules, ended_after=now - row.claimed_monotonic)
                for row in rows
                if not row.lease_lost
            ]
        self._log_unsettled(rows)
        return self._settle_mixed(rows, on_ack)

    def _settle_mixed(
        self, rows: Sequence[ClaimedMessage], on_ack: Sequence[NewMessage]
    ) -> list[Settlement]:
        """Return the settlements of `rows` of which not all are plain acks.

        The rows written in one transaction with the messages `on_ack`, the unit, come first.
        """
        unit = self._find_unit_rows(rows) if on_ack else []
        settlements = self._build_unit(unit, on_ack) if unit else []
        joined_ids = {row.id for row in unit}
        for row in rows:
            if not row.lease_lost and row.id not in joined_ids:
                # A release or an abandoned delivery is no fault of the handler.
                attempted = not isinstance(row.outcome, Release | Abandon)
                settlements.append(self.settle_row(row, row.outcome, attempted=attempted))
        return settlements

    def _log_unsettled(self, rows: Sequence[ClaimedMessage]) -> None:
        """Log rows without an outcome: the handler has returned without a settlement."""
        for row in rows:
            if row.outcome is None:
                self._log(
                    logging.ERROR,
                    f"message {row.id} of queue {row.queue!r} was not updated after processing: "
                    "the handler neither acked, nacked nor rejected it, so it is rejected",
                    message_id=row.id,
                )

    def _build_unit(
        self, rows: Sequence[ClaimedMessage], on_ack: Sequence[NewMessage]
    ) -> list[Settlement]:
        """Return the settlements of `rows` as a unit with the messages `on_ack`: all or nothing.

        The unit knows how to build nacks of its rows, in case the database refuses `on_ack`.
        """
        settlements = [self.settle_row(row, row.outcome, attempted=True) for row in rows]
        # Stored, because the nacks would be built later and must have the times of these ends.
        end_times = [settlement.ended_after for settlement in settlements]
        unit = Unit(on_ack, partial(self._build_fallback, rows, end_times))
        for settlement in settlements:
            settlement.unit = unit
        return settlements

    def _find_unit_rows(self, rows: Sequence[ClaimedMessage]) -> list[ClaimedMessage]:
        """Return the acked and moved rows of a call that has published on ack.

        They are written together with these messages. If one has lost its lease, nothing is
        returned, and the others are abandoned (their outcomes replaced), so that they are delivered
        again.
        """
        unit = [row for row in rows if isinstance(row.outcome, Ack | Relocate)]
        lost_ids = [row.id for row in unit if row.lease_lost]
        if not lost_ids:
            return unit
        for row in unit:
            row.replace_outcome(Abandon())
        if held_ids := [row.id for row in unit if not row.lease_lost]:
            self._log(logging.WARNING, format_broken(held_ids, lost_ids), message_id=held_ids[0])
        return []

    def _build_fallback(
        self,
        rows: Sequence[ClaimedMessage],
        end_times: Sequence[float],
        error: BaseException | None,
    ) -> list[Settlement]:
        """Return nacks of `rows`, to be written instead of a unit that the database has refused.

        `error` is a missing right to publish; None if the reason is another.
        """
        text = "the database refused the messages that the handler published with its ack"
        if isinstance(error, AccessError):
            text = f"{text}: {error}\n{_OR_DROP}"
        nack = Nack(error=PublishError(text))
        # A unit again: the batch's answer was for all of these rows, so they fail together.
        unit = Unit()
        settlements = []
        for row, ended_after in zip(rows, end_times, strict=True):
            settlement = settle(row, nack, self._rules, ended_after=ended_after)
            settlement.unit = unit
            settlements.append(settlement)
        return settlements

    def settle_row(
        self, row: ClaimedMessage, outcome: Outcome | None, *, attempted: bool
    ) -> Settlement:
        """Return the settlement, which the database writes, for `outcome` of `row`.

        The delivery ends now. `attempted` is False if no attempt is to be charged, as when the
        handler has not started. None as the outcome is a handler that forgot to settle.
        """
        ended_after = self._clock.monotonic() - row.claimed_monotonic
        return settle(row, outcome, self._rules, ended_after=ended_after, attempted=attempted)

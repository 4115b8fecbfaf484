"""Cancellation of messages by operators while a subscriber holds them.

A message that waits for a worker is discarded at once. A running handler is cancelled as a task;
`core.settle` decides the outcome. A handler that cannot be cancelled, because it runs in a thread,
goes on: its lease is no longer renewed.
"""

import asyncio
import logging
from collections.abc import Sequence

from faststream_sqlbroker.core.orders import CancelRequest
from faststream_sqlbroker.core.outcome import Defer, Discard, Release
from faststream_sqlbroker.core.reasons import CANCELLED
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_states import DeliveryState
from faststream_sqlbroker.flow.loop import Log


class MessageCanceller:
    """Cancels messages of a subscriber."""

    def __init__(
        self,
        inflight: Inflight,
        rules: SettleRules,
        log: Log,
        *,
        cancellable: bool,
        ack_first: bool,
    ) -> None:
        """Set `cancellable` if the handlers are tasks.

        With `ack_first` messages are removed before they start, so that nothing is left to cancel.
        """
        self._inflight = inflight
        self._rules = rules
        self._log = log
        self._cancellable = cancellable
        self._ack_first = ack_first

    def cancel(self, requests: Sequence[CancelRequest]) -> None:
        """Cancel requested messages that this subscriber holds without an outcome.

        A waiting message is discarded at once; a running handler is cancelled. A message with an
        outcome has ended, and a message of another subscriber is skipped.
        """
        for request in requests:
            row = self._inflight.held.get(request.message_id)
            # With another token the request means an earlier delivery.
            if row is None or row.lease_token != request.lease_token or row.cancelled is not None:
                continue
            state = self._inflight.find_state(row)
            if state is DeliveryState.WAITING:
                row.cancelled = request.text
                self._discard(row)
            elif state is DeliveryState.RUNNING and not self._ack_first:
                row.cancelled = request.text
                self._cancel_handler(row)

    def _discard(self, row: ClaimedMessage) -> None:
        """Discard `row`, which an operator has cancelled before the start of the handler."""
        self._inflight.remove_waiting(row)
        # `settle` turns this release of a cancelled row into a discard.
        settlement = settle(row, Release(), self._rules, ended_after=0.0, attempted=False)
        self._inflight.queue_outcome(settlement)
        self._inflight.signals.flush_now()

    def _cancel_handler(self, row: ClaimedMessage) -> None:
        """Cancel the handler that processes `row`, which an operator has cancelled.

        A handler in a thread cannot be cancelled: it goes on, and only its lease is no longer
        renewed.
        """
        self._log(
            logging.WARNING,
            f"message {row.id} of queue {row.queue!r} is {row.cancelled}",
            message_id=row.id,
        )
        if not self._cancellable:
            return
        loop = asyncio.get_running_loop()
        # Only the delivery that has the row acts on the call.
        for current_delivery in self._inflight.current_deliveries.values():
            # Not called directly: the handler itself may have sent the request, and a task that
            # cancels itself would notice at a later await, outside of its handler.
            loop.call_soon(current_delivery.cancel, row)


def settle_cancelled(rows: Sequence[ClaimedMessage], *, not_started: bool = False) -> None:
    """Settle `rows` after an operator's cancel has ended the handler, or prevented the start.

    Cancelled messages (`row.cancelled` is the operator's text) are discarded. Other rows of the
    batch without an outcome come again, as if they had not been delivered;
    `PolicyRunner.retain_keys` has abandoned rows with a key before.
    """
    for row in rows:
        text = row.cancelled
        cancelled = Discard(CANCELLED, text=text, not_started=not_started)
        row.record_outcome(Defer(0.0) if text is None else cancelled)

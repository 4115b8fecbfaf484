"""Ends what operators cancel while a subscriber has it.

A message that waits for a worker is discarded at once. A running handler is cancelled as a task;
what it ends in decides `core.settle`. A handler that cannot be cancelled, as it runs in a thread,
goes on: its lease is not renewed any more.
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
from faststream_sqlbroker.flow.deliver.outcome_states import State
from faststream_sqlbroker.flow.loop import Log


class Cancels:
    """The cancels of one subscriber."""

    def __init__(
        self,
        inflight: Inflight,
        rules: SettleRules,
        log: Log,
        *,
        cancellable: bool,
        ack_first: bool,
    ) -> None:
        """`cancellable`: whether its handlers are tasks; `ack_first`: whether its messages are
        removed before they start, so that nothing is left to cancel then.
        """
        self._inflight = inflight
        self._rules = rules
        self._log = log
        self._cancellable = cancellable
        self._ack_first = ack_first

    def asked(self, requests: Sequence[CancelRequest]) -> None:
        """End those of `requests` that are ours and have no outcome yet."""
        for request in requests:
            row = self._inflight.held.get(request.message_id)
            # Another token: the request means an earlier delivery.
            if row is None or row.lease_token != request.lease_token or row.cancelled is not None:
                continue
            state = self._inflight.state(row)
            if state is State.WAITING:
                row.cancelled = request.text
                self._discard(row)
            elif state is State.RUNNING and not self._ack_first:
                row.cancelled = request.text
                self._end(row)

    def _discard(self, row: ClaimedMessage) -> None:
        self._inflight.take_out(row)
        ended = settle(row, Release(), self._rules, ended_after=0.0, attempted=False)
        self._inflight.finish(ended)
        self._inflight.signals.flush_now()

    def _end(self, row: ClaimedMessage) -> None:
        self._log(
            logging.WARNING,
            f"message {row.id} of queue {row.queue!r} is {row.cancelled}",
            message_id=row.id,
        )
        if not self._cancellable:
            return
        loop = asyncio.get_running_loop()
        for here in self._inflight.places.values():
            # Not from here: the handler itself may have asked, and a task that cancels itself
            # would notice at some later await, outside of its handler.
            loop.call_soon(here.cancel, row)


def settle_cancelled(rows: Sequence[ClaimedMessage], *, not_started: bool = False) -> None:
    """The handler of `rows` was cancelled for at least one of them, or before it has begun; the
    others of its batch come again, as if they had not been delivered.
    """
    for row in rows:
        text = row.cancelled
        cancelled = Discard(CANCELLED, text=text, not_started=not_started)
        row.settle_as(Defer(0.0) if text is None else cancelled)

"""Deliveries that need more than one plain message: batches, transactions, time limits, ACK_FIRST,
policies.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from faststream_sqlbroker.core.outcome import Abandon, Ack, Nack
from faststream_sqlbroker.core.rows import ClaimedMessage, set_no_chain_reason
from faststream_sqlbroker.flow.deliver.ack_first import AckFirstTracker
from faststream_sqlbroker.flow.deliver.batching import split_repeated
from faststream_sqlbroker.flow.deliver.cancels import settle_cancelled
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.policy_starts import PolicyRunner
from faststream_sqlbroker.flow.deliver.settlements import Settlements
from faststream_sqlbroker.flow.deliver.transactional import TransactionalDeliveries
from faststream_sqlbroker.flow.loop import Log, is_task_cancelled
from faststream_sqlbroker.flow.own_context import start_coroutine
from faststream_sqlbroker.flow.publish_on_ack import ACK_FIRST, ENDED, CurrentDelivery
from faststream_sqlbroker.flow.settings import ConsumerSettings

Handle = Callable[[Any], Coroutine[Any, Any, Any]]
Rows = list[ClaimedMessage]


class DeliveryRunner(ABC):
    """Runs a subscriber's handler and queues the outcomes of the deliveries.

    This is the part of a worker that begins with rows that may start.
    """

    _inflight: Inflight
    _settings: ConsumerSettings
    _handle: Handle
    _settlements: Settlements
    _log: Log
    _stopping: Callable[[], bool]
    _transactional: TransactionalDeliveries | None
    _ack_first: AckFirstTracker | None
    _policies: PolicyRunner | None

    @abstractmethod
    def _may_start(self, row: ClaimedMessage) -> bool:
        """Return True if the handler of `row` may start; settle the row otherwise."""

    @abstractmethod
    def _is_refused(self, row: ClaimedMessage) -> bool:
        """Return True if the handler of `row` must not start, without settling anything."""

    @abstractmethod
    def _raise_or_log(self, rows: Rows, error: BaseException) -> None:
        """Raise `error` of a part of a delivery if the worker is to end; otherwise log `error`."""

    async def deliver(self, rows: Rows, current_delivery: CurrentDelivery) -> None:
        """Run the handler on `rows`, which may start, and queue their settlements.

        A batch that could not start as a whole is handled in parts, one after the other. A stop
        releases the remaining parts; messages that ACK_FIRST has removed are handled even then.
        """
        rows = await self._prepare_start(rows)
        if not rows:
            return
        parts: list[Rows] = []
        try:
            await self._deliver_part(rows, current_delivery, parts)
            while parts and (self._ack_first is not None or not self._stopping()):
                if part := await self._get_next_part(parts):
                    try:
                        await self._deliver_part(part, current_delivery, parts)
                    except BaseException as error:  # noqa: BLE001 - raised again, or logged
                        self._raise_or_log(part, error)
        finally:
            if parts:
                await self._release_parts(parts)

    async def _prepare_start(self, rows: Rows) -> Rows:
        """Commit what must be committed before the start; return the rows that may start.

        ACK_FIRST removes the messages from the queue, and policy Once claims their keys. A row for
        which that fails does not start.
        """
        if self._ack_first is not None:
            rows = await self._ack_first.remove(rows)
            set_no_chain_reason(rows, ACK_FIRST)
        if self._policies is not None and rows:
            rows = await self._policies.claim_keys(rows)
        return rows

    async def _get_next_part(self, parts: list[Rows]) -> Rows:
        """Remove the first of `parts` of a batch; return the rows that may still start.

        A lease may have been lost, or a time run out, while the parts before it ran; such rows are
        settled. Rows that ACK_FIRST has removed start even during a stop: they cannot be released.
        """
        # Checked again after each round: more rows may be refused once the keys are released.
        while self._ack_first is None and (
            refused := [row for row in parts[0] if self._is_refused(row)]
        ):
            if self._policies is not None:
                await self._policies.release_keys(refused)
            ids = {row.id for row in refused}
            parts[0] = [row for row in parts[0] if row.id not in ids]
            for row in refused:
                self._may_start(row)  # settles the row
        return parts.pop(0)

    async def _deliver_part(
        self, rows: Rows, current_delivery: CurrentDelivery, parts: list[Rows]
    ) -> None:
        """Run the handler on `rows` and queue their outcomes.

        A handler that could not start on a batch as a whole gets the batch again in parts: these
        are put before the other `parts`. `running` counts handlers, by which the fetch loop sees
        free workers.
        """
        self._inflight.running += 1
        try:
            rows = await self._run(rows, current_delivery)
            rows, parts[:0] = split_repeated(rows, ack_first=self._ack_first is not None)
            if self._policies is not None and rows:
                await self._policies.handle_ended(rows)
        except BaseException as error:
            self.settle_cut_off(rows, error)
            if self._policies is not None and (
                retry_rows := self._policies.reject_failed_once(rows)
            ):
                await self._policies.release_keys(retry_rows)
            raise
        finally:
            self._inflight.running -= 1
            if self._policies is not None:
                self._policies.report_slots(rows)
            if self._ack_first is not None:
                # Their ack was written before the start.
                self._ack_first.finish(rows)
            else:
                self._inflight.queue_outcomes(self._settlements(rows))

    def handle_early_end(
        self, rows: Rows, current_delivery: CurrentDelivery, error: BaseException
    ) -> None:
        """Handle `error`, which ended the handler of `rows`; raise unless an operator cancelled.

        FastStream turns a failure of the handler into an outcome, so this is a cancellation or an
        error of another kind. An operator's cancel ends the handler only, not the worker.
        """
        if current_delivery.clear_cancel(error):
            settle_cancelled(rows)
            return
        self._clear_own_cancel(rows, current_delivery, error)
        self.settle_cut_off(rows, error)
        raise error

    async def raise_own_cancel(self, rows: Rows, current_delivery: CurrentDelivery) -> None:
        """Raise the pending cancellation of the handler's own task.

        Called when the handler has returned although its task counts a cancellation, which came too
        late to be raised inside, or was caught. A pending one makes the acks of `rows` void:
        asyncio, too, counts such a task as cancelled.
        """
        try:
            # A pending cancellation is raised at the next suspension.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._ack_first is None and not current_delivery.must_end():
                for row in rows:
                    if isinstance(row.outcome, Ack):
                        row.replace_outcome(None)
            raise
        # The handler has caught the cancellation already, and only the task's count is left.
        current_delivery.forget_cancels()

    def _clear_own_cancel(
        self, rows: Rows, current_delivery: CurrentDelivery, error: BaseException
    ) -> None:
        """Clear a cancellation that the broker did not request, so that the worker goes on.

        The handler has cancelled its own task: that fails the delivery, as any other error does.
        """
        if not current_delivery.cancelling() or current_delivery.must_end():
            return
        current_delivery.forget_cancels()
        if isinstance(error, asyncio.CancelledError):
            self._log(
                logging.WARNING,
                f"the handler task of messages {[row.id for row in rows]} was cancelled, but not "
                "by the broker: the attempt has failed, and the worker continues",
                message_id=rows[0].id,
            )

    def settle_cut_off(self, rows: Rows, error: BaseException) -> None:
        """Settle `rows`, whose handler did not run to the end because of `error`.

        Under ACK_FIRST the messages are removed already: those of a handler that was cut off stay
        listed as unknown.
        """
        # If this task was not cancelled, the CancelledError is the handler's own failure: it has
        # awaited a task that was cancelled. After any other error it is unknown what the handler
        # has done, so the delivery is not counted as an attempt.
        is_own_failure = isinstance(error, asyncio.CancelledError) and not is_task_cancelled()
        for row in rows:
            row.record_outcome(Nack(error=error) if is_own_failure else Abandon())
        if self._ack_first is not None and not is_own_failure:
            self._ack_first.drop_cut_off(rows)

    async def _release_parts(self, parts: list[Rows]) -> None:
        """Release the parts of a batch that do not start any more, because of a stop or an error.

        Rows that ACK_FIRST has removed cannot be released: their starts stay listed as unknown.
        """
        rows = [row for part in parts for row in part]
        if self._ack_first is not None:
            self._ack_first.drop_cut_off(rows)
        elif self._policies is not None:
            await self._policies.release(rows)
        else:
            self._inflight.release(row for row in rows if not row.lease_lost)

    async def _run(self, rows: Rows, current_delivery: CurrentDelivery) -> Rows:
        """Run the handler, inside a transaction if `transactional`.

        Return the rows whose outcome is not written yet: a transaction commits acks itself.
        """

        async def run(rows: Rows) -> None:
            current_delivery.delivery = rows
            current_delivery.started_at = self._inflight.clock.monotonic()
            try:
                await self._call_unless_cancelled(rows, current_delivery)
            finally:
                # Set before the commit: messages added later would be dropped silently.
                set_no_chain_reason(rows, ENDED)

        if self._transactional is not None:
            return await self._transactional.deliver(rows, run, self._settlements)
        await run(rows)
        return rows

    async def _call_unless_cancelled(self, rows: Rows, current_delivery: CurrentDelivery) -> None:
        """Run the handler on `rows`; settle the rows if an operator cancels a message.

        An operator's cancel ends the handler only. Any other error passes on, after a cancellation
        that came from the handler itself was cleared: it must not end the worker.
        """
        if self._ack_first is None and any(row.cancelled is not None for row in rows):
            # An operator cancelled since the delivery began, before its handler. Under ACK_FIRST
            # the message is removed already, so nothing is left to cancel.
            settle_cancelled(rows, not_started=True)
            return
        try:
            await self._call_handler(rows, current_delivery)
            if current_delivery.cancelling():
                await self.raise_own_cancel(rows, current_delivery)
        except BaseException as error:
            if not current_delivery.clear_cancel(error):
                self._clear_own_cancel(rows, current_delivery, error)
                raise
            if self._policies is not None:
                self._policies.retain_keys(rows)
            settle_cancelled(rows)
        finally:
            if current_delivery.asked:
                current_delivery.clear_cancel()

    async def _handle_in_place(self, rows: Rows, current_delivery: CurrentDelivery) -> None:
        """Call the handler in the worker's task, or in a new task with `task_per_message`.

        In the worker's task the handler gets a copy of the context, so that its context variables
        do not reach the next message.
        """
        raw = tuple(rows) if self._settings.batch else rows[0]
        if self._settings.task_per_message:
            # The task starts at a later turn of the event loop.
            await current_delivery.run_in_task(self._handle_in_task(raw, rows, current_delivery))
        elif (
            self._use_slots(rows) and (suspended := start_coroutine(self._handle(raw))) is not None
        ):
            await suspended

    async def _handle_in_task(
        self, raw: Any, rows: Rows, current_delivery: CurrentDelivery
    ) -> None:
        """Call the handler in a separate task, unless a slot was missed before that task began."""
        if not self._use_slots(rows):
            return
        await self._handle(raw)
        # No other task would notice a pending cancellation of this one.
        if current_delivery.cancelling():
            await self.raise_own_cancel(rows, current_delivery)

    def _use_slots(self, rows: Rows) -> bool:
        """Return True if `rows` may start; release `rows` if a slot was missed.

        A slot is the time at which a Throttle allows a start; the commits before the start may have
        taken too long. Rows that ACK_FIRST has removed start in any case: they cannot be released.
        """
        policies = self._policies
        return policies is None or policies.use_slots(rows, must=self._ack_first is not None)

    async def _call_handler(self, rows: Rows, current_delivery: CurrentDelivery) -> None:
        """Call the handler on `rows` within `handler_timeout`; nack the rows if that expires."""
        timeout = self._settings.handler_timeout
        if timeout is None:
            await self._handle_in_place(rows, current_delivery)
            return
        try:
            async with self._inflight.clock.limit(timeout):
                await self._handle_in_place(rows, current_delivery)
        except TimeoutError as error:
            self._log(
                logging.ERROR,
                f"the handler of message {rows[0].id} was cancelled after "
                f"handler_timeout={timeout} seconds",
                message_id=rows[0].id,
            )
            for row in rows:
                row.record_outcome(Nack(error=error))

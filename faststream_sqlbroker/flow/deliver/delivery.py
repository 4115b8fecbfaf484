"""A delivery that is more than one plain message: a batch, a transaction, a time limit, ACK_FIRST,
policies.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from faststream_sqlbroker.core.outcome import Abandon, Ack, Nack
from faststream_sqlbroker.core.rows import ClaimedMessage, end_publishing
from faststream_sqlbroker.flow.deliver.ack_first import FirstAcks
from faststream_sqlbroker.flow.deliver.batching import take_again
from faststream_sqlbroker.flow.deliver.cancels import settle_cancelled
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.policies import PolicyStarts
from faststream_sqlbroker.flow.deliver.settlements import Settlements
from faststream_sqlbroker.flow.deliver.transactional import TransactionalDeliveries
from faststream_sqlbroker.flow.loop import Log, cancelled
from faststream_sqlbroker.flow.own_context import begin
from faststream_sqlbroker.flow.publish_on_ack import ACK_FIRST, ENDED, CurrentDelivery
from faststream_sqlbroker.flow.settings import ConsumerSettings

Handle = Callable[[Any], Coroutine[Any, Any, Any]]
Rows = list[ClaimedMessage]


class Deliveries(ABC):
    """Runs the handler of one subscriber and queues what its deliveries ended in: the part of a
    worker that begins with rows that may start.
    """

    _inflight: Inflight
    _settings: ConsumerSettings
    _handle: Handle
    _settlements: Settlements
    _log: Log
    _stopping: Callable[[], bool]
    _transactional: TransactionalDeliveries | None
    _first: FirstAcks | None
    _policies: PolicyStarts | None

    @abstractmethod
    def _may_start(self, row: ClaimedMessage) -> bool:
        """Settle what must not run; whether the handler may start."""

    @abstractmethod
    def _must_not_start(self, row: ClaimedMessage) -> bool:
        """`_may_start`, which settles nothing, the other way round."""

    @abstractmethod
    def _raise_or_log(self, rows: Rows, error: BaseException) -> None:
        """Raise what a part of a delivery has raised, if the worker is to end."""

    async def deliver(self, rows: Rows, current_delivery: CurrentDelivery) -> None:
        """Run the handler on `rows`, which may start, and queue their settlements."""
        rows = await self._claim_start(rows)
        if not rows:
            return
        parts: list[Rows] = []
        try:
            await self._deliver_part(rows, current_delivery, parts)
            while parts and (self._first is not None or not self._stopping()):
                if part := await self._next_part(parts):
                    try:
                        await self._deliver_part(part, current_delivery, parts)
                    except BaseException as error:  # noqa: BLE001 - raised again, or logged
                        self._raise_or_log(part, error)
        finally:
            if parts:
                await self._not_started(parts)

    async def _claim_start(self, rows: Rows) -> Rows:
        """Do what must be committed before the start; those of `rows` that may start."""
        if self._first is not None:
            rows = await self._first.remove(rows)
            end_publishing(rows, ACK_FIRST)
        if self._policies is not None and rows:
            rows = await self._policies.claim_keys(rows)
        return rows

    async def _next_part(self, parts: list[Rows]) -> Rows:
        """Take the first of `parts`: its rows that may still start; the others are settled.

        A lease may have been lost, or a time run out, while the parts before it ran. What ACK_FIRST
        has removed starts, also during a stop: it cannot be given back.
        """
        while self._first is None and (
            going := [row for row in parts[0] if self._must_not_start(row)]
        ):
            if self._policies is not None:
                await self._policies.give_keys_back(going)
            ids = {row.id for row in going}
            parts[0] = [row for row in parts[0] if row.id not in ids]
            for row in going:
                self._may_start(row)
        return parts.pop(0)

    async def _deliver_part(
        self, rows: Rows, current_delivery: CurrentDelivery, parts: list[Rows]
    ) -> None:
        """Run the handler; if it could not start, the parts in which it is to get `rows` again come
        before `parts`.
        """
        self._inflight.running += 1
        try:
            rows = await self._run(rows, current_delivery)
            rows, parts[:0] = take_again(rows, ack_first=self._first is not None)
            if self._policies is not None and rows:
                await self._policies.ended(rows)
        except BaseException as error:
            self.cut_off(rows, error)
            if self._policies is not None and (again := self._policies.spend(rows)):
                await self._policies.give_keys_back(again)
            raise
        finally:
            self._inflight.running -= 1
            if self._policies is not None:
                self._policies.tell_slots(rows)
            if self._first is not None:
                self._first.end(rows)
            else:
                self._inflight.finish_all(self._settlements(rows))

    def end_early(self, rows: Rows, here: CurrentDelivery, error: BaseException) -> None:
        """`error` has ended the handler of `rows`; raise it again, unless it is the cancel of an
        operator.
        """
        if here.end_cancel(error):
            settle_cancelled(rows)
            return
        self._end_own_cancel(rows, here, error)
        self.cut_off(rows, error)
        raise error

    async def raise_own_cancel(self, rows: Rows, here: CurrentDelivery) -> None:
        """Raise the cancellation of its own task that the handler of `rows` has left pending.

        It makes the acks of `rows` void: asyncio, too, counts such a task as cancelled.
        """
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._first is None and not here.must_end():
                for row in rows:
                    if isinstance(row.outcome, Ack):
                        row.settle_anew(None)
            raise
        here.forget_cancels()

    def _end_own_cancel(self, rows: Rows, here: CurrentDelivery, error: BaseException) -> None:
        """Let a cancellation that the broker has not asked for end the handler, but no worker."""
        if not here.cancelling() or here.must_end():
            return
        here.forget_cancels()
        if isinstance(error, asyncio.CancelledError):
            self._log(
                logging.WARNING,
                f"the task that handles messages {[row.id for row in rows]} was cancelled, but not "
                "by the broker: the delivery has failed, and the worker goes on",
                message_id=rows[0].id,
            )

    def cut_off(self, rows: Rows, error: BaseException) -> None:
        """The handler of `rows` has not come to an end, because of `error`."""
        # If this task was not cancelled, the CancelledError is the handler's own failure: it has
        # awaited a task that was cancelled. After anything else it is unknown what the handler has
        # done, so the delivery is not counted as an attempt.
        own = isinstance(error, asyncio.CancelledError) and not cancelled()
        for row in rows:
            row.settle_as(Nack(error=error) if own else Abandon())
        if self._first is not None and not own:
            self._first.cut_off(rows)

    async def _not_started(self, parts: list[Rows]) -> None:
        rows = [row for part in parts for row in part]
        if self._first is not None:
            self._first.cut_off(rows)
        elif self._policies is not None:
            await self._policies.give_back(rows)
        else:
            self._inflight.give_back(row for row in rows if not row.lease_lost)

    async def _run(self, rows: Rows, current_delivery: CurrentDelivery) -> Rows:
        """Run the handler; the rows whose outcome is not written yet."""

        async def run(rows: Rows) -> None:
            current_delivery.delivery = rows
            current_delivery.began = self._inflight.clock.monotonic()
            try:
                await self._call_unless_cancelled(rows, current_delivery)
            finally:
                # Before anything is committed: what comes later would be dropped in silence.
                end_publishing(rows, ENDED)

        if self._transactional is not None:
            return await self._transactional.deliver(rows, run, self._settlements)
        await run(rows)
        return rows

    async def _call_unless_cancelled(self, rows: Rows, here: CurrentDelivery) -> None:
        if self._first is None and any(row.cancelled is not None for row in rows):
            # Asked since the delivery began, before its handler.
            settle_cancelled(rows, not_started=True)
            return
        try:
            await self._call_handler(rows, here)
            if here.cancelling():
                await self.raise_own_cancel(rows, here)
        except BaseException as error:
            if not here.end_cancel(error):
                self._end_own_cancel(rows, here, error)
                raise
            if self._policies is not None:
                self._policies.keep_keys(rows)
            settle_cancelled(rows)
        finally:
            if here.asked:
                here.end_cancel()

    async def _handle_in_place(self, rows: Rows, here: CurrentDelivery) -> None:
        raw = tuple(rows) if self._settings.batch else rows[0]
        if self._settings.task_per_message:
            # The task begins at a later turn of the event loop.
            await here.run_in_task(self._handle_to_its_end(raw, rows, here))
        elif self._has_slots(rows) and (suspended := begin(self._handle(raw))) is not None:
            await suspended

    async def _handle_to_its_end(self, raw: Any, rows: Rows, here: CurrentDelivery) -> None:
        if not self._has_slots(rows):
            return
        await self._handle(raw)
        # What is pending in this task, no other would meet.
        if here.cancelling():
            await self.raise_own_cancel(rows, here)

    def _has_slots(self, rows: Rows) -> bool:
        """Whether it is not too late for a slot of `rows`, as what had to be committed before took
        too long; else they go back. What ACK_FIRST has removed starts in any case.
        """
        policies = self._policies
        return policies is None or policies.take_slots(rows, must=self._first is not None)

    async def _call_handler(self, rows: Rows, here: CurrentDelivery) -> None:
        timeout = self._settings.handler_timeout
        if timeout is None:
            await self._handle_in_place(rows, here)
            return
        try:
            async with self._inflight.clock.limit(timeout):
                await self._handle_in_place(rows, here)
        except TimeoutError as error:
            self._log(
                logging.ERROR,
                f"the handler of message {rows[0].id} was cancelled after "
                f"handler_timeout={timeout} seconds",
                message_id=rows[0].id,
            )
            for row in rows:
                row.settle_as(Nack(error=error))

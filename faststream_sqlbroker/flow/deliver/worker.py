"""A worker: check the limits of a message or batch, run the handler, settle the outcome."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from faststream_sqlbroker.core.outcome import Abandon, Ack, Outcome, Reject, Release
from faststream_sqlbroker.core.rows import AckSettlement, ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.database.messages.handler import current_transaction
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.deliver.ack_first import AckFirstTracker
from faststream_sqlbroker.flow.deliver.batching import BatchFiller
from faststream_sqlbroker.flow.deliver.delivery import DeliveryRunner, Handle
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.policy_starts import (
    KeyClaimer,
    PolicyRunner,
    has_missed_slot,
)
from faststream_sqlbroker.flow.deliver.prefetch import get_min_remaining, get_prefetch_lease
from faststream_sqlbroker.flow.deliver.settlements import Settlements, format_refusal, get_refusal
from faststream_sqlbroker.flow.deliver.transactional import TransactionalDeliveries
from faststream_sqlbroker.flow.loop import Log, is_task_cancelled
from faststream_sqlbroker.flow.own_context import start_coroutine
from faststream_sqlbroker.flow.publish_on_ack import ENDED, CurrentDelivery, current_delivery_var
from faststream_sqlbroker.flow.settings import ConsumerSettings

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

ERROR_PAUSE = 10.0
"""Seconds until a message comes back after an error around its handler that is not a database
error.
"""
DeliverStep = Callable[[ClaimedMessage, CurrentDelivery], Awaitable[float]]
"""Delivers a row, or a batch that begins with it; returns when that ended (monotonic seconds)."""
TURN_SECONDS = 0.001
"""Seconds after which the event loop gets a turn, because handlers that never suspend would starve
it. In such turns the database's answers are read, and the next claim and flush are sent. With 5 ms
these wait so long that 10 % fewer messages are handled. A turn costs 5 µs.
"""


class Worker(DeliveryRunner):
    """Runs the handler on rows from the buffer, a single message or batch at a time."""

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        settings: ConsumerSettings,
        handle: Handle,
        log: Log,
        *,
        rules: SettleRules,
        renew: Callable[[Sequence[ClaimedMessage]], Awaitable[None]],
        first: AckFirstTracker | None,
        stopping: Callable[[], bool],
        must_end: "Callable[[asyncio.Task[Any] | None], bool]",
        on_idle: Callable[[], None],
        keys: KeyClaimer | None = None,
    ) -> None:
        """Run FastStream's pipeline by `handle`; afterwards each row's `outcome` is set, or None.

        `renew` renews leases of rows that have waited. `must_end` returns True if a cancellation of
        a worker's task is meant to end it. With `first` messages are removed before they start;
        with `keys` each key is claimed before.
        """
        self._store = store
        self._inflight = inflight
        self._settings = settings
        self._handle = handle
        self._log = log
        self._rules = rules
        self._renew = renew
        self._clock = inflight.clock
        self._stopping = stopping
        self._must_end = must_end
        self._on_idle = on_idle
        self._settlements = Settlements(rules, log, self._clock)
        # A row may wait until `get_min_remaining` seconds of its lease remain; then it is renewed
        # first.
        lease = settings.release_stuck_timeout
        self._max_full_wait = lease - get_min_remaining(lease)
        self._max_prefetch_wait = get_prefetch_lease(lease) - get_min_remaining(lease)
        self._transactional = None
        if settings.transactional:
            self._transactional = TransactionalDeliveries(
                store, inflight, settings, log, stopping=stopping
            )
        self._ack_first = first
        self._policies = None
        if settings.policies:
            self._policies = PolicyRunner(
                store, inflight, self._settlements, settings.policies, log, stopping, keys
            )
        self._batches = BatchFiller(inflight, settings) if settings.batch else None
        has_only_slots = self._policies is None or self._policies.has_only_slots
        is_plain = first is None and has_only_slots and _is_single_message(settings)
        self._step: DeliverStep = self._deliver_plain if is_plain else self._deliver_from
        limit = settings.max_deliveries
        self._max_deliveries = float("inf") if limit is None else limit
        self._current_rows: Sequence[ClaimedMessage] = ()

    async def _wait_for_slot(self, row: ClaimedMessage) -> None:
        if self._policies is not None:
            await self._policies.wait_for_slot(row)

    async def run(self) -> None:
        """Deliver rows until the buffer returns the sentinel None, which a stop adds.

        The event loop gets a turn after each millisecond (`TURN_SECONDS`), because handlers that
        never suspend would starve the loops that claim and write.
        """
        current_delivery = self._create_current_delivery()
        monotonic = self._clock.monotonic
        inflight = self._inflight
        waiting = inflight.waiting.items
        step = self._step
        turn_ends = monotonic() + TURN_SECONDS
        while True:
            # While enough rows wait, take the row without a call: `_get_next` suspends or requests
            # more.
            needs_more = inflight.is_capacity_requested and len(waiting) <= inflight.low_water + 1
            row = waiting.popleft() if waiting and not needs_more else await self._get_next()
            if row is None:
                return
            try:
                now = await step(row, current_delivery)
            except BaseException:
                # `release_current` then finds the rows; the plain step does not note its row.
                self._current_rows = self._current_rows or (row,)
                raise
            if now >= turn_ends:
                # A handler may have left a cancellation counted, which looks like the worker's end.
                current_delivery.forget_cancels()
                await asyncio.sleep(0)
                turn_ends = monotonic() + TURN_SECONDS

    def release_current(self, error: BaseException) -> None:
        """Abandon the rows of the current delivery that have no outcome, after `error` has ended
        the worker.

        Called from outside, before a new worker replaces this one.
        """
        unsettled = [row for row in self._current_rows if self._inflight.has_no_outcome(row)]
        if unsettled:
            self._handle_error(unsettled, error)

    async def run_one(self) -> None:
        """Deliver the first waiting row, and the rest of the batch. At least 1 row must wait.

        For `TestSqlBroker`, which delivers step by step in place of `run`.
        """
        current_delivery = self._create_current_delivery()
        row = self._inflight.waiting.get_nowait()
        try:
            if row is not None:
                await self._step(row, current_delivery)
        finally:
            # Tasks keep their contexts, and so this object.
            self._inflight.current_deliveries.pop(current_delivery.worker, None)

    def _create_current_delivery(self) -> CurrentDelivery:
        """Create and register the current delivery of this task, the same object for all messages.

        By it a publish finds the message that is being handled, and a cancel finds the handler's
        task.
        """
        delivery = CurrentDelivery(self._store, self._must_end)
        if self._policies is not None:
            delivery.use_slots = partial(self._policies.use_slots, must=self._ack_first is not None)
        current_delivery_var.set(delivery)
        current_transaction.set(
            None
        )  # a handler with a transaction may have started this subscriber
        self._inflight.current_deliveries[delivery.worker] = delivery
        return delivery

    async def _deliver_from(
        self, first: ClaimedMessage, current_delivery: CurrentDelivery
    ) -> float:
        """Run the handler on `first`, or on a batch that begins there; return the end time.

        Before that the worker waits for a slot (a start that a Throttle allows), fills the batch,
        renews old leases, and settles rows that must not start.
        """
        # Counted from here: while `first` waits for its slot, the worker is busy.
        self._inflight.busy += 1
        self._current_rows = [first]
        try:
            await self._wait_for_slot(first)
            rows = [first] if self._batches is None else await self._batches.fill(first)
            self._current_rows = rows
            rows = await self._renew_old(rows)
            started_at = self._clock.monotonic()
            startable = [row for row in rows if self._may_start(row)]
            if not startable:
                return started_at
            try:
                await self.deliver(startable, current_delivery)
            except BaseException as error:  # noqa: BLE001 - raised again, or logged
                self._raise_or_log(startable, error)
            now = self._clock.monotonic()
            self._inflight.times.record_end(started_at, now)
            return now
        finally:
            self._inflight.busy -= 1

    async def _deliver_plain(  # noqa: C901, PLR0912 - a call less for each message
        self, row: ClaimedMessage, current_delivery: CurrentDelivery
    ) -> float:
        """Run the handler on a single message, in the plain case that needs no other step.

        The same steps as in `_deliver_from`, but without any call, list or coroutine that a message
        can do without, because nearly all messages come here. Returns the end time (monotonic
        seconds).
        """
        inflight = self._inflight
        monotonic = self._clock.monotonic
        if row.slot is not None and row.slot.earliest > monotonic():
            await self._wait_for_slot(row)
        started_at = monotonic()
        if started_at - row.renewed_monotonic > self._max_prefetch_wait:
            if not await self._renew_old([row]):
                return started_at
            started_at = monotonic()
        if not self._may_start(row):
            return started_at
        if row.slot is not None and not inflight.slots.start(row):
            self._may_start(row)  # settles the row
            return started_at
        current_delivery.delivery = row
        current_delivery.started_at = started_at
        # Set before the handler suspends: a claim that runs then sees that this worker is
        # busy.
        inflight.running += 1
        try:
            try:
                suspended = start_coroutine(self._handle(row))
                if suspended is not None:
                    await suspended
                if current_delivery.cancelling():
                    await self.raise_own_cancel([row], current_delivery)
            except BaseException as error:  # noqa: BLE001 - raised again
                self.handle_early_end([row], current_delivery, error)
            finally:
                # Set before the outcome is queued: a task that the handler left behind may publish
                # later, and its messages would not be written.
                row.no_chain_reason = ENDED
                inflight.running -= 1
                if row.slot is not None:
                    inflight.slots.record_end(row)
                now = monotonic()
                inflight.times.record_end(started_at, now)
                # The usual ack is queued without the checks of `Settlements`.
                if (
                    row.outcome.__class__ is Ack
                    and not row.chained
                    and not row.lease_lost
                    and row.cancelled is None
                ):
                    keep = self._rules.retain_on_ack
                    inflight.queue_outcome(
                        AckSettlement(row.id, row.lease_token, now - row.claimed_monotonic, keep)
                    )
                else:
                    current_delivery.clear_cancel()
                    inflight.queue_outcomes(self._settlements([row]))
        except BaseException as error:  # noqa: BLE001 - raised again, or logged
            self._raise_or_log([row], error)
        return now

    async def _get_next(self) -> ClaimedMessage | None:
        """Return the next row, or the sentinel None; request more rows where few are left.

        The sentinel ends the worker. Few are `low_water` rows, a number that the fetch loop sets.
        With no row left, outcomes are flushed at once: no further one will fill the batch soon.
        """
        waiting = self._inflight.waiting
        if waiting.empty():
            self._on_idle()
            self._inflight.on_capacity()
            return await waiting.get()
        row = waiting.get_nowait()
        if waiting.qsize() <= self._inflight.low_water:
            self._inflight.on_capacity()
        return row

    async def _renew_old(self, rows: list[ClaimedMessage]) -> list[ClaimedMessage]:
        """Renew rows whose lease is almost over; return the rows that may start.

        Rows wait in this process for a worker, and the lease must last beyond the start. A row
        whose renewal failed is released, one whose lease has gone is dropped.
        """
        # Not only the first row of a batch: after a stall of the event loop any lease may be old.
        now = self._clock.monotonic()
        max_prefetch_wait = self._max_prefetch_wait
        max_wait = self._max_full_wait
        old_rows = [
            r
            for r in rows
            if now - r.renewed_monotonic > (max_prefetch_wait if r.prefetched else max_wait)
        ]
        if not old_rows:
            return rows
        try:
            await self._renew(old_rows)
        except BaseException as error:
            # It is unknown whether the leases are still held, so the rows must not start.
            self._inflight.release(old_rows)
            other_rows = [row for row in rows if row not in old_rows]
            if _must_raise(error):
                self._inflight.release(other_rows)
                raise
            if not isinstance(error, StoreError):
                self._handle_error(old_rows, error)
            return other_rows
        return [row for row in rows if not row.lease_lost]

    @override
    def _raise_or_log(self, rows: list[ClaimedMessage], error: BaseException) -> None:
        """Raise `error` if the worker must end; else release `rows` for a later delivery."""
        if _must_raise(error):
            raise error
        self._handle_error(rows, error)

    @override
    def _may_start(self, row: ClaimedMessage) -> bool:
        """Return True if the handler of `row` may start; settle the row otherwise.

        The first check is a shortcut without a call for most rows; `_check_start` decides the rest.
        """
        if (
            row.outcome is None
            and not row.attempts_count
            and row.expires_at is None
            and (row.slot is None or not has_missed_slot(row, self._clock))
            and row.deliveries_count <= self._max_deliveries
            and not row.lease_lost
            and row.cancelled is None
            and not self._stopping()
        ):
            return True  # nearly all rows
        try:
            return self._check_start(row)
        except Exception as error:  # noqa: BLE001 - the others of the batch go on
            self._handle_error([row], error)
            return False

    def _handle_error(self, rows: list[ClaimedMessage], error: BaseException) -> None:
        """Release unsettled rows for a later delivery, after an error around the handler.

        The handler's own errors have become outcomes before this; `error` is a bug, or has ended
        the worker. The delivery is charged (Abandon), and the message comes back after a pause.
        """
        unsettled = [row for row in rows if self._inflight.has_no_outcome(row)]
        if isinstance(error, asyncio.CancelledError) and not unsettled:
            return  # the handler cancelled itself, which is its failure
        for row in unsettled:
            settlement = settle(row, Abandon(), self._rules, ended_after=0.0, attempted=False)
            settlement.delay = ERROR_PAUSE
            self._inflight.queue_outcome(settlement)
        self._log(
            logging.CRITICAL,
            f"messages {[row.id for row in rows]}: {error!r} outside of the handler; those "
            f"without an outcome are delivered again in {ERROR_PAUSE} seconds",
            exc_info=error,
            message_id=rows[0].id,
        )

    def _check_start(self, row: ClaimedMessage) -> bool:
        """Return True if no limit refuses `row`; else settle the row, which does not start.

        A row whose lease was lost is not settled: another process may have the message.
        """
        if row.lease_lost:
            return False
        outcome = self._get_refusal(row)
        if outcome is None:
            return True
        if has_missed_slot(row, self._clock):
            self._inflight.slots.start(row)  # counts it as missed
        self._inflight.slots.record_end(row)
        if isinstance(outcome, Reject):
            self._log(logging.ERROR, format_refusal(row, outcome), message_id=row.id)
        if not row.lease_lost:
            self._inflight.queue_outcome(
                self._settlements.settle_row(row, outcome, attempted=False)
            )
        return False

    def _get_refusal(self, row: ClaimedMessage) -> Outcome | None:
        """Return the outcome of `row` if the handler must not start, else None.

        Besides the limits of the function `get_refusal`, a stop and a missed slot (the start that a
        Throttle allowed is over) release the row.
        """
        if self._stopping():
            return Release()
        outcome = get_refusal(row, self._rules, self._max_deliveries, self._clock)
        return Release() if outcome is None and has_missed_slot(row, self._clock) else outcome

    @override
    def _is_refused(self, row: ClaimedMessage) -> bool:
        return row.lease_lost or self._get_refusal(row) is not None


def _is_single_message(settings: ConsumerSettings) -> bool:
    """Return True if the handler gets a single message, and the call needs nothing else.

    Such a message can take the shortest path, `Worker._deliver_plain`.
    """
    return settings.handler_timeout is None and not (
        settings.batch or settings.transactional or settings.task_per_message
    )


def _must_raise(error: BaseException) -> bool:
    """Return True if `error`, or the cancellation of the worker's task, ends the worker.

    After any other error the worker goes on with the next message.
    """
    return isinstance(error, KeyboardInterrupt | SystemExit) or is_task_cancelled()

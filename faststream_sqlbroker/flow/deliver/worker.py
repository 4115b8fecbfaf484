"""One delivery (or one batch of them): limits, the handler, the outcome, the settlement."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from faststream_sqlbroker.core.outcome import Abandon, Ack, Outcome, Reject, Release
from faststream_sqlbroker.core.rows import Acked, ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.database.messages.handler import current
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.deliver.ack_first import FirstAcks
from faststream_sqlbroker.flow.deliver.batching import BatchFiller
from faststream_sqlbroker.flow.deliver.delivery import Deliveries, Handle
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.policies import KeyClaims, PolicyStarts, missed_slot
from faststream_sqlbroker.flow.deliver.prefetch import least_left, prefetch_lease
from faststream_sqlbroker.flow.deliver.settlements import Settlements, refusal, refusal_text
from faststream_sqlbroker.flow.deliver.transactional import TransactionalDeliveries
from faststream_sqlbroker.flow.loop import Log, cancelled
from faststream_sqlbroker.flow.own_context import begin
from faststream_sqlbroker.flow.publish_on_ack import ENDED, CurrentDelivery, current_delivery
from faststream_sqlbroker.flow.settings import ConsumerSettings

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

PAUSE_AFTER_BUG = 10.0
"""Seconds until a message comes back after an error around its handler that is none of the
database's."""
Step = Callable[[ClaimedMessage, CurrentDelivery], Awaitable[float]]
"""Delivers a row, and what else belongs to its delivery; when it ended (monotonic seconds)."""
TURN = 0.001
"""Seconds after which the event loop gets a turn: handlers that never suspend would starve it. In
such turns the answers of the database are read, and the next claim and flush are sent: with 5 ms
these wait so long that a tenth fewer messages are handled. A turn costs 5 µs."""


class Worker(Deliveries):
    """Takes rows from the buffer and runs the handler on them, one at a time (a batch counts as
    one).
    """

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        settings: ConsumerSettings,
        handle: Handle,
        log: Log,
        *,
        rules: SettleRules,
        hold: Callable[[Sequence[ClaimedMessage]], Awaitable[None]],
        first: FirstAcks | None,
        stopping: Callable[[], bool],
        must_end: "Callable[[asyncio.Task[Any] | None], bool]",
        on_idle: Callable[[], None],
        keys: KeyClaims | None = None,
    ) -> None:
        """`handle` runs FastStream's pipeline; afterwards each row's `outcome` is set, or None.

        `hold` renews leases of rows that have waited. `must_end` tells whether a cancellation of
        a worker's task is meant to end it. With `first` messages are removed before they start;
        with `keys` each key is claimed before.
        """
        self._store = store
        self._inflight = inflight
        self._settings = settings
        self._handle = handle
        self._log = log
        self._rules = rules
        self._hold = hold
        self._clock = inflight.clock
        self._stopping = stopping
        self._must_end = must_end
        self._on_idle = on_idle
        self._settlements = Settlements(rules, log, self._clock)
        # A row may wait until `least_left` of its lease is left; then it is renewed first.
        lease = settings.release_stuck_timeout
        self._longest_full = lease - least_left(lease)
        self._longest_wait = prefetch_lease(lease) - least_left(lease)
        self._transactional = None
        if settings.transactional:
            self._transactional = TransactionalDeliveries(
                store, inflight, settings, log, stopping=stopping
            )
        self._first = first
        self._policies = None
        if settings.policies:
            self._policies = PolicyStarts(
                store, inflight, self._settlements, settings.policies, log, stopping, keys
            )
        self._batches = BatchFiller(inflight, settings) if settings.batch else None
        is_plain = first is None and self._only_slots and _takes_one_message(settings)
        self._step: Step = self._deliver_plain if is_plain else self._deliver_from
        limit = settings.max_deliveries
        self._most_deliveries = float("inf") if limit is None else limit
        self._taken: Sequence[ClaimedMessage] = ()

    @property
    def _only_slots(self) -> bool:
        """Whether policies ask no more of a worker than to wait for slots."""
        return self._policies is None or self._policies.only_slots

    async def _wait_for_slot(self, row: ClaimedMessage) -> None:
        if self._policies is not None:
            await self._policies.wait_for_slot(row)

    async def run(self) -> None:
        """Work until the sentinel None is taken from the buffer."""
        here = self._place()
        monotonic = self._clock.monotonic
        inflight = self._inflight
        waiting = inflight.waiting.items
        step = self._step
        turn_ends = monotonic() + TURN
        while True:
            # While enough rows wait, a row costs no call: `_next` suspends or asks for more.
            asks = inflight.wants_room and len(waiting) <= inflight.low_water + 1
            row = waiting.popleft() if waiting and not asks else await self._next()
            if row is None:
                return
            try:
                now = await step(row, here)
            except BaseException:
                self._taken = self._taken or (row,)
                raise
            if now >= turn_ends:
                here.forget_cancels()
                await asyncio.sleep(0)
                turn_ends = monotonic() + TURN

    def give_back_taken(self, error: BaseException) -> None:
        """Give back what it had taken when `error` ended it."""
        taken = [row for row in self._taken if self._inflight.has_no_outcome(row)]
        if taken:
            self._failed(taken, error)

    async def run_one(self) -> None:
        """Deliver what waits first, and what belongs to its delivery; something must wait."""
        here = self._place()
        row = self._inflight.waiting.get_nowait()
        try:
            if row is not None:
                await self._step(row, here)
        finally:
            # Tasks keep their contexts, and so this place.
            self._inflight.places.pop(here.worker, None)

    def _place(self) -> CurrentDelivery:
        """Where this task works."""
        here = CurrentDelivery(self._store, self._must_end)
        if self._policies is not None:
            here.take_slots = partial(self._policies.take_slots, must=self._first is not None)
        current_delivery.set(here)
        current.set(None)  # a handler with a transaction may have started this subscriber
        self._inflight.places[here.worker] = here
        return here

    async def _deliver_from(self, first: ClaimedMessage, here: CurrentDelivery) -> float:
        """Run the handler on `first`, or on a batch that begins with it; the time of its end."""
        # Counted from here: while `first` waits for its slot, the worker is not free.
        self._inflight.busy += 1
        self._taken = [first]
        try:
            await self._wait_for_slot(first)
            rows = [first] if self._batches is None else await self._batches.fill(first)
            self._taken = rows
            rows = await self._held(rows)
            began = self._clock.monotonic()
            ready = [row for row in rows if self._may_start(row)]
            if not ready:
                return began
            try:
                await self.deliver(ready, here)
            except BaseException as error:  # noqa: BLE001 - raised again, or logged
                self._raise_or_log(ready, error)
            now = self._clock.monotonic()
            self._inflight.times.ended(began, now)
            return now
        finally:
            self._inflight.busy -= 1

    async def _deliver_plain(  # noqa: C901 - a call less for each message
        self, row: ClaimedMessage, here: CurrentDelivery
    ) -> float:
        """`_deliver_from` where the handler takes one message, after which its outcome is known,
        and nothing else.

        The same steps, without a call, a list or a coroutine that a message can do without.
        """
        inflight = self._inflight
        monotonic = self._clock.monotonic
        if row.slot is not None and row.slot.earliest > monotonic():
            await self._wait_for_slot(row)
        began = monotonic()
        if began - row.renewed_monotonic > self._longest_wait:
            if not await self._held([row]):
                return began
            began = monotonic()
        if not self._may_start(row):
            return began
        if row.slot is not None and not inflight.slots.start(row):
            self._may_start(row)  # which settles it
            return began
        here.delivery = row
        here.began = began
        # Set before the handler suspends: a claim that runs then sees that this worker is taken.
        inflight.running += 1
        try:
            try:
                suspended = begin(self._handle(row))
                if suspended is not None:
                    await suspended
                if here.cancelling():
                    await self.raise_own_cancel([row], here)
            except BaseException as error:  # noqa: BLE001 - raised again
                self.end_early([row], here, error)
            finally:
                # Before the outcome is queued: a task that the handler left behind may publish
                # later, and what it added then would not be written.
                row.no_chain = ENDED
                inflight.running -= 1
                inflight.slots.tell(row)
                now = monotonic()
                inflight.times.ended(began, now)
                if (
                    row.outcome.__class__ is Ack
                    and not row.chained
                    and not row.lease_lost
                    and row.cancelled is None
                ):
                    keep = self._rules.retain_on_ack
                    inflight.finish(
                        Acked(row.id, row.lease_token, now - row.claimed_monotonic, keep)
                    )
                else:
                    here.end_cancel()
                    inflight.finish_all(self._settlements([row]))
        except BaseException as error:  # noqa: BLE001 - raised again, or logged
            self._raise_or_log([row], error)
        return now

    async def _next(self) -> ClaimedMessage | None:
        """The next row, or the sentinel; asks for more where few are left."""
        waiting = self._inflight.waiting
        if waiting.empty():
            self._on_idle()
            self._inflight.made_room()
            return await waiting.get()
        row = waiting.get_nowait()
        if waiting.qsize() <= self._inflight.low_water:
            self._inflight.made_room()
        return row

    async def _held(self, rows: list[ClaimedMessage]) -> list[ClaimedMessage]:
        """Renew those of `rows` that have waited so long that little is left of their leases; what
        may start.
        """
        # Short leases are of one length, and a blocked event loop outlasts any: every row is looked
        # at.
        now = self._clock.monotonic()
        longest = self._longest_wait
        full = self._longest_full
        old = [r for r in rows if now - r.renewed_monotonic > (longest if r.prefetched else full)]
        if not old:
            return rows
        try:
            await self._hold(old)
        except BaseException as error:
            # Whether they are still ours is not known, so they must not start.
            self._inflight.give_back(old)
            others = [row for row in rows if row not in old]
            if _must_raise(error):
                self._inflight.give_back(others)
                raise
            if not isinstance(error, StoreError):
                self._failed(old, error)
            return others
        return [row for row in rows if not row.lease_lost]

    @override
    def _raise_or_log(self, rows: list[ClaimedMessage], error: BaseException) -> None:
        if _must_raise(error):
            raise error
        self._failed(rows, error)

    @override
    def _may_start(self, row: ClaimedMessage) -> bool:
        if (
            row.outcome is None
            and not row.attempts_count
            and row.expires_at is None
            and not missed_slot(row, self._clock)
            and row.deliveries_count <= self._most_deliveries
            and not row.lease_lost
            and row.cancelled is None
            and not self._stopping()
        ):
            return True  # nearly all of them
        try:
            return self._settle_or_start(row)
        except Exception as error:  # noqa: BLE001 - the others of the batch go on
            self._failed([row], error)
            return False

    def _failed(self, rows: list[ClaimedMessage], error: BaseException) -> None:
        """Something around the handler has failed: give back what has no outcome, for later."""
        unsettled = [row for row in rows if self._inflight.has_no_outcome(row)]
        if isinstance(error, asyncio.CancelledError) and not unsettled:
            return  # the handler's own, and its failure
        for row in unsettled:
            later = settle(row, Abandon(), self._rules, ended_after=0.0, attempted=False)
            later.delay = PAUSE_AFTER_BUG
            self._inflight.finish(later)
        self._log(
            logging.CRITICAL,
            f"messages {[row.id for row in rows]}: {error!r} outside of the handler; those "
            f"without an outcome come back in {PAUSE_AFTER_BUG} seconds",
            exc_info=error,
            message_id=rows[0].id,
        )

    def _settle_or_start(self, row: ClaimedMessage) -> bool:
        if row.lease_lost:
            return False
        outcome = self._refusal(row)
        if outcome is None:
            return True
        if missed_slot(row, self._clock):
            self._inflight.slots.start(row)  # counts it as missed
        self._inflight.slots.tell(row)
        if isinstance(outcome, Reject):
            self._log(logging.ERROR, refusal_text(row, outcome), message_id=row.id)
        if not row.lease_lost:
            self._inflight.finish(self._settlements.one(row, outcome, attempted=False))
        return False

    def _refusal(self, row: ClaimedMessage) -> Outcome | None:
        """What `row` ends in without a handler; None if the handler may start."""
        if self._stopping():
            return Release()
        outcome = refusal(row, self._rules, self._most_deliveries, self._clock)
        return Release() if outcome is None and missed_slot(row, self._clock) else outcome

    @override
    def _must_not_start(self, row: ClaimedMessage) -> bool:
        return row.lease_lost or self._refusal(row) is not None


def _takes_one_message(settings: ConsumerSettings) -> bool:
    """Whether a handler gets a single message, and nothing else is done around the call."""
    return settings.handler_timeout is None and not (
        settings.batch or settings.transactional or settings.task_per_message
    )


def _must_raise(error: BaseException) -> bool:
    """Whether `error`, or the cancellation of the worker's task, ends the worker."""
    return isinstance(error, KeyboardInterrupt | SystemExit) or cancelled()

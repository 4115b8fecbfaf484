"""Policies around a handler call: wait for a slot, claim a key, rest after a failure."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import (
    Abandon,
    Defer,
    Discard,
    Nack,
    NotReady,
    Outcome,
    Reject,
    Release,
    Relocate,
)
from faststream_sqlbroker.core.policies import BlockingWait, Policy, find_once
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.reasons import DUPLICATE, FAILED_ONCE, INVALID_BODY, UNKNOWN_OUTCOME
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.parts.once import OnceStatus
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.settlements import Settlements
from faststream_sqlbroker.flow.loop import Log, backoff, is_logged
from faststream_sqlbroker.flow.shielded import ShieldedCalls

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


OnceStatuses = dict[int, tuple[OnceStatus, int | None]]
"""The verdict by message id, and the id of the message that has its key."""


@dataclass(slots=True, eq=False)
class _ClaimRequest:
    rows: Sequence[ClaimedMessage]
    result: "asyncio.Future[OnceStatuses | StoreError | None]"
    """The answer; None tells this request to send the next transaction."""


class KeyClaimer:
    """Claims keys for all workers of a subscriber, with shared transactions.

    One transaction runs at a time. Workers that need keys while it runs share the next one, which
    the first of them sends. So this needs no task of its own.
    """

    def __init__(self, store: "Store", ttl: float) -> None:
        """Claim each key for `ttl` seconds."""
        self._store = store
        self._ttl = ttl
        self._waiting: list[_ClaimRequest] = []
        self._is_sending = False

    async def claim(self, rows: Sequence[ClaimedMessage]) -> OnceStatuses | StoreError:
        """Claim the keys of `rows`; return the verdicts or the error.

        A call during another transaction waits, and either gets its answer from the call that sends
        the next one, or is the first of the waiting calls and sends that itself. Do not cancel this
        call: other workers wait for the transaction that it sends.
        """
        new_request = _ClaimRequest(rows, asyncio.get_running_loop().create_future())
        self._waiting.append(new_request)
        if self._is_sending and (result := await new_request.result) is not None:
            return result
        # None: it is this request's turn to send.
        self._is_sending = True
        # Other workers that have become free together with this one add their requests in the same
        # turn of the loop.
        await asyncio.sleep(0)
        requests = self._waiting
        self._waiting = []
        try:
            results = await self._send(requests)
        except BaseException as error:
            for request in requests:
                if request is not new_request and not request.result.done():
                    request.result.set_exception(error)
            raise
        finally:
            self._is_sending = bool(self._waiting)
            if self._waiting:
                # The first of the requests that came since sends the next transaction.
                self._waiting[0].result.set_result(None)
        for request, result in zip(requests, results, strict=True):
            if request is not new_request:
                request.result.set_result(result)
        return results[requests.index(new_request)]

    async def _send(self, requests: Sequence[_ClaimRequest]) -> list[OnceStatuses | StoreError]:
        """Claim the keys of all `requests`; return an answer for each request.

        A first statement claims free keys of single rows, the usual case. The rest, such as
        batches, needs a verdict per row: start, duplicate, lost or unknown.
        """
        claimed_ids = await self._claim_free(requests)
        if isinstance(claimed_ids, StoreError):
            return [claimed_ids] * len(requests)
        remaining = [request for request in requests if request.rows[0].id not in claimed_ids]
        results = dict(zip(map(id, remaining), await self._send_remaining(remaining), strict=True))
        # The first statement has claimed the key of a request without an entry, which may start.
        return [
            results.get(id(request)) or {row.id: (OnceStatus.START, row.id) for row in request.rows}
            for request in requests
        ]

    async def _claim_free(self, requests: Sequence[_ClaimRequest]) -> set[int] | StoreError:
        """Claim free keys, the usual case; return the ids of their messages or an error.

        Keys of other rows may be claimed by other messages; the next statement decides those.
        """
        # Single rows only: if the other keys of a batch cannot be claimed, the batch does not
        # start, and none of its keys may stay claimed.
        single = [request.rows[0] for request in requests if len(request.rows) == 1]
        if not single:
            return set()
        try:
            return await self._store.policies.claim_free_keys(single, self._ttl)
        except (TransientStoreError, UnknownOutcomeError) as error:
            return error
        except StoreError:
            return set()  # refused: the next statement finds out for which rows

    async def _send_remaining(
        self, requests: Sequence[_ClaimRequest]
    ) -> list[OnceStatuses | StoreError]:
        """Claim the keys of `requests` together, and after a refusal request by request."""
        if not requests:
            return []
        result = await self._claim_keys([row for request in requests for row in request.rows])
        if not isinstance(result, StoreError):
            return [{row.id: result[row.id] for row in request.rows} for request in requests]
        is_transient = isinstance(result, TransientStoreError | UnknownOutcomeError)
        if is_transient or len(requests) == 1:
            return [result] * len(requests)
        # A refusal of one request must not stop the others.
        return [await self._claim_keys(request.rows) for request in requests]

    async def _claim_keys(self, rows: Sequence[ClaimedMessage]) -> OnceStatuses | StoreError:
        """Claim the keys of `rows`; return an error instead of raising."""
        try:
            return await self._store.policies.claim_keys(rows, self._ttl)
        except StoreError as error:
            return error


def create_key_claimer(store: "Store", policies: Sequence[Policy]) -> KeyClaimer | None:
    """Create the key claimer that a subscriber's workers share; None without policy Once."""
    once = find_once(policies)
    return None if once is None else KeyClaimer(store, once.ttl / MICROSECONDS)


Rows = list[ClaimedMessage]
STOP_CHECK_INTERVAL = 0.1
"""Seconds between two checks of a resting worker whether it is to stop."""
MAX_KEY_TRIES = 5
"""Number of tries to claim keys after an unanswered COMMIT, and to release them during a stop."""


def get_slot_wait(row: ClaimedMessage, clock: Clock) -> float:
    """Return the seconds until the slot of `row`; 0 or less to start now.

    A slot is the time at which a Throttle allows the message to start.
    """
    return 0.0 if row.slot is None else row.slot.earliest - clock.monotonic()


def has_missed_slot(row: ClaimedMessage, clock: Clock) -> bool:
    """Return True if the slot of `row` was missed: the latest time for a start is over.

    Rows without a slot (no Throttle) miss none.
    """
    return row.slot is not None and clock.monotonic() > row.slot.latest


def _can_run_again(row: ClaimedMessage) -> bool:
    """Return True if the key of `row` is free again: nothing was done, or the handler says so.

    Under policy Once the handler runs once for each key, so the key otherwise stays claimed.
    """
    outcome = row.outcome
    if isinstance(outcome, Relocate):
        # In its own queue it would find its own key claimed; in another queue it has another key.
        return outcome.published_again and outcome.queue == row.queue
    if isinstance(outcome, Nack):
        return outcome.retry_possible
    if isinstance(outcome, Reject):
        return outcome.reason == INVALID_BODY
    if isinstance(outcome, Discard):
        return outcome.not_started
    return isinstance(outcome, Release | Defer | NotReady)


class PolicyRunner:
    """Applies the policies of a subscriber around each handler call."""

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        settlements: Settlements,
        policies: Sequence[Policy],
        log: Log,
        stopping: Callable[[], bool],
        keys: KeyClaimer | None,
    ) -> None:
        """End a rest when `stopping` returns True. The workers of a subscriber share `keys`."""
        self._settlements = settlements
        self._clock = inflight.clock
        self._store = store
        self._inflight = inflight
        self._log = log
        self._stopping = stopping
        self._keys = keys
        self._rest_seconds = next(
            (policy.seconds for policy in policies if isinstance(policy, BlockingWait)), 0.0
        )
        self._shielded = ShieldedCalls()
        self._failures = 0

    @property
    def has_only_slots(self) -> bool:
        """True if the policies require a worker only to wait for slots."""
        return self._keys is None and not self._rest_seconds

    async def wait_for_slot(self, row: ClaimedMessage) -> None:
        """Wait until the slot of `row`, the time at which a Throttle allows the start.

        A cancelled wait releases the row.
        """
        if (wait := get_slot_wait(row, self._clock)) <= 0:
            return
        self._inflight.metrics.record_policy_wait("slot", wait)
        # Until then, the fetch loop must not take this worker for one that is stuck.
        self._inflight.times.record_start(self._clock.monotonic() + wait)
        with self._mark_busy():
            try:
                await self._clock.sleep(wait)
            except BaseException:
                self._inflight.release([row])
                raise

    @contextmanager
    def _mark_busy(self) -> Iterator[None]:
        """Count the worker as busy inside of the block.

        A message claimed for it now would miss its slot, or keep its key from other workers.
        """
        self._inflight.running += 1
        try:
            yield
        finally:
            self._inflight.running -= 1

    async def claim_keys(self, rows: Rows) -> Rows:
        """Claim the keys of messages that may run once; return the rows that may start.

        The other rows are settled. During the claim the worker counts as busy.
        """
        with self._mark_busy():
            return await self._claim_keys(rows)

    async def release(self, rows: Rows) -> None:
        """Release `rows`, whose keys may be claimed and whose handler does not start."""
        with self._mark_busy():
            await self._shielded.run(self._release_unstarted(rows, self._filter_keyed(rows)))

    async def release_keys(self, rows: Rows) -> None:
        """Release the keys of `rows`, whose handler does not start, before the rows are settled."""
        with self._mark_busy():
            await self._shielded.run(self._release_keys(self._filter_keyed(rows)))

    def use_slots(self, rows: Sequence[ClaimedMessage], *, must: bool = False) -> bool:
        """Use the slots of `rows`, whose handler starts now; return False if a slot was missed.

        A slot is a start that a Throttle allows, until a deadline. If it is too late for a single
        row, no slot is used and all rows are released. Rows without a slot start, and with `must`
        all of them.
        """
        slots = self._inflight.slots
        if must or not any(has_missed_slot(row, self._clock) for row in rows):
            for row in rows:
                slots.start(row, must=True)
            return True
        for row in rows:
            if has_missed_slot(row, self._clock):
                slots.start(row)  # counts it as missed
            row.record_outcome(Release())
        return False

    def report_slots(self, rows: Rows) -> None:
        """Report whether the handler of `rows` has started, and when.

        The next claim stores that, so that a start that a Throttle granted in vain can be reused.
        """
        for row in rows:
            self._inflight.slots.record_end(row)

    def retain_keys(self, rows: Rows) -> None:
        """Keep the keys of the other rows of a batch that an operator has cancelled.

        It is unknown what the handler did for them, so it does not run for their keys again: the
        key of an abandoned message stays claimed.
        """
        for row in self._filter_keyed(rows):
            if row.cancelled is None:
                row.record_outcome(Abandon())

    def _filter_keyed(self, rows: Rows) -> Rows:
        """Return the rows that may run once."""
        return [] if self._keys is None else [row for row in rows if row.once_key is not None]

    async def _claim_keys(self, rows: Rows) -> Rows:
        """Claim the keys of `rows` under policy Once; settle rows whose handler must not run again.

        Return the rows that may start. The verdict on a row says that its lease is lost, that
        another message has claimed the key, or that the outcome of an earlier handler is unknown.
        If the keys could not be claimed, no row starts.
        """
        keyed_rows = self._filter_keyed(rows)
        if self._keys is None or not keyed_rows:
            return rows
        # Shielded from the worker's cancellation: a claim that is cut off may leave keys claimed,
        # which would end the next delivery, although no handler has run.
        claim = self._claim_with_retry(self._keys, keyed_rows)
        verdicts = await self._shielded.run(
            claim, lambda: self._release_unstarted(rows, keyed_rows)
        )
        if isinstance(verdicts, StoreError):
            await self._handle_claim_error(rows, verdicts)
            return []
        self._failures = 0
        for row in keyed_rows:
            verdict, other_id = verdicts[row.id]
            if verdict is OnceStatus.LOST:
                self._inflight.lose([row], "key claim", "its handler does not run")
            elif verdict is OnceStatus.DUPLICATE:
                self._finish(row, Discard(DUPLICATE, other_id))
            elif verdict is OnceStatus.UNKNOWN:
                self._finish(row, Reject(UNKNOWN_OUTCOME))
        settled_ids = {row.id for row in keyed_rows if verdicts[row.id][0] is not OnceStatus.START}
        return [row for row in rows if row.id not in settled_ids]

    def _finish(self, row: ClaimedMessage, outcome: Outcome) -> None:
        """Settle `row`, whose handler does not start, unless the lease was lost."""
        row.record_outcome(outcome)
        if not row.lease_lost:  # lost while its key was claimed
            self._inflight.queue_outcome(
                self._settlements.settle_row(row, row.outcome, attempted=False)
            )

    async def _claim_with_retry(self, keys: KeyClaimer, rows: Rows) -> OnceStatuses | StoreError:
        """Claim keys, and repeat after an unanswered COMMIT; return the verdicts or the error.

        Errors are returned, so that a cancelled caller releases the rows after an error, too. Only
        after an `UnknownOutcomeError` a key may be claimed.
        """
        result = await keys.claim(rows)
        if not isinstance(result, UnknownOutcomeError):
            return result
        unknown_error = result
        for failures in range(1, MAX_KEY_TRIES):
            await self._clock.sleep(backoff(failures, self._clock))
            result = await keys.claim(rows)
            if not isinstance(result, TransientStoreError):
                break
        if not isinstance(result, StoreError):
            return result
        # A key that stayed claimed would end the next delivery, although no handler has run.
        is_released = await self._release_keys(rows)
        return TransientStoreError(str(result)) if is_released else unknown_error

    async def _release_unstarted(self, rows: Rows, keyed_rows: Rows) -> None:
        """Release `rows`, which do not start, after their keys.

        The next process to get them would otherwise find the keys claimed, and not run them.
        """
        await self._release_keys(keyed_rows)
        self._inflight.release(row for row in rows if not row.lease_lost)

    async def _handle_claim_error(self, rows: Rows, error: StoreError) -> None:
        """Release `rows` after a pause: nothing runs whose key is not known to be claimed.

        While it pauses, the worker takes no other row, which would meet the same error.
        """
        self._failures += 1
        pause = backoff(self._failures, self._clock)
        if is_logged(self._failures):
            self._log(
                logging.WARNING,
                f"could not claim the keys of messages {[row.id for row in rows]}, so their "
                f"handlers do not run now; trying again in {pause:.1f} s: {error}",
                message_id=rows[0].id,
            )
        try:
            await self._inflight.outages.pause(pause)
        finally:
            for row in rows:
                if isinstance(error, UnknownOutcomeError):
                    # Its key may be claimed: the next delivery, after the lease, finds out.
                    self._inflight.drop([row])
                else:
                    self._finish(row, Release())

    async def handle_ended(self, rows: Rows) -> None:
        """Rest after a failure, and release the keys of `rows` that may be tried again.

        The rest (policy BlockingWait) keeps the worker from the next message; a stop ends it. A key
        that is not released keeps later deliveries from running the handler (policy Once).
        """
        try:
            if self._rest_seconds and any(isinstance(row.outcome, Nack) for row in rows):
                self._inflight.metrics.record_policy_wait("rest", self._rest_seconds)
                until = self._clock.monotonic() + self._rest_seconds
                while (remaining := until - self._clock.monotonic()) > 0 and not self._stopping():
                    await self._clock.sleep(min(remaining, STOP_CHECK_INTERVAL))
        finally:
            if retry_rows := self.reject_failed_once(rows):
                await self._shielded.run(self._release_keys(retry_rows))

    def reject_failed_once(self, rows: Rows) -> Rows:
        """Reject failed rows that may run once; return the rows whose keys are to be released.

        A row that may run once has a key of policy Once, and gets no retry. The result includes
        rows that end in a Release. Their handler has not started: its transaction could not begin,
        or did not find its lease, or a stop came first. Nor has the handler of an invalid body.
        """
        retry_rows: Rows = []
        if self._keys is None:
            return retry_rows
        for row in (row for row in rows if row.once_key is not None):
            if _can_run_again(row):
                retry_rows.append(row)
            elif isinstance(row.outcome, Nack):
                row.replace_outcome(Reject(FAILED_ONCE, row.outcome.error))
        return retry_rows

    async def _release_keys(self, rows: Rows) -> bool:
        """Release keys, repeated after transient errors until a stop; return True if done.

        Failures are logged: the worker takes no other message until the keys are released. The
        handlers of messages whose keys stay claimed do not run again.
        """
        failures = 0
        while rows:
            try:
                await self._store.policies.release_keys(rows)
            except StoreError as error:
                failures += 1
                last = failures >= MAX_KEY_TRIES and self._stopping()
                if last or not isinstance(error, TransientStoreError):
                    self._log_unreleased_keys(rows, logging.ERROR, "do not run again", error)
                    return False
                if is_logged(failures):
                    self._log_unreleased_keys(rows, logging.WARNING, "do not run yet", error)
            else:
                break
            await self._clock.sleep(backoff(failures, self._clock))
        return True

    def _log_unreleased_keys(self, rows: Rows, level: int, effect: str, error: StoreError) -> None:
        """Log keys that stay claimed, for good or until the next try, by the `effect`."""
        text = f"could not release the keys of messages {[row.id for row in rows]}, so their "
        self._log(level, f"{text}handlers {effect}: {error}", message_id=rows[0].id)

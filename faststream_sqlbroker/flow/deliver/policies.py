"""What policies ask of a worker: to wait for a slot, to claim a key before the start, to rest after
a failure.
"""

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
from faststream_sqlbroker.core.policies import BlockingWait, Once, Policy
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.reasons import DUPLICATE, FAILED_ONCE, INVALID_BODY, UNKNOWN_OUTCOME
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.parts.once import Verdict
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.settlements import Settlements
from faststream_sqlbroker.flow.loop import Log, backoff, is_told
from faststream_sqlbroker.flow.shielded import ShieldedCalls

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


Verdicts = dict[int, tuple[Verdict, int | None]]
"""By message, with the one that has its key."""


@dataclass(slots=True, eq=False)
class _Asked:
    rows: Sequence[ClaimedMessage]
    answer: "asyncio.Future[Verdicts | StoreError | None]"
    """None: this one sends what is asked next."""


class KeyClaims:
    """What the workers of one subscriber ask at the same time is asked at once.

    One transaction runs at a time. Workers that ask while it runs share the next one, which the
    first of them sends. So there is no task of its own.
    """

    def __init__(self, store: "Store", ttl: float) -> None:
        """`ttl`: seconds for which a key stays claimed."""
        self._store = store
        self._ttl = ttl
        self._waiting: list[_Asked] = []
        self._sending = False

    async def claim(self, rows: Sequence[ClaimedMessage]) -> Verdicts | StoreError:
        """Claim the keys of `rows`; the verdicts, or why there are none.

        Do not cancel it: others wait for what it sends.
        """
        asked = _Asked(rows, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if self._sending and (answer := await asked.answer) is not None:
            return answer
        self._sending = True
        # The other workers that have become free with this one ask in the same turn of the loop.
        await asyncio.sleep(0)
        together = self._waiting
        self._waiting = []
        try:
            answers = await self._send(together)
        except BaseException as error:
            for each in together:
                if each is not asked and not each.answer.done():
                    each.answer.set_exception(error)
            raise
        finally:
            self._sending = bool(self._waiting)
            if self._waiting:
                self._waiting[0].answer.set_result(None)
        for each, answer in zip(together, answers, strict=True):
            if each is not asked:
                each.answer.set_result(answer)
        return answers[together.index(asked)]

    async def _send(self, together: Sequence[_Asked]) -> list[Verdicts | StoreError]:
        started = await self._claimed_free(together)
        if isinstance(started, StoreError):
            return [started] * len(together)
        rest = [each for each in together if each.rows[0].id not in started]
        answers = dict(zip(map(id, rest), await self._send_rest(rest), strict=True))
        return [
            answers.get(id(each)) or {row.id: (Verdict.START, row.id) for row in each.rows}
            for each in together
        ]

    async def _claimed_free(self, together: Sequence[_Asked]) -> set[int] | StoreError:
        """The messages whose keys were free, which is usual; an error if that is not known."""
        # Not of batches: if the rest of one cannot be asked for, it does not start, and no key of
        # it may stay claimed.
        single = [each.rows[0] for each in together if len(each.rows) == 1]
        if not single:
            return set()
        try:
            return await self._store.policies.claim_free_keys(single, self._ttl)
        except (TransientStoreError, UnknownOutcomeError) as error:
            return error
        except StoreError:
            return set()  # refused: it is found out of which

    async def _send_rest(self, together: Sequence[_Asked]) -> list[Verdicts | StoreError]:
        if not together:
            return []
        answer = await self._claimed([row for each in together for row in each.rows])
        if not isinstance(answer, StoreError):
            return [{row.id: answer[row.id] for row in each.rows} for each in together]
        passing = isinstance(answer, TransientStoreError | UnknownOutcomeError)
        if passing or len(together) == 1:
            return [answer] * len(together)
        # What the database refuses of one must not keep the others.
        return [await self._claimed(each.rows) for each in together]

    async def _claimed(self, rows: Sequence[ClaimedMessage]) -> Verdicts | StoreError:
        try:
            return await self._store.policies.claim_keys(rows, self._ttl)
        except StoreError as error:
            return error


def key_claims_of(store: "Store", policies: Sequence[Policy]) -> KeyClaims | None:
    """Those of one subscriber, which all its workers share; None without `Once`."""
    once = next((policy for policy in policies if isinstance(policy, Once)), None)
    return None if once is None else KeyClaims(store, once.ttl / MICROSECONDS)


Rows = list[ClaimedMessage]
REST_STEP = 0.1
"""Seconds after which a worker that rests looks whether it is to stop."""
REPEATS = 5
"""How often a claim of keys is tried whose COMMIT was not answered, and during a stop, to give them
back."""


def seconds_to_slot(row: ClaimedMessage, clock: Clock) -> float:
    """Seconds until `row` may start; 0 or less: it may."""
    return 0.0 if row.slot is None else row.slot.earliest - clock.monotonic()


def missed_slot(row: ClaimedMessage, clock: Clock) -> bool:
    """Whether it is too late for the slot of `row`, which is given up, or its window has closed."""
    return row.slot is not None and clock.monotonic() > row.slot.latest


def _may_run_again(row: ClaimedMessage) -> bool:
    """Whether the key of `row` is free again: nothing was done for it, or its handler says so."""
    outcome = row.outcome
    if isinstance(outcome, Relocate):
        # Where it stays it would find its own key taken; elsewhere it has another.
        return outcome.published_again and outcome.queue == row.queue
    if isinstance(outcome, Nack):
        return outcome.retry_possible
    if isinstance(outcome, Reject):
        return outcome.reason == INVALID_BODY
    if isinstance(outcome, Discard):
        return outcome.not_started
    return isinstance(outcome, Release | Defer | NotReady)


class PolicyStarts:
    """What the policies of one subscriber do around each call of its handler."""

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        settlements: Settlements,
        policies: Sequence[Policy],
        log: Log,
        stopping: Callable[[], bool],
        keys: KeyClaims | None,
    ) -> None:
        """`stopping` ends a rest; the workers of a subscriber share `keys`."""
        self._settlements = settlements
        self._clock = inflight.clock
        self._store = store
        self._inflight = inflight
        self._log = log
        self._stopping = stopping
        self._keys = keys
        self._rest = next(
            (policy.seconds for policy in policies if isinstance(policy, BlockingWait)), 0.0
        )
        self._shielded = ShieldedCalls()
        self._failures = 0

    @property
    def only_slots(self) -> bool:
        """Whether all that they ask of a worker is to wait for slots."""
        return self._keys is None and not self._rest

    async def wait_for_slot(self, row: ClaimedMessage) -> None:
        """Wait until `row` may start."""
        if (wait := seconds_to_slot(row, self._clock)) <= 0:
            return
        self._inflight.metrics.policy_wait("slot", wait)
        self._inflight.times.begins(self._clock.monotonic() + wait)
        with self._busy():
            try:
                await self._clock.sleep(wait)
            except BaseException:
                self._inflight.give_back([row])
                raise

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """The worker is not free: what was claimed for it now would miss its slot, or keep its key
        from others.
        """
        self._inflight.running += 1
        try:
            yield
        finally:
            self._inflight.running -= 1

    async def claim_keys(self, rows: Rows) -> Rows:
        """Claim the keys of messages that may run once; those that may start. The others are
        settled.
        """
        with self._busy():
            return await self._claim_keys(rows)

    async def give_back(self, rows: Rows) -> None:
        """Give back `rows`, whose keys may be claimed and whose handler does not start."""
        with self._busy():
            await self._shielded.run(self._cut_off(rows, self._keyed(rows)))

    async def give_keys_back(self, rows: Rows) -> None:
        """Give back the keys of `rows`, whose handler does not start: before they are settled, as
        in `give_back`.
        """
        with self._busy():
            await self._shielded.run(self._give_back(self._keyed(rows)))

    def take_slots(self, rows: Sequence[ClaimedMessage], *, must: bool = False) -> bool:
        """The handler of `rows` starts now, unless it is too late for a slot of them: then none of
        the slots is used, and they go back. Without one, and if it `must`, it starts.
        """
        slots = self._inflight.slots
        if must or not any(missed_slot(row, self._clock) for row in rows):
            for row in rows:
                slots.start(row, must=True)
            return True
        for row in rows:
            if missed_slot(row, self._clock):
                slots.start(row)  # counts it as missed
            row.settle_as(Release())
        return False

    def tell_slots(self, rows: Rows) -> None:
        """It is known of `rows` whether their handler has started, and when."""
        for row in rows:
            self._inflight.slots.tell(row)

    def keep_keys(self, rows: Rows) -> None:
        """The handler of `rows` was cancelled for an operator: what it did for the others of the
        batch is not known, so it does not run for their keys again.
        """
        for row in self._keyed(rows):
            if row.cancelled is None:
                row.settle_as(Abandon())

    def _keyed(self, rows: Rows) -> Rows:
        """Those that may run once."""
        return [] if self._keys is None else [row for row in rows if row.policy_key is not None]

    async def _claim_keys(self, rows: Rows) -> Rows:
        keyed = self._keyed(rows)
        if self._keys is None or not keyed:
            return rows
        claim = self._claimed(self._keys, keyed)
        verdicts = await self._shielded.run(claim, lambda: self._cut_off(rows, keyed))
        if isinstance(verdicts, StoreError):
            await self._not_started(rows, verdicts)
            return []
        self._failures = 0
        for row in keyed:
            verdict, other = verdicts[row.id]
            if verdict is Verdict.LOST:
                self._inflight.lose([row], "claim of its key", "it does not run here")
            elif verdict is Verdict.DUPLICATE:
                self._end(row, Discard(DUPLICATE, other))
            elif verdict is Verdict.UNKNOWN:
                self._end(row, Reject(UNKNOWN_OUTCOME))
        going = {row.id for row in keyed if verdicts[row.id][0] is not Verdict.START}
        return [row for row in rows if row.id not in going]

    def _end(self, row: ClaimedMessage, outcome: Outcome) -> None:
        row.settle_as(outcome)
        if not row.lease_lost:  # while its key was asked for
            self._inflight.finish(self._settlements.one(row, row.outcome, attempted=False))

    async def _claimed(self, keys: KeyClaims, rows: Rows) -> Verdicts | StoreError:
        """The verdicts, or why there are none: returned, as after an error, too, a cancelled caller
        gives back. Only after an `UnknownOutcomeError` a key may be claimed.
        """
        answer = await keys.claim(rows)
        if not isinstance(answer, UnknownOutcomeError):
            return answer
        unsure = answer
        for failures in range(1, REPEATS):
            await self._clock.sleep(backoff(failures, self._clock))
            answer = await keys.claim(rows)
            if not isinstance(answer, TransientStoreError):
                break
        if not isinstance(answer, StoreError):
            return answer
        # A key that stayed claimed would end the next delivery, though no handler has run.
        given_back = await self._give_back(rows)
        return TransientStoreError(str(answer)) if given_back else unsure

    async def _cut_off(self, rows: Rows, keyed: Rows) -> None:
        """Give back `rows`, which do not start: first their keys: the next process to get
        them would otherwise find the keys taken, and not run them.
        """
        await self._give_back(keyed)
        self._inflight.give_back(row for row in rows if not row.lease_lost)

    async def _not_started(self, rows: Rows, error: StoreError) -> None:
        """Nothing runs whose key is not known to be claimed."""
        self._failures += 1
        pause = backoff(self._failures, self._clock)
        if is_told(self._failures):
            self._log(
                logging.WARNING,
                f"the keys of messages {[row.id for row in rows]} cannot be claimed, so they do "
                f"not run now; again in {pause:.1f} s: {error}",
                message_id=rows[0].id,
            )
        try:
            await self._clock.sleep(pause)
        finally:
            for row in rows:
                if isinstance(error, UnknownOutcomeError):
                    self._inflight.drop([row])  # the next delivery finds out
                else:
                    self._end(row, Release())

    async def ended(self, rows: Rows) -> None:
        """The handler of `rows` has ended: rest after a failure; give keys back where it may be
        tried again.
        """
        try:
            if self._rest and any(isinstance(row.outcome, Nack) for row in rows):
                self._inflight.metrics.policy_wait("rest", self._rest)
                until = self._clock.monotonic() + self._rest
                while (left := until - self._clock.monotonic()) > 0 and not self._stopping():
                    await self._clock.sleep(min(left, REST_STEP))
        finally:
            if again := self.spend(rows):
                await self._shielded.run(self._give_back(again))

    def spend(self, rows: Rows) -> Rows:
        """End those of `rows` that may run once and have failed; those whose keys are to be given
        back.

        Among these is what ends in a Release: its handler has not started, as its transaction could
        not be begun, or did not find its lease, or a stop came before it. Nor has the handler of an
        invalid body.
        """
        again: Rows = []
        if self._keys is None:
            return again
        for row in (row for row in rows if row.policy_key is not None):
            if _may_run_again(row):
                again.append(row)
            elif isinstance(row.outcome, Nack):
                row.settle_anew(Reject(FAILED_ONCE, row.outcome.error))
        return again

    async def _give_back(self, rows: Rows) -> bool:
        """Whether it was done; passing failures are repeated until a stop."""
        failures = 0
        while rows:
            try:
                await self._store.policies.give_back_keys(rows)
            except StoreError as error:
                failures += 1
                last = failures >= REPEATS and self._stopping()
                if last or not isinstance(error, TransientStoreError):
                    self._not_given_back(rows, error)
                    return False
            else:
                break
            await self._clock.sleep(backoff(failures, self._clock))
        return True

    def _not_given_back(self, rows: Rows, error: StoreError) -> None:
        text = (
            f"the keys of messages {[row.id for row in rows]} could not be given back, so they do "
            "not run again"
        )
        self._log(logging.ERROR, f"{text}: {error}", message_id=rows[0].id)

"""Claim as much as there is room for, and decide when to look again."""

import logging
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

from faststream_sqlbroker.core.rows import Claimed, ClaimedMessage, Holder, Prefetch, ReadyPair
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.dialects.ordered import Cursors
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.outcomes import MOST_APART
from faststream_sqlbroker.flow.prefetch import HORIZON, LONGEST_WAIT, prefetch_lease, slot_horizon
from faststream_sqlbroker.flow.ready import SCAN_INTERVAL, Ready
from faststream_sqlbroker.flow.registration import Registration
from faststream_sqlbroker.flow.settings import ConsumerSettings
from faststream_sqlbroker.flow.solo_run import SoloRuns, Turn
from faststream_sqlbroker.flow.stride_scheduler import StrideScheduler
from faststream_sqlbroker.flow.wakeup import ALL
from faststream_sqlbroker.policies.request import PolicyClaimRequest, ScanPosition

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

FIRST_IDLE_WAIT = 0.01
"""Seconds to the first look after the queue ran dry; each following wait is half as long again."""
RELEASE_PAUSE = 5.0
"""Seconds between two tries to give back a claim whose answer was lost."""
SHORTEST_STALE_WAIT = 0.05
"""Seconds between two looks for rows that wait for too long."""
SLOW_IDLE_WAIT = 1.0
"""Most seconds without a claim while looks, which would tell what is due next, are rare."""


class Fetcher:
    """Fills the buffer of one subscriber.

    The first claim looks first: until then no priority is known but 0. While rows come, the
    remembered (queue, priority) pairs are claimed from; when fewer came than asked for and at least
    every second, the pairs are looked for again, which also tells when the next row is due. A
    wake-up is answered by a claim from the known pairs of its queues, one round trip earlier than
    by a look. Queues are visited in rotation.
    """

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        settings: ConsumerSettings,
        log: Log,
        registration: Registration,
        holder: Holder | None = None,
    ) -> None:
        """`settings` gives batch size, intervals and the length of a lease; `registration` the
        queues and tokens.

        `holder` goes with each claimed row.
        """
        self._store = store
        self._inflight = inflight
        self._settings = settings
        self._log = log
        self._registration = registration
        self._holder = holder
        self._clock = inflight.clock
        self.ready = Ready(store, settings.queues, self._clock)
        self.ready.restrict(registration.open)
        self._unlooked = True
        self._hinted: frozenset[str] | None = None
        self._hinted_at = float("-inf")
        self._first_wait = min(
            max(settings.min_fetch_interval, FIRST_IDLE_WAIT), settings.max_fetch_interval
        )
        self._idle_wait = self._first_wait
        self._not_before = float("-inf")
        self._look_again = True
        self._solo_runs = SoloRuns()
        self._suspicion = Suspicion.under(settings.max_deliveries)
        self._cursors = Cursors()
        self._memory = ScanPosition()
        self._gated = False
        self._more = False
        self._shares = (
            StrideScheduler(settings.queues, settings.weights) if settings.weights else None
        )
        self._asked_at = 0.0
        """When the last claim was sent (monotonic seconds)."""
        self._unanswered: list[UUID] = []
        self._release_again_at = float("-inf")
        self._look_interval = SCAN_INTERVAL
        # A full fetch is enough until the next one.
        self._horizon = min(
            max(HORIZON, settings.min_fetch_interval), slot_horizon(settings.policies)
        )

    def hint(self, queues: frozenset[str] = ALL) -> None:
        """Something may have arrived in `queues`: claim, look before the next claim, and poll
        quickly again.
        """
        if self._hinted is None:
            self._hinted = queues
            self._hinted_at = self._clock.monotonic()
        elif self._hinted != ALL:
            self._hinted = ALL if queues == ALL else self._hinted | queues
        self._look_again = True
        self._idle_wait = self._first_wait

    def reopened(self) -> None:
        """Other queues are open than before: what waits of those that are not goes back, and the
        next claim looks.
        """
        self._unlooked = True
        self.ready.restrict(self._registration.open)
        self._inflight.keep_waiting(self._registration.open)

    @property
    def _longest_wait(self) -> float:
        """Seconds that a row waits behind running handlers."""
        return LONGEST_WAIT + self._settings.min_fetch_interval

    @property
    def _free(self) -> int:
        """Workers that wait for a row."""
        return self._settings.max_workers - max(self._inflight.busy, self._inflight.running)

    def window(self) -> int:
        """Rows that may wait here: those that the workers will start soon, or at once."""
        s = self._settings
        a_run = s.run_size
        capacity = int(s.fetch_batch_size * s.max_not_processed_factor)
        starts = self._inflight.times.starts_ahead(s.max_workers, self._free, self._horizon)
        return min(capacity, starts * a_run)

    def room(self, window: int) -> int:
        """Rows that may be claimed now if `window` may wait; 0 while the flush is behind."""
        s = self._settings
        held = self._inflight
        unwritten = len(held.queued) + held.writing_count
        if (
            unwritten >= 2 * max(s.flush_batch_size, s.fetch_batch_size)
            or held.apart_count >= MOST_APART
        ):
            return 0
        return min(s.fetch_batch_size, window - held.waiting.qsize())

    async def tick(self) -> float:
        """Claim once; seconds until the next look."""
        if (early := self._not_before - self._clock.monotonic()) > 0:
            return early
        await self._try_release_unanswered()
        if self._free <= 0:
            self._inflight.give_back_stale(self._longest_wait)
        if self._registration.stopping or not self._registration.open:
            return self._wait_for_room()
        alone = self._inflight.empty
        now = self._clock.monotonic()
        turn = self._solo_runs.turn(alone=alone, now=now)
        if turn is Turn.DRAIN:
            self._inflight.give_back_waiting()
            self.ready.begin_anew()
        if turn in (Turn.DRAIN, Turn.NONE):
            return self._wait_for_room()
        if turn is Turn.SUSPECT:
            await self._claim_suspect(alone=alone)
            return 0.0
        return await self._claim_due(turn, now)

    def look_at_all(self) -> None:
        """Let the next claim read from the beginning, not from where the last one ended."""
        self._cursors = Cursors()
        self._memory = ScanPosition()

    async def claim_now(self, pairs: Sequence[ReadyPair], limit: int) -> tuple[int, float | None]:
        """Claim from `pairs` without regard to when the last claim was, suspects among the others;
        how many rows, and in how many seconds to look again, if the claim knows.

        Policies look at all open queues.
        """
        if self._settings.policies:
            rows, again = await self._claim_scheduled(limit, None)
        else:
            rows, again = await self._claim(pairs, limit, None)
        self._add(rows)
        return len(rows), again

    async def _claim_due(self, turn: Turn, now: float) -> float:
        """Claim what is due, as much as there is room for; seconds until the next look."""
        limit = self._find_room()
        if limit < 1:
            return self._wait_for_room()
        suspicion = self._suspicion
        if suspicion is not None and turn is Turn.OTHERS:
            suspicion = suspicion.untold()
        metrics = self._inflight.metrics
        try:
            rows, again = await self._claim_ready(limit, suspicion)
        finally:
            metrics.claim_took(self._clock.monotonic() - now)
        self._solo_runs.met(rows.suspects, now)
        if not _met(rows):
            self._solo_runs.nothing_else(now)
        self._add(rows)
        wait = self._next_wait(_met(rows), limit, again, took=self._clock.monotonic() - now)
        if self._gated and not rows and again is not None:
            metrics.policy_wait("claim", wait)
        return 0.0 if self._solo_runs.waits(self._clock.monotonic()) else wait

    async def _claim_ready(
        self, limit: int, suspicion: Suspicion | None
    ) -> tuple[Claimed, float | None]:
        # Many branches, in one function: the cheapest way that may find rows comes first.
        ready = self.ready
        hinted = self._hinted
        # Taken before the claim: a hint that comes while it runs is for the next one.
        self._hinted = None
        if self._settings.policies:
            return await self._claim_scheduled(limit, suspicion)
        if (
            self._unlooked
            or self._settings.ordered
            or self._clock.monotonic() - self._hinted_at > HORIZON / 2
        ):
            # Not twice without a scan between: a pair that is not known yet may have a higher
            # priority. Nor when the hint has waited for room: a scan costs less than that wait,
            # and few messages are claimed at a time.
            hinted = None
        if ready.looked and (ready.slow or hinted is not None):
            self._unlooked = True
            rows, again = await self._claim(self._known(hinted), limit, suspicion)
            if ready.slow or rows:
                return rows, again
        if self._look_again or not ready.looked or ready.age >= self._look_interval:
            await self._scan()
        due = ready.due()
        return await self._claim(due, limit, suspicion) if due else (Claimed(), None)

    async def _scan(self) -> None:
        self._look_again = False
        try:
            await self.ready.scan()
            self._unlooked = False
        finally:
            # Also after a scan that was cut off because it was slow.
            if self.ready.slow:
                self._inflight.signals.scans_slow()

    def _known(self, hinted: frozenset[str] | None) -> list[ReadyPair]:
        # Without a look in between, queues with nothing new would be left out for long; shares take
        # them to be empty.
        if not hinted or self.ready.slow or self._shares is not None:
            return self.ready.known()
        return self.ready.known(hinted)

    async def _claim(
        self, due: Sequence[ReadyPair], limit: int, suspicion: Suspicion | None
    ) -> tuple[Claimed, float | None]:
        """The rows, and in how many seconds to look again, if the claim knows."""
        if self._shares is None:
            return await self._claim_in_order(due, limit, suspicion)
        due = self._shares.order_pairs(due)
        rows, again = await self._claim_in_order(due, limit, suspicion)
        self._shares.claimed(
            [pair.queue for pair in due], rows, more=_met(rows) >= limit or again == 0
        )
        return rows, again

    async def _claim_in_order(
        self, due: Sequence[ReadyPair], limit: int, suspicion: Suspicion | None
    ) -> tuple[Claimed, float | None]:
        lease = self._settings.release_stuck_timeout
        shorter = prefetch_lease(lease)
        starting = self._starting()
        prefetch = Prefetch(starting, shorter) if shorter < lease and starting < limit else None
        with self._noting_the_unanswered() as token:
            if self._settings.ordered:
                lease = self._one_lease(limit)
                rows, again, self._cursors = await self._store.claim_ordered(
                    due, limit, lease, token, self._cursors, suspicion=suspicion
                )
                self._note_lease(rows, lease)
                return rows, again
            rows = await self._store.claim(
                due, limit, lease, token, suspicion=suspicion, prefetch=prefetch
            )
        self.ready.claimed(due, rows)
        return rows, None

    async def _claim_scheduled(
        self, limit: int, suspicion: Suspicion | None, *, only: int | None = None
    ) -> tuple[Claimed, float | None]:
        """As `_claim`, under the subscriber's policies."""
        s = self._settings
        queues = self.ready.queues_in_turn()
        if self._shares is not None:
            queues = self._shares.order(queues)
        lease = s.release_stuck_timeout if only is not None else self._one_lease(limit)
        with self._noting_the_unanswered() as token:
            wanted = PolicyClaimRequest(
                queues,
                limit,
                lease,
                token,
                s.policies,
                s.ordered,
                s.retain_in_archive_on_reject,
                suspicion,
                only,
                limit if only is not None else self._starting(),
            )
            claim, self._memory = await self._store.policies.claim(wanted, self._memory)
        self._note_lease(claim.rows, lease)
        self._gated = claim.gated
        self._more = claim.more
        if self._shares is not None and only is None:
            self._shares.claimed(queues, claim.rows, more=True)  # which a policy may hold
        return Claimed(claim.rows, claim.suspects), claim.again

    def _one_lease(self, limit: int) -> float:
        """For how long all rows of a claim are leased: for less if some of `limit` may wait here
        for a worker.
        """
        lease = self._settings.release_stuck_timeout
        return lease if self._starting() >= limit else prefetch_lease(lease)

    def _note_lease(self, rows: Sequence[ClaimedMessage], lease: float) -> None:
        if lease < self._settings.release_stuck_timeout:
            for row in rows:
                row.prefetched = True

    async def _claim_suspect(self, *, alone: bool) -> None:
        s = self._settings
        message_id = self._solo_runs.next_suspect(self._clock.monotonic(), alone=alone)
        if s.policies:
            rows, _ = await self._claim_scheduled(1, None, only=message_id)
        else:
            with self._noting_the_unanswered() as token:
                lease = s.release_stuck_timeout
                queues = self._registration.open
                rows = await self._store.claim_one(
                    message_id, queues, lease, token, ordered=s.ordered
                )
        if rows:
            self._solo_runs.started(alone=alone, now=self._clock.monotonic())
            self._add(rows)

    def _add(self, rows: Sequence[ClaimedMessage]) -> None:
        # The answer may have come late, as after a stall of the process: of the lease is left what
        # is left since the claim was sent.
        self._inflight.add(rows, self._holder, self._asked_at)
        self._inflight.metrics.claimed(rows)
        if len(self._registration.open) < len(self._settings.queues):
            # A queue may have been paused while the claim ran.
            self._inflight.keep_waiting(self._registration.open)

    @contextmanager
    def _noting_the_unanswered(self) -> Iterator[UUID]:
        """A new token; kept if it is not known whether the claim with it was committed."""
        token = self._registration.token()
        self._asked_at = self._clock.monotonic()
        try:
            yield token
        except (UnknownOutcomeError, CancelledError):
            self._unanswered.append(token)
            raise

    async def release_unanswered(self) -> None:
        """Give back what claims without an answer may have leased: no worker has it.

        Raises:
            TransientStoreError: not all of it; call again.
        """
        while self._unanswered:
            await self._store.release_claim(self._settings.queues, self._unanswered[-1])
            self._unanswered.pop()

    async def _try_release_unanswered(self) -> None:
        if not self._unanswered or self._clock.monotonic() < self._release_again_at:
            return
        try:
            await self.release_unanswered()
        except StoreError as error:
            # Claims go on: at worst these rows come back when their leases have run out.
            self._release_again_at = self._clock.monotonic() + RELEASE_PAUSE
            text = (
                f"claims without an answer are not given back yet, again in {RELEASE_PAUSE} s: "
                f"{error}"
            )
            # A passing failure is told by the claim that meets it, too.
            self._log(
                logging.DEBUG if isinstance(error, TransientStoreError) else logging.WARNING, text
            )

    def _find_room(self) -> int:
        """How many rows to claim now; 0 if it is not worth a claim."""
        s = self._settings
        held = self._inflight
        window = self.window()
        # A claim of one row for each finished one would cost a statement a message.
        worthwhile = max(1, min(s.fetch_batch_size // 2, window - window // 2))
        held.ask_below(window - worthwhile)
        # Where few wait, what is more urgent than they are must be seen before they are all.
        self._look_interval = SCAN_INTERVAL if window >= s.fetch_batch_size else HORIZON / 2
        limit = self.room(window)
        busy = held.waiting.qsize() > 0
        return limit if limit >= (worthwhile if busy else 1) else 0

    def _starting(self) -> int:
        """Of the next rows, how many start at once."""
        a_run = self._settings.run_size
        return max(0, self._free * a_run - self._inflight.waiting.qsize())

    def _wait_for_room(self) -> float:
        # Workers and flush wake the loop; a lost lease makes room without either.
        self._inflight.want_room()
        return self._not_beyond_stale(min(1.0, self._settings.max_fetch_interval))

    def _not_beyond_stale(self, wait: float) -> float:
        stale_in = self._inflight.stale_in(self._longest_wait)
        return wait if stale_in is None else min(wait, max(stale_in, SHORTEST_STALE_WAIT))

    def _next_wait(self, claimed: int, limit: int, again: float | None, *, took: float) -> float:
        s = self._settings
        if claimed >= limit or self._more or (claimed and again == 0):
            self._idle_wait = self._first_wait
            # Until a handler has ended, its time is unknown and a fetch is small, however many
            # messages are due: no pause then.
            interval = s.min_fetch_interval if self._inflight.times.recent else 0.0
            self._not_before = self._clock.monotonic() + interval
            return interval
        if again == 0:
            # More to look at, or another's turn: soon, but for a quarter of the time at most.
            return max(s.min_fetch_interval, 3 * took)
        if self._gated and again is not None:
            return min(again, s.max_fetch_interval)
        self._look_again = True
        if claimed:
            self._idle_wait = self._first_wait
        return self._idle(again)

    def _idle(self, again: float | None) -> float:
        """Seconds to wait at an empty queue, and longer the next time; `again` is a limit."""
        wait = self._idle_wait
        self._idle_wait = min(self._settings.max_fetch_interval, self._idle_wait * 1.5)
        limits = [] if again is None else [again]
        if self.ready.slow:
            limits.append(SLOW_IDLE_WAIT)
        return self._not_beyond_stale(min([wait, *self.ready.next_due(), *limits]))


def _met(rows: Claimed) -> int:
    """How much of its room a claim has used."""
    return len(rows) + len(rows.suspects)

"""Claim as much as there is room for, and decide when to look again."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.rows import Claimed, ClaimedMessage, Holder, ReadyPair, ReadyPairs
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.flow.deliver.claim import RELEASE_PAUSE, Claimer, ClaimResult, Found, Pace
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcomes import MOST_APART
from faststream_sqlbroker.flow.deliver.prefetch import (
    HORIZON,
    LONGEST_WAIT,
    PrefetchBytes,
    body_bytes,
)
from faststream_sqlbroker.flow.deliver.ready import SCAN_INTERVAL, Mode, Ready
from faststream_sqlbroker.flow.deliver.solo_run import SoloRuns, Turn
from faststream_sqlbroker.flow.fleet.lookout import EXCUSED_WAIT, Lookout
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.settings import ConsumerSettings
from faststream_sqlbroker.flow.wakeup import ALL

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

SHORTEST_STALE_WAIT = 0.05
"""Seconds between two looks for rows that wait for too long."""
SLOW_IDLE_WAIT = 1.0
"""Most seconds without a claim while looks, which would tell what is due next, are rare."""
NO_ROOM_WAIT = 1.0
"""Most seconds until it is seen whether there is room: a lost lease makes some without a signal."""


class Fetcher:
    """Fills the buffer of one subscriber.

    `Ready.mode` says whether the next claim looks first, `Pace` when it comes.
    Under policies no claim looks: each reads in its own transaction. Queues are visited in
    rotation.
    """

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        settings: ConsumerSettings,
        log: Log,
        registration: Registration,
        holder: Holder | None = None,
        lookout: Lookout | None = None,
    ) -> None:
        """`settings` gives batch size, intervals and the length of a lease; `registration` the
        queues and tokens.

        `holder` goes with each claimed row. While nothing is due, the `lookout` looks.
        """
        self._inflight = inflight
        self._settings = settings
        self._registration = registration
        self._holder = holder
        self._clock = inflight.clock
        self.ready = Ready(store, settings.queues, self._clock, may_guess=not settings.ordered)
        self.ready.restrict(registration.open)
        self.pace = Pace(settings, self._clock)
        self._lookout = Lookout(store, self._clock) if lookout is None else lookout
        self._claimer = Claimer(store, inflight, settings, log, registration, self.ready)
        self._solo_runs = SoloRuns()
        self._suspicion = Suspicion.under(settings.max_deliveries)
        self._look_interval = SCAN_INTERVAL
        self._log = log
        self._bytes = inflight.prefetch = PrefetchBytes(settings)
        # A full fetch is enough until the next one.
        self._horizon = max(HORIZON, settings.min_fetch_interval)

    def hint(self, queues: frozenset[str] = ALL) -> None:
        """Something may have arrived in `queues`: claim, look before the next claim, and poll
        quickly again.
        """
        self.ready.woken(queues)
        self.pace.quicken()

    def reopened(self) -> None:
        """Other queues are open than before: what waits of those that are not goes back, and the
        next claim looks.
        """
        self.ready.restrict(self._registration.open)
        self._inflight.keep_waiting(self._registration.open)

    @property
    def open(self) -> Sequence[str]:
        """The queues that are looked at."""
        return self.ready.queues

    @property
    def all_queues(self) -> Sequence[str]:
        """Its queues, also those that are paused."""
        return self._settings.queues

    @property
    def rests(self) -> bool:
        """Whether it waits for nothing but time, as long as it may."""
        if self._settings.told_only:
            return self.ready.nothing_due
        return self.ready.mode is Mode.IDLE and self.pace.rests

    @property
    def longest_rest(self) -> float:
        """Seconds from a look to the next."""
        return self._settings.max_fetch_interval

    @property
    def looked_at(self) -> float:
        """When the last look ended (monotonic seconds)."""
        return self.ready.looked_at

    def saw(self, found: ReadyPairs) -> None:
        """Another subscriber's look has found this in the queues that are open: claim it."""
        self.ready.saw(found)
        self._inflight.signals.looked()

    @property
    def _longest_wait(self) -> float:
        """Seconds that a row waits behind running handlers."""
        return LONGEST_WAIT + self._settings.min_fetch_interval

    def window(self) -> int:
        """Rows that may wait here: those that the workers will start soon, or at once."""
        s = self._settings
        a_run = s.run_size
        capacity = int(s.fetch_batch_size * s.max_not_processed_factor)
        free = self._claimer.free
        starts = self._inflight.times.starts_ahead(s.max_workers, free, self._horizon)
        rows = min(capacity, starts * a_run) + self._inflight.missing
        return int(min(rows, self._bytes.most_rows))

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
        rows = min(s.fetch_batch_size, window - held.waiting.qsize())
        return rows if not self._bytes.counts else int(min(rows, self._room_in_bytes()))

    def _room_in_bytes(self) -> float:
        """Rows that may be claimed so that not too many bytes wait."""
        held = self._inflight
        # What has ended is held until the next flush, which asks for more.
        ended = (held.held[each.id] for each in held.queued if each.id in held.held)
        if body_bytes(ended) >= self._bytes.limit:
            return 0
        return self._bytes.room(held.prefetched())

    async def tick(self) -> float:
        """Claim once; seconds until the next look."""
        if (early := self.pace.too_early) > 0:
            return early
        await self._claimer.try_release_unanswered()
        if self._claimer.free <= 0:
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
        self._claimer.look_at_all()

    async def claim_now(self, pairs: Sequence[ReadyPair], limit: int) -> tuple[int, float | None]:
        """Claim from `pairs` without regard to when the last claim was, suspects among the others;
        how many rows, and in how many seconds to look again, if the claim knows.

        Policies look at all open queues.
        """
        if self._settings.policies:
            result = await self._claimer.claim_scheduled(limit, None)
        else:
            result = await self._claimer.claim(pairs, limit, None)
        self._add(result.rows)
        return len(result.rows), result.again

    async def release_unanswered(self) -> None:
        """Give back what claims without an answer may have leased: no worker has it.

        Raises:
            TransientStoreError: not all of it; call again.
        """
        await self._claimer.release_unanswered()

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
            if self._settings.policies:
                result = await self._claimer.claim_scheduled(limit, suspicion)
            else:
                result = await self._claim_ready(limit, suspicion)
        finally:
            metrics.claim_took(self._clock.monotonic() - now)
        self._solo_runs.met(result.rows.suspects, now)
        if not result.met:
            self._solo_runs.nothing_else(now)
        fits = self._add_what_fits(result.rows)
        wait = self._next_wait(result, limit, took=self._clock.monotonic() - now, fits=fits)
        if result.gated and not result.rows and result.again is not None:
            metrics.policy_wait("claim", wait)
        return 0.0 if self._solo_runs.waits(self._clock.monotonic()) else wait

    async def _claim_ready(self, limit: int, suspicion: Suspicion | None) -> ClaimResult:
        """Claim in the way that may find rows at the least cost, by the mode."""
        ready = self.ready
        claimer = self._claimer
        if ready.mode is Mode.BLIND:
            return await claimer.claim(ready.known(), limit, suspicion)
        if ready.mode is Mode.GUESS:
            guessed = await self._claim_hinted(limit, suspicion)
            if guessed is not None and guessed.rows:
                return guessed
        if ready.mode is not Mode.FOLLOW or ready.age >= self._look_interval:
            if self.rests and self._lookout.looks_for(self):
                return ClaimResult(Claimed())
            await self._scan()
        due = ready.due()
        return await claimer.claim(due, limit, suspicion) if due else ClaimResult(Claimed())

    async def _claim_hinted(self, limit: int, suspicion: Suspicion | None) -> ClaimResult | None:
        """Claim from the queues of the last wake-up without a look; None if it is too long ago."""
        # A hint that has waited for room is no longer worth a guess: a look costs less than that
        # wait, and few messages are claimed at a time.
        hint = self.ready.take_hint(HORIZON / 2)
        if hint is None:
            return None
        # Without a look in between, queues with nothing new would be left out for long.
        queues = None if self._claimer.compares_queues or not hint else hint
        return await self._claimer.claim(self.ready.known(queues), limit, suspicion)

    async def _scan(self) -> None:
        try:
            # One that is told must know of leases, too, before it waits.
            shared = self.rests or self._settings.told_only
            await self.ready.scan(partial(self._lookout.look, self) if shared else None)
        finally:
            # Also after a scan that was cut off because it was slow.
            if self.ready.mode is Mode.BLIND:
                self._inflight.signals.scans_slow()

    async def _claim_suspect(self, *, alone: bool) -> None:
        message_id = self._solo_runs.next_suspect(self._clock.monotonic(), alone=alone)
        rows = await self._claimer.claim_one(message_id)
        if rows:
            self._solo_runs.started(alone=alone, now=self._clock.monotonic())
            self._add(rows)

    def _add_what_fits(self, rows: Sequence[ClaimedMessage]) -> bool:
        """Add `rows`, and give back those with which too many bytes would wait; whether all fit."""
        sizes = self._bytes
        sizes.note(rows)
        if not sizes.counts:
            self._add(rows)
            return True
        surplus = rows[sizes.keeps(rows, self._inflight.prefetched()) :]
        if surplus:
            sizes.tell(self._log, surplus, self._clock.monotonic())
            self._inflight.metrics.gave_back(len(surplus))
        self._add(rows)
        if surplus:
            self._inflight.give_back_surplus(surplus)
        if sizes.drains:
            self._inflight.end_gathering()
        return not surplus

    def _after_surplus(self) -> float:
        """Let claims find again what was given back; seconds until the next."""
        self.ready.begin_anew()
        self.look_at_all()
        return self.pace.after_full(pause=True)

    def _add(self, rows: Sequence[ClaimedMessage]) -> None:
        # The answer may have come late, as after a stall of the process: of the lease is left what
        # is left since the claim was sent.
        self._inflight.add(rows, self._holder, self._claimer.asked_at)
        self._inflight.metrics.claimed(rows)
        if len(self._registration.open) < len(self._settings.queues):
            # A queue may have been paused while the claim ran.
            self._inflight.keep_waiting(self._registration.open)

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

    def _wait_for_room(self) -> float:
        # Workers and flush wake the loop; a lost lease makes room without either.
        self._inflight.want_room()
        return self._not_beyond_stale(min(NO_ROOM_WAIT, self._settings.max_fetch_interval))

    def _not_beyond_stale(self, wait: float) -> float:
        stale_in = self._inflight.stale_in(self._longest_wait)
        return wait if stale_in is None else min(wait, max(stale_in, SHORTEST_STALE_WAIT))

    def _next_wait(self, result: ClaimResult, limit: int, *, took: float, fits: bool) -> float:
        """Seconds until the next claim, by what the last one has found, and whether all of it fits
        into `max_prefetch_bytes`.
        """
        if not fits:
            return self._after_surplus()
        found = result.found(limit)
        if found is Found.FULL:
            # Until a handler has ended, its time is unknown: a fetch that is smaller for that
            # reason has given each free worker its share, and the next waits for one of them.
            pause = limit >= self._settings.fetch_batch_size or bool(self._inflight.times.recent)
            return self.pace.after_full(pause=pause)
        if found is Found.UNREAD:
            return self.pace.after_unread(took)
        if found is Found.HELD and result.again is not None:
            # Its time is an estimate: a worker may be free before.
            self._inflight.want_room()
            return self.pace.until(result.again)
        self.ready.claimed_fewer()
        if result.met:
            self.pace.quicken()
        return self._idle(result.again)

    def _idle(self, again: float | None) -> float:
        """Seconds to wait at an empty queue, and longer the next time; `again` is a limit."""
        wait = self.pace.idle()
        if self._settings.told_only and self.ready.nothing_due:
            wait = self._lookout.wait_when_told()
        limits = [wait, *self.ready.next_due()]
        if again is not None:
            limits.append(again)
        if self.ready.mode is Mode.BLIND:
            limits.append(SLOW_IDLE_WAIT)
        if self._claimer.has_unanswered:
            limits.append(RELEASE_PAUSE)
        wait = self._not_beyond_stale(min(limits))
        # The end of another's look wakes the loop, which must not spin until then.
        return max(wait, EXCUSED_WAIT) if self.rests and self._lookout.looks_for(self) else wait

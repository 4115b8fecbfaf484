"""The fetch loop: claim as many rows as there is capacity for, and decide when to poll again."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.rows import (
    ClaimedMessage,
    ClaimedMessages,
    HandlerServices,
    ReadyPair,
    ReadyPairs,
)
from faststream_sqlbroker.core.suspects import Suspect, SuspectRule
from faststream_sqlbroker.flow.deliver.claim import (
    RELEASE_PAUSE,
    Claimer,
    ClaimResult,
    ClaimYield,
    Pace,
)
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcomes import MAX_QUARANTINED
from faststream_sqlbroker.flow.deliver.prefetch import (
    HORIZON,
    MAX_PREFETCH_WAIT,
    PrefetchLimiter,
    count_body_bytes,
)
from faststream_sqlbroker.flow.deliver.ready import SCAN_INTERVAL, Mode, ReadyTracker
from faststream_sqlbroker.flow.deliver.solo_run import ClaimTarget, SoloScheduler
from faststream_sqlbroker.flow.fleet.lookout import MIN_RECHECK_WAIT, SharedPoller
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.settings import ConsumerSettings
from faststream_sqlbroker.flow.wakeup import ALL

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

MIN_STALE_WAIT = 0.05
"""Seconds between two checks for rows that have waited too long."""
SLOW_IDLE_WAIT = 1.0
"""Maximum seconds without a claim while polls, which would return the next due time, are rare."""
NO_CAPACITY_WAIT = 1.0
"""Maximum seconds until capacity is checked again: a lost lease frees some without a signal."""


class Fetcher:
    """Fills the buffer of a subscriber.

    `ReadyTracker.mode` decides whether the next claim polls first, `Pace` when it comes. Under
    policies no claim polls: each reads in its own transaction. Queues are visited in rotation.
    """

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        settings: ConsumerSettings,
        log: Log,
        registration: Registration,
        holder: HandlerServices | None = None,
        poller: SharedPoller | None = None,
    ) -> None:
        """Take batch size, intervals and lease from `settings`, queues and tokens from
        `registration`.

        `holder` goes with each claimed row. While nothing is due, the shared `poller` polls.
        """
        self._inflight = inflight
        self._settings = settings
        self._registration = registration
        self._holder = holder
        self._clock = inflight.clock
        self.ready = ReadyTracker(
            store, settings.queues, self._clock, can_guess=not settings.ordered
        )
        self.ready.set_queues(registration.open_queues)
        self.pace = Pace(settings, self._clock)
        self._poller = SharedPoller(store, self._clock) if poller is None else poller
        self._claimer = Claimer(store, inflight, settings, log, registration, self.ready)
        self._solo_runs = SoloScheduler()
        self._suspect_rule = SuspectRule.from_max_deliveries(settings.max_deliveries)
        self._poll_interval = SCAN_INTERVAL
        self._log = log
        self._limiter = inflight.prefetch = PrefetchLimiter(settings)
        # A full fetch is enough until the next one.
        self._horizon = max(HORIZON, settings.min_fetch_interval)

    def on_hint(self, queues: frozenset[str] = ALL) -> None:
        """Handle a hint: messages may have arrived in `queues`, so claim and poll quickly again.

        A hint is a wake-up without any promise, such as a publisher's; `ALL` means any queue.
        """
        self.ready.add_hint(queues)
        self.pace.reset()

    def on_queues_changed(self) -> None:
        """Release waiting rows of closed queues and poll before the next claim.

        Called when the open queues have changed: paused ones are closed.
        """
        self.ready.set_queues(self._registration.open_queues)
        self._inflight.release_other_queues(self._registration.open_queues)

    @property
    def open_queues(self) -> Sequence[str]:
        """Queues that are polled."""
        return self.ready.queues

    @property
    def all_queues(self) -> Sequence[str]:
        """All queues of the subscriber, paused or not."""
        return self._settings.queues

    @property
    def is_idle(self) -> bool:
        """True if the subscriber waits only for time to pass: for the longest interval, or, if it
        polls only when notified, while no message is due.

        Idle subscribers of a process share one poll.
        """
        if self._settings.notify_only:
            return self.ready.has_nothing_due
        return self.ready.mode is Mode.IDLE and self.pace.is_idle

    @property
    def max_poll_interval(self) -> float:
        """Maximum seconds between two polls while idle; infinite if the subscriber polls only when
        notified.
        """
        return self._settings.max_fetch_interval

    @property
    def polled_at(self) -> float:
        """Time when the last poll ended (monotonic seconds)."""
        return self.ready.polled_at

    def on_poll_result(self, result: ReadyPairs) -> None:
        """Take over what another subscriber's poll has found in the open queues.

        Idle subscribers of a process share polls. The signal wakes the fetch loop, which claims.
        """
        self.ready.apply_poll_result(result)
        self._inflight.signals.shared_poll_done()

    @property
    def _max_wait(self) -> float:
        """Seconds that a row may wait behind running handlers, after which the row is released."""
        return MAX_PREFETCH_WAIT + self._settings.min_fetch_interval

    def get_window(self) -> int:
        """Return how many rows may wait for workers: as many as the workers will start soon.

        "Soon" is `HORIZON` seconds (0.2), or `min_fetch_interval` if longer, estimated by recent
        handler durations.
        """
        settings = self._settings
        run_size = settings.run_size
        capacity = int(settings.fetch_batch_size * settings.max_not_processed_factor)
        free_workers = self._claimer.free_workers
        starts = self._inflight.times.count_upcoming_starts(
            settings.max_workers, free_workers, self._horizon
        )
        # Each start takes a message or a batch; batches that are being filled take more at once.
        rows = min(capacity, starts * run_size) + self._inflight.missing_count
        return int(min(rows, self._limiter.max_rows))

    def get_capacity(self, window: int) -> int:
        """Return how many rows may be claimed while `window` rows may wait for workers.

        It is 0 while too many outcomes wait to be written, or are quarantined (repeated after a
        failure), so that these do not pile up.
        """
        settings = self._settings
        inflight = self._inflight
        unwritten = len(inflight.queued) + inflight.writing_count
        if (
            unwritten >= 2 * max(settings.flush_batch_size, settings.fetch_batch_size)
            or inflight.quarantined_count >= MAX_QUARANTINED
        ):
            return 0
        rows = min(settings.fetch_batch_size, window - inflight.waiting.qsize())
        return rows if not self._limiter.is_counting else int(min(rows, self._get_byte_capacity()))

    def _get_byte_capacity(self) -> float:
        """Return how many rows may be claimed within `max_prefetch_bytes`.

        The sizes of rows are unknown before their claim, so the mean of recent rows is used.
        """
        inflight = self._inflight
        # Ended rows are held until the next flush, which requests more.
        ended_rows = (
            inflight.held[settlement.id]
            for settlement in inflight.queued
            if settlement.id in inflight.held
        )
        if count_body_bytes(ended_rows) >= self._limiter.limit:
            return 0
        return self._limiter.get_capacity(inflight.measure_prefetched())

    async def tick(self) -> float:
        """Claim once; return the seconds until the next claim."""
        if (wait := self.pace.remaining_pause) > 0:
            return wait
        await self._claimer.try_release_unanswered()
        if self._claimer.free_workers <= 0:
            # All handlers take long: other processes may start the rows that wait here sooner.
            self._inflight.release_stale(self._max_wait)
        if self._registration.stopping or not self._registration.open_queues:
            return self._request_capacity()
        is_alone = self._inflight.is_empty
        now = self._clock.monotonic()
        target = self._solo_runs.choose_target(is_alone=is_alone, now=now)
        if target is ClaimTarget.DRAIN:
            # A suspect, which may have killed its process, is to run alone: give back the others.
            self._inflight.release_waiting()
            # Their due times lie before the last claimed row, where claims would begin.
            self.ready.reset_begin()
        if target in (ClaimTarget.DRAIN, ClaimTarget.NONE):
            return self._request_capacity()
        if target is ClaimTarget.SUSPECT:
            await self._claim_suspect(is_alone=is_alone)
            return 0.0
        return await self._claim_due(target, now)

    def reset_position(self) -> None:
        """Let the next claim read from the beginning, not from the end of the last claim."""
        self._claimer.reset_position()

    async def claim_now(self, pairs: Sequence[ReadyPair], limit: int) -> tuple[int, float | None]:
        """Claim from `pairs` regardless of the last claim, without treating suspects apart.

        For `TestSqlBroker`, which claims step by step. A suspect is a message that may have killed
        its process. Policies include all open queues.

        Returns:
            The number of rows, and the seconds until the next claim if known.
        """
        if self._settings.policies:
            result = await self._claimer.claim_with_policies(limit, None)
        else:
            result = await self._claimer.claim(pairs, limit, None)
        self._add(result.rows)
        return len(result.rows), result.retry_in

    async def release_unanswered(self) -> None:
        """Release rows that claims without an answer may have leased: no worker has such rows.

        Raises:
            TransientStoreError: some may remain; call again.
        """
        await self._claimer.release_unanswered()

    async def _claim_due(self, target: ClaimTarget, now: float) -> float:
        """Claim due rows up to the capacity; return the seconds until the next claim.

        Suspects (messages that may have killed their process) are only noted, to run alone later.
        """
        limit = self._choose_limit()
        if limit < 1:
            return self._request_capacity()
        suspect_rule = self._suspect_rule
        if suspect_rule is not None and target is ClaimTarget.OTHERS:
            # Known suspects must not use up the limit of this claim.
            suspect_rule = suspect_rule.as_silent()
        metrics = self._inflight.metrics
        try:
            if self._settings.policies:
                result = await self._claimer.claim_with_policies(limit, suspect_rule)
            else:
                result = await self._claim_ready(limit, suspect_rule)
        finally:
            metrics.record_claim_duration(self._clock.monotonic() - now)
        self._add_suspects(result.rows.suspects, now)
        if not result.met_count:
            self._solo_runs.skip_others(now)
        fits = self._add_fitting(result.rows)
        wait = self._get_next_wait(result, limit, duration=self._clock.monotonic() - now, fits=fits)
        if result.is_gated and not result.rows and result.retry_in is not None:
            metrics.record_policy_wait("claim", wait)
        return 0.0 if self._solo_runs.has_waiting(self._clock.monotonic()) else wait

    async def _claim_ready(self, limit: int, suspect_rule: SuspectRule | None) -> ClaimResult:
        """Claim with the method that is likely to find rows at the lowest cost, by the mode.

        A poll finds which pairs of queue and priority have due rows. A claim without a poll before
        may find nothing; a poll costs a statement of its own, or is slow (mode BLIND).
        """
        ready = self.ready
        claimer = self._claimer
        if ready.mode is Mode.BLIND:
            return await claimer.claim(ready.list_known(), limit, suspect_rule)
        if ready.mode is Mode.GUESS:
            result = await self._claim_hinted(limit, suspect_rule)
            if result is not None and result.rows:
                return result
        if ready.mode is not Mode.FOLLOW or ready.age >= self._poll_interval:
            if self.is_idle and self._poller.is_polling_for(self):
                # Another subscriber's poll has these queues, too; its result wakes this loop.
                return ClaimResult(ClaimedMessages())
            await self._scan()
        pairs = ready.list_due()
        return (
            await claimer.claim(pairs, limit, suspect_rule)
            if pairs
            else ClaimResult(ClaimedMessages())
        )

    async def _claim_hinted(
        self, limit: int, suspect_rule: SuspectRule | None
    ) -> ClaimResult | None:
        """Claim from the queues of the last wake-up without a poll before.

        Return None if there was no wake-up, or if it is too old to be worth the guess.
        """
        # A hint that had to wait for capacity is no longer worth a guess: a poll costs less than
        # that wait, and few messages are claimed at a time.
        hint = self.ready.take_hint(HORIZON / 2)
        if hint is None:
            return None
        # Without a poll in between, queues without new messages would be left out for long.
        # An empty hint and None mean all queues.
        queues = None if self._claimer.needs_all_queues or not hint else hint
        return await self._claimer.claim(self.ready.list_known(queues), limit, suspect_rule)

    async def _scan(self) -> None:
        """Poll for pairs with claimable messages, due now or later; an idle or notified subscriber
        shares the poll.
        """
        try:
            # A notified subscriber must know of leases, too, before it waits.
            is_shared = self.is_idle or self._settings.notify_only
            await self.ready.scan(partial(self._poller.poll_for, self) if is_shared else None)
        finally:
            # Also after a poll that was cut off because it was slow: polls move to the background.
            if self.ready.mode is Mode.BLIND:
                self._inflight.signals.scans_slow()

    def _add_suspects(self, suspects: Mapping[int, Suspect], now: float) -> None:
        """Note the `suspects` of a claim, which run alone later; log new suspects.

        A suspect is a message that may have killed its process. Other messages wait for it, too.
        """
        if new_ids := self._solo_runs.add_suspects(suspects, now):
            text = (
                f"deliveries of messages {new_ids} of {', '.join(self._settings.queues)} ended "
                "without an outcome, so they may kill their process: each runs alone, and claims "
                "of other messages pause for it"
            )
            self._log(logging.WARNING, text, message_id=new_ids[0])

    async def _claim_suspect(self, *, is_alone: bool) -> None:
        """Claim a suspect, a message that may have killed a process before.

        With `is_alone` the process holds nothing else, and other claims wait for the suspect's end.
        Otherwise it has waited too long for that, and runs with others.
        """
        message_id = self._solo_runs.pop_suspect(self._clock.monotonic(), is_alone=is_alone)
        rows = await self._claimer.claim_one(message_id)
        if rows:
            self._solo_runs.record_start(is_alone=is_alone, now=self._clock.monotonic())
            self._add(rows)

    def _add_fitting(self, rows: Sequence[ClaimedMessage]) -> bool:
        """Add `rows`, and release rows beyond `max_prefetch_bytes`; return True if all fit.

        A claim cannot know the sizes before. All rows are added first: a release is an outcome,
        which is written for a held row.
        """
        limiter = self._limiter
        limiter.record_claim(rows)
        if not limiter.is_counting:
            self._add(rows)
            return True
        surplus = rows[limiter.count_fitting(rows, self._inflight.measure_prefetched()) :]
        if surplus:
            limiter.log_surplus(self._log, surplus, self._clock.monotonic())
            self._inflight.metrics.record_surplus(len(surplus))
        self._add(rows)
        if surplus:
            self._inflight.release_surplus(surplus)
        if limiter.is_draining:
            # The next message is so large that nothing else may wait: no batch will get more.
            self._inflight.finish_batches()
        return not surplus

    def _get_surplus_wait(self) -> float:
        """Return the seconds until the next claim after rows beyond the byte limit were released.

        The position of the last claim is reset, or the next claims would begin after these rows.
        """
        self.ready.reset_begin()
        self.reset_position()
        return self.pace.start_full_pause(pause=True)

    def _add(self, rows: Sequence[ClaimedMessage]) -> None:
        """Hand claimed `rows` to the workers; release rows of a queue that was paused since.

        From now on this process holds the rows, which wait in the buffer until a worker takes them.
        """
        # The answer may have come late, as after a stall of the process: the lease counts from the
        # request.
        self._inflight.add(rows, self._holder, self._claimer.requested_at)
        self._inflight.metrics.record_claim(rows)
        if len(self._registration.open_queues) < len(self._settings.queues):
            # A queue may have been paused while the claim ran.
            self._inflight.release_other_queues(self._registration.open_queues)

    def _choose_limit(self) -> int:
        """Return how many rows to claim now; 0 if a claim is not worthwhile.

        While rows wait, a claim is worthwhile only from half a window on: one claim for each ended
        row would cost a statement per message. The window is the number of rows that may wait for
        workers.
        """
        settings = self._settings
        inflight = self._inflight
        window = self.get_window()
        # Claiming one row for each finished one would cost a statement per message.
        min_claim = max(1, min(settings.fetch_batch_size // 2, window - window // 2))
        # With so few rows left, workers wake this loop.
        inflight.set_low_water(window - min_claim)
        # Where few rows wait, poll more often: more urgent messages must be seen before all of
        # these have run.
        self._poll_interval = SCAN_INTERVAL if window >= settings.fetch_batch_size else HORIZON / 2
        limit = self.get_capacity(window)
        has_waiting = inflight.waiting.qsize() > 0
        return limit if limit >= (min_claim if has_waiting else 1) else 0

    def _request_capacity(self) -> float:
        """Request a wake-up for free capacity; return the seconds until the next own check.

        Called when nothing may be claimed now, for example because workers are busy.
        """
        # Workers and the flush wake the loop; a lost lease frees capacity without either.
        self._inflight.request_capacity()
        return self._limit_to_stale(min(NO_CAPACITY_WAIT, self._settings.max_fetch_interval))

    def _limit_to_stale(self, wait: float) -> float:
        """Limit `wait` to the time when a waiting row becomes stale and must be released.

        A stale row has waited for busy workers so long that other processes should have it.
        """
        stale_in = self._inflight.get_stale_wait(self._max_wait)
        return wait if stale_in is None else min(wait, max(stale_in, MIN_STALE_WAIT))

    def _get_next_wait(
        self, result: ClaimResult, limit: int, *, duration: float, fits: bool
    ) -> float:
        """Return the seconds until the next claim, by the result of the last claim.

        `fits` is True if all rows fit into `max_prefetch_bytes`.
        """
        if not fits:
            return self._get_surplus_wait()
        claim_yield = result.get_yield(limit)
        if claim_yield is ClaimYield.FULL:
            # Until a handler has ended, its duration is unknown, and a claim takes only as many
            # rows as free workers need. The next claim waits for a worker anyhow: no pause.
            pause = limit >= self._settings.fetch_batch_size or bool(self._inflight.times.recent)
            return self.pace.start_full_pause(pause=pause)
        if claim_yield is ClaimYield.UNREAD:
            return self.pace.get_unread_pause(duration)
        if claim_yield is ClaimYield.HELD and result.retry_in is not None:
            # That time is an estimate: a worker may be free earlier.
            self._inflight.request_capacity()
            return self.pace.get_blocked_pause(result.retry_in)
        self.ready.record_fewer()
        if result.met_count:
            self.pace.reset()
        return self._get_idle_wait(result.retry_in)

    def _get_idle_wait(self, retry_in: float | None) -> float:
        """Return the wait at an empty queue, longer each time and limited by `retry_in`.

        Other limits are the next due time that a poll has found, and work to repeat soon.
        """
        wait = self.pace.advance_idle_pause()
        if self._settings.notify_only and self.ready.has_nothing_due:
            wait = self._poller.get_notified_wait()
        limits = [wait, *self.ready.list_next_due()]
        if retry_in is not None:
            limits.append(retry_in)
        if self.ready.mode is Mode.BLIND:
            limits.append(SLOW_IDLE_WAIT)
        if self._claimer.has_unanswered:
            limits.append(RELEASE_PAUSE)
        wait = self._limit_to_stale(min(limits))
        # The end of the shared poll wakes the loop, which must not spin until then.
        return (
            max(wait, MIN_RECHECK_WAIT)
            if self.is_idle and self._poller.is_polling_for(self)
            else wait
        )

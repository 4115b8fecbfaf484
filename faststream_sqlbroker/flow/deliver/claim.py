"""Claims of one subscriber: their requests, their pace, their order of queues.

It also remembers claims without an answer, which may have leased rows.
"""

import logging
from asyncio import CancelledError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING
from uuid import UUID

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.rows import ClaimedMessage, ClaimedMessages, Prefetch, ReadyPair
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.parts.ordered import Cursors
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.prefetch import get_prefetch_lease
from faststream_sqlbroker.flow.deliver.ready import ReadyTracker
from faststream_sqlbroker.flow.fleet.lookout import MAX_SILENCE
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.settings import ConsumerSettings

if TYPE_CHECKING:
    from faststream_sqlbroker.database.policies.request import PolicyClaim
    from faststream_sqlbroker.database.store import Store


FIRST_IDLE_WAIT = 0.01
"""Seconds to the first poll after the queue ran dry; each following wait is half as long again."""
IDLE_GROWTH = 1.5
"""Factor from one idle wait to the next."""
UNREAD_SHARE = 3
"""Pause of a claim that has to read on, as a multiple of its duration."""


class ClaimYield(Enum):
    """Yield of a claim."""

    FULL = "as many rows as the capacity, or more rows are known to be claimable"
    UNREAD = "not everything was read yet, or another process claims at the same time"
    HELD = "no other message may start before a known time, whatever arrives"
    FEWER = "fewer rows than the capacity: no other message is due"


@dataclass(slots=True)
class ClaimResult:
    """Result of a claim."""

    rows: ClaimedMessages
    retry_in: float | None = None
    """Seconds until the next claim; None if unknown."""
    is_gated: bool = False
    """True if nothing more can start before that time, whatever arrives."""
    has_more: bool = False
    """True if there is more to claim at once."""

    @property
    def met_count(self) -> int:
        """Number of rows and suspects that used capacity."""
        return len(self.rows) + len(self.rows.suspects)

    def get_yield(self, limit: int) -> ClaimYield:
        """Classify a claim of up to `limit` rows; the yield decides the pause until the next claim.

        Suspects (messages that may have killed their process) count, although they are not leased.
        A `retry_in` of 0 says that not everything due was read, or that another process claims at
        the same time; without any row the next claim follows after a pause.
        """
        if self.met_count >= limit or self.has_more or (self.met_count and self.retry_in == 0):
            return ClaimYield.FULL
        if self.retry_in == 0:
            return ClaimYield.UNREAD
        return ClaimYield.HELD if self.is_gated and self.retry_in is not None else ClaimYield.FEWER


class Pace:
    """Pauses between claims, by the yield of the last claim (seconds)."""

    def __init__(self, settings: ConsumerSettings, clock: Clock) -> None:
        """Take the minimum and the maximum pause from `settings`."""
        self._min_pause = settings.min_fetch_interval
        # With `notify_only`: no wake-up announces when a due message that was held back may start.
        self._max_pause = MAX_SILENCE if settings.notify_only else settings.max_fetch_interval
        self._clock = clock
        self._first_pause = min(max(self._min_pause, FIRST_IDLE_WAIT), self._max_pause)
        self.idle_wait = self._first_pause
        """Next pause at an empty queue."""
        self._earliest_at = float("-inf")

    @property
    def remaining_pause(self) -> float:
        """Seconds in which nothing may be claimed, even after a wake-up (`min_fetch_interval`).

        0 or less if a claim may start now.
        """
        return self._earliest_at - self._clock.monotonic()

    @property
    def is_idle(self) -> bool:
        """True if the queue has been empty for so long that the next pause is the longest."""
        return self.idle_wait >= self._max_pause

    def reset(self) -> None:
        """Start again with the shortest idle pause, because messages may have arrived."""
        self.idle_wait = self._first_pause

    def start_full_pause(self, *, pause: bool) -> float:
        """Return the pause (`min_fetch_interval`) after a claim that left more to claim.

        No claim starts before, even after a wake-up. Without `pause` it is 0, for a claim that was
        kept small on purpose.
        """
        self.reset()
        interval = self._min_pause if pause else 0.0
        self._earliest_at = self._clock.monotonic() + interval
        return interval

    def get_unread_pause(self, duration: float) -> float:
        """Return the pause before a claim that has not read everything reads on.

        The pause is a multiple of the claim's duration, so that reading takes only a share of the
        time. It is random, because claims of two processes that have met would otherwise meet
        again.
        """
        return max(self._min_pause, self._clock.add_jitter(UNREAD_SHARE * duration))

    def get_blocked_pause(self, retry_in: float) -> float:
        """Return the pause if policies let no message start within `retry_in` seconds.

        That time is an estimate, so the pause has a limit.
        """
        return min(retry_in, self._max_pause)

    def advance_idle_pause(self) -> float:
        """Return the pause at an empty queue, and make the next pause longer, up to the maximum.

        `reset` starts with the shortest again, when messages may have arrived.
        """
        wait = self.idle_wait
        self.idle_wait = min(self._max_pause, wait * IDLE_GROWTH)
        return wait


class StrideScheduler:
    """Stride scheduling of queues with weights, which decides the order of queues in a claim.

    Each message that is claimed from a queue costs that queue 1 / weight. The queue that has paid
    least comes first in the next claim; other queues use the remaining capacity. So while several
    queues have messages, claims follow the weights, to within one claim of each; an empty queue
    costs no claim. Turns are not saved up: a queue that gets messages again starts where the others
    are.
    """

    def __init__(self, queues: Sequence[str], weights: Sequence[int]) -> None:
        """Start all queues alike; `weights` are 1 or more, in the order of `queues`."""
        self._weights = dict(zip(queues, weights, strict=True))
        self._paid = dict.fromkeys(queues, 0.0)

    def sort_queues(self, requested: Iterable[str]) -> list[str]:
        """Return the queues of the next claim: the queue that has paid least comes first.

        Each claimed message costs its queue 1 / weight, so a queue of double weight gets twice as
        many. Queues that are not requested count as empty, so that they save up no claims.
        """
        queues = dict.fromkeys(requested)
        if queues:
            self._raise_to_min([queue for queue in self._paid if queue not in queues], queues)
        return sorted(queues, key=lambda queue: (self._paid[queue], -self._weights[queue]))

    def sort_pairs(self, pairs: Sequence[ReadyPair]) -> list[ReadyPair]:
        """Sort `pairs` of queue and priority by the order of their queues in the next claim.

        The pairs of a queue keep their order.
        """
        rank = {
            queue: position
            for position, queue in enumerate(self.sort_queues(pair.queue for pair in pairs))
        }
        return sorted(pairs, key=lambda pair: rank[pair.queue])

    def record_claimed(
        self, requested: Iterable[str], rows: Sequence[ClaimedMessage], *, has_more: bool
    ) -> None:
        """Record that `rows` were claimed from the `requested` queues, in their order.

        Each row costs its queue 1 / weight, which decides the order of the next claim. `has_more`
        is True if there may be messages left.
        """
        queues = list(dict.fromkeys(requested))
        if not queues:
            return
        if not has_more:
            # All queues were included and are empty now: start anew, as none has to wait.
            self._paid = dict.fromkeys(self._paid, 0.0)
            return
        last_position = 0
        positions = {queue: position for position, queue in enumerate(queues)}
        for row in rows:
            self._paid[row.queue] += 1 / self._weights[row.queue]
            last_position = max(last_position, positions[row.queue])
        # The claim went on to the queue at `last_position`, so queues before it count as empty.
        self._raise_to_min(queues[:last_position], queues[last_position:])

    def record_released(self, counts: Mapping[str, int]) -> None:
        """Refund messages that were claimed and released unstarted, counted by queue.

        Each had cost its queue 1 / weight; without a refund the queue would lose its turns.
        """
        for queue, count in counts.items():
            self._paid[queue] -= count / self._weights[queue]
        self._normalize()

    def _raise_to_min(self, empty: Iterable[str], other_queues: Iterable[str]) -> None:
        """Raise the payments of `empty` queues to the minimum of `other_queues`.

        A queue pays 1 / weight for each claimed message, and the cheapest comes first. An empty
        queue would otherwise stay cheap, and get all claims once it has messages again.
        """
        min_paid = min(self._paid[queue] for queue in other_queues)
        for queue in empty:
            self._paid[queue] = max(self._paid[queue], min_paid)
        self._normalize()

    def _normalize(self) -> None:
        """Subtract the minimum from all payments: only their differences matter."""
        min_paid = min(self._paid.values())
        for queue in self._paid:
            self._paid[queue] -= min_paid


MISSED_LOG_INTERVAL = 60.0
"""Seconds between two log lines about missed slots."""
MIN_RETRY = 0.001
"""Seconds to the next claim if its time has come while this one ran."""
RELEASE_PAUSE = 5.0
"""Seconds between two tries to release a claim whose answer was lost."""


class Claimer:
    """Sends claims, and remembers their end positions and unanswered claims."""

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        settings: ConsumerSettings,
        log: Log,
        registration: Registration,
        ready: ReadyTracker,
    ) -> None:
        """Take tokens from `registration`; claimed rows are reported to `ready`."""
        self._store = store
        self._inflight = inflight
        self._settings = settings
        self._log = log
        self._registration = registration
        self._ready = ready
        self._clock = inflight.clock
        if settings.policies:
            _ = store.policies  # import now: the first claim would block the event loop
        self.reset_position()
        self._missed_count = 0
        self._logged_at = float("-inf")
        self._scheduler = (
            StrideScheduler(settings.queues, settings.weights) if settings.weights else None
        )
        self.requested_at = 0.0
        """Time when the last claim was sent (monotonic seconds)."""
        self._unanswered: list[UUID] = []
        self._release_again_at = float("-inf")

    @property
    def free_workers(self) -> int:
        """Number of workers that wait for a row."""
        return self._settings.max_workers - max(self._inflight.busy, self._inflight.running)

    @property
    def needs_all_queues(self) -> bool:
        """True if each claim must include all open queues.

        Weights take a queue that a claim omits to be empty, which then saves up no claims.
        """
        return self._scheduler is not None

    @property
    def has_unanswered(self) -> bool:
        """True if claims without an answer have not been released yet."""
        return bool(self._unanswered)

    def reset_position(self) -> None:
        """Let the next claim read from the beginning, not from the end of the last claim.

        Rows that were released have older due times, and the next claim would begin after them.
        """
        self._cursors = Cursors()
        if self._settings.policies:
            from faststream_sqlbroker.database.policies.request import ScanPosition  # noqa: PLC0415

            self._position = ScanPosition(slot_use=self._inflight.slots)

    async def claim(
        self, pairs: Sequence[ReadyPair], limit: int, suspect_rule: SuspectRule | None
    ) -> ClaimResult:
        """Claim up to `limit` rows from `pairs` of queue and priority, by their order or weights.

        With `suspect_rule`, messages that may have killed their process (suspects) are not leased,
        only reported. With weights, the scheduler learns what each queue got, for the next order.
        """
        if self._scheduler is None:
            return await self._claim_in_order(pairs, limit, suspect_rule)
        pairs = self._scheduler.sort_pairs(pairs)
        result = await self._claim_in_order(pairs, limit, suspect_rule)
        has_more = result.met_count >= limit or result.retry_in == 0
        self._scheduler.record_claimed(
            [pair.queue for pair in pairs], result.rows, has_more=has_more
        )
        return result

    async def _claim_in_order(
        self, pairs: Sequence[ReadyPair], limit: int, suspect_rule: SuspectRule | None
    ) -> ClaimResult:
        """Send a single claim for `pairs` of queue and priority, in the order given.

        Rows that must wait for a worker get the shorter prefetch lease, so that they are back soon
        if this process dies. An ordered claim has one lease for all its rows.
        """
        lease = self._settings.release_stuck_timeout
        short_lease = get_prefetch_lease(lease)
        # So many rows find a free worker; only the rows after them wait.
        starting_count = self._count_starting()
        prefetch = (
            Prefetch(starting_count, short_lease)
            if short_lease < lease and starting_count < limit
            else None
        )
        with self._track_claim() as token:
            if self._settings.ordered:
                lease = self._get_common_lease(limit)
                rows, retry_in, self._cursors = await self._store.claim_ordered(
                    pairs, limit, lease, token, self._cursors, suspect_rule=suspect_rule
                )
                self._mark_prefetched(rows, lease)
                return ClaimResult(rows, retry_in)
            rows = await self._store.claim(
                pairs, limit, lease, token, suspect_rule=suspect_rule, prefetch=prefetch
            )
        self._ready.record_claimed(pairs, rows)
        return ClaimResult(rows)

    async def claim_with_policies(
        self, limit: int, suspect_rule: SuspectRule | None, *, only: int | None = None
    ) -> ClaimResult:
        """Claim from all open queues, under the subscriber's policies.

        With `only`, claim just the message of this id: a suspect, which may have killed its
        process. Slots (starts that a Throttle allows) that were missed since the last claim are
        counted for the log, and refunded to their queues if these have weights.
        """
        from faststream_sqlbroker.database.policies.request import (  # noqa: PLC0415
            PolicyClaimRequest,
        )

        settings = self._settings
        queues = self._ready.rotate_queues()
        if self._scheduler is not None:
            self._scheduler.record_released(self._inflight.slots.missed)
            queues = self._scheduler.sort_queues(queues)
        self._missed_count += self._inflight.slots.missed.total()
        self._inflight.slots.missed.clear()
        lease = (
            settings.release_stuck_timeout if only is not None else self._get_common_lease(limit)
        )
        with self._track_claim() as token:
            request = PolicyClaimRequest(
                queues,
                limit,
                lease,
                token,
                settings.policies,
                settings.ordered,
                settings.retain_in_archive_on_reject,
                suspect_rule,
                only,
                # From these the claim estimates when each message would start.
                limit if only is not None else self._count_free_capacity(),
                settings.max_workers * settings.run_size,
                self._inflight.times.usual_duration,
                settings.batch_max_wait or 0.0,
            )
            claim, self._position = await self._store.policies.claim(request, self._position)
        self._mark_prefetched(claim.rows, lease)
        if self._inflight.slots.counts or self._inflight.slots.steps:
            self._report_slots()
        if self._scheduler is not None and only is None:
            self._scheduler.record_claimed(
                queues, claim.rows, has_more=True
            )  # a policy may hold messages back
        rows = ClaimedMessages(claim.rows, claim.suspects)
        return ClaimResult(rows, self._get_retry_seconds(claim), claim.is_blocked, claim.has_more)

    def _get_retry_seconds(self, claim: "PolicyClaim") -> float | None:
        """Return the seconds until the next claim, less the time since the last one read the
        database's clock.

        0 means that there is more to read at once, and None that no time is known; both are
        returned unchanged.
        """
        if not claim.next_claim_in or claim.read is None:
            return claim.next_claim_in
        # Not 0, which means that there is more to read.
        return max(
            MIN_RETRY, claim.next_claim_in - (self._clock.monotonic() - claim.read.answered_at)
        )

    def _report_slots(self) -> None:
        """Record the use of slots; log missed slots, and a database clock that was set back.

        A slot is a start that a Throttle allows. Its handler may begin too late, because the event
        loop or the database was slow; then the message is released and the slot is missed.
        """
        slots = self._inflight.slots
        self._inflight.metrics.record_slots(slots.counts)
        slots.counts.clear()
        for (scope, key), step in slots.steps:
            self._log(
                logging.WARNING,
                f"the database's clock was set back by about {step / MICROSECONDS:.0f} s: the "
                f"recorded starts of a Throttle ({scope}, key {key!r}) lay in the future and count "
                "as starts of the current time",
            )
        slots.steps.clear()
        now = self._clock.monotonic()
        if self._missed_count and now - self._logged_at >= MISSED_LOG_INTERVAL:
            policies = ", ".join(str(p) for p in self._settings.policies if isinstance(p, Throttle))
            self._log(
                logging.WARNING,
                f"{self._missed_count} messages missed their slots of {policies} and were released "
                "without counting a delivery: handlers of this process start up to "
                f"{slots.max_lag / MICROSECONDS:.2f} s after their slots, which lowers the rate",
            )
            self._missed_count = 0
            self._logged_at = now

    async def claim_one(self, message_id: int) -> Sequence[ClaimedMessage]:
        """Claim the message of this id, if due and free; return no row otherwise.

        Called for a suspect, which may have killed its process and is claimed by itself.
        """
        settings = self._settings
        if settings.policies:
            return (await self.claim_with_policies(1, None, only=message_id)).rows
        with self._track_claim() as token:
            lease = settings.release_stuck_timeout
            queues = self._registration.open_queues
            return await self._store.claim_one(
                message_id, queues, lease, token, ordered=settings.ordered
            )

    def _count_starting(self) -> int:
        """Return how many of the next rows start now, in free workers or waiting batches.

        Rows beyond that number wait for a worker, and get a shorter lease.
        """
        return max(0, self._count_free_capacity())

    def _count_free_capacity(self) -> int:
        """Return how many more rows can start at once; negative while rows wait for a worker.

        A worker starts a message, or `run_size` messages as a batch. `missing_count` messages are
        needed by batches that wait to be filled.
        """
        run_size = self._settings.run_size
        inflight = self._inflight
        return self.free_workers * run_size + inflight.missing_count - inflight.waiting.qsize()

    def _get_common_lease(self, limit: int) -> float:
        """Return the lease for all rows of a claim of up to `limit` rows.

        It is the shorter prefetch lease if some of the rows may have to wait for a worker: if this
        process dies, rows that it had not started are soon back.
        """
        lease = self._settings.release_stuck_timeout
        return lease if self._count_starting() >= limit else get_prefetch_lease(lease)

    def _mark_prefetched(self, rows: Sequence[ClaimedMessage], lease: float) -> None:
        """Mark `rows` if `lease` is the shorter prefetch lease, so that renewals come in time.

        Rows that may have to wait for a worker have that lease until they start.
        """
        if lease < self._settings.release_stuck_timeout:
            for row in rows:
                row.prefetched = True

    @contextmanager
    def _track_claim(self) -> Iterator[UUID]:
        """Provide a new lease token, which is remembered if the claim gets no answer.

        Such a claim may have leased rows that no worker knows of; `release_unanswered` releases
        them.
        """
        token = self._registration.create_token()
        self.requested_at = self._clock.monotonic()
        try:
            yield token
        except (UnknownOutcomeError, CancelledError):
            self._unanswered.append(token)
            raise

    async def release_unanswered(self) -> None:
        """Release rows that claims without an answer may have leased: no worker has such rows.

        A claim is named by its lease token, which is forgotten only after a success.

        Raises:
            TransientStoreError: some may remain; call again.
        """
        while self._unanswered:
            await self._store.release_claim(self._settings.queues, self._unanswered[-1])
            self._unanswered.pop()

    async def try_release_unanswered(self) -> None:
        """Release unanswered claims, unless that has just failed; never raises a `StoreError`.

        Such a claim may have leased rows that no worker has. Called before each claim; claims go on
        even if it fails.
        """
        if not self._unanswered or self._clock.monotonic() < self._release_again_at:
            return
        try:
            await self.release_unanswered()
        except StoreError as error:
            # Claims go on: at worst these rows come back when their leases expire.
            self._release_again_at = self._clock.monotonic() + RELEASE_PAUSE
            text = (
                f"could not release claims without an answer, trying again in {RELEASE_PAUSE} s: "
                f"{error}"
            )
            # The claim that meets a transient failure logs it, too.
            self._log(
                logging.DEBUG if isinstance(error, TransientStoreError) else logging.WARNING, text
            )

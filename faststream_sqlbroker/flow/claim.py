"""What one subscriber's claims ask the database for, and what is known of those without an
answer.
"""

import logging
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.rows import Claimed, ClaimedMessage, Prefetch, ReadyPair
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.database.parts.ordered import Cursors
from faststream_sqlbroker.database.policies.request import Claim, PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.pace import ClaimResult
from faststream_sqlbroker.flow.prefetch import prefetch_lease
from faststream_sqlbroker.flow.ready import Ready
from faststream_sqlbroker.flow.registration import Registration
from faststream_sqlbroker.flow.settings import ConsumerSettings
from faststream_sqlbroker.flow.stride_scheduler import StrideScheduler

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

TELL_MISSED = 60.0
"""Seconds between two lines of the log about slots that were missed."""
SOON = 0.001
"""Seconds to the next claim if its time has come while this one ran."""
RELEASE_PAUSE = 5.0
"""Seconds between two tries to give back a claim whose answer was lost."""


class Claimer:
    """Sends claims; remembers where they ended, and which have no answer."""

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        settings: ConsumerSettings,
        log: Log,
        registration: Registration,
        ready: Ready,
    ) -> None:
        """`registration` gives the tokens; `ready` is told what was claimed."""
        self._store = store
        self._inflight = inflight
        self._settings = settings
        self._log = log
        self._registration = registration
        self._ready = ready
        self._clock = inflight.clock
        self._cursors = Cursors()
        self._position = ScanPosition(use=inflight.slots)
        self._missed = 0
        self._told_at = float("-inf")
        self._shares = (
            StrideScheduler(settings.queues, settings.weights) if settings.weights else None
        )
        self.asked_at = 0.0
        """When the last claim was sent (monotonic seconds)."""
        self._unanswered: list[UUID] = []
        self._release_again_at = float("-inf")

    @property
    def free(self) -> int:
        """Workers that wait for a row."""
        return self._settings.max_workers - max(self._inflight.busy, self._inflight.running)

    @property
    def compares_queues(self) -> bool:
        """Whether a claim must ask all queues: shares take one that is left out to be empty."""
        return self._shares is not None

    @property
    def has_unanswered(self) -> bool:
        """Whether claims without an answer have not been given back yet."""
        return bool(self._unanswered)

    def look_at_all(self) -> None:
        """Let the next claim read from the beginning, not from where the last one ended."""
        self._cursors = Cursors()
        self._position = ScanPosition(use=self._inflight.slots)

    async def claim(
        self, pairs: Sequence[ReadyPair], limit: int, suspicion: Suspicion | None
    ) -> ClaimResult:
        """Claim from `pairs`, in their order or by the weights of their queues."""
        if self._shares is None:
            return await self._claim_in_order(pairs, limit, suspicion)
        pairs = self._shares.order_pairs(pairs)
        result = await self._claim_in_order(pairs, limit, suspicion)
        more = result.met >= limit or result.again == 0
        self._shares.claimed([pair.queue for pair in pairs], result.rows, more=more)
        return result

    async def _claim_in_order(
        self, pairs: Sequence[ReadyPair], limit: int, suspicion: Suspicion | None
    ) -> ClaimResult:
        lease = self._settings.release_stuck_timeout
        shorter = prefetch_lease(lease)
        starting = self._starting()
        prefetch = Prefetch(starting, shorter) if shorter < lease and starting < limit else None
        with self._noting_the_unanswered() as token:
            if self._settings.ordered:
                lease = self._one_lease(limit)
                rows, again, self._cursors = await self._store.claim_ordered(
                    pairs, limit, lease, token, self._cursors, suspicion=suspicion
                )
                self._note_lease(rows, lease)
                return ClaimResult(rows, again)
            rows = await self._store.claim(
                pairs, limit, lease, token, suspicion=suspicion, prefetch=prefetch
            )
        self._ready.claimed(pairs, rows)
        return ClaimResult(rows)

    async def claim_scheduled(
        self, limit: int, suspicion: Suspicion | None, *, only: int | None = None
    ) -> ClaimResult:
        """As `claim`, from all open queues, under the subscriber's policies."""
        s = self._settings
        queues = self._ready.queues_in_turn()
        if self._shares is not None:
            self._shares.gave_back(self._inflight.slots.missed)
            queues = self._shares.order(queues)
        self._missed += self._inflight.slots.missed.total()
        self._inflight.slots.missed.clear()
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
                limit if only is not None else self._free_places(),
                s.max_workers * s.run_size,
                self._inflight.times.usual,
                s.batch_max_wait or 0.0,
            )
            claim, self._position = await self._store.policies.claim(wanted, self._position)
        self._note_lease(claim.rows, lease)
        if self._inflight.slots.counts or self._inflight.slots.steps:
            self._tell_slots()
        if self._shares is not None and only is None:
            self._shares.claimed(queues, claim.rows, more=True)  # which a policy may hold
        rows = Claimed(claim.rows, claim.suspects)
        return ClaimResult(rows, self._from_now(claim), claim.gated, claim.more)

    def _from_now(self, claim: Claim) -> float | None:
        """In how many seconds to claim again: a slow claim must not put the next one off."""
        if not claim.again or claim.read is None:
            return claim.again
        # Not 0, which says that there is more to read.
        return max(SOON, claim.again - (self._clock.monotonic() - claim.read.answered))

    def _tell_slots(self) -> None:
        """Count what became of slots, and tell the log if messages go back, or the clock did."""
        slots = self._inflight.slots
        self._inflight.metrics.slots_used(slots.counts)
        slots.counts.clear()
        for (scope, key), back in slots.steps:
            self._log(
                logging.WARNING,
                f"the database's clock was set back by about {back / MICROSECONDS:.0f} s: the "
                f"starts that a Throttle knew of ({scope}, key {key!r}) lay ahead of it, and count "
                "from now on as if they had been now",
            )
        slots.steps.clear()
        now = self._clock.monotonic()
        if self._missed and now - self._told_at >= TELL_MISSED:
            policies = ", ".join(str(p) for p in self._settings.policies if isinstance(p, Throttle))
            self._log(
                logging.WARNING,
                f"{self._missed} messages could not start in time for their slots of {policies} "
                "and went back, uncharged: handlers of this process start up to "
                f"{slots.worst_lag / MICROSECONDS:.2f} s after their slots, and the rate is lower "
                "for that",
            )
            self._missed = 0
            self._told_at = now

    async def claim_one(self, message_id: int) -> Sequence[ClaimedMessage]:
        """Claim this message alone, if it is due and free."""
        s = self._settings
        if s.policies:
            return (await self.claim_scheduled(1, None, only=message_id)).rows
        with self._noting_the_unanswered() as token:
            lease = s.release_stuck_timeout
            queues = self._registration.open
            return await self._store.claim_one(message_id, queues, lease, token, ordered=s.ordered)

    def _starting(self) -> int:
        """Of the next rows, how many start at once."""
        return max(0, self._free_places())

    def _free_places(self) -> int:
        """The same; less than 0: so many wait already for a worker."""
        a_run = self._settings.run_size
        held = self._inflight
        return self.free * a_run + held.missing - held.waiting.qsize()

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

    @contextmanager
    def _noting_the_unanswered(self) -> Iterator[UUID]:
        """A new token; kept if it is not known whether the claim with it was committed."""
        token = self._registration.token()
        self.asked_at = self._clock.monotonic()
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

    async def try_release_unanswered(self) -> None:
        """`release_unanswered`, unless that has just failed; never raises a `StoreError`."""
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

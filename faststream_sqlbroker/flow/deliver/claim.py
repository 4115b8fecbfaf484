"""One subscriber's claims: what they ask the database for, what is known of those without an
answer, when the next one comes, and which queue it begins with.
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
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.rows import Claimed, ClaimedMessage, Prefetch, ReadyPair
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.database.parts.ordered import Cursors
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.prefetch import prefetch_lease
from faststream_sqlbroker.flow.deliver.ready import Ready
from faststream_sqlbroker.flow.fleet.lookout import MAX_SILENCE
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.settings import ConsumerSettings

if TYPE_CHECKING:
    from faststream_sqlbroker.database.policies.request import Claim
    from faststream_sqlbroker.database.store import Store


FIRST_IDLE_WAIT = 0.01
"""Seconds to the first look after the queue ran dry; each following wait is half as long again."""
IDLE_GROWTH = 1.5
"""By how much each such wait is longer than the one before."""
UNREAD_SHARE = 3
"""A claim that has to read on pauses for so many times its own length."""


class Found(Enum):
    """The yield of a claim."""

    FULL = "as many rows as there was room for, or more that is known to be claimable"
    UNREAD = "not all was read yet, or another claims right now"
    HELD = "nothing more may start before a known time, whatever comes"
    FEWER = "fewer rows than there was room for: no more is due"


@dataclass(slots=True)
class ClaimResult:
    """The result of a claim."""

    rows: Claimed
    again: float | None = None
    """In how many seconds to claim again; None: not known."""
    gated: bool = False
    """Whether nothing more can start before, whatever comes."""
    more: bool = False
    """Whether there is more to claim at once."""

    @property
    def met(self) -> int:
        """Rows and suspects that took room."""
        return len(self.rows) + len(self.rows.suspects)

    def found(self, limit: int) -> Found:
        """The yield, for a claim of `limit` rows."""
        if self.met >= limit or self.more or (self.met and self.again == 0):
            return Found.FULL
        if self.again == 0:
            return Found.UNREAD
        return Found.HELD if self.gated and self.again is not None else Found.FEWER


class Pace:
    """Seconds from one claim to the next, by what the last one has found."""

    def __init__(self, settings: ConsumerSettings, clock: Clock) -> None:
        """`settings` give the shortest and the longest pause."""
        self._shortest = settings.min_fetch_interval
        self._longest = MAX_SILENCE if settings.told_only else settings.max_fetch_interval
        self._clock = clock
        self._first = min(max(self._shortest, FIRST_IDLE_WAIT), self._longest)
        self.idle_wait = self._first
        """The next pause at an empty queue."""
        self._not_before = float("-inf")

    @property
    def too_early(self) -> float:
        """Seconds in which nothing may be claimed, even after a wake-up; 0 or less: none."""
        return self._not_before - self._clock.monotonic()

    @property
    def rests(self) -> bool:
        """Whether the queue has been empty for long: the next pause is the longest."""
        return self.idle_wait >= self._longest

    def quicken(self) -> None:
        """Something may have come: pauses at an empty queue begin with the shortest again."""
        self.idle_wait = self._first

    def after_full(self, *, pause: bool) -> float:
        """There is more: the least pause, which also binds wake-ups; without `pause` none."""
        self.quicken()
        interval = self._shortest if pause else 0.0
        self._not_before = self._clock.monotonic() + interval
        return interval

    def after_unread(self, took: float) -> float:
        """A claim that `took` so long has to read on, or was too late: soon, but for a part of the
        time at most; at random, as those that have met once would meet again.
        """
        return max(self._shortest, self._clock.jitter(UNREAD_SHARE * took))

    def until(self, again: float) -> float:
        """Nothing starts before."""
        return min(again, self._longest)

    def idle(self) -> float:
        """The pause at an empty queue, longer each time."""
        wait = self.idle_wait
        self.idle_wait = min(self._longest, wait * IDLE_GROWTH)
        return wait


class StrideScheduler:
    """Stride scheduling of queues with weights: which queue the next claim begins with.

    Each message that is claimed from a queue costs it 1 / weight. The queue that has paid least
    comes first in the next claim, the others take what room it leaves. So while several queues have
    messages, what is claimed follows the weights, to within one claim of each; a queue whose turn
    it is and that has nothing costs no claim. Turns are not saved up: a queue that comes back
    begins where the others are.
    """

    def __init__(self, queues: Sequence[str], weights: Sequence[int]) -> None:
        """All begin alike; `weights` are 1 or more, in the order of `queues`."""
        self._weights = dict(zip(queues, weights, strict=True))
        self._paid = dict.fromkeys(queues, 0.0)

    def order(self, asked: Iterable[str]) -> list[str]:
        """The queues `asked` from next, in their order."""
        queues = dict.fromkeys(asked)
        if queues:
            self._catch_up([queue for queue in self._paid if queue not in queues], queues)
        return sorted(queues, key=lambda queue: (self._paid[queue], -self._weights[queue]))

    def order_pairs(self, pairs: Sequence[ReadyPair]) -> list[ReadyPair]:
        """`pairs` for the next claim; those of one queue stay as they are."""
        rank = {queue: n for n, queue in enumerate(self.order(pair.queue for pair in pairs))}
        return sorted(pairs, key=lambda pair: rank[pair.queue])

    def claimed(self, asked: Iterable[str], rows: Sequence[ClaimedMessage], *, more: bool) -> None:
        """`rows` were claimed from the queues `asked`, in their order; `more` says that there may
        be others left.
        """
        queues = list(dict.fromkeys(asked))
        if not queues:
            return
        if not more:
            # Every queue was asked and has nothing else: all begin anew, as none has to wait.
            self._paid = dict.fromkeys(self._paid, 0.0)
            return
        last = 0
        place = {queue: n for n, queue in enumerate(queues)}
        for row in rows:
            self._paid[row.queue] += 1 / self._weights[row.queue]
            last = max(last, place[row.queue])
        self._catch_up(queues[:last], queues[last:])

    def gave_back(self, counts: Mapping[str, int]) -> None:
        """So many messages of each queue were claimed and went back: their turns are not used."""
        for queue, count in counts.items():
            self._paid[queue] -= count / self._weights[queue]
        self._begin_at_zero()

    def _catch_up(self, empty: Iterable[str], others: Iterable[str]) -> None:
        """Let the `empty` queues have no turns left that the `others` do not have; keep numbers
        small.
        """
        least = min(self._paid[queue] for queue in others)
        for queue in empty:
            self._paid[queue] = max(self._paid[queue], least)
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        least = min(self._paid.values())
        for queue in self._paid:
            self._paid[queue] -= least


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
        if settings.policies:
            _ = store.policies  # imported now: the first claim would make the event loop wait
        self.look_at_all()
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
        if self._settings.policies:
            from faststream_sqlbroker.database.policies.request import ScanPosition  # noqa: PLC0415

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
        from faststream_sqlbroker.database.policies.request import (  # noqa: PLC0415
            PolicyClaimRequest,
        )

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

    def _from_now(self, claim: "Claim") -> float | None:
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

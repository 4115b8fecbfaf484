"""Single messages for the application: taken, waited for, and settled."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID, uuid4

from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.outcome import Ack, Reject
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, note_claimed
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.database.messages.handler import refuse_in_handler
from faststream_sqlbroker.exceptions import UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.settlements import refusal, refusal_text
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.metrics import DirectMetrics
from faststream_sqlbroker.flow.shielded import ShieldedCalls
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.database.messages.direct_claim import Replaced
    from faststream_sqlbroker.database.store import Store

T = TypeVar("T")

FIRST_PAUSE = 0.01
"""Seconds between the first two looks at queues without a due message, with jitter; each following
pause is half as long again."""
LAST_PAUSE = 0.5
"""Most seconds between two such looks."""
RELEASE_INTERVAL = 1.0
"""Seconds between two looks for expired leases while there is enough to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectClaimRequest:
    """What to take, and how it ends."""

    queues: tuple[str, ...]
    lease: float
    """Seconds."""
    rules: SettleRules
    most_deliveries: float
    remove: bool
    """Whether it is removed at once, as acked."""
    listen: bool = False
    """Whether to take a connection for the wake-ups of other processes, where there are any."""
    limit: int = 1
    """How many at most."""


async def as_claimed(claimed: T) -> T:
    """`claimed`: nothing is to be read of it."""
    return claimed


class DirectClaimer:
    """Takes messages one by one for one broker."""

    def __init__(
        self,
        store: "Store",
        wakeups: Wakeups,
        shielded: ShieldedCalls,
        log: Log,
        recorder: Recorder | None = None,
    ) -> None:
        self._store = store
        self._metrics = DirectMetrics(recorder)
        self._wakeups = wakeups
        self.shielded = shielded
        self._log = log
        self.clock = wakeups.clock
        self.correlation_ids = store.correlation_ids
        self.polls = True
        """Whether a wait looks again and again; a test says when there may be something."""
        self._turns = count()
        self._released: dict[tuple[str, ...], float] = {}

    async def take(
        self,
        wanted: DirectClaimRequest,
        wait: float | None,
        read: Callable[[ClaimedMessage], Awaitable[T]],
    ) -> T | None:
        """The first due message as `read` makes it; None if there was none for `wait` seconds
        (None: no limit).

        Cancelled, or if it cannot be known, what was leased is given back; what was removed stays
        removed.

        Raises:
            NotSupportedError: the caller is a handler with transactional=True on SQLite.
            UnknownOutcomeError: a message may have been removed.
            StoreError: the database refused or could not be reached.
        """
        refuse_in_handler(self._store.dialect, self._store.engine, "taking a message")
        clock = self.clock.callers
        pause = FIRST_PAUSE
        arrived = asyncio.Event()
        deadline = None if wait is None else clock.monotonic() + wait

        def hint(_queues: frozenset[str]) -> None:
            arrived.set()

        if wait != 0:
            self._wakeups.register(wanted.queues, hint, listen=wanted.listen)
        try:
            while True:
                # Cleared before the claim, so that a hint that comes during the claim leads to
                # another.
                arrived.clear()
                # Read before the claim, so that the last claim begins after the deadline.
                late = deadline is not None and clock.monotonic() >= deadline
                found, again = await self.take_now(wanted, lambda rows: read(rows[0]))
                if found is not None or late:
                    return found
                step = inf if again is None else again
                if self.polls:
                    step = min(clock.jitter(pause), LAST_PAUSE, step)
                end = clock.monotonic() + step
                pause = min(LAST_PAUSE, pause * 1.5)
                with suppress(TimeoutError):
                    end = end if deadline is None else min(end, deadline)
                    async with clock.timeout_at(None if end == inf else end):
                        await arrived.wait()
                        pause = FIRST_PAUSE
        finally:
            self._wakeups.unregister(hint)

    async def take_now(
        self, wanted: DirectClaimRequest, read: Callable[[list[ClaimedMessage]], Awaitable[T]]
    ) -> tuple[T | None, float | None]:
        """Up to `wanted.limit` due messages, in the same lease, as `read` makes them, without
        waiting; without any, the seconds until the next one is due (None: not known).

        Cancelled, or if it cannot be known, what was leased is given back.

        Raises:
            UnknownOutcomeError: a message may have been removed.
            StoreError: the database refused or could not be reached.
        """
        while True:
            found, again = await self._claim(wanted, read)
            if found is not None or again != 0:
                return found, again

    async def _claim(
        self, wanted: DirectClaimRequest, read: Callable[[list[ClaimedMessage]], Awaitable[T]]
    ) -> tuple[T | None, float | None]:
        """`take_now`; 0 seconds, if there was only what must not be taken, or no answer."""
        token = uuid4()
        queues = self._in_turn(wanted.queues)
        again = None

        async def give_back() -> None:
            if not wanted.remove:
                await self._store.release_claim(queues, token)

        async def work() -> T | None:
            nonlocal again
            rows, again = await self._take(wanted, queues, token)
            return await read(rows) if rows else None

        try:
            return await self.shielded.run(work(), give_back), again
        except UnknownOutcomeError:
            if wanted.remove:
                raise
            # Fenced by the token: afterwards nothing is leased, and the next look is a new one.
            await give_back()
            return None, 0.0

    def _in_turn(self, queues: tuple[str, ...]) -> tuple[str, ...]:
        # Each claim begins with the next queue, so that a full queue does not starve the others.
        first = next(self._turns) % len(queues)
        return queues[first:] + queues[:first]

    async def _take(
        self, wanted: DirectClaimRequest, queues: Sequence[str], token: UUID
    ) -> tuple[list[ClaimedMessage], float | None]:
        asked = self.clock.monotonic()

        def judge(row: ClaimedMessage) -> tuple[Settlement | None, bool]:
            note_claimed([row], asked)
            outcome = refusal(row, wanted.rules, wanted.most_deliveries, self.clock)
            if outcome is not None:
                row.settle_anew(outcome)
                ended = settle(row, outcome, wanted.rules, ended_after=0.0, attempted=False)
                return ended, False
            if wanted.remove:
                return settle(row, Ack(), wanted.rules, ended_after=0.0), True
            return None, True

        release = asked - self._released.get(wanted.queues, float("-inf")) >= RELEASE_INTERVAL
        taken = await self._store.takes.take(
            queues,
            wanted.lease,
            token,
            judge,
            release=release,
            archive=wanted.rules.retain_on_reject,
            limit=wanted.limit,
        )
        if release:
            self._released = {
                q: at for q, at in self._released.items() if asked - at < RELEASE_INTERVAL
            }
            self._released[wanted.queues] = asked
        self._metrics.taken([*taken.refused, *taken.rows], taken.written)
        for row in taken.refused:
            if isinstance(row.outcome, Reject):
                self._log(logging.ERROR, refusal_text(row, row.outcome), message_id=row.id)
        return taken.rows, taken.again

    async def settle(self, settlement: Settlement, replaced: "Replaced | None", queue: str) -> bool:
        """Write what a reservation from `queue` ended in; whether its lease was still held.

        Raises:
            NotSupportedError: the caller is a handler with transactional=True on SQLite.
            UnknownOutcomeError, StoreError: as `write_end`.
        """
        refuse_in_handler(self._store.dialect, self._store.engine, "settling a reservation")

        async def write() -> Settlement | None:
            result = await self._store.takes.settle(settlement, replaced)
            return settlement if result.settled else None

        return await self.write_end(write, settlement.id, queue) is not None

    async def write_end(
        self, write: Callable[[], Awaitable[Settlement | None]], message_id: int, queue: str
    ) -> Settlement | None:
        """What `write` has written of a message from `queue`; None: its lease is another's.

        `write` is fenced by the lease, so that twice is once: it is repeated if it is not known
        whether it was written.

        Raises:
            UnknownOutcomeError: it may have been written, or the lease may be gone.
            StoreError: nothing was written.
        """
        try:
            written = await write()
        except UnknownOutcomeError as error:
            written = await write()
            if written is None:
                self._metrics.lost(queue, unknown=True)
                msg = (
                    f"what became of message {message_id} is not known: {error}; repeated, it "
                    "found nothing to write any more: it was written the first time, or the lease "
                    "is gone"
                )
                raise UnknownOutcomeError(msg) from error
        if written is None:
            self._metrics.lost(queue, unknown=False)
            return None
        self._metrics.settled(written, queue)
        if not written.leaves and not written.delay:
            self._wakeups.published([written.queue or queue])
        return written

    async def extend(self, rows: Sequence[ClaimedMessage], lease: float) -> set[int]:
        """Lengthen the leases of `rows` to `lease` seconds from now; the ids of those still held.

        Raises:
            NotSupportedError: the caller is a handler with transactional=True on SQLite.
            StoreError: the database refused or could not be reached, or a row was locked elsewhere
                for too long.
        """
        refuse_in_handler(self._store.dialect, self._store.engine, "extending a lease")
        asked = self.clock.monotonic()
        held = await self._store.renew([(row.id, row.lease_token) for row in rows], lease)
        for row in rows:
            row.renewed(asked)
        return held

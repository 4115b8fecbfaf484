"""Single messages for the application: claimed, waited for, and settled."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID, uuid4

from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.outcome import Ack, Reject
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, record_claim
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.database.messages.handler import refuse_in_handler
from faststream_sqlbroker.exceptions import UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.settlements import format_refusal, get_refusal
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.metrics import DirectMetrics
from faststream_sqlbroker.flow.shielded import ShieldedCalls
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.database.messages.single_claim import Replacement
    from faststream_sqlbroker.database.store import Store

T = TypeVar("T")

FIRST_PAUSE = 0.01
"""Seconds between the first two polls of queues without a due message, with jitter; each following
pause is half as long again.
"""
LAST_PAUSE = 0.5
"""Maximum seconds between two such polls."""
RELEASE_INTERVAL = 1.0
"""Seconds between two searches for expired leases while there are enough messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectClaimRequest:
    """The messages to claim, and the rules of their settlement."""

    queues: tuple[str, ...]
    lease: float
    """Seconds."""
    rules: SettleRules
    max_deliveries: float
    remove: bool
    """True if messages are removed at once, as acked."""
    listen: bool = False
    """True to use a connection for the wake-ups of other processes, where there are any."""
    limit: int = 1
    """Maximum number of messages."""


async def return_claimed(value: T) -> T:
    """Return `value` unchanged, for callers that do not convert messages."""
    return value


class DirectClaimer:
    """Claims single messages for a broker."""

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
        """False in tests, which say when there may be a message; a wait then does not poll."""
        self._rotation = count()
        self._released_at: dict[tuple[str, ...], float] = {}

    async def claim(
        self,
        request: DirectClaimRequest,
        wait: float | None,
        read: Callable[[ClaimedMessage], Awaitable[T]],
    ) -> T | None:
        """Claim the first due message and return the result of `read`, which converts messages.

        None is returned if there was none for `wait` seconds (None: no limit). In between it polls
        with growing pauses, or at once after a hint that messages may have arrived.

        After a cancellation or an unknown result, the lease is released; a removed message stays
        removed.

        Raises:
            NotSupportedError: the caller is a handler with transactional=True on SQLite.
            UnknownOutcomeError: a message may have been removed.
            StoreError: the database refused or could not be reached.
        """
        refuse_in_handler(self._store.dialect, self._store.engine, "claiming a message")
        clock = self.clock.callers
        pause = FIRST_PAUSE
        arrived = asyncio.Event()
        deadline = None if wait is None else clock.monotonic() + wait

        def hint(_queues: frozenset[str]) -> None:
            arrived.set()

        if wait != 0:
            self._wakeups.register(request.queues, hint, listen=request.listen)
        try:
            while True:
                # Cleared before the claim, so that a hint during the claim leads to another claim.
                arrived.clear()
                # Checked before the claim, so that the last claim starts after the deadline.
                is_late = deadline is not None and clock.monotonic() >= deadline
                result, retry_in = await self.claim_now(request, lambda rows: read(rows[0]))
                if result is not None or is_late:
                    return result
                step = inf if retry_in is None else retry_in
                if self.polls:
                    step = min(clock.add_jitter(pause), LAST_PAUSE, step)
                if deadline is not None:
                    step = min(step, deadline - clock.monotonic())
                pause = min(LAST_PAUSE, pause * 1.5)
                if await clock.wait_for(arrived, None if step == inf else step):
                    pause = FIRST_PAUSE
        finally:
            self._wakeups.unregister(hint)

    async def claim_now(
        self, request: DirectClaimRequest, read: Callable[[list[ClaimedMessage]], Awaitable[T]]
    ) -> tuple[T | None, float | None]:
        """Claim up to `request.limit` due messages, with a shared lease, without waiting.

        After a cancellation or an unknown result, the lease is released.

        Returns:
            The messages as `read` converts them. Without any, None and the seconds until the next
                one is due (None: unknown).

        Raises:
            UnknownOutcomeError: a message may have been removed.
            StoreError: the database refused or could not be reached.
        """
        while True:
            result, retry_in = await self._try_claim(request, read)
            # 0 seconds: the claim brought nothing, but there may be more messages. Claim again.
            if result is not None or retry_in != 0:
                return result, retry_in

    async def _try_claim(
        self, request: DirectClaimRequest, read: Callable[[list[ClaimedMessage]], Awaitable[T]]
    ) -> tuple[T | None, float | None]:
        """Send a claim once; return what `read` makes of the rows, and when to try again.

        The seconds until then are 0 if so many rows were refused (must not be delivered) that the
        transaction was ended, or if the answer was lost, and None if unknown.
        """
        token = uuid4()
        queues = self._rotate_queues(request.queues)
        retry_in = None

        async def give_back() -> None:
            # A removed message has no lease to release.
            if not request.remove:
                await self._store.release_claim(queues, token)

        async def work() -> T | None:
            nonlocal retry_in
            rows, retry_in = await self._send_claim(request, queues, token)
            return await read(rows) if rows else None

        try:
            return await self.shielded.run(work(), give_back), retry_in
        except UnknownOutcomeError:
            if request.remove:
                raise
            # Fenced by the token: afterwards nothing is leased, and the next claim is a new one.
            await give_back()
            return None, 0.0

    def _rotate_queues(self, queues: tuple[str, ...]) -> tuple[str, ...]:
        """Return the queues, each time beginning with the next queue.

        A claim takes from the first queue that has a message: in a fixed order a full queue would
        starve the others.
        """
        first = next(self._rotation) % len(queues)
        return queues[first:] + queues[:first]

    async def _send_claim(
        self, request: DirectClaimRequest, queues: Sequence[str], token: UUID
    ) -> tuple[list[ClaimedMessage], float | None]:
        """Send a claim; return the rows, and the seconds until the next message is due.

        In the same transaction, messages that must not be delivered are settled, and expired leases
        are released: whenever no message is due, and otherwise once a second. So no subscriber is
        needed to bring messages of dead processes back.
        """
        started_at = self.clock.monotonic()

        def decide(row: ClaimedMessage) -> tuple[Settlement | None, bool]:
            """Return the settlement to write with the claim, if any, and True to deliver `row`."""
            record_claim([row], started_at)
            outcome = get_refusal(row, request.rules, request.max_deliveries, self.clock)
            if outcome is not None:
                row.replace_outcome(outcome)
                settlement = settle(row, outcome, request.rules, ended_after=0.0, attempted=False)
                return settlement, False
            if request.remove:
                return settle(row, Ack(), request.rules, ended_after=0.0), True
            return None, True

        # True if expired leases of these queues were not searched for within the last second.
        release = (
            started_at - self._released_at.get(request.queues, float("-inf")) >= RELEASE_INTERVAL
        )
        result = await self._store.direct_claims.claim(
            queues,
            request.lease,
            token,
            decide,
            release=release,
            archive=request.rules.retain_on_reject,
            limit=request.limit,
        )
        if release:
            self._released_at = {
                q: at for q, at in self._released_at.items() if started_at - at < RELEASE_INTERVAL
            }
            self._released_at[request.queues] = started_at
        self._metrics.record_claim([*result.refused, *result.rows], result.settlements)
        for row in result.refused:
            if isinstance(row.outcome, Reject):
                self._log(logging.ERROR, format_refusal(row, row.outcome), message_id=row.id)
        return result.rows, result.retry_in

    async def settle(
        self, settlement: Settlement, replaced: "Replacement | None", queue: str
    ) -> bool:
        """Write the outcome of a reservation from `queue`; return True if the lease was still held.

        A reservation is a message that the application has leased without a subscriber.

        Raises:
            NotSupportedError: the caller is a handler with transactional=True on SQLite.
            UnknownOutcomeError, StoreError: as `write_settlement`.
        """
        refuse_in_handler(self._store.dialect, self._store.engine, "settling a reservation")

        async def write() -> Settlement | None:
            result = await self._store.direct_claims.settle(settlement, replaced)
            return settlement if result.settled_ids else None

        return await self.write_settlement(write, settlement.id, queue) is not None

    async def write_settlement(
        self, write: Callable[[], Awaitable[Settlement | None]], message_id: int, queue: str
    ) -> Settlement | None:
        """Write the settlement of a message from `queue`; return None if the lease is lost.

        `write` is fenced by the lease: it changes nothing once the lease is gone. So it is repeated
        if its COMMIT had no answer, and writing twice has the effect of once.

        Raises:
            UnknownOutcomeError: it may have been written, or the lease may be gone.
            StoreError: nothing was written.
        """
        try:
            settlement = await write()
        except UnknownOutcomeError as error:
            settlement = await write()
            if settlement is None:
                self._metrics.record_lost(queue, unknown=True)
                msg = (
                    f"it is unknown whether the outcome of message {message_id} was written: "
                    f"{error}; a second try found nothing to write, so either the first try was "
                    "committed or the lease is lost"
                )
                raise UnknownOutcomeError(msg) from error
        if settlement is None:
            self._metrics.record_lost(queue, unknown=False)
            return None
        self._metrics.record_settled(settlement, queue)
        if not settlement.is_final and not settlement.delay:
            self._wakeups.notify_published([settlement.queue or queue])
        return settlement

    async def extend(self, rows: Sequence[ClaimedMessage], lease: float) -> set[int]:
        """Extend the leases of `rows` to `lease` seconds from now; return the ids still held.

        Rows of other ids have lost their leases: another worker may have the message.

        Raises:
            NotSupportedError: the caller is a handler with transactional=True on SQLite.
            StoreError: the database refused or could not be reached, or a row was locked elsewhere
                for too long.
        """
        refuse_in_handler(self._store.dialect, self._store.engine, "extending a lease")
        started_at = self.clock.monotonic()
        held_ids = await self._store.renew([(row.id, row.lease_token) for row in rows], lease)
        for row in rows:
            row.record_renewal(started_at)
        return held_ids

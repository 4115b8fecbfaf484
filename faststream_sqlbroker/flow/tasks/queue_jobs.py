"""Messages of any queue for HTTP clients, which identify a message by its id and its lease."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING
from uuid import UUID

from faststream_sqlbroker.core.channels import QueueRole, Queues
from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.outcome import Outcome, Release
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.loop import Log, Loop
from faststream_sqlbroker.flow.metrics import DirectMetrics
from faststream_sqlbroker.flow.tasks.configured import BY_CONFIGURATION, ConfiguredSetup
from faststream_sqlbroker.flow.tasks.direct_claim import (
    DirectClaimer,
    DirectClaimRequest,
    return_claimed,
)
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.database.messages.single_claim import Replacement
    from faststream_sqlbroker.database.store import Store


MIN_PAUSE = 0.02
"""Seconds between two polls, even if a message seems to be due that cannot be claimed."""
FIRST_PAUSE = 0.05
"""Seconds until the first poll, with jitter; each following pause is half as long again."""
LAST_PAUSE = 1.0
"""Maximum seconds between two polls, also while wake-ups of other processes arrive: delayed
messages send none, and a request may not wait for long.
"""


class PollWaiter:
    """A request that waits in the line of a queue."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.called = asyncio.Event()


class LongPolls:
    """Waiting requests of a broker, served by a shared poll without further connections.

    Each queue has a line of waiters. A possibly due message calls the first waiter of the line,
    whose request then claims. Only a request that has found something calls the next one, so that a
    message that many wait for costs one claim and not one for each of them.
    """

    def __init__(
        self, store: "Store", wakeups: Wakeups, log: Log, *, has_poll_loop: bool = True
    ) -> None:
        """Without `has_poll_loop` only publishes of this process call waiters."""
        self._store = store
        self._wakeups = wakeups
        self._clock = wakeups.clock
        self._has_poll_loop = has_poll_loop
        self._lines: dict[str, dict[PollWaiter, None]] = {}
        self._loop = Loop("long polls", self._tick, log, wakeups.clock)
        self._is_ended = False
        self._pause = FIRST_PAUSE
        self._poll_at = inf
        self._due_at = inf
        """Time of a due message that the last poll may not know (monotonic seconds)."""

    def start(self) -> None:
        """Let requests wait again after `end`."""
        self._is_ended = False

    def end(self) -> None:
        """Answer all waiting requests now, and let no other wait: the server is about to stop.

        A waiter that is called after the end does not claim, and its request returns nothing.
        """
        self._is_ended = True
        for line in self._lines.values():
            for waiter in line:
                waiter.called.set()

    async def stop(self) -> None:
        """Answer all waiting requests and stop the loop."""
        self.end()
        await self._loop.stop()

    def enter(self, queue: str) -> PollWaiter:
        """Add a waiter at the end of the queue's line; `leave` must follow.

        A waiter stands for a request that waits for a message. The first of a queue registers for
        hints of that queue, and starts the loop that polls for all waiters.
        """
        waiter = PollWaiter(queue)
        line = self._lines.setdefault(queue, {})
        line[waiter] = None
        if len(line) == 1:
            self._register()
        # Requests that keep coming must not make each poll come at once.
        self._poll_at = min(self._poll_at, self._clock.monotonic() + self._pause)
        # After `end` no request waits, and nothing would stop a loop started now.
        has_polls = self._has_poll_loop and not self._is_ended
        if has_polls and not self._loop.is_running:
            self._loop.start(self._wakeups.outages)
        self._loop.wake()
        return waiter

    def leave(self, waiter: PollWaiter, *, found: bool) -> None:
        """Remove the waiter from the line; call the next waiter after a success (`found`).

        To call a waiter is to let its request claim. There may be more messages, and a call that
        this waiter did not use must not be lost.
        """
        line = self._lines[waiter.queue]
        del line[waiter]
        # A call that came after this waiter's claim belongs to the next waiter.
        if found or waiter.called.is_set():
            self._call(waiter.queue)
        if not line:
            del self._lines[waiter.queue]
            self._register()

    def schedule_poll(self, queue: str, seconds: float) -> None:
        """Schedule a poll for a message of `queue` that is due in `seconds`.

        No hint comes when a delayed message becomes due, and the next regular poll may be later. No
        effect if no request waits for the queue.
        """
        if queue not in self._lines:
            return
        due_at = self._clock.monotonic() + max(MIN_PAUSE, seconds)
        self._due_at = min(self._due_at, due_at)
        if due_at < self._poll_at:
            self._poll_at = due_at
            self._loop.wake()

    async def wait_for_call(self, waiter: PollWaiter, deadline: float) -> bool:
        """Wait until the waiter is called; return False at the `deadline`, and after `end`.

        True means that a message may be due, so the request should claim again. The deadline is a
        `monotonic` time of the callers' clock, which runs even if a test's clock stands still.
        """
        if self._is_ended:
            return False
        clock = self._clock.callers
        await clock.wait_for(waiter.called, deadline - clock.monotonic())
        is_called = waiter.called.is_set() and not self._is_ended
        # Cleared before the claim that follows, so that a call during the claim leads to another
        # claim.
        waiter.called.clear()
        return is_called

    def _register(self) -> None:
        """Register for hints of exactly the queues in which requests wait.

        A hint says that messages may have arrived. Hints are filtered by queue, so each change of
        the queues is registered again.
        """
        if self._lines:
            self._wakeups.register(list(self._lines), self._hint, listen=True)
        else:
            self._wakeups.unregister(self._hint)

    def _hint(self, queues: frozenset[str]) -> None:
        """Call the first waiter of each of `queues`, in which messages may have arrived."""
        # An empty set means all queues.
        for queue in queues or list(self._lines):
            self._call(queue)

    def _call(self, queue: str) -> None:
        """Call the first waiter of the line that is not called yet.

        Only one: a claim for each of many waiters would be a waste for a single message. A waiter
        that finds a message calls the next (`leave`).
        """
        for waiter in self._lines.get(queue, ()):
            if not waiter.called.is_set():
                waiter.called.set()
                return

    async def _tick(self) -> float | None:
        """Poll the queues of all waiting requests, and call a waiter where a message is due.

        Return the seconds until the next poll, or None if no request waits. The pause grows up to
        `LAST_PAUSE`, and ends with the next due message or expired lease.
        """
        queues = list(self._lines)
        if not queues:
            self._pause = FIRST_PAUSE
            self._poll_at = inf
            return None
        # Each new waiter wakes the loop, which may have nothing to do yet.
        wait = self._poll_at - self._clock.monotonic()
        if wait > 0:
            return wait
        self._due_at = inf
        result = await self._store.poll_all(queues, queues)
        due = {pair.queue for pair in result.pairs if pair.due_in <= 0}
        expires_in = inf if result.lease_ends_in is None else result.lease_ends_in
        # A claim also releases expired leases, and it is not known in which queue the lease is.
        for queue in due if expires_in > 0 else queues:
            self._call(queue)
        self._pause = min(LAST_PAUSE, self._pause * 1.5)
        later_waits = [pair.due_in for pair in result.pairs if pair.due_in > 0]
        pause = min(self._clock.add_jitter(self._pause), expires_in, *later_waits)
        pause = max(MIN_PAUSE, pause)
        now = self._clock.monotonic()
        self._poll_at = min(now + pause, self._due_at)
        return max(MIN_PAUSE, self._poll_at - now)


MAX_BYTES = 8 * 1024 * 1024
"""Maximum bytes of the bodies of one answer; the first body may be larger."""


@dataclass(frozen=True, slots=True)
class LeasedMessage:
    """The key of a message that a client has leased."""

    queue: str
    id: int
    token: UUID


class RemoteConsumer:
    """Leases, extends and settles messages for HTTP clients of a broker.

    Raises (from every operation):
        StoreError: the database refused or could not be reached.
    """

    def __init__(
        self,
        store: "Store",
        wakeups: Wakeups,
        write: Callable[[Sequence[NewMessage]], Awaitable[list[int | None]]],
        options: Queues,
        *,
        claimer: DirectClaimer,
        rules: SettleRules,
        max_deliveries: float,
        log: Log,
        recorder: Recorder | None,
        has_poll_loop: bool,
    ) -> None:
        """Publish by `write`, claim by `claimer`; `has_poll_loop` as in `LongPolls`."""
        self.store = store
        self._wakeups = wakeups
        self._claimer = claimer
        self._write = write
        self._options = options
        self._rules = rules
        self._max_deliveries = max_deliveries
        self._metrics = DirectMetrics(recorder)
        self._configured = ConfiguredSetup(self._configure, wakeups.clock)
        self.long_polls = LongPolls(store, wakeups, log, has_poll_loop=has_poll_loop)

    def start(self) -> None:
        """Let requests wait again after `stop`."""
        self.long_polls.start()

    async def setup(self) -> None:
        """Create the tokens that the configuration names; no effect the second time."""
        await self._configured.run_once()

    async def _configure(self) -> None:
        """Create the tokens of queues that the configuration declares.

        A client needs the token for its role to publish into a queue, or to consume from it.
        """
        for queue, tokens in self._options.queues.items():
            role_tokens: dict[QueueRole, str | None] = {
                "publish": tokens.publish,
                "consume": tokens.consume,
            }
            for role, token in role_tokens.items():
                if token is not None:
                    await self.store.tokens.set_queue_token(
                        queue, role, by=BY_CONFIGURATION, token=token
                    )

    async def publish(self, rows: Sequence[NewMessage]) -> list[int | None]:
        """Publish `rows` together; return their ids, or None for a dedup_id that exists already.

        For a delayed message no hint wakes requests, so a poll is scheduled for its due time.
        """
        ids = await self._write(rows)
        self._metrics.record_published(rows, ids)
        for row in rows:
            if row.delay:
                self.long_polls.schedule_poll(row.queue, row.delay)
        return ids

    async def reserve(
        self, queue: str, *, limit: int, lease: float, wait: float
    ) -> list[ClaimedMessage]:
        """Lease up to `limit` due messages for `lease` seconds; wait for the first message.

        Waits up to `wait` seconds, in the line of requests for this queue, without a connection.
        `retry_in` are the seconds until the next message is due. A cancelled call leases nothing.
        """
        request = DirectClaimRequest(
            queues=(queue,),
            lease=lease,
            rules=self._rules,
            max_deliveries=self._max_deliveries,
            remove=False,
            limit=limit,
        )
        wait = min(wait, self._options.wait)
        if wait <= 0:
            rows, _ = await self._claimer.claim_now(request, return_claimed)
            return await self._limit_size(queue, rows or [])
        # The callers' clock: it runs even where a test stops the broker's clock.
        deadline = self._wakeups.clock.callers.monotonic() + wait
        # Enter before the first claim, so that nothing is missed between the claim and the wait.
        waiter = self.long_polls.enter(queue)
        # A request that is cut off during its claim passes its call on to the next waiter.
        calls_next_waiter = True
        try:
            while True:
                rows, retry_in = await self._claimer.claim_now(request, return_claimed)
                if rows:
                    break
                calls_next_waiter = False
                if retry_in is not None:
                    self.long_polls.schedule_poll(queue, retry_in)
                if not await self.long_polls.wait_for_call(waiter, deadline):
                    return []
                calls_next_waiter = True
        except StoreError:
            # The other requests need not fail, too: the next poll calls them.
            calls_next_waiter = False
            raise
        finally:
            self.long_polls.leave(waiter, found=calls_next_waiter)
        return await self._limit_size(queue, rows)

    async def _limit_size(self, queue: str, rows: list[ClaimedMessage]) -> list[ClaimedMessage]:
        """Return the first of `rows` that fit into an answer (`MAX_BYTES`); release the rest.

        The size of bodies is known only after the claim. The first row is returned whatever its
        size: otherwise it could never be delivered.
        """
        size = 0
        for position, row in enumerate(rows):
            size += len(row.payload)
            if position and size > MAX_BYTES:
                # If the release fails, the first rows are returned all the same; the rest comes
                # back with its leases.
                with suppress(StoreError):
                    await self.release(queue, rows[position:])
                return rows[:position]
        return rows

    async def release(self, queue: str, rows: Sequence[ClaimedMessage]) -> None:
        """Release `rows` as before the claim, without counting a delivery.

        Called for rows that no client has seen. The hint at the end lets others claim them.
        """
        settlements = [settle(row, Release(), self._rules, ended_after=0.0) for row in rows]
        result = await self.store.settle(settlements)
        for settlement in settlements:
            if settlement.id in result.settled_ids:
                self._metrics.record_settled(settlement, queue)
        self._wakeups.notify_published([queue])

    async def extend(self, message: LeasedMessage, lease: float) -> datetime | None:
        """Extend the lease of a message to `lease` seconds from now, never to an earlier time.

        Returns:
            The lease's end by the database's clock; None if the lease is lost.
        """
        leased_until: datetime | None = await self.store.direct_claims.extend_held(
            message.queue, message.id, message.token, lease
        )
        return leased_until

    async def settle(
        self,
        message: LeasedMessage,
        outcome: Outcome,
        *,
        replaced: "Callable[[ClaimedMessage], Replacement] | None" = None,
        error: str | None = None,
    ) -> MessageState | None:
        """Write the outcome of the message, and return its new state.

        Returns None if the lease is lost and nothing is written. `replaced` creates the new body;
        `error` is stored in `last_error`. The row is read again in the same transaction, because an
        HTTP client has only the key of its message.

        Raises:
            UnknownOutcomeError: it may have been written, or the lease may be gone.
        """
        state_before = MessageState.PENDING

        def decide(row: ClaimedMessage, age: float) -> Settlement:
            nonlocal state_before
            state_before = MessageState.RETRYABLE if row.attempts_count else state_before
            settlement = settle(row, outcome, self._rules, ended_after=age)
            # If an operator has cancelled the message, the stored error must name that operator.
            if error and row.cancelled is None:
                settlement.error = error
            return settlement

        async def write() -> Settlement | None:
            settlement: Settlement | None = await self.store.direct_claims.settle_held(
                message.queue, message.id, message.token, decide, replaced
            )
            return settlement

        settlement = await self._claimer.write_settlement(write, message.id, message.queue)
        if settlement is None:
            return None
        if not settlement.is_final and settlement.delay:
            # Messages that are due later are not notified: only the next poll of another process
            # finds them.
            self.long_polls.schedule_poll(message.queue, settlement.delay)
        # A release restores the state before the claim.
        return settlement.state or state_before

    async def stop(self) -> None:
        """Answer the waiting requests, and stop the loop."""
        await self.long_polls.stop()

"""Messages of any queue for clients over HTTP, which know a message by its id and its lease."""

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
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.loop import Log, Loop
from faststream_sqlbroker.flow.metrics import DirectMetrics
from faststream_sqlbroker.flow.tasks.configured import BY_CONFIGURATION, Configured
from faststream_sqlbroker.flow.tasks.direct_claim import (
    DirectClaimer,
    DirectClaimRequest,
    as_claimed,
)
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.database.messages.direct_claim import Replaced
    from faststream_sqlbroker.database.store import Store


SHORTEST_PAUSE = 0.02
"""Seconds between two looks, even if something seems to be due that cannot be claimed."""
FIRST_PAUSE = 0.05
"""Seconds until the first look, with jitter; each following pause is half as long again."""
LAST_PAUSE = 1.0
"""Most seconds between two looks, also while wake-ups of other processes arrive: what those delay
sends none, and a request may not wait for long."""


class Place:
    """One request's place in the line of a queue."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.called = asyncio.Event()


class LongPolls:
    """The requests of one broker that wait: one look for all of them, and no connection for any.

    Each queue has a line of places. What may be due calls the first place of the line, whose
    request then claims. Only a request that has found something calls the next one, so that a
    message that many wait for costs one claim and not one for each of them.
    """

    def __init__(self, store: "Store", wakeups: Wakeups, log: Log, *, looks: bool = True) -> None:
        """Without `looks` only publishes of this process call."""
        self._store = store
        self._wakeups = wakeups
        self._clock = wakeups.clock
        self._looks = looks
        self._lines: dict[str, dict[Place, None]] = {}
        self._loop = Loop("long polls", self._tick, log, wakeups.clock)
        self._ended = False
        self._pause = FIRST_PAUSE
        self._look_at = inf
        self._due_at = inf
        """When something is due of which the last look may not know."""

    def begin(self) -> None:
        """Let requests wait again after `end`."""
        self._ended = False

    def end(self) -> None:
        """All requests that wait are answered now, and no other waits."""
        self._ended = True
        for line in self._lines.values():
            for place in line:
                place.called.set()

    async def stop(self) -> None:
        """End, with the loop."""
        self.end()
        await self._loop.stop()

    def enter(self, queue: str) -> Place:
        """A place at the end of the queue's line; `leave` must follow."""
        place = Place(queue)
        line = self._lines.setdefault(queue, {})
        line[place] = None
        if len(line) == 1:
            self._register()
        # A request that comes again and again must not make each look come at once.
        self._look_at = min(self._look_at, self._clock.monotonic() + self._pause)
        # Once it has ended none waits, and no loop is left behind that no one stops.
        looks = self._looks and not self._ended
        if looks and not self._loop.running:
            self._loop.start(self._wakeups.outages)
        self._loop.wake()
        return place

    def leave(self, place: Place, *, found: bool) -> None:
        """Give the place up; if it has `found` something, there may be more for the next one."""
        line = self._lines[place.queue]
        del line[place]
        # A call that this place has got after its claim belongs to the next one.
        if found or place.called.is_set():
            self._call(place.queue)
        if not line:
            del self._lines[place.queue]
            self._register()

    def due(self, queue: str, seconds: float) -> None:
        """Something in the queue is due in so many seconds: look then, if any request waits."""
        if queue not in self._lines:
            return
        due_at = self._clock.monotonic() + max(SHORTEST_PAUSE, seconds)
        self._due_at = min(self._due_at, due_at)
        if due_at < self._look_at:
            self._look_at = due_at
            self._loop.wake()

    async def is_called(self, place: Place, deadline: float) -> bool:
        """Wait until the place is called; false at the `deadline` (`monotonic` of the callers'
        clock), and at the end.
        """
        if self._ended:
            return False
        with suppress(TimeoutError):
            async with self._clock.callers.timeout_at(deadline):
                await place.called.wait()
        called = place.called.is_set() and not self._ended
        # Before the claim that follows, so that a call during it leads to another one.
        place.called.clear()
        return called

    def _register(self) -> None:
        # Registered again for each change: hints come with the queues that are waited for.
        if self._lines:
            self._wakeups.register(list(self._lines), self._hint, listen=True)
        else:
            self._wakeups.unregister(self._hint)

    def _hint(self, queues: frozenset[str]) -> None:
        # No queues stand for all of them.
        for queue in queues or list(self._lines):
            self._call(queue)

    def _call(self, queue: str) -> None:
        """Call the first of the line that is not called yet."""
        for place in self._lines.get(queue, ()):
            if not place.called.is_set():
                place.called.set()
                return

    async def _tick(self) -> float | None:
        queues = list(self._lines)
        if not queues:
            self._pause = FIRST_PAUSE
            self._look_at = inf
            return None
        # Each new place wakes the loop, which may have nothing to do yet.
        left = self._look_at - self._clock.monotonic()
        if left > 0:
            return left
        self._due_at = inf
        found = await self._store.look_around(queues, queues)
        due = {pair.queue for pair in found.pairs if pair.due_in <= 0}
        ends_in = inf if found.lease_ends_in is None else found.lease_ends_in
        # A claim that finds nothing gives back what has run out of time.
        for queue in due if ends_in > 0 else queues:
            self._call(queue)
        self._pause = min(LAST_PAUSE, self._pause * 1.5)
        later = [pair.due_in for pair in found.pairs if pair.due_in > 0]
        pause = min(self._clock.jitter(self._pause), ends_in, *later)
        pause = max(SHORTEST_PAUSE, pause)
        now = self._clock.monotonic()
        self._look_at = min(now + pause, self._due_at)
        return max(SHORTEST_PAUSE, self._look_at - now)


MOST_BYTES = 8 * 1024 * 1024
"""Bytes of the bodies of one answer; the first may be larger."""


@dataclass(frozen=True, slots=True)
class LeasedMessage:
    """A message that a client has leased, as it names it."""

    queue: str
    id: int
    token: UUID


class QueueJobs:
    """Leases, extends and settles messages for one broker.

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
        most_deliveries: float,
        log: Log,
        recorder: Recorder | None,
        looks: bool,
    ) -> None:
        """Publish by `write`, claim by `claimer`; `looks` as of `LongPolls`."""
        self.store = store
        self._wakeups = wakeups
        self._claimer = claimer
        self._write = write
        self._options = options
        self._rules = rules
        self._most_deliveries = most_deliveries
        self._metrics = DirectMetrics(recorder)
        self._configured = Configured(self._configure, wakeups.clock)
        self.polls = LongPolls(store, wakeups, log, looks=looks)

    def start(self) -> None:
        """Let requests wait again after `stop`."""
        self.polls.begin()

    async def begin(self) -> None:
        """Make the tokens that the configuration names; without effect the second time."""
        await self._configured.begin()

    async def _configure(self) -> None:
        for queue, tokens in self._options.queues.items():
            given: dict[QueueRole, str | None] = {
                "publish": tokens.publish,
                "consume": tokens.consume,
            }
            for role, token in given.items():
                if token is not None:
                    await self.store.tokens.put_queue(queue, role, by=BY_CONFIGURATION, token=token)

    async def publish(self, rows: Sequence[NewMessage]) -> list[int | None]:
        """Publish `rows` together; their ids, None for one whose dedup_id its queue has."""
        ids = await self._write(rows)
        self._metrics.published(rows, ids)
        for row in rows:
            if row.delay:
                self.polls.due(row.queue, row.delay)
        return ids

    async def reserve(
        self, queue: str, *, limit: int, lease: float, wait: float
    ) -> list[ClaimedMessage]:
        """Lease up to `limit` due messages for `lease` seconds; wait for the first of them.

        A cancelled call leases nothing. While it waits it holds no connection.
        """
        wanted = DirectClaimRequest(
            queues=(queue,),
            lease=lease,
            rules=self._rules,
            most_deliveries=self._most_deliveries,
            remove=False,
            limit=limit,
        )
        wait = min(wait, self._options.wait)
        if wait <= 0:
            rows, _ = await self._claimer.take_now(wanted, as_claimed)
            return await self._of_size(queue, rows or [])
        # The caller's time, which goes on also where a test lets that of the broker stand still.
        deadline = self._wakeups.clock.callers.monotonic() + wait
        # Before the first claim, so that nothing is missed between it and the wait.
        place = self.polls.enter(queue)
        # One that is cut off during its claim leaves to the next one what it was called for.
        found = True
        try:
            while True:
                rows, again = await self._claimer.take_now(wanted, as_claimed)
                if rows:
                    break
                found = False
                if again is not None:
                    self.polls.due(queue, again)
                if not await self.polls.is_called(place, deadline):
                    return []
                found = True
        except StoreError:
            # The others need not fail, too: the next look calls them.
            found = False
            raise
        finally:
            self.polls.leave(place, found=found)
        return await self._of_size(queue, rows)

    async def _of_size(self, queue: str, rows: list[ClaimedMessage]) -> list[ClaimedMessage]:
        """The first of `rows`, as many as an answer may have; the others are given back."""
        size = 0
        for number, row in enumerate(rows):
            size += len(row.payload)
            if number and size > MOST_BYTES:
                # The first ones are shown in any case: those that stay leased come back later.
                with suppress(StoreError):
                    await self.give_back(queue, rows[number:])
                return rows[:number]
        return rows

    async def give_back(self, queue: str, rows: Sequence[ClaimedMessage]) -> None:
        """Leave `rows` as they were before their claim: no one has seen them."""
        ends = [settle(row, Release(), self._rules, ended_after=0.0) for row in rows]
        result = await self.store.settle(ends)
        for end in ends:
            if end.id in result.settled:
                self._metrics.settled(end, queue)
        self._wakeups.published([queue])

    async def extend(self, message: LeasedMessage, lease: float) -> datetime | None:
        """Let the lease end `lease` seconds from now, never sooner than it does; its end by the
        database's clock. None: it is another's.
        """
        found: datetime | None = await self.store.takes.extend_held(
            message.queue, message.id, message.token, lease
        )
        return found

    async def settle(
        self,
        message: LeasedMessage,
        outcome: Outcome,
        *,
        replaced: "Callable[[ClaimedMessage], Replaced] | None" = None,
        error: str | None = None,
    ) -> Settlement | None:
        """Write what the message has ended in; None: the lease is another's, nothing is written.

        `replaced` makes its new body; `error` is stored in `last_error`.

        Raises:
            UnknownOutcomeError: it may have been written, or the lease may be gone.
        """

        def decide(row: ClaimedMessage, age: float) -> Settlement:
            found = settle(row, outcome, self._rules, ended_after=age)
            # Of a message that an operator has cancelled, it is told who and why.
            if error and row.cancelled is None:
                found.error = error
            return found

        async def write() -> Settlement | None:
            found: Settlement | None = await self.store.takes.settle_held(
                message.queue, message.id, message.token, decide, replaced
            )
            return found

        written = await self._claimer.write_end(write, message.id, message.queue)
        if written is not None and not written.leaves and written.delay:
            # No other process is told of what is due later: its next look finds it.
            self.polls.due(message.queue, written.delay)
        return written

    async def stop(self) -> None:
        """Answer the requests that wait, and end the loop."""
        await self.polls.stop()

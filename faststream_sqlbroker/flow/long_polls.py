"""Requests that wait for messages: one look for all of them, and no connection for any.

Each queue has a line of places. What may be due calls the first place of the line, whose request
then claims. Only a request that has found something calls the next one, so that a message that many
wait for costs one claim and not one for each of them.
"""

import asyncio
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from faststream_sqlbroker.flow.loop import Log, Loop
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
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
    """The requests of one broker that wait."""

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

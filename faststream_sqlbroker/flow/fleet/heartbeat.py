"""Signs of life of this process's subscribers, and what operators have paused or drained: one
transaction an interval.

It tells operators who lives, it carries pauses and drains, and it finds destinations that no live
subscriber has; no message depends on it. When it fails, everything goes on as it was last known.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.ended import WINDOW
from faststream_sqlbroker.core.orders import CancelRequest, Orders
from faststream_sqlbroker.core.rows import ClaimedMessage, SignOfLife
from faststream_sqlbroker.core.status import MIXED, LiveSubscriber, by_way, names_text
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.database.connections import LoopSemaphore
from faststream_sqlbroker.exceptions import SetupError, StoreError
from faststream_sqlbroker.flow.fleet.housekeeping import RemovedPolicies
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.flow.loop import Log, Loop, Outages

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

INTERVAL = 5.0
"""Seconds between two signs of life."""
SHORTEST_INTERVAL = 0.1
"""Seconds: a shorter interval would cost more statements than it tells."""
LONGEST_INTERVAL = 3600.0
"""Seconds: with a longer one a dead subscriber would count as alive for most of a day."""
RIDE_WAIT = 0.3
"""Intervals for which a sign of life that is due waits for a look that carries it."""
SLEEPING_INTERVAL = 3600.0
"""The same while all subscribers of the process look only when they are told; they count as alive
for twice as long."""
SLEEPING_LEASE_INTERVALS = 2
"""`LEASE_INTERVALS` then."""
LEASE_INTERVALS = 4
"""Intervals without a sign of life after which a subscriber no longer counts as alive."""
CLEAN_INTERVAL = 300.0
"""Seconds between two removals of what is over."""
LEAVE_TIMEOUT = 2.0
"""Most seconds that a stop waits to say good-bye; what is not said then, the lease says."""


@dataclass(slots=True)
class Ride:
    """A sign of life in a transaction of another part; one of both is called."""

    sign: SignOfLife
    orders: Orders | None = None
    """What operators have asked, once that is known."""
    has_failed: bool = False

    def succeeded(self, orders: Orders) -> None:
        """It is committed; operators have asked this."""
        self.orders = orders

    def failed(self) -> None:
        """It is not known to be committed."""
        self.has_failed = True


class Heartbeat:
    """The registrations of one broker in this process."""

    def __init__(
        self,
        store: "Store",
        log: Log,
        interval: Duration = INTERVAL,
        *,
        outages: Outages | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Nothing runs before the first `join`; `outages` is told when the database fails.

        Raises:
            SetupError: `interval` is none, or shorter than 100 ms or longer than an hour.
        """
        self._store = store
        self._log = log
        self._clock = clock or Clock()
        self._outages = Outages(log, self._clock) if outages is None else outages
        self._interval = parse_duration(interval, name="presence_interval")
        if not SHORTEST_INTERVAL <= self._interval <= LONGEST_INTERVAL:
            msg = (
                f"presence_interval must be from {SHORTEST_INTERVAL} s to {LONGEST_INTERVAL:.0f} "
                f"s, got {interval!r}"
            )
            raise SetupError(msg)
        self._registrations: dict[str, Registration] = {}
        self._written: dict[str, Mapping[str, Any]] = {}
        self._loop: Loop | None = None
        self._lock = LoopSemaphore()
        self.turn = LoopSemaphore()
        """Held by who pauses or resumes, until `heard` was told: of two answers the older must not
        be told last."""
        self._heard_count = 0
        self._clean_at = float("-inf")
        self._alive_at = float("-inf")
        """When the last sign of life was committed (monotonic seconds)."""
        self._asked = True
        """Whether the next sign must not wait for a look that carries it."""
        self._compared: set[str] = set()
        """Members that were compared with the others of their queues."""
        self._removed = RemovedPolicies(store, log, self._clock)
        self.destinations = Destinations(self._interval, self._clock)
        """What messages name, which is compared with what lives."""
        self._differing: set[tuple[str, str, str]] = set()
        """Queues and two ways to subscribe to each, of which the log has said that they do not go
        together."""

    def join(self, registration: Registration) -> None:
        """`registration` lives until it leaves, and is told soon which queues are paused."""
        self._registrations[registration.name] = registration
        self._removed.begin(sleeps=self._sleeps)
        if self._loop is None or self._loop.orphaned:
            self._loop = Loop("heartbeat", self.tick, self._log, self._clock)
            self._loop.start(self._outages)
        self.wake()

    def know(self, registration: Registration) -> None:
        """Tell `registration` which queues this process pauses, without a sign of life."""
        self._registrations[registration.name] = registration

    async def refresh(self) -> datetime | None:
        """Without the loop: ask which queues are paused, if any is known to be; when the first of
        these pauses ends.

        Raises:
            StoreError: nothing was told; call again.
        """
        registrations = list(self._registrations.values())
        if not any(registration.keeps_closed for registration in registrations):
            return None
        paused = await self._store.live_subscribers.paused()
        self._tell(registrations, Orders(frozenset(one.queue for one in paused), drained=None))
        return min((one.until for one in paused if one.until is not None), default=None)

    def forget(self, registration: Registration) -> None:
        """Undo `know`."""
        self._registrations.pop(registration.name, None)

    async def leave(self, registration: Registration) -> None:
        """`registration` has ended; never fails, and takes about two seconds at most."""
        self._registrations.pop(registration.name, None)
        self._compared.discard(registration.name)
        loop = self._loop
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT):
                if not self._registrations and loop is not None:
                    self._loop = None
                    await loop.stop(LEAVE_TIMEOUT)
                async with self._lock:
                    await self._store.live_subscribers.leave([registration.name])
        except (StoreError, TimeoutError) as error:
            text = (
                f"the end of the subscriber {registration.name} is not written, it is known when "
                f"its lease ends: {error}"
            )
            self._log(logging.INFO, text)

    def heard(self, paused: frozenset[str]) -> None:
        """This process itself has paused, resumed or drained: these queues are paused then."""
        self._heard_count += 1
        self._tell(list(self._registrations.values()), Orders(paused, drained=None))
        self.wake()  # another process may have changed something since, or ours are drained

    def asked(self, request: CancelRequest) -> None:
        """This process itself asks to cancel a message, which it may have."""
        for registration in list(self._registrations.values()):
            registration.asked([request])

    def wake(self) -> None:
        """Something may have changed: tell and ask at once."""
        self._asked = True
        if self._loop is not None:
            self._loop.wake()

    async def tick(self) -> float:
        """Give a sign of life and ask what operators want; seconds until the next time.

        Raises:
            StoreError: nothing was told; call again.
        """
        pause = await self._tick()
        if self._removed.due_in <= 0:
            # After a sign of life: what our own subscribers have is not gone.
            ours = self._registrations.values()
            queues = {queue for one in ours for queue in one.queues}
            await self._removed.look(queues, sleeps=self._sleeps)
        return min(pause, self._removed.due_in)

    async def _tick(self) -> float:
        clean = self._clock.monotonic() >= self._clean_at
        if not (self._asked or clean or self.destinations.are_due) and (left := self._left) > 0:
            return left
        self._asked = False
        async with self._lock:
            registrations = dict(self._registrations)
            sign = self._sign()
            known = sign.known
            heard_count = self._heard_count
            try:
                orders = await self._store.live_subscribers.announce(
                    known, set(sign.changed), sign.lease, clean=clean
                )
            except BaseException:
                self._asked = True
                raise
            self._was_written(sign)
        if clean:
            self._clean_at = self._clock.monotonic() + CLEAN_INTERVAL
        if self._heard_count != heard_count:
            self._asked = True
            return 0.0  # what was read may be older than what was heard
        self._tell([m for name, m in registrations.items() if name in self._registrations], orders)
        await self._compare_new(known.keys())
        return self._left

    async def _compare_new(self, known: AbstractSet[str]) -> None:
        """Compare subscribers that are new with those of other processes."""
        fresh = known - self._compared
        if fresh or self.destinations.are_due:
            # Read after the commit: of two that start together one at least finds the other.
            living = await self._store.live_subscribers.living()
            self._compare(fresh, living)
            self._compared |= fresh & self._registrations.keys()
            self.destinations.compare(living)

    @property
    def written_at(self) -> float:
        """When the last sign of life was committed (monotonic seconds); -inf: the last one failed,
        or there was none.
        """
        fine = self._loop is not None and self._loop.healthy
        return self._alive_at if fine else float("-inf")

    @property
    def _sleeps(self) -> bool:
        """Whether signs of life are rare: all subscribers look only when they are told, and so are
        told when a pause begins; the end of one is not told.
        """
        ours = self._registrations.values()
        return bool(ours) and all(one.told_only and not one.keeps_closed for one in ours)

    @property
    def _pause(self) -> float:
        """Seconds from one sign of life to the next."""
        return SLEEPING_INTERVAL if self._sleeps else self._interval

    @property
    def _left(self) -> float:
        """Seconds for which the next sign of life can wait for a look that carries it."""
        longest = self._pause * (1 + RIDE_WAIT)
        return self._alive_at + longest - self._clock.monotonic()

    def _sign(self) -> SignOfLife:
        often = self._pause <= WINDOW
        known = {name: each.describe(often=often) for name, each in self._registrations.items()}
        changed = {name for name, says in known.items() if self._written.get(name) != says}
        intervals = SLEEPING_LEASE_INTERVALS if self._sleeps else LEASE_INTERVALS
        return SignOfLife(known, frozenset(changed), self._pause * intervals)

    def _was_written(self, sign: SignOfLife) -> None:
        self._written = dict(sign.known)
        self._alive_at = self._clock.monotonic()

    @asynccontextmanager
    async def riding(self) -> AsyncIterator[Ride | None]:
        """A sign of life to be written inside of the block, if one is due; else None."""
        early = self._clock.monotonic() < self._alive_at + self._pause
        if self._loop is None or self._asked or early or self._lock.locked():
            yield None
            return
        async with self._lock:
            registrations = list(self._registrations.values())
            heard_count = self._heard_count
            ride = Ride(self._sign())
            yield ride
            if ride.orders is not None:
                self._was_written(ride.sign)
        if ride.has_failed or self._heard_count != heard_count:
            self.wake()
        elif ride.orders is not None:
            names = self._registrations.values()
            self._tell([one for one in registrations if one in names], ride.orders)

    def _compare(self, fresh: AbstractSet[str], living: list[LiveSubscriber]) -> None:
        """Warn of others whose policies or order differ from those of our `fresh` registrations,
        once for each pair.
        """
        for ours in (subscriber for subscriber in living if subscriber.worker in fresh):
            for queue in ours.queues:
                for way, others in by_way(queue, living).items():
                    pair = queue, min(ours.way, way), max(ours.way, way)
                    if way == ours.way or pair in self._differing:
                        continue
                    self._differing.add(pair)
                    both = f"{ours.worker} ({ours.way}), {names_text(others)} ({way})"
                    text = f"subscribers of queue {queue!r} differ: {both}; {MIXED}"
                    self._log(logging.WARNING, text)

    def _tell(self, registrations: list[Registration], orders: Orders) -> None:
        drained = orders.drained
        for registration in registrations:
            ours = None if drained is None else registration.name in drained
            registration.told(orders.paused, ours)
            registration.asked(orders.cancels)


MOST_NAMES = 1_000
"""Names that are asked about: messages may name any number, and each is remembered."""


class _First(NamedTuple):
    """The first message that named a queue."""

    at: float
    message_id: int
    queue: str
    log: Log


class Destinations:
    """Destinations that only messages of one broker's subscribers in this process name.

    Whether a live subscriber has such a queue is asked, and told, once for each. A misspelt name is
    a queue like any other: its messages would wait there for ever, unnoticed.
    """

    def __init__(self, patience: float, clock: Clock | None = None) -> None:
        """A name is asked about `patience` seconds after it was first given: its subscriber may be
        starting.
        """
        self._patience = patience
        self._clock = clock or Clock()
        self._asked: set[str] = set()
        self._open: dict[str, _First] = {}

    def named(self, queue: str, row: ClaimedMessage, log: Log) -> None:
        """`row` is moved to `queue`, as its header says; `log` is told if no subscriber has it."""
        if queue not in self._asked and len(self._asked) < MOST_NAMES:
            self._asked.add(queue)
            self._open[queue] = _First(self._clock.monotonic(), row.id, row.queue, log)

    @property
    def are_due(self) -> bool:
        """Whether there is something to ask."""
        return any(self._is_due(first) for first in self._open.values())

    def compare(self, living: Iterable[LiveSubscriber]) -> None:
        """Warn of those that are due and that none of `living` has."""
        known = {queue for subscriber in living for queue in subscriber.queues}
        for queue, first in [each for each in self._open.items() if self._is_due(each[1])]:
            del self._open[queue]
            if queue not in known:
                text = (
                    f"message {first.message_id} of queue {first.queue!r} named the destination "
                    f"{short(queue)}, and no live subscriber has a queue of this name: what is "
                    "moved there waits until one comes. destinations= says which names are meant"
                )
                first.log(logging.WARNING, text, message_id=first.message_id)

    def _is_due(self, first: _First) -> bool:
        return self._clock.monotonic() - first.at >= self._patience

"""Heartbeats of this process's subscribers, and the pauses and drains that operators have ordered.

Each interval costs one transaction. It shows operators which subscribers are alive, it returns
pauses and drains, and it finds destinations that no live subscriber has. No message depends on it:
if it fails, everything goes on with the last known state.
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
from faststream_sqlbroker.core.ended import WINDOW_SECONDS
from faststream_sqlbroker.core.orders import CancelRequest, OperatorRequests
from faststream_sqlbroker.core.rows import ClaimedMessage, HeartbeatData
from faststream_sqlbroker.core.status import MIXED_HINT, LiveSubscriber, format_names, group_by_mode
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.database.connections import LoopSemaphore
from faststream_sqlbroker.exceptions import SetupError, StoreError
from faststream_sqlbroker.flow.fleet.housekeeping import RemovedPolicies
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.flow.loop import Log, Loop, Outages

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

INTERVAL = 5.0
"""Seconds between two heartbeats."""
MIN_INTERVAL = 0.1
"""Seconds. A shorter interval would cost more statements than its information is worth."""
MAX_INTERVAL = 3600.0
"""Seconds. With a longer interval a dead subscriber would count as alive for most of a day."""
PIGGYBACK_WAIT = 0.3
"""Share of the interval for which a due heartbeat waits for a poll that can carry it."""
SLEEPING_INTERVAL = 3600.0
"""Seconds between two heartbeats while all subscribers of the process poll only when notified. They
count as alive for twice as long.
"""
SLEEPING_LEASE_INTERVALS = 2
"""`LEASE_INTERVALS` while all subscribers of the process poll only when notified."""
LEASE_INTERVALS = 4
"""Intervals without a heartbeat after which a subscriber no longer counts as alive."""
CLEAN_INTERVAL = 300.0
"""Seconds between two removals of expired rows."""
LEAVE_TIMEOUT = 2.0
"""Maximum seconds that a stop waits to remove its row; otherwise the row expires with its lease."""


@dataclass(slots=True)
class PiggybackHeartbeat:
    """A heartbeat that another transaction writes.

    The owner of that transaction calls either `mark_committed` or `mark_failed`.
    """

    sign: HeartbeatData
    orders: OperatorRequests | None = None
    """The orders of operators; None before the commit."""
    has_failed: bool = False

    def mark_committed(self, orders: OperatorRequests) -> None:
        """Record that the transaction is committed and returned `orders`."""
        self.orders = orders

    def mark_failed(self) -> None:
        """Record that the transaction is not known to be committed."""
        self.has_failed = True


class Heartbeat:
    """The registrations of a broker in this process, and their heartbeat loop."""

    def __init__(
        self,
        store: "Store",
        log: Log,
        interval: Duration = INTERVAL,
        *,
        outages: Outages | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start nothing before the first `join`. Database failures are reported to `outages`.

        Raises:
            SetupError: `interval` is not a duration, or shorter than 100 ms or longer than an hour.
        """
        self._store = store
        self._log = log
        self._clock = clock or Clock()
        self._outages = Outages(log, self._clock) if outages is None else outages
        self._interval = parse_duration(interval, name="presence_interval")
        if not MIN_INTERVAL <= self._interval <= MAX_INTERVAL:
            msg = (
                f"presence_interval must be from {MIN_INTERVAL} s to {MAX_INTERVAL:.0f} "
                f"s, got {interval!r}"
            )
            raise SetupError(msg)
        self._registrations: dict[str, Registration] = {}
        self._written_descriptions: dict[str, Mapping[str, Any]] = {}
        self._loop: Loop | None = None
        self._lock = LoopSemaphore()
        self.change_lock = LoopSemaphore()
        """Held while pausing or resuming, until `apply_paused` was called: of two answers the older
        must not be applied last."""
        self._change_count = 0
        self._clean_at = float("-inf")
        self._last_written_at = float("-inf")
        """Time when the last heartbeat was committed (monotonic seconds)."""
        self._is_requested = True
        """True if the next heartbeat must not wait for a poll that carries it."""
        self._compared_names: set[str] = set()
        """Names of subscribers that were compared with the other subscribers of their queues."""
        self._removed_policies = RemovedPolicies(store, log, self._clock)
        self.destinations = Destinations(self._interval, self._clock)
        """Destinations that messages name, to be compared with the queues of live subscribers."""
        self._reported_conflicts: set[tuple[str, str, str]] = set()
        """A queue and two modes of subscribing that do not go together, each already logged."""

    def join(self, registration: Registration) -> None:
        """Announce `registration` until it leaves, and soon notify it of the paused queues.

        A registration is a subscriber's entry in the fleet. The first one starts the loop, and each
        one causes a heartbeat at once, because a subscriber waits for the paused queues.
        """
        self._registrations[registration.name] = registration
        self._removed_policies.start(is_sleeping=self._is_sleeping)
        if self._loop is None or self._loop.is_orphaned:
            self._loop = Loop("heartbeat", self.tick, self._log, self._clock)
            self._loop.start(self._outages)
        self.wake()

    def add_passive(self, registration: Registration) -> None:
        """Notify `registration` of pauses by this process, without announcing it.

        For a subscriber under test, which has no heartbeat loop.
        """
        self._registrations[registration.name] = registration

    async def refresh(self) -> datetime | None:
        """Read the paused queues without the loop, if any queue is known to be paused.

        A test calls this when its time has advanced: a pause may have reached its end.

        Returns:
            The time when the first of these pauses ends; None if no pause has an end.

        Raises:
            StoreError: no listener was notified; call again.
        """
        registrations = list(self._registrations.values())
        if not any(registration.has_closed_queues for registration in registrations):
            return None
        paused = await self._store.live_subscribers.list_paused()
        self._notify(
            registrations,
            OperatorRequests(frozenset(pause.queue for pause in paused), drained=None),
        )
        return min((pause.until for pause in paused if pause.until is not None), default=None)

    def remove_passive(self, registration: Registration) -> None:
        """Undo `add_passive`."""
        self._registrations.pop(registration.name, None)

    async def leave(self, registration: Registration) -> None:
        """Remove `registration`, which has ended. Never fails; takes about two seconds at most.

        Without this the subscriber would count as alive until the lease of its last heartbeat ends.
        The last one to leave stops the loop.
        """
        self._registrations.pop(registration.name, None)
        self._compared_names.discard(registration.name)
        loop = self._loop
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT):
                if not self._registrations and loop is not None:
                    self._loop = None
                    await loop.stop(LEAVE_TIMEOUT)
                # Under the lock: a heartbeat in progress may contain this name, and must not write
                # it again after its removal.
                async with self._lock:
                    await self._store.live_subscribers.remove([registration.name])
        except (StoreError, TimeoutError) as error:
            text = (
                f"could not remove the registration of subscriber {registration.name}; it counts "
                f"as live until its lease expires: {error}"
            )
            self._log(logging.INFO, text)

    def apply_paused(self, paused: frozenset[str]) -> None:
        """Notify all registrations that exactly the queues `paused` are paused now.

        Called after this process itself has paused, resumed or drained, so that its subscribers
        need not wait for the next heartbeat.
        """
        # A heartbeat in progress may have read the orders before this change: it drops them.
        self._change_count += 1
        self._notify(list(self._registrations.values()), OperatorRequests(paused, drained=None))
        self.wake()  # another process may have changed something since, or ours are drained

    def notify_cancel(self, request: CancelRequest) -> None:
        """Pass on a request to cancel a message, which a subscriber of this process may hold.

        To hold a message is to have its lease. Other processes get the request with their next
        heartbeat.
        """
        for registration in list(self._registrations.values()):
            registration.notify_cancels([request])

    def wake(self) -> None:
        """Send a heartbeat and read the orders of operators at once."""
        self._is_requested = True
        if self._loop is not None:
            self._loop.wake()

    async def tick(self) -> float:
        """Send a heartbeat, read operators' orders and free messages of removed policies.

        Orders are pauses, drains and cancels. A removed policy is one that no live subscriber has
        any more, although messages still wait because of it.

        Returns:
            Seconds until the next tick.

        Raises:
            StoreError: no listener was notified; call again.
        """
        pause = await self._tick()
        if self._removed_policies.due_in <= 0:
            # After a heartbeat, so that policies of our own subscribers do not count as removed.
            registrations = self._registrations.values()
            queues = {queue for registration in registrations for queue in registration.queues}
            await self._removed_policies.free_waiting(queues, is_sleeping=self._is_sleeping)
        return min(pause, self._removed_policies.due_in)

    async def _tick(self) -> float:
        """Write a heartbeat if due, and apply the operators' orders in the answer.

        Return the seconds until the next tick: longer than the interval, because a subscriber's
        poll, which comes first, can carry the next heartbeat. Orders that may be older than a
        change by this process are dropped, and read again.
        """
        clean = self._clock.monotonic() >= self._clean_at
        if (
            not (self._is_requested or clean or self.destinations.has_due)
            and (wait := self._remaining_wait) > 0
        ):
            return wait
        # Cleared before the statement, so that a `wake` during the statement requests another one.
        self._is_requested = False
        async with self._lock:
            # A snapshot: `join` requests another heartbeat for subscribers that join later.
            registrations = dict(self._registrations)
            sign = self._build_data()
            descriptions = sign.descriptions
            change_count = self._change_count
            try:
                orders = await self._store.live_subscribers.write_heartbeat(
                    descriptions, set(sign.changed_names), sign.lease_seconds, clean=clean
                )
            except BaseException:
                # Also when cancelled: it is unknown whether the heartbeat was written.
                self._is_requested = True
                raise
            self._record_written(sign)
        if clean:
            self._clean_at = self._clock.monotonic() + CLEAN_INTERVAL
        if self._change_count != change_count:
            self._is_requested = True
            return 0.0  # the orders read may be older than the change just applied
        # Skip subscribers that have left during the statement.
        self._notify(
            [
                registration
                for name, registration in registrations.items()
                if name in self._registrations
            ],
            orders,
        )
        await self._compare_new(descriptions.keys())
        return self._remaining_wait

    async def _compare_new(self, names: AbstractSet[str]) -> None:
        """Warn if new subscribers do not go together with subscribers of other processes.

        They do not if their policies or order differ in a shared queue. Also warn if no live
        subscriber has a queue that messages have named as their destination.
        """
        new_names = names - self._compared_names
        if new_names or self.destinations.has_due:
            # Read after the commit: of two subscribers that start together, at least one finds the
            # other.
            live_subscribers = await self._store.live_subscribers.list_live()
            self._compare(new_names, live_subscribers)
            self._compared_names |= new_names & self._registrations.keys()
            self.destinations.compare(live_subscribers)

    @property
    def written_at(self) -> float:
        """Time when the last heartbeat was committed (monotonic seconds).

        It is -inf if the last heartbeat failed, or if there was none. `WritePath` takes a recent
        one as proof that the database takes writes.
        """
        is_healthy = self._loop is not None and self._loop.healthy
        return self._last_written_at if is_healthy else float("-inf")

    @property
    def _is_sleeping(self) -> bool:
        """True if heartbeats are rare because all subscribers poll only when notified.

        Such subscribers are notified when a pause begins. The end of a pause is not notified, so
        they must not sleep during a pause.
        """
        registrations = self._registrations.values()
        return bool(registrations) and all(
            registration.notify_only and not registration.has_closed_queues
            for registration in registrations
        )

    @property
    def _current_interval(self) -> float:
        """Seconds between two heartbeats."""
        return SLEEPING_INTERVAL if self._is_sleeping else self._interval

    @property
    def _remaining_wait(self) -> float:
        """Seconds for which the next heartbeat can still wait for a poll that carries it.

        A heartbeat is due after the interval. It may be late by a share of that (PIGGYBACK_WAIT),
        to save a transaction; after that the heartbeat's own loop writes it.
        """
        max_interval = self._current_interval * (1 + PIGGYBACK_WAIT)
        return self._last_written_at + max_interval - self._clock.monotonic()

    def _build_data(self) -> HeartbeatData:
        """Build the data of the next heartbeat: all registrations, and which have changed.

        The heartbeat is the sign that the subscribers live: without another one they count as ended
        after the lease. Unchanged descriptions are not written again.
        """
        is_frequent = self._current_interval <= WINDOW_SECONDS
        descriptions = {
            name: registration.describe(is_frequent=is_frequent)
            for name, registration in self._registrations.items()
        }
        changed = {
            name
            for name, description in descriptions.items()
            if self._written_descriptions.get(name) != description
        }
        intervals = SLEEPING_LEASE_INTERVALS if self._is_sleeping else LEASE_INTERVALS
        return HeartbeatData(descriptions, frozenset(changed), self._current_interval * intervals)

    def _record_written(self, sign: HeartbeatData) -> None:
        """Remember the descriptions and the time of the committed heartbeat `sign`."""
        self._written_descriptions = dict(sign.descriptions)
        self._last_written_at = self._clock.monotonic()

    @asynccontextmanager
    async def piggyback(self) -> AsyncIterator[PiggybackHeartbeat | None]:
        """Provide a heartbeat to be written inside of the block, or None if none is due.

        A poll of a subscriber carries the heartbeat in its own transaction, which saves one. In the
        block the poll reports the commit, with the operators' orders, or the failure.
        """
        is_early = self._clock.monotonic() < self._last_written_at + self._current_interval
        # A poll does not wait for a heartbeat in progress: it goes on without one.
        if self._loop is None or self._is_requested or is_early or self._lock.locked():
            yield None
            return
        async with self._lock:
            registrations = list(self._registrations.values())
            change_count = self._change_count
            heartbeat = PiggybackHeartbeat(self._build_data())
            yield heartbeat
            if heartbeat.orders is not None:
                self._record_written(heartbeat.sign)
        # As in `_tick`: orders that were read before a change of this process are dropped.
        if heartbeat.has_failed or self._change_count != change_count:
            self.wake()
        elif heartbeat.orders is not None:
            current = self._registrations.values()
            self._notify(
                [registration for registration in registrations if registration in current],
                heartbeat.orders,
            )

    def _compare(self, new_names: AbstractSet[str], live_subscribers: list[LiveSubscriber]) -> None:
        """Warn once per queue and pair of modes in which subscribers of that queue differ.

        The mode of a subscriber is the text of its policies and its order. Only pairs with a
        subscriber of `new_names` are compared: subscribers of this process that have just joined.
        """
        for local_subscriber in (
            subscriber for subscriber in live_subscribers if subscriber.worker in new_names
        ):
            for queue in local_subscriber.queues:
                for mode, subscribers in group_by_mode(queue, live_subscribers).items():
                    pair = queue, min(local_subscriber.mode, mode), max(local_subscriber.mode, mode)
                    if mode == local_subscriber.mode or pair in self._reported_conflicts:
                        continue
                    self._reported_conflicts.add(pair)
                    description = (
                        f"{local_subscriber.worker} ({local_subscriber.mode}), "
                        f"{format_names(subscribers)} ({mode})"
                    )
                    text = f"subscribers of queue {queue!r} differ: {description}; {MIXED_HINT}"
                    self._log(logging.WARNING, text)

    def _notify(self, registrations: list[Registration], orders: OperatorRequests) -> None:
        """Pass the operators' `orders` on to `registrations`: pauses, drains and cancels.

        A drained subscriber claims nothing, by an operator's order. `drained` of the orders is None
        if they do not say which subscribers are drained.
        """
        drained = orders.drained
        for registration in registrations:
            is_drained = None if drained is None else registration.name in drained
            registration.update_paused(orders.paused, is_drained)
            registration.notify_cancels(orders.cancels)


MAX_NAMES = 1_000
"""Maximum number of names to check: messages may name any number, and each is remembered."""


class _FirstUse(NamedTuple):
    """The first message that named a destination."""

    at: float
    message_id: int
    queue: str
    log: Log


class Destinations:
    """Destinations that only messages name, as seen by a broker's subscribers in this process.

    For each name the heartbeat checks once whether a live subscriber has such a queue, and the log
    reports a missing one once. A misspelt name is a queue like any other: its messages would wait
    there for ever, unnoticed.
    """

    def __init__(self, delay: float, clock: Clock | None = None) -> None:
        """Check a name `delay` seconds after the first use: the subscriber may be starting."""
        self._delay = delay
        self._clock = clock or Clock()
        self._checked_names: set[str] = set()
        self._pending: dict[str, _FirstUse] = {}

    def record(self, queue: str, row: ClaimedMessage, log: Log) -> None:
        """Record that `row` is moved to `queue` because of a header.

        If no live subscriber has that queue, which may be misspelt, `log` gets a warning later.
        Each name is checked once, and no more than `MAX_NAMES`.
        """
        if queue not in self._checked_names and len(self._checked_names) < MAX_NAMES:
            self._checked_names.add(queue)
            self._pending[queue] = _FirstUse(self._clock.monotonic(), row.id, row.queue, log)

    @property
    def has_due(self) -> bool:
        """True if a name is due to be checked."""
        return any(self._is_due(first) for first in self._pending.values())

    def compare(self, live_subscribers: Iterable[LiveSubscriber]) -> None:
        """Warn of each due name that no live subscriber has as a queue.

        A name is due some seconds after its first use, so that a new subscriber has time to start.
        """
        live_queues = {queue for subscriber in live_subscribers for queue in subscriber.queues}
        for queue, first in [item for item in self._pending.items() if self._is_due(item[1])]:
            del self._pending[queue]
            if queue not in live_queues:
                text = (
                    f"message {first.message_id} of queue {first.queue!r} named the destination "
                    f"{format_value(queue)}, but no live subscriber has this queue: messages moved "
                    "there wait for a subscriber. List the allowed queues in destinations."
                )
                first.log(logging.WARNING, text, message_id=first.message_id)

    def _is_due(self, first: _FirstUse) -> bool:
        return self._clock.monotonic() - first.at >= self._delay

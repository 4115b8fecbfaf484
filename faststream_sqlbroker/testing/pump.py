"""Delivers what is due in the database of a test: one message after the other, by the same claims,
workers and writes as ever.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.flow.shielded import ShieldedCalls
from faststream_sqlbroker.flow.tasks.schedules import Scheduler
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.testing import clock as clocks
from faststream_sqlbroker.testing.clock import VirtualClock
from faststream_sqlbroker.testing.consumer import SteppedConsumer
from faststream_sqlbroker.testing.database import TestDatabase
from faststream_sqlbroker.testing.reports import Attempt, Waiting
from faststream_sqlbroker.testing.transactions import PAUSE, HeldPublishes

MOST_DELIVERIES = 10_000
"""Deliveries of one call of `run_due`."""
LONGEST_CHAIN = 100
"""Deliveries at one moment of which each comes from the one before: handlers that wait for what
they publish, answers to answers, retries without a delay. A longer chain is a circle."""
_nested: ContextVar[int] = ContextVar("sqlbroker_test_nested", default=0)


@dataclass(eq=False)
class Failure:
    """What a handler has raised."""

    error: BaseException
    keys: frozenset[tuple[str, int]]
    """Table and id of each of its messages."""
    first: bool
    """Whether it was the first attempt."""
    raised: bool = False
    """Whether a caller has seen it."""


@dataclass(eq=False)
class Delivery:
    """One run of a handler."""

    consumer: SteppedConsumer
    task: asyncio.Task[None]
    rows: list[ClaimedMessage] = field(default_factory=list)
    ids: frozenset[int] = frozenset()
    attempts: dict[int, int] = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def keys(self) -> frozenset[tuple[str, int]]:
        """Table and id of each of its messages: brokers of one test may have different tables."""
        return frozenset((self.consumer.table, message_id) for message_id in self.ids)

    def add(self, rows: Sequence[ClaimedMessage]) -> None:
        """It has these, too."""
        self.rows += rows
        self.ids |= {row.id for row in rows}
        self.attempts |= {row.id: row.attempts_count + 1 for row in rows}


@dataclass
class Member:
    """A broker of the test."""

    store: Store
    scheduler: Scheduler
    wakeups: Wakeups
    refresh_pauses: Callable[[], Any]
    fires_at: int | None = None
    looked_at: int = -1
    woken_at: int = -1
    pause_ends: int | None = None

    @property
    def table(self) -> str:
        """The name of its table of messages."""
        return self.store.tables.config.message_table_name


@dataclass
class _Blocked:
    """Subscribers whose claims have found nothing, until something changes."""

    at: int = -1
    of: set[SteppedConsumer] = field(default_factory=set)


class _Chains:
    """How far the deliveries of one call of `run_due` are from what was due as it began."""

    def __init__(self, last_ids: dict[str, int]) -> None:
        """`last_ids` are those of each table."""
        self.count = 0
        self._last_ids = last_ids
        self._lengths: dict[tuple[str, int], int] = {}

    def add(self, delivery: Delivery, last_id: int) -> int:
        """The length of the chain that ends with `delivery`; `last_id` is now its table's."""
        self.count += 1
        table = delivery.consumer.table
        lengths = self._lengths
        length = 1 + max(lengths.get((table, message_id), 0) for message_id in delivery.ids)
        for message_id in (*delivery.ids, *range(self._last_ids[table] + 1, last_id + 1)):
            lengths[table, message_id] = length
        self._last_ids[table] = last_id
        return length


class Pump:
    """Moves the subscribers of one test on."""

    def __init__(self, clock: VirtualClock, database: TestDatabase) -> None:
        """Nothing is delivered before `run_due`."""
        self.clock = clock
        self.database = database
        self.held = HeldPublishes()
        """What is published once its transaction is committed."""
        self.members: list[Member] = []
        self._consumers: list[SteppedConsumer] = []
        self._ever: list[SteppedConsumer] = []
        self._deliveries: dict[asyncio.Task[None], Delivery] = {}
        self._claiming = asyncio.Lock()
        self._shielded = ShieldedCalls()
        self._progress = 0
        self._blocked = _Blocked()
        self._again_at: dict[SteppedConsumer, int] = {}
        self._awaited: set[tuple[str, int]] = set()
        self._failures: list[Failure] = []
        self._attempts: list[Attempt] = []
        self._closed = False
        self._endless = False
        """Whether deliveries go in a circle, and some of their handlers still run."""
        self._done: tuple[Any, ...] = ()
        """The state in which nothing more was due."""
        self._next: int | None = None
        """When something will be, if the state stays."""

    # -- who takes part ------------------------------------------------------------------------

    def add(self, consumer: SteppedConsumer) -> None:
        """`consumer` claims from now on."""
        self._consumers.append(consumer)
        self._ever.append(consumer)
        self._progress += 1

    def remove(self, consumer: SteppedConsumer) -> None:
        """No longer."""
        if consumer in self._consumers:
            self._consumers.remove(consumer)

    def is_consumed(self, queue: str) -> bool:
        """Whether a subscriber of the test has `queue`, paused or not."""
        return any(queue in consumer.subscribed for consumer in self._consumers)

    def is_delivery(self, task: "asyncio.Task[Any] | None") -> bool:
        """Whether `task` runs a handler."""
        return task in self._deliveries

    def deliveries_of(self, consumer: SteppedConsumer) -> "set[asyncio.Task[Any]]":
        """The tasks that run its handlers."""
        return {t for t, delivery in self._deliveries.items() if delivery.consumer is consumer}

    def unclaimed(self) -> asyncio.Lock:
        """While it is held, nothing is claimed."""
        return self._claiming

    async def close(self) -> None:
        """End what waits for time to pass."""
        self._closed = True
        for consumer in self._consumers:
            consumer.end()
        running = [task for task in self._deliveries if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        # A connection that is in use when the event loop ends would never be closed.
        for consumer in self._ever:
            await consumer.stopped()
        await self.clock.quiet()

    # -- deliver -------------------------------------------------------------------------------

    async def published(self, ids: Collection[int | None], table: str) -> None:
        """Deliver the messages `ids` and all that is due; raise what their first attempts raise."""
        own = {(table, message_id) for message_id in ids if message_id is not None}
        self._progress += 1
        own -= self._awaited
        self._awaited |= own
        seen = len(self._failures)
        try:
            await self.run_due()
            await self._ended(own)
            own_ids = [message_id for _, message_id in own]
            while not self.clock.is_delivering() and await self._kept_back(own_ids, table):
                await self.run_due()
        finally:
            self._awaited -= own
        self._raise_first(own, seen)

    def _raise_first(self, own: set[tuple[str, int]], seen: int) -> None:
        """Raise the first failure since `seen` that no other publisher waits for."""
        for failure in self._failures[seen:]:
            if failure.raised or not failure.first:
                continue
            if failure.keys & own or not failure.keys & self._awaited:
                failure.raised = True
                raise failure.error

    async def idle(self) -> None:
        """Deliver what is due, and `finish_running`."""
        await self.run_due(limit=clocks.STUCK)
        await self.finish_running()

    async def finish_running(self, *, time_follows: bool = False) -> None:
        """Wait until no handler runs, nor is one about to be started by a transaction that has been
        committed.

        Args:
            time_follows: Time is moved then, so a handler is left that waits for it in a task of
                its own.

        Raises:
            TimeoutError: a handler took more than 5 seconds.
        """
        while (running := self._running(time_follows)) or self.held.is_committing:
            if running:
                await self._wait_for(running[0], clocks.STUCK, time_follows=time_follows)
                await self.run_due(limit=clocks.STUCK)
            else:
                await asyncio.sleep(PAUSE)

    def _running(self, time_follows: bool) -> list[Delivery]:
        return [d for d in self._deliveries.values() if self._runs(d, time_follows)]

    def _runs(self, delivery: Delivery, time_follows: bool) -> bool:
        """Whether it goes on without time that passes."""
        task = delivery.task
        paused = self.clock.is_paused(task)
        paused = paused or (time_follows and self.clock.is_paused_within(task))
        return not task.done() and not paused

    async def _kept_back(self, ids: Collection[int], table: str) -> bool:
        """Wait for the end of a handler that keeps one of `ids` back; false if none can."""
        if not self.database.are_due(table, ids, self.clock.microseconds):
            return False
        running = [d for t, d in self._deliveries.items() if not self.clock.is_paused(t)]
        if not running:
            return False
        with suppress(Exception):  # its own publisher is told
            await self._wait_for(running[0], None)
        await asyncio.sleep(0)
        return True

    async def _ended(self, own: set[tuple[str, int]]) -> None:
        """Wait until no other task runs a handler on one of `own`."""
        current = asyncio.current_task()
        for task, delivery in list(self._deliveries.items()):
            if delivery.keys & own and task is not current:
                await self._wait_for(delivery, None)

    async def run_due(self, *, limit: float | None = None) -> bool:
        """Deliver what is due until nothing is; whether there was anything.

        Args:
            limit: Real seconds that a handler may take.

        Raises:
            TimeoutError: one took longer.
            AssertionError: it would go on for ever.
        """
        if self._closed:
            return False
        nested = _nested.get()
        # Once it is known, all handlers that wait for each other give up.
        self._endless = bool(self._deliveries) and (self._endless or nested > LONGEST_CHAIN)
        self._refuse_endless()
        for member in self.members:
            await self._look_at_schedules(member)
        await self._look_at_leases()
        self._blocked = _Blocked()
        last_id = self.database.last_id
        chains = _Chains({table: last_id(table) for table in {c.table for c in self._ever}})
        while (delivery := await self._run_one(limit)) is not None:
            length = chains.add(delivery, last_id(delivery.consumer.table))
            self._endless |= nested + length > LONGEST_CHAIN or chains.count > MOST_DELIVERIES
            self._refuse_endless()
        self._done = self._state()
        self._next = self._find_next_moment()
        return chains.count > 0

    def _refuse_endless(self) -> None:
        if self._endless:
            raise AssertionError(
                f"deliveries go on without end at {self.clock.now:%H:%M:%S.%f}: handlers publish "
                "to each other in a circle, or a retry has no delay"
            )

    async def _run_one(self, limit: float | None) -> Delivery | None:
        """The delivery of the first due message; None if none may start."""
        async with self._claiming:
            claimed = await self._shielded.run(self._claim_next(), self._give_back)
            if claimed is None:
                return None
            consumer, delivery = claimed
            if delivery is None:
                delivery = self._start(consumer)
            elif not delivery.task.done():
                # The batch that waits for messages takes them.
                await self._taken(consumer)
        await self._wait_for(delivery, limit)
        return delivery

    async def _give_back(self) -> None:
        """Who has claimed was cancelled."""
        for consumer in self._consumers:
            await consumer.give_back()

    async def _claim_next(self) -> tuple[SteppedConsumer, Delivery | None] | None:
        """The subscriber that has claimed the first due message, and the delivery that waits for
        it, if one does; None if none may start.
        """
        while True:
            if (left := next((c for c in self._consumers if c.waiting()), None)) is not None:
                return left, self._join(left)
            consumer, pairs = self._first_due()
            if consumer is None:
                return None
            before = self.clock.microseconds
            again = await consumer.claim(pairs)
            if consumer.waiting():
                self._again_at.pop(consumer, None)
                return consumer, self._join(consumer)
            self._blocked.of.add(consumer)
            self._again_at.pop(consumer, None)
            if again is not None and again > 0:
                self._again_at[consumer] = before + round(again * 1_000_000)

    def _first_due(self) -> tuple[SteppedConsumer | None, list[tuple[str, int]]]:
        """Who has the first due message, and the pairs to claim from."""
        if self._blocked.at != self._progress:
            self._blocked = _Blocked(self._progress)
        free = [c for c in self._consumers if c not in self._blocked.of and c.queues]
        found = self._first_head(free)
        if found is None:
            return None, []
        _, priority, _, queue, table = found
        consumer = next(c for c in free if c.table == table and queue in c.queues)
        if not consumer.looks_at_all and not consumer.settings.batch:
            return consumer, [(queue, -priority)]
        now = self.clock.microseconds
        return consumer, self.database.due_pairs(table, consumer.queues, now)

    def _first_head(self, free: Sequence[SteppedConsumer]) -> tuple[int, int, int, str, str] | None:
        heads = [self._head(table, free) for table in {c.table for c in free}]
        return min((head for head in heads if head is not None), default=None)

    def _head(
        self, table: str, free: Sequence[SteppedConsumer]
    ) -> tuple[int, int, int, str, str] | None:
        """The first due message of `table` for one of `free`, and `table`."""
        queues = list(dict.fromkeys(q for c in free if c.table == table for q in c.queues))
        head = self.database.head(table, queues, self.clock.microseconds)
        return None if head is None else (*head, table)

    def _join(self, consumer: SteppedConsumer) -> Delivery | None:
        """The batch that takes what was just claimed as soon as its worker has a turn, if any."""
        gathering = consumer.inflight.first_gathering
        if gathering is None or gathering.task not in self._deliveries:
            return None
        delivery = self._deliveries[gathering.task]
        delivery.add(consumer.waiting()[: gathering.missing])
        return delivery

    async def _taken(self, consumer: SteppedConsumer) -> None:
        while consumer.inflight.first_gathering is not None and consumer.waiting():
            await asyncio.sleep(0)

    def _start(self, consumer: SteppedConsumer) -> Delivery:
        rows = consumer.waiting() if consumer.settings.batch else consumer.waiting()[:1]
        task = asyncio.create_task(self._deliver(consumer), name=consumer.title)
        delivery = self._deliveries[task] = Delivery(consumer, task)
        delivery.add(rows)
        task.add_done_callback(self._forget)
        return delivery

    def _forget(self, task: "asyncio.Task[None]") -> None:
        del self._deliveries[task]
        if not task.cancelled():
            task.exception()
        self.clock.note()

    async def _deliver(self, consumer: SteppedConsumer) -> None:
        _nested.set(_nested.get() + 1)
        clocks.delivery.set(asyncio.current_task())
        try:
            await consumer.deliver()
        finally:
            # Here, not in `_forget`: who waits for the task may look before its callbacks run.
            self._progress += 1
            task: Any = asyncio.current_task()
            delivery = self._deliveries[task]
            for row in delivery.rows:
                self._note_attempt(row, delivery)

    def _note_attempt(self, row: ClaimedMessage, delivery: Delivery) -> None:
        error = getattr(row.outcome, "error", None)
        failure = delivery.failure
        if failure is not None:
            error = failure.error
        elif isinstance(error, TimeoutError):
            # The limit of handler_timeout lies around the pipeline.
            first = delivery.attempts[row.id] == 1
            self._failures.append(Failure(error, delivery.keys, first))
        self._attempts.append(
            Attempt(
                row.id,
                row.queue,
                delivery.attempts[row.id],
                type(row.outcome).__name__.lower() if row.outcome is not None else "none",
                error,
            )
        )

    def note_failure(self, rows: Any, error: BaseException) -> None:
        """The handler of `rows`, a row or a tuple of rows, has raised `error`."""
        given: Sequence[ClaimedMessage] = rows if isinstance(rows, tuple | list) else (rows,)
        first = all(not row.attempts_count for row in given)
        task: Any = asyncio.current_task()
        delivery = self._deliveries.get(task)
        keys = frozenset() if delivery is None else delivery.keys
        failure = Failure(error, keys, first)
        self._failures.append(failure)
        if delivery is not None:
            delivery.failure = failure

    async def _wait_for(
        self, delivery: Delivery, limit: float | None, *, time_follows: bool = False
    ) -> None:
        """Wait until it has ended, or waits for time to pass."""
        clock = self.clock
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        name = f"{delivery.consumer.title}, of message {', '.join(map(str, sorted(delivery.ids)))},"
        try:
            while self._runs(delivery, time_follows):
                await clock.changed_by(deadline, name)
        except asyncio.CancelledError:
            # As if the handler ran in the task that publishes: it is cut off together with it.
            delivery.consumer.cancel_worker(delivery.task)
            with suppress(asyncio.CancelledError):
                await asyncio.wait((delivery.task,))
            raise
        if delivery.task.done() and not delivery.task.cancelled():
            delivery.task.result()

    # -- what time does ------------------------------------------------------------------------

    async def _look_at_schedules(self, member: Member) -> None:
        now = self.clock.microseconds
        if not member.scheduler.planned:
            return
        if member.looked_at < 0 or (member.fires_at is not None and member.fires_at <= now):
            at = await member.scheduler.fire_due()
            member.fires_at = None if at is None else max(now + 1_000, to_microseconds(at))
            member.looked_at = now
            self._progress += 1

    async def _look_at_leases(self) -> None:
        for consumer in list(self._consumers):
            await consumer.renew()
            if not consumer.queues:
                continue
            ends = self.database.next_lease_end(consumer.table, consumer.queues)
            if ends is not None and ends < self.clock.microseconds:
                await consumer.store.release_stuck(consumer.queues, 1_000)
        for member in self.members:
            ends = await member.refresh_pauses()
            member.pause_ends = None if ends is None else to_microseconds(ends)
            if member.woken_at != self.clock.microseconds:
                # Nothing polls: at each moment, who waits for a message looks once.
                member.woken_at = self.clock.microseconds
                member.wakeups.look_again()

    def _state(self) -> tuple[Any, ...]:
        """Another one whenever something may be due that was not, though no time has passed."""
        open_queues = tuple(consumer.queues for consumer in self._consumers)
        return self.database.version(), self._progress, open_queues, len(self.members)

    def may_be_due(self) -> bool:
        """Whether `run_due` may find anything: most timers change nothing in the database."""
        now = self.clock.microseconds
        return self._state() != self._done or (self._next is not None and self._next <= now)

    def next_moment(self) -> int | None:
        """When something happens next by itself, in microseconds since 1970, after now."""
        return self._find_next_moment() if self.may_be_due() else self._next

    def _find_next_moment(self) -> int | None:
        now = self.clock.microseconds
        moments = list(self._again_at.values())
        for member in self.members:
            moments += self._moments_of_member(member, now)
        for consumer in self._consumers:
            moments += self._moments_of_consumer(consumer, now)
        return min((moment for moment in moments if moment > now), default=None)

    def _moments_of_member(self, member: Member, now: int) -> list[int]:
        """When a schedule fires, a pause ends, or what a caller waits for is due."""
        awaited = tuple(member.wakeups.awaited)
        due = self.database.next_due(member.table, awaited, now) if awaited else None
        found = (member.fires_at, _after(member.pause_ends), due)
        return [moment for moment in found if moment is not None]

    def _moments_of_consumer(self, consumer: SteppedConsumer, now: int) -> list[int]:
        """When a message of its queues is due, a lease ends, or one of its own is to be renewed."""
        found: list[int | None] = []
        if queues := consumer.queues:
            found.append(self.database.next_due(consumer.table, queues, now))
            found.append(_after(self.database.next_lease_end(consumer.table, queues)))
        if consumer.holds:
            found.append(now + round(consumer.lease * 1_000_000 / 3))
        return [moment for moment in found if moment is not None]

    # -- reports -------------------------------------------------------------------------------

    def take_attempts(self) -> tuple[list[Attempt], list[BaseException]]:
        """What ran since the last call, and errors that no publisher was told of."""
        attempts, self._attempts = self._attempts, []
        failures, self._failures = self._failures, []
        return attempts, [failure.error for failure in failures if not failure.raised]

    def waiting(self, tables: Collection[str]) -> list[Waiting]:
        """The live messages, and why they wait."""
        running = frozenset[int]().union(*(d.ids for d in self._deliveries.values()))
        return [
            self._waiting(row, running) for table in tables for row in self.database.live(table)
        ]

    def _waiting(self, row: Any, running: Collection[int]) -> Waiting:
        message_id, queue, state, due, attempts, error, lease_ends = row
        now = self.clock.microseconds
        why = f"is due since {from_microseconds(due)}"
        if state == "PROCESSING":
            due = lease_ends
            why = "is being handled" if message_id in running else "is held"
            why += f", until {from_microseconds(due)} at the latest"
        elif due > now:
            why = f"waits until {from_microseconds(due)}"
        elif not any(queue in consumer.queues for consumer in self._consumers):
            why += ", and nothing that runs is subscribed to the queue"
        else:
            why += ", and a policy, its order or a pause keeps it back"
        if attempts:
            last = error.strip().splitlines()[0] if error else "without an error"
            why += f", after {attempts} attempts ({last})"
        return Waiting(message_id, queue, from_microseconds(due), attempts, why)


def _after(moment: int | None) -> int | None:
    """When it is over: at its very microsecond it still holds."""
    return None if moment is None else moment + 1

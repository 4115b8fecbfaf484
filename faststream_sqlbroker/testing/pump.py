"""Delivers what is due in the database of a test: one message after the other, by the same claims,
workers and writes as ever.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.shielded import ShieldedCalls
from faststream_sqlbroker.flow.tasks.schedules import Scheduler
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.testing import clock as clocks
from faststream_sqlbroker.testing.clock import VirtualClock
from faststream_sqlbroker.testing.consumer import SteppedConsumer
from faststream_sqlbroker.testing.database import LiveRow, TestDatabase
from faststream_sqlbroker.testing.reports import Attempt, Drained, Published, Waiting, published
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
    attempts: dict[int, int] = field(default_factory=dict)
    """The number of the attempt of each message, by id."""
    failure: Failure | None = None

    @property
    def keys(self) -> frozenset[tuple[str, int]]:
        """Table and id of each of its messages: brokers of one test may have different tables."""
        return frozenset((self.consumer.table, message_id) for message_id in self.attempts)

    def add(self, rows: Sequence[ClaimedMessage]) -> None:
        """It has these, too."""
        self.rows += rows
        self.attempts |= {row.id: row.attempts_count + 1 for row in rows}


@dataclass
class Member:
    """A broker of the test."""

    table: str
    """The name of its table of messages."""
    scheduler: Scheduler
    wakeups: Wakeups
    refresh_pauses: Callable[[], Any]
    fires_at: int | None
    """When to look at its schedules."""
    woken_at: int = -1
    pause_ends: int | None = None


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
        length = 1 + max(lengths.get(key, 0) for key in delivery.keys)
        new = [(table, i) for i in range(self._last_ids[table] + 1, last_id + 1)]
        lengths.update(dict.fromkeys((*delivery.keys, *new), length))
        self._last_ids[table] = last_id
        return length


class Pump:
    """Moves the subscribers of one test on."""

    def __init__(
        self, clock: VirtualClock, database: TestDatabase, tables: Collection[str]
    ) -> None:
        """Nothing is delivered before `run_due`; `tables` are those of messages."""
        self.tables = tables
        self.clock = clock
        self.database = database
        self.held = HeldPublishes()
        """What is published once its transaction is committed."""
        self.members: list[Member] = []
        self._consumers: list[SteppedConsumer] = []
        self._deliveries: dict[asyncio.Task[None], Delivery] = {}
        self._claiming = asyncio.Lock()
        self._shielded = ShieldedCalls()
        self._blocked: set[SteppedConsumer] = set()
        """Those whose claims have found nothing, until something changes."""
        self._again_at: dict[SteppedConsumer, int] = {}
        self._awaited: set[tuple[str, int]] = set()
        self._failures: list[Failure] = []
        self._attempts: list[Attempt] = []
        self._closed = False
        self._endless = False
        """Whether deliveries go in a circle, and some of their handlers still run."""

    # -- who takes part ------------------------------------------------------------------------

    def add(self, consumer: SteppedConsumer) -> None:
        """`consumer` claims from now on, until it stops."""
        if consumer not in self._consumers:
            self._consumers.append(consumer)
        self._blocked = set()

    def is_consumed(self, queue: str) -> bool:
        """Whether a subscriber of the test has `queue`, paused or not."""
        return any(queue in c.settings.queues for c in self._consumers if not c.stopping)

    def is_delivery(self, task: "asyncio.Task[Any] | None") -> bool:
        """Whether `task` runs a handler."""
        return task in self._deliveries

    def deliveries_of(self, consumer: SteppedConsumer) -> "list[asyncio.Task[None]]":
        """The tasks that run its handlers."""
        return [t for t, delivery in self._deliveries.items() if delivery.consumer is consumer]

    async def close(self) -> None:
        """End what waits for time to pass."""
        await self.held.close()
        self._closed = True
        for consumer in self._consumers:
            consumer.end()
        running = [task for task in self._deliveries if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        # A connection that is in use when the event loop ends would never be closed.
        for consumer in self._consumers:
            await consumer.stopped()
        await self.clock.quiet()

    # -- deliver -------------------------------------------------------------------------------

    async def published(self, ids: Collection[int | None], table: str) -> None:
        """Deliver the messages `ids` and all that is due; raise what their first attempts raise."""
        own = {(table, message_id) for message_id in ids if message_id is not None}
        self._blocked = set()
        own -= self._awaited
        self._awaited |= own
        seen = len(self._failures)
        try:
            await self.run_due()
            await self._ended(own)
            while not self.clock.is_delivering() and await self._kept_back(own, table):
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
        return not task.done() and not self.clock.waits_for_time(task, within=time_follows)

    async def _kept_back(self, own: Collection[tuple[str, int]], table: str) -> bool:
        """Wait for the end of a handler that keeps one of `own` back; false if none can."""
        now = self.clock.microseconds
        live = self.database.live(table)
        if not any(
            (table, row.id) in own and row.lease_ends is None and row.due <= now for row in live
        ):
            return False
        running = [d for t, d in self._deliveries.items() if not self.clock.waits_for_time(t)]
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
        self._blocked = set()
        last_id = self.database.last_id
        chains = _Chains({table: last_id(table) for table in {c.table for c in self._consumers}})
        while (delivery := await self._run_one(limit)) is not None:
            length = chains.add(delivery, last_id(delivery.consumer.table))
            self._endless |= nested + length > LONGEST_CHAIN or chains.count > MOST_DELIVERIES
            self._refuse_endless()
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
            consumer, joined = claimed
            delivery = joined or self._start(consumer)
            # A batch that waits for messages takes them.
            while joined and consumer.inflight.first_gathering is not None and consumer.waiting():
                await asyncio.sleep(0)
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
            now = self.clock.microseconds
            # Of several subscribers of a queue the last one takes a message, so that one which an
            # earlier test has declared does not.
            free = [c for c in reversed(self._consumers) if c not in self._blocked]
            heads = [(due, c) for c in free if (due := next(c.due(now), None)) is not None]
            if not heads:
                return None
            _, consumer = min(heads, key=lambda head: head[0][:3])
            blocked = self._blocked
            again = await consumer.claim(now)
            self._again_at.pop(consumer, None)
            if consumer.waiting():
                return consumer, self._join(consumer)
            # Nothing, if something has changed in the meantime: that is another set then.
            blocked.add(consumer)
            if again is not None and again > 0:
                self._again_at[consumer] = now + round(again * 1_000_000)

    def _join(self, consumer: SteppedConsumer) -> Delivery | None:
        """The batch that takes what was just claimed as soon as its worker has a turn, if any."""
        gathering = consumer.inflight.first_gathering
        if gathering is None or gathering.task not in self._deliveries:
            return None
        delivery = self._deliveries[gathering.task]
        delivery.add(consumer.waiting()[: gathering.missing])
        return delivery

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
            self._blocked = set()
            task: Any = asyncio.current_task()
            delivery = self._deliveries[task]
            for row in delivery.rows:
                self._note_attempt(row, delivery)

    def _note_attempt(self, row: ClaimedMessage, delivery: Delivery) -> None:
        outcome = row.outcome
        error = getattr(outcome, "error", None)
        if delivery.failure is None and isinstance(error, TimeoutError):
            # The limit of handler_timeout lies around the pipeline.
            self.note_failure(row, error)
        if delivery.failure is not None:
            error = delivery.failure.error
        name = "none" if outcome is None else type(outcome).__name__.lower()
        self._attempts.append(Attempt(row.id, row.queue, delivery.attempts[row.id], name, error))

    def note_failure(self, _rows: object, error: BaseException) -> None:
        """The handler of the delivery that runs has raised `error`."""
        task: Any = clocks.delivery.get()
        if (delivery := self._deliveries.get(task)) is None:
            return
        first = all(number == 1 for number in delivery.attempts.values())
        delivery.failure = Failure(error, delivery.keys, first)
        self._failures.append(delivery.failure)

    async def _wait_for(
        self, delivery: Delivery, limit: float | None, *, time_follows: bool = False
    ) -> None:
        """Wait until it has ended, or waits for time to pass."""
        clock = self.clock
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        ids = ", ".join(map(str, sorted(delivery.attempts)))
        name = f"{delivery.consumer.title}, of message {ids},"
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
        if member.fires_at is not None and member.fires_at <= now:
            at = await member.scheduler.fire_due()
            member.fires_at = None if at is None else max(now + 1_000, to_microseconds(at))

    async def _look_at_leases(self) -> None:
        now = self.clock.microseconds
        for consumer in self._consumers:
            await consumer.renew()
            if any(r.lease_ends is not None and r.moment <= now for r in consumer.live()):
                await consumer.store.release_stuck(consumer.queues, 1_000)
        for member in self.members:
            ends = await member.refresh_pauses()
            member.pause_ends = None if ends is None else to_microseconds(ends)
            if member.woken_at != now:
                # Nothing polls: at each moment, who waits for a message looks once.
                member.woken_at = now
                member.wakeups.look_again()

    def next_moment(self) -> int | None:
        """When something happens next by itself, in microseconds since 1970, after now."""
        now = self.clock.microseconds
        return min((moment for moment in self._moments(now) if moment > now), default=None)

    def _moments(self, now: int) -> Iterator[int]:
        """When a claim may find more, a schedule fires, a pause ends, a message is due that a
        subscriber or a caller waits for, a lease ends, or one is to be renewed.
        """
        yield from self._again_at.values()
        for member in self.members:
            if member.fires_at is not None:
                yield member.fires_at
            if member.pause_ends is not None:
                yield member.pause_ends + 1
            awaited = member.wakeups.awaited
            yield from (r.moment for r in self.database.live(member.table) if r.queue in awaited)
        for consumer in self._consumers:
            yield from (row.moment for row in consumer.live())
            if consumer.inflight.held:
                yield now + round(consumer.settings.release_stuck_timeout * 1_000_000 / 3)

    # -- reports -------------------------------------------------------------------------------

    async def drain(self, *, raise_errors: bool) -> Drained:
        """See `SqlBroker.drain`."""
        if self.clock.is_delivering():
            raise SetupError("drain waits until no handler runs: call it in the test itself")
        await self.run_due(limit=clocks.STUCK)
        await self.finish_running()
        ran, self._attempts = self._attempts, []
        failures, self._failures = self._failures, []
        errors = [failure.error for failure in failures if not failure.raised]
        errors += self.held.take_errors()
        drained = Drained(ran, self.waiting())
        if raise_errors and errors:
            if len(errors) == 1:
                raise errors[0]
            raise BaseExceptionGroup("handlers have failed", errors)
        return drained

    def outbox(self, queue: str | None) -> list[Published]:
        """See `SqlBroker.outbox`."""
        tables = self.tables
        return [published(row) for table in tables for row in self.database.published(table, queue)]

    def what_waits(self) -> str:
        """For the text of a failed assertion; empty if nothing does."""
        lines = [str(one) for one in self.waiting()]
        if self.held.count:
            lines.append(f"{self.held.count} publishes wait for the COMMIT of their transactions")
        if not lines:
            return ""
        return "\n".join(
            [f"The test's clock stands at {self.clock.now}, and", *(f"  {x}" for x in lines)]
        )

    def waiting(self) -> list[Waiting]:
        """The live messages, by due time, priority, id, and why they wait."""
        running = frozenset[int]().union(*(d.attempts for d in self._deliveries.values()))
        return [
            self._waiting(row, running)
            for table in self.tables
            for row in self.database.live(table)
        ]

    def _waiting(self, row: LiveRow, running: Collection[int]) -> Waiting:
        until = from_microseconds(row.due if row.lease_ends is None else row.lease_ends)
        if row.lease_ends is not None:
            why = "is being handled" if row.id in running else "is held"
            why += f", until {until} at the latest"
        elif row.due > self.clock.microseconds:
            why = f"waits until {until}"
        else:
            why = f"is due since {until}, and a policy, its order or a pause keeps it back"
            if not any(row.queue in consumer.queues for consumer in self._consumers):
                why = f"is due since {until}, and nothing that runs is subscribed to the queue"
        if row.attempts:
            last = row.error.strip().splitlines()[0] if row.error else "without an error"
            why += f", after {row.attempts} attempts ({last})"
        return Waiting(row.id, row.queue, until, row.attempts, why)

"""Deliver due messages of a test's database: one message after the other.

Claims, workers and writes are those of a real broker.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.text import pluralize
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.shielded import ShieldedCalls
from faststream_sqlbroker.flow.tasks.schedules import Scheduler
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.testing import clock as clocks
from faststream_sqlbroker.testing.clock import VirtualClock
from faststream_sqlbroker.testing.consumer import SteppedConsumer
from faststream_sqlbroker.testing.database import LiveRow, TestDatabase
from faststream_sqlbroker.testing.reports import (
    Attempt,
    Drained,
    Published,
    Waiting,
    parse_published,
)
from faststream_sqlbroker.testing.transactions import POLL_INTERVAL, HeldPublishes

MAX_DELIVERIES = 10_000
"""Maximum number of deliveries of one call of `run_due`."""
MAX_CHAIN = 100
"""Maximum number of deliveries at one time of which each is caused by the previous one: handlers
that wait for what they publish, replies to replies, retries without a delay. A longer chain counts
as endless.
"""
_nesting_depth: ContextVar[int] = ContextVar("sqlbroker_test_nested", default=0)


@dataclass(eq=False)
class HandlerFailure:
    """An error raised by a handler."""

    error: BaseException
    keys: frozenset[tuple[str, int]]
    """Table and id of each of its messages."""
    is_first_attempt: bool
    """True if it was the first attempt."""
    is_reported: bool = False
    """True if a caller has received the error."""


@dataclass(eq=False)
class RunningDelivery:
    """One run of a handler."""

    consumer: SteppedConsumer
    task: asyncio.Task[None]
    rows: list[ClaimedMessage] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)
    """Number of the attempt of each message, by id."""
    failure: HandlerFailure | None = None

    @property
    def keys(self) -> frozenset[tuple[str, int]]:
        """Table and id of each message: brokers of a test may have different tables."""
        return frozenset((self.consumer.table, message_id) for message_id in self.attempts)

    def add(self, rows: Sequence[ClaimedMessage]) -> None:
        """Add more messages."""
        self.rows += rows
        self.attempts |= {row.id: row.attempts_count + 1 for row in rows}


@dataclass
class BrokerMember:
    """A broker of the test."""

    table: str
    """Name of the broker's table of messages."""
    scheduler: Scheduler
    wakeups: Wakeups
    refresh_pauses: Callable[[], Any]
    fires_at: int | None
    """Time to check the schedules; None without schedules."""
    notified_at: int = -1
    pause_ends_at: int | None = None


class _ChainLengths:
    """Measures chains of messages: a delivery publishes a message whose delivery publishes another.

    A chain that grows without an advance of time is a loop of handlers or a retry without a delay.
    Counts belong to one call of `run_due`.
    """

    def __init__(self, last_ids: dict[str, int]) -> None:
        """Start a count; `last_ids` has the last id of each table."""
        self.count = 0
        self._last_ids = last_ids
        self._lengths: dict[tuple[str, int], int] = {}

    def add(self, delivery: RunningDelivery, last_id: int) -> int:
        """Return the length of the chain that ends with `delivery`.

        It is one more than the longest chain that led to one of its messages; a message that comes
        back is in its own chain. `last_id` is the table's last id now: messages with an id since
        the previous call count as published by this delivery.
        """
        self.count += 1
        table = delivery.consumer.table
        lengths = self._lengths
        length = 1 + max(lengths.get(key, 0) for key in delivery.keys)
        new_keys = [(table, id_) for id_ in range(self._last_ids[table] + 1, last_id + 1)]
        lengths.update(dict.fromkeys((*delivery.keys, *new_keys), length))
        self._last_ids[table] = last_id
        return length


class Pump:
    """Runs the subscribers of a test in place of their loops.

    It claims the next due message of all subscribers and runs its handler, one delivery after
    another, until nothing is due. Time passes only by the clock.
    """

    def __init__(
        self, clock: VirtualClock, database: TestDatabase, tables: Collection[str]
    ) -> None:
        """Prepare deliveries, which start with `run_due`; `tables` are the tables of messages."""
        self.tables = tables
        self.clock = clock
        self.database = database
        self.held_publishes = HeldPublishes()
        """Publishes that wait for the COMMIT of their transactions."""
        self.members: list[BrokerMember] = []
        self._consumers: list[SteppedConsumer] = []
        self._deliveries: dict[asyncio.Task[None], RunningDelivery] = {}
        self._claiming = asyncio.Lock()
        self._shielded = ShieldedCalls()
        self._blocked_consumers: set[SteppedConsumer] = set()
        """Subscribers whose last claim found no message; cleared when anything changes."""
        self._poll_at: dict[SteppedConsumer, int] = {}
        self._awaited: set[tuple[str, int]] = set()
        self._failures: list[HandlerFailure] = []
        self._attempts: list[Attempt] = []
        self._closed = False
        self._is_endless = False
        """True while handlers of an endless chain of deliveries still run."""

    # -- who takes part ------------------------------------------------------------------------

    def add(self, consumer: SteppedConsumer) -> None:
        """Let `consumer` claim from now on, until the stop."""
        if consumer not in self._consumers:
            self._consumers.append(consumer)
        # Subscribers without a startable message may have one now: they share the database.
        self._blocked_consumers = set()

    def is_consumed(self, queue: str) -> bool:
        """Return True if a running subscriber of the test has `queue`, paused or not.

        A request to another queue would never be answered, so it is refused at once.
        """
        return any(
            queue in consumer.settings.queues
            for consumer in self._consumers
            if not consumer.is_stopping
        )

    def is_delivery(self, task: "asyncio.Task[Any] | None") -> bool:
        """Return True if `task` runs a handler."""
        return task in self._deliveries

    def list_delivery_tasks(self, consumer: SteppedConsumer) -> "list[asyncio.Task[None]]":
        """Return the tasks that run the handlers of a consumer."""
        return [
            task for task, delivery in self._deliveries.items() if delivery.consumer is consumer
        ]

    async def close(self) -> None:
        """End the test: stop the subscribers, and cancel everything that waits for time to pass.

        The clock no longer moves, so what waits for it would never end.
        """
        await self.held_publishes.close()
        self._closed = True
        for consumer in self._consumers:
            consumer.abandon()
        running = [task for task in self._deliveries if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        # A connection that is in use when the event loop ends would never be closed.
        for consumer in self._consumers:
            await consumer.wait_for_stop()
        await self.clock.wait_until_idle()

    # -- deliver -------------------------------------------------------------------------------

    async def deliver_published(self, ids: Collection[int | None], table: str) -> None:
        """Deliver the messages `ids` and all other due messages, for a publish in a test.

        Raise the first error of their first attempts, as if the handler ran inside the publish.
        Errors of later attempts are left to `drain`.
        """
        own_keys = {(table, message_id) for message_id in ids if message_id is not None}
        self._blocked_consumers = set()
        # Messages of which another call awaits the attempt: errors go to the call that was first.
        own_keys -= self._awaited
        self._awaited |= own_keys
        failure_count = len(self._failures)
        try:
            await self.run_due()
            await self._wait_until_ended(own_keys)
            # A policy or a busy worker may hold the messages back until another handler has ended.
            # A handler that publishes does not wait for that: it may be this handler itself.
            while not self.clock.is_delivering() and await self._wait_for_blocking_handler(
                own_keys, table
            ):
                await self.run_due()
        finally:
            self._awaited -= own_keys
        self._raise_first_failure(own_keys, failure_count)

    def _raise_first_failure(self, own_keys: set[tuple[str, int]], start: int) -> None:
        """Raise the first unreported error from index `start` on, as the publish's own error.

        It may come from a message that the handler has published in turn. The error of a message
        that another publisher waits for is left to that publisher; later attempts to `drain`.
        """
        for failure in self._failures[start:]:
            if failure.is_reported or not failure.is_first_attempt:
                continue
            if failure.keys & own_keys or not failure.keys & self._awaited:
                failure.is_reported = True
                raise failure.error

    async def finish_running(self, *, time_follows: bool = False) -> None:
        """Wait until no handler runs, or is about to be started by a committed transaction.

        Called before time is advanced and by `drain`: the result must not depend on how fast the
        handlers are. Handlers that wait for time are not waited for.

        Args:
            time_follows: True if time is advanced next, so that a handler which waits for time in
                one of its own tasks is left running.

        Raises:
            TimeoutError: a handler took more than 5 seconds.
        """
        while (running := self._list_running(time_follows)) or self.held_publishes.is_committing:
            if running:
                await self._wait_for(running[0], clocks.REAL_TIME_LIMIT, time_follows=time_follows)
                await self.run_due(limit=clocks.REAL_TIME_LIMIT)
            else:
                await asyncio.sleep(POLL_INTERVAL)

    def _list_running(self, time_follows: bool) -> list[RunningDelivery]:
        """Return the deliveries that can end without an advance of time."""
        return [
            delivery
            for delivery in self._deliveries.values()
            if self._is_running(delivery, time_follows)
        ]

    def _is_running(self, delivery: RunningDelivery, time_follows: bool) -> bool:
        """Return True if the delivery can end without an advance of time.

        Waiting for a handler that sleeps on the test's clock would never end. With `time_follows`,
        which says that the caller advances time next, the tasks that it has created count, too.
        """
        task = delivery.task
        return not task.done() and not self.clock.is_waiting_for_time(task, within=time_follows)

    async def _wait_for_blocking_handler(
        self, own_keys: Collection[tuple[str, int]], table: str
    ) -> bool:
        """Wait for a running handler if a due message of `own_keys` still has no lease.

        Such a message is blocked by a policy, its order or a busy worker, until a handler ends.
        Return False if no message is blocked, or no handler runs that could unblock it; True if
        one has ended, so that the caller tries again.
        """
        now = self.clock.microseconds
        live = self.database.list_live(table)
        if not any(
            (table, row.id) in own_keys and row.lease_ends_at is None and row.due <= now
            for row in live
        ):
            return False
        running = [
            delivery
            for task, delivery in self._deliveries.items()
            if not self.clock.is_waiting_for_time(task)
        ]
        if not running:
            return False
        with suppress(Exception):  # its own publisher receives the error
            await self._wait_for(running[0], None)
        await asyncio.sleep(0)
        return True

    async def _wait_until_ended(self, own_keys: set[tuple[str, int]]) -> None:
        """Wait until no other task runs a handler on any of `own_keys` (tables and message ids).

        A nested or concurrent `run_due` may have started these deliveries. The current task is
        left out: it may be such a handler, which publishes.
        """
        current = asyncio.current_task()
        for task, delivery in list(self._deliveries.items()):
            if delivery.keys & own_keys and task is not current:
                await self._wait_for(delivery, None)

    async def run_due(self, *, limit: float | None = None) -> bool:
        """Deliver all due messages until there are no more; return True if there were any.

        Called after each publish and each jump of the clock. A handler that publishes calls it
        again inside its own delivery: such nesting, and deliveries that cause each other, form a
        chain, which is called endless if it gets too long.

        Args:
            limit: Maximum real seconds of a handler.

        Raises:
            TimeoutError: a handler took longer.
            AssertionError: deliveries would go on forever.
        """
        if self._closed:
            return False
        depth = _nesting_depth.get()
        # Once an endless chain is detected, all handlers that wait for each other give up.
        self._is_endless = bool(self._deliveries) and (self._is_endless or depth > MAX_CHAIN)
        self._check_endless()
        for member in self.members:
            await self._run_schedules(member)
        await self._process_leases()
        self._blocked_consumers = set()
        last_id = self.database.get_last_id
        chains = _ChainLengths(
            {table: last_id(table) for table in {consumer.table for consumer in self._consumers}}
        )
        while (delivery := await self._deliver_next(limit)) is not None:
            length = chains.add(delivery, last_id(delivery.consumer.table))
            self._is_endless |= depth + length > MAX_CHAIN or chains.count > MAX_DELIVERIES
            self._check_endless()
        return chains.count > 0

    def _check_endless(self) -> None:
        """Raise AssertionError if `run_due` has detected an endless chain of deliveries.

        Every handler that publishes in the chain gets the error, so that all of them end.
        """
        if self._is_endless:
            raise AssertionError(
                f"deliveries do not end at {self.clock.now:%H:%M:%S.%f}: handlers publish to each "
                "other in a loop, or a retry has no delay"
            )

    async def _deliver_next(self, limit: float | None) -> RunningDelivery | None:
        """Deliver the first due message; return the delivery, or None if no message may start.

        A claimed message either joins a batch that still waits for messages, or starts a delivery.
        The claim goes on if the caller is cancelled, and is then released: its result would be
        unknown otherwise. Return after the handler's end, or when it waits for time.
        """
        async with self._claiming:
            claimed = await self._shielded.run(self._claim_next(), self._release_claims)
            if claimed is None:
                return None
            consumer, joined_batch = claimed
            delivery = joined_batch or self._start(consumer)
            # A batch that waits for messages takes the claimed ones.
            while (
                joined_batch
                and consumer.inflight.first_pending_batch is not None
                and consumer.list_waiting()
            ):
                await asyncio.sleep(0)
        await self._wait_for(delivery, limit)
        return delivery

    async def _release_claims(self) -> None:
        """Release claims after the claiming task was cancelled."""
        for consumer in self._consumers:
            await consumer.release_waiting()

    async def _claim_next(self) -> tuple[SteppedConsumer, RunningDelivery | None] | None:
        """Claim the first due message of all subscribers; return the subscriber.

        The second value is a batch that still waits for messages and takes this one, or None. A
        subscriber whose claim finds nothing, as a policy holds its due messages back, is blocked:
        without a change another claim would find nothing again. Return None if no message may
        start.
        """
        while True:
            if (
                waiting_consumer := next(
                    (consumer for consumer in self._consumers if consumer.list_waiting()), None
                )
            ) is not None:
                return waiting_consumer, self._join_batch(waiting_consumer)
            now = self.clock.microseconds
            # Of several subscribers of a queue the last one takes a message, so that a subscriber
            # declared by an earlier test does not.
            unblocked = [
                consumer
                for consumer in reversed(self._consumers)
                if consumer not in self._blocked_consumers
            ]
            candidates = [
                (due, consumer)
                for consumer in unblocked
                if (due := next(consumer.iter_due(now), None)) is not None
            ]
            if not candidates:
                return None
            _, consumer = min(candidates, key=lambda candidate: candidate[0][:3])
            blocked_consumers = self._blocked_consumers
            poll_delay = await consumer.claim(now)
            self._poll_at.pop(consumer, None)
            if consumer.list_waiting():
                return consumer, self._join_batch(consumer)
            # This has no effect if something has changed in the meantime, because
            # `_blocked_consumers` is another set then.
            blocked_consumers.add(consumer)
            if poll_delay is not None and poll_delay > 0:
                self._poll_at[consumer] = now + round(poll_delay * 1_000_000)

    def _join_batch(self, consumer: SteppedConsumer) -> RunningDelivery | None:
        """Return the started batch that takes the claimed rows, if any still waits for messages.

        With `batch_max_wait` a handler's batch is filled over several claims before it runs. Its
        worker takes the rows itself; here they are only noted for the report of `drain`.
        """
        pending_batch = consumer.inflight.first_pending_batch
        if pending_batch is None or pending_batch.task not in self._deliveries:
            return None
        delivery = self._deliveries[pending_batch.task]
        delivery.add(consumer.list_waiting()[: pending_batch.missing_count])
        return delivery

    def _start(self, consumer: SteppedConsumer) -> RunningDelivery:
        """Start a task that runs the handler on the claimed rows: all in a batch, else the first.

        A task for each delivery lets handlers overlap that wait for time, or for each other.
        """
        rows = consumer.list_waiting() if consumer.settings.batch else consumer.list_waiting()[:1]
        task = asyncio.create_task(self._deliver(consumer), name=consumer.title)
        delivery = self._deliveries[task] = RunningDelivery(consumer, task)
        delivery.add(rows)
        task.add_done_callback(self._on_task_done)
        return delivery

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        """Forget an ended delivery, and wake the code that waits for the end.

        Errors of handlers are recorded elsewhere. asyncio would log an exception that is never
        retrieved, so it is retrieved here.
        """
        del self._deliveries[task]
        if not task.cancelled():
            task.exception()
        self.clock.notify_change()

    async def _deliver(self, consumer: SteppedConsumer) -> None:
        """Run one delivery, and record its attempts for `drain`; the body of its task.

        The context variables tell publishes of the handler that they are nested, and at what depth.
        """
        _nesting_depth.set(_nesting_depth.get() + 1)
        clocks.current_delivery_var.set(asyncio.current_task())
        try:
            await consumer.deliver()
        finally:
            # Race: here, not in `_on_task_done`, because a waiting caller may check before the
            # task's callbacks run.
            self._blocked_consumers = set()
            task: Any = asyncio.current_task()
            delivery = self._deliveries[task]
            for row in delivery.rows:
                self._record_attempt(row, delivery)

    def _record_attempt(self, row: ClaimedMessage, delivery: RunningDelivery) -> None:
        """Add an attempt to the report of `drain`, with the handler's error.

        The outcome is what the broker writes for the delivery, such as Ack or Nack; None if the
        delivery was cut off. The error of handler_timeout is found there: no handler raised it.
        """
        outcome = row.outcome
        error = getattr(outcome, "error", None)
        if delivery.failure is None and isinstance(error, TimeoutError):
            # The limit of handler_timeout is applied outside the pipeline.
            self.record_failure(row, error)
        if delivery.failure is not None:
            error = delivery.failure.error
        name = "none" if outcome is None else type(outcome).__name__.lower()
        self._attempts.append(Attempt(row.id, row.queue, delivery.attempts[row.id], name, error))

    def record_failure(self, _rows: object, error: BaseException) -> None:
        """Record that the handler of the running delivery has raised `error`.

        Called by the broker's pipeline, where the error is turned into an outcome. The publish that
        waits for the delivery raises it later, or `drain` does.
        """
        task: Any = clocks.current_delivery_var.get()
        if (delivery := self._deliveries.get(task)) is None:
            return
        is_first = all(number == 1 for number in delivery.attempts.values())
        delivery.failure = HandlerFailure(error, delivery.keys, is_first)
        self._failures.append(delivery.failure)

    async def _wait_for(
        self, delivery: RunningDelivery, limit: float | None, *, time_follows: bool = False
    ) -> None:
        """Wait until the delivery has ended, or waits for time to pass.

        `limit` are real seconds. If the waiting task is cancelled, the handler is cancelled, too.
        Errors of the delivery's task are raised; most errors of handlers become outcomes instead.
        """
        clock = self.clock
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        ids = ", ".join(map(str, sorted(delivery.attempts)))
        name = f"{delivery.consumer.title} for message {ids}"
        try:
            while self._is_running(delivery, time_follows):
                await clock.wait_for_change(deadline, name)
        except asyncio.CancelledError:
            # As if the handler ran in the publishing task: both are cancelled together.
            delivery.consumer.cancel_worker(delivery.task)
            with suppress(asyncio.CancelledError):
                await asyncio.wait((delivery.task,))
            raise
        if delivery.task.done() and not delivery.task.cancelled():
            delivery.task.result()

    # -- what time does ------------------------------------------------------------------------

    async def _run_schedules(self, member: BrokerMember) -> None:
        """Publish the messages of the schedules that are due, and store the next fire time.

        The clock jumps to that time. It is at least 1 ms away: a jump to the same time, again and
        again, would never let `advance` end.
        """
        now = self.clock.microseconds
        if member.fires_at is not None and member.fires_at <= now:
            fires_at = await member.scheduler.fire_due()
            member.fires_at = (
                None if fires_at is None else max(now + 1_000, to_microseconds(fires_at))
            )

    async def _process_leases(self) -> None:
        """Do the work that the loops of a broker do when time has passed.

        Renew leases of running handlers, release expired leases, refresh pauses, and wake callers
        that wait for messages.
        """
        now = self.clock.microseconds
        for consumer in self._consumers:
            await consumer.renew_leases()
            # Search only when a lease has expired, which the reader of the file knows: no broker
            # of a test has a loop that looks for it.
            if any(
                row.lease_ends_at is not None and row.next_time <= now
                for row in consumer.iter_live()
            ):
                await consumer.store.release_stuck(consumer.queues, 1_000)
        for member in self.members:
            pause_ends_at = await member.refresh_pauses()
            member.pause_ends_at = None if pause_ends_at is None else to_microseconds(pause_ends_at)
            if member.notified_at != now:
                # Nothing polls: at each time, each waiting caller checks once.
                member.notified_at = now
                member.wakeups.wake_all()

    def get_next_time(self) -> int | None:
        """Return the time of the next event after now, in microseconds since 1970, or None."""
        now = self.clock.microseconds
        return min((time for time in self._iter_event_times(now) if time > now), default=None)

    def _iter_event_times(self, now: int) -> Iterator[int]:
        """Yield the times of all known events, for `get_next_time`, which drops past times.

        A claim may find more messages, a schedule fires, a pause ends, a message becomes due for a
        subscriber or a waiting caller, a lease ends, or a lease must be renewed.
        """
        yield from self._poll_at.values()
        for member in self.members:
            if member.fires_at is not None:
                yield member.fires_at
            if member.pause_ends_at is not None:
                yield member.pause_ends_at + 1
            awaited = member.wakeups.registered_queues
            # Queues in which callers of `get_one` and the like wait.
            yield from (
                row.next_time
                for row in self.database.list_live(member.table)
                if row.queue in awaited
            )
        for consumer in self._consumers:
            yield from (row.next_time for row in consumer.iter_live())
            # Leases of running handlers are renewed after a third of their length.
            if consumer.inflight.held:
                yield now + round(consumer.settings.release_stuck_timeout * 1_000_000 / 3)

    # -- reports -------------------------------------------------------------------------------

    async def drain(self, *, raise_errors: bool) -> Drained:
        """Implement `SqlBroker.drain`: run what is due, and return the attempts and what waits.

        With `raise_errors`, raise the errors that no publish has raised yet, of handlers and of
        publishes in transactions.
        """
        if self.clock.is_delivering():
            raise SetupError(
                "drain waits until no handler runs, so handlers cannot call it: call it in the "
                "test itself"
            )
        await self.run_due(limit=clocks.REAL_TIME_LIMIT)
        await self.finish_running()
        attempts, self._attempts = self._attempts, []
        failures, self._failures = self._failures, []
        errors = [failure.error for failure in failures if not failure.is_reported]
        errors += self.held_publishes.take_errors()
        drained = Drained(attempts, self.list_waiting())
        if raise_errors and errors:
            if len(errors) == 1:
                raise errors[0]
            raise BaseExceptionGroup("handlers have failed", errors)
        return drained

    def outbox(self, queue: str | None) -> list[Published]:
        """Implement `SqlBroker.outbox`: return messages as published, even if handled since."""
        tables = self.tables
        return [
            parse_published(row)
            for table in tables
            for row in self.database.list_published(table, queue)
        ]

    def describe_waiting(self) -> str:
        """Describe the waiting messages for a failed assertion; empty if there are none.

        They often say why the asserted call of a handler has not happened.
        """
        lines = [str(message) for message in self.list_waiting()]
        if self.held_publishes.count:
            lines.append(
                f"{self.held_publishes.count} publishes wait for the COMMIT of their transactions"
            )
        if not lines:
            return ""
        return "\n".join(
            [f"At the test's time {self.clock.now}:", *(f"  {line}" for line in lines)]
        )

    def list_waiting(self) -> list[Waiting]:
        """Return the live messages, by due time, priority, id, with the reason for waiting.

        A live message is not finished. `running` has the ids that a handler is working on.
        """
        running = frozenset[int]().union(
            *(delivery.attempts for delivery in self._deliveries.values())
        )
        return [
            self._describe_row(row, running)
            for table in self.tables
            for row in self.database.list_live(table)
        ]

    def _describe_row(self, row: LiveRow, running: Collection[int]) -> Waiting:
        """Describe why a live message waits: leased, not due yet, or blocked."""
        until = from_microseconds(row.due if row.lease_ends_at is None else row.lease_ends_at)
        if row.lease_ends_at is not None:
            reason = "is being handled and leased" if row.id in running else "is leased"
            reason += f" until {until}"
        elif row.due > self.clock.microseconds:
            reason = f"waits until {until}"
        else:
            reason = f"has been due since {until}, but a policy, its order or a pause holds it back"
            if not any(row.queue in consumer.queues for consumer in self._consumers):
                reason = f"has been due since {until}, but no running subscriber has the queue"
        if row.attempts:
            last_error = (row.error or "").strip().partition("\n")[0] or "without an error"
            reason += f", after {pluralize(row.attempts, 'attempts')} ({last_error})"
        return Waiting(row.id, row.queue, until, row.attempts, reason)

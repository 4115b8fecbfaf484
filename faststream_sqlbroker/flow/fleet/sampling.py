"""Gauges that change without an event of ours.

They are the messages that this process holds, its connection pool and, in one process of the fleet,
what waits in the queues.

The processes elect that one by a lock in the database (`core.metrics` lists its gauges). Each tries
to acquire the lock at every sample; the owner keeps it, and the others export no such gauge. If its
process dies, another one gets the lock after three intervals. Nothing is written under the lock, so
a process that has lost it without knowing can only export its gauges once more.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.metrics import (
    DELAYED,
    FINDINGS,
    FLEET_GAUGES,
    HEALTHY,
    HELD,
    IN_FLIGHT,
    LIVE_SUBSCRIBERS,
    OLDEST_DUE,
    POOL_LIMIT,
    POOL_USED,
    PROCESS_GAUGES,
    READY,
    STANDBY,
    STANDBY_OVERDUE,
    WRITABLE,
    Labels,
    Metric,
    QueueState,
    Recorder,
)
from faststream_sqlbroker.core.overview import MAX_STANDBY_DELAY
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.loop import FleetLoop, Log, is_logged
from faststream_sqlbroker.flow.metrics import format_subscriber_name

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store
    from faststream_sqlbroker.flow.consumer import QueueConsumer

LOCK = "sqlbroker.metrics"
"""Key of the lock."""
LEASE_INTERVALS = 3
"""Intervals without a sample after which another process may get the lock."""
SLOW_SHARE = 20
"""Pause after a sample, as a multiple of its duration: counting must not become the load that it
measures.
"""
MAX_PAUSE = 300.0
"""Maximum seconds of that pause, however slow the sample was."""
FINDINGS_INTERVAL = 60.0
"""Seconds between two searches for findings that need an operator."""

Running = tuple[Sequence[str], "QueueConsumer"]
"""The queues of a running subscriber, and the subscriber."""


class Sampler(FleetLoop):
    """Samples the gauges of a broker in this process."""

    def __init__(
        self,
        store: "Store",
        recorder: Recorder,
        log: Log,
        clock: Clock,
        consumers: Callable[[], Iterable[Running]],
        look_for_findings: Callable[[], Awaitable[Mapping[Labels, float]]],
        write_problem: Callable[[], Awaitable[str | None]],
    ) -> None:
        """Start nothing before `start`.

        `consumers` returns the running subscribers, `look_for_findings` the states that need an
        operator, and `write_problem` why the database takes no writes, or None.
        """
        super().__init__(store, LOCK, "metrics", log, clock)
        self._recorder = recorder
        self._consumers = consumers
        self._look_for_findings = look_for_findings
        self._findings: Mapping[Labels, float] = {}
        self._findings_due = float("-inf")
        self._have_findings_failed = False
        self._write_problem = write_problem
        self._failures = 0
        self._warned_queues = set[str]()
        """Queues with a logged warning that nothing claims their standing messages."""
        self._pause = 0.0
        self._sample_at = float("-inf")

    @override
    def forget(self) -> None:
        """Clear all gauges."""
        for metric in (*PROCESS_GAUGES, *FLEET_GAUGES):
            self._recorder.gauge(metric, {})

    @override
    async def tick(self) -> float:
        """Take a sample; return the seconds until the next sample.

        The gauges of this process come from each process, the gauges of the queues from the owner
        of the fleet's lock only. Empty gauges say that this process does not know the values.
        """
        running = list(self._consumers())
        self._sample_process(running)
        writable = float(await self._write_problem() is None)
        self._recorder.gauge(WRITABLE, {(self._store.dialect_name,): writable})
        if not running:
            self._record_fleet(
                (), {}
            )  # a process that only publishes may lack the rights to read and lock
        elif self._clock.monotonic() >= self._sample_at:
            if (states := await self._sample_queues()) is None:
                self._record_fleet((), {})
            else:
                self._record_fleet(states, self._findings)
                await self._update_findings()
        return self._recorder.sample_interval

    def _sample_process(self, running: Sequence[Running]) -> None:
        """Export the gauges of this process: messages held, health, and connections.

        Held are messages that it has claimed and not settled yet. Subscribers of the same queues
        share a label: their messages add up, and all must be healthy.
        """
        stages = dict[Labels, float]()
        healthy = dict[Labels, float]()
        for queues, consumer in running:
            name = format_subscriber_name(queues)
            healthy[name,] = min(healthy.get((name,), 1.0), float(consumer.healthy))
            for stage, count in consumer.inflight.count_stages().items():
                stages[name, stage] = stages.get((name, stage), 0) + count
        self._recorder.gauge(HELD, stages)
        self._recorder.gauge(HEALTHY, healthy)
        used, limit = self._store.pool_use
        database: Labels = (self._store.dialect_name,)
        for metric, value in ((POOL_USED, used), (POOL_LIMIT, limit)):
            self._recorder.gauge(metric, {} if value is None else {database: float(value)})

    async def _sample_queues(self) -> Sequence[QueueState] | None:
        """Return the state of the queues; None on an error, or if another process exports that.

        Counting may be slow, so the pause after a sample is a multiple of its duration: metrics
        must stay a small part of the database's load. The lease of the lock is three times the
        previous pause or interval; after a much slower sample it may end during the pause, and
        another process then samples.
        """
        lease = LEASE_INTERVALS * max(self._recorder.sample_interval, self._pause)
        started_at = self._clock.monotonic()
        try:
            is_owner = await self.acquire(lease)
            states = await self._store.queue_states.read_all() if is_owner else []
        except StoreError as error:
            # A missing value says more than an old one.
            self._failures += 1
            if is_logged(self._failures):
                text = f"could not sample the queues for metrics, trying again soon: {error}"
                self._log(logging.WARNING, text)
            return None
        self._failures = 0
        now = self._clock.monotonic()
        self._pause = _get_pause(now - started_at) if is_owner else 0.0
        self._sample_at = now + self._pause
        self._warn_of_standing(states)
        if not is_owner:
            self._findings = {}
            self._findings_due = float("-inf")
            return None
        return states

    async def _update_findings(self) -> None:
        """Search for findings if that is due; no other gauge depends on the result.

        A finding is a state that needs an operator, found by the same checks as `broker.admin`. A
        slow search earns a long pause, so that it stays a small part of the load.
        """
        started_at = self._clock.monotonic()
        if started_at < self._findings_due:
            return
        self._findings = {}
        try:
            self._findings = await self._look_for_findings()
            self._have_findings_failed = False
        except StoreError as error:
            if not self._have_findings_failed:
                text = f"could not search for findings for metrics, trying again soon: {error}"
                self._log(logging.WARNING, text)
            self._have_findings_failed = True
        finally:
            now = self._clock.monotonic()
            self._findings_due = now + max(FINDINGS_INTERVAL, _get_pause(now - started_at))
            self._recorder.gauge(FINDINGS, self._findings)

    def _warn_of_standing(self, states: Sequence[QueueState]) -> None:
        """Warn once per queue whose standby messages no claim checks.

        A message on standby waits while a newer message of its key is delivered in its place. Only
        a claim checks whether it may go, so without a subscriber it would wait for ever.
        """
        overdue = {s.queue: s for s in states if s.standing_overdue >= MAX_STANDBY_DELAY}
        for queue in overdue.keys() - self._warned_queues:
            state = overdue[queue]
            self._log(
                logging.WARNING,
                f"{state.standing} messages of queue {queue!r} stand by for a newer message of "
                f"their key, but no claim has checked them for {state.standing_overdue:.0f} s: "
                "run a subscriber of the queue, or resume it; `explain` shows why they wait",
            )
        self._warned_queues = set(overdue)

    def _record_fleet(self, states: Sequence[QueueState], findings: Mapping[Labels, float]) -> None:
        """Export the gauges of all queues; empty `states` clear the gauges in this process.

        They are cleared where another process exports them, or where the values are unknown.
        """
        figures: dict[Metric, Mapping[Labels, float]] = {
            READY: {(s.queue,): float(s.ready) for s in states},
            DELAYED: {(s.queue,): float(s.delayed) for s in states},
            IN_FLIGHT: {(s.queue,): float(s.in_flight) for s in states},
            OLDEST_DUE: {(s.queue,): s.oldest_due_age for s in states},
            STANDBY: {(s.queue,): float(s.standing) for s in states},
            STANDBY_OVERDUE: {(s.queue,): s.standing_overdue for s in states},
            LIVE_SUBSCRIBERS: {(s.queue,): float(s.live_subscribers) for s in states},
            FINDINGS: findings,
        }
        for metric, values in figures.items():
            self._recorder.gauge(metric, values)


def _get_pause(seconds: float) -> float:
    """Return the pause after a sample that took so many seconds, up to `MAX_PAUSE`.

    The pause is a multiple of the duration, so that counting never takes more than a small share of
    the time, and of a connection.
    """
    return min(SLOW_SHARE * seconds, MAX_PAUSE)

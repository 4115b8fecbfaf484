"""Look at what changes without an event of ours: what this process holds, its pool, and, in one
process of the fleet, what waits in the queues.

The processes agree on that one by a lock in the database (`core.metrics` says which gauges it has).
Each asks for it at every look; who has it keeps it, and the others export no such gauge. If its
process ends without a word, another has the lock after three intervals. Nothing is written under
the lock, so all that a process which does not know yet that it lost it can do is to export its
gauges once more.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.metrics import (
    DELAYED,
    FINDINGS,
    HEALTHY,
    HELD,
    IN_FLIGHT,
    LIVE_SUBSCRIBERS,
    OF_FLEET,
    OF_PROCESS,
    OLDEST_DUE,
    POOL_LIMIT,
    POOL_USED,
    READY,
    STANDING,
    STANDING_OVERDUE,
    WRITABLE,
    Labels,
    Metric,
    QueueState,
    Recorder,
)
from faststream_sqlbroker.core.overview import LATE_STANDING
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.loop import FleetLoop, Log, is_told
from faststream_sqlbroker.flow.metrics import subscriber_name

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store
    from faststream_sqlbroker.flow.consumer import Consumer

LOCK = "sqlbroker.metrics"
"""The key of the lock."""
LEASE_INTERVALS = 3
"""Intervals without a look after which another process may have the lock."""
SLOW_SHARE = 20
"""A look is followed by this many times its length without one: counting must not become the load
that it measures."""
LONGEST_PAUSE = 300.0
"""Seconds; then there is a look, however slow."""
FINDINGS_INTERVAL = 60.0
"""Seconds between two looks for what an operator has to look at."""

Running = tuple[Sequence[str], "Consumer"]
"""A subscriber that runs, after its queues."""


class Sampler(FleetLoop):
    """Fills the gauges of one broker in this process."""

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
        """Nothing runs before `start`; `consumers` gives those that run then, `write_problem` says
        why the database takes no writes.
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
        self._warned = set[str]()
        """Queues of which the log says that nothing looks at what stands by."""
        self._pause = 0.0
        self._look_at = float("-inf")

    @override
    def forget(self) -> None:
        """Forget all gauges."""
        for metric in (*OF_PROCESS, *OF_FLEET):
            self._recorder.gauge(metric, {})

    @override
    async def tick(self) -> float:
        """Look once; seconds until the next time."""
        running = list(self._consumers())
        self._look_here(running)
        writable = float(await self._write_problem() is None)
        self._recorder.gauge(WRITABLE, {(self._store.dialect_name,): writable})
        if not running:
            self._tell((), {})  # who only publishes has no right to read, and none to lock
        elif self._clock.monotonic() >= self._look_at:
            if (states := await self._look_at_queues()) is None:
                self._tell((), {})
            else:
                self._tell(states, self._findings)
                await self._renew_findings()
        return self._recorder.sample_interval

    def _look_here(self, running: Sequence[Running]) -> None:
        stages = dict[Labels, float]()
        healthy = dict[Labels, float]()
        for queues, consumer in running:
            name = subscriber_name(queues)
            healthy[name,] = min(healthy.get((name,), 1.0), float(consumer.healthy))
            for stage, count in consumer.inflight.stages().items():
                stages[name, stage] = stages.get((name, stage), 0) + count
        self._recorder.gauge(HELD, stages)
        self._recorder.gauge(HEALTHY, healthy)
        used, limit = self._store.pool_use
        database: Labels = (self._store.dialect_name,)
        for metric, known in ((POOL_USED, used), (POOL_LIMIT, limit)):
            self._recorder.gauge(metric, {} if known is None else {database: float(known)})

    async def _look_at_queues(self) -> Sequence[QueueState] | None:
        """What waits, if this process is the one to tell; else None."""
        lease = LEASE_INTERVALS * max(self._recorder.sample_interval, self._pause)
        began = self._clock.monotonic()
        try:
            is_ours = await self.acquire(lease)
            states = await self._store.queue_states.read() if is_ours else []
        except StoreError as error:
            # A value that is missing says more than an old one.
            self._failures += 1
            if is_told(self._failures):
                text = f"the queues could not be looked at for metrics, again soon: {error}"
                self._log(logging.WARNING, text)
            return None
        self._failures = 0
        now = self._clock.monotonic()
        self._pause = _pause_after(now - began) if is_ours else 0.0
        self._look_at = now + self._pause
        self._warn_of_standing(states)
        if not is_ours:
            self._findings = {}
            self._findings_due = float("-inf")
            return None
        return states

    async def _renew_findings(self) -> None:
        """Look for findings if it is time to, and tell them; no other gauge depends on it."""
        began = self._clock.monotonic()
        if began < self._findings_due:
            return
        self._findings = {}
        try:
            self._findings = await self._look_for_findings()
            self._have_findings_failed = False
        except StoreError as error:
            if not self._have_findings_failed:
                text = f"findings could not be looked for for metrics, again soon: {error}"
                self._log(logging.WARNING, text)
            self._have_findings_failed = True
        finally:
            now = self._clock.monotonic()
            self._findings_due = now + max(FINDINGS_INTERVAL, _pause_after(now - began))
            self._recorder.gauge(FINDINGS, self._findings)

    def _warn_of_standing(self, states: Sequence[QueueState]) -> None:
        late = {s.queue: s for s in states if s.standing_overdue >= LATE_STANDING}
        for queue in late.keys() - self._warned:
            state = late[queue]
            self._log(
                logging.WARNING,
                f"{state.standing} messages of the queue {queue!r} stand by for a newer one of "
                f"their key, and no claim has looked at them for {state.standing_overdue:.0f} s: "
                "run a subscriber of the queue, or resume it; `explain` says what they wait for",
            )
        self._warned = set(late)

    def _tell(self, states: Sequence[QueueState], findings: Mapping[Labels, float]) -> None:
        figures: dict[Metric, Mapping[Labels, float]] = {
            READY: {(s.queue,): float(s.ready) for s in states},
            DELAYED: {(s.queue,): float(s.delayed) for s in states},
            IN_FLIGHT: {(s.queue,): float(s.in_flight) for s in states},
            OLDEST_DUE: {(s.queue,): s.oldest_due_age for s in states},
            STANDING: {(s.queue,): float(s.standing) for s in states},
            STANDING_OVERDUE: {(s.queue,): s.standing_overdue for s in states},
            LIVE_SUBSCRIBERS: {(s.queue,): float(s.live_subscribers) for s in states},
            FINDINGS: findings,
        }
        for metric, values in figures.items():
            self._recorder.gauge(metric, values)


def _pause_after(seconds: float) -> float:
    """Return for how long there is no look after one that took so many seconds."""
    return min(SLOW_SHARE * seconds, LONGEST_PAUSE)

"""Background loops, of a process or of one process of the fleet, and their log of outages."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakSet

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.text import pluralize
from faststream_sqlbroker.database.errors import NotConnectedError
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


Log = Callable[..., None]
"""log(level, text, *, exc_info=None, message_id=None)"""

FIRST_BACKOFF = 0.1
"""Seconds after the first failure; each following pause is twice as long, with jitter."""
LAST_BACKOFF = 10.0
"""Maximum seconds between two tries, before the jitter."""
MIN_OUTAGE = 1.0
"""Seconds of an outage whose end ends the pauses, even if another has ended shortly before."""
CANCEL_LIMIT = 10.0
"""Seconds for a cancelled tick to end: psycopg asks the server to cancel first."""


def backoff(failures: int, clock: Clock) -> float:
    """Return the seconds to wait before the next try, after so many failures in a row (≥ 1).

    The pause doubles with each failure, up to `LAST_BACKOFF`. Jitter spreads the tries of loops
    and processes that failed at the same time.
    """
    # The exponent is limited because a long outage would make the power a huge number.
    return clock.add_jitter(min(LAST_BACKOFF, FIRST_BACKOFF * 2 ** min(failures - 1, 16)))


def is_logged(failures: int) -> bool:
    """Return True if so many failures in a row are logged: the first, second, fourth, and so on.

    So a failure that repeats for hours does not flood the log.
    """
    # A power of two has a single bit.
    return failures.bit_count() == 1


WRITE_LOOPS = frozenset({"flush loop", "repeat loop"})
"""Loops that may fail because of a single message, which the error then names."""


@dataclass
class _Outage:
    """Failures that are not over."""

    started_at: float
    failing: dict[Hashable, str] = field(default_factory=dict)
    """Names of the parts that fail at the moment."""
    counts: Counter[str] = field(default_factory=Counter)
    """All failures until now, by name."""


class Outages:
    """Database outages that the parts of a broker in this process have met.

    Each outage is logged in two lines, one when it begins and one when it is over, however many
    loops it stops.

    Transient failures are one outage, whichever loops they stop. Refusals by the database are
    logged for each kind of loop, because the other loops go on.
    """

    def __init__(
        self,
        log: Log,
        clock: Clock | None = None,
        count_answers: Callable[[], int] | None = None,
    ) -> None:
        """Write the lines to `log`.

        `count_answers` returns how often the database has answered; by default more at each call.
        """
        self._log = log
        self._clock = clock or Clock()
        self.count_answers = count_answers or count().__next__
        self._outages: dict[str, _Outage] = {}
        """By kind of loop; "" is the outage of all loops."""
        self._ended_at: dict[str, float] = {}
        """End of the last outage of each kind."""
        self._pauses: WeakSet[asyncio.Event] = WeakSet()
        """Pauses after failures; setting an event ends its pause."""
        self._recovered_at = -inf
        """Time of the last success that ended the pauses."""

    @property
    def is_general(self) -> bool:
        """True if an outage stops more than the loops that write outcomes.

        These may fail because of a single outcome, so their failures alone do not prove that the
        database is down.
        """
        outage = self._outages.get("")
        return outage is not None and not WRITE_LOOPS.issuperset(outage.failing.values())

    def record_failure(
        self, part: Hashable, name: str, error: StoreError, started_at: float | None = None
    ) -> None:
        """Record that `part` has failed and will try again; log the beginning of an outage.

        `part` identifies a loop or a task; several parts may share the `name` for the log. Passing
        errors of all parts are one outage, of kind ""; other errors are one per `name`. A try that
        started at `started_at` (monotonic seconds), before the last outage ended, is ignored: its
        statement had hung since that outage.
        """
        kind = "" if isinstance(error, TransientStoreError) else name
        # A part fails for one reason at a time, so the new reason replaces the previous one.
        self._end(part, except_for=kind)
        outage = self._outages.get(kind)
        if outage is None:
            if started_at is not None and started_at <= self._ended_at.get(kind, -1.0):
                return
            outage = self._outages[kind] = _Outage(self._clock.monotonic())
            is_passing = not kind and not isinstance(error, NotConnectedError)
            suffix = _UNTIL_IT_WORKS if kind else _UNTIL_THE_END
            self._log(
                logging.WARNING if is_passing else logging.ERROR,
                f"the {name} failed, and tries again with growing pauses; {suffix}: {error}",
            )
        outage.failing[part] = name
        outage.counts[name] += 1

    def record_success(self, part: Hashable, *, is_answered: bool = True) -> None:
        """Record that `part`, which had failed, works again.

        The other parts of a general outage then try at once, but not again within `LAST_BACKOFF`
        seconds: in a partial outage some part works all the time. A part that had nothing to ask
        the database is no proof that it works: then `is_answered` is False. After the last failing
        part of an outage this logs that the outage is over.
        """
        outage = self._outages.get("") if self.is_general and is_answered else None
        is_recovery = outage is not None and part in outage.failing and self._is_due(outage)
        self._end(part)
        if is_recovery:
            now = self._clock.monotonic()
            self._recovered_at = now
            for end in self._pauses:
                with suppress(RuntimeError):  # its event loop is closed
                    end.set()

    def _is_due(self, outage: _Outage) -> bool:
        """Return True if a success in `outage` may end the pauses.

        A short failure, as by a conflict, must not keep the end of the next outage from it.
        """
        now = self._clock.monotonic()
        is_first = outage.started_at > self._recovered_at and now - outage.started_at >= MIN_OUTAGE
        return is_first or now - self._recovered_at >= LAST_BACKOFF

    async def pause(
        self, seconds: float, started_at: float | None = None, end: asyncio.Event | None = None
    ) -> None:
        """Sleep for `seconds` after a failure, at most until a part of a general outage works.

        Otherwise the parts of a broker would find out one by one that the database works again,
        each up to `LAST_BACKOFF` seconds later. `end` ends the pause, too. A try that started at
        `started_at` (monotonic seconds), before the last such success, is repeated without a pause.
        """
        end = end or asyncio.Event()
        self._pauses.add(end)
        if started_at is None or started_at >= self._recovered_at:
            await self._clock.wait_for(end, seconds)

    def remove_part(self, part: Hashable) -> None:
        """Remove `part`, which has stopped and will report neither failure nor success.

        If no other part fails, its outage is logged as over, with the remark that `part` stopped
        before it worked again.
        """
        self._end(part, is_stopped=True)

    def _end(
        self, part: Hashable, *, except_for: str | None = None, is_stopped: bool = False
    ) -> None:
        """Remove `part` from its outages; end an outage that has no other part.

        It stays in the outage of the kind `except_for`. `is_stopped` says that `part` was removed
        because it stopped, not because it works.
        """
        for kind, outage in list(self._outages.items()):
            if kind != except_for and outage.failing.pop(part, "") and not outage.failing:
                self._end_outage(kind, outage, is_stopped)

    def _end_outage(self, kind: str, outage: _Outage, is_stopped: bool) -> None:
        """End an outage without failing parts, and log its summary.

        `kind` is the name of the parts that were refused, or "" for the outage that all parts
        share. `is_stopped` says that the last part has stopped before it worked again.
        """
        del self._outages[kind]
        self._ended_at[kind] = now = self._clock.monotonic()
        duration = now - outage.started_at
        total = outage.counts.total()
        failures = pluralize(total, "failures")
        counts = ", ".join(f"{name} {count}" for name, count in sorted(outage.counts.items()))
        if is_stopped:
            summary = (
                f"the {kind or outage.counts.most_common(1)[0][0]} stopped before it worked again"
            )
        else:
            summary = f"the {kind or 'database'} works again"
        self._log(logging.WARNING, f"{summary}, after {duration:.1f} s: {failures} ({counts})")


_UNTIL_THE_END = "further failures are not logged until this outage ends"
_UNTIL_IT_WORKS = "further failures are not logged until it works again"


class Loop:
    """A task that calls `tick` until stopped; `tick` returns the pause, which `wake` ends.

    A failed tick is repeated with growing, jittered pauses, or at once when another part of an
    outage works again; until one succeeds the loop is unhealthy. Database errors are logged
    together with those of other loops. Any other error is a bug, logged as CRITICAL, but no reason
    to stop working for good.
    """

    def __init__(
        self, name: str, tick: Callable[[], Awaitable[float | None]], log: Log, clock: Clock
    ) -> None:
        """Call `tick`, which returns the seconds to the next tick, or None to wait for `wake`."""
        self.name = name
        self._tick = tick
        self._log = log
        self._clock = clock
        self._wake_event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._outages = Outages(log, clock)
        self._stop_event = asyncio.Event()
        self._pause_end = asyncio.Event()
        """Ends the pause after a failure."""
        self.failures = 0
        self.succeeded_at: float | None = None
        """Time when the last successful tick ended (monotonic seconds)."""

    @property
    def healthy(self) -> bool:
        """True if the last tick succeeded."""
        return self.failures == 0

    @property
    def is_orphaned(self) -> bool:
        """True if the event loop of the task is closed."""
        return self._task is not None and self._task.get_loop().is_closed()

    @property
    def is_running(self) -> bool:
        """True if the loop was started, is not stopped, and the event loop is open."""
        return self._task is not None and not self.is_orphaned

    def start(self, outages: Outages) -> None:
        """Start the loop's task; database failures are reported to `outages`.

        The first tick comes at once. A loop that was stopped, or whose event loop has ended, may be
        started again.
        """
        # A new event: a task that was told to stop, and still runs its tick, must not go on.
        self._stop_event = asyncio.Event()
        # The old event may belong to another event loop.
        self._wake_event = asyncio.Event()
        self._outages = outages
        self.failures = 0
        self._task = asyncio.create_task(self._run(self._stop_event), name=f"sqlbroker-{self.name}")

    def wake(self) -> None:
        """Let the next tick come at once, because there may be work that the pause ignores.

        A call during a tick counts too. Before the start it has no effect, as the first tick comes
        at once, and it does not shorten the pause after a failure.
        """
        if self.is_orphaned:
            # A task of a closed event loop cannot be woken. The next start begins with a tick
            # anyhow.
            self._wake_event = asyncio.Event()
        self._wake_event.set()

    def finish(self) -> None:
        """Stop after the running tick, which calls this when no further tick is needed.

        A tick cannot call `stop`, which waits for the loop's task and so for the tick itself.
        """
        self._stop_event.set()
        self._task = None

    async def stop(self, timeout: float | None = None) -> None:
        """Stop after the running tick, which is cancelled after `timeout` seconds (None: never).

        An orphaned loop is one whose event loop was closed before: there is no task to wait for.
        """
        was_orphaned = self.is_orphaned
        if was_orphaned:
            self._wake_event = asyncio.Event()
        else:
            self._stop_event.set()
            self._pause_end.set()
            self._wake_event.set()
        task, self._task = self._task, None
        if task is None:
            return
        if not was_orphaned:
            # The task of a closed event loop has ended with it, and cannot be waited for.
            try:
                await asyncio.wait((task,), timeout=timeout)
            finally:
                # Even if this stop is cancelled itself: the task must not outlive it.
                task.cancel()  # no effect on a task that has ended
            # A driver may hang while it closes a connection; the stop goes on without it.
            await asyncio.wait((task,), timeout=CANCEL_LIMIT)
        self._outages.remove_part(self)

    async def _run(self, stop_event: asyncio.Event) -> None:
        """Call the tick and pause, until `stop_event` is set: the event of this start.

        A later `start` creates a new event, so it cannot revive a task that was told to stop.
        """
        while not stop_event.is_set():
            # Cleared before the tick, so that a wake-up during the tick makes the next one come at
            # once.
            self._wake_event.clear()
            wait = await self._run_tick(stop_event)
            if not stop_event.is_set():
                await self._pause(wait)

    async def _run_tick(self, stop_event: asyncio.Event) -> float | None:
        """Call the tick; return the pause until the next tick, or None to wait for `wake`.

        After a failure the growing pause is made here, and 0 is returned. `wake` cannot cut it
        short: it would let the loop hammer a failing database.
        """
        started_at = self._clock.monotonic()
        answers = self._outages.count_answers()
        try:
            wait = await self._tick()
        except Exception as error:  # noqa: BLE001 - a loop must not die; `healthy` turns false
            self.failures += 1
            pause = backoff(self.failures, self._clock)
            self._report(error, pause, started_at)
            self._pause_end = asyncio.Event()
            if not stop_event.is_set():
                await self._outages.pause(pause, started_at, self._pause_end)
            return 0.0
        self.succeeded_at = self._clock.monotonic()
        if self.failures:
            self.failures = 0
            is_answered = self._outages.count_answers() > answers
            self._outages.record_success(self, is_answered=is_answered)
        return wait

    def _report(self, error: Exception, pause: float, started_at: float) -> None:
        """Report a failed tick: a database error to the outages, a bug to the log.

        The outages of a broker log a failure of the database once for all its loops.
        """
        if isinstance(error, StoreError):
            self._outages.record_failure(self, f"{self.name} loop", error, started_at)
            return
        text = (
            f"the {self.name} loop failed {self.failures} times in a row, trying again in "
            f"{pause:.1f} s: {error!r}"
        )
        self._log(logging.CRITICAL, text, exc_info=error)

    async def _pause(self, wait: float | None) -> None:
        """Wait for `wait` seconds (None: no limit), or until `wake`, after a successful tick."""
        if wait is not None and wait <= 0:
            # A loop that always has work must let other tasks run.
            await asyncio.sleep(0)
        else:
            await self._clock.wait_for(self._wake_event, wait)


async def retry_until(work: Callable[[], Awaitable[None]], deadline: float, clock: Clock) -> bool:
    """Call `work` until a success, or until the `deadline` (the event loop's time).

    Used while stopping, where a database that fails or hangs must not delay the end. Database
    errors are followed by growing pauses; any other error is raised.

    Returns:
        True if it succeeded.
    """
    failures = 0
    try:
        async with asyncio.timeout_at(deadline):
            while True:
                try:
                    await work()
                except StoreError:
                    failures += 1
                    await clock.sleep(backoff(failures, clock))
                else:
                    return True
    except TimeoutError:
        return False


def is_task_cancelled() -> bool:
    """Return True if the running task is cancelled, or closed after the end of the event loop.

    It distinguishes a cancellation of the task, which must be passed on, from a CancelledError that
    an application's function has raised by itself.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return True
    return task is None or task.cancelling() > 0


STOP_LIMIT = 2.0
"""Maximum seconds for a tick in progress when the broker stops, and to release the lock; otherwise
the lock's lease expires.
"""


class FleetLoop(ABC):
    """A loop that works in a single process of the fleet: the owner of a lock in the database.

    Each process tries to acquire the lock at every tick, where needed. The owner keeps it; if its
    process dies, the lease expires. A process that has lost the lock without knowing may go on for
    a moment: the work must allow for that.
    """

    def __init__(self, store: "Store", lock: str, name: str, log: Log, clock: Clock) -> None:
        """Start nothing before `start`; `lock` is the key of the lock, `name` is for the log."""
        self._store = store
        self._lock = lock
        self._name = name
        self._log = log
        self._clock = clock
        self._token = uuid4()
        self._loop: Loop | None = None
        self._info: Mapping[str, Any] = {}
        """Information in the lock's row besides the process."""

    @abstractmethod
    async def tick(self) -> float:
        """Do the work if this process holds the lock; return the seconds until the next tick."""

    def start(self, outages: Outages) -> None:
        """Start the loop; no effect while running."""
        if self._loop is None or self._loop.is_orphaned:
            self._loop = Loop(self._name, self.tick, self._log, self._clock)
            self._loop.start(outages)

    async def acquire(self, lease: float) -> bool:
        """Acquire or renew the lock for `lease` seconds; return True if this process has it.

        Called at each tick before the work. The token is drawn once for this object, so the owner
        acquires its own lock again, and another process gets it only after the lease.
        """
        fence = await self._store.locks.acquire(self._lock, self._token, lease, self._info)
        return fence is not None

    async def extend(self, lease: float) -> bool:
        """Renew the lock for `lease` seconds; return True if this process is still the owner.

        Called between the steps of long work. Unlike `acquire`, it fails for good once another
        process has had the lock.
        """
        return await self._store.locks.extend(self._lock, self._token, lease)

    def forget(self) -> None:  # noqa: B027 - most have nothing to forget
        """Forget what must not be reported once this process no longer does the work."""

    async def stop(self) -> None:
        """Stop, then release the lock, so that another process need not wait for the lease's end.

        Without effect if nothing runs. A failed release is ignored: the lease expires.
        """
        loop, self._loop = self._loop, None
        if loop is None:
            return
        await loop.stop(STOP_LIMIT)
        self.forget()
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(STOP_LIMIT):
                await self._store.locks.release(self._lock, self._token)

"""Background loops, of a process or of one process of the fleet, and what they log of an outage."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.database.errors import NotConnectedError
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


Log = Callable[..., None]
"""log(level, text, *, exc_info=None, message_id=None)"""

FIRST_BACKOFF = 0.1
"""Seconds after the first failure; each following pause is twice as long, with jitter."""
LAST_BACKOFF = 10.0
"""Most seconds between two tries, before the jitter."""
CANCEL_LIMIT = 10.0
"""Seconds for a cancelled tick to end: psycopg asks the server to cancel first."""


def backoff(failures: int, clock: Clock) -> float:
    """Seconds to wait after the given number of failures in a row (≥ 1)."""
    return clock.jitter(min(LAST_BACKOFF, FIRST_BACKOFF * 2 ** min(failures - 1, 16)))


def is_told(failures: int) -> bool:
    """Whether the log says that there were so many failures in a row: the first, the second, the
    fourth, and so on.
    """
    return failures.bit_count() == 1


OF_WRITING = frozenset({"flush loop", "repeat loop"})
"""What may fail for one message's sake alone, and then names it."""


@dataclass
class _Lasting:
    """Failures that are not over."""

    begin: float
    failing: dict[Hashable, str] = field(default_factory=dict)
    """What fails at the moment, and its name."""
    counts: Counter[str] = field(default_factory=Counter)
    """All failures until now, by name."""


class Outages:
    """Outages of the database that the parts of one broker in this process have met.

    Each is told in two lines, one when it begins and one when it is over, however many loops it
    stops.

    Failures that pass by themselves are one outage, whichever loops they stop. What the database
    refuses is told for each kind of loop by itself, as the others go on.
    """

    def __init__(self, log: Log, clock: Clock | None = None) -> None:
        """`log` gets the two lines."""
        self._log = log
        self._clock = clock or Clock()
        self._lasting: dict[str, _Lasting] = {}
        """By the name of a kind of loop; "" is the outage of all."""
        self._ended: dict[str, float] = {}
        """When the last one of each kind ended."""

    @property
    def stops_all(self) -> bool:
        """Whether more fails than writing outcomes, which may fail for what one of them is."""
        lasting = self._lasting.get("")
        return lasting is not None and not OF_WRITING.issuperset(lasting.failing.values())

    def failed(
        self, part: Hashable, name: str, error: StoreError, began: float | None = None
    ) -> None:
        """`part`, one of possibly many called `name`, has failed, and will try again.

        A try that `began` (monotonic seconds) before the last outage ended tells nothing new: its
        statement had waited all that time.
        """
        kind = "" if isinstance(error, TransientStoreError) else name
        # A part fails for one reason at a time, so the new reason ends the one before.
        for other in [
            k for k, lasting in self._lasting.items() if k != kind and part in lasting.failing
        ]:
            self._end(other, part)
        lasting = self._lasting.get(kind)
        if lasting is None:
            if began is not None and began <= self._ended.get(kind, -1.0):
                return
            lasting = self._lasting[kind] = _Lasting(self._clock.monotonic())
            passing = isinstance(error, TransientStoreError) and not isinstance(
                error, NotConnectedError
            )
            end = "until the end of this nothing else is said of it" if kind else _UNTIL_THE_END
            self._log(
                logging.WARNING if passing else logging.ERROR,
                f"the {name} failed, and tries again with growing pauses; {end}: {error}",
            )
        lasting.failing[part] = name
        lasting.counts[name] += 1

    def worked(self, part: Hashable) -> None:
        """`part`, which had failed, works again."""
        for kind in [k for k, lasting in self._lasting.items() if part in lasting.failing]:
            self._end(kind, part)

    def left(self, part: Hashable) -> None:
        """`part` has stopped; if nothing else failed, the second line says that the outage had not
        ended.
        """
        for kind, lasting in list(self._lasting.items()):
            if part in lasting.failing:
                self._end(kind, part, stopped=True)

    def _end(self, kind: str, part: Hashable, *, stopped: bool = False) -> None:
        lasting = self._lasting[kind]
        del lasting.failing[part]
        if lasting.failing:
            return
        del self._lasting[kind]
        self._ended[kind] = now = self._clock.monotonic()
        took = now - lasting.begin
        total = lasting.counts.total()
        counts = ", ".join(f"{name} {count}" for name, count in sorted(lasting.counts.items()))
        failures = "1 failure" if total == 1 else f"{total} failures"
        if stopped:
            what = (
                f"the {kind or lasting.counts.most_common(1)[0][0]} stopped before it worked again"
            )
        else:
            what = f"the {kind or 'database'} works again"
        self._log(logging.WARNING, f"{what}, after {took:.1f} s: {failures} ({counts})")


_UNTIL_THE_END = "until the end of this outage no other failure is told"


class Loop:
    """Runs `tick` until stopped, which says when the next one comes; `wake` makes it come at once.

    A tick that fails is repeated with growing, jittered pauses; until one succeeds the loop is
    unhealthy. The database's errors are told together with those of other loops. Any other is a
    bug, logged as CRITICAL, but no reason to stop working for good.
    """

    def __init__(
        self, name: str, tick: Callable[[], Awaitable[float | None]], log: Log, clock: Clock
    ) -> None:
        """`tick` returns seconds until the next tick, or None to wait for `wake`."""
        self.name = name
        self._tick = tick
        self._log = log
        self._clock = clock
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._outages: Outages | None = None
        self._stopped = asyncio.Event()
        self.failures = 0
        self.worked_at: float | None = None
        """When the last tick that succeeded ended (monotonic seconds)."""

    @property
    def healthy(self) -> bool:
        """Whether the last tick succeeded."""
        return self.failures == 0

    @property
    def orphaned(self) -> bool:
        """Whether the event loop that it ran in is closed."""
        return self._task is not None and self._task.get_loop().is_closed()

    @property
    def running(self) -> bool:
        """Whether it was started, is not stopped, and its event loop is open."""
        return self._task is not None and not self.orphaned

    def start(self, outages: Outages) -> None:
        """Start the loop's task; `outages` is told when the database fails."""
        # A new one: a task that is told to stop, and still ends its tick, must not go on.
        self._stopped = asyncio.Event()
        # An old one may belong to another event loop. The first tick comes at once.
        self._wake = asyncio.Event()
        self._outages = outages
        self.failures = 0
        self._task = asyncio.create_task(self._run(self._stopped), name=f"sqlbroker-{self.name}")

    def wake(self) -> None:
        """Let the next tick come at once."""
        try:
            self._wake.set()
        except RuntimeError:
            if not self.orphaned:
                raise
            # What waits in a closed event loop cannot be woken. The next start is to find it set.
            self._wake = asyncio.Event()
            self._wake.set()

    def end(self) -> None:
        """End after the running tick, which calls this."""
        self._stopped.set()
        self._task = None

    async def stop(self, timeout: float | None = None) -> None:
        """End after the running tick, which is cancelled after `timeout` seconds (None: never)."""
        orphaned = self.orphaned
        if orphaned:
            self._wake = asyncio.Event()
        else:
            self._stopped.set()
            self._wake.set()
        task, self._task = self._task, None
        if task is None:
            return
        if not orphaned:
            # The task of a closed event loop has ended with it, and cannot be waited for.
            try:
                await asyncio.wait((task,), timeout=timeout)
            finally:
                # Also if this stop is cancelled itself: the task must not outlive it.
                task.cancel()  # no effect on a task that has ended
            # A driver may hang while it closes a connection; the stop goes on without it.
            await asyncio.wait((task,), timeout=CANCEL_LIMIT)
        if self._outages is not None:
            self._outages.left(self)

    async def _run(self, stopped: asyncio.Event) -> None:
        while not stopped.is_set():
            # Before the tick, so that a wake-up during the tick lets the next one come at once.
            self._wake.clear()
            wait = await self._guarded_tick(stopped)
            if not stopped.is_set():
                await self._pause(wait)

    async def _guarded_tick(self, stopped: asyncio.Event) -> float | None:
        began = self._clock.monotonic()
        try:
            wait = await self._tick()
        except Exception as error:  # noqa: BLE001 - a loop must not die; `healthy` turns false
            self.failures += 1
            pause = backoff(self.failures, self._clock)
            self._report(error, pause, began)
            await self._sleep_unless_stopping(pause, stopped)
            return 0.0
        self.worked_at = self._clock.monotonic()
        if self.failures:
            self.failures = 0
            if self._outages is not None:
                self._outages.worked(self)
        return wait

    def _report(self, error: Exception, pause: float, began: float) -> None:
        if isinstance(error, StoreError) and self._outages is not None:
            self._outages.failed(self, f"{self.name} loop", error, began)
            return
        text = (
            f"the {self.name} loop failed {self.failures} times in a row, again in {pause:.1f} s: "
            f"{error!r}"
        )
        self._log(logging.CRITICAL, text, exc_info=error)

    async def _sleep_unless_stopping(self, seconds: float, stopped: asyncio.Event) -> None:
        # A wake-up must not cut a back-off short: it would hammer a failing database.
        with suppress(TimeoutError):
            async with self._clock.timeout(seconds):
                await stopped.wait()

    async def _pause(self, wait: float | None) -> None:
        if wait is not None and wait <= 0:
            # A loop that always has work must let other tasks run.
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            async with self._clock.timeout(wait):
                await self._wake.wait()


async def persist(work: Callable[[], Awaitable[None]], deadline: float, clock: Clock) -> bool:
    """Do `work`, again whenever the database fails, but no longer than `deadline` (the event loop's
    time); whether it was done.
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


def cancelled() -> bool:
    """Whether the running task is told to end, or is closed after its event loop has ended."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return True
    return task is None or task.cancelling() > 0


STOP_LIMIT = 2.0
"""Most seconds for a tick that runs when the broker stops, and to give the lock back; then its
lease runs out."""


class FleetLoop(ABC):
    """A loop whose work one process of the fleet does: the one that has its lock in the database.

    Each process asks for the lock at every tick, where that needs it. Who has it keeps it, and if
    its process ends without a word, its lease runs out. A process that has lost the lock without
    knowing may go on for a moment: the work must bear that.
    """

    def __init__(self, store: "Store", lock: str, name: str, log: Log, clock: Clock) -> None:
        """Nothing runs before `start`; `lock` is the key of the lock, `name` is for the log."""
        self._store = store
        self._lock = lock
        self._name = name
        self._log = log
        self._clock = clock
        self._token = uuid4()
        self._loop: Loop | None = None
        self._info: Mapping[str, Any] = {}
        """What the lock's row tells besides the process."""

    @abstractmethod
    async def tick(self) -> float:
        """Do the work, if this process is the one to do it; seconds until the next time."""

    def start(self, outages: Outages) -> None:
        """Start; without effect if it runs."""
        if self._loop is None or self._loop.orphaned:
            self._loop = Loop(self._name, self.tick, self._log, self._clock)
            self._loop.start(outages)

    async def acquire(self, lease: float) -> bool:
        """Whether this process is the one, for `lease` seconds from now."""
        fence = await self._store.locks.acquire(self._lock, self._token, lease, self._info)
        return fence is not None

    async def extend(self, lease: float) -> bool:
        """Whether this process is still the one; then for `lease` seconds from now."""
        return await self._store.locks.extend(self._lock, self._token, lease)

    def forget(self) -> None:  # noqa: B027 - most have nothing to forget
        """Forget what must not be told any more once this process does not do the work."""

    async def stop(self) -> None:
        """Stop, then let another process have the lock; without effect if nothing runs."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        await loop.stop(STOP_LIMIT)
        self.forget()
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(STOP_LIMIT):
                await self._store.locks.release(self._lock, self._token)

"""Check whether the database takes writes, by recent heartbeats or else by a probe.

A standby, a read-only server and one whose synchronous standby is away answer every SELECT. Only a
COMMIT that was answered proves that the next one will be.
"""

import asyncio
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.database.errors import NotConnectedError
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.fleet.heartbeat import Heartbeat
from faststream_sqlbroker.flow.loop import Log, Loop, Outages

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

FRESH = 8.0
"""Seconds for which a committed write counts: somewhat more than the heartbeat interval, so that a
process with heartbeats makes no probe.
"""
PROBE_TIMEOUT = 3.0
"""Seconds that a check waits for a probe by default."""
MAX_RESPONSE_TIME = 2.0
"""Seconds without an answer after which a write counts as refused for all callers, not only for one
that stops waiting. Readiness waits for so long, although its first statement takes some of its
time.
"""
NO_WRITES = "the database takes no writes"


class WritePath:
    """The state of a broker's writes in this process; all callers share a probe."""

    def __init__(
        self, store: "Store", heartbeat: Heartbeat, outages: Outages, log: Log, clock: Clock
    ) -> None:
        """Probe from the first check on. Failed probes are reported to `outages`."""
        self._store = store
        self._heartbeat = heartbeat
        self._outages = outages
        self._clock = clock
        self._loop = Loop("write probe", self._probe, log, clock)
        self._is_open = False
        self._succeeded_at = -inf
        self._started_at = -inf
        self._answered = asyncio.Event()
        self.problem: str | None = None
        """Why the database takes no writes, as far as is known. After `open` the probe is repeated
        until it succeeds."""

    def open(self) -> None:
        """Repeat failed probes until `stop`; before that, a probe serves only its callers."""
        self._is_open = True

    async def check(self) -> str | None:
        """Return why the database takes no writes, or None, within 3 seconds."""
        return await self.check_within(PROBE_TIMEOUT)

    async def check_within(self, timeout: float | None) -> str | None:
        """Return why the database takes no writes, or None if writes work.

        A recent write, of a heartbeat or a probe, answers at once. Else a probe is waited for, for
        `timeout` seconds at most. None waits until it has a result, which `statement_timeout`
        limits. A text in `problem` is known to all callers, and they do not wait.
        """
        succeeded_at = max(self._succeeded_at, self._heartbeat.written_at)
        if self._clock.monotonic() - succeeded_at < FRESH:
            return None
        if not self._loop.is_running:
            self._answered = asyncio.Event()  # the old event may belong to another event loop
            self._start_probe()
            self._loop.start(self._outages)
        elif self.problem is None and self._answered.is_set():
            self._start_probe()
            self._loop.wake()
        if self.problem is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._answered.wait()
        if self._answered.is_set() or self.problem is not None:
            return self.problem
        waited = self._clock.monotonic() - self._started_at
        text = f"{NO_WRITES}: a write has not been answered for {waited:.1f} s"
        if waited >= MAX_RESPONSE_TIME:
            self.problem = text
        return text

    def _start_probe(self) -> None:
        """Mark the result as unknown, for a probe that starts now.

        Callers then wait for `_answered` instead of reading the result of the last probe.
        """
        self._answered.clear()
        self._started_at = self._clock.monotonic()
        self.problem = None

    async def stop(self) -> None:
        """Stop the probe."""
        self._is_open = False
        await self._loop.stop(0.0)

    async def _probe(self) -> None:
        """Try a write, record the result and wake the waiting callers.

        After `open`, a failure is raised so that the loop repeats the probe, with growing pauses.
        Before, the loop ends: a probe serves only the callers that wait for it.
        """
        try:
            await self._store.access.try_write()
            self.problem = None
            self._succeeded_at = self._clock.monotonic()
        except StoreError as error:
            # The readiness check shows this text to anyone, so it contains no address of the
            # database; the log has more.
            is_disconnected = isinstance(error, NotConnectedError)
            self.problem = f"{NO_WRITES}: {'no connection to it' if is_disconnected else error}"
            if self._is_open:
                raise
        finally:
            self._answered.set()
            if not self._is_open:
                self._loop.finish()

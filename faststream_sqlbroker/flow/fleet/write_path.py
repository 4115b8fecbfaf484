"""Whether the database takes writes: told by signs of life, else by a probe.

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
"""Seconds for which a committed write counts: somewhat more than from one sign of life to the next,
so that who gives them makes no probe."""
PATIENCE = 3.0
"""Seconds that a look waits for a probe, unless it says otherwise."""
LATE = 2.0
"""Seconds without an answer after which a write counts as refused for all who ask, not only for who
waits no longer. Readiness waits for so long, although its first statement takes some of its time.
"""
NO_WRITES = "the database takes no writes"


class WritePath:
    """That of one broker in this process; all who ask share one probe."""

    def __init__(
        self, store: "Store", heartbeat: Heartbeat, outages: Outages, log: Log, clock: Clock
    ) -> None:
        """Probe from the first `look` on; failed probes are reported to `outages`."""
        self._store = store
        self._heartbeat = heartbeat
        self._outages = outages
        self._clock = clock
        self._loop = Loop("write probe", self._probe, log, clock)
        self._is_open = False
        self._worked_at = -inf
        self._began_at = -inf
        self._answered = asyncio.Event()
        self.problem: str | None = None
        """Why the database takes no writes, as far as is known. While it is open, it is probed
        until it does."""

    def open(self) -> None:
        """Let probes that fail go on, until `stop`; else each is one for the looks that wait."""
        self._is_open = True

    async def look(self) -> str | None:
        """As `look_within` 3 seconds."""
        return await self.look_within(PATIENCE)

    async def look_within(self, patience: float | None) -> str | None:
        """Find out why the database takes no writes; None: it takes them.

        A probe is waited for if nothing is known, for `patience` seconds at most; None: until it
        has an outcome, which `statement_timeout` limits.
        """
        last = max(self._worked_at, self._heartbeat.written_at)
        if self._clock.monotonic() - last < FRESH:
            return None
        if not self._loop.running:
            self._answered = asyncio.Event()  # the old one may belong to another event loop
            self._begin()
            self._loop.start(self._outages)
        elif self.problem is None and self._answered.is_set():
            self._begin()
            self._loop.wake()
        if self.problem is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._answered.wait()
        if self._answered.is_set() or self.problem is not None:
            return self.problem
        waited = self._clock.monotonic() - self._began_at
        text = f"{NO_WRITES}: a write has had no answer for {waited:.1f} s"
        if waited >= LATE:
            self.problem = text
        return text

    def _begin(self) -> None:
        self._answered.clear()
        self._began_at = self._clock.monotonic()
        self.problem = None

    async def stop(self) -> None:
        """End the probe."""
        self._is_open = False
        await self._loop.stop(0.0)

    async def _probe(self) -> None:
        try:
            await self._store.access.try_write()
            self.problem = None
            self._worked_at = self._clock.monotonic()
        except StoreError as error:
            # Anyone may read it, and the log has more: it tells no address.
            away = isinstance(error, NotConnectedError)
            self.problem = f"{NO_WRITES}: {'there is no connection to it' if away else error}"
            if self._is_open:
                raise
        finally:
            self._answered.set()
            if not self._is_open:
                self._loop.end()

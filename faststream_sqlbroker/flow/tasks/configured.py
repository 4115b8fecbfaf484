"""Lazy creation of the objects that a configuration names."""

import asyncio
from collections.abc import Awaitable, Callable

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.exceptions import SqlBrokerError
from faststream_sqlbroker.flow.loop import backoff

BY_CONFIGURATION = "configuration"
"""Name in the audit for objects that were created by the configuration."""


class ConfiguredSetup:
    """Creates configured objects once, at the first use.

    After a failure it is tried again with growing pauses, not by each request.
    """

    def __init__(self, make: Callable[[], Awaitable[None]], clock: Clock) -> None:
        """Create everything by `make`, which must accept objects that exist already."""
        self._make = make
        self._clock = clock
        self._is_done = False
        self._failures = 0
        self._error: SqlBrokerError | None = None
        self._retry_at = 0.0
        self._lock = asyncio.Lock()

    async def run_once(self) -> None:
        """Create the objects, unless that is done; concurrent calls wait for the first.

        Raises:
            SqlBrokerError: they cannot be created. During a pause, the last error is raised again.
        """
        if self._is_done:
            return
        async with self._lock:
            # Another request may have done it while this one waited for the lock.
            if self._is_done:
                return
            if self._error is not None and self._clock.monotonic() < self._retry_at:
                # The same error object is raised many times: its traceback must not grow.
                raise self._error.with_traceback(None)
            try:
                await self._make()
            except SqlBrokerError as error:
                self._failures += 1
                self._error = error
                self._retry_at = self._clock.monotonic() + backoff(self._failures, self._clock)
                raise
            self._is_done = True

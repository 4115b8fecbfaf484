"""What a configuration names is made once, by the first that needs it."""

import asyncio
from collections.abc import Awaitable, Callable

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.exceptions import SqlBrokerError
from faststream_sqlbroker.flow.loop import backoff

BY_CONFIGURATION = "configuration"
"""Who the audit says has made what the configuration names."""


class Configured:
    """Makes it; while that fails, it is tried again with growing pauses, not by each request."""

    def __init__(self, make: Callable[[], Awaitable[None]], clock: Clock) -> None:
        """`make` makes all of it, also what is there already."""
        self._make = make
        self._clock = clock
        self._made = False
        self._failures = 0
        self._error: SqlBrokerError | None = None
        self._again_at = 0.0
        self._turn = asyncio.Lock()

    async def begin(self) -> None:
        """Make it, unless it is made.

        Raises:
            SqlBrokerError: it cannot be made; during a pause, what was raised before it.
        """
        if self._made:
            return
        async with self._turn:
            # Another request may have made it while this one waited for its turn.
            if self._made:
                return
            if self._error is not None and self._clock.monotonic() < self._again_at:
                # The same error is raised many times: its traceback must not grow.
                raise self._error.with_traceback(None)
            try:
                await self._make()
            except SqlBrokerError as error:
                self._failures += 1
                self._error = error
                self._again_at = self._clock.monotonic() + backoff(self._failures, self._clock)
                raise
            self._made = True

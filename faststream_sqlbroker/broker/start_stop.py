"""Serialize the starts and stops of a broker: the last call wins."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_current_start: ContextVar["StartStop | None"] = ContextVar("sqlbroker_start", default=None)
"""Set during a start, including its hooks and the handlers that it starts. They must not wait for a
start or a stop, which may in turn wait for them.
"""


class StartStop:
    """Makes the starts and stops of a broker wait for each other.

    Stops do not wait for each other: each waits for handlers, which may call `stop` themselves.
    """

    def __init__(self) -> None:
        self._starts: set[asyncio.Future[None]] = set()
        self._stops: set[asyncio.Future[None]] = set()
        self._stop_calls = 0

    @asynccontextmanager
    async def wait_to_start(self) -> AsyncIterator[Callable[[], bool]]:
        """Wait for earlier calls; yield a function that returns False after a new stop.

        The caller checks it after starting, and stops again if the start is no longer wanted. A
        start within a start, such as in a hook, does not wait: it would wait for itself.
        """
        calls = self._stop_calls
        if _current_start.get() is not self:
            while earlier := _filter_running(self._starts | self._stops):
                await asyncio.wait(earlier)
        with _track_call(self._starts):
            token = _current_start.set(self)
            try:
                yield lambda: self._stop_calls == calls
            finally:
                _current_start.reset(token)

    @asynccontextmanager
    async def wait_to_stop(self, limit: float | None) -> AsyncIterator[None]:
        """Void earlier starts, and wait at most `limit` seconds for a start that runs.

        A voided start stops the broker again when it ends. The wait is limited because a database
        may not answer the start.
        """
        self._stop_calls += 1
        with _track_call(self._stops):
            if _current_start.get() is not self and (starts := _filter_running(self._starts)):
                await asyncio.wait(starts, timeout=limit)
            yield


@contextmanager
def _track_call(calls: set[asyncio.Future[None]]) -> Iterator[None]:
    """Keep a future in `calls` while a start or a stop runs, for later calls to wait on."""
    done = asyncio.get_running_loop().create_future()
    calls.add(done)
    try:
        yield
    finally:
        calls.discard(done)
        done.set_result(None)


def _filter_running(calls: Iterable[asyncio.Future[None]]) -> list[asyncio.Future[None]]:
    """Return the calls of this event loop; calls of an abandoned loop never end."""
    loop = asyncio.get_running_loop()
    return [call for call in calls if call.get_loop() is loop]

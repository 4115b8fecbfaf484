"""The order of one broker's starts and stops: the last call wins."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_inside: ContextVar["StartStop | None"] = ContextVar("sqlbroker_start", default=None)
"""Set in a start, and so in its hooks and in the handlers that it starts. They must not wait for a
start or a stop that may wait for them."""


class StartStop:
    """Lets a start and a stop of one broker wait for each other.

    Stops do not wait for each other: each waits for handlers, which may call `stop` themselves.
    """

    def __init__(self) -> None:
        self._starts: set[asyncio.Future[None]] = set()
        self._stops: set[asyncio.Future[None]] = set()
        self._stop_calls = 0

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[Callable[[], bool]]:
        """Wait for earlier starts and stops; give a function that tells whether no stop was called
        since.
        """
        calls = self._stop_calls
        if _inside.get() is not self:
            while earlier := _running(self._starts | self._stops):
                await asyncio.wait(earlier)
        with _noted(self._starts):
            token = _inside.set(self)
            try:
                yield lambda: self._stop_calls == calls
            finally:
                _inside.reset(token)

    @asynccontextmanager
    async def stopping(self, limit: float | None) -> AsyncIterator[None]:
        """Void the starts that were called before, and wait for the one that runs, `limit` seconds
        at most: a database may not answer it.
        """
        self._stop_calls += 1
        with _noted(self._stops):
            if _inside.get() is not self and (starts := _running(self._starts)):
                await asyncio.wait(starts, timeout=limit)
            yield


@contextmanager
def _noted(calls: set[asyncio.Future[None]]) -> Iterator[None]:
    ended = asyncio.get_running_loop().create_future()
    calls.add(ended)
    try:
        yield
    finally:
        calls.discard(ended)
        ended.set_result(None)


def _running(calls: Iterable[asyncio.Future[None]]) -> list[asyncio.Future[None]]:
    """Leave out the calls of an event loop that was abandoned: they never end."""
    loop = asyncio.get_running_loop()
    return [call for call in calls if call.get_loop() is loop]

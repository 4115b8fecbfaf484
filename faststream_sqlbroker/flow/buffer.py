"""What is claimed and waits for a worker: asyncio.Queue's methods, without its accounting for every
item.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Buffer(Generic[T]):
    """First in, first out; any number of tasks may wait in `get`."""

    def __init__(self) -> None:
        """Hold nothing; `items` may be taken from the left."""
        self.items: deque[T] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._watchers: deque[asyncio.Future[None]] = deque()
        """Wait in `coming`."""

    def qsize(self) -> int:
        """Items that wait."""
        return len(self.items)

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self.items

    def put_nowait(self, item: T) -> None:
        """Add one."""
        self.items.append(item)
        self._wake(1)

    def extend(self, items: Sequence[T]) -> None:
        """Add several, in their order."""
        self.items.extend(items)
        self._wake(len(items))

    def get_nowait(self) -> T:
        """Take the first.

        Raises:
            IndexError: there is none.
        """
        return self.items.popleft()

    async def get(self) -> T:
        """Take the first, as soon as there is one."""
        while not self.items:
            await self._wait_among(self._getters)
        return self.items.popleft()

    async def coming(self) -> None:
        """Wait until there is one, or until `interrupt`; who waits here is woken before `get`."""
        if not self.items:
            await self._wait_among(self._watchers)

    def interrupt(self) -> None:
        """End every wait in `coming`."""
        self._wake_of(self._watchers, len(self._watchers))

    async def _wait_among(self, waiters: "deque[asyncio.Future[None]]") -> None:
        waiter = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and self.items:
                self._wake(1)  # it was meant for us: for the next one, then
            raise

    def _wake(self, count: int) -> None:
        self._wake_of(self._getters, self._wake_of(self._watchers, count))

    @staticmethod
    def _wake_of(waiters: "deque[asyncio.Future[None]]", count: int) -> int:
        """Wake up to `count` of `waiters`; how many are left of it."""
        while count and waiters:
            waiter = waiters.popleft()
            # A task of a closed event loop has ended with it, and to wake it would fail.
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)
                count -= 1
        return count

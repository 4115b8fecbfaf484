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
            getter = asyncio.get_running_loop().create_future()
            self._getters.append(getter)
            try:
                await getter
            except asyncio.CancelledError:
                if getter.done() and not getter.cancelled() and self.items:
                    self._wake(1)  # it was meant for us: for the next one, then
                raise
        return self.items.popleft()

    def _wake(self, count: int) -> None:
        while count and self._getters:
            getter = self._getters.popleft()
            if not getter.done():
                getter.set_result(None)
                count -= 1

"""The running calls of FastStream's pipeline, and subscribers without calls.

FastStream counts calls with its MultiLock, which stores them in an asyncio.Queue; counting here
costs a tenth.
"""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from typing_extensions import override

from faststream_sqlbroker.adapter.endpoints import CallsCollection, MultiLock
from faststream_sqlbroker.exceptions import SetupError


class NoCalls(CallsCollection[Any]):
    """The calls of a subscriber that forwards messages without a handler."""

    @override
    def add_call(self, call: Any) -> None:
        """Refuse the handler.

        Raises:
            SetupError: always.
        """
        raise SetupError(
            f"a subscriber with forward_to moves its messages without a handler, so {call.name!r} "
            "would never run: omit forward_to, or subscribe the handler to the queue that it names"
        )


class RunningCalls(MultiLock):
    """A MultiLock that counts, entered around each pipeline call (4 µs less per message)."""

    __slots__ = ("_idle", "_running")

    def __init__(self) -> None:
        self._running = 0
        self._idle: asyncio.Event | None = None

    @override
    def __enter__(self) -> Self:
        self._running += 1
        return self

    @override
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.release()

    @override
    def acquire(self) -> None:
        """Count a started call."""
        self._running += 1

    @override
    def release(self) -> None:
        """Count an ended call."""
        self._running = max(0, self._running - 1)
        if self._idle is not None and not self._running:
            self._idle.set()
            self._idle = None

    @property
    @override
    def qsize(self) -> int:
        """The number of running calls."""
        return self._running

    @property
    @override
    def empty(self) -> bool:
        """True if no call is running."""
        return not self._running

    @override
    async def wait_release(self, timeout: float | None = None) -> None:
        """Wait until no call is running, for at most `timeout` seconds.

        As in FastStream, return immediately without a timeout.
        """
        if not timeout or not self._running:
            return
        idle = self._idle = self._idle or asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await idle.wait()

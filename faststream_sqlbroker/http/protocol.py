"""Limits of time on a connection, which uvicorn does not have: slow heads, and slow readers."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT = 10.0
"""Seconds for the whole head of a request, from the opened connection or the last answer on."""
READ_TIMEOUT = 30.0
"""Seconds in which a client must take what waits for it."""


class LimitedProtocol(H11Protocol):
    """Closes a connection whose client sends no head, or reads no answer, for too long."""

    _head: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._await_head()

    def handle_events(self) -> None:
        """Answer what has come; a head that is there is waited for no longer."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            _end(self._head)

    def on_response_complete(self) -> None:
        """Begin to wait for the next head, also where the client still sends a body."""
        self._await_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._reading = self.loop.call_later(READ_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        _end(self._reading)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget both."""
        _end(self._head)
        _end(self._reading)
        super().connection_lost(exc)

    def _await_head(self) -> None:
        _end(self._head)
        # Not a close: that would wait for a client that does not read its last answer.
        self._head = self.loop.call_later(HEAD_TIMEOUT, self.transport.abort)


def _end(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()

"""Run an ASGI application by uvicorn, inside of a process that has other work, with limits of time
on a connection, which uvicorn does not have: slow heads, and slow readers.
"""

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.http.mounting import App

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

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless an answer has begun; the application's is sent no more."""
        state = self.conn.our_state
        if self.cycle is not None:
            self.cycle.disconnected = True
        if state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.close()

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


MOST_CONNECTIONS = 100
"""Probes at a time; more are refused, so that they take no memory from the worker."""
BACKLOG = 128
"""Connections that wait for an accept."""


class Server(uvicorn.Server):
    """Answers the requests that wait for messages before it stops."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop."""
        # Others' applications, such as the probes alone, have no waits.
        end_waits = getattr(self.config.app, "end_waits", None)
        if end_waits is not None:
            end_waits()
        await super().shutdown(sockets)


class InnerServer(Server):
    """Leaves signals to the program that it is a part of."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


class ProbeServer:
    """Serves probes on a port of its own while the broker runs."""

    def __init__(self, app: App, host: str, first: int, last: int | None = None) -> None:
        """A port from `first` to `last` is taken; None: `first`."""
        self._app = app
        self._address = host, first, first if last is None else last
        self._running: tuple[InnerServer, asyncio.Task[None]] | None = None

    async def start(self) -> int:
        """Listen; the port, which the system chooses for 0.

        Raises:
            SetupError: no port can be taken.
        """
        listener = bound("health_port", *self._address)
        config = uvicorn.Config(
            self._app,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            http=LimitedProtocol,
            ws="none",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        server = InnerServer(config)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="sqlbroker-probes")
        self._running = (server, task)
        port: int = listener.getsockname()[1]
        return port

    async def stop(self) -> None:
        """End, and free the port."""
        if self._running is None:
            return
        server, task = self._running
        self._running = None
        if task.get_loop() is asyncio.get_running_loop():
            server.should_exit = True
            await asyncio.gather(task, return_exceptions=True)


def bound(option: str, host: str, port: int, last: int = 0) -> socket.socket:
    """A socket that listens on `port`, or on the first one from there to `last` that is free.

    Raises:
        SetupError: they are taken, or the host is not of this machine; the text names `option`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Trap: asyncio turns Nagle's algorithm off only for sockets that name their protocol. With it,
    # each answer on a connection that is kept takes 40 ms more.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            if port < last:
                return bound(option, host, port + 1, last)
            hint = "each process needs a port of its own, with `--workers` too"
        else:
            hint = "give an address of this machine, and a port that this user may take"
        told = error.strerror or error
        raise SetupError(f"{option}: cannot listen on {host}:{port}: {told}: {hint}") from None
    listener.setblocking(False)
    return listener

"""Run an ASGI application with uvicorn, inside a process that has other work.

It adds timeouts that uvicorn lacks, for slow request heads and slow readers.
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
"""Seconds for the complete head of a request, counted from the connection or the last response."""
READ_TIMEOUT = 30.0
"""Seconds in which a client must read pending data."""


class LimitedProtocol(H11Protocol):
    """Closes a connection whose client sends no head, or reads no response, for too long."""

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer for a head."""
        super().connection_made(transport)
        self._start_head_timer()

    def handle_events(self) -> None:
        """Handle the received data; a complete head stops the timer.

        The head is the request line with the headers. A cycle is uvicorn's request and response.
        """
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel_timer(self._head_timer)

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP, unless a response has started.

        A second response on the same connection would be read as part of the first. The
        application's own response is no longer sent.
        """
        state = self.conn.our_state
        if self.cycle is not None:
            self.cycle.disconnected = True
        if state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Start the timer for the next head, even while the client still sends a body."""
        self._start_head_timer()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the timer for a client that does not read.

        The event loop calls it when too much data waits to be sent.
        """
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer, because the client has read."""
        _cancel_timer(self._read_timer)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop both timers."""
        _cancel_timer(self._head_timer)
        _cancel_timer(self._read_timer)
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        """Abort the connection unless the head of the next request arrives in time."""
        _cancel_timer(self._head_timer)
        # Abort instead of close, which would wait for a client that does not read its response.
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self.transport.abort)


def _cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


MAX_CONNECTIONS = 100
"""Concurrent connections to the probes; more are refused, to save the worker's memory."""
BACKLOG = 128
"""Connections that wait for an accept."""


class Server(uvicorn.Server):
    """A server that answers waiting requests before the stop."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests that wait for messages, and stop.

        Without this, the server would wait for long polls up to its graceful timeout.
        """
        # Other applications, such as the probes alone, have no waiting requests.
        end_waits = getattr(self.config.app, "end_waits", None)
        if end_waits is not None:
            end_waits()
        await super().shutdown(sockets)


class InnerServer(Server):
    """A server that leaves signals to the surrounding program."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


class ProbeServer:
    """Serves probes on a separate port while the broker runs."""

    def __init__(self, app: App, host: str, first: int, last: int | None = None) -> None:
        """Use the first free port from `first` to `last`, which defaults to `first`."""
        self._app = app
        self._address = host, first, first if last is None else last
        self._running: tuple[InnerServer, asyncio.Task[None]] | None = None

    async def start(self) -> int:
        """Listen, and return the port, which the system chooses for 0.

        Raises:
            SetupError: no port is free.
        """
        listener = bind_socket("health_port", *self._address)
        config = uvicorn.Config(
            self._app,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            http=LimitedProtocol,
            ws="none",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        server = InnerServer(config)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="sqlbroker-probes")
        self._running = (server, task)
        port: int = listener.getsockname()[1]
        return port

    async def stop(self) -> None:
        """Stop, and release the port."""
        if self._running is None:
            return
        server, task = self._running
        self._running = None
        # If the event loop of the start has ended, the server has ended with it.
        if task.get_loop() is asyncio.get_running_loop():
            server.should_exit = True
            await asyncio.gather(task, return_exceptions=True)


def bind_socket(option: str, host: str, port: int, last: int = 0) -> socket.socket:
    """Return a socket that listens on the first free port from `port` to `last`.

    Raises:
        SetupError: no port is free, or the host is not on this machine; the message names `option`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Trap: asyncio turns Nagle's algorithm off only for sockets that name their protocol. With it,
    # each response on a persistent connection takes 40 ms longer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            if port < last:
                return bind_socket(option, host, port + 1, last)
            hint = "give each process its own port, also with `--workers`"
        else:
            hint = "use an address of this machine, and a port that this user may open"
        reason = error.strerror or error
        raise SetupError(f"{option}: cannot listen on {host}:{port}: {reason}: {hint}") from None
    listener.setblocking(False)
    return listener

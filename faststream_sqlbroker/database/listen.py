"""A connection for LISTEN (PostgreSQL with asyncpg)."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker.database.connections import Checkouts
from faststream_sqlbroker.exceptions import TransientStoreError

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds without traffic before TCP's first probe, seconds between two probes, and probes."""

NEVER_IDLE = (
    "SELECT set_config('idle_session_timeout', '0', false) "
    "WHERE current_setting('idle_session_timeout', true) IS NOT NULL"
)
"""Removes the session's idle limit, because a session that listens is idle all the time; PostgreSQL
13 has no such limit. The connection is closed at the end, so no other user of the pool gets it.
"""


@asynccontextmanager
async def listen_on_channel(
    checkouts: Checkouts,
    engine: AsyncEngine,
    timeout: float,
    channel: str,
    on_payload: Callable[[str], None],
    closed: asyncio.Event,
) -> AsyncIterator[Callable[[bool], Awaitable[None]]]:
    """Call `on_payload` with the payload of each NOTIFY on `channel`.

    Yields a check of the connection, which queries the server only if its argument is true. TCP
    itself notices a server that has vanished, after `KEEPALIVE` and a few tries.

    Args:
        checkouts: Checks the connection out.
        engine: Its pool provides the connection until the block ends.
        timeout: Seconds for the LISTEN, and for each check.
        channel: The channel of PostgreSQL's LISTEN.
        on_payload: Called with each payload.
        closed: Set when the connection is closed.

    Raises:
        TransientStoreError: the connection could not be made or is lost.
    """
    errors = checkouts.errors

    def callback(_connection: Any, _pid: int, _channel: str, payload: str) -> None:
        on_payload(payload)

    async with AsyncExitStack() as stack:
        async with errors.convert_errors(), asyncio.timeout(timeout):
            connection = await stack.enter_async_context(checkouts(None, engine))
            # Close the connection: if it returned to the pool, its next user would still be
            # subscribed.
            stack.push_async_callback(connection.invalidate)
            driver: Any = (await connection.get_raw_connection()).driver_connection
            await driver.execute(NEVER_IDLE)
            await driver.add_listener(channel, callback)
            _enable_keepalive(driver)
        driver.add_termination_listener(lambda _c: closed.set())

        async def check_alive(query_server: bool) -> None:
            async with errors.convert_errors(), asyncio.timeout(timeout):
                if closed.is_set():
                    msg = "the LISTEN connection was closed"
                    raise TransientStoreError(msg)
                if checkouts.is_evicted(connection):
                    msg = (
                        "the LISTEN connection was opened before a server became read-only, "
                        "and may be connected to that server"
                    )
                    raise TransientStoreError(msg)
                if query_server:
                    await driver.execute("SELECT 1")

        yield check_alive


def _enable_keepalive(driver: Any) -> None:
    """Let TCP probe the server while nothing is sent, as far as the system can.

    A listening connection only waits. Without probes it would never notice that the server, or a
    firewall in between, has dropped it.
    """
    transport = getattr(driver, "_transport", None)
    tcp_socket = None if transport is None else transport.get_extra_info("socket")
    if tcp_socket is None or tcp_socket.family not in (socket.AF_INET, socket.AF_INET6):
        return
    tcp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            tcp_socket.setsockopt(socket.IPPROTO_TCP, option, value)

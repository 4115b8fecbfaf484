"""A connection of the pool that nobody can hold for ever."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from faststream_sqlbroker.store.errors import ErrorClasses

T = TypeVar("T")

GRACE = 1.0
"""Seconds beyond the limit after which the socket is ended, and again after which nobody waits any more."""


@asynccontextmanager
async def checkout(
    engine: AsyncEngine, errors: ErrorClasses, limit: float | None
) -> AsyncIterator[AsyncConnection]:
    """A connection for at most `limit` seconds (None: as long as it takes); `GRACE` later its socket is ended.

    Cancelling is not enough: SQLAlchemy returns a connection to the pool whatever happens, aiomysql and
    asyncmy send a ROLLBACK then, and a server that is gone without a word never answers it.

    Raises:
        NotConnectedError: there is none.
    """
    async with errors.connecting():
        connection = await engine.connect()
    loop, watchdog, driver_connection = asyncio.get_running_loop(), None, None
    try:
        fairy: Any = connection.sync_connection and connection.sync_connection.connection
        driver_connection = fairy.driver_connection
        if limit is not None:
            watchdog = loop.call_later(limit + GRACE, abort, driver_connection)
        yield connection
    finally:
        watchdog = watchdog or loop.call_later(GRACE, abort, driver_connection)
        try:
            await _to_the_end(connection, watchdog.when() + GRACE)
        finally:
            watchdog.cancel()


async def _to_the_end(connection: AsyncConnection, deadline: float) -> None:
    """Close `connection` even if we are cancelled meanwhile; `deadline` is in the event loop's time."""
    closing = asyncio.ensure_future(connection.close())
    clock, cancelled = asyncio.get_running_loop().time, None
    while not closing.done() and (left := deadline - clock()) > 0:
        try:
            await asyncio.wait((closing,), timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    closing.add_done_callback(_retrieve)  # it may end, and fail, when nobody waits any more
    if cancelled is not None:
        raise cancelled
    if closing.done():
        await closing


async def cancelled_once(work: "Coroutine[Any, Any, T]") -> T:
    """`work`, which sees the first cancellation only, and whose end is waited for.

    Cancelled again while it closes a connection, SQLAlchemy stops aiosqlite's thread, and the task that closes it
    waits for ever for that thread, as does `asyncio.run` for the task. anyio cancels until a task has ended.
    """
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            if cancelled is None and not task.cancelling():
                task.cancel()
            cancelled = error
    if cancelled is not None:
        _retrieve(task)
        raise cancelled
    return task.result()


def _retrieve(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()


def abort(driver_connection: Any) -> None:
    """End the socket, so that whoever waits for an answer on it gets an error; SQLite has none."""
    if callable(terminate := getattr(driver_connection, "terminate", None)):
        terminate()  # asyncpg
        return
    # aiomysql, asyncmy: their close() would wait until everything is sent.
    writer = getattr(driver_connection, "_writer", None)
    transport = getattr(writer, "transport", None) or getattr(driver_connection, "_transport", None)
    if transport is not None:
        transport.abort()
    elif callable(fileno := getattr(driver_connection, "fileno", None)):
        # psycopg waits for its socket to become readable, which an end of it is.
        with contextlib.suppress(Exception), socket.socket(fileno=os.dup(fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)

"""SQLite on the event loop's own thread, for tests in which one statement runs at a time.

aiosqlite gives each connection a thread, and each call waits for two switches between threads and
a turn of the event loop: half of the CPU time of a model. Trap: a statement that waits for the lock
of another connection blocks the event loop, so that connection could never go on.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Any

import aiosqlite

ITER_CHUNK_SIZE = 64


class _Calls:
    """Stands in for the queue of aiosqlite's thread."""

    def put_nowait(self, call: tuple[asyncio.Future[Any], Callable[[], Any]]) -> None:
        future, function = call
        try:
            future.set_result(function())
        except sqlite3.Error as error:
            future.set_exception(error)


class Connection(aiosqlite.Connection):
    """A connection that executes at once."""

    def __init__(self, connector: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connector, ITER_CHUNK_SIZE)
        self._tx: Any = _Calls()

    def __await__(self) -> Any:
        return self._connect().__await__()

    async def _connect(self) -> "Connection":
        self._connection = self._connector()
        return self

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def stop(self) -> None:
        """Close the connection, without a thread to end."""
        self._running = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def connect(database: str, **options: Any) -> Connection:
    """Stand in for `aiosqlite.connect`: the option `async_creator_fn` of an engine's
    `connect_args`."""
    return Connection(lambda: sqlite3.connect(database, **options))

"""One connection that LISTENs (PostgreSQL through asyncpg)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.store.checkout import Checkouts


@asynccontextmanager
async def listening(
    checkouts: Checkouts,
    engine: AsyncEngine,
    timeout: float,
    channel: str,
    heard: Callable[[str], None],
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Call `heard` with the payload of each wake-up on `channel`; yields a check of the connection.

    Args:
        checkouts: Checks the connection out.
        engine: Whose pool gives it, for as long as this is entered.
        timeout: Seconds for the LISTEN, and for each check.
        channel: Of PostgreSQL.
        heard: Gets each payload.

    Raises:
        TransientStoreError: the connection cannot be made or is gone.
    """
    gone, errors = asyncio.Event(), checkouts.errors

    def callback(_connection: Any, _pid: int, _channel: str, payload: str) -> None:
        heard(payload)

    async with AsyncExitStack() as stack:
        async with errors.classed(), asyncio.timeout(timeout):
            connection = await stack.enter_async_context(checkouts(None, engine))
            # Whatever is still subscribed must not come back to somebody else's checkout.
            stack.push_async_callback(connection.invalidate)
            driver: Any = (await connection.get_raw_connection()).driver_connection
            await driver.add_listener(channel, callback)
        driver.add_termination_listener(lambda _c: gone.set())

        async def alive() -> None:
            async with errors.classed(), asyncio.timeout(timeout):
                if gone.is_set():
                    msg = "the listening connection was closed"
                    raise TransientStoreError(msg)
                if checkouts.is_evicted(connection):
                    msg = (
                        "a server was found read-only since: it may be the one that is listened to"
                    )
                    raise TransientStoreError(msg)
                await driver.execute("SELECT 1")

        yield alive

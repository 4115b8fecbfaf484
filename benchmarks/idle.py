"""What an idle process sends: python -m benchmarks.idle idle '{"url": ..., "count": ...}'.

Statements are counted in the client, as the server counts those of its own housekeeping, too.
"""

import asyncio
import time
from typing import Any

from sqlalchemy import event

from benchmarks.measure import answer
from benchmarks.ours import engine_of
from faststream_sqlbroker import SqlBroker, SqlBrokerSchemaConfig

SETTLING = 25.0
"""Seconds until pauses have grown to their longest, and what only a start sends is over."""


class Sent:
    """How many statements an engine has sent, without BEGIN and COMMIT."""

    def __init__(self, engine: Any) -> None:
        self.count = 0
        event.listen(engine.sync_engine, "before_cursor_execute", self._executed)
        event.listen(engine.sync_engine, "connect", self._connected)

    def _executed(self, *_: Any) -> None:
        self.count += 1

    def _connected(self, connection: Any, _record: Any) -> None:
        driver = getattr(connection, "driver_connection", None)
        # What asyncpg sends without SQLAlchemy.
        if hasattr(driver, "add_query_logger"):
            driver.add_query_logger(self._logged)

    def _logged(self, record: Any) -> None:
        self.count += not record.query.startswith(("BEGIN", "COMMIT", "ROLLBACK"))


async def _idle(url: str, count: int, seconds: float, *, told: bool) -> dict[str, Any]:
    engine = engine_of(url)
    sent = Sent(engine)
    options: Any = {"max_fetch_interval": None} if told else {}
    async with SqlBroker(
        engine, logger=None, schema=SqlBrokerSchemaConfig(notify_trigger=told)
    ) as broker:
        await broker.create_tables()
        for number in range(count):

            @broker.subscriber(f"queue{number}", **options)
            async def handle(_message: dict) -> None: ...

        await broker.start()
        await asyncio.sleep(SETTLING)
        before = sent.count
        began = time.monotonic()
        cpu = time.process_time()
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        found = sent.count - before
        cpu = time.process_time() - cpu
    await engine.dispose()
    return {
        "count": count,
        "seconds": took,
        "cpu": cpu,
        "statements": found,
        "statements_a_minute": 60 * found / took,
    }


def idle(url: str, count: int = 5, seconds: float = 60.0, told: bool = False) -> dict[str, Any]:
    """`count` subscribers of one process without messages; with `told`, they wait for triggers."""
    return asyncio.run(_idle(url, count, seconds, told=told))


if __name__ == "__main__":
    answer({"idle": idle})

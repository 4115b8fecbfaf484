"""A worker of the order service: python -m docs.examples.demo.worker URL."""

import asyncio
import os
import random
import sys

from faststream import FastStream
from sqlalchemy.ext.asyncio import create_async_engine

from docs.examples.demo.shop import HOPELESS_EVERY, ship
from faststream_sqlbroker import (
    ExponentialBackoffWithJitterRetryStrategy,
    SqlBroker,
    SqlBrokerMessage,
)

FLAKY = 0.1
"""Share of attempts at which the carrier does not answer."""

engine = create_async_engine(sys.argv[1], pool_size=10)
broker = SqlBroker(engine, logger=None)
app = FastStream(broker, logger=None)

retries = ExponentialBackoffWithJitterRetryStrategy(
    initial_delay_seconds=0.2,
    multiplier=2.0,
    max_delay_seconds=2.0,
    max_attempts=6,
    max_total_delay_seconds=None,
)


@broker.subscriber(
    "orders",
    max_workers=8,
    retry_strategy=retries,
    release_stuck_timeout="2s",  # a killed worker's messages come back after this
    release_stuck_interval="500ms",
    fetch_batch_size=20,
)
async def handle(order: dict[str, int], message: SqlBrokerMessage) -> None:
    """Ship one order; the carrier fails now and then, and some addresses do not exist."""
    order_id = order["order_id"]
    await asyncio.sleep(random.uniform(0.01, 0.05))
    if order_id % HOPELESS_EVERY == 0:
        raise ValueError(f"order {order_id}: no such address")
    if random.random() < FLAKY and message.attempts_count < 3:
        raise ConnectionError("the carrier does not answer")
    async with engine.begin() as connection:
        await ship(connection, order_id, str(os.getpid()))


if __name__ == "__main__":
    asyncio.run(app.run())

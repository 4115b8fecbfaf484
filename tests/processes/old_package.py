"""The other faststream-sqlbroker, 0.1.0a11, in an environment of its own, with its own tables.

python old_package.py URL FOLDER makes them and publishes bodies: 0 … 19, and 20 … 24 for an hour
later. Then it makes FOLDER/ready, waits for FOLDER/go, and works until SIGTERM; each body that it
handles is a line in FOLDER/handled.
"""

import asyncio
import os
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

from faststream import AckPolicy, FastStream
from faststream_sqlbroker.sqlbroker.schema import define_sqlbroker_schema
from sqlalchemy import Integer
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import ConstantRetryStrategy, SqlBroker, SqlBrokerSchemaConfig

URL, FOLDER = sys.argv[1], Path(sys.argv[2])
engine = create_async_engine(URL)
# It takes MariaDB's JSON columns for LONGTEXT, and would refuse them.
broker = SqlBroker(engine=engine, logger=None, validate_schema_on_start="mysql" not in URL)
again = ConstantRetryStrategy(delay_seconds=7200, max_attempts=5, max_total_delay_seconds=None)


@broker.subscriber(
    ["q"],
    max_workers=1,
    fetch_batch_size=5,
    max_fetch_interval=0.1,
    flush_interval=0.05,
    retry_strategy=again,
    ack_policy=AckPolicy.NACK_ON_ERROR,
)
async def handle(body: int) -> None:
    with (FOLDER / "handled").open("a") as file:
        file.write(f"{body}\n")
        file.flush()
        os.fsync(file.fileno())
    if body % 10 == 9:
        raise ValueError(body)


async def create() -> None:
    tables = define_sqlbroker_schema(config=SqlBrokerSchemaConfig()).tables
    for table in tables.values():
        if URL.startswith("sqlite"):
            table.c.id.type = Integer()
        metadata = table.metadata
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)


async def publish() -> None:
    await broker.connect()
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    for body in range(25):
        due = later if body >= 20 else None
        await broker.publish(body, queue="q", headers={"source": "old"}, next_attempt_at=due)


async def main() -> None:
    await create()
    await publish()
    (FOLDER / "ready").touch()
    while not (FOLDER / "go").exists():
        await asyncio.sleep(0.05)
    await FastStream(broker, logger=None).run()
    await engine.dispose()


asyncio.run(main())

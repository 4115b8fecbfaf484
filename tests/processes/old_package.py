"""The other faststream-sqlbroker, 0.1.0a11, in an environment of its own, with its own tables.

python old_package.py URL create
python old_package.py URL publish FIRST COUNT SECONDS
python old_package.py URL work FILE
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

URL, ACTION, *REST = sys.argv[1:]
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
    with Path(REST[0]).open("a") as file:
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


async def publish(first: int, count: int, seconds: float) -> None:
    await broker.connect()
    due = datetime.now(timezone.utc) + timedelta(seconds=seconds) if seconds else None
    for body in range(first, first + count):
        await broker.publish(body, queue="q", headers={"source": "old"}, next_attempt_at=due)


async def main() -> None:
    if ACTION == "create":
        await create()
    elif ACTION == "publish":
        await publish(int(REST[0]), int(REST[1]), float(REST[2]))
    else:
        await FastStream(broker, logger=None).run()
    await engine.dispose()


asyncio.run(main())

"""The stop of a subscriber whose server does not answer."""

import asyncio
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.store import Store
from tests.flow.conftest import Rig
from tests.helpers import Awake, eventually
from tests.proxy import proxied


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_stop_while_the_server_is_silent_has_one_deadline(rig: Rig) -> None:
    async with proxied(rig.store.engine.url) as (proxy, url):
        engine = create_async_engine(url)
        store = Store(engine, rig.store.tables, statement_timeout=1.0)
        await rig.put(5)

        async def handle(row: ClaimedMessage) -> None:
            await asyncio.sleep(0.3)
            await rig.ack(row)

        quick = {
            "max_fetch_interval": 0.05,
            "release_stuck_interval": 0.1,
            "release_stuck_timeout": 1,
        }
        consumer = rig.consumer(handle, store=store, **quick)
        await consumer.start()
        await eventually(lambda: rig.handled)
        proxy.stall()
        pool: Any = engine.pool
        await eventually(lambda: pool.checkedout() >= 2)  # loops hang in a statement
        with patch("faststream_sqlbroker.flow.deliver.worker_ends.CANCEL_GRACE", 1.0):
            async with Awake() as awake:
                await consumer.stop(0.5)
        # The silent proxy runs in this process, and nothing reaches the server: only a pause of
        # this process can delay the stop.
        assert awake.seconds < 30, "1 s for claims, 1 s for writes, 2 s to end connections"
        proxy.flow()
        await engine.dispose()

"""Engines whose driver commits every statement by itself."""

import asyncio
from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.database.store import Store
from tests.flow.conftest import Rig
from tests.helpers import MYSQL


@pytest.mark.parametrize("database", MYSQL, indirect=True)
async def test_a_driver_in_autocommit_mode_still_claims_each_row_once(rig: Rig) -> None:
    """SQLAlchemy does not know of the driver's own mode."""
    engine = create_async_engine(
        rig.store.engine.url, connect_args={"autocommit": True}, pool_size=20
    )
    store = Store(engine, rig.store.tables, max_connections=10)
    await rig.put(300)
    pairs = await store.find_ready_pairs(("q",))
    claimed: list[int] = []

    async def claim_all() -> None:
        while rows := await store.claim(pairs, 10, 60.0, uuid4()):
            claimed.extend(row.id for row in rows)

    await asyncio.gather(*(claim_all() for _ in range(8)))
    # A claim skips what another holds just then, and may end early for it.
    await claim_all()
    await engine.dispose()
    assert len(claimed) == len(set(claimed)) == 300

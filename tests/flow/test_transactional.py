"""Handlers' transactions that end at a bad moment, or late."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from faststream_sqlbroker.core.outcome import Nack
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import ClaimedMessage, SettleResult
from faststream_sqlbroker.flow import transactional
from tests.flow.conftest import Rig
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`transactional=True`")

QUICK: dict[str, Any] = {"transactional": True, "max_fetch_interval": 0.05, "flush_interval": 0.01}


async def test_a_stop_after_the_commit_loses_no_lease(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is cancelled while its connection closes: nothing is left to be written."""
    transaction, closing = rig.store.transaction, asyncio.Event()

    @asynccontextmanager
    async def slow_to_close() -> AsyncIterator[Any]:
        async with transaction() as opened:
            yield opened
        closing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(rig.store, "transaction", slow_to_close)
    await rig.put(1)
    consumer = rig.consumer(**QUICK)
    await consumer.start()
    await closing.wait()
    await consumer.stop(0.05)
    assert (await rig.one(archive=True))["state"] == "COMPLETED"
    assert (consumer.inflight.settled_count, consumer.inflight.lease_lost_count) == (1, 0)
    assert not rig.logged("lease lost")
    assert consumer.inflight.empty


async def test_a_nack_that_outlived_its_lease_is_not_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollback frees the row, with a lease that has run out under its lock."""
    transaction, settle, release = rig.store.transaction, rig.store.settle, rig.store.release_stuck
    looked, released = asyncio.Event(), []

    async def look(*args: Any) -> int:
        count = await release(*args)
        looked.set()
        return count

    @asynccontextmanager
    async def late() -> AsyncIterator[Any]:
        await rig.expire()
        async with transaction() as opened:
            yield opened

    async def after_a_release(*args: Any, **options: Any) -> SettleResult:
        released.append(await release(["q"], 10))
        return await settle(*args, **options)

    async def handle(row: ClaimedMessage) -> None:
        row.settle_as(Nack())

    monkeypatch.setattr(transactional, "monotonic", lambda: monotonic() + 1_000.0)
    monkeypatch.setattr(rig.store, "transaction", late)
    monkeypatch.setattr(rig.store, "settle", after_a_release)
    monkeypatch.setattr(rig.store, "release_stuck", look)
    twice = ConstantRetryStrategy(delay_seconds=3600.0, max_attempts=2)
    consumer = rig.consumer(handle, **QUICK, retry_strategy=twice, release_stuck_interval=3600.0)
    await consumer.start()
    await looked.wait()  # it looks for expired leases once, as it starts
    await rig.put(1)

    async def retryable() -> bool:
        return [(r["state"], r["attempts_count"]) for r in await rig.rows()] == [("RETRYABLE", 1)]

    await eventually(retryable)
    assert released == [0]
    assert not rig.logged("lease lost")

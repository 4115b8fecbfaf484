"""Faults that a review found: each of these tests failed before its fix."""

import asyncio
import time
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.flow.flush import Flusher
from faststream_sqlbroker.flow.inflight import Inflight
from faststream_sqlbroker.store import Store
from tests.flow.conftest import Rig
from tests.helpers import MYSQL, eventually
from tests.proxy import proxied


async def test_a_handler_that_raises_cancelled_error_does_not_end_its_worker(rig: Rig) -> None:
    async def handle(row: ClaimedMessage) -> None:
        if row.payload == b"0":
            task = asyncio.create_task(asyncio.sleep(9))
            task.cancel()
            await task
        await rig.ack(row)

    await rig.put(3)
    once = ConstantRetryStrategy(delay_seconds=0.01, max_attempts=1)
    consumer = rig.consumer(handle, retry_strategy=once, max_fetch_interval=0.05)
    await consumer.start()
    rows = await eventually(lambda: _archived(rig, 3))
    assert sorted(r["state"] for r in rows) == ["COMPLETED", "COMPLETED", "FAILED"]
    assert consumer.healthy


@pytest.mark.parametrize("database", MYSQL, indirect=True)
async def test_a_driver_in_autocommit_mode_still_claims_each_row_once(rig: Rig) -> None:
    """SQLAlchemy does not know of the driver's own mode."""
    engine = create_async_engine(
        rig.store.engine.url, connect_args={"autocommit": True}, pool_size=20
    )
    store = Store(engine, rig.store.tables, max_connections=10)
    await rig.put(300)
    pairs = await store.ready_pairs(("q",))
    claimed: list[int] = []

    async def claim_all() -> None:
        while rows := await store.claim(pairs, 10, 60.0, uuid4()):
            claimed.extend(row.id for row in rows)

    await asyncio.gather(*(claim_all() for _ in range(8)))
    # A claim skips what another holds just then, and may end early for it.
    await claim_all()
    await engine.dispose()
    assert len(claimed) == len(set(claimed)) == 300


async def test_a_timer_that_found_nothing_is_started_again(rig: Rig) -> None:
    await rig.put(2)
    first, second = await rig.claim(2)
    inflight, woken = Inflight(), asyncio.Event()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=100, interval=0.05)
    flusher.wake = woken.set
    inflight.on_outcome = flusher.outcome_added
    inflight.add([first, second])
    inflight.finish(settle(first, Ack(), SettleRules(), ended_after=0.0))
    inflight.lose([first], "renew", "")
    await eventually(lambda: flusher._timer is None)
    inflight.finish(settle(second, Ack(), SettleRules(), ended_after=0.0))
    await asyncio.wait_for(woken.wait(), 5)


async def test_what_is_left_of_a_hurried_flush_does_not_wait_for_the_interval(rig: Rig) -> None:
    await rig.put(5)
    rows = await rig.claim(5)
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=3, interval=60.0)
    inflight.on_outcome = flusher.outcome_added
    inflight.add(rows)
    while not inflight.waiting.empty():
        inflight.waiting.get_nowait()
    inflight.finish_all(settle(row, Ack(), SettleRules(), ended_after=0.0) for row in rows)
    while await flusher.tick() == 0:
        pass
    assert inflight.queued == []
    assert len(await rig.rows(archive=True)) == 5


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_stop_while_the_server_is_silent_has_one_deadline(rig: Rig) -> None:
    async with proxied(rig.store.engine.url) as (proxy, url):
        engine = create_async_engine(url)
        store = Store(engine, rig.store.tables, statement_timeout=3.0)
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
        await asyncio.sleep(0.5)  # for every loop to hang in a statement
        started = time.monotonic()
        await consumer.stop(0.5)
        took = time.monotonic() - started
        assert took < 15, (
            "1 s for claims, 3 s for writes, 2 s to end connections; and a busy machine"
        )
        proxy.flow()
        await engine.dispose()


async def test_a_strategy_with_a_nonsensical_limit_has_none(rig: Rig) -> None:
    class Odd:
        max_attempts = "3"

        def get_next_attempt_at(self, **times: Any) -> Any:
            return times["last_attempt_at"]

    await rig.put()
    consumer = rig.consumer(retry_strategy=Odd(), max_fetch_interval=0.05)
    await consumer.start()
    await eventually(lambda: _archived(rig, 1))
    assert consumer.healthy


async def _archived(rig: Rig, count: int) -> list[dict[str, Any]] | None:
    rows = await rig.rows(archive=True)
    return rows if len(rows) == count else None

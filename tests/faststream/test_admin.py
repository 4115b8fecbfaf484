"""broker.admin."""

import asyncio
import os
import re
from typing import Any
from uuid import UUID

import pytest
from faststream import AckPolicy
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SetupError, SqlBroker, UnknownOutcome
from faststream_sqlbroker.core.status import build_worker_name
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually


async def test_unknown_outcomes_are_listed_and_forgotten(
    engine: AsyncEngine, broker: SqlBroker, look: Look
) -> None:
    """Promise 4: after a crash the message may not have run at all, and is listed."""
    began = asyncio.Event()

    @broker.subscriber("mail", **QUICK, ack_policy=AckPolicy.ACK_FIRST, release_stuck_timeout=0.5)
    async def handle(_body: str) -> None:
        began.set()
        await asyncio.Event().wait()

    await broker.start()
    message_id = await broker.publish("hello", "mail", key="user-1")
    await asyncio.wait_for(began.wait(), 60)
    for subscriber in broker.subscribers:
        await subscriber.consumer.stop(0)  # type: ignore[attr-defined] # the handler is cut off
    await broker.stop()

    other = SqlBroker(engine)  # neither connected nor started

    async def listed() -> list[UnknownOutcome]:
        return await other.admin.unknown("mail")

    [found] = await eventually(listed)
    assert (found.message_id, found.queue, found.key) == (message_id, "mail", "user-1")
    assert re.fullmatch(r".+:\d+", found.worker)
    [archived] = await look.rows(archive=True)
    assert archived["id"] == message_id
    assert await other.admin.unknown("else") == []
    assert await other.admin.forget_unknown(found.message_id, 10**6, by="ola") == 1
    [action] = await other.admin.audit()
    assert (action.action, action.by, action.done) == ("forget_unknown", "ola", 1)
    assert await other.admin.unknown() == []
    assert await other.admin.forget_unknown() == 0


async def test_a_limit_below_one_is_refused(broker: SqlBroker) -> None:
    with pytest.raises(ValueError, match="limit must be 1 or more, got 0"):
        await broker.admin.unknown(limit=0)


async def test_a_workers_messages_are_given_back_at_an_operators_word(
    engine: AsyncEngine, broker: SqlBroker, look: Look
) -> None:
    stop = asyncio.Event()

    @broker.subscriber("q", "other", **QUICK, max_workers=3)
    async def handle(_body: str) -> None:
        await stop.wait()

    await broker.publish_batch("a", "b", queue="q")
    await broker.publish("c", "other")
    await broker.start()

    async def all_run() -> bool:
        return [row["state"] for row in await look.rows()] == ["PROCESSING"] * 3

    await eventually(all_run)
    admin = SqlBroker(engine, logger=None).admin  # of another process
    [live] = await eventually(admin.subscribers)
    with pytest.raises(SetupError, match=r"is alive until at least .* give force=True"):
        await admin.release(live.worker)
    with pytest.raises(SetupError, match="no subscriber is named 'nobody'"):
        await admin.release("nobody")
    wrong: tuple[Any, ...] = (7, "a\0", "a\ud800")
    for given in wrong:
        with pytest.raises(SetupError, match="worker must be the name of a subscriber, got "):
            await admin.release(given)
    assert await all_run()
    await broker.admin.pause("q")
    await broker.admin.pause("other")
    assert await admin.release(live.worker, force=True) == 3
    rows = await look.rows()
    assert {(r["state"], r["deliveries_count"], r["lease_token"]) for r in rows} == {
        ("PENDING", 1, None)
    }
    assert await admin.release(live.worker, force=True) == 0
    stop.set()
    await asyncio.wait_for(broker.stop(), 60)
    assert [r["state"] for r in await look.rows()] == ["PENDING"] * 3, (
        "late outcomes change nothing"
    )


async def test_only_the_messages_of_a_dead_worker_are_given_back(
    engine: AsyncEngine, broker: SqlBroker, look: Look
) -> None:
    fleet = broker._store.live_subscribers
    store = broker._store
    holders = {
        name: build_worker_name(name, bytes([n]) * 8) for n, name in enumerate(("gone", "other"), 1)
    }
    info = {"queues": ["q"], "max_workers": 1}
    await fleet.write_heartbeat({holders["gone"]: info}, {holders["gone"]}, -1.0, clean=False)
    await fleet.write_heartbeat({holders["other"]: info}, {holders["other"]}, 60.0, clean=False)
    await broker.publish_batch(*range(4), queue="q")
    pairs = await store.find_ready_pairs(["q"])
    for n in (1, 2):
        await store.claim(pairs, 2, 600.0, UUID(bytes=bytes([n]) * 8 + os.urandom(8)))
    assert await broker.admin.release(holders["gone"], by="Ann") == 2
    assert await broker.admin.release(holders["gone"], by="Ann") == 0
    [audited] = await broker.admin.audit()
    assert (audited.action, audited.by, audited.done) == ("release", "Ann", 2)
    assert audited.arguments == {"worker": holders["gone"]}
    assert [r["state"] for r in await look.rows()] == ["PENDING"] * 2 + ["PROCESSING"] * 2

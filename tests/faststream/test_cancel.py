"""A running message is cancelled: its handler ends, and it is DISCARDED under its lease."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
from faststream import AckPolicy
from faststream.exceptions import NackMessage
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import Once, SqlBroker, SqlBrokerMessage, SqlConnection
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.flow.deliver.policy_starts import PolicyRunner
from faststream_sqlbroker.flow.tasks import direct_claim
from faststream_sqlbroker.testing import TestSqlBroker
from tests.faststream.conftest import GRACE, QUICK, Heard, Look, clean_up
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`broker.admin.cancel` of a running message")


@pytest.fixture
async def broker(engine: AsyncEngine, logger: Any) -> AsyncIterator[SqlBroker]:
    broker = SqlBroker(engine, logger=logger, graceful_timeout=GRACE, presence_interval=0.2)
    await broker.create_tables()
    yield broker
    await clean_up(broker)


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[SqlBroker]:
    """A broker without subscribers, as of another process."""
    engine = create_async_engine(database_url)
    yield SqlBroker(engine, logger=None)
    await engine.dispose()


class Handler:
    """Runs until it is cancelled, or let go."""

    def __init__(self) -> None:
        self.began: asyncio.Queue[Any] = asyncio.Queue()
        self.end = asyncio.Event()
        self.cancelled = 0

    async def __call__(self, body: Any) -> None:
        self.began.put_nowait(body)
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def has_begun(self) -> Any:
        return await asyncio.wait_for(self.began.get(), 60)


async def test_another_process_cancels_a_running_handler(
    broker: SqlBroker, other: SqlBroker, look: Look
) -> None:
    handler = Handler()
    broker.subscriber("q", **QUICK, max_workers=2)(handler.__call__)
    await broker.start()
    message_id = await broker.publish("first", "q") or 0
    await handler.has_begun()
    found = await other.admin.cancel(message_id, reason="wrong price", by="Ann")
    assert (found.verdict, found.done, found.is_requested) == ("requested", False, True)
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("DISCARDED", "cancelled")
    assert row["last_error"] == "cancelled by Ann: wrong price"
    assert (row["attempts_count"], row["deliveries_count"]) == (1, 1)
    assert handler.cancelled == 1
    assert (await other.admin.cancel(message_id)).verdict == "ended"
    # The worker goes on.
    handler.end.set()
    await broker.publish("second", "q")
    assert await handler.has_begun() == "second"
    assert [row["state"] for row in await look.archived(2)] == ["DISCARDED", "COMPLETED"]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_on_postgresql_the_holder_is_told(
    engine: AsyncEngine, other: SqlBroker, look: Look
) -> None:
    """Its next sign of life would come in an hour."""
    broker = SqlBroker(engine, logger=None, presence_interval=3600.0)
    await broker.create_tables()
    handler = Handler()
    broker.subscriber("q")(handler.__call__)
    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    try:
        await handler.has_begun()
        await eventually(lambda: broker._wakeups.is_listening)
        await other.admin.cancel(message_id)
        [row] = await look.archived()
        assert row["state"] == "DISCARDED"
    finally:
        await broker.stop()


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_what_a_transaction_has_written_is_rolled_back(
    broker: SqlBroker, other: SqlBroker, look: Look, heard: Heard
) -> None:
    """On SQLite the request waits for the only writer, which is the handler's transaction."""
    handler = Handler()

    @broker.subscriber("q", transactional=True, **QUICK)
    async def handle(body: str, connection: SqlConnection) -> None:
        await broker.publish("1", "written", connection=connection)
        await handler(body)

    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    await handler.has_begun()
    assert (await other.admin.cancel(message_id)).is_requested
    [row] = await look.archived()
    assert (row["id"], row["state"]) == (message_id, "DISCARDED")
    assert heard.texts("", logging.CRITICAL) == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_on_sqlite_a_transaction_ends_before_the_request(
    broker: SqlBroker, look: Look
) -> None:
    handler = Handler()
    broker.subscriber("q", transactional=True, **QUICK)(handler.__call__)
    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    await handler.has_begun()
    asking = asyncio.create_task(broker.admin.cancel(message_id))
    handler.end.set()
    assert (await asking).verdict == "ended"
    [row] = await look.archived()
    assert row["state"] == "COMPLETED"


async def test_a_handler_that_has_finished_wins(broker: SqlBroker, look: Look) -> None:
    """It acks by itself, and is cancelled in what it does afterwards."""
    acked = asyncio.Event()

    @broker.subscriber("q", ack_policy=AckPolicy.MANUAL, **QUICK)
    async def handle(_body: str, message: SqlBrokerMessage) -> None:
        await message.ack()
        acked.set()
        await asyncio.Event().wait()

    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    await asyncio.wait_for(acked.wait(), 60)
    assert (await broker.admin.cancel(message_id)).is_requested
    [row] = await look.archived()
    assert row["state"] == "COMPLETED"


@pytest.mark.parametrize("answer", ["returns", "fails", "nacks"])
async def test_a_handler_that_resists_is_not_tried_again(
    broker: SqlBroker, look: Look, answer: str
) -> None:
    began = asyncio.Event()

    @broker.subscriber("q", **QUICK)
    async def handle(_body: str) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if answer == "fails":
                raise ValueError("cannot be cancelled") from None
            if answer == "nacks":
                raise NackMessage(delay=0) from None

    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    await asyncio.wait_for(began.wait(), 60)
    await broker.admin.cancel(message_id, by="Ann")
    [row] = await look.archived()
    expected = ("COMPLETED", None) if answer == "returns" else ("DISCARDED", "cancelled by Ann")
    assert (row["state"], row["last_error"]) == expected
    began.clear()
    await broker.publish("x", "q")
    await asyncio.wait_for(began.wait(), 60)  # its worker lives


async def test_a_cancel_that_a_handler_left_behind_ends_no_worker(broker: SqlBroker) -> None:
    """A later handler fails, as it has awaited a task that was cancelled."""
    handled: asyncio.Queue[str] = asyncio.Queue()

    @broker.subscriber("q", **QUICK, max_workers=1)
    async def handle(body: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        handled.put_nowait(body)
        if body == "timeout":
            task.get_loop().call_later(0.01, task.cancel)
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        elif body == "fails":
            raise asyncio.CancelledError

    await broker.start()
    for body in ("timeout", "fails", "x"):
        await broker.publish(body, "q")
        while await asyncio.wait_for(handled.get(), 60) != body:
            pass
    assert await broker.ping(60.0)


@pytest.mark.parametrize("limit", [None, 60.0], ids=["plain", "with a time limit"])
async def test_the_worker_lives_though_a_handler_was_cancelled_before(
    broker: SqlBroker, look: Look, limit: float | None
) -> None:
    """As by a timeout that cancels the task, and does not uncancel it."""
    handler = Handler()

    @broker.subscriber("q", **QUICK, max_workers=1, handler_timeout=limit)
    async def handle(body: str) -> None:
        if body == "timeout":
            task = asyncio.current_task()
            assert task is not None
            task.get_loop().call_soon(task.cancel)
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        else:
            await handler(body)

    await broker.publish("timeout", "q")
    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    assert await handler.has_begun() == "x"
    assert (await broker.admin.cancel(message_id)).is_requested
    rows = await look.archived(2)
    assert [row["state"] for row in rows] == ["COMPLETED", "DISCARDED"]
    handler.end.set()
    await broker.publish("y", "q")
    assert await handler.has_begun() == "y"


async def test_the_others_of_a_batch_come_again(broker: SqlBroker, look: Look) -> None:
    handler = Handler()
    options: Any = {**QUICK, "batch": True, "fetch_batch_size": 3, "max_not_processed_factor": 1.0}
    broker.subscriber("q", **options)(handler.__call__)
    ids = await broker.publish_batch(1, 2, 3, queue="q")
    await broker.start()
    assert await handler.has_begun() == [1, 2, 3]
    assert (await broker.admin.cancel(ids[1] or 0)).is_requested
    handler.end.set()
    again: list[int] = []
    while len(again) < 2:
        again += await handler.has_begun()
    assert sorted(again) == [1, 3]
    rows = await look.archived(3)
    assert [row["state"] for row in rows] == ["COMPLETED", "DISCARDED", "COMPLETED"]
    assert [row["deliveries_count"] for row in rows] == [1, 1, 1]
    assert [row["attempts_count"] for row in rows] == [1, 1, 1]


async def test_under_once_the_others_of_a_batch_do_not_run_again(
    broker: SqlBroker, look: Look
) -> None:
    handler = Handler()
    options: Any = {**QUICK, "batch": True, "fetch_batch_size": 2, "max_not_processed_factor": 1.0}
    broker.subscriber("q", **options, policies=[Once("1h")])(handler.__call__)
    ids = [await broker.publish(body, "q", key=body) for body in ("a", "b")]
    await broker.start()
    assert await handler.has_begun() == ["a", "b"]
    assert (await broker.admin.cancel(ids[0] or 0)).is_requested
    rows = await look.archived(2)
    assert [row["reason"] for row in rows] == ["cancelled", "unknown_outcome"]
    assert handler.began.empty()


async def test_under_once_a_message_that_is_cancelled_before_its_handler_keeps_no_key(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was done for the key, so the next message that has it runs."""
    handler = Handler()
    broker.subscriber("q", **QUICK, policies=[Once("1h")])(handler.__call__)
    claim = PolicyRunner.claim_keys

    async def claim_and_cancel(self: PolicyRunner, rows: list[ClaimedMessage]) -> Any:
        found = await claim(self, rows)
        for row in found:
            if row.id == first:
                row.cancelled = "cancelled by an operator"
        return found

    monkeypatch.setattr(PolicyRunner, "claim_keys", claim_and_cancel)
    first = await broker.publish("a", "q", key="k")
    await broker.start()
    assert [row["reason"] for row in await look.archived(1)] == ["cancelled"]
    await broker.publish("b", "q", key="k")
    assert await handler.has_begun() == "b"
    handler.end.set()
    assert [row["state"] for row in await look.archived(2)] == ["DISCARDED", "COMPLETED"]


async def test_a_synchronous_handler_ends_with_its_lease(broker: SqlBroker, look: Look) -> None:
    began = threading.Event()
    end = threading.Event()

    lease = 60.0
    options: Any = {"release_stuck_timeout": lease, "release_stuck_interval": 0.1}

    @broker.subscriber("q", **QUICK, **options, max_workers=1)
    def handle(_body: str) -> None:
        began.set()
        end.wait(60)

    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    try:
        await asyncio.to_thread(began.wait, 60)
        assert (await broker.admin.cancel(message_id)).is_requested
        inflight = broker.subscribers[0].consumer.inflight  # type: ignore[attr-defined]
        [row] = inflight.held.values()
        await eventually(lambda: row.cancelled)
        row.renewed_monotonic -= lease  # for any other row it would be time
        assert inflight.list_due_for_renewal(lease, None) == []
        await look.end_leases()
        with patch("faststream_sqlbroker.flow.fleet.lookout.MAX_LEASE_INFO_AGE", 0.1):
            [ended] = await look.archived()
        assert (ended["state"], ended["reason"]) == ("DISCARDED", "cancelled")
    finally:
        end.set()


async def test_a_message_of_ack_first_has_ended(broker: SqlBroker, look: Look) -> None:
    handler = Handler()
    broker.subscriber("q", ack_policy=AckPolicy.ACK_FIRST, **QUICK)(handler.__call__)
    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    await handler.has_begun()
    assert (await broker.admin.cancel(message_id)).verdict == "ended"
    handler.end.set()
    assert handler.cancelled == 0
    [row] = await look.archived()
    assert row["state"] == "COMPLETED"


async def test_a_reserved_message_ends_with_its_lease(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_claim, "RELEASE_INTERVAL", 0.0)
    message_id = await broker.publish("x", "q") or 0
    reserved = await broker.reserve("q", lease=60.0)
    assert reserved is not None
    assert (await broker.admin.cancel(message_id)).verdict == "requested"
    await look.end_leases()
    assert await broker.reserve("q", wait=0) is None
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("DISCARDED", "cancelled")


async def test_a_handler_cancels_its_own_message(broker: SqlBroker, look: Look) -> None:
    """The cancel comes at its next await, and never after its end."""

    @broker.subscriber("q", **QUICK)
    async def handle(awaits: bool, message: SqlBrokerMessage) -> None:
        await broker.admin.cancel(message.message_id)
        if awaits:
            await asyncio.Event().wait()

    await broker.start()
    for awaits in (True, False, True, False):
        await broker.publish(awaits, "q")
    states = [row["state"] for row in await look.archived(4)]
    assert states[0] == states[2] == "DISCARDED"


async def test_without_a_database_the_handler_is_cancelled() -> None:
    broker = SqlBroker("sqlite+aiosqlite:///unused.db")
    handler = Handler()
    broker.subscriber("q")(handler.__call__)
    async with TestSqlBroker(broker):
        publishing = asyncio.create_task(broker.publish("x", "q"))
        await handler.has_begun()
        [row] = (await broker.admin.messages(queue="q")).messages
        assert (await broker.admin.cancel(row.id)).is_requested
        await publishing
        assert handler.cancelled == 1
        detail = await broker.admin.message(row.id)
        assert detail is not None
        assert detail.message.state.name == "DISCARDED"

"""A handler that cancels its own task fails, and ends no worker."""

import asyncio
import logging
from contextlib import suppress
from typing import Any

import pytest
from faststream import AckPolicy

from faststream_sqlbroker import ConstantRetryStrategy, Once, SqlBroker, TestSqlBroker
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.flow.deliver.flush import Flusher
from faststream_sqlbroker.flow.deliver.worker import Worker
from faststream_sqlbroker.subscriber.pipeline.fingerprints import VARIABLE
from tests.faststream.conftest import QUICK, Heard, Look, on_each
from tests.helpers import eventually

TWICE = ConstantRetryStrategy(delay_seconds=0.01, max_attempts=2)
MODES: dict[str, dict[str, Any]] = {
    "plain": {"retry_strategy": TWICE},
    "timeout": {"retry_strategy": TWICE, "handler_timeout": 600.0},
    "batch": {"retry_strategy": TWICE, "batch": True, "batch_max_records": 1},
    "transactional": {"retry_strategy": TWICE, "transactional": True},
    "ack_first": {"ack_policy": AckPolicy.ACK_FIRST},
    "own task": {"retry_strategy": TWICE, "task_per_message": True},
    "own task, timeout": {
        "retry_strategy": TWICE,
        "task_per_message": True,
        "handler_timeout": 600.0,
    },
    "own task, ack_first": {"ack_policy": AckPolicy.ACK_FIRST, "task_per_message": True},
}
WAYS = ("raise", "return", "later", "turn")
"""Those in which the delivery fails."""


async def cancel_itself(way: str) -> None:
    """Cancel the running task in this way."""
    task: Any = asyncio.current_task()
    if way == "later":
        asyncio.get_running_loop().call_soon(task.cancel)
    elif way != "none":
        task.cancel()
    if way in ("raise", "later"):
        await asyncio.Event().wait()
    if way in ("turn", "swallow"):
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    if way == "turn":
        raise ValueError("turned")


@on_each(
    "mode, pipeline",
    [(mode, "compiled") for mode in MODES if "timeout" not in mode],
    [(mode, "compiled") for mode in MODES if "timeout" in mode]
    + [(mode, "generic") for mode in MODES],
)
async def test_a_handler_that_cancels_its_task_has_failed(
    mode: str,
    pipeline: str,
    broker: SqlBroker,
    look: Look,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, pipeline)
    runs: list[str] = []

    @broker.subscriber("q", **QUICK, **MODES[mode], max_workers=1)
    async def handle(body: Any) -> None:
        way = body[0] if isinstance(body, list) else body
        runs.append(way)
        await cancel_itself(way)

    ways = [*WAYS, "swallow", "none"]
    await broker.publish_batch(*ways, queue="q")
    await broker.start()
    rows = await look.archived(len(ways))
    tries = 1 if "ack_first" in mode else 2
    assert sorted(runs) == sorted([*WAYS * tries, "swallow", "none"])
    states = {row["payload"]: (row["state"], row["attempts_count"]) for row in rows}
    failed = ("COMPLETED", 1) if "ack_first" in mode else ("FAILED", 2)
    well = {b"swallow": ("COMPLETED", 1), b"none": ("COMPLETED", 1)}
    assert states == {way.encode(): failed for way in WAYS} | well
    assert broker.subscribers[0].healthy


async def test_what_it_has_published_with_its_ack_is_dropped(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK, retry_strategy=None)
    async def handle(body: str) -> None:
        await broker.publish("x", "out", with_ack=True)
        await cancel_itself(body)

    await broker.publish("return", "q")
    await broker.start()
    [row] = await look.archived()
    assert (row["queue"], row["state"]) == ("q", "FAILED")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_key_that_runs_once_is_spent(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK, policies=[Once("1h")], retry_strategy=TWICE)
    async def handle(body: str) -> None:
        await cancel_itself(body)

    for way in WAYS:
        await broker.publish(way, "q", key=way)
    await broker.start()
    rows = await look.archived(len(WAYS))
    assert {(row["state"], row["attempts_count"]) for row in rows} == {("FAILED", 1)}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_worker_that_was_cancelled_between_messages_is_replaced(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """As by a timer that a handler has left behind."""
    tasks: list[Any] = []

    @broker.subscriber("q", **QUICK, max_workers=1)
    async def handle(body: int) -> None:
        tasks.append(asyncio.current_task())

    await broker.start()
    await broker.publish(1, "q")
    await look.archived(1)
    tasks[0].cancel()
    await broker.publish(2, "q")
    await look.archived(2)
    assert heard.texts("worker 0 was cancelled, but not by the broker", logging.WARNING)
    await eventually(lambda: broker.subscribers[0].healthy)


@on_each("mode", ["plain"], ["batch"])
async def test_a_worker_that_fails_is_replaced_and_its_message_comes_back(
    mode: str, broker: SqlBroker, look: Look, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faststream_sqlbroker.flow.deliver.worker.ERROR_PAUSE", 0.0)
    may_start = Worker._may_start
    failures = [RuntimeError("a bug")]

    def fail_once(self: Worker, row: ClaimedMessage) -> bool:
        if failures:
            raise failures.pop()
        return may_start(self, row)

    monkeypatch.setattr(Worker, "_may_start", fail_once)
    subscriber = broker.subscriber("q", **QUICK, **MODES[mode], max_workers=1)

    @subscriber
    async def handle(body: Any) -> None: ...

    await broker.publish("x", "q")
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("COMPLETED", 1, 2)
    assert heard.texts("worker 0 failed: RuntimeError('a bug')", logging.CRITICAL)
    await eventually(lambda: subscriber.healthy)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_end_of_the_event_loop_ends_workers(broker: SqlBroker, heard: Heard) -> None:
    """Which cancels all tasks, and waits for them."""
    begun = asyncio.Event()

    @broker.subscriber("q", **QUICK, max_workers=2)
    async def handle(body: str) -> None:
        begun.set()
        await asyncio.Event().wait()

    await broker.publish("x", "q")
    await broker.start()
    await begun.wait()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    workers = [task for task in others if task.get_name().startswith("sqlbroker-")]
    for task in workers:
        task.cancel()
    await asyncio.wait(workers)
    assert not heard.texts("not by the broker")


@pytest.mark.parametrize("way", WAYS)
async def test_under_test_it_fails_too(way: str) -> None:
    broker = SqlBroker("sqlite+aiosqlite:///unused.db", logger=None)

    @broker.subscriber("q", retry_strategy=TWICE)
    async def handle(body: str) -> None:
        await cancel_itself(body)

    async with TestSqlBroker(broker) as br:
        with suppress(ValueError):
            await br.publish(way, "q")
        [waiting] = (await br.drain()).waiting
        assert waiting.attempts == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_flush_that_runs_out_of_time_ends_no_worker(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio counts its task as cancelled until what it has cut off is cleaned up."""
    tick = Flusher.tick
    handled: list[str] = []
    second = asyncio.Event()
    first_ticks = [1]

    async def cut_off_once(self: Flusher) -> float | None:
        if first_ticks:
            first_ticks.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(0):
                    try:
                        await asyncio.Event().wait()
                    finally:
                        await second.wait()
        return await tick(self)

    monkeypatch.setattr(Flusher, "tick", cut_off_once)

    @broker.subscriber("q", **QUICK, max_workers=1, retry_strategy=None)
    async def handle(body: str) -> None:
        handled.append(body)
        if body == "second":
            second.set()
        await cancel_itself("raise" if body == "first" else "none")

    await broker.start()
    await broker.publish("first", "q")
    await eventually(lambda: handled == ["first"])
    await broker.publish("second", "q")
    rows = await look.archived(2)
    assert {row["payload"]: row["state"] for row in rows} == {
        b"first": "FAILED",
        b"second": "COMPLETED",
    }

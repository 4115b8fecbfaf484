"""Handlers' transactions that end at a bad moment, or late."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from faststream_sqlbroker.core.outcome import Ack, Nack
from faststream_sqlbroker.core.policies import Once
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, SettleResult
from faststream_sqlbroker.database.messages.handler import current_transaction
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.deliver import ended_transactions, transactional
from tests.flow.conftest import Rig
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`transactional=True`")

QUICK: dict[str, Any] = {"transactional": True, "max_fetch_interval": 0.05, "flush_interval": 0.01}
ONCE: dict[str, Any] = {
    **QUICK,
    "policies": [Once("1h")],
    "retry_strategy": ConstantRetryStrategy(delay_seconds=0.0, max_attempts=3),
}


def never_closed(rig: Rig) -> tuple[Any, asyncio.Event]:
    """Transactions of the store whose connections do not come back, and an event: one of them has
    ended."""
    transaction = rig.store.transaction
    closing = asyncio.Event()

    @asynccontextmanager
    async def slow_to_close() -> AsyncIterator[Any]:
        async with transaction() as opened:
            yield opened
        closing.set()
        await asyncio.Event().wait()

    return slow_to_close, closing


async def test_a_stop_after_the_commit_loses_no_lease(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is cancelled while its connection closes: nothing is left to be written."""
    slow_to_close, closing = never_closed(rig)

    monkeypatch.setattr(rig.store, "transaction", slow_to_close)
    await rig.put(1)
    consumer = rig.consumer(**QUICK)
    await consumer.start()
    await closing.wait()
    await consumer.stop(0.05)
    assert (await rig.one(archive=True))["state"] == "COMPLETED"
    assert (consumer.inflight.settled_count, consumer.inflight.lease_lost_count) == (1, 0)
    assert not rig.logged("lease lost")
    assert consumer.inflight.is_empty


async def test_a_nack_that_outlived_its_lease_is_not_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback frees the row, with a lease that has run out under its lock."""
    transaction = rig.store.transaction
    settle = rig.store.settle
    release = rig.store.release_stuck
    released = []
    time = rig.shifted()

    async def nothing(*_: Any) -> int:
        return 0

    @asynccontextmanager
    async def late() -> AsyncIterator[Any]:
        await rig.expire()
        async with transaction() as opened:
            time.shift = 1_000.0
            yield opened

    async def after_a_release(*args: Any, **options: Any) -> SettleResult:
        released.append(await release(["q"], 10))
        return await settle(*args, **options)

    async def handle(row: ClaimedMessage) -> None:
        row.record_outcome(Nack())

    monkeypatch.setattr(rig.store, "transaction", late)
    monkeypatch.setattr(rig.store, "settle", after_a_release)
    # Else the loop may give the lease back before the row is locked.
    monkeypatch.setattr(rig.store, "release_stuck", nothing)
    twice = ConstantRetryStrategy(delay_seconds=3600.0, max_attempts=2)
    await rig.put(1)
    await rig.consumer(handle, **QUICK, retry_strategy=twice).start()

    async def retryable() -> bool:
        return [(r["state"], r["attempts_count"]) for r in await rig.rows()] == [("RETRYABLE", 1)]

    await eventually(retryable)
    assert released == [0]
    assert not rig.logged("lease lost")


class FirstFails:
    """`database.engine`, whose first one cannot be opened: `error` is raised."""

    def __init__(self, rig: Rig, error: Exception | None = None) -> None:
        self._transaction = rig.store.transaction
        self.asked = 0
        self._error = error or TransientStoreError("no free connection in the pool")

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Any]:
        self.asked += 1
        if self.asked == 1:
            raise self._error
        async with self._transaction() as opened:
            yield opened


async def completed(rig: Rig, handle: Any, **options: Any) -> dict[str, Any]:
    """The end of the only message, whose handler starts once."""
    starts: list[int] = []

    async def counted(row: ClaimedMessage) -> None:
        starts.append(row.id)
        await handle(row)

    await rig.consumer(counted, **ONCE, **options).start()

    async def ended() -> bool:
        return len(await rig.rows(archive=True)) == 1

    await eventually(ended)
    row = await rig.one(archive=True)
    assert (row["state"], row["reason"], len(starts)) == ("COMPLETED", None, 1)
    return row


async def ack(row: ClaimedMessage) -> None:
    row.record_outcome(Ack())


async def test_once_keeps_no_key_for_a_transaction_that_did_not_begin(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.store, "transaction", FirstFails(rig))
    await rig.put(1, key="k")
    row = await completed(rig, ack)
    assert (row["attempts_count"], row["deliveries_count"]) == (1, 1)


async def test_once_keeps_no_key_if_a_stop_comes_before_the_transaction(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    transaction = rig.store.transaction
    monkeypatch.setattr(rig.store, "transaction", FirstFails(rig))
    monkeypatch.setattr(transactional, "backoff", lambda *_: 3600.0)
    await rig.put(1, key="k")
    consumer = rig.consumer(ack, **ONCE)
    await consumer.start()
    await eventually(lambda: rig.logged("could not begin a transaction"))
    await consumer.stop(0.05)
    monkeypatch.setattr(rig.store, "transaction", transaction)
    await completed(rig, ack)


async def test_once_keeps_no_key_if_the_lease_is_lost_before_the_transaction(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    transaction = rig.store.transaction
    token = uuid4()
    value = token if rig.store.dialect_name == "postgresql" else token.hex

    @asynccontextmanager
    async def late() -> AsyncIterator[Any]:
        await rig.execute("UPDATE message SET lease_token = :token", token=value)
        async with transaction() as opened:
            yield opened

    monkeypatch.setattr(rig.store, "transaction", late)
    await rig.put(1, key="k")
    consumer = rig.consumer(ack, **ONCE)
    await consumer.start()
    await eventually(lambda: consumer.inflight.lease_lost_count == 1)
    await consumer.stop()
    monkeypatch.setattr(rig.store, "transaction", transaction)
    await rig.expire()
    await completed(rig, ack)


async def stopped_at(
    reached: asyncio.Event,
    transaction: Any,
    handler: Any,
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A consumer of one message, with `transaction` as the store's, is stopped when that has
    `reached` its place."""
    await rig.put(1, key="k")
    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "transaction", transaction)
        consumer = rig.consumer(handler, **ONCE)
        await consumer.start()
        await reached.wait()
        await consumer.stop(0.05)


async def test_a_key_is_given_back_if_a_stop_comes_while_the_transaction_ends(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler has said that nothing was done."""
    slow_to_close, closing = never_closed(rig)

    async def not_done(row: ClaimedMessage) -> None:
        row.record_outcome(Nack(retry_possible=True))

    await stopped_at(closing, slow_to_close, not_done, rig, monkeypatch)
    assert (await completed(rig, ack))["attempts_count"] == 2


async def test_once_keeps_no_key_if_a_stop_comes_while_it_waits_for_the_transaction(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = asyncio.Event()

    @asynccontextmanager
    async def hanging() -> AsyncIterator[Any]:
        waiting.set()
        await asyncio.Event().wait()
        yield

    await stopped_at(waiting, hanging, ack, rig, monkeypatch)
    assert (await completed(rig, ack))["deliveries_count"] == 1


async def test_once_keeps_no_key_if_another_error_comes_before_the_transaction(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of the application's own events of its engine."""
    monkeypatch.setattr(rig.store, "transaction", FirstFails(rig, RuntimeError()))
    await rig.put(1, key="k")
    assert (await completed(rig, ack))["deliveries_count"] == 1


async def test_a_key_is_kept_if_a_stop_comes_while_the_end_of_the_transaction_is_unknown(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler has said that nothing was done, but it has ended its transaction itself, maybe
    with a commit."""
    slow_to_close, closing = never_closed(rig)

    async def silent(_: Any) -> bool:
        raise TransientStoreError

    async def not_done(row: ClaimedMessage) -> None:
        opened = current_transaction.get()
        assert opened is not None
        await opened.connection.rollback()
        row.record_outcome(Nack(retry_possible=True))

    monkeypatch.setattr(rig.store.handlers, "was_committed", silent)
    monkeypatch.setattr(ended_transactions, "SHIELDED_TIMEOUT", 0.1)
    await stopped_at(closing, slow_to_close, not_done, rig, monkeypatch)
    assert rig.logged("the database did not answer whether")
    async with rig.store.engine.connect() as connection:
        kept = (await connection.execute(rig.store.dialect.tables.policy_state.select())).all()
    assert [row.scope for row in kept if row.scope.startswith("once:")] == ["once:q"]


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "dies when it closes"])
@pytest.mark.parametrize("possible", [True, False], ids=["retry possible", "failed"])
async def test_messages_of_a_batch_under_once_that_did_not_run_keep_their_own_outcome(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, possible: bool, closes: bool
) -> None:
    """Its neighbour's ack is committed, and its key is given back, or it ends as a failure."""
    transaction = rig.store.transaction
    runs = list[int]()

    @asynccontextmanager
    async def closing() -> AsyncIterator[Any]:
        async with transaction() as opened:
            yield opened
        if not closes and len(runs) == 2:
            raise TransientStoreError

    async def first_fails(rows: tuple[ClaimedMessage, ...]) -> None:
        for row in rows:
            runs.append(row.id)
            row.record_outcome(Nack(retry_possible=possible) if len(runs) == 1 else Ack())

    monkeypatch.setattr(rig.store, "transaction", closing)
    first, second = await rig.store.insert([NewMessage("q", b"x", key=key) for key in "ab"])
    await rig.consumer(first_fails, **ONCE, batch=True, fetch_batch_size=2).start()

    async def ended() -> bool:
        return len(await rig.rows(archive=True)) == 2

    await eventually(ended)
    found = {row["id"]: (row["state"], row["reason"]) for row in await rig.rows(archive=True)}
    assert found[second] == ("COMPLETED", None)
    if possible:
        assert (found[first], runs) == (("COMPLETED", None), [first, second, first])
    else:
        assert (found[first], runs) == (("FAILED", "failed_once"), [first, second])

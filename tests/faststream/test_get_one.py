"""get_one and async for: single messages of a subscriber, which the caller settles."""

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any
from unittest.mock import patch

import pytest
from faststream import BaseMiddleware
from faststream.message import AckStatus
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    DESTINATION,
    ConstantRetryStrategy,
    Delay,
    LeaseLostError,
    NotSupportedError,
    SetupError,
    SqlBroker,
    SqlBrokerRouter,
    StoreError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.database.messages.single_claim import DirectClaims
from faststream_sqlbroker.flow.tasks import direct_claim
from faststream_sqlbroker.schema.types import clock
from faststream_sqlbroker.subscriber.pulling import PulledMessage
from faststream_sqlbroker.subscriber.usecase import QueueSubscriber
from tests.clock import ShiftedTime, VirtualTime
from tests.faststream.conftest import Heard, Look
from tests.faststream.test_reserve import expire
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`subscriber.get_one` and `async for message in subscriber`")

on_one = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
LONG = 60.0
"""Seconds; nothing that comes takes so long."""
AGAIN = ConstantRetryStrategy(delay_seconds=0, max_attempts=3)


@pytest.fixture
def subscriber(broker: SqlBroker) -> QueueSubscriber:
    return broker.subscriber("q", retry_strategy=AGAIN)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each look for a message has found."""
    found: list[Any] = []
    take = DirectClaims.claim

    async def noted(self: DirectClaims, *args: Any, **options: Any) -> Any:
        found.append(await take(self, *args, **options))
        return found[-1]

    monkeypatch.setattr(DirectClaims, "claim", noted)
    return found


async def got(subscriber: QueueSubscriber) -> PulledMessage:
    message = await subscriber.get_one(timeout=LONG)
    assert message is not None
    return message


async def test_a_message_that_comes_while_it_is_waited_for(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    await broker.start()
    waiting = asyncio.create_task(subscriber.get_one(timeout=LONG))
    await asyncio.sleep(0)
    await broker.publish({"a": 1}, "q", headers={"x": "y"}, correlation_id="c")
    message = await waiting
    assert message is not None
    assert await message.decode() == {"a": 1}
    assert (message.queue, message.correlation_id, message.headers["x"]) == ("q", "c", "y")
    assert (await look.in_state("PROCESSING"))["deliveries_count"] == 1
    await message.ack()
    [row] = await look.rows(archive=True)
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("COMPLETED", 1, 1)
    # The first outcome wins, as with handlers.
    await message.nack()
    assert await look.rows() == []


async def test_no_message_in_time(subscriber: QueueSubscriber, broker: SqlBroker) -> None:
    await broker.start()
    assert await subscriber.get_one(timeout=1e-24) is None
    assert await subscriber.get_one(timeout="20ms") is None
    with pytest.raises(SetupError, match="timeout must be 0 or more"):
        await subscriber.get_one(timeout=-1)


@pytest.mark.parametrize(
    ("settle", "state", "archived"),
    [
        (lambda m: m.nack(), "RETRYABLE", None),
        (lambda m: m.nack(delay="1h"), "RETRYABLE", None),
        (lambda m: m.reject(reason="bad"), None, "FAILED"),
        (lambda m: m.postpone("1h"), "PENDING", None),
        (lambda m: m.move_to("other"), "PENDING", None),
        (lambda m: m.republish(), "PENDING", None),
    ],
    ids=["nack", "nack later", "reject", "postpone", "move", "republish"],
)
@on_one
async def test_each_outcome_is_written_at_once(
    broker: SqlBroker,
    subscriber: QueueSubscriber,
    look: Look,
    settle: Callable[[PulledMessage], Awaitable[None]],
    state: str | None,
    archived: str | None,
) -> None:
    await broker.publish("x", "q")
    await settle(await got(subscriber))
    assert [row["state"] for row in await look.rows()] == [state] * (state is not None)
    rows = await look.rows(archive=True)
    assert [row["state"] for row in rows] == [archived] * (archived is not None)


@on_one
async def test_what_the_options_of_the_subscriber_mean_for_it(
    broker: SqlBroker, look: Look
) -> None:
    subscriber = broker.subscriber(
        "q", retry_strategy=None, dead_letter_queue="dead", retain_in_archive_on_ack=False
    )
    await broker.publish("x", "q")
    await (await got(subscriber)).nack()
    assert [row["queue"] for row in await look.rows()] == ["dead"]
    await broker.publish("y", "q")
    await (await got(subscriber)).ack()
    assert await look.rows(archive=True) == []
    assert len(await look.rows()) == 1


@on_one
async def test_a_new_body_on_the_move(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    await broker.publish("x", "q")
    await (await got(subscriber)).move_to("other", body={"new": 1})
    [row] = await look.rows()
    assert (row["queue"], json.loads(row["payload"])) == ("other", {"new": 1})


async def test_a_lost_lease_is_told_and_nothing_is_written(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    await broker.publish("x", "q")
    first = await got(subscriber)
    await expire(look)
    second = await eventually(lambda: subscriber.get_one(timeout=1))
    assert second.message_id == first.message_id
    with pytest.raises(LeaseLostError, match="nothing was written"):
        await first.ack()
    await second.ack()
    [row] = await look.archived()
    assert row["deliveries_count"] == 2


@on_one
@pytest.mark.parametrize("error", [StoreError("no"), UnknownOutcomeError("lost twice")])
async def test_an_outcome_that_was_not_written_can_be_chosen_again(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look, error: Exception
) -> None:
    await broker.publish("x", "q")
    message = await got(subscriber)
    with patch.object(DirectClaims, "settle", side_effect=error), pytest.raises(StoreError):
        await message.ack()
    assert message.committed is None
    await message.reject()
    [row] = await look.archived()
    assert row["state"] == "FAILED"


@on_one
async def test_an_invalid_delay_is_a_plain_nack(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    """As in a handler."""
    await broker.publish("x", "q")
    with pytest.raises(SetupError):
        await (await got(subscriber)).nack(delay="soon")
    await look.in_state("RETRYABLE")


async def test_its_lease_is_renewed_until_it_is_settled(broker: SqlBroker, look: Look) -> None:
    broker._clock.use(time := VirtualTime())
    lease = 60.0
    subscriber = broker.subscriber("q", release_stuck_timeout=lease)
    await broker.publish("x", "q")
    message = await got(subscriber)
    row = message.raw_message
    for _ in range(2):
        before = await look.in_state("PROCESSING")
        began = time.now
        await time.advance(lease / 3 + 1)
        await eventually(lambda: row.renewed_monotonic > began)
        after = await look.in_state("PROCESSING")
        assert after["lease_expires_at"] > before["lease_expires_at"]
    assert after["deliveries_count"] == 1
    assert await message.extend_lease("1m")
    await message.ack()
    [row] = await look.archived()
    assert row["deliveries_count"] == 1
    assert subscriber._pulling is not None
    assert await subscriber._pulling.renewal.tick() is None


async def test_a_message_that_was_dropped_is_delivered_again(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_claim, "RELEASE_INTERVAL", 0.0)
    await broker.publish("x", "q")
    message: PulledMessage | None = await got(subscriber)
    del message
    gc.collect()
    assert subscriber._pulling is not None
    assert await subscriber._pulling.renewal.tick() is None, "nothing is renewed"
    await expire(look)
    again = await got(subscriber)
    assert again.deliveries_count == 2
    await again.ack()
    await look.archived()


@on_one
async def test_a_lease_is_renewed_for_ten_leases_at_most(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    broker._clock.use(time := VirtualTime())
    subscriber = broker.subscriber("q", release_stuck_timeout=60)
    await broker.publish("x", "q")
    message = await got(subscriber)
    assert subscriber._pulling is not None
    renewal = subscriber._pulling.renewal
    time.now += 9 * 60 - 1
    assert await renewal.tick() is not None
    assert heard.texts("is no longer renewed") == []
    time.now += 31
    assert await renewal.tick() is None
    assert len(heard.texts("is no longer renewed")) == 1
    # It is still held until its lease ends.
    await message.ack()
    await look.archived()


@on_one
async def test_a_lease_that_was_lost_is_told_once(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look, heard: Heard
) -> None:
    time = ShiftedTime()
    broker._clock.use(time)
    await broker.publish("x", "q")
    message = await got(subscriber)
    await expire(look)
    other = await eventually(lambda: broker.reserve("q"))
    assert subscriber._pulling is not None
    time.shift += 300
    await subscriber._pulling.renewal.tick()
    assert len(heard.texts("lease lost")) == 1
    assert message.raw_message.lease_lost
    await other.commit()


async def test_a_cancelled_wait_leases_nothing(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look, looks: list[Any]
) -> None:
    waiting = asyncio.create_task(subscriber.get_one(timeout=None))
    await eventually(lambda: looks)
    waiting.cancel()
    await asyncio.wait((waiting,))
    await broker.publish("x", "q")
    assert [row["state"] for row in await look.rows()] == ["PENDING"]


@on_one
async def test_a_stop_ends_the_wait_and_a_message_can_still_be_settled(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look, looks: list[Any]
) -> None:
    await broker.publish("x", "q")
    message = await got(subscriber)
    waiting = asyncio.create_task(subscriber.get_one(timeout=None))
    await eventually(lambda: len(looks) > 1)
    await subscriber.stop()
    assert await waiting is None
    await message.ack()
    await look.archived()
    await broker.publish("y", "q")
    await (await got(subscriber)).ack()


@on_one
async def test_nothing_is_taken_while_the_subscriber_is_paused(
    broker: SqlBroker, subscriber: QueueSubscriber, looks: list[Any]
) -> None:
    waiting = asyncio.create_task(subscriber.get_one(timeout=None))
    await eventually(lambda: looks)
    subscriber.pause()
    await broker.publish("x", "q")
    assert await subscriber.get_one(timeout=0.1) is None
    assert not waiting.done()
    subscriber.resume()
    message = await waiting
    assert message is not None
    await message.ack()


@on_one
async def test_a_paused_queue_counts_as_empty(
    broker: SqlBroker, subscriber: QueueSubscriber
) -> None:
    await broker.publish("x", "q")
    await broker.admin.pause("q")
    assert await subscriber.get_one(timeout=0) is None
    await broker.admin.resume("q")
    await (await got(subscriber)).ack()


@on_one
async def test_a_subscriber_with_a_handler_has_no_single_messages(broker: SqlBroker) -> None:
    subscriber = broker.subscriber("q")

    @subscriber
    async def handle(body: Any) -> None: ...

    with pytest.raises(AssertionError, match="without a handler"):
        await subscriber.get_one(timeout=1e-24)
    with pytest.raises(SetupError, match="without a handler"):
        aiter(subscriber)


@on_one
@pytest.mark.parametrize(
    "options",
    [
        {"policies": [Delay(1)]},
        {"ordered": True},
        {"batch": True},
        {"transactional": True},
        {"forward_to": DESTINATION},
    ],
    ids=lambda options: next(iter(options)),
)
async def test_options_that_single_messages_cannot_keep_to(broker: SqlBroker, options: Any) -> None:
    subscriber = broker.subscriber("q", **options)
    with pytest.raises(NotSupportedError, match=next(iter(options))):
        await subscriber.get_one()
    with pytest.raises(NotSupportedError, match="async for"):
        aiter(subscriber)


class Counting(BaseMiddleware):
    """Marks what passes."""

    async def on_receive(self) -> None:
        self.msg.payload = b"[" + self.msg.payload + b"]"
        await super().on_receive()

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: Any) -> Any:
        if msg.body == b"[refused]":
            raise RuntimeError("a middleware refuses it")
        msg.headers["scoped"] = True
        return await call_next(msg)


@on_one
async def test_middlewares_parser_and_decoder(engine: AsyncEngine, look: Look) -> None:
    async def parser(row: Any, original: Callable[[Any], Awaitable[Any]]) -> Any:
        message = await original(row)
        message.headers["parsed"] = True
        return message

    async def decoder(message: Any, original: Callable[[Any], Awaitable[Any]]) -> Any:
        return {"decoded": await original(message)}

    broker = SqlBroker(engine, logger=None, middlewares=(Counting,))
    router = SqlBrokerRouter(prefix="sub.", parser=parser)
    subscriber = router.subscriber("q", decoder=decoder, retry_strategy=AGAIN)
    broker.include_router(router)
    await broker.create_tables()
    async with broker:
        await broker.publish("x", "sub.q")
        message = await got(subscriber)
        assert await message.decode() == {"decoded": "[x]"}
        assert (message.headers["scoped"], message.headers["parsed"]) == (True, True)
        await message.ack()
        await broker.publish("refused", "sub.q")
        # A message that cannot be read must not come back for ever.
        for _ in range(3):
            with pytest.raises(RuntimeError, match="refuses"):
                await subscriber.get_one(timeout=LONG)
        assert await subscriber.get_one(timeout=0) is None
        assert [row["state"] for row in await look.rows(archive=True)] == ["COMPLETED", "FAILED"]


@on_one
async def test_a_parser_that_makes_a_message_of_its_own(engine: AsyncEngine, look: Look) -> None:
    from faststream_sqlbroker.message import SqlBrokerMessage

    async def parser(row: Any) -> Any:
        return SqlBrokerMessage(row, row.payload)

    broker = SqlBroker(engine, logger=None)
    subscriber = broker.subscriber("q", parser=parser, retry_strategy=None)
    await broker.create_tables()
    async with broker:
        await broker.publish("x", "q")
        with pytest.raises(SetupError, match="must return the message"):
            await subscriber.get_one(timeout=LONG)
        [row] = await look.rows(archive=True)
        assert row["state"] == "FAILED"


async def test_a_cancelled_wait_for_the_parser_gives_the_message_back(
    engine: AsyncEngine, look: Look
) -> None:
    parsing = asyncio.Event()

    async def parser(_row: Any) -> Any:
        parsing.set()
        await asyncio.Event().wait()

    broker = SqlBroker(engine, logger=None)
    subscriber = broker.subscriber("q", parser=parser)
    await broker.create_tables()
    async with broker:
        await broker.publish("x", "q")
        waiting = asyncio.create_task(subscriber.get_one(timeout=None))
        await parsing.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        row = await look.in_state("PENDING")
        assert row["attempts_count"] == 0


@pytest.fixture
def slow_settle(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Set when an outcome is to be written, and what lets it be."""
    settle = DirectClaims.settle
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(self: DirectClaims, *args: Any, **options: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await settle(self, *args, **options)

    monkeypatch.setattr(DirectClaims, "settle", slowly)
    return begun, go_on


async def test_an_outcome_is_written_though_its_caller_was_cancelled(
    broker: SqlBroker,
    subscriber: QueueSubscriber,
    look: Look,
    slow_settle: tuple[asyncio.Event, asyncio.Event],
) -> None:
    begun, go_on = slow_settle
    await broker.publish("x", "q")
    message = await got(subscriber)
    acking = asyncio.create_task(message.ack())
    await begun.wait()
    acking.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await acking
    [row] = await look.archived()
    assert row["state"] == "COMPLETED"
    await message.nack()
    assert await look.rows() == []


@on_one
async def test_two_outcomes_at_once_are_one(
    broker: SqlBroker,
    subscriber: QueueSubscriber,
    look: Look,
    slow_settle: tuple[asyncio.Event, asyncio.Event],
) -> None:
    _, go_on = slow_settle
    await broker.publish("x", "q")
    message = await got(subscriber)
    outcomes = [asyncio.create_task(each()) for each in (message.reject, message.ack)]
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*outcomes) == [None, None]
    [row] = await look.archived()
    assert row["state"] == "FAILED"


@on_one
async def test_the_second_of_two_outcomes_tells_of_the_first(
    broker: SqlBroker, subscriber: QueueSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first is repeated, as the database has failed for a moment."""
    settle = DirectClaims.settle
    failed = False

    async def fail_once(self: DirectClaims, *args: Any, **options: Any) -> Any:
        nonlocal failed
        await asyncio.sleep(0.01)
        if not failed:
            failed = True
            raise TransientStoreError("it has failed for a moment")
        return await settle(self, *args, **options)

    monkeypatch.setattr(DirectClaims, "settle", fail_once)
    await broker.publish("x", "q")
    message = await got(subscriber)
    first, second = asyncio.create_task(message.ack()), asyncio.create_task(message.nack())
    with pytest.raises(TransientStoreError):
        await first
    await second
    await message.reject()
    assert message.committed is AckStatus.ACKED


@on_one
def test_leases_are_renewed_in_a_second_event_loop(database_url: str) -> None:
    """The first one was closed without a stop."""
    broker = SqlBroker(database_url, logger=None)
    subscriber = broker.subscriber("q", release_stuck_timeout="600ms")

    async def hold() -> PulledMessage:
        await broker.start()
        await broker.publish("x", "q")
        message = await got(subscriber)
        claimed = message.raw_message.renewed_monotonic
        await eventually(lambda: message.raw_message.renewed_monotonic > claimed)
        return message

    asyncio.run(broker.create_tables())
    for close in (False, True):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(hold())
        if close:
            loop.run_until_complete(broker.stop())
        loop.close()


# -- iteration -----------------------------------------------------------------------------------


@on_one
async def test_a_stop_while_an_ack_fails_gives_the_message_back(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = DirectClaims.settle
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def fail_once(self: DirectClaims, *args: Any, **options: Any) -> Any:
        if begun.is_set():
            return await settle(self, *args, **options)
        begun.set()
        await go_on.wait()
        raise TransientStoreError("it has failed for a moment")

    monkeypatch.setattr(DirectClaims, "settle", fail_once)
    await broker.start()
    await broker.publish("x", "q")

    async def iterate() -> None:
        async for _ in subscriber:
            pass

    iterating = asyncio.create_task(iterate())
    await begun.wait()
    await subscriber.stop()
    go_on.set()
    await iterating
    [row] = await look.rows()
    assert (row["state"], row["attempts_count"]) == ("PENDING", 0)


async def test_asking_for_the_next_acks_the_last_and_closing_gives_it_back(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    await broker.start()
    for body in ("a", "b", "c"):
        await broker.publish(body, "q")
    seen: list[Any] = []
    async with aclosing(aiter(subscriber)) as messages:
        async for message in messages:
            seen.append(await message.decode())
            if seen[-1] == "c":
                break
    assert seen == ["a", "b", "c"]
    assert [row["state"] for row in await look.rows(archive=True)] == ["COMPLETED"] * 2
    [row] = await look.rows()
    # Charged as a delivery: else a message that ends every loop would come back for ever.
    assert (row["state"], row["deliveries_count"], row["attempts_count"]) == ("PENDING", 1, 0)


async def test_an_iteration_that_was_left_gives_its_message_back_too(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    await broker.publish("x", "q")
    async for _ in subscriber:
        break
    await look.in_state("PENDING")


@on_one
async def test_an_error_in_the_loops_body_gives_the_message_back(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    await broker.publish("x", "q")
    with pytest.raises(RuntimeError, match="body"):
        async with aclosing(aiter(subscriber)) as messages:
            async for _ in messages:
                raise RuntimeError("body")
    await look.in_state("PENDING")


@on_one
async def test_what_the_loop_has_settled_is_not_acked(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    await broker.publish("a", "q")
    await broker.publish("b", "q")
    async for message in subscriber:
        if message.body == b"b":
            await message.ack()
            break
        await message.reject()
    rows = await look.archived(2)
    assert [row["state"] for row in rows] == ["FAILED", "COMPLETED"]


async def test_a_stop_ends_an_iteration_that_waits(
    broker: SqlBroker, subscriber: QueueSubscriber, looks: list[Any]
) -> None:
    await broker.start()

    async def iterate() -> str:
        async for _ in subscriber:
            pass
        return "ended"

    waiting = asyncio.create_task(iterate())
    await eventually(lambda: looks)
    await broker.stop()
    assert await waiting == "ended"


async def test_a_stop_gives_back_what_an_iteration_works_on(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    await broker.publish("x", "q")
    begun, go_on = asyncio.Event(), asyncio.Event()
    lost: list[LeaseLostError] = []

    async def iterate() -> str:
        async for message in subscriber:
            begun.set()
            await go_on.wait()
            try:
                await message.ack()
            except LeaseLostError as error:
                lost.append(error)
        return "ended"

    working = asyncio.create_task(iterate())
    await begun.wait()
    await broker.stop()
    await look.in_state("PENDING")
    go_on.set()
    assert await working == "ended"
    assert len(lost) == 1
    await look.in_state("PENDING")


@pytest.mark.parametrize("bodies", [["x"], []], ids=["in its body", "while it waits"])
async def test_a_cancelled_iteration_holds_nothing(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look, looks: list[Any], bodies: list[str]
) -> None:
    inside = asyncio.Event()

    async def iterate() -> None:
        async with aclosing(aiter(subscriber)) as messages:
            async for _ in messages:
                inside.set()
                await asyncio.Event().wait()

    for body in bodies:
        await broker.publish(body, "q")
    iterating = asyncio.create_task(iterate())
    await eventually(inside.is_set if bodies else lambda: looks)
    iterating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await iterating
    await broker.publish("y", "q")
    for row in await look.rows():
        assert (row["state"], row["attempts_count"]) == ("PENDING", 0)


async def test_a_stop_changes_nothing_of_what_another_worker_has(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    await broker.publish("x", "q")
    iterating = aiter(subscriber)
    await anext(iterating)
    await expire(look)
    other = await eventually(lambda: broker.reserve("q"))
    before = await look.rows()
    await subscriber.stop()
    with pytest.raises(StopAsyncIteration):
        await anext(iterating)
    assert await look.rows() == before
    await other.commit()
    await look.archived()


@on_one
async def test_what_a_stop_could_not_give_back_can_still_be_settled(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    await broker.publish("x", "q")
    iterating = aiter(subscriber)
    message = await anext(iterating)
    with patch.object(DirectClaims, "settle", side_effect=TransientStoreError("away")):
        await subscriber.stop()
    await look.in_state("PROCESSING")
    await message.ack()
    with pytest.raises(StopAsyncIteration):
        await anext(iterating)
    [row] = await look.archived()
    assert (row["state"], row["deliveries_count"]) == ("COMPLETED", 1)


@on_one
async def test_an_iteration_outlasts_an_outage(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look, heard: Heard
) -> None:
    await broker.publish("a", "q")
    await broker.publish("b", "q")
    take, settle = DirectClaims.claim, DirectClaims.settle
    failed: set[str] = set()

    async def failing_take(self: DirectClaims, *args: Any, **options: Any) -> Any:
        if "take" not in failed:
            failed.add("take")
            raise TransientStoreError("the database is away")
        return await take(self, *args, **options)

    async def failing_settle(self: DirectClaims, *args: Any, **options: Any) -> Any:
        if "settle" not in failed:
            failed.add("settle")
            raise TransientStoreError("the database is away")
        return await settle(self, *args, **options)

    with (
        patch.object(DirectClaims, "claim", failing_take),
        patch.object(DirectClaims, "settle", failing_settle),
    ):
        seen = []
        async with aclosing(aiter(subscriber)) as messages:
            async for message in messages:
                seen.append(await message.decode())
                if len(seen) == 2:
                    await message.ack()
                    break
    assert seen == ["a", "b"]
    assert failed == {"take", "settle"}
    await look.archived(2)
    assert len(heard.texts("works again")) == 2


@on_one
async def test_a_lost_lease_does_not_end_an_iteration(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look, heard: Heard
) -> None:
    await broker.publish("a", "q")
    async with aclosing(aiter(subscriber)) as messages:
        first = await anext(messages)
        await expire(look)
        table = look.tables.message
        async with look.engine.begin() as connection:
            taken = update(table).values(
                state="PENDING", lease_token=None, lease_expires_at=None, next_attempt_at=clock()
            )
            await connection.execute(taken)
        second = await anext(messages)
        assert (first.message_id, second.deliveries_count) == (second.message_id, 2)
        assert len(heard.texts("lease lost")) == 1
        await second.ack()
    await look.archived()


async def test_two_iterations_share_the_messages(broker: SqlBroker, look: Look) -> None:
    one, two = broker.subscriber("q"), broker.subscriber("q")
    for n in range(20):
        await broker.publish(n, "q")
    seen: list[int] = []

    async def iterate(subscriber: QueueSubscriber) -> None:
        async for message in subscriber:
            seen.append(await message.decode())
            await message.ack()
            if len(seen) == 20:
                break

    async with asyncio.timeout(LONG):
        await asyncio.wait(
            [asyncio.create_task(iterate(each)) for each in (one, two)],
            return_when=asyncio.FIRST_COMPLETED,
        )
    await broker.stop()
    assert sorted(seen) == list(range(20))
    await look.archived(20)


async def test_a_handler_elsewhere_shares_the_queue(broker: SqlBroker, look: Look) -> None:
    """A pulled message is not delivered to the handler, and the other way round."""
    pulling = broker.subscriber("q")
    await broker.publish("mine", "q")
    mine = await got(pulling)
    handled: list[str] = []

    @broker.subscriber("q", max_fetch_interval=0.05)
    async def handle(body: str) -> None:
        handled.append(body)

    await broker.start()
    await broker.publish("theirs", "q")
    await eventually(lambda: handled)
    assert handled == ["theirs"]
    await mine.ack()
    await look.archived(2)
    count = select(func.count()).select_from(look.tables.message)
    async with look.engine.connect() as connection:
        assert (await connection.execute(count)).scalar_one() == 0


@on_one
async def test_a_stop_leaves_alone_what_is_being_acked(
    broker: SqlBroker, subscriber: QueueSubscriber, look: Look
) -> None:
    await broker.publish("x", "q")
    settle = DirectClaims.settle
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow_settle(self: DirectClaims, *args: Any, **options: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await settle(self, *args, **options)

    async def iterate() -> None:
        async for _ in subscriber:
            pass

    with patch.object(DirectClaims, "settle", slow_settle):
        iterating = asyncio.create_task(iterate())
        await begun.wait()
        await subscriber.stop()
        go_on.set()
        await iterating
    [row] = await look.archived()
    assert row["state"] == "COMPLETED"

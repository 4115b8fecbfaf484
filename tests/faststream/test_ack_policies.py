"""How a message ends, by the end of its handler and the ack policy."""

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from faststream import AckPolicy, BaseMiddleware, Depends
from faststream.exceptions import AckMessage, NackMessage, RejectMessage, SkipMessage
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    NoRetryStrategy,
    Once,
    SetupError,
    SqlBroker,
    SqlBrokerBatchMessage,
    SqlBrokerMessage,
    TestSqlBroker,
)
from tests.faststream.conftest import CALM, QUICK, Heard, Look, on_each

pytestmark = pytest.mark.capability("every AckPolicy, retries, dead letters")

LATER = ConstantRetryStrategy(delay_seconds=3600, max_attempts=5, max_total_delay_seconds=None)
AT_ONCE = ConstantRetryStrategy(delay_seconds=0, max_attempts=3, max_total_delay_seconds=None)

Act = Callable[[Any], Awaitable[Any]]


async def run(broker: SqlBroker, act: Act, **options: Any) -> None:
    """Start the broker with `act` as the handler, and publish one message."""

    if options.get("ack_policy") is not AckPolicy.ACK_FIRST:
        options.setdefault("retry_strategy", LATER)

    @broker.subscriber("q", **QUICK, **options)
    async def handle(body: Any, message: SqlBrokerMessage) -> Any:
        return await act(message)

    await broker.start()
    await broker.publish("x", "q")


async def succeed(message: Any) -> None: ...


async def fail(message: Any) -> None:
    raise ValueError("boom")


@on_each(
    "policy",
    [AckPolicy.NACK_ON_ERROR, AckPolicy.ACK_FIRST],
    [AckPolicy.ACK, AckPolicy.REJECT_ON_ERROR],
)
async def test_a_handler_that_returns_completes_its_message(
    broker: SqlBroker, look: Look, policy: AckPolicy
) -> None:
    await run(broker, succeed, ack_policy=policy)
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("COMPLETED", 1, 1)
    assert (
        row["created_at"] <= row["first_attempt_at"] == row["last_attempt_at"] <= row["archived_at"]
    )


async def test_a_handler_that_raises_ends_as_the_policy_says(broker: SqlBroker, look: Look) -> None:
    states = {
        AckPolicy.ACK: "COMPLETED",
        AckPolicy.ACK_FIRST: "COMPLETED",
        AckPolicy.REJECT_ON_ERROR: "FAILED",
        AckPolicy.MANUAL: "FAILED",
    }

    def subscribe(policy: AckPolicy) -> None:
        retries: Any = {} if policy is AckPolicy.ACK_FIRST else {"retry_strategy": LATER}

        @broker.subscriber(policy.value, **CALM, ack_policy=policy, **retries)
        async def handle(body: Any, message: SqlBrokerMessage) -> None:
            await fail(message)

    for policy in states:
        subscribe(policy)
        await broker.publish("x", policy.value)
    await broker.start()
    rows = await look.archived(len(states))
    ended = {row["queue"]: (row["state"], row["attempts_count"]) for row in rows}
    assert ended == {policy.value: (state, 1) for policy, state in states.items()}


@on_each("options", [{}], [{"ack_policy": AckPolicy.NACK_ON_ERROR}])
async def test_nack_on_error_is_the_default(
    broker: SqlBroker, look: Look, options: dict[str, Any]
) -> None:
    await run(broker, fail, **options)
    row = await look.in_state("RETRYABLE")
    assert (row["attempts_count"], row["deliveries_count"]) == (1, 1)
    assert row["next_attempt_at"] >= row["first_attempt_at"] + timedelta(seconds=3600)
    assert "ValueError: boom" in row["last_error"]
    assert row["lease_token"] is None


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_brokers_policy_is_the_default(engine: AsyncEngine, look: Look) -> None:
    broker = SqlBroker(engine, logger=None, ack_policy=AckPolicy.REJECT_ON_ERROR)
    await broker.create_tables()
    await run(broker, fail)
    assert broker.subscribers[0].ack_policy is AckPolicy.REJECT_ON_ERROR
    assert (await look.archived())[0]["state"] == "FAILED"
    await broker.stop()


async def test_after_its_retries_a_message_is_a_dead_letter(broker: SqlBroker, look: Look) -> None:
    await run(broker, fail, retry_strategy=AT_ONCE)
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("FAILED", 3, 3)
    assert row["reason"] == "max_attempts"
    assert "ValueError: boom" in row["last_error"]
    assert "in fail" in row["last_error"]
    assert row["last_attempt_at"] > row["first_attempt_at"]


class FailsAtItsEnd(BaseMiddleware):
    async def after_processed(self, *info: Any) -> bool | None:
        await super().after_processed(*info)
        raise KeyError("of the middleware")


@pytest.mark.parametrize("options", [{}, {"batch": True}], ids=repr)
@pytest.mark.parametrize("policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.REJECT_ON_ERROR])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_error_of_a_middleware_is_the_messages(
    engine: AsyncEngine, look: Look, policy: AckPolicy, options: dict[str, Any]
) -> None:
    broker = SqlBroker(engine, logger=None, middlewares=[FailsAtItsEnd])
    await broker.create_tables()
    await run(broker, succeed, ack_policy=policy, retry_strategy=AT_ONCE, **options)
    [row] = await look.archived()
    assert row["state"] == "FAILED"
    assert row["last_error"].startswith("KeyError: 'of the middleware'")
    await broker.stop()


@on_each("strategy", [None], [NoRetryStrategy()])
async def test_without_a_strategy_a_failure_is_final(
    broker: SqlBroker, look: Look, strategy: Any
) -> None:
    await run(broker, fail, retry_strategy=strategy)
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"]) == ("FAILED", 1)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_manual_without_a_call_is_an_error(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    await run(broker, succeed, ack_policy=AckPolicy.MANUAL)
    [row] = await look.archived()
    assert row["state"] == "FAILED"
    assert len(heard.texts("was not updated after processing", logging.ERROR)) == 1


@on_each(
    "policy",
    [AckPolicy.NACK_ON_ERROR, AckPolicy.ACK_FIRST],
    [AckPolicy.ACK, AckPolicy.REJECT_ON_ERROR, AckPolicy.MANUAL],
)
async def test_the_first_manual_call_wins(broker: SqlBroker, look: Look, policy: AckPolicy) -> None:
    async def act(message: Any) -> None:
        await message.ack()
        await message.reject(reason="too late")
        assert message.committed.value == "ACKED"
        raise ValueError("boom")

    await run(broker, act, ack_policy=policy)
    assert (await look.archived())[0]["state"] == "COMPLETED"


async def test_a_manual_nack_takes_a_delay(broker: SqlBroker, look: Look) -> None:
    async def act(message: Any) -> None:
        try:
            raise KeyError("inside")
        except KeyError:
            await message.nack(delay="2h")
        await message.ack()

    await run(broker, act)
    row = await look.in_state("RETRYABLE")
    assert row["next_attempt_at"] >= row["first_attempt_at"] + timedelta(hours=2)
    assert "KeyError" in row["last_error"]


async def test_a_manual_reject_takes_a_reason(broker: SqlBroker, look: Look) -> None:
    async def act(message: Any) -> None:
        await message.reject(reason="not ours")

    await run(broker, act)
    [row] = await look.archived()
    assert (row["state"], row["reason"], row["last_error"]) == ("FAILED", "not ours", None)


@pytest.mark.parametrize("wrong", [[1], "soon", True])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_impossible_delays_are_refused(
    broker: SqlBroker, look: Look, heard: Heard, wrong: Any
) -> None:
    async def act(message: Any) -> None:
        await message.nack(delay=wrong)

    await run(broker, act)
    row = await look.in_state("RETRYABLE")
    assert "SetupError: delay" in row["last_error"]
    assert heard.texts("SetupError", logging.ERROR)


async def raise_ack(message: Any) -> None:
    raise AckMessage


async def raise_reject(message: Any) -> None:
    raise RejectMessage(reason="no")


async def raise_nack(message: Any) -> None:
    try:
        raise KeyError("inside")
    except KeyError as error:
        raise NackMessage(delay=7200) from error


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_raising_ack_message_acks(broker: SqlBroker, look: Look) -> None:
    await run(broker, raise_ack)
    assert (await look.archived())[0]["state"] == "COMPLETED"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_raising_reject_message_rejects(broker: SqlBroker, look: Look) -> None:
    await run(broker, raise_reject)
    [row] = await look.archived()
    assert (row["state"], row["reason"], row["last_error"]) == ("FAILED", "no", None)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_raising_nack_message_nacks(broker: SqlBroker, look: Look) -> None:
    await run(broker, raise_nack)
    row = await look.in_state("RETRYABLE")
    assert row["next_attempt_at"] >= row["first_attempt_at"] + timedelta(hours=2)
    assert row["last_error"].startswith("KeyError")


async def raise_skip(message: Any) -> None:
    raise SkipMessage


@on_each("mode", ["plain", "transactional"], ["batch", "ordered", "once"])
async def test_raising_skip_message_acks_with_a_reason(
    broker: SqlBroker, look: Look, mode: str, heard: Heard
) -> None:
    """It is no dead letter: nothing has failed."""
    options: dict[str, Any] = {mode: True}
    if mode in {"plain", "once"}:
        options = {"policies": [Once("1h")]} if mode == "once" else {}

    @broker.subscriber("q", **QUICK, dead_letter_queue="dead", **options)
    async def handle(body: Any) -> None:
        raise SkipMessage

    await broker.publish("x", "q", key="k")
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["reason"], row["queue"]) == ("COMPLETED", "skipped", "q")
    assert (row["attempts_count"], row["last_error"]) == (1, None)
    assert not [r for r in heard.records if r.levelno >= logging.WARNING]


@on_each("policy", [AckPolicy.MANUAL], list(AckPolicy))
async def test_a_skipped_message_is_acked_under_every_policy(
    broker: SqlBroker, look: Look, heard: Heard, policy: AckPolicy
) -> None:
    """ACK_FIRST has acked it before, without a reason."""
    await run(broker, raise_skip, ack_policy=policy)
    [row] = await look.archived()
    reason = None if policy is AckPolicy.ACK_FIRST else "skipped"
    assert (row["state"], row["reason"]) == ("COMPLETED", reason)
    assert not [r for r in heard.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("where", ["middleware", "dependency", "parser", "after a reject"])
async def test_a_message_is_skipped_from_anywhere(
    broker: SqlBroker, look: Look, where: str
) -> None:
    class Skips(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            raise SkipMessage

    def skip(*_: Any) -> None:
        raise SkipMessage

    async def skips_parse(msg: Any, parser: Any) -> Any:
        raise SkipMessage

    options: dict[str, Any] = {"parser": skips_parse} if where == "parser" else {}
    options |= {"dependencies": [Depends(skip)]} if where == "dependency" else {}

    @broker.subscriber("q", **QUICK, **options)
    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        await message.reject(reason="first")
        raise SkipMessage

    if where == "middleware":
        broker.add_middleware(Skips)
    await broker.publish("x", "q")
    await broker.start()
    [row] = await look.archived()
    expected = ("FAILED", "first") if where == "after a reject" else ("COMPLETED", "skipped")
    assert (row["state"], row["reason"]) == expected


@pytest.mark.parametrize("policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.MANUAL])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_test_broker_does_not_raise_what_skips_a_message(
    broker: SqlBroker, policy: AckPolicy
) -> None:
    @broker.subscriber("q", ack_policy=policy)
    async def handle(body: Any) -> None:
        raise SkipMessage

    async with TestSqlBroker(broker, connect_only=False) as tested:
        await tested.publish("x", "q")
        handle.mock.assert_called_once_with("x")
        [message] = (await tested.admin.messages(queue="q", state="COMPLETED")).messages
        assert message.reason == "skipped"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_reject_stores_the_error_that_it_is_given(broker: SqlBroker, look: Look) -> None:
    async def act(message: Any) -> None:
        with pytest.raises(SetupError, match="error must be an exception or None, got 'no'"):
            await message.reject(error="no")
        await message.reject(reason="expired", error=KeyError("card 7"))

    await run(broker, act)
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("FAILED", "expired")
    assert row["last_error"].startswith("KeyError: 'card 7'")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_reject_of_a_batch_stores_the_error_for_each(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK, batch=True)
    async def handle(body: list[Any], message: SqlBrokerBatchMessage) -> None:
        await message.reject(error=KeyError("card 7"))

    await broker.publish_batch("x", "y", queue="q")
    await broker.start()
    rows = await look.archived(2)
    assert ["card 7" in row["last_error"] for row in rows] == [True, True]


@pytest.mark.parametrize("keep", [True, False])
async def test_retention_of_completed_and_rejected_messages(
    broker: SqlBroker, look: Look, keep: bool
) -> None:
    async def act(message: Any) -> None:
        await message.ack() if message.key == "good" else await message.reject()

    @broker.subscriber(
        "q", **QUICK, retain_in_archive_on_ack=keep, retain_in_archive_on_reject=not keep
    )
    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        await act(message)

    await broker.start()
    await broker.publish("x", "q", key="good")
    await broker.publish("x", "q", key="bad")
    [row] = await look.archived(1)
    assert row["state"] == ("COMPLETED" if keep else "FAILED")

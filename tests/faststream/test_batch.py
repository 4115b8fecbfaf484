"""Batch handlers: what they get, and how single messages are settled in them."""

from typing import Any

import pytest
from faststream import AckPolicy, BaseMiddleware
from faststream.exceptions import NackMessage

from faststream_sqlbroker import SqlBroker, SqlBrokerBatchMessage
from faststream_sqlbroker.message import SqlBrokerBatchMessage as BatchClass
from tests.faststream.conftest import QUICK, Look

pytestmark = pytest.mark.capability("batch handlers")

BATCH: Any = {**QUICK, "batch": True}


async def test_a_handler_gets_a_batch(broker: SqlBroker, look: Look) -> None:
    got: list[tuple[list[Any], BatchClass]] = []

    @broker.subscriber("q", **BATCH, fetch_batch_size=10)
    async def handle(bodies: list[dict[str, int]], message: SqlBrokerBatchMessage) -> None:
        got.append((bodies, message))
        assert [await m.decode() for m in message.messages] == bodies

    ids = await broker.publish_batch({"n": 0}, {"n": 1}, {"n": 2}, queue="q", headers={"h": 1})
    await broker.start()
    rows = await look.archived(3)
    assert {row["state"] for row in rows} == {"COMPLETED"}
    [(bodies, message)] = got
    assert bodies == [{"n": 0}, {"n": 1}, {"n": 2}]
    first, _, last = message.messages
    assert message.message_id == f"{first.message_id}_{last.message_id}"
    assert (first.raw_message.id, last.raw_message.id) == (ids[0], ids[2])
    assert message.correlation_id == message.messages[0].correlation_id
    assert message.headers["h"] == 1
    assert [headers["h"] for headers in message.batch_headers] == [1, 1, 1]
    assert isinstance(message.raw_message, tuple)


async def test_no_more_than_fetch_batch_size(broker: SqlBroker, look: Look) -> None:
    sizes: list[int] = []

    @broker.subscriber("q", **BATCH, fetch_batch_size=4)
    async def handle(bodies: list[Any]) -> None:
        sizes.append(len(bodies))

    await broker.publish_batch(*range(10), queue="q")
    await broker.start()
    await look.archived(10)
    assert sum(sizes) == 10
    assert max(sizes) <= 4


async def test_a_batch_may_be_smaller_than_a_claim(broker: SqlBroker, look: Look) -> None:
    sizes: list[int] = []

    @broker.subscriber("q", **BATCH, batch_max_records=3)
    async def handle(bodies: list[Any]) -> None:
        sizes.append(len(bodies))

    await broker.publish_batch(*range(10), queue="q")
    await broker.start()
    await look.archived(10)
    assert sum(sizes) == 10
    assert max(sizes) == 3


@pytest.mark.parametrize(
    ("policy", "state"), [(AckPolicy.ACK, "COMPLETED"), (AckPolicy.REJECT_ON_ERROR, "FAILED")]
)
async def test_the_ack_policy_applies_to_the_whole_batch(
    broker: SqlBroker, look: Look, policy: AckPolicy, state: str
) -> None:
    @broker.subscriber("q", **BATCH, ack_policy=policy)
    async def handle(bodies: list[Any]) -> None:
        raise ValueError("boom")

    await broker.publish_batch(1, 2, queue="q")
    await broker.start()
    rows = await look.archived(2)
    assert [row["state"] for row in rows] == [state, state]


async def test_messages_of_a_batch_are_settled_one_by_one(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **BATCH, retry_strategy=None)
    async def handle(bodies: list[Any], message: SqlBrokerBatchMessage) -> None:
        good, bad, _ = message.messages
        await good.ack()
        await bad.reject(reason="bad one")
        raise ValueError("boom")

    await broker.publish_batch(1, 2, 3, queue="q")
    await broker.start()
    rows = await look.archived(3)
    assert [row["state"] for row in rows] == ["COMPLETED", "FAILED", "FAILED"]
    assert rows[1]["reason"] == "bad one"
    assert "boom" in rows[2]["last_error"]


async def test_a_nack_applies_to_the_whole_batch(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **BATCH)
    async def handle(bodies: list[Any]) -> None:
        raise NackMessage(delay=3600)

    await broker.publish("x", "q")
    await broker.start()
    row = await look.in_state("RETRYABLE")
    assert (row["next_attempt_at"] - row["last_attempt_at"]).total_seconds() >= 3600


class Shout:
    """A codec."""

    async def encode(self, msg: Any, serializer: Any = None) -> tuple[bytes, str | None]:
        return str(msg).upper().encode(), "shout"

    async def decode(self, msg: Any) -> Any:
        return msg.body.decode().lower()

    async def encode_batch(
        self, msgs: Any, serializer: Any = None
    ) -> list[tuple[bytes, str | None]]:
        return [await self.encode(msg, serializer) for msg in msgs]

    async def decode_batch(self, msg: Any) -> list[Any]:
        return [body.decode().lower() for body in msg.body]


async def test_a_codec_decodes_a_batch(broker: SqlBroker, look: Look) -> None:
    got: list[Any] = []
    broker.config.broker_config.broker_codec = Shout()

    @broker.subscriber("q", **BATCH)
    async def handle(bodies: list[Any], message: SqlBrokerBatchMessage) -> None:
        got.extend(bodies)
        got.extend([await m.decode() for m in message.messages])

    await broker.publish("abc", "q")
    assert bytes((await look.in_state("PENDING"))["payload"]) == b"ABC"
    await broker.start()
    await look.archived(1)
    assert got == ["abc", "abc"]


async def test_a_middleware_replaces_the_bodies_of_a_batch(broker: SqlBroker, look: Look) -> None:
    got: list[int] = []

    class Decrypt(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            msg.body = [bytes(byte ^ 1 for byte in body) for body in msg.body]
            return await call_next(msg)

    broker.add_middleware(Decrypt)

    @broker.subscriber("q", **BATCH)
    async def handle(bodies: list[int]) -> None:
        got.extend(bodies)

    headers = {"content-type": "application/json"}
    # "12" and "34", encrypted.
    await broker.publish_batch(b"03", b"25", queue="q", headers=headers)
    await broker.start()
    await look.archived(2)
    assert sorted(got) == [12, 34]

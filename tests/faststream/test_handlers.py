"""The arguments of a handler, and its return values."""

import json
import logging
from typing import Annotated, Any
from uuid import UUID

import pytest
from faststream import BaseMiddleware, Context, Depends
from faststream.exceptions import SetupError as FastStreamSetupError
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerResponse,
)
from faststream_sqlbroker.annotations import SqlBroker as BrokerAnnotation
from faststream_sqlbroker.core.correlation import build_message_id
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.message import SqlBrokerMessage as MessageClass
from tests.faststream.conftest import QUICK, Heard, Look, on_each
from tests.faststream.test_publish import headers_of
from tests.helpers import eventually


class Order(BaseModel):
    """A body."""

    number: int


async def test_a_handler_gets_body_headers_and_message(broker: SqlBroker, look: Look) -> None:
    seen: dict[str, Any] = {}

    @broker.subscriber("q", **QUICK)
    async def handle(
        order: Order,
        message: SqlBrokerMessage,
        own: BrokerAnnotation,
        queue: Annotated[str, Context("message.queue")],
        forty: Annotated[int, Depends(lambda: 40)],
    ) -> None:
        seen.update(order=order, message=message, own=own, queue=queue, forty=forty)

    await broker.start()
    message_id = await broker.publish(Order(number=4), "q", headers={"h": 1}, priority=5, key="k")
    await look.archived()
    message = seen["message"]
    assert (seen["order"], seen["own"], seen["queue"], seen["forty"]) == (
        Order(number=4),
        broker,
        "q",
        40,
    )
    assert message.message_id == build_message_id(message_id or 0, message.created_at)
    assert UUID(message.correlation_id).version == 8
    assert message.headers == {"content-type": "application/json", "h": 1}
    assert (message.queue, message.key, message.priority) == ("q", "k", 5)
    assert (message.attempts_count, message.deliveries_count, message.publish_count) == (0, 1, 1)
    assert message.created_at.utcoffset() is not None
    assert message.reply_to == ""


async def test_a_handler_may_be_synchronous(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK)
    def handle(body: str, message: SqlBrokerMessage) -> None:
        assert body == "x"

    await broker.start()
    await broker.publish("x", "q")
    assert (await look.archived())[0]["state"] == "COMPLETED"


async def test_a_handler_may_have_several_queues(broker: SqlBroker, look: Look) -> None:
    queues: set[str] = set()

    @broker.subscriber("a", "b", **QUICK)
    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        queues.add(message.queue)

    await broker.start()
    for queue in ("a", "b"):
        await broker.publish("x", queue)
    await look.archived(2)
    assert queues == {"a", "b"}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_headers_of_foreign_producers_are_read(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    bodies: list[Any] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        bodies.append(body)
        assert message.reply_to == ""
        assert UUID(message.correlation_id).version == 8

    async with engine.begin() as connection:
        for headers in ('{"content-type": 5, "correlation_id": [], "reply_to": {}}', None):
            await connection.execute(
                text("INSERT INTO message (queue, payload, headers) VALUES ('q', :p, :h)"),
                {"p": b"[1]", "h": headers},
            )
    await broker.start()
    assert {row["state"] for row in await look.archived(2)} == {"COMPLETED"}
    assert bodies == [[1], [1]]


async def test_a_body_that_does_not_fit(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK, retry_strategy=None)
    async def handle(order: Order) -> None: ...

    await broker.start()
    await broker.publish({"number": "many"}, "q")
    [row] = await look.archived()
    assert row["state"] == "FAILED"
    assert "number" in row["last_error"]


async def test_a_body_that_cannot_be_decoded(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK, retry_strategy=None)
    async def handle(body: Any) -> None: ...

    await broker.start()
    await broker.publish(b"{", "q", headers={"content-type": "application/json"})
    assert (await look.archived())[0]["state"] == "FAILED"


async def test_stacked_publishers_publish_the_answer(broker: SqlBroker, look: Look) -> None:
    got: dict[str, MessageClass] = {}

    @broker.subscriber("in", **QUICK)
    @broker.publisher("out", headers={"from": "publisher", "who": "publisher"})
    @broker.publisher("copy")
    async def handle(body: str) -> SqlBrokerResponse:
        return SqlBrokerResponse(
            body + "!", queue="ignored", headers={"who": "handler"}, priority=9, key="k"
        )

    @broker.subscriber("out", "copy", **QUICK)
    async def after(body: str, message: SqlBrokerMessage) -> None:
        assert body == "x!"
        got[message.queue] = message

    await broker.start()
    await broker.publish("x", "in", correlation_id="c")
    await look.archived(3)
    assert set(got) == {"out", "copy"}
    assert got["out"].headers["who"] == "handler"
    assert got["out"].headers["from"] == "publisher"
    assert "from" not in got["copy"].headers
    assert {m.correlation_id for m in got.values()} == {"c"}
    assert {(m.priority, m.key) for m in got.values()} == {(9, "k")}


async def test_an_answer_goes_to_reply_to(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(body: int) -> int:
        return body * 2

    await broker.start()
    await broker.publish(21, "q", reply_to="answers", correlation_id="c")

    async def answered() -> list[dict[str, Any]]:
        return [row for row in await look.rows() if row["queue"] == "answers"]

    [row] = await eventually(answered)
    assert bytes(row["payload"]) == b"42"
    assert headers_of(row)["correlation_id"] == "c"


async def test_no_reply_publishes_no_answer(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK, no_reply=True)
    async def handle(body: int) -> int:
        return body * 2

    await broker.start()
    await broker.publish(21, "q", reply_to="answers")
    await look.archived(1)


async def test_a_publish_that_fails_fails_the_message(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK, retry_strategy=None)
    @broker.publisher("out")
    async def handle(body: Any) -> SqlBrokerResponse:
        return SqlBrokerResponse("x", priority=1000)

    await broker.start()
    await broker.publish("x", "q")
    [row] = await look.archived()
    assert row["state"] == "FAILED"
    assert "priority" in row["last_error"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_class_in_place_of_the_annotation(broker: SqlBroker) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(body: Any, message: MessageClass) -> None: ...

    with pytest.raises(FastStreamSetupError, match="SqlBrokerMessage"):
        await broker.start()


async def test_middlewares_run_around_handlers_and_publishes(
    engine: AsyncEngine, look: Look
) -> None:
    seen: list[str] = []

    class Watch(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            seen.append(f"consume {msg.queue}")
            return await call_next(msg)

        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            seen.append(f"publish {cmd.destination}")
            cmd.headers["added"] = "yes"
            return await call_next(cmd)

    broker = SqlBroker(engine, logger=None, middlewares=[Watch])
    await broker.create_tables()

    @broker.subscriber("q", **QUICK)
    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        assert message.headers["added"] == "yes"

    await broker.start()
    given = {"own": 1}
    await broker.publish("x", "q", headers=given)
    assert (await look.archived())[0]["state"] == "COMPLETED"
    assert seen == ["publish q", "consume q"]
    assert given == {"own": 1}
    await broker.stop()


async def test_a_middleware_replaces_decode(broker: SqlBroker, look: Look) -> None:
    got: list[dict[str, int]] = []

    class Fetches(BaseMiddleware):
        """A claim check: what is stored says where the body is."""

        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            stored = await msg.decode()

            async def decode() -> Any:
                return {"found": stored["at"]}

            msg.decode = decode
            return await call_next(msg)

    broker.add_middleware(Fetches)

    @broker.subscriber("q", **QUICK)
    async def handle(body: dict[str, int]) -> None:
        got.append(body)

    await broker.publish({"at": 5}, "q")
    await broker.start()
    await look.archived(1)
    assert got == [{"found": 5}]


async def test_log_lines_name_queue_and_message(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    @broker.subscriber("q", **QUICK, retry_strategy=None)
    async def handle(body: Any) -> None:
        raise ValueError("boom")

    await broker.start()
    message_id = await broker.publish("x", "q")
    await look.archived()
    [record] = [r for r in heard.records if r.levelno >= logging.ERROR and "boom" in r.getMessage()]
    assert (record.queue, record.message_id) == ("q", str(message_id))  # type: ignore[attr-defined]


IMPOSSIBLE = ["x" * 300, "a queue ", 5, ["answers"]]
"""What a foreign producer may write as `reply_to`."""


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"batch": True}, {"transactional": True}], ids=str)
@pytest.mark.parametrize("reply_to", IMPOSSIBLE, ids=["long", "space", "number", "list"])
async def test_an_impossible_reply_to_repeats_no_handler_that_has_succeeded(
    broker: SqlBroker, look: Look, heard: Heard, reply_to: Any, options: dict[str, Any]
) -> None:
    runs: list[Any] = []

    @broker.subscriber("q", **QUICK, **options)
    async def handle(body: Any) -> str:
        runs.append(body)
        return "answer"

    headers = json.dumps({"reply_to": reply_to})
    [message_id] = await broker.config.store.insert([NewMessage("q", b"x", headers)])
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"]) == ("COMPLETED", 1)
    assert len(runs) == 1
    [said] = heard.texts("reply_to", logging.WARNING)
    assert said.startswith(
        f"message {message_id} of queue 'q' gets no reply, because its reply_to "
    )


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_without_answers_an_impossible_reply_to_is_not_spoken_of(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    @broker.subscriber("q", **QUICK, no_reply=True)
    async def handle(body: Any) -> str:
        return "answer"

    await broker.publish("x", "q", headers={"reply_to": "x" * 300})
    await broker.start()
    await look.archived()
    assert not heard.texts("reply_to")


@on_each("options", [{}, {"transactional": True}], [{"batch": True}, {"handler_timeout": 60}])
async def test_a_closed_generator_does_not_end_a_worker(
    broker: SqlBroker, look: Look, heard: Heard, options: dict[str, Any]
) -> None:
    """GeneratorExit is no Exception: what raises it in a handler has failed like any other."""
    calls: list[Any] = []
    again = ConstantRetryStrategy(delay_seconds=0.01, max_attempts=5)

    @broker.subscriber("q", max_workers=1, retry_strategy=again, **options, **QUICK)
    async def handle(body: Any) -> None:
        calls.append(body)
        if len(calls) < 3:
            raise GeneratorExit

    await broker.start()
    await broker.publish(1, "q")
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"], len(calls)) == ("COMPLETED", 3, 3)
    await broker.publish(2, "q")
    assert [row["state"] for row in await look.archived(2)] == ["COMPLETED"] * 2
    assert broker.subscribers[0].healthy  # type: ignore[attr-defined]
    assert not heard.texts("outside of the handler")

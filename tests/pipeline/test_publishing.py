"""A publish without options makes the row that FastStream's way makes, or raises the same."""

import dataclasses
import itertools
from typing import Any

import msgspec
import pytest
from fast_depends.msgspec import MsgSpecSerializer
from faststream import BaseMiddleware
from faststream.message import gen_cor_id
from faststream.response import Response
from pydantic import BaseModel

from faststream_sqlbroker import SqlBroker, SqlBrokerResponse
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.publisher.producer import SqlBrokerProducer
from faststream_sqlbroker.subscriber.pipeline import fingerprints
from faststream_sqlbroker.subscriber.pipeline.choice import VARIABLE
from tests.pipeline.seen import errors


class Model(BaseModel):
    a: int = 1


@dataclasses.dataclass
class Data:
    a: int = 1


class Struct(msgspec.Struct):
    a: int = 1


BODIES: dict[str, Any] = {
    "none": None,
    "bytes": b"\xff",
    "bytearray": bytearray(b"x"),
    "text": "ä",
    "surrogate": "\ud800",
    "dict": {"a": [1, None, 1.5]},
    "not a number": float("nan"),
    "model": Model(),
    "dataclass": Data(),
    "struct": Struct(),
    "list": [1, 2],
    "object": object(),
    "response": Response("r", headers={"h": 1}),
    "own response": SqlBrokerResponse("r", priority=3, headers={"h": 1}),
}
QUEUES: list[Any] = ["q", "", None, 5, "q" * 300, "a\x00b", " q"]


class Notes(BaseMiddleware):
    async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
        cmd.add_headers({"noted": True})
        return await call_next(cmd)


class Codec:
    async def encode(self, msg: Any, serializer: Any = None) -> tuple[bytes, str | None]:
        return repr(type(msg)).encode(), "text/own"

    async def decode(self, msg: Any) -> Any:
        return msg.body


BROKERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "middleware": {"middlewares": [Notes]},
    "codec": {"codec": Codec()},
    "ids": {"id_generator": lambda: "an id"},
    "serializer": {"serializer": MsgSpecSerializer(use_fastdepends_errors=False)},
    "no serializer": {"serializer": None},
}


async def connected(kind: str) -> tuple[SqlBroker, list[Any]]:
    """A broker whose rows go into the list."""
    broker = SqlBroker("sqlite+aiosqlite:///unused.db", logger=None, **BROKERS[kind])
    stored: list[Any] = []

    async def store(rows: Any, connection: Any = None, **_: Any) -> list[int]:
        stored.extend(rows if connection is None else [(row, connection) for row in rows])
        return [7] * len(rows)

    producer: Any = broker.config.producer
    producer._publisher.publish = store
    await broker.connect()
    return broker, stored


async def publish(
    broker: SqlBroker, stored: list[Any], body: Any, queue: Any, **options: Any
) -> Any:
    try:
        result: Any = await broker.publish(body, queue, **options)
    except Exception as error:
        result = errors(error)
    seen = result, list(stored)
    stored.clear()
    return seen


@pytest.mark.parametrize("kind", BROKERS)
async def test_every_body_and_queue_shows_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, stored = await connected(kind)
    monkeypatch.setenv(VARIABLE, "generic")
    generic, generic_stored = await connected(kind)
    assert generic._plain.find_producer(generic) is None
    is_plain = broker._plain.find_producer(broker) is not None
    assert is_plain is (kind in ("plain", "serializer", "no serializer"))
    for (name, body), queue in itertools.product(BODIES.items(), QUEUES):
        wanted = await publish(generic, generic_stored, body, queue)
        assert await publish(broker, stored, body, queue) == wanted, (name, queue)


class Transaction:
    """What is asked of a caller's connection before it is used."""

    sync_connection = None


class Synchronous:
    """A connection that `publish` refuses."""


GIVEN: list[dict[str, Any]] = [
    {"connection": Transaction()},
    {"session": Transaction()},
    {"connection": None},
    {"connection": Transaction(), "session": Transaction()},
    {"connection": Synchronous()},
    {"connection": Transaction(), "with_ack": True},
    {"session": None, "key": "k"},
    {"connection": Transaction(), "headers": {}},
    {"session": Transaction(), "delay": 1},
]


async def test_every_transaction_shows_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, stored = await connected("plain")
    monkeypatch.setenv(VARIABLE, "generic")
    generic, generic_stored = await connected("plain")
    for options, body, queue in itertools.product(GIVEN, [{"a": 1}, object()], ["q", ""]):
        wanted = await publish(generic, generic_stored, body, queue, **options)
        assert await publish(broker, stored, body, queue, **options) == wanted, options


async def test_a_publish_in_a_transaction_makes_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, stored = await connected("plain")
    monkeypatch.delattr(SqlBrokerProducer, "_encode_row")
    transaction = Transaction()
    assert await publish(broker, stored, {}, "q", connection=transaction) == (
        7,
        [(NewMessage("q", b"{}", '{"content-type": "application/json"}'), transaction)],
    )


async def test_a_middleware_that_is_added_later_sees_the_publish() -> None:
    broker, stored = await connected("plain")
    broker.add_middleware(Notes)
    _, [row] = await publish(broker, stored, {}, "q")
    assert "noted" in row.headers


async def test_replaced_methods_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    async def replacement(self: Any, cmd: Any) -> int:
        calls.append(cmd.destination)
        return 1

    broker, stored = await connected("plain")
    monkeypatch.setattr(SqlBrokerProducer, "publish", replacement)
    await publish(broker, stored, {}, "a")
    monkeypatch.undo()
    producer: Any = broker.config.producer
    producer.publish = replacement.__get__(producer)
    await publish(broker, stored, {}, "b")
    assert calls == ["a", "b"]


async def test_an_unknown_function_means_faststreams_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "_warned_groups", set())
    monkeypatch.setitem(fingerprints.KNOWN, "publishing", {})
    broker, stored = await connected("plain")
    assert broker._plain.find_producer(broker) is None
    result, [row] = await publish(broker, stored, {}, "q")
    assert (result, row.queue) == (7, "q")


async def test_no_correlation_id_is_made_without_a_generator() -> None:
    broker, _ = await connected("plain")
    assert broker.config.id_generator is gen_cor_id
    assert broker._plain.find_producer(broker) is not None

"""Bodies of every kind of type: Pydantic, msgspec, dataclasses, TypedDict, and unions of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

import msgspec
import pytest
from fast_depends.msgspec import MsgSpecSerializer
from faststream import Header
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncEngine
from typing_extensions import TypedDict

from faststream_sqlbroker import SqlBroker
from tests.faststream.conftest import KINDS as DATABASES
from tests.faststream.conftest import QUICK, Look, on_each
from tests.helpers import eventually

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


class Model(BaseModel):
    """Pydantic's."""

    number: int
    at: datetime
    tags: list[str] = []


class Struct(msgspec.Struct):
    """msgspec's."""

    number: int
    at: datetime
    tags: list[str] = []


@dataclass
class Data:
    """The standard library's."""

    number: int
    at: datetime
    tags: Sequence[str] = ()


class Typed(TypedDict):
    """A dict with types."""

    number: int
    at: datetime
    tags: list[str]


SERIALIZERS = {"pydantic": None, "msgspec": MsgSpecSerializer}
KINDS = [
    ("pydantic", Model),
    ("pydantic", Data),
    ("pydantic", Typed),
    ("msgspec", Struct),
    ("msgspec", Data),
    ("msgspec", Typed),
]


def broker_of(engine: AsyncEngine, serializer: str) -> SqlBroker:
    made = SERIALIZERS[serializer]
    return SqlBroker(engine, logger=None, **({} if made is None else {"serializer": made()}))


def value(body: Any, name: str) -> Any:
    return body[name] if isinstance(body, dict) else getattr(body, name)


@on_each("serializer, kind", KINDS[:1], KINDS[1:])
async def test_a_body_comes_back_as_its_type(
    engine: AsyncEngine, look: Look, serializer: str, kind: Any
) -> None:
    """Published, handled, answered and handled again; a batch holds the same."""
    broker = broker_of(engine, serializer)
    await broker.create_tables()
    got: list[Any] = []

    @broker.subscriber("in", **QUICK)
    @broker.publisher("out")
    async def handle(body: kind) -> kind:
        got.append(body)
        return body

    @broker.subscriber("out", batch=True, **QUICK)
    async def batch(bodies: list[kind]) -> None:
        got.extend(bodies)

    await broker.start()
    await broker.publish(kind(number=5, at=AT, tags=["a", "ä"]), "in")
    await look.archived(2)
    await broker.stop()
    assert len(got) == 2
    for body in got:
        # A TypedDict is a dict at run time.
        assert isinstance(body, dict if kind is Typed else kind)
        assert (value(body, "number"), value(body, "at")) == (5, AT)
        assert list(value(body, "tags")) == ["a", "ä"]


@pytest.mark.parametrize("database", DATABASES, indirect=True)
async def test_bytes_that_are_no_text_come_back(engine: AsyncEngine, look: Look) -> None:
    """Published, handled, answered, handled again, and kept."""
    broker = broker_of(engine, "pydantic")
    await broker.create_tables()
    body = bytes(range(256)) + b"\xff\xfe"
    got: list[Any] = []

    @broker.subscriber("in", **QUICK)
    @broker.publisher("out")
    async def handle(body: bytes) -> bytes:
        got.append(body)
        return body

    @broker.subscriber("out", batch=True, **QUICK)
    async def batch(bodies: list[bytes]) -> None:
        got.extend(bodies)

    await broker.start()
    await broker.publish(body, "in")
    rows = await look.archived(2)
    await broker.stop()
    assert got == [body, body]
    assert [bytes(row["payload"]) for row in rows] == [body, body]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("serializer", "kind"), KINDS)
@pytest.mark.parametrize("batch", [False, True])
async def test_a_body_that_does_not_fit_is_failed_at_once(
    engine: AsyncEngine, look: Look, serializer: str, kind: Any, batch: bool
) -> None:
    broker = broker_of(engine, serializer)
    await broker.create_tables()
    got: list[Any] = []
    parameter = list[kind] if batch else kind

    @broker.subscriber("in", batch=batch, **QUICK)
    async def handle(body: parameter) -> None:  # type: ignore[valid-type]
        got.extend(body if batch else [body])

    good = {"number": 5, "at": AT.isoformat(), "tags": []}
    await broker.publish_batch(good, {"number": "x"}, good, queue="in")
    await broker.start()
    rows = await look.archived(3)
    await broker.stop()
    assert [row["reason"] for row in rows] == [None, "invalid_body", None]
    assert [value(body, "number") for body in got] == [5, 5]


class OrderV1(BaseModel):
    """The first form."""

    name: str


class OrderV2(BaseModel):
    """The second form."""

    first_name: str
    last_name: str


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_forms_by_header(engine: AsyncEngine, look: Look) -> None:
    """One subscriber, one handler for each version; an unknown one is no message of either."""
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    got: list[Any] = []
    orders = broker.subscriber("orders", **QUICK)

    def version(wanted: str) -> Any:
        async def fits(message: Any) -> bool:
            return bool(message.headers.get("version", "1") == wanted)

        return fits

    @orders(filter=version("1"))
    async def first(order: OrderV1) -> None:
        got.append(order)

    @orders(filter=version("2"))
    async def second(order: OrderV2, version: Annotated[str, Header()]) -> None:
        got.append((version, order))

    await broker.start()
    await broker.publish({"name": "Ada"}, "orders")
    await broker.publish(
        {"first_name": "Ada", "last_name": "L"}, "orders", headers={"version": "2"}
    )
    await broker.publish({}, "orders", headers={"version": "3"})

    async def all_tried() -> bool:
        states = {row["state"] for row in await look.rows()}
        return not states & {"PENDING", "PROCESSING"}

    await eventually(all_tried)
    await broker.stop()
    assert len(got) == 2
    assert OrderV1(name="Ada") in got
    assert ("2", OrderV2(first_name="Ada", last_name="L")) in got


class Paid(BaseModel):
    """One kind of event."""

    kind: Literal["paid"] = "paid"
    amount: int


class Sent(BaseModel):
    """Another."""

    kind: Literal["sent"] = "sent"
    parcel: str


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_tagged_union(engine: AsyncEngine, look: Look) -> None:
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    got: list[Any] = []

    @broker.subscriber("events", **QUICK)
    async def handle(event: Annotated[Paid | Sent, Field(discriminator="kind")]) -> None:
        got.append(event)

    await broker.start()
    await broker.publish(Paid(amount=3), "events")
    await broker.publish(Sent(parcel="x"), "events")
    await broker.publish({"kind": "lost"}, "events")
    rows = await look.archived(3)
    await broker.stop()
    assert [row["reason"] for row in rows] == [None, None, "invalid_body"]
    assert sorted(got, key=str) == sorted([Paid(amount=3), Sent(parcel="x")], key=str)

"""Payloads as values, for all bytes and headers that a row may hold (D4)."""

import json
from datetime import date, datetime, timezone
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, Optional
from uuid import UUID

import pytest
from pydantic import (
    AliasChoices,
    AliasPath,
    AwareDatetime,
    BaseModel,
    Field,
    NaiveDatetime,
    PositiveInt,
    RootModel,
    create_model,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, LongType, StructType
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker import decode_payload, read_archive, struct_of
from pyspark_sqlbroker.load.body_texts import to_json_text
from tests.spark.conftest import Archive
from tests.spark.frames import plain_frame

JSON = '{"content-type": "application/json"}'
ROWS = "headers string, payload binary"
BROKEN = [
    '{"a": 1',
    '{"a": 1} x',
    '{"a": 1}, {"a": 2}',
    "1} x",
    "1] [2",
    '{"a": 1}}',
    "{'a': 1}",
    "",
    " ",
    "\x00",
    '{"a": 1},',
    '{"a": 1}\x00',
    "nul",
    '"x',
    "[1, 2",
    '{"a": 1},"b":2',
    '{"a": 1},"v":{"a":2}',
    '{"a": 1},"s":2',
    '1,"b":2',
    '"x","b":{}',
    '[1],"b":[2',
    '[1],"v":[2]',
    "1,2",
    "1],[2",
    "1]",
    '1],"b":[2',
    'null,"b":1',
]


def decoded(
    spark: SparkSession, rows: list[tuple[str | None, bytes]], schema: Any = "variant"
) -> list[Any]:
    """(body as a Python value, error) of each row."""
    frame = decode_payload(plain_frame(spark, rows, ROWS), schema, error="error")
    found = [
        (row.body.toPython() if hasattr(row.body, "toPython") else row.body, row.error)
        for row in frame.collect()
    ]
    if schema == "variant":
        texts = [to_json_text(payload, headers) for headers, payload in rows]
        assert [text is None for text in texts] == [error is not None for _, error in found]
    return found


def one(spark: SparkSession, text: str, schema: Any) -> Any:
    """(body as a plain value, error) of a JSON body."""
    frame = decode_payload(plain_frame(spark, [(JSON, text.encode())], ROWS), schema, error="error")
    row = frame.first()
    body = row.body.asDict(recursive=True) if hasattr(row.body, "asDict") else row.body
    return body, row.error


def test_the_content_type_decides(spark: SparkSession) -> None:
    """Any case, any parameters; what is neither JSON nor text is left alone; no header is
    FastStream's default."""
    body = b'{"a": [1, null]}'
    value = {"a": [1, None]}
    text = body.decode()
    rows = [
        (JSON, value, None),
        ('{"Content-Type": "Application/JSON; Charset=UTF-8"}', value, None),
        (
            '{"x": {"content-type": "no"}, "CONTENT-TYPE": " application/vnd.api+json "}',
            value,
            None,
        ),
        ('{"content-type": "text/plain"}', text, None),
        ('{"content-type": "TEXT/html;charset=utf-8"}', text, None),
        ('{"content-type": "application/octet-stream"}', None, "content_type"),
        ('{"content-type": "application/jsonx"}', None, "content_type"),
        ('{"content-type": "image/svg+xml"}', None, "content_type"),
        ('{"content-type": 5}', None, "content_type"),
        ('{"content-type": null, "x": 1}', value, None),
        ("{}", value, None),
        (None, value, None),
        ("[1]", value, None),
        ("{broken", value, None),
        ('{"a": 1, "a": 2}', value, None),
    ]
    assert decoded(spark, [(headers, body) for headers, _, _ in rows]) == [
        (v, e) for _, v, e in rows
    ]


def test_nothing_broken_becomes_a_value_or_an_error(spark: SparkSession) -> None:
    """D4: bytes that are no UTF-8, and JSON that is cut, followed by something or in another
    notation, are NULL."""
    binary = [b"\xff\xfe", b'"\xc3"', b'{"a": "\xed\xa0\x80"}', bytes(range(256))]
    texts = '{"content-type": "text/plain"}'
    rows = [(JSON, payload) for payload in binary] + [(texts, payload) for payload in binary]
    assert decoded(spark, rows) == [(None, "not_utf8")] * len(rows)
    for schema in ("variant", "a INT", "array<int>", "string", "int"):
        found = decoded(spark, [(JSON, text.encode()) for text in BROKEN], schema)
        assert found == [(None, "not_json")] * len(BROKEN), schema


def test_variants_hold_any_json(spark: SparkSession) -> None:
    values = [
        0,
        -1.5,
        True,
        "é\U0001f600",
        "",
        [],
        {},
        [[{"a": None}]],
        {"s": 1, "v": {"s": 2}},
        2**62,
    ]
    rows = [(JSON, json.dumps(value).encode()) for value in values]
    assert decoded(spark, rows) == [(value, None) for value in values]
    frame = decode_payload(
        plain_frame(spark, [(JSON, b"null"), (JSON, b' {"user": {"id": "7"}} \n')], ROWS)
    )
    null, user = frame.selectExpr(
        "is_variant_null(body) AS n", "try_variant_get(body, '$.user.id', 'int') AS i"
    ).collect()
    assert (null.n, null.i, user.n, user.i) == (True, None, False, 7)


def test_a_schema_takes_what_fits_it_whole(spark: SparkSession) -> None:
    """D4: a body of another shape is NULL, not a row of NULLs; missing fields are NULL, others are
    left out."""
    assert one(spark, '{"a": 1, "b": "x", "c": 2}', "a INT, b STRING") == ({"a": 1, "b": "x"}, None)
    assert one(spark, '{"b": "x"}', "a INT, b STRING") == ({"a": None, "b": "x"}, None)
    assert one(spark, "[1, 2]", ArrayType(LongType())) == ([1, 2], None)
    others = [
        '{"a": "x", "b": "y"}',
        '{"a": 1.5}',
        '{"a": 99999999999}',
        '{"a": {}}',
        "[]",
        "5",
        "null",
        '"x"',
    ]
    others += [
        '{"o": {"a": "x"}}',
        '{"o": {"m": {"k": "x"}}}',
        '{"o": {"l": [{"n": 1}, {"n": "x"}]}}',
    ]
    nested = "a INT, b STRING, o STRUCT<a: INT, m: MAP<STRING, INT>, l: ARRAY<STRUCT<n: INT>>>"
    found = decoded(spark, [(JSON, text.encode()) for text in others], nested)
    assert found == [(None, "mismatch")] * len(others)
    assert one(spark, '[1, "x"]', "array<int>") == (None, "mismatch")
    text = [('{"content-type": "text/plain"}', b"hello")]
    assert decoded(spark, text, "string") == [("hello", None)]
    assert decoded(spark, text, "a INT") == [(None, "mismatch")]


def test_columns_are_those_asked_for(spark: SparkSession) -> None:
    frame = plain_frame(spark, [(JSON, b'{"a": 1}', 7)], f"{ROWS}, id long")
    assert decode_payload(frame).columns == ["headers", "payload", "id", "body"]
    other = decode_payload(frame, "a INT", column="the body", error="why not")
    assert other.drop("headers", "payload").first().asDict(recursive=True) == {
        "id": 7,
        "the body": {"a": 1},
        "why not": None,
    }
    with pytest.raises(SetupError, match=r"lacks \['headers'\]"):
        decode_payload(frame.drop("headers"))
    for schema in (5, None, "a NOTHING", dict):
        with pytest.raises(SetupError, match="schema"):
            decode_payload(frame, schema)


class Colour(Enum):
    RED = "red"


class Line(BaseModel):
    price: Decimal = Field(max_digits=9, decimal_places=2)
    count: PositiveInt = 1


class Order(BaseModel):
    number: int = Field(alias="order-no")
    lines: list[Line]
    placed: AwareDatetime
    local: NaiveDatetime
    day: date
    customer: UUID
    colour: Colour
    kind: Literal["a", "b", None] = None  # noqa: PYI061 - both spellings
    note: Optional[str] = None  # noqa: UP045 - both spellings
    rate: float | None = None
    scores: dict[str, Annotated[Decimal, Field(max_digits=5, decimal_places=1)]] = {}
    raw: bytes = b""
    extra: Any = None
    flags: tuple[bool, ...] = ()
    moment: datetime | None = None
    chosen: str = Field("", validation_alias=AliasChoices("choice", "pick"))


def test_a_model_is_a_schema(spark: SparkSession) -> None:
    """What Pydantic writes of a model is what Spark reads with its schema, in a session of any
    zone."""
    order = Order.model_validate(
        {
            "order-no": 1,
            "lines": [{"price": "1234567.89"}],
            "placed": "2026-03-08T02:30:00.123456-05:00",
            "local": "2026-03-08T02:30:00.5",
            "day": "2026-11-01",
            "customer": UUID(int=5),
            "colour": "red",
            "kind": "b",
            "rate": 0.1,
            "scores": {"x": "12.5"},
            "raw": b"text",
            "extra": {"k": [1]},
            "flags": [True],
            "moment": "2026-03-08T02:30:00",
            "choice": "c",
        }
    )
    body, error = one(
        spark, json.dumps(order.model_dump(mode="json", by_alias=True) | {"choice": "c"}), Order
    )
    assert error is None
    assert body.pop("extra").toPython() == {"k": [1]}
    stamps = {name: body.pop(name).astimezone(timezone.utc) for name in ("placed", "moment")}
    assert stamps == {
        "placed": datetime(2026, 3, 8, 7, 30, 0, 123456, timezone.utc),
        "moment": datetime(2026, 3, 8, 2, 30, tzinfo=timezone.utc),
    }
    assert body == {
        "order-no": 1,
        "lines": [{"price": Decimal("1234567.89"), "count": 1}],
        "local": datetime(2026, 3, 8, 2, 30, 0, 500000),
        "day": date(2026, 11, 1),
        "customer": str(UUID(int=5)),
        "colour": "red",
        "kind": "b",
        "note": None,
        "rate": 0.1,
        "scores": {"x": Decimal("12.5")},
        "raw": "text",
        "flags": [True],
        "choice": "c",
    }


def test_a_field_that_is_there_twice(spark: SparkSession) -> None:
    """No VARIANT, and a schema takes the last, as the docstring says."""
    twice = '{"a": 1, "a": 2}'
    assert one(spark, twice, "variant") == (None, "not_json")
    assert one(spark, twice, "a INT") == ({"a": 2}, None)


def test_the_room_of_decimals_without_places(spark: SparkSession) -> None:
    model = create_model("Wide", x=(Annotated[Decimal, Field(max_digits=30)], ...))
    assert struct_of(model).simpleString() == "struct<x:decimal(38,18)>"
    assert one(spark, f'{{"x": {"9" * 20}}}', model) == ({"x": Decimal("9" * 20)}, None)
    assert one(spark, f'{{"x": {"9" * 21}}}', model) == (None, "mismatch")
    assert one(spark, '{"x": 0.1234567890123456785}', model) == (
        {"x": Decimal("0.123456789012345679")},
        None,
    )


def test_struct_of_types() -> None:
    assert struct_of(Order).simpleString() == (
        "struct<order-no:bigint,lines:array<struct<price:decimal(9,2),count:bigint>>,"
        "placed:timestamp,local:timestamp_ntz,day:date,customer:string,colour:string,kind:string,"
        "note:string,rate:double,scores:map<string,decimal(5,1)>,raw:string,extra:variant,"
        "flags:array<boolean>,moment:timestamp,choice:string>"
    )
    assert struct_of(Order, by_alias=False).names[0] == "number"
    assert all(field.nullable for field in struct_of(Order))
    free = create_model(
        "Free",
        plain=(Decimal, ...),
        places=(Annotated[Decimal, Field(decimal_places=3)] | None, None),
    )
    assert struct_of(free).simpleString() == "struct<plain:decimal(38,18),places:decimal(38,3)>"


class Tags(RootModel[list[str]]):
    pass


class Price(RootModel[Annotated[Decimal, Field(max_digits=9, decimal_places=2)]]):
    pass


class Item(BaseModel):
    tags: Tags
    prices: dict[str, Price] = {}
    one: RootModel[Line] | None = None


def test_a_root_model_is_its_root(spark: SparkSession) -> None:
    """Its JSON has no field of that name."""
    item = Item(
        tags=Tags(["a"]),
        prices={"x": Price(Decimal("1.50"))},
        one=RootModel[Line](Line(price=Decimal(2))),
    )
    body, error = one(spark, item.model_dump_json(), Item)
    assert error is None
    assert body == {
        "tags": ["a"],
        "prices": {"x": Decimal("1.50")},
        "one": {"price": Decimal(2), "count": 1},
    }
    assert struct_of(Item).simpleString() == (
        "struct<tags:array<string>,prices:map<string,decimal(9,2)>,"
        "one:struct<price:decimal(9,2),count:bigint>>"
    )
    for model in (Tags, RootModel[Line]):
        with pytest.raises(
            SetupError, match=r"is a RootModel, .*: give the model of the root, or .* the DDL"
        ):
            struct_of(model)


class Forest(RootModel[list["Forest"]]):
    pass


class Land(BaseModel):
    forest: Forest


class Tree(BaseModel):
    children: list["Tree"]


@pytest.mark.parametrize(
    "annotation",
    [
        complex,
        int | str,
        tuple[int, str],
        dict[int, str],
        Literal["a", 1],
        list,
        type(None),
        object(),
    ],
)
def test_types_without_a_counterpart_are_named(annotation: Any) -> None:
    class Bad(BaseModel):
        model_config = {"arbitrary_types_allowed": True}

    Bad.model_fields["odd"] = Field()
    Bad.model_fields["odd"].annotation = annotation
    outer = create_model("Outer", inner=(list[Bad] | None, None))
    with pytest.raises(
        SetupError,
        match=r"Outer\.inner\.odd is annotated .* no counterpart in Spark: annotate it as Any",
    ):
        struct_of(outer)


def test_models_that_cannot_be_a_schema() -> None:
    with pytest.raises(SetupError, match=r"Tree\.children: Tree contains itself"):
        struct_of(Tree)
    with pytest.raises(SetupError, match=r"Land\.forest: Forest contains itself"):
        struct_of(Land)
    path = create_model("Path", x=(int, Field(validation_alias=AliasPath("a", 0))))
    with pytest.raises(SetupError, match=r"Path\.x is read from a path"):
        struct_of(path)
    long = create_model("Long", x=(Annotated[Decimal, Field(max_digits=39, decimal_places=2)], ...))
    with pytest.raises(SetupError, match=r"Long\.x has decimals of 39 digits"):
        struct_of(long)
    body = Order.model_construct(raw="x" * 1000)
    for other in (int, body, StructType()):
        with pytest.raises(SetupError, match=r"takes a Pydantic model class, got .{1,80}$"):
            struct_of(other)  # type: ignore[arg-type]


def collect(frame: DataFrame) -> list[Any]:
    return [
        row.body.toPython() if row.body is not None else None
        for row in frame.orderBy("id").collect()
    ]


async def test_what_the_broker_publishes(spark: SparkSession, archive: Archive) -> None:
    """D4: bodies of every kind that FastStream encodes, decoded by the headers in the database."""
    bodies = [{"a": [1, "é"]}, "text", b'{"b": 2}', b"\xff", [1, 2], None]
    engine = create_async_engine(archive.url)
    broker = SqlBroker(engine, logger=None)
    async with broker:
        for body in bodies:
            await broker.publish(body, "orders")
        await broker.publish(
            {"x": 1}, "orders", headers={"content-type": "application/x; charset=utf-8"}
        )
    await engine.dispose()
    moved = (
        "INSERT INTO message_archive (id, queue, priority, headers, payload, state, "
        "attempts_count, deliveries_count, publish_count, created_at, next_attempt_at, "
        "archived_at) SELECT id, queue, priority, headers, payload, 'COMPLETED', 1, 1, 1, "
        "created_at, next_attempt_at, created_at FROM message"
    )
    archive.execute(moved)
    frame = read_archive(spark, archive.url, decode="variant")
    assert collect(frame) == [{"a": [1, "é"]}, "text", {"b": 2}, None, [1, 2], None, None]

"""publish, publish_batch, publish_sync: values, refusals, and the caller's transaction."""

import asyncio
import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from faststream_sqlbroker import (
    PublishError,
    SetupError,
    SqlBroker,
    SqlBrokerResponse,
)
from faststream_sqlbroker.publisher.rows import MAX_HEADER_DEPTH, MAX_HEADER_NAME, MAX_NUMBER
from tests.faststream.conftest import Look


def headers_of(row: dict[str, Any]) -> Any:
    headers = row["headers"]
    return json.loads(headers) if isinstance(headers, str) else headers


async def test_publishing_needs_no_start(broker: SqlBroker, look: Look) -> None:
    message_id = await broker.publish({"a": 1}, "q")
    row = await look.in_state("PENDING")
    assert row["id"] == message_id
    assert json.loads(bytes(row["payload"])) == {"a": 1}
    assert headers_of(row) == {"content-type": "application/json"}
    assert row["priority"] == 0


@pytest.mark.parametrize(
    ("body", "payload", "headers"),
    [
        (b"raw", b"raw", None),
        (None, b"", None),
        ("text", b"text", {"content-type": "text/plain"}),
    ],
)
async def test_bodies_of_each_type_are_encoded(
    broker: SqlBroker, look: Look, body: Any, payload: bytes, headers: Any
) -> None:
    await broker.publish(body, "q")
    row = await look.in_state("PENDING")
    assert bytes(row["payload"]) == payload
    assert headers_of(row) == headers


@pytest.mark.capability("delay, priority, key, deduplication, expiry")
async def test_every_option_is_stored(broker: SqlBroker, look: Look) -> None:
    await broker.publish(
        "x",
        "q",
        headers={"content-type": "mine", "n": [1, None]},
        correlation_id="c",
        reply_to="r",
        priority=-7,
        key="k",
        dedup_id="d",
        delay="1h",
        expires_in=timedelta(hours=2),
    )
    row = await look.in_state("PENDING")
    assert headers_of(row) == {
        "content-type": "mine",
        "correlation_id": "c",
        "reply_to": "r",
        "n": [1, None],
    }
    assert (row["priority"], row["key"], row["dedup_id"]) == (-7, "k", "d")
    assert row["next_attempt_at"] - row["created_at"] >= timedelta(minutes=59)
    assert row["expires_at"] > row["next_attempt_at"]


async def test_next_attempt_at_is_the_due_time(broker: SqlBroker, look: Look) -> None:
    moment = datetime(2050, 1, 1, tzinfo=timezone(timedelta(hours=5)))
    await broker.publish("x", "q", next_attempt_at=moment)
    assert (await look.in_state("PENDING"))["next_attempt_at"] == moment


async def test_a_dedup_id_is_published_once(broker: SqlBroker, look: Look) -> None:
    first = await broker.publish("x", "q", dedup_id="once")
    assert first is not None
    assert await broker.publish("y", "q", dedup_id="once") is None
    assert await broker.publish("y", "other", dedup_id="once") is not None
    assert len(await look.rows()) == 2


def nested(levels: int) -> dict[str, Any]:
    """Headers of so many levels."""
    value: Any = 1
    for _ in range(levels - 1):
        value = [value]
    return {"a": value}


REFUSED: list[dict[str, Any]] = [
    {"queue": ""},
    {"queue": 5},
    {"queue": "q" * 256},
    {"queue": "q "},
    {"queue": "a\x00b"},
    {"priority": 101},
    {"priority": True},
    {"key": ""},
    {"key": "k" * 256},
    {"key": 5},
    {"dedup_id": "d\x00"},
    {"dedup_id": "d "},
    {"dedup_id": "\ud800"},
    {"delay": True},
    {"priority": "5.0"},
    {"delay": "soon"},
    {"delay": float("nan")},
    {"expires_in": 0},
    {"next_attempt_at": datetime(2050, 1, 1)},
    {"next_attempt_at": "tomorrow"},
    {"next_attempt_at": timedelta.max},
    {"delay": 1, "next_attempt_at": "2h45m"},
    {"next_attempt_at": datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-12)))},
    {"next_attempt_at": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=12)))},
    {"next_attempt_at": -1e12},
    {"next_attempt_at": 1e12},
    {"delay": 1, "next_attempt_at": datetime(2050, 1, 1, tzinfo=timezone.utc)},
    {"headers": {"a": b"bytes"}},
    {"headers": {"a": float("inf")}},
    {"headers": {5: "a"}},
    {"headers": {"a": "\x00"}},
    {"headers": {"a": ["\ud800"]}},
    {"headers": "a"},
    {"headers": nested(MAX_HEADER_DEPTH + 1)},
    {"headers": {"a": [MAX_NUMBER + 1]}},
    {"headers": {"a": {"ä" * (MAX_HEADER_NAME // 2 + 1): 1}}},
]


@pytest.mark.parametrize("moment", ["2h45m", timedelta(hours=2.75), "1.h6300.s"])
async def test_p13_a_moment_may_be_a_length_of_time_from_now(
    broker: SqlBroker, look: Look, moment: str | timedelta
) -> None:
    """P13 and P1: it counts from the publish, by the database's clock."""
    await broker.publish("x", "q", next_attempt_at=moment)
    row = await look.in_state("PENDING")
    assert row["next_attempt_at"] - row["created_at"] == timedelta(hours=2, minutes=45)


@pytest.mark.parametrize(
    "options",
    [{"delay": -1}, {"delay": "-1.5h"}, {"next_attempt_at": "-1h"}, {"next_attempt_at": -1.0}],
)
async def test_p13_a_negative_delay_is_due_at_once(
    broker: SqlBroker, look: Look, options: dict[str, Any]
) -> None:
    """P13."""
    await broker.publish("x", "q", **options)
    row = await look.in_state("PENDING")
    assert row["next_attempt_at"] <= row["created_at"]
    assert await broker.pop("q") is not None


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("wrong", REFUSED, ids="-".join)
async def test_refusals_write_nothing(broker: SqlBroker, look: Look, wrong: dict[str, Any]) -> None:
    arguments = {"queue": "q", **wrong}
    with pytest.raises(PublishError):
        await broker.publish("x", **arguments)
    with pytest.raises(PublishError):
        await broker.publish_batch("x", "y", **arguments)
    assert await look.rows() == []


async def test_headers_at_their_limits_are_stored(broker: SqlBroker, look: Look) -> None:
    """What one database refuses, all refuse; the rest all store."""
    for headers in (
        nested(MAX_HEADER_DEPTH),
        {"a": [MAX_NUMBER, -MAX_NUMBER]},
        {"n" * MAX_HEADER_NAME: {"b": 1}},
    ):
        await broker.publish("x", "q", headers=headers)
    assert len(await look.rows()) == 3


async def test_a_batch_is_all_or_nothing(broker: SqlBroker, look: Look) -> None:
    with pytest.raises(PublishError):
        await broker.publish_batch("x", SqlBrokerResponse("y", priority=1000), queue="q")
    assert await look.rows() == []


async def test_a_batch_is_published(broker: SqlBroker, look: Look) -> None:
    ids = await broker.publish_batch(
        "a",
        SqlBrokerResponse("b", queue="other", headers={"x": 2}, priority=3, key="k", delay=60),
        None,
        queue="q",
        headers={"x": 1, "y": 1},
        priority=1,
    )
    rows = await look.rows()
    assert [row["id"] for row in rows] == sorted(i for i in ids if i is not None)
    by_id = {row["id"]: row for row in rows}
    first, second, third = (by_id[i] for i in ids)  # type: ignore[index]
    assert [bytes(r["payload"]) for r in (first, second, third)] == [b"a", b"b", b""]
    assert [r["queue"] for r in (first, second, third)] == ["q", "other", "q"]
    assert [r["priority"] for r in (first, second, third)] == [1, 3, 1]
    assert headers_of(second)["x"] == 2
    assert headers_of(second)["y"] == 1
    assert second["key"] == "k"
    assert second["next_attempt_at"] > first["next_attempt_at"]


async def test_an_empty_batch_publishes_nothing(broker: SqlBroker) -> None:
    assert await broker.publish_batch(queue="q") == []


async def test_duplicates_in_a_batch_are_published_once(broker: SqlBroker) -> None:
    twice = [SqlBrokerResponse(n, dedup_id="same") for n in range(2)]
    ids = await broker.publish_batch(*twice, queue="q")
    assert [i is None for i in ids] == [False, True]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_publisher_that_starts_a_batch_with_none(broker: SqlBroker, look: Look) -> None:
    publisher = broker.publisher("q")
    assert len(await publisher.publish_batch(None, "b")) == 2
    assert [bytes(row["payload"]) for row in await look.rows()] == [b"", b"b"]


@pytest.mark.capability("publishing in the caller's transaction")
@pytest.mark.parametrize("commit", [True, False])
async def test_a_publish_joins_the_callers_connection(
    broker: SqlBroker, engine: AsyncEngine, look: Look, commit: bool
) -> None:
    async with engine.connect() as connection:
        transaction = await connection.begin()
        assert await broker.publish("x", "q", connection=connection) is not None
        assert len(await broker.publish_batch("y", "z", queue="q", connection=connection)) == 2
        await (transaction.commit() if commit else transaction.rollback())
    assert len(await look.rows()) == (3 if commit else 0)


@pytest.mark.parametrize("commit", [True, False])
async def test_a_publish_joins_the_callers_session(
    broker: SqlBroker, engine: AsyncEngine, look: Look, commit: bool
) -> None:
    async with AsyncSession(engine) as session:
        await broker.publish("x", "q", session=session)
        await broker.publish("y", "q", connection=session)
        await broker.publisher("q").publish("z", session=session)
        await (session.commit() if commit else session.rollback())
    assert len(await look.rows()) == (3 if commit else 0)


async def test_one_transaction_at_most(broker: SqlBroker, engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session, engine.connect() as connection:
        with pytest.raises(PublishError, match="only one of"):
            await broker.publish("x", "q", connection=connection, session=session)


async def test_a_publish_in_an_ended_transaction_is_refused(
    broker: SqlBroker, engine: AsyncEngine
) -> None:
    async with engine.connect() as connection:
        pass
    with pytest.raises(PublishError):
        await broker.publish("x", "q", connection=connection)


SYNC_DRIVERS = {
    "sqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "mariadb": "mariadb+pymysql",
    "mysql": "mysql+pymysql",
}


@pytest.mark.capability("publishing from synchronous code")
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("kind", ["connection", "session"])
async def test_publish_sync_joins_a_synchronous_transaction(
    broker: SqlBroker, database: str, database_url: str, look: Look, kind: str, commit: bool
) -> None:
    engine = create_engine(make_url(database_url).set(drivername=SYNC_DRIVERS[database]))
    opened: Any = engine.connect() if kind == "connection" else Session(engine)
    with opened as transaction:
        options: Any = {kind: transaction, "priority": 2}
        assert isinstance(broker.publish_sync({"a": 1}, "q", **options), int)
        transaction.commit() if commit else transaction.rollback()
    engine.dispose()
    assert [row["priority"] for row in await look.rows()] == ([2] if commit else [])


async def test_publish_sync_needs_a_transaction(broker: SqlBroker, engine: AsyncEngine) -> None:
    with pytest.raises(PublishError, match="connection="):
        broker.publish_sync("x", "q")
    async with engine.connect() as connection:
        with pytest.raises(PublishError, match="publish_sync"):
            await broker.publish("x", "q", connection=connection.sync_connection)  # type: ignore[typeddict-item]


def test_a_naive_moment_in_a_response() -> None:
    with pytest.raises(SetupError, match="time zone"):
        SqlBrokerResponse("x", next_attempt_at=datetime(2050, 1, 1))


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_publisher_headers_go_under_the_calls(broker: SqlBroker, look: Look) -> None:
    own = {"a": 1, "b": 1}
    given = {"b": 2}
    publisher = broker.publisher("q", headers=own)
    await publisher.publish("x", headers=given)
    assert headers_of(await look.in_state("PENDING")) == {
        "content-type": "text/plain",
        "a": 1,
        "b": 2,
    }
    assert (own, given) == ({"a": 1, "b": 1}, {"b": 2})


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_publisher_without_a_queue(broker: SqlBroker, look: Look) -> None:
    publisher = broker.publisher()
    with pytest.raises(PublishError):
        await publisher.publish("x")
    await publisher.publish("x", "given")
    assert (await look.in_state("PENDING"))["queue"] == "given"


class Endless:
    """Has no end, as JSON."""

    def __init__(self) -> None:
        self.items = [self]


@pytest.mark.parametrize(
    "body", [object(), Endless, "\ud800", {"a": "\ud800"}, ["x", {1: object()}]]
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_body_that_cannot_be_encoded_is_refused(
    broker: SqlBroker, look: Look, body: Any
) -> None:
    with pytest.raises(
        PublishError, match=f"a body of type {type(body).__name__} cannot be encoded"
    ):
        await broker.publish(body, "q")
    with pytest.raises(PublishError, match="cannot be encoded"):
        await broker.publish_batch("good", body, queue="q")
    synchronous = create_engine(make_url(look.engine.url).set(drivername="sqlite"))
    with synchronous.begin() as connection, pytest.raises(PublishError, match="cannot be encoded"):
        broker.publish_sync(body, "q", connection=connection)
    synchronous.dispose()
    assert await look.rows() == []


EARLY = [datetime(1, 1, 1, tzinfo=timezone.utc), datetime(999, 12, 31, tzinfo=timezone.utc), -5e10]


async def test_the_first_and_the_last_years(broker: SqlBroker, look: Look) -> None:
    """Not every database stores them: what is earlier is due at once, what is later never is."""
    for at in [*EARLY, datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=timezone.utc)]:
        await broker.publish(1, "q", next_attempt_at=at)
    ids = [row["id"] for row in await look.rows()]
    for expected in ids[: len(EARLY)]:
        message = await broker.pop("q")
        assert message is not None
        assert message.id == expected
    assert await broker.pop("q") is None


async def test_statements_and_publishes_on_one_connection_take_turns(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    """SQLAlchemy lets statements of several tasks wait for each other; a publish is one of them."""
    rounds = 5
    in_a_round = 4
    for n in range(rounds):
        async with engine.begin() as connection:
            await connection.execute(text("SELECT 1"))
            own = [connection.execute(text("SELECT 1")) for _ in range(in_a_round)]
            published = [broker.publish(n, "q", connection=connection) for _ in range(in_a_round)]
            await asyncio.gather(
                *(each for pair in zip(own, published, strict=True) for each in pair)
            )
    assert len(await look.rows()) == rounds * in_a_round


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_publish_waits_for_a_slow_statement_on_its_connection(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("SELECT 1"))
        slow = asyncio.ensure_future(connection.execute(text("SELECT pg_sleep(0.3)")))
        await asyncio.sleep(0)  # its statement is sent
        message_id = await broker.publish(1, "q", connection=connection)
        assert slow.done()
        await connection.execute(text("SELECT 1"))
    assert [row["id"] for row in await look.rows()] == [message_id]

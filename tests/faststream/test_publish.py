"""publish, publish_batch, publish_sync: values, refusals, and the caller's transaction."""

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from faststream_sqlbroker import NotSupportedError, PublishError, SetupError, SqlBroker, SqlBrokerResponse
from tests.faststream.conftest import Look


def headers_of(row: dict[str, Any]) -> Any:
    headers = row["headers"]
    return json.loads(headers) if isinstance(headers, str) else headers


async def test_without_a_start(broker: SqlBroker, look: Look) -> None:
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
async def test_bodies(broker: SqlBroker, look: Look, body: Any, payload: bytes, headers: Any) -> None:
    await broker.publish(body, "q")
    row = await look.in_state("PENDING")
    assert bytes(row["payload"]) == payload
    assert headers_of(row) == headers


@pytest.mark.capability("delay, priority, key, deduplication, expiry")
async def test_every_option(broker: SqlBroker, look: Look) -> None:
    await broker.publish(
        "x", "q", headers={"content-type": "mine", "n": [1, None]}, correlation_id="c", reply_to="r",
        priority=-7, key="k", dedup_id="d", delay="1h", expires_in=timedelta(hours=2),
    )  # fmt: skip
    row = await look.in_state("PENDING")
    assert headers_of(row) == {
        "content-type": "mine", "correlation_id": "c", "reply_to": "r", "n": [1, None],
    }  # fmt: skip
    assert (row["priority"], row["key"], row["dedup_id"]) == (-7, "k", "d")
    assert row["next_attempt_at"] - row["created_at"] >= timedelta(minutes=59)
    assert row["expires_at"] > row["next_attempt_at"]


async def test_a_moment(broker: SqlBroker, look: Look) -> None:
    moment = datetime(2050, 1, 1, tzinfo=timezone(timedelta(hours=5)))
    await broker.publish("x", "q", next_attempt_at=moment)
    assert (await look.in_state("PENDING"))["next_attempt_at"] == moment


async def test_deduplication(broker: SqlBroker, look: Look) -> None:
    first = await broker.publish("x", "q", dedup_id="once")
    assert first is not None
    assert await broker.publish("y", "q", dedup_id="once") is None
    assert await broker.publish("y", "other", dedup_id="once") is not None
    assert len(await look.rows()) == 2


REFUSED: list[dict[str, Any]] = [
    {"queue": ""},
    {"queue": 5},
    {"queue": "q" * 256},
    {"queue": "q "},
    {"queue": "a\x00b"},
    {"priority": 101},
    {"priority": True},
    {"priority": "5"},
    {"key": ""},
    {"key": "k" * 256},
    {"key": 5},
    {"dedup_id": "d\x00"},
    {"dedup_id": "d "},
    {"dedup_id": "\ud800"},
    {"delay": -1},
    {"delay": "soon"},
    {"delay": float("nan")},
    {"expires_in": 0},
    {"next_attempt_at": datetime(2050, 1, 1)},
    {"next_attempt_at": "tomorrow"},
    {"delay": 1, "next_attempt_at": datetime(2050, 1, 1, tzinfo=timezone.utc)},
    {"headers": {"a": b"bytes"}},
    {"headers": {"a": float("inf")}},
    {"headers": {5: "a"}},
    {"headers": {"a": "\x00"}},
    {"headers": {"a": ["\ud800"]}},
    {"headers": "a"},
]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("wrong", REFUSED, ids="-".join)
async def test_refusals_write_nothing(broker: SqlBroker, look: Look, wrong: dict[str, Any]) -> None:
    arguments = {"queue": "q", **wrong}
    with pytest.raises(PublishError):
        await broker.publish("x", **arguments)
    with pytest.raises(PublishError):
        await broker.publish_batch("x", "y", **arguments)
    assert await look.rows() == []


async def test_a_batch_is_all_or_nothing(broker: SqlBroker, look: Look) -> None:
    with pytest.raises(PublishError):
        await broker.publish_batch("x", SqlBrokerResponse("y", priority=1000), queue="q")
    assert await look.rows() == []


async def test_a_batch(broker: SqlBroker, look: Look) -> None:
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


async def test_an_empty_batch(broker: SqlBroker) -> None:
    assert await broker.publish_batch(queue="q") == []


async def test_a_batch_with_duplicates(broker: SqlBroker) -> None:
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
async def test_in_the_callers_connection(
    broker: SqlBroker, engine: AsyncEngine, look: Look, commit: bool
) -> None:
    async with engine.connect() as connection:
        transaction = await connection.begin()
        assert await broker.publish("x", "q", connection=connection) is not None
        assert len(await broker.publish_batch("y", "z", queue="q", connection=connection)) == 2
        await (transaction.commit() if commit else transaction.rollback())
    assert len(await look.rows()) == (3 if commit else 0)


@pytest.mark.parametrize("commit", [True, False])
async def test_in_the_callers_session(
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


async def test_an_ended_transaction(broker: SqlBroker, engine: AsyncEngine) -> None:
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
async def test_publish_sync(
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


async def test_request_is_not_supported(broker: SqlBroker) -> None:
    with pytest.raises(NotSupportedError, match="reply_to"):
        await broker.request("x", "q")
    with pytest.raises(NotSupportedError):
        await broker.publisher("q").request("x")


def test_a_naive_moment_in_a_response() -> None:
    with pytest.raises(SetupError, match="time zone"):
        SqlBrokerResponse("x", next_attempt_at=datetime(2050, 1, 1))


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_publisher_headers_go_under_the_calls(broker: SqlBroker, look: Look) -> None:
    own, given = {"a": 1, "b": 1}, {"b": 2}
    publisher = broker.publisher("q", headers=own)
    await publisher.publish("x", headers=given)
    assert headers_of(await look.in_state("PENDING")) == {"content-type": "text/plain", "a": 1, "b": 2}
    assert (own, given) == ({"a": 1, "b": 1}, {"b": 2})


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_publisher_without_a_queue(broker: SqlBroker, look: Look) -> None:
    publisher = broker.publisher()
    with pytest.raises(PublishError):
        await publisher.publish("x")
    await publisher.publish("x", "given")
    assert (await look.in_state("PENDING"))["queue"] == "given"

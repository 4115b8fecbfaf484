"""forward_to=DESTINATION: a front door from which each message goes where its headers say."""

import json
import logging
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    DESTINATION,
    PublishError,
    SetupError,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerResponse,
    SqlBrokerSchemaConfig,
)
from faststream_sqlbroker.core.rows import NewMessage
from tests.faststream.conftest import QUICK, Heard, Look, on_each
from tests.faststream.test_forward import OPAQUE, all_in
from tests.helpers import eventually

pytestmark = pytest.mark.capability(
    "`destination=`: a front-door queue, then where the message says"
)


async def put(broker: SqlBroker, headers: Any) -> int:
    """Insert as a foreign producer does."""
    [message_id] = await broker.config.store.insert(
        [NewMessage("front", OPAQUE, json.dumps(headers))]
    )
    assert message_id is not None
    return message_id


async def test_p2_messages_move_to_the_destination_in_their_headers(
    broker: SqlBroker, look: Look
) -> None:
    """P2."""
    got: list[tuple[str, str]] = []
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)

    @broker.subscriber("x", "y", **QUICK)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        got.append((message.queue, body))

    await broker.start()
    await broker.publish("1", "front", destination="x")
    await broker.publish_batch(
        "2", SqlBrokerResponse("3", destination="x"), queue="front", destination="y"
    )
    rows = await look.archived(3)
    assert sorted(got) == [("x", "1"), ("x", "3"), ("y", "2")]
    assert {row["publish_count"] for row in rows} == {1}


@on_each(
    "headers",
    [None, {"destination": 5}, ["x"], "x"],
    [{}, {"destination": ""}, {"destination": "front"}],
)
async def test_p3_without_a_destination_nothing_is_lost(
    broker: SqlBroker, look: Look, heard: Heard, headers: Any
) -> None:
    """P3: archived as FAILED with its body, and an ERROR."""
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)
    await broker.start()
    message_id = await put(broker, headers)
    [row] = await look.archived()
    assert (row["id"], row["state"], row["reason"]) == (message_id, "FAILED", "no_destination")
    assert bytes(row["payload"]) == OPAQUE
    assert "destination" in row["last_error"]
    [said] = heard.texts("no_destination", logging.ERROR)
    assert f"message {message_id} of queue 'front'" in said


async def test_bad_destinations_do_not_delay_other_messages(broker: SqlBroker, look: Look) -> None:
    for n in range(60):
        await put(broker, {"destination": "x"} if n % 3 else {})
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)
    await broker.start()
    await all_in(look, "x", 40)
    assert len(await look.rows(archive=True)) == 20


async def test_p1_publish_after_is_kept(broker: SqlBroker, look: Look) -> None:
    """P1: never delivered earlier; Unix seconds, a date and time, or counted from when it was
    published."""
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)
    now = await broker.config.store.server.read_now()
    due = (now + timedelta(hours=1)).replace(microsecond=250_000)
    ids = [
        await put(broker, {"destination": "x", "publish_after": value})
        for value in (due.timestamp(), str(due.timestamp()), due.isoformat(), "1h")
    ]
    await broker.start()
    rows = await all_in(look, "x", 4)
    assert [row["id"] for row in rows] == ids
    for row, wanted in zip(
        rows, (due, due, due, rows[3]["created_at"] + timedelta(hours=1)), strict=True
    ):
        late = row["next_attempt_at"] - wanted
        assert timedelta() <= late < timedelta(minutes=10), late


async def test_a_due_message_moves_at_once(broker: SqlBroker, look: Look, heard: Heard) -> None:
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)

    @broker.subscriber("x", **QUICK)
    async def handle(message: SqlBrokerMessage) -> None: ...

    await broker.start()
    past: tuple[Any, ...] = (1_000_000_000, "2001-01-01T00:00:00Z", "1ms")
    for value in past:
        await put(broker, {"destination": "x", "publish_after": value})
    await look.archived(len(past))
    assert not heard.texts("publish_after")


@on_each("value", ["soon"], [True, [1], 1e15, "2030-01-01T00:00:00", -1e15])
async def test_a_bad_time_is_ignored_with_a_warning(
    broker: SqlBroker, look: Look, heard: Heard, value: Any
) -> None:
    """P3."""
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)
    await broker.start()
    message_id = await put(broker, {"destination": "x", "publish_after": value})
    [row] = await all_in(look, "x", 1)
    assert row["next_attempt_at"] <= await broker.config.store.server.read_now()
    [said] = heard.texts("publish_after", logging.WARNING)
    assert f"message {message_id} of queue 'front': it is moved immediately" in said


async def test_p3_a_missing_delay_is_delivered_at_once_with_a_warning(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """P3, of a foreign producer."""
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)
    message_id = await put(broker, {"destination": "x"})
    await put(broker, {"destination": "x"})
    await broker.start()
    rows = await all_in(look, "x", 2)
    now = await broker.config.store.server.read_now()
    assert all(row["next_attempt_at"] <= now for row in rows)
    [said] = heard.texts("publish_after", logging.WARNING)
    assert (
        f"message {message_id} of queue 'front': it is moved immediately, like 1 more claimed with"
        in said
    )


@on_each("headers", [{"publish_after": 0}], [{"publish_after": "0"}, {"publish_after": "0s"}])
async def test_p3_a_producer_may_ask_for_no_delay(
    broker: SqlBroker, look: Look, heard: Heard, headers: Any
) -> None:
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)
    await put(broker, {"destination": "x", **headers})
    await broker.start()
    await all_in(look, "x", 1)
    assert not heard.texts("publish_after")


async def test_p3_messages_of_publish_have_a_due_time(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)
    await broker.start()
    await broker.publish("1", "front", destination="x")
    await broker.publish("2", "front", destination="x", delay="1ms")
    await broker.publish_batch("3", "4", queue="front", destination="x")
    await all_in(look, "x", 4)
    assert not heard.texts("publish_after")


async def test_a_row_with_a_due_time_of_its_own_has_a_delay(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)
    row = NewMessage("front", OPAQUE, json.dumps({"destination": "x"}), delay=0.05)
    await broker.config.store.insert([row])
    await broker.start()
    await all_in(look, "x", 1)
    assert not heard.texts("publish_after")


async def test_a_delay_of_publish_waits_at_the_front_door(broker: SqlBroker, look: Look) -> None:
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)

    @broker.subscriber("x", **QUICK)
    async def handle(body: str, message: SqlBrokerMessage) -> None: ...

    await broker.start()
    await broker.publish("x", "front", destination="x", delay="300ms")
    [row] = await look.archived()
    assert row["first_attempt_at"] - row["created_at"] >= timedelta(seconds=0.3)


async def test_the_latest_time_can_be_stored(broker: SqlBroker, look: Look) -> None:
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)
    await put(broker, {"destination": "x", "publish_after": "9998-12-30T00:00:00Z"})
    await broker.start()
    [row] = await all_in(look, "x", 1)
    assert row["next_attempt_at"].year == 9998


async def test_two_front_doors_do_not_send_a_message_back_and_forth(
    broker: SqlBroker, look: Look
) -> None:
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)
    broker.subscriber("back", **QUICK, forward_to=DESTINATION)
    await broker.start()
    await put(broker, {"destination": "back"})
    [row] = await look.archived()
    assert (row["queue"], row["reason"]) == ("back", "no_destination")


async def test_answers_do_not_take_over_the_destination(broker: SqlBroker, look: Look) -> None:
    broker.subscriber("front", **QUICK, forward_to=DESTINATION)

    @broker.subscriber("x", **QUICK, forward_headers=True)
    @broker.publisher("y")
    async def handle(body: str) -> str:
        return body

    await broker.start()
    await broker.publish("b", "front", destination="x", headers={"kept": 1})

    async def answered() -> list[dict[str, Any]]:
        return [row for row in await look.rows() if row["queue"] == "y"]

    [row] = await eventually(answered)
    headers = row["headers"] if isinstance(row["headers"], dict) else json.loads(row["headers"])
    assert headers["kept"] == 1
    assert "destination" not in headers


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("value", ["", 5, "x" * 256, "a\x00"])
async def test_a_destination_that_cannot_be_one_is_refused(broker: SqlBroker, value: Any) -> None:
    with pytest.raises(PublishError, match=r"^destination cannot be"):
        await broker.publish("x", "front", destination=value)


@pytest.mark.parametrize("seconds", [1, 1_700_000_000.5, 4_102_444_800])
async def test_unix_seconds_as_next_attempt_at(
    broker: SqlBroker, look: Look, seconds: float
) -> None:
    """P1."""
    await broker.publish("x", "q", next_attempt_at=seconds)
    row = await look.in_state("PENDING")
    assert row["next_attempt_at"] == datetime.fromtimestamp(seconds, timezone.utc)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("value", [True, float("nan"), float("inf"), 1e18, 10**400, "17e8"])
async def test_other_numbers_are_refused(broker: SqlBroker, value: Any) -> None:
    with pytest.raises(
        PublishError, match=r"^next_attempt_at must be a datetime with a time zone, Unix"
    ):
        await broker.publish("x", "q", next_attempt_at=value)


async def test_without_an_archive_it_does_not_start(engine: AsyncEngine) -> None:
    broker = SqlBroker(
        engine, schema=SqlBrokerSchemaConfig(message_archive_table_name=None), logger=None
    )
    await broker.create_tables()
    broker.subscriber("front", forward_to=DESTINATION)
    with pytest.raises(SetupError, match="archives messages without a destination, but the schema"):
        await broker.start()
    await broker.stop()


async def test_without_an_archive_a_dead_letter_queue_gets_what_cannot_be_moved(
    engine: AsyncEngine,
) -> None:
    schema = SqlBrokerSchemaConfig(message_archive_table_name=None)
    broker = SqlBroker(engine, schema=schema, logger=None, graceful_timeout=1.0)
    await broker.create_tables()
    got: list[Any] = []
    allowed: Any = {"forward_to": DESTINATION, "destinations": ["x"], "dead_letter_queue": "dead"}
    broker.subscriber("front", **QUICK, **allowed)

    @broker.subscriber("x", **QUICK)
    async def at_x(body: str) -> None:
        got.append(("x", body))

    @broker.subscriber("dead", **QUICK)
    async def dead(body: str, message: SqlBrokerMessage) -> None:
        got.append((message.headers["dead-letter"]["reason"], body))

    await broker.start()
    await broker.publish("moved", "front", destination="x")
    await broker.publish("not allowed", "front", destination="y")
    await broker.publish("not said", "front")

    async def all_there() -> bool:
        return len(got) == 3

    await eventually(all_there)
    assert sorted(got) == [
        ("destination_not_allowed", "not allowed"),
        ("no_destination", "not said"),
        ("x", "moved"),
    ]
    await broker.stop()

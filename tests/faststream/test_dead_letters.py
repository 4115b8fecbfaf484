"""A dead letter queue: what has failed there waits for an ordinary subscriber."""

import logging
from typing import Any

import pytest
from faststream import AckPolicy
from faststream.exceptions import RejectMessage
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    NotReadyYet,
    SetupError,
    SqlBroker,
    SqlBrokerBatchMessage,
    SqlBrokerMessage,
    SqlBrokerRouter,
)
from tests.faststream.conftest import CALM, QUICK, Heard, Look, on_each
from tests.helpers import eventually

pytestmark = pytest.mark.capability("dead letter queues")

DEAD: Any = {**QUICK, "dead_letter_queue": "dead"}
TWICE = ConstantRetryStrategy(delay_seconds=0, max_attempts=2)


async def dead_letter(look: Look, queue: str = "dead") -> dict[str, Any]:
    """Wait until the only message is in the dead letter queue."""

    async def done() -> dict[str, Any] | None:
        rows = await look.rows()
        return rows[0] if [r["queue"] for r in rows] == [queue] else None

    row = await eventually(done)
    assert row is not None
    assert await look.rows(archive=True) == []
    return row


@pytest.mark.parametrize("retained", [True, False])
async def test_a_message_without_attempts_left_is_consumed_from_the_dead_letter_queue(
    broker: SqlBroker, look: Look, retained: bool
) -> None:
    """M4: by an ordinary subscriber, which is woken: no queue is looked at for ten minutes."""
    got: list[tuple[Any, Any]] = []
    slow = {**QUICK, "wakeup": "auto", "max_fetch_interval": 600}

    @broker.subscriber(
        "q",
        **slow,
        dead_letter_queue="dead",
        retry_strategy=TWICE,
        retain_in_archive_on_reject=retained,
    )
    async def handle(body: Any) -> None:
        raise ValueError("boom")

    @broker.subscriber("dead", **slow)
    async def bury(body: Any, message: SqlBrokerMessage) -> None:
        got.append((body, message))

    await broker.start()
    message_id = await broker.publish(
        {"n": 1}, "q", headers={"h": [1]}, correlation_id="c", key="k", dedup_id="d"
    )
    [row] = await look.archived()
    [(body, message)] = got
    assert (row["id"], row["state"], row["queue"], body) == (
        message_id,
        "COMPLETED",
        "dead",
        {"n": 1},
    )
    assert "ValueError: boom" in row["last_error"]
    assert (message.correlation_id, message.key, message.headers["h"]) == ("c", "k", [1])
    assert (message.attempts_count, message.deliveries_count) == (0, 1)
    origin = message.headers["dead-letter"]
    assert "ValueError: boom" in origin.pop("error")
    assert origin == {"queue": "q", "reason": "max_attempts", "attempts": 2, "deliveries": 2}


@on_each(
    "policy",
    [AckPolicy.NACK_ON_ERROR],
    [AckPolicy.ACK, AckPolicy.REJECT_ON_ERROR, AckPolicy.MANUAL],
)
async def test_a_rejected_message_is_a_dead_letter_under_every_policy(
    broker: SqlBroker, look: Look, policy: AckPolicy
) -> None:
    @broker.subscriber("q", **DEAD, ack_policy=policy)
    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        await message.reject(reason="bad")

    await broker.start()
    await broker.publish("x", "q")
    row = await dead_letter(look)
    assert row["state"] == "PENDING"
    assert row["headers"]["dead-letter"] == {
        "queue": "q",
        "reason": "bad",
        "error": None,
        "attempts": 1,
        "deliveries": 1,
    }


ENDS: dict[str, tuple[BaseException | None, dict[str, Any], str]] = {
    "no retry": (ValueError("boom"), {"retry_strategy": None}, "max_attempts"),
    "policy": (ValueError("boom"), {"ack_policy": AckPolicy.REJECT_ON_ERROR}, "rejected"),
    "reject": (RejectMessage(reason="bad"), {}, "bad"),
    "transactional": (RejectMessage(reason="bad"), {"transactional": True}, "bad"),
    "not ready": (NotReadyYet(0, 0.01), {}, "not_ready"),
    "no outcome": (None, {"ack_policy": AckPolicy.MANUAL}, "no_outcome"),
    "ordered": (ValueError("boom"), {"ordered": True, "retry_strategy": None}, "max_attempts"),
}
"""By queue: how its handler ends, its subscriber's options, and the reason that is kept."""


async def test_every_way_to_fail_ends_in_the_dead_letter_queue(
    broker: SqlBroker, look: Look
) -> None:
    def subscribe(queue: str, end: BaseException | None, options: dict[str, Any]) -> None:
        @broker.subscriber(queue, **{**DEAD, **CALM}, **options)
        async def handle(body: Any) -> None:
            if end is not None:
                raise end

    for queue, (end, options, _) in ENDS.items():
        subscribe(queue, end, options)
        await broker.publish("x", queue, key="k")
    await broker.start()

    async def dead() -> list[dict[str, Any]]:
        rows = await look.rows()
        return rows if [r["queue"] for r in rows] == ["dead"] * len(ENDS) else []

    origins = [row["headers"]["dead-letter"] for row in await eventually(dead)]
    ended = {each["queue"]: (each["reason"], each["attempts"]) for each in origins}
    assert ended == {queue: (reason, 1) for queue, (_, _, reason) in ENDS.items()}
    assert await look.rows(archive=True) == []


async def test_a_message_delivered_too_often_is_a_dead_letter_without_an_attempt(
    broker: SqlBroker, look: Look, engine: AsyncEngine, heard: Heard
) -> None:
    @broker.subscriber("q", **DEAD, max_deliveries=20)
    async def handle(body: Any) -> None:
        raise AssertionError

    await broker.publish("x", "q")
    async with engine.begin() as connection:
        await connection.execute(
            text("UPDATE message SET deliveries_count = 20, last_error = 'before'")
        )
    await broker.start()
    row = await dead_letter(look)
    assert row["headers"]["dead-letter"] == {
        "queue": "q",
        "reason": "max_deliveries",
        "error": None,
        "attempts": 0,
        "deliveries": 21,
    }
    assert (row["deliveries_count"], row["last_error"]) == (0, "before")
    assert heard.texts("delivery limit was exceeded", logging.ERROR)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_row_that_cannot_be_read_is_a_dead_letter_with_its_headers(
    broker: SqlBroker, look: Look, engine: AsyncEngine
) -> None:
    """Columns of SQLite take values of any type."""
    got: list[Any] = []

    @broker.subscriber("q", **DEAD)
    async def handle(body: Any) -> None: ...

    @broker.subscriber("dead", **QUICK)
    async def bury(body: Any, message: SqlBrokerMessage) -> None:
        got.append((body, message.headers["h"], message.headers["dead-letter"]["reason"]))

    async with engine.begin() as connection:
        values = "'q', x'31', '{\"h\": 1}', 'nonsense'"
        await connection.execute(
            text(
                "INSERT INTO message (queue, payload, headers, attempts_count) VALUES "
                + f"({values})".replace(":", r"\:")
            )
        )
    await broker.start()
    await eventually(lambda: got)
    assert got == [(1, 1, "undecodable")]


async def test_each_dead_letter_of_a_batch_has_its_own_reason(
    broker: SqlBroker, look: Look
) -> None:
    @broker.subscriber("q", **DEAD, batch=True)
    async def handle(bodies: list[int], message: SqlBrokerBatchMessage) -> None:
        for body, one in zip(bodies, message.messages, strict=True):
            if body % 2:
                await one.reject(reason=f"odd {body}")

    await broker.publish_batch(*range(6), queue="q")
    await broker.start()

    async def ended() -> list[dict[str, Any]]:
        rows = await look.rows()
        return rows if {row["queue"] for row in rows} == {"dead"} else []

    rows = await eventually(ended)
    assert [(bytes(r["payload"]), r["headers"]["dead-letter"]["reason"]) for r in rows] == [
        (b"1", "odd 1"),
        (b"3", "odd 3"),
        (b"5", "odd 5"),
    ]
    assert {r["state"] for r in await look.rows(archive=True)} == {"COMPLETED"}


async def test_an_expired_message_is_no_dead_letter(
    broker: SqlBroker, look: Look, engine: AsyncEngine
) -> None:
    @broker.subscriber("q", **DEAD)
    async def handle(body: Any) -> None:
        raise AssertionError

    await broker.publish("x", "q", expires_in=0.001)
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["reason"], row["queue"]) == ("DISCARDED", "expired", "q")


async def test_a_dead_letter_unblocks_the_next_message_of_its_key(
    broker: SqlBroker, look: Look
) -> None:
    """ordered=True, and the dead letter's own queue keeps its order too."""
    got: list[tuple[str, int]] = []

    @broker.subscriber("q", **DEAD, ordered=True, retry_strategy=TWICE)
    async def handle(body: int) -> None:
        got.append(("q", body))
        if body == 0:
            raise ValueError("boom")

    @broker.subscriber("dead", **QUICK, ordered=True)
    async def bury(body: int) -> None:
        got.append(("dead", body))

    await broker.publish_batch(0, 1, 2, queue="q", key="k")
    await broker.start()
    await look.archived(3)
    assert [body for queue, body in got if queue == "q"] == [0, 0, 1, 2]
    assert [body for queue, body in got if queue == "dead"] == [0]


async def test_the_prefix_of_a_router_applies_to_the_dead_letter_queue(
    broker: SqlBroker, look: Look
) -> None:
    router = SqlBrokerRouter(prefix="app.")

    @router.subscriber("q", **DEAD, retry_strategy=None)
    async def handle(body: Any) -> None:
        raise ValueError("boom")

    broker.include_router(router)
    await broker.start()
    await broker.publish("x", "app.q")
    row = await dead_letter(look, "app.dead")
    assert row["headers"]["dead-letter"]["queue"] == "app.q"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_prefix_that_makes_its_name_too_long_is_refused_at_the_start(
    broker: SqlBroker,
) -> None:
    router = SqlBrokerRouter(prefix="app.")

    @router.subscriber("q", **{**DEAD, "dead_letter_queue": "d" * 253})
    async def handle(body: Any) -> None: ...

    broker.include_router(router)
    with pytest.raises(SetupError, match="cannot be the dead_letter_queue: it has 257 characters"):
        await broker.start()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_brokers_ack_first_is_refused_at_the_start(engine: AsyncEngine) -> None:
    broker = SqlBroker(engine, logger=None, ack_policy=AckPolicy.ACK_FIRST)
    await broker.create_tables()

    @broker.subscriber("q", **DEAD)
    async def handle(body: Any) -> None: ...

    with pytest.raises(SetupError, match="dead_letter_queue takes failed messages"):
        await broker.start()
    await broker.stop()


async def test_a_dead_letter_after_a_lost_lease_changes_nothing(
    broker: SqlBroker, look: Look, engine: AsyncEngine, heard: Heard
) -> None:
    """Promise 3."""

    @broker.subscriber("q", **DEAD, ack_policy=AckPolicy.REJECT_ON_ERROR)
    async def handle(body: Any) -> None:
        async with engine.begin() as connection:
            await connection.execute(
                text(
                    "UPDATE message SET state = 'PENDING', lease_token = NULL, "
                    "lease_expires_at = NULL, acquired_at = NULL, queue = 'elsewhere'"
                )
            )
        raise ValueError("boom")

    await broker.start()
    await broker.publish("x", "q")
    await eventually(lambda: heard.texts("lease lost", logging.WARNING))
    [row] = await look.rows()
    assert (row["queue"], "dead-letter" in row["headers"], row["last_error"]) == (
        "elsewhere",
        False,
        None,
    )

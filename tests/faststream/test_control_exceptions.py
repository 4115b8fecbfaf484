"""Handlers that postpone, move and hold their messages, by raising and by calling."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from faststream import AckPolicy
from faststream.message import AckStatus
from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    Move,
    NotReadyYet,
    Once,
    Postpone,
    PublishError,
    RetryPossible,
    SetupError,
    SqlBroker,
    SqlBrokerBatchMessage,
    SqlBrokerMessage,
    SqlBrokerResponse,
    SqlConnection,
)
from faststream_sqlbroker.flow.deliver.leases import LeaseKeeper
from faststream_sqlbroker.message import SqlBrokerMessage as MessageClass
from tests.faststream.conftest import QUICK, Heard, Look, on_each
from tests.helpers import eventually

pytestmark = pytest.mark.capability("postpone, move to another queue, wait until ready")

HOUR = timedelta(hours=1)
LATER = ConstantRetryStrategy(delay_seconds=3600, max_attempts=5)
SETTLING = [p for p in AckPolicy if p is not AckPolicy.ACK_FIRST]
under_every_policy = on_each("policy", SETTLING[:1], SETTLING[1:])
effects = Table(
    "effects", MetaData(), Column("id", Integer, primary_key=True), Column("body", String(50))
)

Act = Callable[[Any], Awaitable[Any]]


async def run(broker: SqlBroker, act: Act, body: Any = "x", **options: Any) -> int:
    """Start the broker with `act` as the handler, and publish one message."""
    if options.get("ack_policy") is not AckPolicy.ACK_FIRST:
        options.setdefault("retry_strategy", LATER)

    @broker.subscriber("q", **QUICK, **options)
    async def handle(body: Any, message: SqlBrokerMessage) -> Any:
        return await act(message)

    await broker.start()
    message_id = await broker.publish(body, "q", headers={"h": [1]}, correlation_id="c")
    assert message_id is not None
    return message_id


def raising(make: Callable[[], BaseException]) -> Act:
    async def act(message: Any) -> None:
        raise make()

    return act


async def postpone(message: Any) -> None:
    await message.postpone("1h")
    assert message.committed is AckStatus.NACKED


async def move(message: Any) -> None:
    await message.move_to("other", body={"n": 1}, delay="1h")
    assert message.committed is AckStatus.ACKED


def silent(heard: Heard) -> bool:
    """Whether nothing was logged as an error, or with a traceback."""
    return not [r for r in heard.records if r.levelno >= logging.ERROR or r.exc_info]


# -- postpone --------------------------------------------------------------------------------------


@under_every_policy
@pytest.mark.parametrize(
    "act", [raising(lambda: Postpone("1h")), postpone], ids=["raised", "called"]
)
async def test_p4_postponed_under_every_policy(
    broker: SqlBroker, look: Look, heard: Heard, policy: AckPolicy, act: Act
) -> None:
    """P4: neither attempt nor delivery is charged."""
    await run(broker, act, ack_policy=policy)
    row = await postponed(look)
    assert (row["attempts_count"], row["deliveries_count"], row["last_error"]) == (0, 0, None)
    assert row["next_attempt_at"] - row["created_at"] > HOUR * 0.99
    assert (row["lease_token"], row["first_attempt_at"]) == (None, None)
    assert silent(heard)


async def postponed(look: Look) -> dict[str, Any]:
    """Wait until the only message is due later."""

    async def done() -> dict[str, Any] | None:
        [row] = await look.rows()
        return (
            row
            if row["state"] == "PENDING" and row["next_attempt_at"] > row["created_at"]
            else None
        )

    row = await eventually(done)
    assert row is not None
    return row


async def test_a_message_postponed_often_is_handled_at_last(broker: SqlBroker, look: Look) -> None:
    """More often than it may be attempted or delivered."""
    calls = 0

    async def act(message: Any) -> None:
        nonlocal calls
        calls += 1
        if calls < 12:
            raise Postpone(0.01)

    await run(broker, act, retry_strategy=None, max_deliveries=2)
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"], row["deliveries_count"], calls) == (
        "COMPLETED",
        1,
        1,
        12,
    )


async def test_the_cause_of_a_postponement_is_kept(broker: SqlBroker, look: Look) -> None:
    async def act(message: Any) -> None:
        try:
            raise ConnectionError("the backend is down")
        except ConnectionError as error:
            raise Postpone(HOUR) from error

    await run(broker, act)
    row = await postponed(look)
    assert "ConnectionError: the backend is down" in row["last_error"]


async def test_the_first_outcome_counts(broker: SqlBroker, look: Look) -> None:
    async def act(message: Any) -> None:
        await message.reject(reason="first")
        await message.postpone(5)
        await message.move_to("other", body=object())
        raise Move("other")

    await run(broker, act)
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("FAILED", "first")


async def test_wrong_arguments_are_the_handlers_error(broker: SqlBroker, look: Look) -> None:
    async def act(message: Any) -> None:
        for wrong in (message.postpone("soon"), message.move_to(""), message.extend_lease(0)):
            with pytest.raises(SetupError):
                await wrong
        raise Postpone("later")

    await run(broker, act)
    row = await look.in_state("RETRYABLE")
    assert "delay cannot be 'later'" in row["last_error"]


# -- not ready -------------------------------------------------------------------------------------


async def test_p7_a_not_ready_message_is_retried_until_it_is_ready(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """P7: "changed" came before "created"."""
    created = asyncio.Event()
    looks = 0

    async def act(message: Any) -> None:
        nonlocal looks
        looks += 1
        if not created.is_set():
            raise NotReadyYet("20ms", "1h")

    await run(broker, act, retry_strategy=None)
    await eventually(lambda: looks >= 3)
    created.set()
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("COMPLETED", 1, 1)
    assert row["first_attempt_at"] < row["last_attempt_at"]
    assert silent(heard)


@pytest.mark.parametrize("policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.MANUAL])
async def test_not_ready_fails_after_its_time_limit(
    broker: SqlBroker, look: Look, policy: AckPolicy
) -> None:
    """P7: by the database's times; the last look is when the time is over."""
    looks = 0

    async def act(message: Any) -> None:
        nonlocal looks
        looks += 1
        raise NotReadyYet("1h", "300ms") from KeyError("order 5")

    await run(broker, act, ack_policy=policy)
    [row] = await look.archived()
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "not_ready", 1)
    assert row["last_attempt_at"] - row["first_attempt_at"] >= timedelta(seconds=0.299)
    assert "KeyError: 'order 5'" in row["last_error"]
    assert looks == 2


# -- move ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SETTLING)
@pytest.mark.parametrize(
    "act",
    [raising(lambda: Move("other", body={"n": 1}, delay="1h")), move],
    ids=["raised", "called"],
)
async def test_moved_under_every_policy(
    broker: SqlBroker, look: Look, heard: Heard, policy: AckPolicy, act: Act
) -> None:
    """M7: same id, another body, other headers kept."""
    message_id = await run(broker, act, ack_policy=policy)

    async def moved() -> dict[str, Any] | None:
        [row] = await look.rows()
        return row if row["queue"] == "other" else None

    row = await eventually(moved)
    assert row is not None
    assert (row["id"], row["state"], json.loads(row["payload"])) == (
        message_id,
        "PENDING",
        {"n": 1},
    )
    assert row["headers"] == {"h": [1], "correlation_id": "c", "content-type": "application/json"}
    assert (row["attempts_count"], row["deliveries_count"]) == (0, 0)
    assert row["next_attempt_at"] - row["created_at"] > HOUR * 0.99
    assert await look.rows(archive=True) == []
    assert silent(heard)


@pytest.mark.parametrize(
    ("bodies", "seen"),
    [
        (("x",), "x"),
        (("x", b"\xff"), b"\xff"),
        (("x", None), b""),
        (({"n": 1}, "text"), "text"),
        ((b"raw", [1]), [1]),
    ],
    ids=["the same", "bytes", "none", "text", "json"],
)
async def test_the_next_queue_gets_the_body_as_it_was_meant(
    broker: SqlBroker, look: Look, bodies: tuple[Any, ...], seen: Any
) -> None:
    """Its subscribers in this process are woken: no queue is looked at for ten minutes."""
    got: list[tuple[Any, MessageClass]] = []
    slow: Any = {**QUICK, "wakeup": "auto", "max_fetch_interval": 600}

    @broker.subscriber("q", **slow)
    async def first(body: Any) -> None:
        raise Move("other", body=bodies[1]) if len(bodies) > 1 else Move("other")

    @broker.subscriber("other", **slow)
    async def second(body: Any, message: SqlBrokerMessage) -> None:
        got.append((await message.decode(), message))

    await broker.start()
    message_id = await broker.publish(bodies[0], "q", correlation_id="c", key="k")
    [row] = await look.archived()
    assert (row["id"], row["queue"], row["state"], row["attempts_count"]) == (
        message_id,
        "other",
        "COMPLETED",
        1,
    )
    [(body, message)] = got
    assert body == seen
    assert (message.correlation_id, message.key, message.deliveries_count) == ("c", "k", 1)


async def test_the_archive_holds_the_changed_body(broker: SqlBroker, look: Look) -> None:
    """M7."""

    async def act(message: Any) -> None:
        if await message.decode() == "x":
            raise Move("q", body="y")

    await run(broker, act)
    [row] = await look.archived()
    assert (bytes(row["payload"]), row["state"]) == (b"y", "COMPLETED")


@under_every_policy
async def test_a_body_that_cannot_be_encoded_is_a_failure(
    broker: SqlBroker, look: Look, heard: Heard, policy: AckPolicy
) -> None:
    """The message is tried again, and the log says why."""
    await run(
        broker, raising(lambda: Move("other", body=SqlBrokerResponse("x"))), ack_policy=policy
    )
    row = await look.in_state("RETRYABLE")
    assert row["queue"] == "q"
    assert "a new body cannot be a SqlBrokerResponse" in row["last_error"]
    assert heard.texts("a new body cannot be a SqlBrokerResponse", logging.ERROR)


async def test_a_handler_may_decide_otherwise_when_a_body_cannot_be_encoded(
    broker: SqlBroker, look: Look
) -> None:
    async def act(message: Any) -> None:
        with pytest.raises(PublishError, match="a new body cannot be a SqlBrokerResponse"):
            await message.move_to("other", body=SqlBrokerResponse("x"))
        await message.reject(reason="cannot move")

    await run(broker, act)
    assert (await look.archived())[0]["reason"] == "cannot move"


@pytest.mark.parametrize("said", [Move("other"), Postpone("1h")], ids=["move", "postpone"])
async def test_rows_published_with_the_ack_are_written_with_a_move_only(
    broker: SqlBroker, look: Look, said: Any
) -> None:
    """Promise 6."""

    async def act(message: Any) -> None:
        await broker.publish("chained", "next", with_ack=True)
        raise said

    await run(broker, act)
    moved = isinstance(said, Move)

    async def done() -> bool:
        rows = await look.rows()
        return {r["queue"] for r in rows} == ({"other", "next"} if moved else {"q"}) and not any(
            r["lease_token"] for r in rows
        )

    if not moved:
        await postponed(look)
    await eventually(done)


# -- transactional ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.REJECT_ON_ERROR, AckPolicy.MANUAL]
)
@pytest.mark.parametrize(
    "said", [Move("other", body="y"), Postpone("1h")], ids=["move", "postpone"]
)
async def test_a_move_commits_the_handlers_sql_and_a_postponement_rolls_it_back(
    broker: SqlBroker, look: Look, engine: AsyncEngine, heard: Heard, policy: AckPolicy, said: Any
) -> None:
    """Promise 5."""
    async with engine.begin() as connection:
        await connection.run_sync(effects.metadata.create_all)

    @broker.subscriber("q", **QUICK, transactional=True, ack_policy=policy)
    async def handle(body: str, connection: SqlConnection, message: SqlBrokerMessage) -> None:
        await connection.execute(insert(effects).values(body=body))
        assert await message.extend_lease("1h")
        raise said

    await broker.start()
    await broker.publish("x", "q")
    moved = isinstance(said, Move)
    await eventually(lambda: _queue(look, "other")) if moved else await postponed(look)
    async with engine.connect() as connection:
        assert list((await connection.execute(select(effects.c.body))).scalars()) == (
            ["x"] if moved else []
        )
    [row] = await look.rows()
    assert (bytes(row["payload"]), row["deliveries_count"]) == (b"y" if moved else b"x", 0)
    assert silent(heard)


async def _queue(look: Look, queue: str) -> bool:
    return [r["queue"] for r in await look.rows()] == [queue]


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.MANUAL])
@pytest.mark.parametrize("how", ["raised", "called"])
@pytest.mark.parametrize("opened", [True, False])
async def test_a_move_of_a_batch_leaves_out_settled_messages(
    broker: SqlBroker, look: Look, policy: AckPolicy, how: str, opened: bool
) -> None:
    @broker.subscriber("q", **QUICK, batch=True, ack_policy=policy)
    async def handle(bodies: list[Any], message: SqlBrokerBatchMessage) -> None:
        assert await message.extend_lease("1h")
        if opened:
            await message.messages[0].ack()
        if how == "raised":
            raise Move("other", body="new")
        await message.move_to("other", body="new")
        assert message.committed is AckStatus.ACKED
        if opened:
            assert [m.committed for m in message.messages] == [AckStatus.ACKED] * 3

    await broker.publish_batch(*range(3), queue="q", headers={"h": 1})
    await broker.start()
    left = 2 if opened else 3

    async def done() -> bool:
        return [r["queue"] for r in await look.rows()] == ["other"] * left

    await eventually(done)
    assert {(bytes(r["payload"]), r["headers"]["h"]) for r in await look.rows()} == {(b"new", 1)}
    assert {r["headers"]["content-type"] for r in await look.rows()} == {"text/plain"}
    assert [r["state"] for r in await look.rows(archive=True)] == ["COMPLETED"] * (3 - left)


@pytest.mark.parametrize("how", ["raised", "called"])
async def test_a_postponed_batch(broker: SqlBroker, look: Look, heard: Heard, how: str) -> None:
    @broker.subscriber("q", **QUICK, batch=True)
    async def handle(bodies: list[Any], message: SqlBrokerBatchMessage) -> None:
        await message.messages[1].reject(reason="bad")
        if how == "raised":
            raise Postpone("1h")
        await message.postpone("1h")

    await broker.publish_batch(*range(3), queue="q")
    await broker.start()

    async def ended() -> list[dict[str, Any]]:
        rows = await look.rows()
        return rows if [r["state"] for r in rows] == ["PENDING", "PENDING"] else []

    rows = await eventually(ended)
    assert [(r["deliveries_count"], bytes(r["payload"])) for r in rows] == [(0, b"0"), (0, b"2")]
    assert len(await look.rows(archive=True)) == 1
    assert all(r["next_attempt_at"] - r["created_at"] > HOUR * 0.99 for r in rows)
    assert silent(heard)


# -- ACK_FIRST, RetryPossible ----------------------------------------------------------------------


@on_each("said", [Postpone(5), Move("other")], [NotReadyYet(1, 5), RetryPossible()])
async def test_under_ack_first_the_message_is_gone(
    broker: SqlBroker, look: Look, heard: Heard, said: Any
) -> None:
    await run(broker, raising(lambda: said), ack_policy=AckPolicy.ACK_FIRST)
    assert (await look.archived())[0]["state"] == "COMPLETED"
    [line] = await eventually(lambda: heard.texts("could not be carried out", logging.ERROR))
    assert line.startswith(f"{type(said).__name__} of message 1 ")
    assert "acked the message before its handler started" in line


async def test_under_ack_first_the_methods_are_refused(broker: SqlBroker, look: Look) -> None:
    refused = 0

    async def act(message: Any) -> None:
        nonlocal refused
        for call in (message.postpone(5), message.move_to("other"), message.extend_lease(5)):
            with pytest.raises(SetupError, match="acked the message before its handler started"):
                await call
            refused += 1

    await run(broker, act, ack_policy=AckPolicy.ACK_FIRST)
    await look.archived()
    await eventually(lambda: refused == 3)


@under_every_policy
async def test_retry_possible_is_a_nack_under_every_policy(
    broker: SqlBroker, look: Look, heard: Heard, policy: AckPolicy
) -> None:
    """Z4: where any other error would end it."""

    async def act(message: Any) -> None:
        try:
            raise ConnectionError("away")
        except ConnectionError:
            raise RetryPossible(delay="1h")  # noqa: B904 - the error behind it is to be found all the same

    await run(broker, act, ack_policy=policy)
    row = await look.in_state("RETRYABLE")
    assert (row["attempts_count"], row["deliveries_count"]) == (1, 1)
    assert "ConnectionError: away" in row["last_error"]
    assert row["next_attempt_at"] - row["last_attempt_at"] > HOUR * 0.99
    assert silent(heard)


@pytest.mark.parametrize(
    "said",
    [RetryPossible(delay=0), NotReadyYet(0, "1h"), Postpone(0), None],
    ids=lambda value: type(value).__name__,
)
async def test_once_releases_the_key_of_a_handler_that_did_nothing(
    broker: SqlBroker, look: Look, said: Any
) -> None:
    """Z4."""
    calls = 0

    async def act(message: Any) -> None:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise said or ValueError("boom")

    @broker.subscriber("q", **QUICK, policies=[Once("1h")])
    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        await act(message)

    await broker.start()
    await broker.publish("x", "q", key="k")
    [row] = await look.archived()
    assert (row["state"], calls) == (("COMPLETED", 3) if said else ("FAILED", 1))


# -- leases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raised", "called"])
async def test_a_move_after_a_lost_lease_changes_nothing(
    broker: SqlBroker, look: Look, heard: Heard, how: str
) -> None:
    """Promise 3: the lease is lost between handler and settle."""

    async def act(message: Any) -> None:
        if how == "called":
            await message.move_to("other", body="new")
        async with look.engine.begin() as connection:
            await connection.execute(text(LOSE))
        if how == "raised":
            raise Move("other", body="new")

    await run(broker, act, max_deliveries=None)
    await eventually(lambda: heard.texts("lease lost", logging.WARNING))
    [row] = await look.rows()
    assert (row["queue"], row["state"], bytes(row["payload"])) == ("elsewhere", "PENDING", b"x")
    assert row["headers"]["content-type"] == "text/plain"


LOSE = (
    "UPDATE message SET state = 'PENDING', lease_token = NULL, lease_expires_at = NULL, "
    "acquired_at = NULL, queue = 'elsewhere'"
)


async def test_an_extended_lease_is_not_shortened_and_a_lost_one_raises(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    answers: list[Any] = []
    ticks = 0
    tick = LeaseKeeper.tick

    async def counted(self: LeaseKeeper) -> float:
        nonlocal ticks
        await tick(self)
        ticks += 1
        return 0.02

    async def lease() -> timedelta:
        [row] = await look.rows()
        return row["lease_expires_at"] - row["acquired_at"]

    async def act(message: Any) -> None:
        for duration in (0.5, "2h", "1h", 5):
            answers.append((await message.extend_lease(duration), await lease()))
        message.raw_message.renewed_monotonic -= 50  # far more than a third of the lease
        seen = ticks
        await eventually(lambda: ticks > seen + 2)
        answers.append((True, await lease()))
        async with look.engine.begin() as connection:
            await connection.execute(text(LOSE))
        answers.append(await message.extend_lease("1h"))
        answers.append(await message.extend_lease("1h"))

    with patch.object(LeaseKeeper, "tick", counted):
        await run(broker, act, release_stuck_timeout=60)
        await eventually(lambda: len(answers) == 7)
    assert answers[-2:] == [False, False]
    assert [held for held, _ in answers[:5]] == [True] * 5
    lengths = [length for _, length in answers[:5]]
    assert timedelta(seconds=59) < lengths[0] < HOUR
    assert all(length >= HOUR * 1.99 for length in lengths[1:])
    assert len(heard.texts("lease lost", logging.WARNING)) == 1
    assert [r["queue"] for r in await look.rows()] == ["elsewhere"]


async def test_an_extension_goes_past_max_lease(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """Without it the message would come back while its handler runs, and be handled twice."""
    calls = 0
    lease = 60
    store = broker._store

    async def passes(seconds: float, claimed: Any) -> None:
        for name in ("claimed_monotonic", "renewed_monotonic", "held_until"):
            setattr(claimed, name, getattr(claimed, name) - seconds)
        table = look.tables.message
        [row] = await look.rows()
        earlier = {
            name: row[name] - timedelta(seconds=seconds)
            for name in ("acquired_at", "lease_expires_at")
        }
        async with look.engine.begin() as connection:
            await connection.execute(update(table).values(earlier))

    async def act(message: Any) -> None:
        nonlocal calls
        calls += 1
        assert await message.extend_lease("1h")
        # The last renewal is made before `max_lease`, and lasts for a lease.
        await passes(2 * lease, message.raw_message)
        # A look tells when the first lease ends; one that is over is released by the next search.
        with patch.object(store, "look_around", wraps=store.look_around) as looked:
            await eventually(lambda: looked.call_count > 2)
        assert await store.release_stuck(["q"], 10) == 0

    limits = {"release_stuck_timeout": lease, "release_stuck_interval": 0.05, "max_lease": lease}
    await run(broker, act, max_workers=2, **limits)
    [row] = await look.archived()
    assert (calls, row["deliveries_count"]) == (1, 1)
    assert not heard.texts("lease lost")


# -- publish_count ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "state"), [(None, "COMPLETED"), (3, "COMPLETED"), (4, "FAILED")])
async def test_a_handler_can_give_up_on_a_message_published_too_often(
    broker: SqlBroker, look: Look, engine: AsyncEngine, count: int | None, state: str
) -> None:
    """P10: apart from attempts and deliveries; 1 where a producer says nothing."""
    seen: list[tuple[int, int, int]] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        seen.append((message.publish_count, message.attempts_count, message.deliveries_count))
        if message.publish_count > 3:
            await message.reject(reason="published too often")

    columns, values = ("", "") if count is None else (", publish_count", f", {count}")
    async with engine.begin() as connection:
        await connection.execute(
            text(f"INSERT INTO message (queue, payload{columns}) VALUES ('q', 'x'{values})")
        )
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["publish_count"]) == (state, count or 1)
    assert seen == [(count or 1, 0, 1)]

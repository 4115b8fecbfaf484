"""Handlers that postpone, move and hold their messages, by raising and by calling."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from itertools import product
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
from tests.faststream.conftest import CALM, QUICK, Heard, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("postpone, move to another queue, wait until ready")

HOUR = timedelta(hours=1)
LATER = ConstantRetryStrategy(delay_seconds=3600, max_attempts=5)
SETTLING = [p for p in AckPolicy if p is not AckPolicy.ACK_FIRST]
ONE_LOOK: Any = {**QUICK, "max_fetch_interval": 600}
"""Subscriber options for tests whose messages are there before the start."""
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


async def run_each(
    broker: SqlBroker, acts: dict[str, Act], under: dict[str, AckPolicy] | AckPolicy | None = None
) -> dict[str, int]:
    """As `run`, with a message, a queue and a subscriber for each act; the ids, by queue."""
    ids: dict[str, int] = {}
    for queue, act in acts.items():
        policy = under[queue] if isinstance(under, dict) else under
        options: dict[str, Any] = {} if policy is None else {"ack_policy": policy}
        if policy is not AckPolicy.ACK_FIRST:
            options["retry_strategy"] = LATER
        subscribe(broker, queue, act, **options)
        message_id = await broker.publish("x", queue, headers={"h": [1]}, correlation_id="c")
        assert message_id is not None
        ids[queue] = message_id
    await broker.start()
    return ids


def subscribe(broker: SqlBroker, queue: str, act: Act, **options: Any) -> None:
    @broker.subscriber(queue, **{**ONE_LOOK, **options})
    async def handle(body: Any, message: SqlBrokerMessage) -> Any:
        return await act(message)


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


async def test_p4_postponed_under_every_policy(broker: SqlBroker, look: Look, heard: Heard) -> None:
    """P4: neither attempt nor delivery is charged."""
    hows = {"raised": raising(lambda: Postpone("1h")), "called": postpone}
    acts = {f"{how} {p.value}": act for p in SETTLING for how, act in hows.items()}
    await run_each(broker, acts, {f"{how} {p.value}": p for p in SETTLING for how in hows})
    for row in await postponed(look, len(acts)):
        case = row["queue"]
        counts = (row["attempts_count"], row["deliveries_count"], row["last_error"])
        assert counts == (0, 0, None), case
        assert row["next_attempt_at"] - row["created_at"] > HOUR * 0.99, case
        assert (row["lease_token"], row["first_attempt_at"]) == (None, None), case
    assert silent(heard)


async def postponed(look: Look, count: int = 1) -> list[dict[str, Any]]:
    """Wait until the `count` messages are due later."""

    def is_later(row: dict[str, Any]) -> bool:
        return row["state"] == "PENDING" and row["next_attempt_at"] > row["created_at"]

    async def done() -> list[dict[str, Any]]:
        rows = await look.rows()
        assert len(rows) == count
        return rows if all(map(is_later, rows)) else []

    return await eventually(done)


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


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_cause_of_a_postponement_is_kept(broker: SqlBroker, look: Look) -> None:
    async def act(message: Any) -> None:
        try:
            raise ConnectionError("the backend is down")
        except ConnectionError as error:
            raise Postpone(HOUR) from error

    await run(broker, act)
    [row] = await postponed(look)
    assert "ConnectionError: the backend is down" in row["last_error"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_first_outcome_counts(broker: SqlBroker, look: Look) -> None:
    async def act(message: Any) -> None:
        await message.reject(reason="first")
        await message.postpone(5)
        await message.move_to("other", body=object())
        raise Move("other")

    await run(broker, act)
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("FAILED", "first")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
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


async def test_not_ready_fails_after_its_time_limit(broker: SqlBroker, look: Look) -> None:
    """P7: by the database's times; the last look is when the time is over."""
    looks: Counter[str] = Counter()

    async def act(message: Any) -> None:
        looks[message.raw_message.queue] += 1
        raise NotReadyYet("1h", "300ms") from KeyError("order 5")

    policies = {p.value: p for p in (AckPolicy.NACK_ON_ERROR, AckPolicy.MANUAL)}
    for queue, policy in policies.items():
        subscribe(broker, queue, act, **CALM, ack_policy=policy, retry_strategy=LATER)
        await broker.publish("x", queue)
    await broker.start()
    for row in await look.archived(2):
        case = row["queue"]
        ended = (row["state"], row["reason"], row["attempts_count"])
        assert ended == ("FAILED", "not_ready", 1), case
        taken = row["last_attempt_at"] - row["first_attempt_at"]
        assert taken >= timedelta(seconds=0.299), case
        assert "KeyError: 'order 5'" in row["last_error"], case
    assert looks == dict.fromkeys(policies, 2)


# -- move ------------------------------------------------------------------------------------------


async def test_moved_under_every_policy(broker: SqlBroker, look: Look, heard: Heard) -> None:
    """M7: same id, another body, other headers kept."""
    hows = {"raised": raising(lambda: Move("other", body={"n": 1}, delay="1h")), "called": move}
    acts = {f"{how} {p.value}": act for p in SETTLING for how, act in hows.items()}
    ids = await run_each(broker, acts, {f"{how} {p.value}": p for p in SETTLING for how in hows})

    async def moved() -> list[dict[str, Any]]:
        rows = await look.rows()
        return rows if {r["queue"] for r in rows} == {"other"} else []

    cases = {message_id: case for case, message_id in ids.items()}
    rows = await eventually(moved)
    assert [row["id"] for row in rows] == sorted(cases)
    for row in rows:
        case = cases[row["id"]]
        assert (row["state"], json.loads(row["payload"])) == ("PENDING", {"n": 1}), case
        kept = {"h": [1], "correlation_id": "c", "content-type": "application/json"}
        assert row["headers"] == kept, case
        assert (row["attempts_count"], row["deliveries_count"]) == (0, 0), case
        assert row["next_attempt_at"] - row["created_at"] > HOUR * 0.99, case
    assert await look.rows(archive=True) == []
    assert silent(heard)


BODIES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "the same": (("x",), "x"),
    "bytes": (("x", b"\xff"), b"\xff"),
    "none": (("x", None), b""),
    "text": (({"n": 1}, "text"), "text"),
    "json": ((b"raw", [1]), [1]),
}
"""What is published and moved, and what the next queue gets."""


async def test_the_next_queue_gets_the_body_as_it_was_meant(broker: SqlBroker, look: Look) -> None:
    """Its subscribers in this process are woken: no queue is looked at for ten minutes."""
    got: dict[str, list[tuple[Any, MessageClass]]] = {case: [] for case in BODIES}
    slow: Any = {**ONE_LOOK, "wakeup": "auto"}

    def subscribe_both(case: str) -> None:
        bodies, _ = BODIES[case]

        @broker.subscriber(case, **slow)
        async def first(body: Any) -> None:
            raise (
                Move(f"other {case}", body=bodies[1]) if len(bodies) > 1 else Move(f"other {case}")
            )

        @broker.subscriber(f"other {case}", **slow)
        async def second(body: Any, message: SqlBrokerMessage) -> None:
            got[case].append((await message.decode(), message))

    for case in BODIES:
        subscribe_both(case)
    await broker.start()
    ids = {
        case: await broker.publish(bodies[0], case, correlation_id="c", key="k")
        for case, (bodies, _) in BODIES.items()
    }
    rows = {row["queue"]: row for row in await look.archived(len(BODIES))}
    for case, (_, seen) in BODIES.items():
        row = rows[f"other {case}"]
        ended = (row["id"], row["state"], row["attempts_count"])
        assert ended == (ids[case], "COMPLETED", 1), case
        [(body, message)] = got[case]
        assert body == seen, case
        assert (message.correlation_id, message.key, message.deliveries_count) == ("c", "k", 1), (
            case
        )


async def test_the_archive_holds_the_changed_body(broker: SqlBroker, look: Look) -> None:
    """M7."""

    async def act(message: Any) -> None:
        if await message.decode() == "x":
            raise Move("q", body="y")

    await run(broker, act)
    [row] = await look.archived()
    assert (bytes(row["payload"]), row["state"]) == (b"y", "COMPLETED")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_body_that_cannot_be_encoded_is_a_failure(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """The message is tried again, and the log says why; under every policy."""
    cannot = raising(lambda: Move("other", body=SqlBrokerResponse("x")))
    policies: dict[str, AckPolicy] = {p.value: p for p in SETTLING}
    await run_each(broker, dict.fromkeys(policies, cannot), policies)
    rows = await retryable(look, len(policies))
    assert {row["queue"] for row in rows} == set(policies)
    for row in rows:
        assert "a new body cannot be a SqlBrokerResponse" in row["last_error"], row["queue"]
    told = heard.texts("a new body cannot be a SqlBrokerResponse", logging.ERROR)
    assert len(told) == len(policies), told


async def retryable(look: Look, count: int) -> list[dict[str, Any]]:
    """Wait until the `count` messages are to be tried again."""

    async def done() -> list[dict[str, Any]]:
        rows = await look.rows()
        return rows if [r["state"] for r in rows] == ["RETRYABLE"] * count else []

    return await eventually(done)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_handler_may_decide_otherwise_when_a_body_cannot_be_encoded(
    broker: SqlBroker, look: Look
) -> None:
    async def act(message: Any) -> None:
        with pytest.raises(PublishError, match="a new body cannot be a SqlBrokerResponse"):
            await message.move_to("other", body=SqlBrokerResponse("x"))
        await message.reject(reason="cannot move")

    await run(broker, act)
    assert (await look.archived())[0]["reason"] == "cannot move"


async def test_rows_published_with_the_ack_are_written_with_a_move_only(
    broker: SqlBroker, look: Look
) -> None:
    """Promise 6."""

    def act(said: Exception) -> Act:
        async def act(message: Any) -> None:
            await broker.publish("chained", f"next of {message.raw_message.queue}", with_ack=True)
            raise said

        return act

    await run_each(broker, {"moved": act(Move("other")), "postponed": act(Postpone("1h"))})

    async def done() -> bool:
        rows = await look.rows()
        return (
            not any(r["lease_token"] for r in rows)
            and all(
                r["next_attempt_at"] > r["created_at"] for r in rows if r["queue"] == "postponed"
            )
            and sorted(r["queue"] for r in rows) == ["next of moved", "other", "postponed"]
        )

    await eventually(done)
    [row] = [r for r in await look.rows() if r["queue"] == "postponed"]
    assert row["next_attempt_at"] - row["created_at"] > HOUR * 0.99


# -- transactional ---------------------------------------------------------------------------------


async def test_a_move_commits_the_handlers_sql_and_a_postponement_rolls_it_back(
    broker: SqlBroker, look: Look, engine: AsyncEngine, heard: Heard
) -> None:
    """Promise 5."""
    async with engine.begin() as connection:
        await connection.run_sync(effects.metadata.create_all)

    def subscribe_in_transaction(queue: str, policy: AckPolicy, said: Exception) -> None:
        @broker.subscriber(queue, **ONE_LOOK, transactional=True, ack_policy=policy)
        async def handle(body: str, connection: SqlConnection, message: SqlBrokerMessage) -> None:
            await connection.execute(insert(effects).values(body=body))
            assert await message.extend_lease("1h")
            raise said

    policies = (AckPolicy.NACK_ON_ERROR, AckPolicy.REJECT_ON_ERROR, AckPolicy.MANUAL)
    for policy in policies:
        says = {"move": Move("other", body="y"), "postpone": Postpone("1h")}
        for name, said in says.items():
            subscribe_in_transaction(f"{name} {policy.value}", policy, said)
            await broker.publish(f"{name} {policy.value}", f"{name} {policy.value}")
    await broker.start()
    stay = {f"postpone {policy.value}" for policy in policies}

    async def ended() -> list[dict[str, Any]]:
        rows = await look.rows()
        later = [r for r in rows if r["state"] == "PENDING" and r["queue"] in {"other", *stay}]
        over = all(r["queue"] == "other" or r["next_attempt_at"] > r["created_at"] for r in later)
        return rows if len(later) == 2 * len(policies) and over else []

    rows = await eventually(ended)
    async with engine.connect() as connection:
        done = set((await connection.execute(select(effects.c.body))).scalars())
    assert done == {f"move {policy.value}" for policy in policies}
    for row in rows:
        body = b"y" if row["queue"] == "other" else row["queue"].encode()
        assert (bytes(row["payload"]), row["deliveries_count"]) == (body, 0), row["queue"]
    assert sum(row["queue"] == "other" for row in rows) == len(policies)
    assert silent(heard)


# -- batches ---------------------------------------------------------------------------------------


async def test_a_move_of_a_batch_leaves_out_settled_messages(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """A claim may skip a row that is locked for a moment, so there may be several batches."""
    acked: Counter[str] = Counter()

    def subscribe_batches(queue: str, policy: AckPolicy, how: str, opened: bool) -> None:
        @broker.subscriber(queue, **QUICK, batch=True, ack_policy=policy)
        async def handle(bodies: list[Any], message: SqlBrokerBatchMessage) -> None:
            assert await message.extend_lease("1h")
            if opened:
                await message.messages[0].ack()
                acked[queue] += 1
            if how == "raised":
                raise Move(f"other {queue}", body="new")
            await message.move_to(f"other {queue}", body="new")
            assert message.committed is AckStatus.ACKED
            if opened:
                assert {m.committed for m in message.messages} == {AckStatus.ACKED}

    queues: list[str] = []
    policies = (AckPolicy.NACK_ON_ERROR, AckPolicy.MANUAL)
    for policy, how, opened in product(policies, ("raised", "called"), (True, False)):
        queue = f"{how} {policy.value} {opened}"
        queues.append(queue)
        subscribe_batches(queue, policy, how, opened)
        await broker.publish_batch(*range(3), queue=queue, headers={"h": 1})
    await broker.start()

    async def done() -> bool:
        moved = Counter({f"other {queue}": 3 - acked[queue] for queue in queues})
        return Counter(r["queue"] for r in await look.rows()) == +moved

    await eventually(done)
    for row in await look.rows():
        assert (bytes(row["payload"]), row["headers"]["h"]) == (b"new", 1), row["queue"]
        assert row["headers"]["content-type"] == "text/plain", row["queue"]
    archived = Counter((r["queue"], r["state"]) for r in await look.rows(archive=True))
    assert archived == {(q, "COMPLETED"): count for q, count in acked.items()}
    assert set(acked) == {queue for queue in queues if queue.endswith("True")}
    assert silent(heard)


async def test_a_postponed_batch(broker: SqlBroker, look: Look, heard: Heard) -> None:
    """A claim may skip a row that is locked for a moment, so there may be several batches."""

    async def reject_one(message: SqlBrokerBatchMessage) -> None:
        for each in message.messages:
            if each.body == b"1":
                await each.reject(reason="bad")

    @broker.subscriber("raised", **QUICK, batch=True)
    async def raises(bodies: list[Any], message: SqlBrokerBatchMessage) -> None:
        await reject_one(message)
        raise Postpone("1h")

    @broker.subscriber("called", **QUICK, batch=True)
    async def calls(bodies: list[Any], message: SqlBrokerBatchMessage) -> None:
        await reject_one(message)
        await message.postpone("1h")

    for queue in ("raised", "called"):
        await broker.publish_batch(*range(3), queue=queue)
    await broker.start()

    async def ended() -> list[dict[str, Any]]:
        rows = await look.rows()
        later = [r for r in rows if r["next_attempt_at"] - r["created_at"] > HOUR * 0.99]
        return rows if len(rows) == len(later) == 4 else []

    rows = await eventually(ended)
    for queue in ("raised", "called"):
        of = [r for r in rows if r["queue"] == queue]
        kept = [(r["deliveries_count"], bytes(r["payload"])) for r in of]
        assert kept == [(0, b"0"), (0, b"2")], queue
    assert {r["state"] for r in rows} == {"PENDING"}
    archived = [(r["queue"], r["state"]) for r in await look.rows(archive=True)]
    assert sorted(archived) == [("called", "FAILED"), ("raised", "FAILED")]
    assert silent(heard)


# -- ACK_FIRST, RetryPossible ----------------------------------------------------------------------


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_under_ack_first_the_message_is_gone(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    says: list[Exception] = [Postpone(5), Move("other"), NotReadyYet(1, 5), RetryPossible()]

    def act(said: Exception) -> Act:
        return raising(lambda: said)

    acts = {type(said).__name__: act(said) for said in says}
    ids = await run_each(broker, acts, AckPolicy.ACK_FIRST)
    assert {r["state"] for r in await look.archived(len(says))} == {"COMPLETED"}

    def told() -> list[str]:
        lines = heard.texts("could not be applied to message", logging.ERROR)
        return lines if len(lines) == len(says) else []

    lines = await eventually(told)
    for name, message_id in ids.items():
        [line] = [
            each
            for each in lines
            if each.startswith(f"{name} could not be applied to message {message_id}:")
        ]
        assert "acked the message before its handler started" in line


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
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


async def test_retry_possible_is_a_nack_under_every_policy(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """Z4: where any other error would end it."""

    async def act(message: Any) -> None:
        try:
            raise ConnectionError("away")
        except ConnectionError:
            raise RetryPossible(delay="1h")  # noqa: B904 - the error behind it is to be found all the same

    policies: dict[str, AckPolicy] = {p.value: p for p in SETTLING}
    await run_each(broker, dict.fromkeys(policies, act), policies)
    for row in await retryable(look, len(policies)):
        case = row["queue"]
        assert (row["attempts_count"], row["deliveries_count"]) == (1, 1), case
        assert "ConnectionError: away" in row["last_error"], case
        assert row["next_attempt_at"] - row["last_attempt_at"] > HOUR * 0.99, case
    assert silent(heard)


async def test_once_releases_the_key_of_a_handler_that_did_nothing(
    broker: SqlBroker, look: Look
) -> None:
    """Z4."""
    calls: Counter[str] = Counter()

    def act(said: Exception | None) -> Act:
        async def act(message: Any) -> None:
            queue = message.raw_message.queue
            calls[queue] += 1
            if calls[queue] < 3:
                raise said or ValueError("boom")

        return act

    says = [RetryPossible(delay=0), NotReadyYet(0, "1h"), Postpone(0), None]
    for said in says:
        queue = type(said).__name__
        subscribe(broker, queue, act(said), **CALM, policies=[Once("1h")])
        await broker.publish("x", queue, key="k")
    await broker.start()
    ended = {r["queue"]: (r["state"], calls[r["queue"]]) for r in await look.archived(len(says))}
    assert ended == {
        type(said).__name__: ("COMPLETED", 3) if said else ("FAILED", 1) for said in says
    }


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
        with patch.object(store, "poll_all", wraps=store.poll_all) as looked:
            await eventually(lambda: looked.call_count > 2)
        assert await store.release_stuck(["q"], 10) == 0

    limits = {"release_stuck_timeout": lease, "release_stuck_interval": 0.05, "max_lease": lease}
    await run(broker, act, max_workers=2, **limits)
    [row] = await look.archived()
    assert (calls, row["deliveries_count"]) == (1, 1)
    assert not heard.texts("lease lost")


# -- publish_count ---------------------------------------------------------------------------------


async def test_a_handler_can_give_up_on_a_message_published_too_often(
    broker: SqlBroker, look: Look, engine: AsyncEngine
) -> None:
    """P10: apart from attempts and deliveries; 1 where a producer says nothing."""
    seen: list[tuple[int, int, int]] = []

    @broker.subscriber("q", **ONE_LOOK)
    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        seen.append((message.publish_count, message.attempts_count, message.deliveries_count))
        if message.publish_count > 3:
            await message.reject(reason="published too often")

    async with engine.begin() as connection:
        for columns, values in (("", ""), (", publish_count", ", 3"), (", publish_count", ", 4")):
            await connection.execute(
                text(f"INSERT INTO message (queue, payload{columns}) VALUES ('q', 'x'{values})")
            )
    await broker.start()
    ended = {r["publish_count"]: r["state"] for r in await look.archived(3)}
    assert ended == {1: "COMPLETED", 3: "COMPLETED", 4: "FAILED"}
    assert sorted(seen) == [(1, 0, 1), (3, 0, 1), (4, 0, 1)]

"""broker.pop and broker.reserve: single messages for the application, outside of handlers."""

import asyncio
from datetime import timedelta
from time import monotonic
from typing import Any
from unittest.mock import patch

import pytest
from faststream import StreamMessage
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    LeaseLostError,
    LinearRetryStrategy,
    Reservation,
    SetupError,
    SqlBroker,
    SqlBrokerSchemaConfig,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.messages.single_claim import DirectClaims
from faststream_sqlbroker.schema.types import clock
from tests.clock import ShiftedTime
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually
from tests.proxy import COMMIT, proxied

pytestmark = pytest.mark.capability("`pop`, and `reserve` with commit and rollback")

on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
"""SQLite has no connection that could break."""


async def expire(look: Look) -> None:
    """Let every lease run out, by the database's clock."""
    table = look.tables.message
    async with look.engine.begin() as connection:
        late = update(table).where(table.c.state == "PROCESSING").values(lease_expires_at=clock())
        await connection.execute(late)


async def reserved(broker: SqlBroker, *queues: str, **options: Any) -> Reservation:
    found = await broker.reserve(list(queues or ("q",)), **options)
    assert found is not None
    return found


async def test_pop_removes_what_it_gives(broker: SqlBroker, look: Look) -> None:
    """M3: at most once; it is archived in the transaction that takes it."""
    assert await broker.pop("q") is None
    message_id = await broker.publish({"a": 1}, "q", key="k", headers={"x": "y"}, priority=3)
    found = await broker.pop("q")
    assert found is not None
    assert (found.id, found.queue, found.key, found.priority) == (message_id, "q", "k", 3)
    assert (found.body, found.raw, found.headers["x"]) == ({"a": 1}, b'{"a":1}', "y")
    assert (found.attempts_count, found.deliveries_count, found.publish_count) == (0, 1, 1)
    assert await look.rows() == []
    [row] = await look.rows(archive=True)
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("COMPLETED", 1, 1)
    assert row["last_attempt_at"] == row["acquired_at"]
    assert await broker.pop("q") is None


async def test_commit_completes_and_keeps_a_changed_body(broker: SqlBroker, look: Look) -> None:
    """M3: reserve, commit."""
    await broker.publish("text", "q", headers={"x": 1})
    found = await reserved(broker)
    assert found.is_held
    assert (await look.in_state("PROCESSING"))["deliveries_count"] == 1
    await found.commit(body={"done": True})
    assert not found.is_held
    [row] = await look.archived()
    assert (row["state"], row["payload"], row["attempts_count"]) == (
        "COMPLETED",
        b'{"done":true}',
        1,
    )
    assert row["headers"] == {"x": 1, "content-type": "application/json"}
    with pytest.raises(SetupError, match="is already committed"):
        await found.rollback()


async def test_any_body_can_replace_the_body(broker: SqlBroker, look: Look) -> None:
    bodies: tuple[Any, ...] = (None, b"", b"\x00\xff", "grüße", [1, 2])
    for count, body in enumerate(bodies, 1):
        await broker.publish({"a": 1}, "q")
        found = await reserved(broker)
        await found.move_to("r", body)
        moved = await broker.pop("r")
        assert moved is not None, body
        assert moved.body == (b"" if body is None else body), body
        await broker.publish({"a": 1}, "q")
        await (await reserved(broker)).commit(body)
        kept = [row["payload"] for row in await look.archived(2 * count)]
        assert kept[-2] == kept[-1], body


async def test_rollback_counts_an_attempt_and_waits(broker: SqlBroker, look: Look) -> None:
    """M3: rollback with a delay; without one the retry strategy says when."""
    await broker.publish("x", "q")
    await (await reserved(broker)).rollback("1h", error="no\x00 reply")
    row = await look.in_state("RETRYABLE")
    assert (row["attempts_count"], row["deliveries_count"], row["last_error"]) == (
        1,
        1,
        "no\ufffd reply",
    )
    assert (
        timedelta(minutes=59)
        < row["next_attempt_at"] - row["last_attempt_at"]
        < timedelta(minutes=61)
    )
    assert await broker.reserve("q") is None
    await broker.publish("y", "q")
    found = await reserved(broker, retry_strategy=ConstantRetryStrategy(delay_seconds=0))
    assert found.body == "y"
    await found.rollback(error=ValueError("bad"))
    again = await reserved(broker)
    assert (again.id, again.attempts_count, again.deliveries_count) == (found.id, 1, 2)
    await again.rollback(0)
    for _ in range(8):
        await (await reserved(broker)).rollback(0)
    [row] = await look.rows(archive=True)
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "max_attempts", 10)
    assert "ValueError: bad" in row["last_error"]


async def test_without_a_strategy_a_rollback_is_the_end_unless_it_says_when(
    broker: SqlBroker, look: Look
) -> None:
    await broker.publish("x", "q")
    await (await reserved(broker, retry_strategy=None)).rollback(0)
    await (await reserved(broker, retry_strategy=None)).rollback()
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("FAILED", "max_attempts")


async def test_reject_is_a_dead_letter(broker: SqlBroker, look: Look) -> None:
    await broker.publish("x", "q")
    await (await reserved(broker)).reject("кто это?", error=KeyError("u"))
    [row] = await look.archived()
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "кто это?", 1)
    assert "KeyError" in row["last_error"]


async def test_move_to_takes_the_message_elsewhere(broker: SqlBroker, look: Look) -> None:
    message_id = await broker.publish("x", "q", key="k", dedup_id="d")
    await (await reserved(broker)).rollback(0)
    await (await reserved(broker)).move_to("other", delay="1h")
    row = await look.in_state("PENDING")
    assert (row["id"], row["queue"], row["payload"], row["key"]) == (message_id, "other", b"x", "k")
    assert (row["attempts_count"], row["deliveries_count"], row["dedup_id"]) == (0, 0, None)
    assert row["next_attempt_at"] - row["created_at"] > timedelta(minutes=59)
    await broker.publish("y", "q")
    await (await reserved(broker)).move_to("third")
    moved = await reserved(broker, "third")
    assert moved.body == "y"
    with pytest.raises(SetupError, match="cannot be the name of a queue"):
        await moved.move_to("")
    with pytest.raises(SetupError, match="delay cannot be 'soon'"):
        await moved.move_to("q", delay="soon")
    await moved.move_to("日本")
    assert await broker.pop("日本") is not None


async def test_an_expired_reservation_may_be_claimed_by_others(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    """M3: the time-out. Without any subscriber the next who looks gives it back; the late write
    changes nothing."""
    await broker.publish("x", "q")
    late = await reserved(broker, lease="1h")
    assert await broker.reserve("q") is None
    await expire(look)
    other = SqlBroker(engine, logger=None)
    found = await reserved(other)
    assert (found.id, found.deliveries_count, found.attempts_count) == (late.id, 2, 0)
    before = await look.rows()
    for act in (late.commit, lambda: late.commit(b"late"), late.extend, late.rollback, late.reject):
        late.raw_message.lease_lost = False
        with pytest.raises(
            LeaseLostError,
            match=f"lease lost: another worker may have message {late.id} of queue 'q'",
        ):
            await act()
    late.raw_message.lease_lost = False
    with pytest.raises(LeaseLostError):
        await late.move_to("r", b"late")
    assert not late.is_held
    with pytest.raises(LeaseLostError):
        await late.commit()
    assert await look.rows() == before
    await found.commit()
    [row] = await look.archived()
    assert (row["payload"], row["deliveries_count"]) == (b"x", 2)


async def test_extend_lengthens_the_lease_by_the_databases_clock(
    broker: SqlBroker, look: Look
) -> None:
    await broker.publish("x", "q")
    found = await reserved(broker, lease="30m")
    await found.extend("1h")
    row = await look.in_state("PROCESSING")
    assert row["lease_expires_at"] - row["acquired_at"] > timedelta(minutes=59)
    assert found.is_held
    await expire(look)
    await found.extend()  # no one else took it
    row = await look.in_state("PROCESSING")
    assert (
        timedelta(minutes=29) < row["lease_expires_at"] - row["acquired_at"] < timedelta(minutes=59)
    )
    assert await broker.reserve("q") is None
    with pytest.raises(SetupError, match="lease must be longer than 0"):
        await found.extend(0)
    await found.commit()


async def test_a_shorter_extension_changes_nothing(broker: SqlBroker, look: Look) -> None:
    await broker.publish("x", "q")
    found = await reserved(broker, lease="1h")
    before = await look.in_state("PROCESSING")
    await found.extend("200ms")
    assert await look.in_state("PROCESSING") == before
    broker._clock.use(time := ShiftedTime())
    time.shift = 1800.0
    assert found.is_held
    time.shift = 3600.0
    assert not found.is_held
    await found.commit()


async def test_a_short_lease_comes_back_by_itself(broker: SqlBroker) -> None:
    await broker.publish("x", "q")
    first = await reserved(broker, lease="300ms")
    second = await broker.reserve("q", wait="60s")
    assert second is not None
    assert second.id == first.id
    assert not first.is_held


async def test_with_commits_at_the_end_and_rolls_back_on_an_error(
    broker: SqlBroker, look: Look
) -> None:
    await broker.publish("x", "q")
    async with await reserved(broker) as found:
        assert found.body == "x"
    assert [row["state"] for row in await look.archived()] == ["COMPLETED"]

    await broker.publish("y", "q")
    with pytest.raises(ZeroDivisionError):
        async with await reserved(broker):
            raise ZeroDivisionError("zero")
    row = await look.in_state("RETRYABLE")
    assert (row["attempts_count"], "zero" in row["last_error"]) == (1, True)


async def test_with_does_nothing_more_where_it_was_settled_inside(
    broker: SqlBroker, look: Look
) -> None:
    await broker.publish("x", "q")
    with pytest.raises(ZeroDivisionError):
        async with await reserved(broker) as found:
            await found.reject("bad")
            raise ZeroDivisionError
    assert [row["reason"] for row in await look.archived()] == ["bad"]


async def test_with_does_not_mask_the_blocks_error_by_a_lost_lease(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    await broker.publish("x", "q")
    with pytest.raises(ZeroDivisionError) as caught:
        async with await reserved(broker):
            await expire(look)
            await (await reserved(SqlBroker(engine, logger=None))).commit()
            raise ZeroDivisionError
    assert "lease lost" in caught.value.__notes__[0]
    await broker.publish("y", "q")
    with pytest.raises(LeaseLostError):
        async with await reserved(broker):
            await expire(look)
            await (await reserved(SqlBroker(engine, logger=None))).commit()


async def test_a_cancelled_block_gives_back_without_an_attempt(
    broker: SqlBroker, look: Look
) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with await reserved(broker):
            inside.set()
            await asyncio.Event().wait()

    await broker.publish("x", "q")
    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    row = await look.in_state("PENDING")
    assert (row["attempts_count"], row["deliveries_count"]) == (0, 1)


async def test_a_commit_is_written_though_its_caller_was_cancelled(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block's end does not roll back what it has committed."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    settle = DirectClaims.settle

    async def slowly(self: DirectClaims, *arguments: Any, **options: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await settle(self, *arguments, **options)

    async def work() -> None:
        async with await reserved(broker) as found:
            await found.commit({"done": True})

    monkeypatch.setattr(DirectClaims, "settle", slowly)
    await broker.publish("x", "q")
    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert getattr(caught.value, "__notes__", []) == []
    [row] = await look.archived()
    assert (row["state"], row["payload"]) == ("COMPLETED", b'{"done":true}')


async def test_two_ends_at_once_are_one(broker: SqlBroker, look: Look) -> None:
    await broker.publish("x", "q")
    found = await reserved(broker)
    ends = await asyncio.gather(found.commit(), found.reject("bad"), return_exceptions=True)
    assert ends[0] is None
    assert isinstance(ends[1], SetupError)
    assert "is already committed" in str(ends[1])
    assert [row["state"] for row in await look.archived()] == ["COMPLETED"]


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 5, 8, 30])
async def test_a_cancelled_reserve_leases_nothing(
    broker: SqlBroker, look: Look, ticks: int
) -> None:
    """The one between the answer to the COMMIT and the end of decoding included."""
    take = DirectClaims.claim
    tries = 0

    async def slowly(self: DirectClaims, *arguments: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        taken = await take(self, *arguments, **options)
        for _ in range(4):
            await asyncio.sleep(0)
        return taken

    await broker.publish("x", "q")
    with patch.object(DirectClaims, "claim", slowly):
        task = asyncio.create_task(broker.reserve("q", wait=None))
        for _ in range(ticks):
            await asyncio.sleep(0.001 if ticks > 5 else 0)
        task.cancel()
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(outcome, Reservation):
        await outcome.rollback(0)
        return
    assert isinstance(outcome, asyncio.CancelledError)
    await eventually(lambda: not broker._shielded._tasks)
    row = await look.in_state("PENDING")
    assert (row["attempts_count"], row["deliveries_count"]) == (0, 0)


async def test_the_highest_priority_and_the_earliest_due_first(broker: SqlBroker) -> None:
    for body, priority in ((1, 0), (2, 5), (3, 5), (4, -5)):
        await broker.publish(body, "q", priority=priority)
    await broker.publish(9, "q", priority=100, delay="1h")
    bodies = [found.body for _ in range(4) if (found := await broker.pop("q"))]
    assert bodies == [2, 3, 1, 4]
    assert await broker.pop("q") is None


async def test_queues_take_turns(broker: SqlBroker) -> None:
    for _ in range(4):
        await broker.publish("x", "a", priority=50)
        await broker.publish("x", "b")
    taken = [found.queue for _ in range(8) if (found := await broker.pop("a", "b"))]
    assert sorted(taken[:4]) == ["a", "a", "b", "b"]
    assert sorted(taken) == ["a"] * 4 + ["b"] * 4


async def test_expired_ones_are_discarded_and_not_given(broker: SqlBroker, look: Look) -> None:
    """More of them than one transaction settles."""
    await broker.publish_batch(*range(250), queue="q", expires_in=0.001)
    await broker.publish("good", "q")
    await asyncio.sleep(0.01)  # so that they have expired
    found = await broker.pop("q")
    assert found is not None
    assert found.body == "good"
    rows = await look.archived(251)
    assert [row["reason"] for row in rows[:-1]] == ["expired"] * 250


async def test_the_limit_of_deliveries_holds(broker: SqlBroker, look: Look, heard: Heard) -> None:
    await broker.publish("x", "q")
    for _ in range(2):
        assert await broker.reserve("q", max_deliveries=2) is not None
        await expire(look)
    assert await broker.reserve("q", max_deliveries=2) is None
    [row] = await look.archived()
    assert (row["state"], row["reason"], row["deliveries_count"]) == ("FAILED", "max_deliveries", 3)
    assert heard.texts("delivery limit was exceeded")
    await broker.publish("x", "q")
    for _ in range(25):
        assert await broker.reserve("q", max_deliveries=None) is not None
        await expire(look)
    assert await broker.pop("q", max_deliveries=None) is not None


async def test_a_body_that_cannot_be_decoded_can_be_settled(
    engine: AsyncEngine, look: Look
) -> None:
    """Codec and decoder are the broker's, as for subscribers."""

    async def decoder(msg: StreamMessage[Any], original: Any) -> Any:
        body = await original(msg)
        if body == "bad":
            raise ValueError("bad body")
        return body.upper()

    broker = SqlBroker(engine, logger=None, decoder=decoder)
    await broker.create_tables()
    await broker.publish("good", "q")
    await broker.publish("bad", "q")
    async with await reserved(broker) as found:
        assert found.body == "GOOD"
    found = await reserved(broker)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad body"):
            _ = found.body
    assert found.raw == b"bad"
    with pytest.raises(ValueError):
        async with found:
            _ = found.body
    assert (await look.in_state("RETRYABLE"))["attempts_count"] == 1


async def test_a_codec_encodes_and_decodes(engine: AsyncEngine, look: Look) -> None:
    class Backwards:
        async def decode(self, msg: StreamMessage[Any]) -> Any:
            return msg.body[::-1].decode()

        async def encode(self, msg: Any, serializer: Any = None) -> tuple[bytes, str | None]:
            return str(msg).encode()[::-1], "text/backwards"

    broker = SqlBroker(engine, logger=None, codec=Backwards())
    await broker.create_tables()
    await broker.publish("abc", "q")
    found = await reserved(broker)
    assert (found.raw, found.body) == (b"cba", "abc")
    await found.move_to("r", "xyz")
    row = await look.in_state("PENDING")
    assert (row["payload"], row["headers"]["content-type"]) == (b"zyx", "text/backwards")


async def test_waiting_is_ended_by_a_publish_a_due_time_and_its_own_limit(
    broker: SqlBroker,
) -> None:
    began = monotonic()
    async with asyncio.timeout(60):
        assert await broker.reserve("q", wait="200ms") is None
    assert monotonic() - began >= 0.2
    task = asyncio.create_task(broker.pop("q", wait=None))
    await eventually(lambda: broker._wakeups._hints)
    await broker.publish("x", "q")
    found = await asyncio.wait_for(task, 60)
    assert found is not None
    assert broker._wakeups._hints == {}
    await broker.publish("y", "q", delay=0.3)
    found = await broker.pop("q", wait="60s")
    assert found is not None
    assert found.body == "y"


async def test_many_take_each_message_once(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    """M3: several brokers at the same time."""
    brokers = [broker, *(SqlBroker(engine, logger=None) for _ in range(3))]
    await broker.publish_batch(*range(60), queue="q")
    taken: list[int] = []

    async def work(of: SqlBroker, n: int) -> None:
        while len(taken) < 60:
            if n % 2:
                popped = await of.pop("q", wait="300ms")
                if popped is not None:
                    taken.append(popped.body)
            else:
                found = await of.reserve("q", wait="300ms")
                if found is not None:
                    async with found:
                        taken.append(found.body)

    await asyncio.gather(*(work(of, n) for n, of in enumerate(brokers)))
    assert sorted(taken) == list(range(60))
    await look.archived(60)


async def test_a_reserve_and_a_subscriber_never_share_a_message(
    broker: SqlBroker, look: Look
) -> None:
    handled: list[int] = []

    @broker.subscriber("q", **QUICK, fetch_batch_size=2)
    async def handle(body: int) -> None:
        handled.append(body)
        await asyncio.sleep(0.001)

    await broker.publish_batch(*range(100), queue="q")
    await broker.start()
    while (found := await broker.reserve("q")) is not None:
        async with found:
            handled.append(found.body)
    await look.archived(100)
    assert sorted(handled) == list(range(100))


async def test_a_move_or_a_rollback_wakes_a_subscriber(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("r", "q", max_fetch_interval=600, wakeup="auto")
    async def handle(_body: str) -> None:
        pass

    for queue in ("a", "a"):
        await broker.publish("x", queue)
    moved = await reserved(broker, "a")
    back = await reserved(broker, "a")
    await back.move_to("q", delay=0)
    back = await reserved(broker, "q", lease="1h")
    await broker.start()
    await moved.move_to("r")
    await look.in_state("PROCESSING")
    await back.rollback(0)
    await look.archived(2)


@on_servers
async def test_unanswered_commits(broker: SqlBroker, look: Look, database_url: str) -> None:
    """A reserve gives back and looks again; a pop says that it does not know; a settlement is
    written once."""
    async with proxied(database_url) as (proxy, url):
        engine = create_async_engine(url)
        far = SqlBroker(engine, logger=None)
        assert await far.reserve("q") is None
        await broker.publish("x", "q")
        proxy.swallow_answer_to = COMMIT
        found = await reserved(far)
        assert proxy.swallowed == 1
        assert found.deliveries_count == 1, "the unknown one was given back, uncharged"
        proxy.swallow_answer_to = COMMIT
        with pytest.raises(
            UnknownOutcomeError, match="either the first try was committed or the lease is lost"
        ):
            await found.commit()
        assert [row["state"] for row in await look.archived()] == ["COMPLETED"]
        await broker.publish("y", "q")
        proxy.swallow_answer_to = COMMIT
        with pytest.raises(UnknownOutcomeError):
            await far.pop("q")
        assert proxy.swallowed == 3
        assert await far.pop("q") is None
        await look.archived(2)
        await far.stop()
        await engine.dispose()


async def test_a_settle_that_could_not_be_written_can_be_repeated(
    broker: SqlBroker, look: Look
) -> None:
    async def failing(self: DirectClaims, *_: Any) -> Any:
        raise TransientStoreError("away")

    await broker.publish("x", "q")
    found = await reserved(broker)
    with patch.object(DirectClaims, "settle", failing), pytest.raises(TransientStoreError):
        await found.commit()
    await found.commit()
    await look.archived()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_without_an_archive_finished_messages_are_deleted(engine: AsyncEngine) -> None:
    schema = SqlBrokerSchemaConfig(message_table_name="m", message_archive_table_name=None)
    broker = SqlBroker(engine, logger=None, schema=schema)
    await broker.create_tables()
    for _ in range(2):
        await broker.publish("x", "q")
    assert await broker.pop("q") is not None
    await (await reserved(broker)).commit(b"changed")
    assert await broker.pop("q") is None


async def test_rows_of_other_programs(broker: SqlBroker, look: Look) -> None:
    """Headers that are no object."""
    await broker._store.insert([NewMessage("q", b"x", "[1, 2]")])
    found = await reserved(broker)
    assert (found.body, found.headers) == (b"x", {"value": [1, 2]})
    await found.commit({"a": 1})
    [row] = await look.archived()
    assert row["headers"] == {"value": [1, 2], "content-type": "application/json"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"queues": ()}, "queues is empty"),
        ({"queues": ["a", "a"]}, "given twice"),
        ({"queues": 5}, "must be a name or a list of names"),
        ({"queues": "q", "lease": 0}, "lease must be longer than 0"),
        ({"queues": "q", "wait": -1}, "wait must be 0 or more"),
        ({"queues": "q", "max_deliveries": 0}, "max_deliveries must be a whole number"),
        ({"queues": "q", "retry_strategy": LinearRetryStrategy}, "must be an instance"),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_wrong_arguments_are_named(
    broker: SqlBroker, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(SetupError, match=words):
        await broker.reserve(**arguments)

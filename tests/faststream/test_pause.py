"""P5: pulling is stopped for a queue and the whole fleet, or for one subscriber, and goes on."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import AsyncMock

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SetupError, SqlBroker, SqlBrokerResponse
from faststream_sqlbroker.flow.fleet import heartbeat as heartbeat_module
from faststream_sqlbroker.flow.fleet import registration
from tests.faststream.conftest import QUICK, Heard, Look, clean_up
from tests.helpers import eventually

pytestmark = pytest.mark.capability("pause and resume: a queue for the fleet, or one subscriber")

SOON = 0.2
"""Seconds between two signs of life."""


@pytest.fixture
async def broker(engine: AsyncEngine, logger: Any) -> AsyncIterator[SqlBroker]:
    broker = SqlBroker(engine, logger=logger, graceful_timeout=60.0, presence_interval=SOON)
    await broker.create_tables()
    yield broker
    await clean_up(broker)


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[SqlBroker]:
    """A broker without subscribers, as of another process."""
    engine = create_async_engine(database_url)
    yield SqlBroker(engine, logger=None)
    await engine.dispose()


def collect(broker: SqlBroker, *queues: str, **options: Any) -> list[Any]:
    """Subscribe; bodies as they are handled."""
    handled: list[Any] = []

    @broker.subscriber(list(queues), **{**QUICK, **options})
    async def handle(body: Any) -> None:
        handled.extend(body if isinstance(body, list) else [body])

    return handled


def of(broker: SqlBroker, queue: str) -> Any:
    """The subscriber of `queue`."""
    return next(s for s in broker.subscribers if queue in s.queues)  # type: ignore[attr-defined]


async def untouched(look: Look, bodies: int) -> bool:
    """Whether as many messages wait, given back without a charge if they were claimed."""
    rows = await look.rows()
    return [(r["state"], r["deliveries_count"]) for r in rows] == [("PENDING", 0)] * bodies


async def test_a_pause_holds_at_once_in_its_own_process(broker: SqlBroker, look: Look) -> None:
    handled = collect(broker, "q")
    await broker.start()
    await broker.publish(1, "q")
    await eventually(lambda: handled == [1])
    await broker.admin.pause("q", reason="provider down", by="Ann")
    await broker.publish_batch(2, 3, queue="q")
    await asyncio.sleep(3 * SOON)  # some signs of life later it still holds
    assert handled == [1]
    assert await untouched(look, 2)
    [paused] = await broker.admin.paused()
    assert (paused.queue, paused.by, paused.reason, paused.until) == (
        "q",
        "Ann",
        "provider down",
        None,
    )
    assert await broker.ping(60.0)
    assert await broker.admin.resume("q")
    await eventually(lambda: sorted(handled) == [1, 2, 3])
    assert not await broker.admin.resume("q")


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"batch": True}], ids=str)
async def test_only_the_paused_queue_waits(
    broker: SqlBroker, look: Look, options: dict[str, Any]
) -> None:
    handled = collect(broker, "a", "b", **options)
    await broker.admin.pause("a")
    await broker.start()
    for queue in ("a", "b"):
        bodies = (
            SqlBrokerResponse(f"{queue}{n}", key=f"k{n % 3}", priority=n % 2) for n in range(20)
        )
        await broker.publish_batch(*bodies, queue=queue)
    await eventually(lambda: len(handled) >= 20)
    assert sorted(handled) == sorted(f"b{n}" for n in range(20))
    await eventually(lambda: untouched(look, 20))
    await broker.admin.resume("a")
    await eventually(lambda: len(handled) >= 40)
    await look.archived(40)


async def test_running_messages_go_on_and_waiting_ones_are_given_back(
    broker: SqlBroker, look: Look
) -> None:
    started = asyncio.Event()
    may_end = asyncio.Event()
    handled: list[int] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: int) -> None:
        started.set()
        await may_end.wait()
        handled.append(body)

    await broker.publish_batch(*range(50), queue="q")
    await broker.start()
    await started.wait()
    await broker.admin.pause("q")

    async def given_back() -> bool:
        rows = await look.rows()
        return sorted((r["state"], r["deliveries_count"]) for r in rows) == [
            *[("PENDING", 0)] * 49,
            ("PROCESSING", 1),
        ]

    await eventually(given_back)
    may_end.set()
    await eventually(lambda: untouched(look, 49))
    assert len(handled) == 1
    await broker.admin.resume("q")
    await look.archived(50)


async def test_another_process_learns_of_a_pause_within_the_interval(
    broker: SqlBroker, other: SqlBroker, look: Look
) -> None:
    handled = collect(broker, "q")
    await broker.start()
    await other.admin.pause("q", until="1h")
    subscriber = of(broker, "q")
    await eventually(lambda: subscriber.consumer.registration.open_queues == ())
    await broker.publish(1, "q")
    await other.admin.resume("q")
    await eventually(lambda: handled == [1])


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_on_postgresql_other_processes_learn_of_a_pause_at_once(
    engine: AsyncEngine, other: SqlBroker
) -> None:
    broker = SqlBroker(engine, logger=None, presence_interval="1h")
    await broker.create_tables()
    handled = collect(broker, "q", wakeup="auto")
    await broker.start()
    try:
        subscriber = of(broker, "q")
        await eventually(
            lambda: broker._wakeups.is_listening and subscriber.consumer.registration.open_queues
        )
        await other.admin.pause("q")
        await eventually(lambda: subscriber.consumer.registration.open_queues == ())
        await broker.publish(1, "q")
        await other.admin.resume("q")
        await eventually(lambda: handled == [1])
    finally:
        await broker.stop()


async def test_a_pause_survives_all_processes(
    engine: AsyncEngine, broker: SqlBroker, look: Look
) -> None:
    """A subscriber that starts claims nothing before it knows what is paused."""
    await broker.admin.pause("a")
    await broker.publish_batch(*range(10), queue="a")
    for _ in range(3):
        again = SqlBroker(engine, logger=None, presence_interval=SOON)
        handled = collect(again, "a", "b")
        await again.start()
        await again.publish("b", "b")
        await eventually(lambda handled=handled: handled == ["b"])
        await again.stop()
        assert handled == ["b"]
    assert [r["deliveries_count"] for r in await look.rows()] == [0] * 10


async def test_a_pause_ends_by_itself(broker: SqlBroker) -> None:
    """By the database's clock, however long the start takes: when it was handled, it was no longer
    paused."""
    paused_at_call: list[Any] = []

    @broker.subscriber("q", **QUICK)
    async def handle(_body: int) -> None:
        paused_at_call.append(await broker.admin.paused())

    await broker.publish(1, "q")
    began = time.monotonic()
    await broker.admin.pause("q", until=0.5)
    await broker.start()
    await eventually(lambda: paused_at_call)
    assert paused_at_call == [[]]
    assert time.monotonic() - began > 0.49  # clocks differ in speed a little


async def test_a_pause_returns_its_end(broker: SqlBroker) -> None:
    await broker.admin.pause("q", until="1m")
    [paused] = await broker.admin.paused()
    assert paused.until is not None
    assert paused.until - paused.since == timedelta(minutes=1)


async def test_an_end_that_is_over_is_refused_and_the_pause_stays(broker: SqlBroker) -> None:
    await broker.admin.pause("q")
    before = await broker.admin.paused()
    with pytest.raises(SetupError, match="until must be after the database's time"):
        await broker.admin.pause("q", until=datetime.now(timezone.utc) - timedelta(hours=1))
    assert await broker.admin.paused() == before
    assert [job.action for job in await broker.admin.audit()] == ["pause"]


async def test_until_may_be_a_moment(broker: SqlBroker) -> None:
    moment = datetime(2100, 1, 1, tzinfo=timezone(timedelta(hours=2)))
    await broker.admin.pause("q", until=moment)
    [paused] = await broker.admin.paused()
    assert paused.until == moment


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"until": 0}, "until must be a datetime, or a duration above 0"),
        ({"until": "-5s"}, "until must be a datetime, or a duration above 0"),
        ({"until": "200 years"}, "until cannot be '200 years'"),
        ({"until": datetime(2100, 1, 1)}, "until needs a time zone"),
        ({"until": datetime(9999, 1, 1, tzinfo=timezone.utc)}, "until must be in a year"),
        ({"reason": 5}, "reason must be text, got 5"),
        ({"by": b"x"}, "by must be text"),
        ({"queue": ""}, "cannot be the name of a queue"),
        ({"queue": "q "}, "must not end in a space"),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_wrong_arguments_of_a_pause_are_refused(
    broker: SqlBroker, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        await broker.admin.pause(arguments.pop("queue", "q"), **arguments)
    assert await broker.admin.paused() == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("interval", [0, "50ms", "2h", None])
async def test_an_impossible_interval_is_refused(engine: AsyncEngine, interval: Any) -> None:
    with pytest.raises(SetupError, match="presence_interval"):
        SqlBroker(engine, presence_interval=interval)


async def test_words_that_no_database_can_store_are_mended(broker: SqlBroker) -> None:
    await broker.admin.pause("q", reason="nul \x00, half \ud800, " + "long " * 1000)
    [paused] = await broker.admin.paused()
    assert paused.reason is not None
    assert paused.reason.startswith("nul \ufffd, half \ufffd, long")
    assert len(paused.reason.encode()) <= 1_000


# -- one subscriber --------------------------------------------------------------------------------


async def test_one_subscriber_pauses_and_the_others_go_on(broker: SqlBroker, look: Look) -> None:
    handled = collect(broker, "q", max_workers=2)
    others = collect(broker, "else")
    await broker.start()
    subscriber = of(broker, "q")
    subscriber.pause()
    subscriber.pause()
    assert subscriber.paused
    await broker.publish(1, "q")
    await broker.publish(2, "else")
    await eventually(lambda: others == [2])

    async def told() -> bool:
        return [s.paused for s in await broker.admin.subscribers("q")] == [True]

    await eventually(told)
    await subscriber.stop()
    await subscriber.start()
    await eventually(told)
    await eventually(lambda: untouched(look, 1))
    assert not handled
    subscriber.resume()
    await eventually(lambda: handled == [1])
    assert not subscriber.paused


async def test_a_subscriber_gives_waiting_rows_back_when_it_pauses(
    broker: SqlBroker, look: Look
) -> None:
    handled: list[int] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: int) -> None:
        handled.append(body)
        subscriber.pause()

    subscriber = of(broker, "q")
    await broker.publish_batch(*range(50), queue="q")
    await broker.start()
    await eventually(lambda: untouched(look, 49))
    assert len(handled) == 1
    await asyncio.wait_for(broker.stop(), 60)
    assert await untouched(look, 49)


async def test_a_subscriber_may_be_paused_before_it_starts(broker: SqlBroker, look: Look) -> None:
    handled = collect(broker, "q")
    subscriber = of(broker, "q")
    subscriber.pause()
    await broker.start()
    await broker.admin.pause("q")
    await broker.publish(1, "q")
    subscriber.resume()
    await asyncio.sleep(2 * SOON)
    assert not handled, "the queue is still paused"
    await broker.admin.resume("q")
    await eventually(lambda: handled == [1])


# -- it never hurts --------------------------------------------------------------------------------


async def _break(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("DROP TABLE message_policy_state"))


async def test_messages_go_on_when_heartbeats_fail(
    engine: AsyncEngine, broker: SqlBroker, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who looks for expired leases clears the same table, at the start too: without the table that
    # fails for good.
    monkeypatch.setattr(broker._store, "remove_expired_states", AsyncMock(return_value=0))
    handled = collect(broker, "a", "b")
    await broker.admin.pause("a")
    await broker.start()
    await broker.publish("b1", "b")
    await eventually(lambda: handled == ["b1"])
    await _break(engine)
    await eventually(lambda: heard.texts("the heartbeat loop failed"))
    await broker.publish("a", "a")
    await broker.publish("b2", "b")
    await eventually(lambda: handled == ["b1", "b2"])
    [subscriber, *_] = broker.subscribers
    await eventually(lambda: subscriber.healthy)  # type: ignore[attr-defined] # SQLite: the removal can cost a claim
    assert not await broker.ping(5.0), "a table is missing"
    await asyncio.wait_for(broker.stop(), 60)
    assert heard.texts("it counts as live until its lease expires")


async def test_the_first_claim_waits_for_seconds_only(
    engine: AsyncEngine, broker: SqlBroker, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "FIRST_WAIT", 0.5)
    handled = collect(broker, "q")
    await broker.publish(1, "q")
    await _break(engine)
    broker._validate_schema = False
    await broker.start()
    await eventually(lambda: handled == [1])
    await eventually(lambda: heard.texts("the heartbeat loop failed"))


@pytest.mark.parametrize("carrier", ["a look", "a statement of its own"])
async def test_a_pause_that_arrives_during_a_heartbeat_holds(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch, carrier: str
) -> None:
    """An answer read before the pause must not open the queue again, whichever statement carries
    the sign of life."""
    handled = collect(broker, "q")
    store = broker._store
    reading = asyncio.Event()
    may_answer = asyncio.Event()
    carried_by: list[str] = []
    look_around: Callable[..., Any] = store.poll_all
    announce: Callable[..., Any] = store.live_subscribers.write_heartbeat

    async def held(answer: Any, name: str) -> Any:
        carried_by.append(name)
        reading.set()
        await may_answer.wait()
        return answer

    async def slow_look(queues: Any, leased: Any, sign: Any = None) -> Any:
        answer = await look_around(queues, leased, sign)
        return answer if sign is None else await held(answer, "a look")

    async def slow_announce(*args: Any, **options: Any) -> Any:
        return await held(await announce(*args, **options), "a statement of its own")

    await broker.start()
    subscriber = of(broker, "q")
    heartbeat = broker._heartbeat
    await eventually(lambda: subscriber.consumer.registration.open_queues == ("q",))
    monkeypatch.setattr(store, "poll_all", slow_look)
    monkeypatch.setattr(store.live_subscribers, "write_heartbeat", slow_announce)
    if carrier == "a look":
        # Else a busy machine may let the sign be due before a look carries it.
        monkeypatch.setattr(heartbeat_module, "PIGGYBACK_WAIT", 1_000.0)
    else:
        heartbeat.wake()
    await asyncio.wait_for(reading.wait(), 60)
    assert carried_by[0] == carrier
    await broker.admin.pause("q")
    opened: list[Any] = []
    told = subscriber.consumer.registration.update_paused
    monkeypatch.setattr(
        subscriber.consumer.registration,
        "update_paused",
        lambda paused, drained: (opened.append(paused), told(paused, drained)),
    )
    may_answer.set()
    await eventually(lambda: len(opened) >= 2)
    assert set(opened) == {frozenset({"q"})}
    assert not handled


# -- pop and reserve -------------------------------------------------------------------------------


async def test_p5_pop_and_reserve_take_nothing_from_a_paused_queue(
    broker: SqlBroker, other: SqlBroker, look: Look
) -> None:
    """P5: for processes without subscribers, too; other queues go on."""
    await broker.publish_batch(1, 2, queue="q")
    await broker.admin.pause("q", reason="incident")
    for each in (broker, other):
        assert await each.pop("q") is None
        assert await each.reserve("q", wait="50ms") is None
    assert await untouched(look, 2)
    await broker.publish(3, "open")
    taken = await other.pop("q", "open", "none")
    assert taken is not None
    assert taken.body == 3
    await broker.admin.resume("q")
    reserved = await other.reserve("q")
    assert reserved is not None
    await reserved.commit()
    assert await broker.pop("q") is not None
    assert await look.archived(3)


async def test_a_pop_that_waits_goes_on_when_the_queue_is_resumed(
    broker: SqlBroker, other: SqlBroker, look: Look
) -> None:
    await broker.admin.pause("q")
    await broker.publish(1, "q")
    waiting = asyncio.create_task(other.pop("q", wait=60))
    await asyncio.sleep(SOON)
    assert await untouched(look, 1)
    assert not waiting.done()
    await broker.admin.resume("q")
    taken = await waiting
    assert taken is not None
    assert taken.body == 1


async def test_a_pause_that_has_ended_stops_no_pop(broker: SqlBroker, other: SqlBroker) -> None:
    await broker.publish(1, "q")
    await broker.admin.pause("q", until="50ms")
    assert await other.pop("q", wait=60) is not None


async def test_a_pause_is_of_one_queue_by_its_exact_name(broker: SqlBroker) -> None:
    await broker.publish(1, "Q")
    await broker.publish(2, "q ü")
    await broker.admin.pause("q")
    await broker.admin.pause("q u")
    for queue in ("Q", "q ü"):
        assert await broker.pop(queue) is not None

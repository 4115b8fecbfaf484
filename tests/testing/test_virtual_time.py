"""A day passes in milliseconds, in order, and alike each time."""

import asyncio
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import (
    DESTINATION,
    BlockingWait,
    ConstantRetryStrategy,
    ConstantWithJitterRetryStrategy,
    Debounce,
    Delay,
    SetupError,
    SqlBroker,
    TestSqlBroker,
    Throttle,
    VirtualClock,
    Window,
)
from faststream_sqlbroker.testing.pump import Pump, RunningDelivery
from tests.helpers import eventually
from tests.testing.conftest import unreachable

START = datetime(2030, 1, 1, tzinfo=timezone.utc)
TEN = timedelta(seconds=10)


class Seen:
    """What a handler got, and when."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.calls: list[tuple[Any, float]] = []

    def __call__(self, body: Any) -> None:
        """Note it."""
        self.calls.append((body, (self.clock.now - START).total_seconds()))


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(START)


@pytest.fixture
def seen(clock: VirtualClock) -> Seen:
    return Seen(clock)


def subscribe(broker: SqlBroker, seen: Seen, **options: Any) -> None:
    @broker.subscriber("q", **options)
    async def handle(body: Any) -> None:
        seen(body)


async def test_delays_come_at_their_moment(
    broker: SqlBroker, clock: VirtualClock, seen: Seen
) -> None:
    subscribe(broker, seen)
    async with TestSqlBroker(broker, clock=clock) as br:
        await br.publish("day", "q", delay="24h")
        await br.publish("hour", "q", delay="1h")
        await br.publish("now", "q")
        await clock.advance("59m59s")
        assert seen.calls == [("now", 0)]
        await clock.advance(1)
        await clock.advance("23h")
        assert seen.calls == [("now", 0), ("hour", 3600), ("day", 86400)]
        assert clock.now == START + timedelta(days=1)


async def test_order_is_due_time_priority_id(
    broker: SqlBroker, clock: VirtualClock, seen: Seen
) -> None:
    other = Seen(clock)
    subscribe(broker, seen)

    @broker.subscriber("r")
    async def handle(body: str) -> None:
        seen(body)
        other(body)

    async with TestSqlBroker(broker, clock=clock) as br:
        await br.publish("last", "q", delay=11)
        await br.publish("third", "q", delay=10)
        await br.publish("fourth", "r", delay=10)
        await br.publish("second", "r", delay=10, priority=5)
        await br.publish("first", "q", delay=9, priority=-5)
        await clock.advance(60)
    assert [body for body, _ in seen.calls] == ["first", "second", "third", "fourth", "last"]
    assert len(other.calls) == 2


async def test_retries(broker: SqlBroker, clock: VirtualClock, seen: Seen) -> None:
    @broker.subscriber("q", retry_strategy=ConstantRetryStrategy(delay_seconds=600, max_attempts=3))
    async def handle(body: str) -> None:
        seen(body)
        raise ValueError(body)

    async with TestSqlBroker(broker, clock=clock) as br:
        with pytest.raises(ValueError, match="x"):
            await br.publish("x", "q")
        await clock.advance("1h")
        assert [at for _, at in seen.calls] == [0, 600, 1200]
        with pytest.raises(BaseExceptionGroup) as caught:
            await br.drain(raise_errors=True)
        assert len(caught.value.exceptions) == 2
        drained = await br.drain()
        assert (drained.attempts, drained.waiting) == ([], [])


async def test_a_worker_that_waits_after_a_failure_goes_on(
    broker: SqlBroker, clock: VirtualClock, seen: Seen
) -> None:
    """0.05 + 0.01 is more than 0.06."""

    @broker.subscriber("q", policies=[BlockingWait("10ms")], retry_strategy=None)
    async def handle(body: str) -> None:
        seen(body)
        raise ValueError(body)

    async with TestSqlBroker(broker, clock=clock) as br:
        await br.publish("x", "q", delay="50ms")
        await br.publish("y", "q", delay="50ms")
        await clock.advance("1m")
        assert [body for body, _ in seen.calls] == ["x", "y"]
        assert (await br.drain()).waiting == []


async def test_chance_is_seeded() -> None:
    def times(seed: int) -> list[float]:
        clock = VirtualClock(START, seed=seed)
        broker, seen = unreachable(), Seen(clock)
        strategy = ConstantWithJitterRetryStrategy(
            base_delay_seconds=100, jitter_seconds=50, max_attempts=5
        )

        @broker.subscriber("q", retry_strategy=strategy)
        async def handle(body: str) -> None:
            seen(body)
            raise ValueError

        async def run() -> None:
            async with TestSqlBroker(broker, clock=clock) as br:
                with pytest.raises(ValueError):
                    await br.publish("x", "q")
                await clock.advance("1h")

        asyncio.run(run())
        return [at for _, at in seen.calls]

    one, again, other = [await asyncio.to_thread(times, seed) for seed in (1, 1, 2)]
    assert len(one) == 5
    assert one == again != other


async def test_policies(broker: SqlBroker, clock: VirtualClock, seen: Seen) -> None:
    late = Seen(clock)
    subscribe(broker, seen, policies=[Debounce("10s")])

    @broker.subscriber("throttled", policies=[Throttle(2, per="1m")])
    async def throttled(body: int) -> None:
        late(body)

    async with TestSqlBroker(broker, clock=clock) as br:
        for n in range(3):
            await br.publish(n, "q", key="k")
            await clock.advance(5)
        for n in range(5):
            await br.publish(n, "throttled")
        await clock.advance("10m")
    assert seen.calls == [(2, 20)]
    assert [body for body, _ in late.calls] == [0, 1, 2, 3, 4]
    assert all(b[1] - a[1] >= 60 for a, b in zip(late.calls, late.calls[2:], strict=False))


async def test_what_stands_by_goes_if_the_newest_is_taken_away(
    broker: SqlBroker, clock: VirtualClock, seen: Seen
) -> None:
    """At its time, though nothing else is due."""
    subscribe(broker, seen, policies=[Debounce("10s")])
    async with TestSqlBroker(broker, clock=clock) as br:
        ids = [await br.publish(n, "q", key="k") for n in range(3)]
        await clock.advance(1)
        assert (await br.admin.cancel(ids[2])).done
        assert [message.until for message in (await br.drain()).waiting] == [START + TEN] * 2
        await clock.advance("1m")
        assert (await br.drain()).waiting == []
    assert seen.calls == [(1, 10)]


async def test_delay_window_and_blocking_wait(
    broker: SqlBroker, clock: VirtualClock, seen: Seen
) -> None:
    by_day = Seen(clock)
    resting = Seen(clock)
    subscribe(broker, seen, policies=[Delay("2h")])

    @broker.subscriber("day", policies=[Window("09:00", "17:00")])
    async def day(body: str) -> None:
        by_day(body)

    @broker.subscriber("rest", policies=[BlockingWait("1m")], retry_strategy=None)
    async def rest(body: int) -> None:
        resting(body)
        if not body:
            raise ValueError

    async with TestSqlBroker(broker, clock=clock) as br:
        await br.publish("x", "q")
        await br.publish("x", "day")
        with pytest.raises(ValueError):
            await br.publish(0, "rest")
        await br.publish(1, "rest")
        await clock.advance("12h")
    assert seen.calls == [("x", 7200)]
    assert by_day.calls == [("x", 9 * 3600)]
    assert [body for body, _ in resting.calls] == [0, 1]


async def test_schedules_fire(broker: SqlBroker, clock: VirtualClock, seen: Seen) -> None:
    subscribe(broker, seen)
    broker.publish_on_schedule("hourly", "0 * * * *", "q", "tick")

    @broker.schedule("30 6 * * *", queue="q", name="daily")
    def daily(fire_time: datetime) -> str:
        return fire_time.isoformat()

    async with TestSqlBroker(broker, clock=clock):
        with patch.object(clock, "_run_until_idle", wraps=clock._run_until_idle) as moments:
            await clock.advance("24h")
    ticks = [at for body, at in seen.calls if body == "tick"]
    assert ticks == [3600 * n for n in range(1, 25)]
    assert [body for body, _ in seen.calls if body != "tick"] == ["2030-01-01T06:30:00+00:00"]
    assert moments.call_count < 100, "it polls"


async def test_a_schedule_names_a_destination(
    broker: SqlBroker, clock: VirtualClock, seen: Seen
) -> None:
    subscribe(broker, seen)
    broker.subscriber("front", forward_to=DESTINATION)
    broker.publish_on_schedule("hourly", "0 * * * *", "front", "tick", destination="q")
    async with TestSqlBroker(broker, clock=clock):
        await clock.advance("2h")
    assert seen.calls == [("tick", 3600), ("tick", 7200)]


async def test_messages_expire(broker: SqlBroker, clock: VirtualClock, seen: Seen) -> None:
    subscribe(broker, seen)
    async with TestSqlBroker(broker, clock=clock) as br:
        await br.publish("x", "q", delay="2h", expires_in="1h")
        await clock.advance("24h")
        assert seen.calls == []
        assert (await br.drain()).waiting == []


async def test_leases_end(broker: SqlBroker, clock: VirtualClock, seen: Seen) -> None:
    async with TestSqlBroker(broker, clock=clock) as br:
        await br.publish("x", "q")
        assert await br.reserve("q", lease="1m") is not None
        subscriber = br.subscriber("q", persistent=False)

        @subscriber
        async def handle(body: str) -> None:
            seen(body)

        await subscriber.start()
        [waiting] = (await br.drain()).waiting
        assert "is leased until" in waiting.reason
        await clock.advance("59s")
        assert seen.calls == []
        await clock.advance("2s")
        [(_, at)] = seen.calls
        assert 60 <= at <= 60.01


async def test_locks_and_waits(broker: SqlBroker, clock: VirtualClock) -> None:
    async with TestSqlBroker(broker, clock=clock) as br:
        waiting = asyncio.create_task(br.pop("q", wait="1h"))
        await clock.advance("59m")
        assert not waiting.done()
        await clock.advance("2m")
        assert await waiting is None
        async with br.lock("k", lease="30s"):
            await clock.advance("1h")
            trying = asyncio.create_task(br.pop("q", wait=None))
            await clock.advance("1m")
            await br.publish("x", "q")
            await clock.advance("1s")
            popped = await trying
            assert popped is not None


async def test_pauses_end(broker: SqlBroker, clock: VirtualClock, seen: Seen) -> None:
    subscribe(broker, seen)
    async with TestSqlBroker(broker, clock=clock) as br:
        await br.admin.pause("q", until=clock.now + timedelta(hours=1))
        await br.publish("x", "q")
        await clock.advance("30m")
        assert seen.calls == []
        await clock.advance("31m")
        assert [body for body, _ in seen.calls] == ["x"]


async def test_time_passes_only_once_running_handlers_have_ended(
    broker: SqlBroker, clock: VirtualClock, tmp_path: Path
) -> None:
    """A COMMIT has started one, and nothing waits for it."""
    runs = asyncio.Event()
    ended: list[datetime] = []

    @broker.subscriber("q")
    async def slow() -> None:
        runs.set()
        await asyncio.sleep(0.05)
        ended.append(clock.now)

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/app.db")
    began = clock.now
    async with TestSqlBroker(broker, engine=engine, clock=clock) as br:
        async with engine.begin() as connection:
            await br.publish("x", "q", connection=connection)
        await runs.wait()
        await clock.advance("1m")
        assert ended == [began]
    await engine.dispose()


async def test_an_engine_that_a_real_broker_has_used_has_the_time_of_the_test(
    clock: VirtualClock, tmp_path: Path
) -> None:
    """Its connection has prepared statements, such as those of schedules, with SQLite's clock."""
    engine = create_async_engine(
        f"sqlite+aiosqlite:///{tmp_path}/app.db", pool_size=1, max_overflow=0
    )
    broker = SqlBroker(engine, logger=None)
    seen = Seen(clock)
    broker.subscriber("q")(seen)
    broker.publish_on_schedule("daily", "0 6 * * *", "q", "x")
    await broker.create_tables()
    async with broker:
        await broker.start()
        await eventually(lambda: broker.admin.run_schedule("daily"))
        await eventually(lambda: len(seen.calls) == 1)
    seen.calls.clear()
    async with TestSqlBroker(broker, engine=engine, clock=clock, connect_only=False):
        await clock.advance("48h")
    # First what was missed since the real firing.
    assert seen.calls == [("x", 0.0), ("x", 6 * 3600.0), ("x", 30 * 3600.0)]
    await engine.dispose()


async def test_a_handler_may_wait_for_time_in_tasks_of_its_own(
    broker: SqlBroker, clock: VirtualClock
) -> None:
    found: list[Any] = []

    @broker.subscriber("q")
    async def wait_for_both() -> None:
        found.extend(await asyncio.gather(broker.pop("a", wait=10), broker.pop("b", wait=10)))

    async with TestSqlBroker(broker, clock=clock) as br:
        publishing = asyncio.create_task(br.publish("x", "q"))
        await clock.advance(20)
        await publishing
    assert found == [None, None]


async def test_a_stuck_handler_is_named(
    broker: SqlBroker, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for = Pump._wait_for

    # Handlers only: a busy machine may need longer for what the database does.
    async def briefly(
        pump: Pump, delivery: RunningDelivery, limit: float | None, **how: Any
    ) -> None:
        await wait_for(pump, delivery, None if limit is None else 0.05, **how)

    monkeypatch.setattr(Pump, "_wait_for", briefly)
    never = asyncio.Event()

    @broker.subscriber("q")
    async def forgetful() -> None:
        await never.wait()

    async with TestSqlBroker(broker, clock=clock) as br:
        await br.publish("x", "q", delay=1)
        with pytest.raises(TimeoutError, match=r"'forgetful' for message 1 has not ended"):
            await clock.advance(2)


async def test_without_a_clock_time_stands_still(broker: SqlBroker) -> None:
    @broker.subscriber("q")
    async def handle() -> None:
        pass

    async with TestSqlBroker(broker) as br:
        await br.publish("x", "q", delay=0.05)
        await asyncio.sleep(0.1)
        assert len((await br.drain()).waiting) == 1
        handle.mock.assert_not_called()


async def test_only_the_test_moves_time(broker: SqlBroker, clock: VirtualClock) -> None:
    @broker.subscriber("q")
    async def handle() -> None:
        await clock.advance(1)

    @broker.subscriber("d")
    async def drains() -> None:
        await broker.drain()

    async with TestSqlBroker(broker, clock=clock) as br:
        for queue in "qd":
            with pytest.raises(SetupError, match="in the test itself"):
                await br.publish("x", queue)
    for wrong in (-1, "1 day"):
        with pytest.raises(SetupError):
            await clock.advance(wrong)
    with pytest.raises(SetupError, match="time zone"):
        VirtualClock(datetime(2030, 1, 1))


@settings(max_examples=10, deadline=None)
@given(delays=st.lists(st.integers(0, 86_400), max_size=6))
def test_any_delays_come_in_order(delays: list[int]) -> None:
    async def run() -> None:
        clock = VirtualClock(START)
        broker, seen = unreachable(), Seen(clock)
        subscribe(broker, seen)
        async with TestSqlBroker(broker, clock=clock) as br:
            for delay in delays:
                await br.publish(delay, "q", delay=delay)
            await clock.advance("24h")
        assert seen.calls == [(delay, delay) for delay in sorted(delays)]

    asyncio.run(run())


async def test_a_moment_in_the_past_is_refused(broker: SqlBroker, clock: VirtualClock) -> None:
    async with TestSqlBroker(broker, clock=clock):
        before = clock.now
        await clock.advance_to(before + timedelta(hours=1))
        assert clock.now == before + timedelta(hours=1)
        with pytest.raises(SetupError, match="or later, got"):
            await clock.advance_to(before)
        await clock.advance_to(clock.now)


async def test_a_batch_waits_for_its_messages_in_virtual_time(
    broker: SqlBroker, clock: VirtualClock, seen: Seen
) -> None:
    subscribe(broker, seen, batch=True, batch_max_wait="10s", batch_max_records=3)
    async with TestSqlBroker(broker, clock=clock):
        await broker.publish("a", "q")
        await clock.advance("4s")
        await broker.publish("b", "q")
        await clock.advance("5s")
        assert seen.calls == []
        await clock.advance("1s")
        assert seen.calls == [(["a", "b"], 10.0)]
        await broker.publish("c", "q", delay="1s")
        await broker.publish_batch("d", "e", queue="q", delay="2s")
        await clock.advance("1m")
        assert seen.calls[1:] == [(["c", "d", "e"], 12.0)]
        for body in "fgh":
            await broker.publish(body, "q")
        assert seen.calls[2:] == [(["f", "g", "h"], 70.0)]
        ran = (await broker.drain()).attempts
        assert [attempt.outcome for attempt in ran] == ["ack"] * 8


async def test_where_time_stands_still_no_batch_waits(
    broker: SqlBroker, clock: VirtualClock, seen: Seen
) -> None:
    subscribe(broker, seen, batch=True, batch_max_wait="10s")
    async with TestSqlBroker(broker):
        await broker.publish("a", "q")
        assert [bodies for bodies, _ in seen.calls] == [["a"]]


async def test_a_stop_gives_back_what_a_batch_has_gathered(
    broker: SqlBroker, clock: VirtualClock, seen: Seen
) -> None:
    subscribe(broker, seen, batch=True, batch_max_wait="10s")
    async with TestSqlBroker(broker, clock=clock):
        await broker.publish("a", "q")
        [subscriber] = broker.subscribers
        await subscriber.stop()
        await clock.advance("1m")
        assert seen.calls == []
        [waiting] = (await broker.drain()).waiting
        assert waiting.attempts == 0


@pytest.mark.parametrize("scope", [None, "mail"])
async def test_weights_hold_within_a_scope(
    broker: SqlBroker, clock: VirtualClock, seen: Seen, scope: str | None
) -> None:
    """Z9, Z10: without a scope each queue has a throttle of its own."""

    @broker.subscriber({"high": 5, "low": 1}, policies=[Throttle(6, per="1s", scope=scope)])
    async def handle(body: str) -> None:
        seen(body)

    async with TestSqlBroker(broker, clock=clock) as br:
        for queue in ("high", "low"):
            await br.publish_batch(*[queue] * 80, queue=queue, delay="1s")
        await clock.advance("10s")
    counts = {queue: sum(body == queue for body, _ in seen.calls) for queue in ("high", "low")}
    moments = [round(at * 1_000) for _, at in seen.calls]
    in_a_second = max(sum(at <= other < at + 1_000 for other in moments) for at in moments)
    if scope is None:
        assert in_a_second == 12
        assert counts["high"] == counts["low"]
    else:
        assert in_a_second == 6
        assert counts["high"] == 5 * counts["low"]

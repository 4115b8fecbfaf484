"""Schedules: each fire time is published once; missed times and failing functions."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from math import inf
from typing import Any
from unittest.mock import patch
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from faststream import BaseMiddleware
from sqlalchemy import literal_column, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import (
    DESTINATION,
    SetupError,
    SqlBroker,
    SqlBrokerResponse,
    SqlBrokerRouter,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.core.clock import RealTime
from faststream_sqlbroker.core.status import ScheduleState, load_state
from faststream_sqlbroker.database.schedules import ScheduleStore
from faststream_sqlbroker.flow.tasks import schedules
from faststream_sqlbroker.schema.types import later
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually
from tests.proxy import COMMIT, proxied

pytestmark = pytest.mark.capability("cron schedules, each time once in the fleet")

on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
EVERY_SECOND = "* * * * * *"


async def now(broker: SqlBroker) -> datetime:
    return await broker._store.server.read_now()


async def daily(broker: SqlBroker, ahead: int = 30) -> tuple[str, datetime]:
    """An expression for each day, and its next time, which is so many minutes ahead."""
    at = (await now(broker) + timedelta(minutes=ahead)).replace(second=0, microsecond=0)
    return f"{at.minute} {at.hour} * * *", at


async def remembered(look: Look, name: str = "s") -> ScheduleState:
    c = look.tables.policy_state.c
    async with look.engine.connect() as connection:
        info = await connection.execute(select(c.info).where(c.scope == "schedule", c.key == name))
        state = load_state(info.scalar_one())
    assert state is not None
    return state


async def remember(look: Look, name: str = "s", **changes: Any) -> None:
    """Change what is remembered, as if it had been so; it is free then."""
    state = replace(await remembered(look, name), **changes)
    table = look.tables.policy_state
    of = (table.c.scope == "schedule") & (table.c.key == name)
    async with look.engine.begin() as connection:
        await connection.execute(
            update(table)
            .where(of)
            .values(info=state.dump(), lease_token=None, lease_expires_at=None)
        )


def fire_times(rows: list[dict[str, Any]]) -> list[datetime]:
    """From the messages' headers, in the order of ids."""
    return [datetime.fromisoformat(headers(row)["fire-time"]) for row in rows]


def headers(row: dict[str, Any]) -> dict[str, Any]:
    return row["headers"]


async def first_start(broker: SqlBroker, look: Look, name: str = "s") -> None:
    """Let the fleet see the schedule, and stop."""
    await broker.start()
    await eventually(lambda: known(look, name))
    await broker.stop()


async def known(look: Look, name: str) -> bool:
    c = look.tables.policy_state.c
    async with look.engine.connect() as connection:
        found = await connection.execute(select(c.info).where(c.scope == "schedule", c.key == name))
        return load_state(found.scalar_one_or_none()) is not None


async def rows_of(look: Look, count: int) -> list[dict[str, Any]]:
    """Wait for `count` messages, and that the schedule is at rest again."""

    async def there() -> bool:
        rows = await look.rows()
        assert len(rows) <= count, fire_times(rows)
        return len(rows) == count and await at_rest(look)

    await eventually(there)
    return await look.rows()


async def at_rest(look: Look, name: str = "s") -> bool:
    state = await remembered(look, name)
    c = look.tables.policy_state.c
    async with look.engine.connect() as connection:
        found = await connection.execute(
            select(c.lease_token).where(c.scope == "schedule", c.key == name)
        )
        return found.scalar_one() is None and state.decided_at is None


@asynccontextmanager
async def other(engine: AsyncEngine, **options: Any) -> AsyncIterator[SqlBroker]:
    """Another broker of the same database: a process of its own, as far as it knows."""
    broker = SqlBroker(engine, logger=None, **options)
    yield broker
    await broker.stop()


async def test_each_fire_time_is_published_once_by_two_brokers(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    """Z9: second by second; the message is as declared."""
    async with other(engine) as second:
        for each in (broker, second):
            each.publish_on_schedule(
                "s",
                EVERY_SECOND,
                "reports",
                {"n": 1},
                missed="all",
                key="k",
                priority=5,
                headers={"a": 1},
            )
            await each.start()

        async def enough() -> bool:
            return len(await look.rows()) >= 3

        await eventually(enough)
        await broker.stop()
        await second.stop()
        at = await now(broker)
    rows = await look.rows()
    found = fire_times(rows)
    assert found == [found[0] + timedelta(seconds=n) for n in range(len(found))], (
        "none twice, none left out"
    )
    for row, fire_at in zip(rows, found, strict=True):
        assert (row["queue"], row["key"], row["priority"], row["state"]) == (
            "reports",
            "k",
            5,
            "PENDING",
        )
        assert json.loads(bytes(row["payload"])) == {"n": 1}
        assert headers(row) == {
            "content-type": "application/json",
            "schedule": "s",
            "fire-time": fire_at.isoformat(),
            "a": 1,
        }
        assert timedelta() <= row["created_at"] - fire_at < timedelta(minutes=10)
    assert (await remembered(look)).last_at == found[-1]
    assert found[-1] <= at


async def test_a_subscriber_receives_the_scheduled_message(broker: SqlBroker) -> None:
    got: list[str] = []

    @broker.subscriber("reports", max_fetch_interval=600, wakeup="auto")
    async def handle(body: str) -> None:
        got.append(body)

    broker.publish_on_schedule("s", EVERY_SECOND, "reports", "x")
    await broker.start()
    await eventually(lambda: len(got) >= 2)
    assert set(got) == {"x"}


async def test_a_schedule_names_a_destination_without_a_warning(
    broker: SqlBroker, heard: Heard
) -> None:
    """Through a front-door queue, from a router and with a function, too."""
    got: list[str] = []
    router = SqlBrokerRouter(prefix="front.")

    @broker.subscriber("reports", **QUICK)
    async def handle(body: str) -> None:
        got.append(body)

    @router.schedule(EVERY_SECOND, queue="door", name="t", destination="reports")
    def make() -> str:
        return "made"

    broker.include_router(router)
    broker.subscriber("front.door", forward_to=DESTINATION, **QUICK)
    broker.publish_on_schedule("s", EVERY_SECOND, "front.door", "plain", destination="reports")
    await broker.start()
    await eventually(lambda: {"plain", "made"} <= set(got))
    assert not heard.texts("moved immediately", logging.WARNING)


async def test_a_new_schedule_begins_with_the_first_time_after_it_was_seen(
    broker: SqlBroker, look: Look
) -> None:
    expression, at = await daily(broker)
    broker.publish_on_schedule("s", f"  {expression.replace(' ', '   ')} ", "q", "x")
    assert await broker.admin.schedules() == []
    await first_start(broker, look)
    [listed] = await broker.admin.schedules()
    assert (listed.name, listed.expression, listed.tz) == ("s", expression, "UTC")
    assert (listed.last_fire_at, listed.next_fire_at, listed.failures_count) == (None, at, 0)
    assert await look.rows() == []


@pytest.mark.parametrize(("missed", "count"), [("one", 1), ("all", 3), ("skip", 0)])
async def test_missed_times_are_published_as_the_option_says(
    broker: SqlBroker, look: Look, heard: Heard, missed: Any, count: int
) -> None:
    """Z9: no process ran for three days."""
    expression, at = await daily(broker)
    broker.publish_on_schedule("s", expression, "q", "x", missed=missed)
    await first_start(broker, look)
    await remember(look, next_at=at - timedelta(days=3))
    await broker.start()
    await eventually(lambda: _next_is(look, at))
    rows = await rows_of(look, count)
    assert fire_times(rows) == [at - timedelta(days=n) for n in range(count, 0, -1)]
    last = (await broker.admin.schedules())[0].last_fire_at
    assert last == (None if count == 0 else at - timedelta(days=1))
    assert bool(heard.texts("skips its fire times")) == (missed != "all")


async def _next_is(look: Look, at: datetime) -> bool:
    return (await remembered(look)).next_at == at


async def test_missed_all_has_a_bound_and_a_warning(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    expression, at = await daily(broker)
    broker.publish_on_schedule("s", expression, "q", "x", missed="all")
    await first_start(broker, look)
    await remember(look, next_at=at - timedelta(days=2000))
    with patch("faststream_sqlbroker.flow.tasks.cron.MAX_MISSED", 20):
        await broker.start()
        rows = await rows_of(look, 20)
    assert fire_times(rows) == [at - timedelta(days=n) for n in range(20, 0, -1)]
    assert heard.texts("skips its fire times", logging.WARNING)


async def test_a_short_interruption_is_not_a_miss(broker: SqlBroker, look: Look) -> None:
    """A deployment of some seconds leaves nothing out, whatever was asked for."""
    broker.publish_on_schedule("s", EVERY_SECOND, "q", "x", missed="skip")
    await first_start(broker, look)
    before = len(await look.rows())
    since = (await now(broker)).replace(microsecond=0) - timedelta(seconds=20)
    await remember(look, next_at=since, decided_at=None)
    await broker.start()

    async def enough() -> bool:
        return len(await look.rows()) >= before + 20

    await eventually(enough)
    await broker.stop()
    found = fire_times(await look.rows())[before:]
    assert found == [since + timedelta(seconds=n) for n in range(len(found))]


async def test_a_changed_expression_counts_from_then_on(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    expression, at = await daily(broker)
    broker.publish_on_schedule("s", expression, "q", "x")
    await first_start(broker, look)
    async with other(engine) as second:
        second.publish_on_schedule("s", "0 0 1 1 *", "q", "x", tz="Asia/Tokyo")
        await first_start(second, look)
        state = await remembered(look)
        assert (state.expression, state.tz) == ("0 0 1 1 *", "Asia/Tokyo")
        assert state.next_at is not None
        assert (state.next_at.month, state.next_at.day, state.next_at.hour) == (12, 31, 15)
    await first_start(broker, look)
    assert (await remembered(look)).next_at == at, "the last process to start decides"
    assert await look.rows() == []


async def test_a_time_due_by_the_old_expression_is_published_before_the_new_one_counts(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    """A deployment that changes it, at the very time."""
    expression, at = await daily(broker)
    broker.publish_on_schedule("s", expression, "q", "x")
    await first_start(broker, look)
    await remember(look, next_at=at - timedelta(days=1))
    async with other(engine) as second:
        changed, first = await daily(broker, ahead=90)
        second.publish_on_schedule("s", changed, "q", "x")
        await second.start()
        rows = await rows_of(look, 1)
        assert fire_times(rows) == [at - timedelta(days=1)]
        state = await remembered(look)
        assert (state.expression, state.next_at, state.last_at) == (
            changed,
            first,
            at - timedelta(days=1),
        )


async def test_a_process_with_the_old_expression_follows_the_new_one(
    broker: SqlBroker, engine: AsyncEngine, look: Look, heard: Heard
) -> None:
    broker.publish_on_schedule("s", "0 0 1 1 *", "q", "old", missed="all")
    await broker.start()
    await eventually(lambda: known(look, "s"))
    async with other(engine) as second:
        second.publish_on_schedule("s", EVERY_SECOND, "q", "new", missed="all")
        await second.start()
        await eventually(lambda: _expression_is(look, EVERY_SECOND))
        assert broker._scheduler._loop is not None
        broker._scheduler._loop.wake()
        await eventually(lambda: heard.texts("the definition of the process that started last"))
        await second.stop()

    async def by_the_old_one() -> bool:
        return any(bytes(row["payload"]) == b"old" for row in await look.rows())

    await eventually(by_the_old_one)
    await broker.stop()
    found = fire_times(await look.rows())
    assert found == [found[0] + timedelta(seconds=n) for n in range(len(found))]
    assert len(heard.texts("the definition of the process that started last")) == 1


async def test_a_schedule_that_this_version_cannot_read_is_left_to_others(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    broker.publish_on_schedule("s", "0 0 1 1 *", "q", "x")
    broker.publish_on_schedule("healthy", EVERY_SECOND, "q", "x")
    await broker.start()
    await eventually(lambda: known(look, "s"))
    await remember(look, expression="@sometimes", next_at=await now(broker) - timedelta(days=1))
    await eventually(lambda: heard.texts("cannot parse the stored definition"))
    await eventually(look.rows)
    assert {headers(row)["schedule"] for row in await look.rows()} == {"healthy"}
    assert await broker.ping(60.0)
    await broker.stop()
    await broker.start()  # declares it anew, without what cannot be known to be due
    await eventually(lambda: _expression_is(look, "0 0 1 1 *"))


async def _expression_is(look: Look, expression: str) -> bool:
    return (await remembered(look)).expression == expression


async def test_a_function_makes_the_message(broker: SqlBroker, look: Look) -> None:
    """Called with the fire time in the schedule's zone, in a thread unless it is async, or without
    it."""
    threads: list[threading.Thread] = []

    @broker.schedule(EVERY_SECOND, queue="q", tz="Asia/Kathmandu", name="s", key="k")
    async def asynchronous(at: datetime) -> dict[str, Any]:
        assert at.tzinfo == ZoneInfo("Asia/Kathmandu")
        return {"at": at.isoformat()}

    @broker.schedule(EVERY_SECOND, queue="q")
    def synchronous(*arguments: datetime) -> str:
        threads.append(threading.current_thread())
        return f"{len(arguments)}"

    @broker.schedule(EVERY_SECOND, queue="q", name="plain", headers={"a": 1})
    async def nothing() -> SqlBrokerResponse:
        return SqlBrokerResponse("r", key="own", headers={"b": 2})

    await broker.start()

    async def each() -> dict[str, dict[str, Any]]:
        found = {headers(row)["schedule"]: row for row in await look.rows()}
        return found if len(found) == 3 else {}

    found = await eventually(each)
    name = f"{__name__}.test_a_function_makes_the_message.<locals>.synchronous"
    assert bytes(found[name]["payload"]) == b"1"
    assert threads[0] is not threading.main_thread()
    [at] = json.loads(bytes(found["s"]["payload"])).values()
    assert at.endswith("+05:45")
    assert datetime.fromisoformat(at) == fire_times([found["s"]])[0]
    assert found["s"]["key"] == "k"
    assert bytes(found["plain"]["payload"]) == b"r"
    assert found["plain"]["key"] == "own"
    assert headers(found["plain"])["b"] == 2
    assert callable(synchronous), "the decorated function stays what it is"
    assert synchronous() == "0"


async def test_a_function_that_fails_is_tried_again_and_the_time_is_not_lost(
    broker: SqlBroker, look: Look, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if it would count as missed by then; other schedules go on."""
    monkeypatch.setattr(schedules, "MAX_RETRY_INTERVAL", 0.1)
    tries: list[datetime] = []
    in_vain = inf

    @broker.schedule("0 0 1 1 *", queue="q", name="s", missed="skip")
    async def fails(at: datetime) -> str:
        tries.append(at)
        if len(tries) <= in_vain:
            raise ZeroDivisionError("no report today")
        return "x"

    broker.publish_on_schedule("healthy", EVERY_SECOND, "others", "x")
    await first_start(broker, look)
    due = (await now(broker)).replace(microsecond=0)
    await remember(look, next_at=due)
    await broker.start()
    await eventually(lambda: _failures(look))
    assert heard.texts("could not create the messages of schedule 's'", logging.ERROR)
    assert await broker.ping(60.0), "the application's errors are not the loop's"
    await broker.stop()
    assert set(tries) == {due}
    in_vain = len(tries) + 1

    # A day passes.
    state = await remembered(look)
    back = timedelta(days=1)
    assert state.decided_at is not None
    await remember(look, next_at=due - back, decided_at=state.decided_at - back)
    await broker.start()

    async def made() -> list[datetime]:
        return fire_times([row for row in await look.rows() if row["queue"] == "q"])

    assert await eventually(made) == [due - back]
    assert tries[in_vain - 1 :] == [due - back, due - back]

    async def others() -> bool:
        return "others" in {row["queue"] for row in await look.rows()}

    await eventually(others)
    listed = {s.name: s for s in await broker.admin.schedules()}["s"]
    assert (listed.failures_count, listed.last_fire_at) == (0, due - back)


async def _failures(look: Look) -> int:
    return (await remembered(look)).failures_count


async def test_a_function_that_cancels_its_task_has_failed(
    broker: SqlBroker, look: Look, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "MAX_RETRY_INTERVAL", 0.1)
    tries: list[str] = []

    @broker.schedule("0 0 1 1 *", queue="q", name="s")
    async def cancels_itself() -> str:
        tries.append("x")
        if len(tries) == 1:
            task: Any = asyncio.current_task()
            task.cancel()
            await asyncio.Event().wait()
        return "x"

    await first_start(broker, look)
    await remember(look, next_at=await now(broker))
    await broker.start()
    await eventually(lambda: len(tries) > 1)
    assert heard.texts("could not create the messages of schedule 's'", logging.ERROR)
    assert await broker.ping(60.0)


async def test_a_function_that_fails_is_not_called_by_every_process(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    """The pause after an error is the fleet's."""
    tries: list[str] = []
    async with other(engine) as second, other(engine) as third:
        for each in (broker, second, third):

            @each.schedule("0 0 1 1 *", queue="q", name="s")
            def fails() -> str:
                tries.append("x")
                raise ValueError

        await first_start(broker, look)
        await remember(look, next_at=await now(broker))
        with patch.object(schedules, "MAX_RETRY_INTERVAL", 0.5):
            # The first try may come before the last start.
            began = asyncio.get_running_loop().time()
            for each in (broker, second, third):
                await each.start()
            await eventually(lambda: len(tries) >= 4)
            assert asyncio.get_running_loop().time() - began >= 1.4


async def test_an_error_of_the_database_between_both_steps_neither_loses_nor_doubles(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    broker.publish_on_schedule("s", "0 0 1 1 *", "q", "x")
    await first_start(broker, look)
    await remember(look, next_at=await now(broker))
    with patch.object(ScheduleStore, "publish", side_effect=TransientStoreError("gone")) as publish:
        await broker.start()
        await eventually(lambda: heard.texts("the schedule 's' failed", logging.WARNING))
        assert not await broker.ping()
        await eventually(lambda: publish.call_count >= 2)
        assert await look.rows() == []
    await rows_of(look, 1)
    assert await eventually(broker.ping)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_failure_that_began_in_an_outage_is_not_told_as_a_new_one(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    broker.publish_on_schedule("s", "0 0 1 1 *", "q", "x")
    await first_start(broker, look)
    await remember(look, next_at=await now(broker))
    inside = asyncio.Event()
    go = asyncio.Event()
    claim = ScheduleStore.claim

    async def late(*args: Any) -> Any:
        """The first try only: the next one comes at once, after the outage."""
        if inside.is_set():
            return await claim(*args)
        inside.set()
        await go.wait()
        raise TransientStoreError("no answer")

    outages = broker._wakeups.outages
    with patch.object(ScheduleStore, "claim", late):
        await broker.start()
        await asyncio.wait_for(inside.wait(), 60)
        outages.record_failure("another", "other loop", TransientStoreError("away"))
        outages.record_success("another")
        go.set()
        await eventually(lambda: broker._scheduler._failures)
        assert [line[:14] for line in heard.texts("", logging.WARNING)] == [
            "the other loop",
            "the database w",
        ]
    await rows_of(look, 1)


async def test_a_process_that_died_in_between_is_relieved_when_its_lease_ends(
    broker: SqlBroker, look: Look
) -> None:
    """A publish that it began is finished, and not missed; by the database's clock."""
    broker.publish_on_schedule("s", "0 0 1 1 *", "q", "x", missed="skip")
    await first_start(broker, look)
    due = (await now(broker)).replace(microsecond=0)
    await remember(look, next_at=due)
    assert await broker._store.schedules.claim("s", uuid4(), 600.0) is not None
    assert await broker._store.schedules.claim("s", uuid4(), 600.0) is None
    c = look.tables.policy_state.c
    of = (c.scope == "schedule") & (c.key == "s")
    async with look.engine.begin() as connection:
        soon = later(literal_column("1000000"))
        await connection.execute(
            update(look.tables.policy_state).where(of).values(lease_expires_at=soon)
        )
        end = (await connection.execute(select(c.lease_expires_at).where(of))).scalar_one()
    await broker.start()
    [row] = await rows_of(look, 1)
    assert fire_times([row]) == [due]
    assert row["created_at"] >= end


async def test_a_process_that_lost_its_schedule_writes_nothing(
    broker: SqlBroker, engine: AsyncEngine, look: Look, heard: Heard
) -> None:
    """Its process stood still for longer than its lease; another process has published by then."""
    inside = asyncio.Event()
    go = asyncio.Event()

    @broker.schedule("0 0 1 1 *", queue="q", name="s")
    async def slow() -> str:
        inside.set()
        await go.wait()
        return "slow"

    await first_start(broker, look)
    due = (await now(broker)).replace(microsecond=0)
    await remember(look, next_at=due)
    await broker.start()
    await inside.wait()
    await remember(look)  # its lease is gone
    async with other(engine) as second:
        second.publish_on_schedule("s", "0 0 1 1 *", "q", "quick")
        await second.start()
        await rows_of(look, 1)
        go.set()
        await eventually(lambda: heard.texts("was claimed by another process", logging.WARNING))
    [row] = await look.rows()
    assert bytes(row["payload"]) == b"quick"


async def test_a_slow_function_keeps_its_schedule_and_holds_up_no_other(
    broker: SqlBroker, engine: AsyncEngine, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    async def slow() -> str:
        nonlocal calls
        calls += 1
        first = await lease_end()
        await eventually(lambda: renewed_after(first))
        await eventually(others)
        return "x"

    async def lease_end() -> datetime:
        c = look.tables.policy_state.c
        async with engine.connect() as connection:
            of = (c.scope == "schedule") & (c.key == "s")
            end: datetime = (
                await connection.execute(select(c.lease_expires_at).where(of))
            ).scalar_one()
            return end

    async def renewed_after(first: datetime) -> bool:
        return await lease_end() > first

    async def others() -> bool:
        return "others" in {row["queue"] for row in await look.rows()}

    async def published() -> bool:
        return "q" in {row["queue"] for row in await look.rows()}

    monkeypatch.setattr(schedules, "LEASE", 600.0)
    async with other(engine) as second:
        for each in (broker, second):
            each._clock.use(Hasty())
            each.schedule("0 0 1 1 *", queue="q", name="s")(slow)
        broker.publish_on_schedule("quick", EVERY_SECOND, "others", "x")
        await first_start(broker, look)
        await remember(look, next_at=await now(broker))
        await broker.start()
        await second.start()
        await eventually(published)
    assert calls == 1


class Hasty(RealTime):
    """Real time, in which no sleep is long: a lease is renewed before a third of it is over."""

    @staticmethod
    async def sleep(seconds: float) -> None:  # type: ignore[override]
        await asyncio.sleep(min(seconds, 0.1))


async def test_a_stop_waits_for_the_function_or_leaves_it_to_others_at_once(
    engine: AsyncEngine, broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "LEASE", 600.0)
    calls = 0

    async def hangs() -> str:
        nonlocal calls
        calls += 1
        await (asyncio.Event().wait() if calls == 1 else asyncio.sleep(0.3))
        return f"{calls}"

    async with other(engine, graceful_timeout=0.2) as first:
        first.schedule("0 0 1 1 *", queue="q", name="s")(hangs)
        await first_start(first, look)
        await remember(look, next_at=await now(first))
        await first.start()
        await eventually(lambda: calls == 1)
        async with asyncio.timeout(60):
            await first.stop()
    assert await look.rows() == []
    broker.schedule("0 0 1 1 *", queue="q", name="s")(hangs)
    async with asyncio.timeout(60):  # shorter than the lease
        await broker.start()
        await eventually(lambda: calls == 2)
        await broker.stop()
    [row] = await look.rows()
    assert bytes(row["payload"]) == b"2"


@pytest.mark.parametrize("cut_off", ["cancelled", "unanswered"])
async def test_a_schedule_whose_claim_was_not_answered_is_free_at_once(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch, cut_off: str
) -> None:
    """The lease was committed, but the stop came first, or the answer was lost."""
    broker.publish_on_schedule("s", "0 0 1 1 *", "q", "x")
    await first_start(broker, look)
    await remember(look, next_at=await now(broker))
    scheduler = broker._scheduler
    schedules = broker._store.schedules
    taken = asyncio.Event()
    hold = schedules.claim

    async def unheard(*args: Any) -> None:
        assert await hold(*args) is not None
        taken.set()
        if cut_off == "unanswered":
            raise UnknownOutcomeError("the answer was lost")
        await asyncio.Event().wait()

    monkeypatch.setattr(schedules, "claim", unheard)
    firing_it = asyncio.create_task(scheduler._runner.fire(scheduler._schedules["s"]))
    await taken.wait()
    if cut_off == "cancelled":
        firing_it.cancel()
    with pytest.raises((asyncio.CancelledError, UnknownOutcomeError)):
        await firing_it
    assert await hold("s", uuid4(), 1.0) is not None


@on_servers
@pytest.mark.parametrize("nth", [1, 2])
async def test_an_unanswered_commit_neither_loses_nor_doubles(
    broker: SqlBroker, look: Look, database_url: str, nth: int
) -> None:
    """Z9: the answer to the COMMIT that claims the schedule, or that publishes, is lost."""
    made = asyncio.Event()
    async with proxied(database_url) as (proxy, url):
        engine = create_async_engine(url)
        async with other(engine) as through:

            @through.schedule("0 0 1 1 *", queue="q", name="s")
            async def function() -> str:
                if nth == 2 and not proxy.swallowed:
                    proxy.swallow_answer_to = COMMIT
                made.set()
                return "x"

            await first_start(through, look)
            await remember(look, next_at=await now(broker))
            if nth == 1:
                await through._store.server.setup()
                proxy.swallow_answer_to = COMMIT
            through._scheduler.start()
            await eventually(lambda: proxy.swallowed == 1)
            await eventually(made.is_set)

            async def there() -> bool:
                return len(await look.rows()) == 1 and await at_rest(look)

            await eventually(there)
        await engine.dispose()
    assert len(await look.rows()) == 1


async def test_routers_may_declare_them(broker: SqlBroker, look: Look) -> None:
    router = SqlBrokerRouter(prefix="inner.")
    outer = SqlBrokerRouter(prefix="outer.")

    @router.schedule(EVERY_SECOND, queue="q", name="s")
    def make() -> str:
        return "x"

    outer.include_router(router)
    outer.publish_on_schedule("t", EVERY_SECOND, "q", "x")
    broker.include_router(outer)
    await broker.start()

    async def queues() -> bool:
        return {row["queue"] for row in await look.rows()} == {"outer.inner.q", "outer.q"}

    await eventually(queues)


async def test_one_name_twice_is_refused(broker: SqlBroker) -> None:
    broker.publish_on_schedule("s", EVERY_SECOND, "q", "x")
    with pytest.raises(SetupError, match="'s' is declared twice"):
        broker.publish_on_schedule("s", EVERY_SECOND, "other", "x")
    router = SqlBrokerRouter()
    router.publish_on_schedule("s", EVERY_SECOND, "q", "x")
    broker.include_router(router)
    with pytest.raises(SetupError, match="'s' is declared twice"):
        await broker.start()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"expression": "every day"}, "use five fields"),
        ({"tz": "Mars"}, "a name of the IANA database"),
        ({"missed": "some"}, "missed must be one of 'one', 'all', 'skip', got 'some'"),
        ({"queue": ""}, "cannot be the name of a queue"),
        ({"queue": None}, "cannot be the name of a queue"),
        ({"name": ""}, "cannot be the name of a schedule"),
        ({"name": "x" * 256}, "cannot be the name of a schedule"),
        ({"key": ""}, "key cannot be"),
        ({"headers": {"a": object()}}, "headers must be JSON values"),
        ({"priority": 1000}, "priority must be"),
        ({"delay": "soon"}, "delay"),
        ({"expires_in": 0}, "expires_in must be longer than 0"),
        ({"dedup_id": "x"}, "has no option 'dedup_id': choose from headers, "),
    ],
)
async def test_wrong_set_up_is_refused_at_once(
    broker: SqlBroker, change: dict[str, Any], says: str
) -> None:
    given = {"name": "s", "expression": "* * * * *", "queue": "q", **change}
    with pytest.raises(SetupError, match=says):
        broker.publish_on_schedule(
            given.pop("name"), given.pop("expression"), given.pop("queue"), "x", **given
        )
    given = {"expression": "* * * * *", "queue": "q", **change}
    with pytest.raises(SetupError, match=says):
        broker.schedule(given.pop("expression"), **given)(lambda: "x")
    assert broker.schedules == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_function_that_cannot_be_called_is_refused(broker: SqlBroker) -> None:
    def two(a: int, b: int) -> None: ...

    def keyword(*, at: int) -> None: ...

    class Unnamed:
        def __call__(self) -> None: ...

    for function, says in (
        (two, "needs a, b"),
        (keyword, "needs at"),
        (Unnamed(), "name its schedule with name="),
        ("text", "has no name: name"),
    ):
        with pytest.raises(SetupError, match=says):
            broker.schedule("* * * * *", queue="q")(function)  # type: ignore[type-var]
    with pytest.raises(SetupError, match="a schedule must decorate a function, got 'text'"):
        broker.schedule("* * * * *", queue="q", name="s")("text")  # type: ignore[type-var]
    broker.schedule("* * * * *", queue="q", name="s")(Unnamed())


async def test_middlewares_of_publishing_see_it(engine: AsyncEngine, look: Look) -> None:
    seen: list[str] = []

    class Adds(BaseMiddleware):
        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            if cmd.queue == "none":
                return None
            seen.append(cmd.headers["schedule"])
            cmd.headers["traced"] = "yes"
            return await call_next(cmd)

    async with other(engine, middlewares=[Adds]) as broker:
        await broker.create_tables()
        broker.publish_on_schedule("s", EVERY_SECOND, "q", "x")
        broker.publish_on_schedule("swallowed", EVERY_SECOND, "none", "x")
        await broker.start()
        await eventually(look.rows)

        async def passed() -> bool:
            return (await remembered(look, "swallowed")).last_at is not None

        await eventually(passed)
    for row in await look.rows():
        assert (headers(row)["traced"], row["queue"]) == ("yes", "q")
    assert set(seen) == {"s"}


async def test_failures_of_a_schedule_stop_nothing_and_are_logged(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    got: list[str] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: str) -> None:
        got.append(body)

    broker.publish_on_schedule("s", EVERY_SECOND, "elsewhere", "x", missed="all")
    await broker.start()
    await eventually(lambda: known(look, "s"))
    with patch.object(ScheduleStore, "read_snapshots", side_effect=TransientStoreError("gone")):
        await eventually(lambda: heard.texts("the schedule loop failed", logging.WARNING))
        assert not await broker.ping()
        await broker.publish("x", "q")
        await eventually(lambda: got)
    assert await eventually(broker.ping)
    with patch.object(ScheduleStore, "claim", side_effect=ZeroDivisionError("a bug")):
        await eventually(lambda: heard.texts("could not fire", logging.CRITICAL))
        assert not await broker.ping()
    assert await eventually(broker.ping)
    await eventually(look.rows)
    await broker.stop()
    assert await broker.ping(60.0)
    found = fire_times([row for row in await look.rows() if row["queue"] == "elsewhere"])
    assert found == [found[0] + timedelta(seconds=n) for n in range(len(found))]


async def test_a_forgotten_schedule_begins_anew(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "MAX_CHECK_INTERVAL", 600.0)
    expression, at = await daily(broker)
    broker.publish_on_schedule("s", expression, "q", "x")
    await broker.start()
    loop = broker._scheduler._loop
    assert loop is not None
    await eventually(lambda: loop.succeeded_at)  # from now on it naps
    await remember(look, next_at=at - timedelta(days=3), last_at=at - timedelta(days=4))
    assert await broker.admin.forget_schedule("s", by="ola")
    assert not await broker.admin.forget_schedule("s")
    [action] = await broker.admin.audit()
    assert (action.action, action.by) == ("forget_schedule", "ola")
    assert (action.arguments, action.done) == ({"name": "s"}, 1)
    loop.wake()
    await eventually(lambda: known(look, "s"))
    state = await remembered(look)
    assert (state.next_at, state.last_at) == (at, None)
    with pytest.raises(SetupError, match="cannot be the name of a schedule"):
        await broker.admin.forget_schedule("")
    with pytest.raises(ValueError, match="limit must be 1 or more"):
        await broker.admin.schedules(limit=0)


async def test_without_schedules_nothing_is_asked(broker: SqlBroker) -> None:
    with patch.object(ScheduleStore, "read_snapshots", side_effect=AssertionError):
        await broker.start()
        assert broker._scheduler._loop is None
        assert await broker.ping(60.0)


async def test_names_are_apart_and_compared_byte_by_byte(broker: SqlBroker, look: Look) -> None:
    names = ["s", "S", "ß", "'; DROP TABLE message; --", "日本"]
    for name in names:
        broker.publish_on_schedule(name, EVERY_SECOND, "q", name)
    await broker.start()

    async def each() -> bool:
        return {headers(row)["schedule"] for row in await look.rows()} == set(names)

    await eventually(each)
    assert [s.name for s in await broker.admin.schedules(limit=1)] in ([n] for n in names)
    assert {s.name for s in await broker.admin.schedules()} == set(names)


async def test_the_rows_of_a_schedule_are_no_locks_and_no_unknown_outcomes(
    broker: SqlBroker, look: Look, engine: AsyncEngine
) -> None:
    """Neither a lock nor an unknown outcome, and not cleaned up."""
    broker.publish_on_schedule("s", EVERY_SECOND, "q", "x")
    await first_start(broker, look)
    await broker._store.schedules.claim("s", uuid4(), 30.0)
    assert await broker.admin.locks() == []
    assert await broker.admin.unknown() == []
    assert await broker._store.remove_expired_states(10) == 0
    async with engine.connect() as connection:
        assert (
            await connection.execute(text("SELECT count(*) FROM message_policy_state"))
        ).scalar_one() == 1

"""What an operator has to look at: staged incidents are named, and healthy systems are not."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import delete, insert, inspect, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import ConstantRetryStrategy, SqlBroker, Throttle
from faststream_sqlbroker.admin import (
    Admin,
    Count,
    DeadLetterGroup,
    DeadLetters,
    Finding,
    Findings,
    PoliciedQueue,
    PolicyWait,
    QueueOverview,
    Schedule,
)
from faststream_sqlbroker.core import findings
from faststream_sqlbroker.core.findings import (
    explain_late,
    find_archive_growth,
    find_dead_letters,
    find_overdue_schedules,
    find_queue_problems,
    is_failing,
)
from faststream_sqlbroker.core.retention import ArchiveSize, Retention
from faststream_sqlbroker.database import archive_growth
from faststream_sqlbroker.database.messages.ack_first import ACK_FIRST
from faststream_sqlbroker.exceptions import TransientStoreError
from tests.faststream.conftest import QUICK, Look, Make
from tests.helpers import eventually
from tests.quick_tables import TABLES

pytestmark = pytest.mark.capability("the command `sqlbroker`: look, mend, check")

NOW = datetime(2026, 5, 4, tzinfo=timezone.utc)
OFTEN = ConstantRetryStrategy(delay_seconds=3600, max_attempts=1_000, max_total_delay_seconds=None)


def of_kind(found: Findings, kind: str) -> list[Finding]:
    return [finding for finding in found.findings if finding.kind == kind]


async def finding(broker: SqlBroker, kind: str, **options: Any) -> Finding:
    """The one of this kind, as soon as there is one."""

    async def look() -> Finding | None:
        found = of_kind(await broker.admin.findings(**options), kind)
        return found[0] if len(found) == 1 else None

    return await eventually(look)


async def publish_late(broker: SqlBroker, queue: str, count: int) -> None:
    """Messages that are due since an hour."""
    then = datetime.now(timezone.utc) - timedelta(hours=1)
    await broker.publish_batch(*range(count), queue=queue, next_attempt_at=then)


@pytest.fixture
async def another(database_url: str) -> AsyncIterator[SqlBroker]:
    """A process of its own on the same database."""
    engine = create_async_engine(database_url)
    broker = SqlBroker(engine, logger=None, graceful_timeout=1.0)
    yield broker
    await broker.stop()
    await engine.dispose()


async def test_a_consumer_that_is_gone(broker: SqlBroker) -> None:
    await broker.publish("x", "orders")
    found = await finding(broker, "no subscriber")
    assert (found.queue, found.is_error, found.text) == ("orders", True, "no live subscriber")


async def test_a_misspelt_queue(broker: SqlBroker) -> None:
    @broker.subscriber("orders", **QUICK)
    async def handle(body: str) -> None: ...

    await broker.start()
    await broker.publish("x", "ordres")
    found = await finding(broker, "no subscriber")
    assert found.text == "no live subscriber; did you mean 'orders'?"
    found = await finding(broker, "unused")
    assert (found.queue, found.is_error) == ("orders", False)
    assert found.text == "it has never had a message; did you mean 'ordres'?"
    [alone] = await broker.admin.queues("orders")
    assert alone.problem == found.text


async def test_messages_that_fail_for_good(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("orders", **QUICK, retry_strategy=None)
    async def handle(body: str) -> None:
        raise KeyError("vat_id")

    await broker.start()
    await broker.publish_batch("a", "b", queue="orders")
    await look.archived(2)
    found = await finding(broker, "dead letters")
    assert (found.queue, found.is_error) == ("orders", False)
    assert found.text.startswith("2 dead letters since yesterday in orders, 2 in the last hour, ")
    assert str(found).endswith("KeyError: 'vat_id'")


async def test_a_storm_of_retries(broker: SqlBroker) -> None:
    @broker.subscriber("api", **QUICK, retry_strategy=OFTEN)
    async def handle(body: int) -> None:
        raise ConnectionError("503 from 10.0.7.3")

    await broker.start()
    await broker.publish_batch(*range(20), queue="api")

    async def look() -> Finding | None:
        found = of_kind(await broker.admin.findings(), "failing")
        return found[0] if found and found[0].text.startswith("20 of 20") else None

    found = await eventually(look)
    assert (found.queue, found.is_error) == ("api", True)
    assert found.text.endswith("after 1 attempt")
    assert found.error is not None
    assert found.error.startswith("ConnectionError: 503 from 10.0.7.3")


@pytest.mark.parametrize(
    ("given", "failing"),
    [
        ({"retrying": 60, "waiting": 60, "out": 0.0}, True),
        ({"retrying": 60, "waiting": 60, "out": None}, True),
        ({"retrying": 60, "running": 60, "out": 0.0}, True),  # no pause between two attempts
        ({"retrying": 30, "waiting": 60, "out": 10.0}, True),
        ({"retrying": 60, "waiting": 60, "out": 900.0}, False),
        ({"retrying": 20, "waiting": 60, "out": 0.0}, False),
        ({"retrying": 20, "waiting": 10, "running": 50, "out": 0.0}, False),
        ({"retrying": 4, "waiting": 4, "out": 0.0}, False),
        ({"failed": 30.0, "out": 50.0}, True),
        ({"failed": 20.0, "out": 50.0}, False),
        ({"failed": 4.0, "out": 4.0}, False),
    ],
)
def test_a_queue_of_which_much_ends_well_is_not_failing(
    given: dict[str, Any], failing: bool
) -> None:
    assert is_failing(of_queue(**given)) is failing


GIB = 2**30
DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        # (bytes a day, free, for how long it grows, whether it has its first messages and those
        # that retention should have removed)
        ((10 * GIB, 15 * GIB, None, True, False), True),
        ((10 * GIB, 15 * GIB, None, False, False), True),  # what was removed once may not be again
        ((10 * GIB, 100 * GIB, None, True, False), False),
        ((10 * GIB, 900 * GIB, None, True, False), None),
        ((10 * GIB, 15 * GIB, 0 * DAY, True, False), None),  # retention in balance
        ((10 * GIB, 15 * GIB, None, True, True), True),  # it stands still
        ((10 * GIB, 100 * GIB, 5 * DAY, True, False), None),  # it will be, before the disk is full
        ((10 * GIB, 15 * GIB, 5 * DAY, True, False), True),  # it will be too late
        ((2 * GIB, None, None, True, False), False),
        ((2 * GIB, None, None, False, False), None),
        ((2 * GIB, None, 30 * DAY, True, False), None),
        ((2 * GIB, None, None, True, True), False),
        ((GIB // 2, None, None, True, False), None),  # 55 GiB in 90 days
        ((0, 0, None, True, True), None),
    ],
)
def test_an_archive_that_fills_the_disk(given: tuple[Any, ...], error: bool | None) -> None:
    a_day, free, grows_for, whole, behind = given
    size = ArchiveSize(
        size=10 * GIB,
        bytes_per_day=a_day,
        free=free,
        grows_for=grows_for,
        is_whole=whole,
        is_behind=behind,
    )
    found = find_archive_growth(size)
    assert [each.is_error for each in found] == ([] if error is None else [error])
    assert all(each.kind == "archive growth" for each in found)
    assert all(("retention has not removed" in each.text) is behind for each in found)


async def archive(
    engine: AsyncEngine, ages: Mapping[int, timedelta], state: str = "COMPLETED"
) -> None:
    """Messages that have ended so long ago, by id."""
    now = datetime.now(timezone.utc)
    times = ("created_at", "next_attempt_at", "archived_at")
    row = {"queue": "q", "payload": b"", "state": state}
    rows = [{"id": n, **row, **dict.fromkeys(times, now - age)} for n, age in ages.items()]
    assert TABLES.archive is not None
    async with engine.begin() as connection:
        await connection.execute(insert(TABLES.archive), rows)


async def test_the_growth_of_many_is_told_by_their_ids(
    broker: SqlBroker, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst, and a message that was delayed for long among the newest, do not count for more; nor
    do ids that are not in the archive.
    """
    monkeypatch.setattr(archive_growth, "MAX_SAMPLE", 5)
    older = {n: timedelta(hours=60 - n) for n in range(2, 31)}
    today = dict.fromkeys((1, *range(31, 51)), timedelta(0))
    await archive(engine, older | today)
    assert await broker._store.archive_growth.estimate_rows_per_day() == 20
    assert TABLES.archive is not None
    async with engine.begin() as connection:
        await connection.execute(delete(TABLES.archive).where(TABLES.archive.c.id.in_(older)))
    assert 10 <= await broker._store.archive_growth.estimate_rows_per_day() <= 25
    await archive(engine, dict.fromkeys(range(100, 1_100, 10), timedelta(0)))
    assert 80 <= await broker._store.archive_growth.estimate_rows_per_day() <= 160, "of 1,089 ids"


async def analyze(engine: AsyncEngine) -> None:
    """Let servers have statistics of the archive."""
    if engine.dialect.name != "sqlite":
        word = "ANALYZE" if engine.dialect.name == "postgresql" else "ANALYZE TABLE"
        async with engine.begin() as connection:
            await connection.exec_driver_sql(f"{word} message_archive")


async def test_retention_that_removes_nothing_is_told_from_one_in_balance(
    broker: SqlBroker, engine: AsyncEngine
) -> None:
    """FAILED messages are kept for ever, between those that should be removed."""
    await archive(engine, {n: (100 - n) * DAY for n in range(1, 91)}, "FAILED")
    await archive(engine, {n: (129 - n) * DAY for n in range(100, 130)})
    await broker.admin.prune(Retention(completed="30d"))
    await analyze(engine)
    found = (await broker.admin.findings()).archive
    assert found is not None
    assert not found.is_behind
    assert found.grows_for is not None
    assert timedelta(hours=23) < found.grows_for <= DAY
    await archive(engine, {95: 33 * DAY})
    found = (await broker.admin.findings()).archive
    assert found is not None
    assert (found.is_behind, found.is_whole, found.grows_for) == (True, True, None)


async def test_the_size_is_read_on_a_connection_that_has_a_temporary_schema(
    database_url: str, engine: AsyncEngine, broker: SqlBroker
) -> None:
    """SQLite opens one for as long as the connection lasts, if it has looked for a table."""
    await archive(engine, {1: timedelta(0)})
    await analyze(engine)
    kept = create_async_engine(database_url, pool_size=1, max_overflow=0)
    other = SqlBroker(kept, logger=None)
    try:
        async with kept.begin() as connection:
            await connection.run_sync(lambda each: inspect(each).has_table("missing"))
            await connection.exec_driver_sql("CREATE TEMPORARY TABLE seen (id int)")
        assert (await other.admin.findings()).archive is not None
    finally:
        await other.stop()
        await kept.dispose()


async def test_the_retention_that_runs_tells_how_long_the_archive_grows(
    engine: AsyncEngine, make: Make, look: Look
) -> None:
    broker = make(retention=Retention(completed="30d"))
    await broker.create_tables()

    @broker.subscriber("q", **QUICK)
    async def handle(body: int) -> None: ...

    assert (await broker.admin.findings()).archive is None
    await broker.publish("first", "early")
    await broker.pop("early")
    await broker.admin.prune(Retention(max_rows=10))
    await analyze(engine)
    found = (await broker.admin.findings()).archive
    assert found is not None
    assert timedelta(days=9) < (found.grows_for or DAY) <= timedelta(days=10)
    assert found.is_whole
    assert 0 < found.bytes_per_day <= found.size
    assert (found.free is not None) is (engine.dialect.name == "sqlite")
    await broker.start()

    async def grows_for_a_month() -> bool:
        found = (await broker.admin.findings()).archive
        return found is not None and timedelta(days=29) < (found.grows_for or DAY)

    await eventually(grows_for_a_month)


def of_queue(
    *,
    retrying: int = 0,
    waiting: int = 0,
    running: int = 0,
    failed: float = 0.0,
    out: float | None = 0.0,
) -> QueueOverview:
    return QueueOverview(
        queue="q",
        ready=Count(0),
        delayed=Count(waiting),
        in_flight=Count(running),
        retrying=Count(retrying),
        oldest_due_age=0.0,
        in_per_minute=0.0,
        out_per_minute=out,
        failed_per_minute=failed,
        live_subscribers=1,
        paused=None,
        used=True,
    )


def test_a_queue_served_over_http_needs_no_subscriber() -> None:
    lonely = replace(of_queue(waiting=3), live_subscribers=0)
    assert [found.kind for found in find_queue_problems(lonely, 60.0)] == ["no subscriber"]
    assert find_queue_problems(replace(lonely, pulled=True), 60.0) == []


async def test_a_token_to_take_messages_is_as_good_as_a_subscriber(
    broker: SqlBroker, engine: AsyncEngine
) -> None:
    await broker.publish("x", "orders")
    await broker.publish("x", "mails")
    tokens = {"queue:consume": "orders", "queue:publish": "mails"}
    async with engine.begin() as connection:
        for scope, queue in tokens.items():
            row = insert(TABLES.policy_state).values(scope=scope, key=queue, info={"token": "t"})
            await connection.execute(row)
    found = await finding(broker, "no subscriber")
    assert found.queue == "mails"


async def test_a_schedule_that_has_not_fired(
    broker: SqlBroker, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as one of thousands, whose names come before its own."""

    @broker.schedule("0 0 1 1 *", queue="reports", name="nightly")
    async def report() -> int:
        return 1

    await broker.start()
    await eventually(broker.admin.schedules)
    await broker.stop()
    state = TABLES.policy_state
    async with engine.begin() as connection:
        result = await connection.execute(select(state).where(state.c.key == "nightly"))
        row = dict(result.mappings().one())
        others = [{**row, "key": f"earlier {n}"} for n in range(1_000)]
        await connection.execute(insert(state), others)
    assert of_kind(await broker.admin.findings(), "overdue schedule") == []
    monkeypatch.setattr(findings, "SCHEDULE_LATE", timedelta(0))
    await broker.admin.run_schedule("nightly")
    found = await finding(broker, "overdue schedule")
    assert found.is_error
    assert found.text.startswith("nightly was due at ")
    assert "no running process declares it" in found.text
    await broker.admin.pause_schedule("nightly")
    assert of_kind(await broker.admin.findings(), "overdue schedule") == []


async def test_subscribers_that_differ(broker: SqlBroker, another: SqlBroker) -> None:
    @broker.subscriber("mails", **QUICK, policies=[Throttle(20, "1m")])
    async def slow(body: str) -> None: ...

    @another.subscriber("mails", **QUICK)
    async def fast(body: str) -> None: ...

    await broker.start()
    await another.start()
    found = await finding(broker, "mixed subscribers")
    assert (found.queue, found.is_error) == ("mails", True)
    assert "Throttle(20, per=60s)" in found.text


async def test_what_waits_too_long_is_late(broker: SqlBroker) -> None:
    go = asyncio.Event()

    @broker.subscriber("q", **QUICK, max_workers=1, fetch_batch_size=1)
    async def handle(body: int) -> None:
        await go.wait()

    await broker.start()
    await publish_late(broker, "q", 20)
    found = await finding(broker, "late")
    assert (found.queue, found.is_error) == ("q", True)
    assert found.text.startswith("a due message has waited for ")
    await broker.admin.pause("q", by="ola", reason="deploy")
    found = await finding(broker, "late")
    assert found.text.endswith("paused by ola: deploy")
    assert not (await finding(broker, "paused")).is_error
    assert of_kind(await broker.admin.findings(max_age="3h"), "late") == []
    go.set()


async def test_what_a_throttle_holds_is_a_warning(broker: SqlBroker) -> None:
    started: list[int] = []

    @broker.subscriber("mails", **QUICK, policies=[Throttle(1, per="1h")])
    async def send(body: int) -> None:
        started.append(body)

    await broker.start()
    await publish_late(broker, "mails", 5)
    await eventually(lambda: started)
    found = await finding(broker, "waits for policy")
    assert not found.is_error
    assert "because Throttle(1, per=3600s) allows no more starts" in found.text
    assert of_kind(await broker.admin.findings(), "late") == []


@pytest.mark.parametrize(
    ("out", "rate", "due", "waiting", "error"),
    [
        (0.0, 1_000, 50, 50, False),  # all wait for a slot
        (0.0, 1_000, 50, 1, True),  # one key is throttled, the others hang
        (5.0, 1_000, 50, 0, True),  # it may start 1,000 a minute, and 5 end
        (900.0, 1_000, 50, 0, False),  # a slot was free between two claims
    ],
)
def test_a_throttle_excuses_only_what_it_holds(
    out: float, rate: int, due: int, waiting: int, error: bool
) -> None:
    queue = replace(of_queue(out=out), oldest_due_age=7_200.0, ready=Count(due))
    throttle = Throttle(rate, "1m")
    wait = PolicyWait("throttled", str(throttle), waiting, waiting, True, None, NOW)
    waits = PoliciedQueue("q", NOW, (), 1, due, False, (wait,) if waiting else ())
    [late] = find_queue_problems(queue, 600.0)
    found = explain_late(late, queue, waits, [SimpleNamespace(queues=("q",), rules=(throttle,))])
    assert found.is_error is error
    assert found.kind == ("late" if error else "waits for policy")
    assert "until" not in found.text, "more than were read wait"


async def test_more_unknown_outcomes_than_are_counted(
    broker: SqlBroker, engine: AsyncEngine
) -> None:
    start = {"scope": f"{ACK_FIRST}q", "info": {"key": None, "worker": "w:1"}}
    starts = [{**start, "key": str(n), "lease_expires_at": NOW} for n in range(1, 1_001)]
    for count, said in ((1, "1 message"), (1_000, "at least 1,000 messages")):
        async with engine.begin() as connection:
            await connection.execute(delete(TABLES.policy_state))
            await connection.execute(insert(TABLES.policy_state), starts[:count])
        [found] = of_kind(await broker.admin.findings(), "unknown outcomes")
        assert found.text == f"the handler of {said} may or may not have run"


def test_dead_letters_that_are_not_counted_or_listed_are_told() -> None:
    group = DeadLetterGroup(
        fingerprint="f",
        reasons={"max_attempts": 1},
        queues={"q": 1},
        first_at=NOW,
        last_at=NOW,
        last_hour=0,
        newest_id=1,
    )
    found = find_dead_letters(DeadLetters((group,) * findings.MAX_GROUPS), NOW)
    assert {finding.text.partition(",")[0] for finding in found} == {
        "1 dead letter since yesterday in q"
    }
    found = find_dead_letters(DeadLetters((group,) * (findings.MAX_GROUPS + 1), NOW), NOW)
    assert found[0].text.startswith("at least 1 dead letter since yesterday in q, ")
    assert len(found) == findings.MAX_GROUPS + 1
    assert found[-1].text.startswith("smaller groups are not listed here")


def test_a_schedule_whose_function_runs_is_not_dead() -> None:
    due = NOW - timedelta(minutes=5)
    schedule = Schedule("report", "0 * * * *", "UTC", None, due, 0)
    [dead] = find_overdue_schedules([schedule], NOW)
    assert dead.is_error
    [slow] = find_overdue_schedules([replace(schedule, running=True)], NOW)
    assert not slow.is_error
    assert slow.text.endswith("a process is running it")
    [failing] = find_overdue_schedules([replace(schedule, running=True, failures_count=3)], NOW)
    assert failing.is_error


@pytest.mark.parametrize("error", ["", None, "E: x\nmore"])
def test_an_error_without_text_is_told(error: str | None) -> None:
    assert str(Finding("failing", "text", error=error)) == ("text: E: x" if error else "text")


async def test_a_part_that_cannot_be_read_hides_no_other(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise TransientStoreError("no answer within 10.0 seconds")

    await broker.publish("x", "orders")
    for part in ("subscribers", "dead_letters"):
        monkeypatch.setattr(Admin, part, fail)
    found = await broker.admin.findings()
    kinds = [finding.kind for finding in found.findings]
    assert kinds == ["not read", "no subscriber", "not read"]
    assert found.findings[0].text.startswith("the subscribers could not be read: no answer")
    assert found.findings[2].text.startswith("the dead letters could not be read: no answer")


async def test_healthy_queues_that_never_had_a_message(broker: SqlBroker) -> None:
    done: list[int] = []
    broker.subscriber("front", forward_to="back")

    @broker.subscriber("back", **QUICK)
    async def back(body: int) -> None:
        done.append(body)

    @broker.subscriber("nightly", **QUICK)
    async def nightly(body: str) -> None: ...

    await broker.start()
    await broker.publish_batch(*range(10), queue="front")
    await eventually(lambda: len(done) == 10)
    assert (await broker.admin.findings()).findings == ()


async def test_without_tables_only_these_are_told(engine: AsyncEngine) -> None:
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    async with engine.begin() as connection:
        await connection.exec_driver_sql("DROP TABLE message_archive")
    found = await broker.admin.findings()
    assert {finding.kind for finding in found.errors} == {"tables", "rights"}
    assert found.queues == ()

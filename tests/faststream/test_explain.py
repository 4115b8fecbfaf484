"""broker.admin.explain: why a message is not running, asked by a broker that has no subscribers."""

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from faststream import AckPolicy
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    Explanation,
    Reason,
    SetupError,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerMessageState,
    Step,
)
from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.reasons import SUPERSEDED
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.status import WaitingMessage
from faststream_sqlbroker.database.explain import live_messages, policy_waits
from faststream_sqlbroker.database.explain.policy_waits import PolicyDetails
from faststream_sqlbroker.flow.deliver.transactional import TransactionalDeliveries
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.subscriber.options import make_settings
from tests.contract.conftest import Bench
from tests.faststream.conftest import GRACE, QUICK, Look, clean_up
from tests.helpers import MYSQL, eventually

pytestmark = pytest.mark.capability(
    "`broker.admin.explain`, `subscribers`: why a message waits, who lives"
)


@pytest.fixture
async def broker(engine: AsyncEngine, logger: Any) -> AsyncIterator[SqlBroker]:
    broker = SqlBroker(engine, logger=logger, graceful_timeout=GRACE, presence_interval=2.0)
    await broker.create_tables()
    yield broker
    await clean_up(broker)


@pytest.fixture
async def other(database_url: str, broker: SqlBroker) -> AsyncIterator[SqlBroker]:
    """A broker without subscribers, neither connected nor started."""
    engine = create_async_engine(database_url)
    yield SqlBroker(engine, logger=None)
    await engine.dispose()


@pytest.fixture
def bench(broker: SqlBroker) -> Bench:
    return Bench(broker._store)


def codes(explanation: Explanation) -> list[str]:
    return [reason.code for reason in explanation.reasons]


async def lives(other: SqlBroker, queue: str = "q", count: int = 1) -> Any:
    """Wait until `count` subscribers of `queue` have told of themselves."""

    async def told() -> Any:
        found = await other.admin.subscribers(queue)
        return found if len(found) == count else None

    return await eventually(told)


async def idle(broker: SqlBroker, other: SqlBroker, **options: Any) -> Any:
    """Start a subscriber; what it tells of itself."""

    @broker.subscriber("q", **{**QUICK, **options})
    async def handle(body: Any) -> None: ...

    await broker.start()
    [found] = await lives(other)
    return found


async def stuck(broker: SqlBroker, other: SqlBroker, **options: Any) -> Any:
    """Start a subscriber whose handler never ends."""
    started = asyncio.Event()

    @broker.subscriber("q", **{**QUICK, **options})
    async def handle(body: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    await broker.start()
    [found] = await lives(other)
    return found, started


async def test_live_subscribers_are_listed_with_what_they_do(
    broker: SqlBroker, other: SqlBroker
) -> None:
    @broker.subscriber("a", "b", **QUICK, max_workers=3)
    async def handle(body: Any) -> None: ...

    @broker.subscriber("c", **QUICK, ordered=True)
    async def ordered(body: Any) -> None: ...

    await broker.start()
    await lives(other, "c")
    found = {s.queues: s for s in await other.admin.subscribers()}
    assert set(found) == {("a", "b"), ("c",)}
    first = found["a", "b"]
    assert (first.max_workers, first.ordered, first.paused, first.policies) == (3, False, False, ())
    assert found["c",].ordered
    assert re.fullmatch(r".+:\d+:[0-9a-f]{16}", first.worker)
    assert [s.worker for s in await other.admin.subscribers("b")] == [first.worker]
    assert timedelta() < first.lease_expires_at - first.since < timedelta(hours=1)
    await broker.stop()
    assert await other.admin.subscribers() == []


async def test_an_unknown_id_has_no_explanation(other: SqlBroker) -> None:
    explanation = await other.admin.explain(10**9)
    assert (explanation.state, explanation.queue, codes(explanation)) == (None, None, ["not_found"])
    assert str(explanation).startswith(
        "message 1000000000:\n- not_found: no message with this id is live"
    )


@pytest.mark.parametrize("wrong", ["", "1-2-3", "1.0", "9" * 19, 1.0, True, None, 2**63])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_an_invalid_id_is_refused(other: SqlBroker, wrong: Any) -> None:
    with pytest.raises(SetupError, match="message_id must be a 64-bit integer"):
        await other.admin.explain(wrong)


async def test_a_queue_without_a_live_subscriber(broker: SqlBroker, other: SqlBroker) -> None:
    message_id = await broker.publish("x", "q")
    explanation = await other.admin.explain(message_id)
    assert (explanation.message_id, explanation.queue) == (message_id, "q")
    assert explanation.state is SqlBrokerMessageState.PENDING
    assert codes(explanation) == ["no_live_subscriber"]
    assert str(explanation) == (
        f"message {message_id} of queue 'q' is PENDING:\n"
        "- no_live_subscriber: the queue has no live subscriber"
    )


async def test_a_process_that_died_without_a_stop_is_named(
    broker: SqlBroker, other: SqlBroker, bench: Bench
) -> None:
    worker, started = await stuck(broker, other)
    message_id = await broker.publish("x", "q")
    await asyncio.wait_for(started.wait(), 60)
    [reason] = (await other.admin.explain(message_id)).reasons
    assert (reason.code, reason.worker) == ("processing", worker.worker)
    assert reason.until is not None
    # As if the machine had been lost: no good-bye, and the leases run out.
    consumer: Any = broker.subscribers[0].consumer  # type: ignore[attr-defined]
    async with consumer._heartbeat._lock:
        consumer._heartbeat._registrations.clear()
    await consumer._release_loop.stop()
    past = bench.past(1)
    await bench.execute(f"UPDATE message_policy_state SET lease_expires_at = {past}")
    [reason] = (await other.admin.explain(message_id)).reasons
    assert (reason.code, reason.worker) == ("processing", worker.worker)
    assert reason.text.endswith("; that process has sent no heartbeat recently")
    await bench.expire()
    lease, alone = (await other.admin.explain(message_id)).reasons
    assert (lease.code, lease.worker) == ("lease_expired", worker.worker)
    assert (alone.code, alone.worker) == ("no_live_subscriber", worker.worker)


async def test_a_transactional_handler_that_outlives_its_lease_is_told_as_such(
    broker: SqlBroker,
    other: SqlBroker,
    look: Look,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its transaction holds the row: the lease can be neither renewed nor given back."""
    started = asyncio.Event()
    gate = asyncio.Event()
    deliver = TransactionalDeliveries.deliver

    async def late(self: TransactionalDeliveries, *given: Any) -> Any:
        # Once it is locked nothing else can let the lease run out; a session that is silent for
        # its whole lease would be ended.
        await bench.expire()
        return await deliver(self, *given)

    monkeypatch.setattr(TransactionalDeliveries, "deliver", late)

    @broker.subscriber("q", **QUICK, transactional=True, release_stuck_interval=600)
    async def handle(body: Any) -> None:
        started.set()
        await gate.wait()

    await broker.start()
    [worker] = await lives(other)
    assert worker.transactional
    message_id = await broker.publish("x", "q")
    await asyncio.wait_for(started.wait(), 60)
    [reason] = (await other.admin.explain(message_id)).reasons
    assert (reason.code, reason.worker) == ("in_transaction", worker.worker)
    assert "its lease expired at" in reason.text
    assert (await other.admin.verify(lease_over=0.001)).ok
    gate.set()

    async def ended() -> bool:
        return [row["state"] for row in await look.rows(archive=True)] == ["COMPLETED"]

    await eventually(ended)


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_lease_that_ran_out_is_told_apart_from_a_row_that_is_locked(
    broker: SqlBroker, other: SqlBroker, look: Look, bench: Bench
) -> None:
    """Also for a holder that is not known any more, as its sign of life ran out."""
    locked = await broker.publish("x", "q")
    free = await broker.publish("x", "q")
    await bench.execute(
        "UPDATE message SET state = 'PROCESSING', deliveries_count = 1, "
        f"lease_token = '{'0' * 32}', lease_expires_at = {bench.past(3600)}"
    )
    async with look.engine.begin() as connection:
        await connection.execute(text(f"SELECT id FROM message WHERE id = {locked} FOR UPDATE"))
        for message_id, code in ((locked, "in_transaction"), (free, "lease_expired")):
            assert codes(await other.admin.explain(message_id))[0] == code
        verified = await other.admin.verify()
        assert [d.message_id for d in verified.damages] == [free]
    assert codes(await other.admin.explain(locked))[0] == "lease_expired"
    assert len((await other.admin.verify()).damages) == 2


async def test_a_delayed_message(broker: SqlBroker, other: SqlBroker, look: Look) -> None:
    await idle(broker, other)
    message_id = await broker.publish("x", "q", delay="1h")
    [reason] = (await other.admin.explain(message_id)).reasons
    [row] = await look.rows()
    assert (reason.code, reason.until) == ("delayed", row["next_attempt_at"])
    assert reason.text.startswith("it is not due before ")
    assert re.search(r"\(in (60|59|58) min\)", reason.text)


async def test_a_message_that_waits_for_its_retry(
    broker: SqlBroker, other: SqlBroker, look: Look
) -> None:
    retry = ConstantRetryStrategy(delay_seconds=3600, max_attempts=3, max_total_delay_seconds=None)

    @broker.subscriber("q", **QUICK, retry_strategy=retry)
    async def handle(body: Any) -> None:
        raise ValueError("the provider said no")

    await broker.start()
    await lives(other)
    message_id = await broker.publish("x", "q")
    row = await look.in_state("RETRYABLE")
    explanation = await other.admin.explain(message_id)
    [reason] = explanation.reasons
    assert explanation.state is SqlBrokerMessageState.RETRYABLE
    assert (reason.code, reason.until) == ("retrying", row["next_attempt_at"])
    assert reason.text.endswith(", after 1 attempt; last error: ValueError: the provider said no")


async def test_a_message_of_a_paused_queue(broker: SqlBroker, other: SqlBroker) -> None:
    await idle(broker, other)
    await other.admin.pause("q", reason="provider down", by="Ann", until="1h")
    message_id = await broker.publish("x", "q", delay=3600)
    paused, delayed = (await other.admin.explain(message_id)).reasons
    [told] = await other.admin.paused()
    assert (paused.code, delayed.code, paused.until) == ("paused", "delayed", told.until)
    assert paused.text.startswith("Ann paused the queue at ")
    assert paused.text.endswith(" (provider down)")


async def test_a_message_whose_subscribers_are_all_paused(
    broker: SqlBroker, other: SqlBroker
) -> None:
    worker = await idle(broker, other)
    subscriber: Any = broker.subscribers[0]
    subscriber.pause()

    async def told() -> bool:
        return [s.paused for s in await other.admin.subscribers()] == [True]

    await eventually(told)
    message_id = await broker.publish("x", "q")
    [reason] = (await other.admin.explain(message_id)).reasons
    assert reason.code == "paused"
    assert (
        reason.text
        == f"every live subscriber of the queue is paused in its own process: {worker.worker}"
    )


async def test_an_expired_message(broker: SqlBroker, other: SqlBroker) -> None:
    message_id = await broker.publish("x", "q", expires_in=0.01)

    async def found() -> list[str] | None:
        found = codes(await other.admin.explain(message_id))
        return found if "expired" in found else None

    assert await eventually(found) == ["expired", "no_live_subscriber"]


@pytest.mark.parametrize(("delay", "words"), [(None, "it is due"), (3600, "it is not due before ")])
async def test_behind_an_earlier_message_that_waits(
    broker: SqlBroker, other: SqlBroker, delay: Any, words: str
) -> None:
    await other.admin.pause("q")
    await idle(broker, other, ordered=True)
    first = await broker.publish(1, "q", key="k", delay=delay)
    await broker.publish(2, "q", key="else")
    message_id = await broker.publish(3, "q", key="k", priority=9)
    reason = (await other.admin.explain(message_id)).reasons[-1]
    assert (reason.code, reason.message_id, reason.worker) == (
        "behind_earlier_message",
        first,
        None,
    )
    assert f"message {first} of the same key comes first under ordered=True: {words}" in reason.text
    assert (reason.until is None) == (delay is None)
    assert "behind_earlier_message" not in codes(await other.admin.explain(first))
    unkeyed = await broker.publish(4, "q")
    assert codes(await other.admin.explain(unkeyed)) == ["paused"]


async def test_behind_an_earlier_message_that_is_handled(
    broker: SqlBroker, other: SqlBroker
) -> None:
    worker, started = await stuck(broker, other, ordered=True)
    first = await broker.publish(1, "q", key="k")
    await asyncio.wait_for(started.wait(), 60)
    message_id = await broker.publish(2, "q", key="k")
    [reason] = (await other.admin.explain(message_id)).reasons
    assert (reason.code, reason.message_id, reason.worker) == (
        "behind_earlier_message",
        first,
        worker.worker,
    )


async def test_behind_a_later_message_that_runs(
    broker: SqlBroker, other: SqlBroker, bench: Bench
) -> None:
    """An earlier id that is committed late waits for what runs already."""
    _, started = await stuck(broker, other, ordered=True, max_workers=5)
    second = await broker.publish(2, "q", key="k")
    await asyncio.wait_for(started.wait(), 60)
    # Ids begin at 1: room before it is made by the fixture's empty table.
    await bench.execute(
        f"INSERT INTO message (id, queue, {bench.quoted('key')}, payload) VALUES (0, 'q', 'k', '1')"
        if bench.store.dialect_name not in MYSQL
        else "INSERT INTO message (id, queue, `key`, payload) VALUES (-1, 'q', 'k', '1')"
    )
    message_id = -1 if bench.store.dialect_name in MYSQL else 0
    [reason] = (await other.admin.explain(message_id)).reasons
    assert (reason.code, reason.message_id) == ("behind_earlier_message", second)


async def test_an_expired_message_does_not_hold_its_key(
    broker: SqlBroker, other: SqlBroker
) -> None:
    await other.admin.pause("q")
    await idle(broker, other, ordered=True)
    first = await broker.publish(1, "q", key="k", expires_in=0.01)

    async def expired() -> bool:
        return "expired" in codes(await other.admin.explain(first))

    await eventually(expired)
    message_id = await broker.publish(2, "q", key="k")
    assert codes(await other.admin.explain(message_id)) == ["paused"]


async def test_the_next_and_those_behind_it(
    other: SqlBroker, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands ahead is counted by priority, due time and id, delayed messages left out, and up
    to a number."""
    settings = make_settings("q", {})
    says = Registration(settings, paused=False, on_change=lambda: None).describe()
    # It claims nothing.
    await bench.store.live_subscribers.write_heartbeat(
        {"slow": says}, {"slow"}, 3600.0, clean=False
    )
    first = await put(bench, NewMessage("q", b"1", priority=5))
    await put(bench, NewMessage("q", b"1", priority=9, delay=3600.0))
    await put(bench, NewMessage("else", b"1", priority=9))
    assert codes(await other.admin.explain(first)) == ["ready"]
    second = await put(bench, NewMessage("q", b"1", priority=5))
    last = await put(bench, NewMessage("q", b"1"))
    for message_id, ahead in ((second, 1), (last, 2)):
        [reason] = (await other.admin.explain(message_id)).reasons
        assert reason.code == "waiting_for_capacity"
        assert reason.text.startswith(
            f"{ahead} due messages come first and 0 are leased: 1 workers of 1 "
        )
    monkeypatch.setattr(live_messages, "MAX_COUNTED", 10)
    await bench.store.insert([NewMessage("q", b"1", priority=7) for _ in range(20)])
    [reason] = (await other.admin.explain(last)).reasons
    assert reason.text.startswith("10 or more due messages come first")
    assert codes(await other.admin.explain(first)) == ["waiting_for_capacity"]


async def put(bench: Bench, message: NewMessage) -> int:
    """Insert one; its id."""
    [message_id] = await bench.store.insert([message])
    assert message_id is not None
    return message_id


async def test_a_message_while_all_workers_are_busy(broker: SqlBroker, other: SqlBroker) -> None:
    _, started = await stuck(broker, other, ordered=True)
    await broker.publish(1, "q")
    await asyncio.wait_for(started.wait(), 60)
    message_id = await broker.publish(2, "q")
    [reason] = (await other.admin.explain(message_id)).reasons
    assert reason.code == "waiting_for_capacity"
    assert reason.text.startswith(
        "0 due messages come first and 1 are leased: 1 workers of 1 subscribers"
    )


async def test_a_message_that_may_kill_its_process(
    broker: SqlBroker, other: SqlBroker, bench: Bench
) -> None:
    message_id = await broker.publish("x", "q")
    await bench.execute("UPDATE message SET deliveries_count = 3, attempts_count = 1")
    assert codes(await other.admin.explain(message_id)) == ["no_live_subscriber", "suspect"]


@pytest.mark.parametrize(
    ("limit", "lost", "is_suspect"),
    [(2, 1, True), (2, 2, False), (3, 1, False), (None, 1, False), (None, 2, True)],
)
async def test_the_limit_of_its_subscriber_decides_whether_a_message_runs_alone(
    broker: SqlBroker,
    other: SqlBroker,
    bench: Bench,
    limit: int | None,
    lost: int,
    is_suspect: bool,
) -> None:
    """As claims decide; with more lost leases than the limit, the next claim ends it."""
    await other.admin.pause("q")
    await idle(broker, other, max_deliveries=limit)
    message_id = await broker.publish("x", "q")
    await bench.execute(f"UPDATE message SET deliveries_count = {lost}")
    reasons = ["paused", "suspect"] if is_suspect else ["paused"]
    assert codes(await other.admin.explain(message_id)) == reasons


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_row_that_cannot_be_a_message(
    broker: SqlBroker, other: SqlBroker, bench: Bench
) -> None:
    message_id = await broker.publish("x", "q")
    await bench.execute("UPDATE message SET attempts_count = 'many'")
    assert codes(await other.admin.explain(message_id)) == ["undecodable"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("value", ["datetime('now')", "9e999", "1700000000000000000"])
async def test_p3_an_unusable_due_time(
    broker: SqlBroker, other: SqlBroker, bench: Bench, value: str
) -> None:
    """P3: what is said of it is what then happens."""
    message_id = await broker.publish("x", "q")
    await bench.execute(f"UPDATE message SET next_attempt_at = {value}")
    explanation = await other.admin.explain(message_id)
    assert codes(explanation) == ["unusable_time", "no_live_subscriber"]
    assert "another program stored an invalid time in its next_attempt_at, so it is due now" in str(
        explanation
    )
    assert await other.pop("q") is not None
    assert codes(await other.admin.explain(message_id)) == ["archived"]


@pytest.mark.parametrize("database", MYSQL, indirect=True)
async def test_p3_a_zero_date(broker: SqlBroker, other: SqlBroker, bench: Bench) -> None:
    message_id = await broker.publish("x", "q")
    async with other.engine.begin() as connection:
        await connection.exec_driver_sql("SET SESSION sql_mode = ''")
        await connection.exec_driver_sql("UPDATE message SET next_attempt_at = '0000-00-00'")
        await connection.exec_driver_sql("SET SESSION sql_mode = DEFAULT")
    assert codes(await other.admin.explain(message_id)) == ["unusable_time", "no_live_subscriber"]
    assert await other.pop("q") is not None


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_p3_another_unusable_time_holds_nothing_up(
    broker: SqlBroker, other: SqlBroker, bench: Bench
) -> None:
    message_id = await broker.publish("x", "q", delay="1h")
    await bench.execute("UPDATE message SET created_at = 'long ago', expires_at = 'never'")
    explanation = await other.admin.explain(message_id)
    assert codes(explanation) == ["unusable_time", "delayed", "no_live_subscriber"]
    assert "an invalid time in its created_at and expires_at;" in str(explanation)


# -- what has ended --------------------------------------------------------------------------------


async def test_an_archived_message_is_explained_by_its_end(
    broker: SqlBroker, other: SqlBroker, look: Look
) -> None:
    @broker.subscriber("q", **QUICK, ack_policy=AckPolicy.MANUAL, retry_strategy=None)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        if body == "good":
            await message.ack()
        elif body == "old":
            message.raw_message.record_outcome(Discard(SUPERSEDED, 17))  # type: ignore[union-attr]
        else:
            raise ValueError("bad body")

    await broker.start()
    ids = [await broker.publish(body, "q") for body in ("good", "old", "bad")]
    await look.archived(3)
    good, old, bad = [await other.admin.explain(i) for i in ids]
    assert good.state is SqlBrokerMessageState.COMPLETED
    assert codes(good) == codes(old) == codes(bad) == ["archived"]
    assert old.state is SqlBrokerMessageState.DISCARDED
    assert old.reasons[0].message_id == 17
    assert old.reasons[0].text.endswith(": superseded (message 17)")
    assert bad.state is SqlBrokerMessageState.FAILED


async def test_a_message_of_ack_first_that_never_ended_is_explained(
    broker: SqlBroker, other: SqlBroker, bench: Bench
) -> None:
    _, started = await stuck(broker, other, ack_policy=AckPolicy.ACK_FIRST)
    message_id = await broker.publish("x", "q")
    await asyncio.wait_for(started.wait(), 60)
    explanation = await other.admin.explain(message_id)
    assert codes(explanation) == ["archived", "processing"]
    # A process that has died looks the same until then.
    assert "becomes unknown unless that process reports that it is alive before" in str(explanation)
    past = bench.past(1)
    await bench.execute(
        f"UPDATE message_policy_state SET lease_expires_at = {past} WHERE scope = 'ack_first:q'"
    )
    assert codes(await other.admin.explain(message_id)) == ["archived", "unknown_outcome"]


# -- what others add -------------------------------------------------------------------------------


async def test_the_step_of_a_pipeline_is_named(broker: SqlBroker) -> None:
    broker.pipeline("Else", Step("x"), forward_to="z")
    broker.pipeline("Email", Step("debounce"), Step("q"), forward_to="send")
    message_id = await broker.publish("x", "q")
    explanation = await broker.admin.explain(message_id)
    assert explanation.pipeline == "step 2 of 2 of Email"
    assert str(explanation).startswith(
        f"message {message_id} of queue 'q' (step 2 of 2 of Email) is PENDING:\n"
    )
    elsewhere = await broker.publish("x", "y")
    assert (await broker.admin.explain(elsewhere)).pipeline is None
    assert (await broker.admin.explain(10**9)).pipeline is None


async def test_policies_add_their_reasons(
    broker: SqlBroker, other: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await other.admin.pause("q")
    worker = await idle(broker, other)
    message_id = await broker.publish("x", "q", key="k")
    seen: list[Any] = []
    until = datetime(2100, 1, 1, tzinfo=timezone.utc)

    def window(facts: PolicyDetails, message: WaitingMessage) -> list[Reason]:
        seen.append((facts, message))
        return [Reason("outside_window", "it opens later", until=until)]

    monkeypatch.setattr(policy_waits, "EXPLAINERS", [window])
    assert codes(await other.admin.explain(message_id)) == ["paused", "outside_window"]
    [(facts, message)] = seen
    assert facts.dialect is other._store.dialect
    assert (message.id, message.key, message.policy_marks) == (message_id, "k", 0)
    assert [s.worker for s in facts.subscribers] == [worker.worker]


async def test_explain_reads_one_snapshot_and_writes_nothing(
    broker: SqlBroker, other: SqlBroker, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later commits are not seen: reasons never contradict each other."""
    await broker.start()  # SQLite needs its write-ahead log for that
    message_id = await broker.publish("x", "q")
    drivers = {"sqlite+aiosqlite": "sqlite", "postgresql+asyncpg": "postgresql+psycopg"}
    url = make_url(database_url)
    synchronous = create_engine(url.set(drivername=drivers.get(url.drivername, "mysql+pymysql")))
    counts: list[Any] = []

    def meddle(facts: PolicyDetails, _message: WaitingMessage) -> list[Reason]:
        for _ in range(2):
            counts.append(
                facts.connection.execute(text("SELECT count(*) FROM message")).scalar_one()
            )
            with synchronous.begin() as writer:
                writer.execute(text("DELETE FROM message"))
        return []

    monkeypatch.setattr(policy_waits, "EXPLAINERS", [meddle])
    seen: list[str] = []

    @event.listens_for(other.engine.sync_engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    explanation = await other.admin.explain(message_id)
    synchronous.dispose()
    assert counts == [1, 1]
    assert codes(explanation) == ["no_live_subscriber"]
    assert all(
        s.split()[0] in {"SELECT", "SET", "START", "BEGIN", "PRAGMA", "WITH"} for s in seen
    ), seen
    assert codes(await other.admin.explain(message_id)) == ["not_found"]
    await broker.publish("y", "q")  # the connection's next transaction is an ordinary one


async def test_the_connection_goes_back_as_it_was(broker: SqlBroker) -> None:
    for _ in range(3):
        message_id = await broker.publish("x", "q")
        assert codes(await broker.admin.explain(message_id)) == ["no_live_subscriber"]
        await broker.admin.pause("else")
        await broker.admin.resume("else")


async def test_a_pending_cancel_is_told(broker: SqlBroker, bench: Bench, other: SqlBroker) -> None:
    message_id = await broker.publish("x", "q")
    assert message_id is not None
    [_] = await bench.claim(1)
    assert (await other.admin.cancel(message_id, reason="wrong", by="Ann")).verdict == "requested"
    found = await other.admin.explain(message_id)
    assert [reason.code for reason in found.reasons] == ["cancel_requested", "processing"]
    assert "it is being cancelled by Ann: wrong" in str(found)
    detail = await other.admin.message(message_id)
    assert detail is not None
    assert detail.explanation.reasons[0].code == "cancel_requested"
    await bench.expire()
    assert await bench.store.release_stuck(["q"], 10) == 1
    again = await other.admin.explain(message_id)
    assert "cancel_requested" not in [reason.code for reason in again.reasons]

"""A transactional handler succeeds and its COMMIT fails: a transient error charges no attempt."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Ack, Nack, Relocate
from faststream_sqlbroker.core.policies import Once
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.database.messages.handler import HandlerTransaction, current_transaction
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.flow.deliver import transactional
from tests.clock import let_loop_pass
from tests.flow.conftest import Rig
from tests.flow.test_ended_transactions import archived, effects
from tests.flow.test_idle_limit import free
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`transactional=True`")
__all__ = ["effects"]

on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
"""SQLite has no sessions that could be ended, and one writer: no other transaction can hold a
dedup_id at the same time."""
ONE_ATTEMPT: dict[str, Any] = {
    "transactional": True,
    "max_fetch_interval": 0.05,
    "flush_interval": 0.01,
    "retry_strategy": ConstantRetryStrategy(delay_seconds=0.0, max_attempts=1),
}


class DriversError(Exception):
    """What the driver raises; each names its code in another place."""

    sqlstate = "40001"
    sqlite_errorcode = 5


def conflict(what: str) -> OperationalError:
    """The database has rolled back `what`, which may succeed if it is repeated."""
    return OperationalError(what, {}, DriversError(1213, "found a deadlock"))


def fails_at_commit(transaction: HandlerTransaction) -> None:
    sync: Any = transaction.connection.sync_connection

    def refuse(_connection: Any) -> None:
        raise conflict("COMMIT")

    event.listen(sync, "commit", refuse)


def fails_at_flush(transaction: HandlerTransaction) -> None:
    async def refuse() -> None:
        raise conflict("INSERT")

    transaction.session.flush = refuse  # type: ignore[method-assign]


def fails_at_settle(transaction: HandlerTransaction) -> None:
    locks: Any = transaction._dialect.handler_locks

    def refuse(*_: Any) -> None:
        del locks.settle
        raise conflict("DELETE")

    locks.settle = refuse


Failure = Callable[[HandlerTransaction], None]


class Handler:
    """Leaves an effect a start, acks, and makes the commit of its first `times` starts fail."""

    def __init__(
        self, fail: Failure = fails_at_commit, *, times: int = 1, outcome: Any = None
    ) -> None:
        self._fail = fail
        self._times = times
        self._outcome = outcome or Ack()
        self.started = 0

    async def __call__(self, rows: Any) -> None:
        transaction = current_transaction.get()
        assert transaction is not None
        self.started += 1
        await transaction.connection.execute(text(f"INSERT INTO effect VALUES ({self.started})"))
        if self.started <= self._times:
            self._fail(transaction)
        for row in rows if isinstance(rows, tuple) else [rows]:
            row.record_outcome(self._outcome)


Effects = Callable[[], Awaitable[list[int]]]


@pytest.mark.parametrize(
    "fail", [fails_at_commit, fails_at_flush, fails_at_settle], ids=["commit", "flush", "settle"]
)
async def test_the_handler_runs_again_and_no_attempt_is_charged(
    rig: Rig, effects: Effects, fail: Failure
) -> None:
    handle = Handler(fail)
    await rig.put(1)
    consumer = rig.consumer(handle, **ONE_ATTEMPT)
    await consumer.start()
    [row] = await archived(rig)
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("COMPLETED", 1, 2)
    assert "found a deadlock" in row["last_error"]
    assert (handle.started, await effects()) == (2, [2])
    [warning] = rig.logged("could not be committed and is rolled back")
    assert "found a deadlock" in warning
    assert consumer.inflight.lease_lost_count == 0


async def test_a_move_runs_again_too(rig: Rig, effects: Effects) -> None:
    handle = Handler(outcome=Relocate("other"))
    await rig.put(1)
    await rig.consumer(handle, **ONE_ATTEMPT).start()

    async def moved() -> bool:
        return [row["queue"] for row in await rig.rows()] == ["other"]

    await eventually(moved)
    assert (handle.started, await effects()) == (2, [2])


async def test_the_delay_grows_until_the_delivery_limit(
    rig: Rig, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def backoff(failures: int, _clock: Clock) -> float:
        steps.append(failures)
        return 0.0

    monkeypatch.setattr(transactional, "backoff", backoff)
    handle = Handler(times=1_000)
    await rig.put(1)
    await rig.consumer(handle, **ONE_ATTEMPT, max_deliveries=3).start()
    [row] = await archived(rig)
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "max_deliveries", 0)
    assert "found a deadlock" in row["last_error"]
    assert steps == [4, 5, 6]
    assert (handle.started, await effects()) == (3, [])


async def test_without_a_limit_on_attempts_it_costs_one_and_goes_on(
    rig: Rig, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional, "backoff", lambda *_: 0.0)
    handle = Handler(times=4)
    options = ONE_ATTEMPT | {"retry_strategy": ConstantRetryStrategy(delay_seconds=0.0)}
    await rig.put(1)
    await rig.consumer(handle, **options, max_deliveries=2).start()
    [row] = await archived(rig)
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("COMPLETED", 5, 5)
    assert (handle.started, await effects()) == (5, [5])


async def test_the_delay_counts_by_the_databases_clock(
    rig: Rig, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactional, "backoff", lambda *_: 3600.0)
    handle = Handler(times=1_000)
    await rig.put(1)
    await rig.consumer(handle, **ONE_ATTEMPT).start()

    async def back() -> dict[str, Any] | None:
        [row] = await rig.rows()
        return row if row["state"] == "PENDING" and row["deliveries_count"] == 1 else None

    row = await eventually(back)
    assert row is not None
    assert row["next_attempt_at"] > row["created_at"]
    assert (await rig.claim(), handle.started) == ([], 1)


async def test_messages_of_a_batch_that_were_settled_otherwise_stay_settled(
    rig: Rig, effects: Effects
) -> None:
    ids = await rig.put(3)
    handle = Handler()

    async def nack_one(rows: tuple[ClaimedMessage, ...]) -> None:
        for row in rows:
            if row.id == ids[0]:
                row.record_outcome(Nack())
        await handle(rows)

    consumer = rig.consumer(nack_one, **ONE_ATTEMPT, batch=True)
    await consumer.start()
    rows = await archived(rig, 3)
    assert [(row["state"], row["attempts_count"], row["deliveries_count"]) for row in rows] == [
        ("FAILED", 1, 1),
        ("COMPLETED", 1, 2),
        ("COMPLETED", 1, 2),
    ]
    assert (handle.started, await effects()) == (2, [2])


async def test_a_lease_lost_during_the_repeat_stays_with_its_new_holder(
    rig: Rig, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = rig.store.settle
    token = uuid4()
    value = token if rig.store.dialect_name == "postgresql" else token.hex

    async def stolen_before(*arguments: Any, **options: Any) -> Any:
        await rig.execute("UPDATE message SET lease_token = :token", token=value)
        return await settle(*arguments, **options)

    monkeypatch.setattr(rig.store, "settle", stolen_before)
    handle = Handler()
    await rig.put(1)
    consumer = rig.consumer(handle, **ONE_ATTEMPT)
    await consumer.start()
    await eventually(lambda: consumer.inflight.lease_lost_count == 1)
    row = await rig.one()
    assert (row["state"], row["attempts_count"]) == ("PROCESSING", 0)
    assert str(row["lease_token"]).replace("-", "") == token.hex
    assert await effects() == []


async def test_a_message_under_once_does_not_run_again(rig: Rig, effects: Effects) -> None:
    handle = Handler()
    await rig.put(1, key="k")
    await rig.consumer(handle, **ONE_ATTEMPT, policies=[Once(ttl=60)]).start()
    [row] = await archived(rig)
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "failed_once", 1)
    assert "found a deadlock" in row["last_error"]
    assert (handle.started, await effects()) == (1, [])
    assert not rig.logged("the handler's work")


@on_servers
async def test_an_answer_whose_dedup_id_an_open_transaction_holds(
    rig: Rig, effects: Effects
) -> None:
    handle = Handler(times=0)

    async def answering(row: ClaimedMessage) -> None:
        row.chained = [NewMessage("out", b"answer", dedup_id="D")]
        await handle(row)

    await rig.put(1)
    async with rig.store.engine.connect() as other:
        await rig.store.insert_in(other, [NewMessage("out", b"theirs", dedup_id="D")])
        await rig.consumer(answering, **ONE_ATTEMPT, max_deliveries=None).start()

        async def given_up() -> bool:
            if await waits_for_lock(rig):
                let_loop_pass(60)
            return bool(
                rig.logged("the handler's work")
                or rig.logged("whether it was committed is unknown")
            )

        # What hangs hangs for long on MySQL and MariaDB, whose server goes on waiting without its
        # client.
        await eventually(given_up, step=0.2)
        await other.rollback()
    [row] = await eventually(lambda: rig.rows(archive=True), timeout=120)
    assert (row["state"], row["attempts_count"]) == ("COMPLETED", 1)
    assert [(row["queue"], row["dedup_id"]) for row in await rig.rows()] == [("out", "D")]
    assert await effects() == [handle.started]


async def waits_for_lock(rig: Rig) -> bool:
    """Whether a session of this database waits for a lock, as InnoDB knew a moment ago."""
    waiting = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()"
        if rig.store.dialect_name == "postgresql"
        else "SELECT count(*) FROM information_schema.innodb_trx t "
        "JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id "
        "WHERE t.trx_state = 'LOCK WAIT' AND p.db = DATABASE()"
    )
    async with rig.store.engine.connect() as connection:
        return bool((await connection.execute(text(waiting))).scalar_one())


OWN = {"postgresql": "SELECT pg_backend_pid()"}
KILL = {"postgresql": "SELECT pg_terminate_backend({})"}


async def kill_own(rig: Rig) -> None:
    """End the session of the handler that runs."""
    transaction = current_transaction.get()
    kind = rig.store.dialect_name
    assert transaction is not None
    number = (
        await transaction.connection.execute(text(OWN.get(kind, "SELECT CONNECTION_ID()")))
    ).scalar_one()
    async with rig.store.engine.connect() as connection:
        await connection.execute(text(KILL.get(kind, "KILL {}").format(number)))


@on_servers
async def test_a_session_that_the_server_has_ended(rig: Rig, effects: Effects) -> None:
    handle = Handler(times=0)

    async def killed_once(row: ClaimedMessage) -> None:
        await handle(row)
        if handle.started == 1:
            await kill_own(rig)

    await rig.put(1)
    await rig.consumer(killed_once, **ONE_ATTEMPT).start()
    [row] = await archived(rig)
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("COMPLETED", 1, 2)
    assert await effects() == [2]


@on_servers
async def test_a_handler_that_committed_by_itself_does_not_run_again(
    rig: Rig, effects: Effects
) -> None:
    """The connection is lost after it: that passes, but half of the handler is committed."""
    handle = Handler(times=0)

    async def committing(row: ClaimedMessage) -> None:
        await handle(row)
        transaction = current_transaction.get()
        assert transaction is not None
        await transaction.connection.execute(text("COMMIT"))
        await transaction.connection.execute(text("BEGIN"))
        await kill_own(rig)

    await rig.put(1)
    await rig.consumer(committing, **ONE_ATTEMPT).start()
    [row] = await archived(rig)
    assert (row["state"], row["reason"], row["attempts_count"]) == (
        "FAILED",
        "transaction_ended",
        1,
    )
    assert (handle.started, await effects()) == (1, [1])
    assert not rig.logged("the handler's work")


@on_servers
async def test_a_handler_that_is_silent_for_too_long_has_failed(rig: Rig, effects: Effects) -> None:
    """The server has ended its session, and would do so every time."""
    engine = create_async_engine(rig.store.engine.url)
    handle = Handler(times=0)

    async def silent(row: ClaimedMessage) -> None:
        await handle(row)
        transaction = current_transaction.get()
        assert transaction is not None
        assert await transaction.hold([(row.id, row.lease_token)], 1.0)
        await eventually(lambda: free(rig, row.id), step=0.1)

    await rig.put(1)
    consumer = rig.consumer(silent, store=Store(engine, rig.store.tables), **ONE_ATTEMPT)
    await consumer.start()
    [row] = await eventually(lambda: rig.rows(archive=True), timeout=120)
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "max_attempts", 1)
    assert (handle.started, await effects()) == (1, [])
    await consumer.stop()
    await engine.dispose()

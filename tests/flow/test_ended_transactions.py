"""Handlers' transactions that end without the broker: by a deadlock, by DDL, by COMMIT as text.

A settle after that must never ack a message whose work was not committed; committed work must never
be repeated.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from faststream_sqlbroker.core.outcome import Ack, Defer, Nack, Reject, Relocate
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.messages.handler import current_transaction
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import TransactionEndedError, TransientStoreError
from faststream_sqlbroker.schema.types import MYSQL
from tests.flow.conftest import Rig
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`transactional=True`")

TWICE = ConstantRetryStrategy(delay_seconds=0.0, max_attempts=2)
QUICK: dict[str, Any] = {
    "transactional": True,
    "max_fetch_interval": 0.05,
    "flush_interval": 0.01,
    "retry_strategy": TWICE,
}
Step = Callable[[AsyncConnection], Awaitable[Any]]


def sql(*statements: str) -> Step:
    """Sends `statements` as text."""

    async def send(connection: AsyncConnection) -> None:
        for statement in statements:
            await connection.execute(text(statement))

    return send


def effect(number: int) -> str:
    return f"INSERT INTO effect VALUES ({number})"


class Handler:
    """Runs the steps of its attempt, one list an attempt, and settles as it is told."""

    def __init__(self, *attempts: Step, outcome: Any = None) -> None:
        self._attempts = attempts
        self._outcome = outcome or Ack()
        self.started = 0
        self.errors: list[Exception] = []

    async def __call__(self, rows: Any) -> None:
        transaction = current_transaction.get()
        assert transaction is not None
        self.started += 1
        step = self._attempts[min(self.started, len(self._attempts)) - 1]
        try:
            await step(transaction.connection)
        except Exception as error:
            self.errors.append(error)
        for row in rows if isinstance(rows, tuple) else [rows]:
            row.record_outcome(self._outcome)


@pytest.fixture
async def effects(rig: Rig) -> Callable[[], Awaitable[list[int]]]:
    await rig.execute("CREATE TABLE effect (n INTEGER)")

    async def read() -> list[int]:
        async with rig.store.engine.connect() as connection:
            return sorted((await connection.execute(text("SELECT n FROM effect"))).scalars())

    return read


async def archived(rig: Rig, count: int = 1) -> list[dict[str, Any]]:
    async def done() -> list[dict[str, Any]]:
        rows = await rig.rows(archive=True)
        return rows if len(rows) == count and not await rig.rows() else []

    return await eventually(done)


def commits_ddl(rig: Rig) -> bool:
    return rig.store.dialect_name in MYSQL


def refuses(rig: Rig) -> bool:
    """Whether statements outside of the transaction are refused; asyncmy does not know, but rolls
    them back, too."""
    return rig.store.driver != "asyncmy"


@pytest.mark.parametrize(
    ("then", "outcome"),
    [
        ((), Ack()),
        ((), Relocate("other")),
        (("SAVEPOINT mine", effect(2)), Ack()),
        (("BEGIN", effect(2)), Ack()),
    ],
    ids=["ack", "move", "savepoint", "begin"],
)
async def test_after_a_rollback_the_attempt_fails(
    rig: Rig, effects: Any, outcome: Any, then: tuple[str, ...]
) -> None:
    handle = Handler(sql(effect(1), "ROLLBACK", *then), sql(effect(3)), outcome=outcome)
    await rig.put(1)
    await rig.consumer(handle, **QUICK).start()
    await eventually(lambda: handle.started == 2)
    if isinstance(outcome, Ack):
        [row] = await archived(rig)
        assert (row["state"], row["attempts_count"]) == ("COMPLETED", 2)
        assert "rolled it back" in row["last_error"]
    else:
        await eventually(lambda: _queues(rig, ["other"]))
    assert await effects() == [3]


async def _queues(rig: Rig, queues: list[str]) -> bool:
    return [row["queue"] for row in await rig.rows()] == queues


async def test_outside_of_the_transaction_nothing_is_executed(rig: Rig, effects: Any) -> None:
    handle = Handler(sql(effect(1), "ROLLBACK", effect(2)))
    await rig.put(1)
    await rig.consumer(handle, **QUICK).start()
    [row] = await archived(rig)
    assert (row["state"], row["reason"]) == ("FAILED", "max_attempts")
    assert [type(error) for error in handle.errors] == [TransactionEndedError] * (2 * refuses(rig))
    assert await effects() == []


@pytest.mark.parametrize(
    ("then", "outcome"),
    [
        ((), Ack()),
        ((), Relocate("other")),
        ((), Nack()),
        ((), Nack(delay=0.0)),
        ((), Defer(0.0)),
        (("BEGIN", effect(2)), Ack()),
        (("ROLLBACK",), Ack()),
        ((effect(2),), Ack()),
    ],
    ids=["ack", "move", "nack", "delay", "postpone", "begin", "rollback", "more"],
)
async def test_a_committed_handler_never_runs_again(
    rig: Rig, effects: Any, outcome: Any, then: tuple[str, ...]
) -> None:
    handle = Handler(sql(effect(1), "COMMIT", *then), outcome=outcome)
    await rig.put(1)
    await rig.consumer(handle, **QUICK).start()
    [row] = await archived(rig)
    assert (row["state"], row["reason"], row["attempts_count"]) == (
        "FAILED",
        "transaction_ended",
        1,
    )
    assert "ended its transaction" in row["last_error"]
    assert handle.started == 1
    assert await effects() == [1]


async def test_a_reject_after_a_commit_stays_one(rig: Rig, effects: Any) -> None:
    await rig.put(1)
    await rig.consumer(Handler(sql("COMMIT"), outcome=Reject("mine")), **QUICK).start()
    [row] = await archived(rig)
    assert (row["state"], row["reason"]) == ("FAILED", "mine")


async def test_ddl_commits_where_the_database_says_so(rig: Rig, effects: Any) -> None:
    handle = Handler(sql(effect(1), "CREATE TABLE other (n INTEGER)"))
    await rig.put(1)
    await rig.consumer(handle, **QUICK).start()
    [row] = await archived(rig)
    expected = ("FAILED", "transaction_ended") if commits_ddl(rig) else ("COMPLETED", None)
    assert (row["state"], row["reason"]) == expected
    assert (handle.started, await effects()) == (1, [1])


async def test_the_dead_letter_queue_gets_what_was_committed(rig: Rig, effects: Any) -> None:
    await rig.put(1)
    consumer = rig.consumer(Handler(sql(effect(1), "COMMIT")), **QUICK, dead_letter_queue="dead")
    await consumer.start()
    await eventually(lambda: _queues(rig, ["dead"]))
    assert '"reason": "transaction_ended"' in str((await rig.rows())[0]["headers"]).replace(
        "'", '"'
    )


async def test_a_batch_ends_together(rig: Rig, effects: Any) -> None:
    handle = Handler(sql(effect(1), "ROLLBACK"), sql(effect(2), "COMMIT"))
    await rig.put(3)
    await rig.consumer(handle, **QUICK, batch=True).start()
    rows = await archived(rig, 3)
    assert {(r["state"], r["reason"], r["attempts_count"]) for r in rows} == {
        ("FAILED", "transaction_ended", 2)
    }
    assert await effects() == [2]


async def test_a_handlers_session_notices_the_end_too(rig: Rig, effects: Any) -> None:
    async def roll_back(_: AsyncConnection) -> None:
        transaction = current_transaction.get()
        assert transaction is not None
        await transaction.session.execute(text(effect(1)))
        await transaction.session.execute(text("ROLLBACK"))
        await transaction.session.execute(text(effect(2)))

    async def commit(_: AsyncConnection) -> None:
        transaction = current_transaction.get()
        assert transaction is not None
        await transaction.session.execute(text(effect(3)))
        await transaction.session.commit()  # only flushes
        await transaction.session.execute(text("COMMIT"))

    handle = Handler(roll_back, commit)
    await rig.put(1)
    await rig.consumer(handle, **QUICK).start()
    [row] = await archived(rig)
    assert (row["reason"], row["attempts_count"]) == ("transaction_ended", 2)
    assert [type(error) for error in handle.errors] == [TransactionEndedError] * refuses(rig)
    assert await effects() == [3]


@pytest.mark.parametrize("how", ["commit", "rollback"])
async def test_an_end_by_sqlalchemy_is_noticed_too(rig: Rig, effects: Any, how: str) -> None:
    async def end(connection: AsyncConnection) -> None:
        await connection.execute(text(effect(1)))
        await getattr(connection, how)()

    handle = Handler(end)
    await rig.put(1)
    await rig.consumer(handle, **QUICK).start()
    [row] = await archived(rig)
    committed = how == "commit"
    assert row["reason"] == ("transaction_ended" if committed else "max_attempts")
    assert await effects() == ([1] if committed else [])
    assert handle.started == (1 if committed else 2)


async def test_the_handlers_own_savepoints_work(rig: Rig, effects: Any) -> None:
    async def nested(connection: AsyncConnection) -> None:
        await connection.execute(text(effect(1)))
        async with connection.begin_nested():
            await connection.execute(text(effect(2)))
            undone = await connection.begin_nested()
            await connection.execute(text(effect(20)))
            await undone.rollback()
            await connection.execute(text(effect(3)))
        undone = await connection.begin_nested()
        async with connection.begin_nested():
            await connection.execute(text(effect(21)))
        await undone.rollback()
        await connection.execute(text("SAVEPOINT raw"))
        await connection.execute(text(effect(22)))
        await connection.execute(text("ROLLBACK TO SAVEPOINT raw"))
        await connection.begin_nested()  # left open
        await connection.execute(text(effect(4)))

    handle = Handler(nested)
    await rig.put(2)
    await rig.consumer(handle, **QUICK).start()
    rows = await archived(rig, 2)
    assert {(row["state"], row["attempts_count"]) for row in rows} == {("COMPLETED", 1)}
    assert handle.errors == []
    assert await effects() == [1, 1, 2, 2, 3, 3, 4, 4]


class Deadlock:
    """Makes its handler's second UPDATE the victim of a deadlock, once; the handler catches the
    error and goes on."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.errors = list[DBAPIError]()
        self._heavier = asyncio.Event()
        self._locked = asyncio.Event()

    async def prepare(self) -> None:
        await self._rig.execute("CREATE TABLE account (id INTEGER PRIMARY KEY, v INTEGER)")
        await self._rig.execute("INSERT INTO account VALUES (1, 0), (2, 0)")
        await self._rig.execute("CREATE TABLE weight (n INTEGER)")

    async def step(self, connection: AsyncConnection) -> None:
        await connection.execute(text(effect(1)))
        await connection.execute(text("UPDATE account SET v = v + 1 WHERE id = 1"))
        if not self.errors:
            self._locked.set()
            await self._heavier.wait()
        again = "UPDATE account SET v = v + 1 WHERE id = 2"
        try:
            await connection.execute(text(again))
        except DBAPIError as error:
            self.errors.append(error)
            await connection.execute(text(again))

    async def other(self) -> None:
        """Holds row 2, and asks for row 1, with so many changes that the other transaction is the
        victim."""
        async with self._rig.store.engine.connect() as connection:
            many = ", ".join(["(1)"] * 500)
            await connection.execute(text(f"INSERT INTO weight VALUES {many}"))
            await connection.execute(text("UPDATE account SET v = v WHERE id = 2"))
            await self._locked.wait()
            self._heavier.set()
            await connection.execute(text("UPDATE account SET v = v WHERE id = 1"))
            await connection.rollback()


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
@pytest.mark.parametrize("autocommit", [False, True], ids=["", "autocommit"])
@pytest.mark.parametrize("attempts", [1, 2])
async def test_a_deadlock_that_is_caught_fails_the_attempt(
    rig: Rig, effects: Any, database_url: str, autocommit: bool, attempts: int
) -> None:
    """Even where the driver's autocommit would commit at once what is sent after it."""
    engine = create_async_engine(database_url, connect_args={"autocommit": autocommit})
    store = Store(engine, rig.store.tables)
    deadlock = Deadlock(rig)
    await deadlock.prepare()
    handle = Handler(deadlock.step)
    await rig.put(1)
    strategy = ConstantRetryStrategy(delay_seconds=0.0, max_attempts=attempts)
    consumer = rig.consumer(handle, store=store, **{**QUICK, "retry_strategy": strategy})
    await consumer.start()
    await deadlock.other()
    [row] = await archived(rig)
    assert [error.orig and error.orig.args[0] for error in deadlock.errors] == [1213]
    async with engine.connect() as connection:
        values = list(
            (await connection.execute(text("SELECT v FROM account ORDER BY id"))).scalars()
        )
    if attempts == 1:
        assert (row["state"], row["reason"]) == ("FAILED", "max_attempts")
        assert "deadlock" in row["last_error"]
        assert (values, await effects()) == ([0, 0], [])
    else:
        assert (row["state"], row["attempts_count"]) == ("COMPLETED", 2)
        assert (values, await effects()) == ([1, 1], [1])
    await consumer.stop()
    await engine.dispose()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_conflict_that_rolls_all_back_fails_the_attempt(rig: Rig, effects: Any) -> None:
    await rig.execute("CREATE UNIQUE INDEX one ON effect (n)")
    conflict = sql(effect(1), effect(2), "INSERT OR ROLLBACK INTO effect VALUES (2)")
    handle = Handler(conflict, sql(effect(3)))
    await rig.put(1)
    await rig.consumer(handle, **QUICK).start()
    [row] = await archived(rig)
    assert (row["state"], row["attempts_count"]) == ("COMPLETED", 2)
    assert await effects() == [3]


async def test_nothing_is_settled_while_the_end_of_the_transaction_is_unknown(
    rig: Rig, effects: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = rig.store.handlers.was_committed
    answers = list[Any]()

    async def unreachable_twice(*arguments: Any) -> bool:
        answers.append((await rig.one())["state"])
        if len(answers) <= 2:
            raise TransientStoreError("not now")
        return await asked(*arguments)

    monkeypatch.setattr(rig.store.handlers, "was_committed", unreachable_twice)
    handle = Handler(sql(effect(1), "COMMIT"))
    await rig.put(1)
    await rig.consumer(handle, **QUICK).start()
    [row] = await archived(rig)
    assert answers == ["PROCESSING"] * 3
    assert (row["reason"], await effects()) == ("transaction_ended", [1])
    assert len(rig.logged("whether it was committed is unknown")) == 1, (
        "not for each time that it is asked"
    )


async def test_a_nack_that_ends_nothing_is_not_asked_about(
    rig: Rig, effects: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> bool:
        raise AssertionError

    monkeypatch.setattr(rig.store.handlers, "was_committed", never)
    handle = Handler(sql(effect(1)), outcome=Nack())
    await rig.put(1)
    await rig.consumer(handle, **QUICK).start()
    [row] = await archived(rig)
    assert (row["reason"], row["attempts_count"], await effects()) == ("max_attempts", 2, [])
    assert not rig.logged("outside of the handler")


async def test_a_handler_that_cancels_itself_after_a_commit_is_not_started_again(
    rig: Rig, effects: Any
) -> None:
    async def cancel(connection: AsyncConnection) -> None:
        await sql(effect(1), "COMMIT")(connection)
        raise asyncio.CancelledError

    handle = Handler(cancel)
    await rig.put(1)
    await rig.consumer(handle, **QUICK).start()
    [row] = await archived(rig)
    assert (row["reason"], handle.started) == ("transaction_ended", 1)
    assert await effects() == [1]


async def test_a_handlers_publish_is_gone_with_its_transaction(rig: Rig, effects: Any) -> None:
    from faststream_sqlbroker.core.rows import NewMessage

    async def publish(connection: AsyncConnection) -> None:
        await rig.store.insert_in(connection, [NewMessage("out", b"1")])
        await connection.execute(text("ROLLBACK"))
        await rig.store.insert_in(connection, [NewMessage("out", b"2")])

    handle = Handler(publish)
    await rig.put(1)
    await rig.consumer(handle, **QUICK).start()
    [row] = await archived(rig)
    assert (row["state"], row["reason"]) == ("FAILED", "max_attempts")
    assert len(handle.errors) == 2 * refuses(rig)


async def test_the_lock_marks_only_what_is_held(rig: Rig) -> None:
    """The marks are gone with the lease, and a lost lease is not marked."""
    await rig.put(3)
    rows: list[ClaimedMessage] = await rig.claim()
    leases = [(rows[0].id, uuid4()), *((row.id, row.lease_token) for row in rows[1:])]
    async with rig.store.transaction() as transaction:
        assert await transaction.lock(leases, 60.0) == {row.id for row in rows[1:]}
        await transaction.connection.commit()
    assert await rig.store.handlers.was_committed(transaction.locked)
    await rig.expire()
    await rig.store.release_stuck(["q"], 10)
    assert {row["policy_marks"] for row in await rig.rows()} == {0}


async def hang(_: AsyncConnection) -> None:
    await asyncio.Event().wait()


def in_turn(*steps: Step) -> Step:
    async def run(connection: AsyncConnection) -> None:
        for step in steps:
            await step(connection)

    return run


@pytest.fixture
def silent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The database never says what became of a transaction; set when it is asked."""
    asked = asyncio.Event()

    async def unreachable(*_: Any) -> bool:
        asked.set()
        raise TransientStoreError("not now")

    monkeypatch.setattr(rig.store.handlers, "was_committed", unreachable)
    monkeypatch.setattr(
        "faststream_sqlbroker.flow.deliver.ended_transactions.SHIELDED_TIMEOUT", 0.1
    )
    return asked


async def nothing_was_written(rig: Rig) -> None:
    row = await rig.one()
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("PROCESSING", 0, 1)
    assert await rig.rows(archive=True) == []
    assert rig.consumers[0].inflight.is_empty
    assert rig.logged("their outcomes are not written")


@pytest.mark.parametrize("outcome", [Ack(), Nack(delay=0.0)], ids=["ack", "nack"])
@pytest.mark.parametrize("graceful", [None, 0.0])
async def test_a_stop_ends_though_the_end_of_the_transaction_is_unknown(
    rig: Rig, effects: Any, silent: asyncio.Event, graceful: float | None, outcome: Any
) -> None:
    await rig.put(1)
    consumer = rig.consumer(Handler(sql(effect(1), "COMMIT"), outcome=outcome), **QUICK)
    await consumer.start()
    await silent.wait()
    async with asyncio.timeout(60):
        await consumer.stop(graceful)
    await nothing_was_written(rig)


async def test_a_handler_cut_off_while_the_end_is_unknown_writes_nothing(
    rig: Rig, effects: Any, silent: asyncio.Event
) -> None:
    running = asyncio.Event()

    async def run(_: AsyncConnection) -> None:
        running.set()

    await rig.put(1)
    consumer = rig.consumer(Handler(in_turn(sql(effect(1), "COMMIT"), run, hang)), **QUICK)
    await consumer.start()
    await running.wait()
    await consumer.stop(0.0)
    await nothing_was_written(rig)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK", None, "CREATE TABLE other (n INTEGER)"])
async def test_a_handler_that_committed_before_a_stop_never_runs_again(
    rig: Rig, effects: Any, end: str | None
) -> None:
    running = asyncio.Event()

    async def run(_: AsyncConnection) -> None:
        running.set()

    await rig.put(1)
    handle = Handler(in_turn(sql(effect(1), *([end] if end else [])), run, hang))
    consumer = rig.consumer(handle, **QUICK)
    await consumer.start()
    await running.wait()
    await consumer.stop(0.0)
    if end == "COMMIT" or (end and "CREATE" in end and commits_ddl(rig)):
        [row] = await archived(rig)
        assert (row["state"], row["reason"], row["attempts_count"]) == (
            "FAILED",
            "transaction_ended",
            1,
        )
        assert await effects() == [1]
    else:
        row = await rig.one()
        assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("PENDING", 0, 1)
        assert await effects() == []

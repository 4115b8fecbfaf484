"""Database failures: no message is lost, none is handled twice without need, and work resumes."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.core.outcome import Ack, Nack
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import (
    SetupError,
    StoreError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.flow.deliver.flush import Flusher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from tests.clock import VirtualTime, let_loop_pass
from tests.flow.conftest import Rig, count_as_quick
from tests.helpers import MYSQL, Awake, eventually
from tests.proxy import COMMIT, ROLLBACK, Proxy, proxied

RULES = SettleRules()


class NoLimit:
    """A strategy that never gives up."""

    def get_next_attempt_at(self, **times: Any) -> Any:
        return times["last_attempt_at"]


on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
"""SQLite has no connection that could break."""


@pytest.fixture
async def far(rig: Rig) -> AsyncIterator[tuple[Proxy, Store]]:
    """A second store over the same tables, behind a proxy."""
    async with proxied(rig.store.engine.url) as (proxy, url):
        engine = create_async_engine(url)
        yield proxy, Store(engine, rig.store.tables)
        await engine.dispose()


async def unanswered(silent: Callable[[], Any], work: Awaitable[Any]) -> Any:
    """The result of `work`, whose time limit is over as soon as its server is `silent`."""
    task = asyncio.ensure_future(work)

    def is_over() -> bool:
        if not task.done():  # psycopg waits for its cancel request, too
            let_loop_pass(60)
        return task.done()

    await eventually(silent)
    await eventually(is_over, step=0.1)
    return await task


@on_servers
async def test_an_outcome_whose_commit_was_not_answered_is_counted_as_unknown(
    rig: Rig, far: tuple[Proxy, Store]
) -> None:
    """The repeat finds nothing to do: it was written the first time, and is not called a lost
    lease."""
    proxy, store = far
    await rig.put(3)
    rows = await rig.claim(3)
    inflight = Inflight()
    flusher = Flusher(store, inflight, rig.log, batch_size=10, interval=1)
    inflight.add(rows)
    for row in rows:
        inflight.queue_outcome(settle(row, Ack(), RULES, ended_after=0.0))
    proxy.swallow_answer_to = COMMIT
    with pytest.raises(UnknownOutcomeError):
        await flusher.flush_batch()
    assert proxy.swallowed == 1
    assert len(inflight.queued) == 3
    await flusher.flush_batch()
    assert (inflight.settle_unknown_count, inflight.lease_lost_count) == (3, 0)
    assert len(await rig.rows(archive=True)) == 3
    assert inflight.held == {}
    await rig.put()
    [row] = await rig.claim()
    await rig.store.release_claim(["q"], row.lease_token)
    inflight.add([row])
    inflight.queue_outcome(settle(row, Ack(), RULES, ended_after=0.0))
    await flusher.flush_batch()
    assert (inflight.settle_unknown_count, inflight.lease_lost_count) == (3, 1), (
        "that doubt is over"
    )


@on_servers
async def test_a_publish_whose_commit_was_not_answered_raises(
    rig: Rig, far: tuple[Proxy, Store]
) -> None:
    proxy, store = far
    await store.insert([NewMessage("q", b"first")])
    proxy.swallow_answer_to = COMMIT
    with pytest.raises(UnknownOutcomeError):
        await store.insert([NewMessage("q", b"second")])
    assert len(await rig.rows()) == 2


@on_servers
async def test_ack_first_does_not_run_a_message_that_may_not_be_removed(
    rig: Rig, far: tuple[Proxy, Store]
) -> None:
    """Promise 4: at most once, so an unknown commit means not run."""
    proxy, store = far
    await rig.put()
    consumer = rig.consumer(ack_first=True, store=store)
    original = store.ack_first_starts.remove_first

    async def unanswered(*arguments: Any) -> Any:
        # Their commits are not the ones meant.
        await asyncio.gather(
            *(loop.stop() for loop in consumer._loops if loop is not consumer._flush_loop)
        )
        proxy.swallow_answer_to = COMMIT
        return await original(*arguments)

    with patch.object(store.ack_first_starts, "remove_first", unanswered):
        await consumer.start()
        await eventually(lambda: rig.logged("is not confirmed"))
    assert rig.handled == []
    assert (await rig.one(archive=True))["state"] == "COMPLETED"


async def test_ack_first_is_committed_before_the_handler_starts(rig: Rig) -> None:
    seen: list[list[dict[str, Any]]] = []
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        seen.append([r for r in await rig.rows() if r["id"] == row.id])
        await go_on.wait()

    await rig.put(3)
    consumer = rig.consumer(handle, ack_first=True, max_workers=1)
    await consumer.start()
    count_as_quick(consumer)
    await eventually(lambda: seen)
    assert seen[0] == []
    assert [r["state"] for r in await rig.rows(archive=True)] == ["COMPLETED"]
    assert [r["state"] for r in await rig.rows()] == ["PROCESSING"] * 2, (
        "prefetched ones are not removed"
    )
    go_on.set()
    await eventually(lambda: len(seen) == 3)


@on_servers
async def test_a_stalled_server_costs_the_time_limit_and_no_more(far: tuple[Proxy, Store]) -> None:
    """Bounded time for every statement."""
    proxy, store = far
    await store.server.read_now()
    proxy.stall()
    with pytest.raises(TransientStoreError):
        await unanswered(store.engine.pool.checkedout, store.server.read_now())  # type: ignore[attr-defined]
    assert not await store.access.ping(0.1)
    proxy.flow()
    await eventually(lambda: store.access.ping(10.0))


@on_servers
async def test_a_stall_while_committing_is_an_unknown_outcome_in_bounded_time(
    far: tuple[Proxy, Store],
) -> None:
    proxy, store = far
    await store.insert([NewMessage("q", b"first")])
    proxy.die_at = COMMIT
    with pytest.raises(UnknownOutcomeError):
        await unanswered(lambda: proxy.died, store.insert([NewMessage("q", b"second")]))
    assert proxy.died == 1
    await store.insert([NewMessage("q", b"third")])


@pytest.mark.parametrize("database", MYSQL, indirect=True)
async def test_a_connection_that_dies_on_its_way_back_to_the_pool_blocks_nothing(
    rig: Rig, far: tuple[Proxy, Store]
) -> None:
    """Only here the pool asks the server for a ROLLBACK; the COMMIT was answered, so the ids are
    known."""
    proxy, store = far
    await store.insert([NewMessage("q", b"first")])
    proxy.die_at = ROLLBACK
    second = store.insert([NewMessage("q", b"second")])
    assert await unanswered(lambda: proxy.died, second) == [2]
    assert proxy.died == 1
    await store.insert([NewMessage("q", b"third")])
    proxy.die_at = ROLLBACK
    await unanswered(lambda: proxy.died == 2, store.server.read_now())
    assert len(await rig.rows()) == 3


@on_servers
async def test_a_large_body_that_cannot_be_sent_blocks_nothing(far: tuple[Proxy, Store]) -> None:
    """Bytes in the driver's buffer must not keep the connection from being given up."""
    proxy, store = far
    for _ in range(2):  # so that nothing is asked before the body is sent
        await store.insert([NewMessage("q", b"x")])
    proxy.stall()
    large = store.insert([NewMessage("q", bytes(8 * 1024 * 1024))])
    with pytest.raises(TransientStoreError):
        await unanswered(store.engine.pool.checkedout, large)  # type: ignore[attr-defined]
    proxy.flow()
    await store.insert([NewMessage("q", b"x")])


@on_servers
async def test_work_goes_on_after_an_outage(rig: Rig, far: tuple[Proxy, Store]) -> None:
    """The loops wait, say so, keep the outcomes in order, and finish."""
    proxy, store = far
    await rig.put(30)
    running = asyncio.Event()
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        running.set()
        await go_on.wait()
        await rig.ack(row)

    consumer = rig.consumer(handle, store=store, max_fetch_interval=0.05)
    await consumer.start()
    await running.wait()
    await proxy.stop()
    go_on.set()
    await eventually(lambda: not consumer.healthy)
    assert not await store.access.ping(0.2)
    await proxy.start()
    await eventually(lambda: _count(rig, 30))
    await eventually(lambda: consumer.healthy)
    rows = await rig.rows(archive=True)
    assert {(r["state"], r["deliveries_count"]) for r in rows} == {("COMPLETED", 1)}
    assert len(rig.handled) == 30


async def test_a_bug_in_a_loop_makes_it_unhealthy_and_does_not_end_it(rig: Rig) -> None:
    consumer = rig.consumer()
    with patch.object(rig.store, "find_ready_pairs", side_effect=KeyError("bug")):
        await consumer.start()
        await eventually(lambda: not consumer.healthy)
    assert any(level == logging.CRITICAL for level, _ in rig.logs)
    await rig.put()
    await eventually(lambda: rig.handled)
    await eventually(lambda: consumer.healthy)


async def test_a_bug_around_a_handler_does_not_end_its_worker(rig: Rig) -> None:
    """The message comes back; nothing is lost."""
    await rig.put(3)
    consumer = rig.consumer(max_fetch_interval=0.05)
    original = Inflight.queue_outcome
    failures = []

    def failing_once(inflight: Inflight, settlement: Settlement) -> None:
        if not failures:
            failures.append(settlement)
            raise KeyError("bug")
        original(inflight, settlement)

    with (
        patch.object(Inflight, "queue_outcome", failing_once),
        patch("faststream_sqlbroker.flow.deliver.worker.ERROR_PAUSE", 0.3),
    ):
        await consumer.start()
        await eventually(lambda: _count(rig, 3))
    assert sorted(r["deliveries_count"] for r in await rig.rows(archive=True)) == [1, 1, 2]
    assert consumer.healthy
    assert any(level == logging.CRITICAL for level, _ in rig.logs)


async def test_a_handlers_own_base_exception_does_not_end_its_worker(rig: Rig) -> None:
    class Odd(BaseException):
        """Not an Exception."""

    async def handle(row: ClaimedMessage) -> None:
        if row.payload == b"0":
            raise Odd
        await rig.ack(row)

    await rig.put(2)
    consumer = rig.consumer(handle, max_workers=1)
    await consumer.start()
    await eventually(lambda: len(rig.handled) == 1)
    assert consumer.healthy


async def test_a_bug_in_the_removal_of_ack_first_leaves_nothing_behind(rig: Rig) -> None:
    await rig.put()
    with (
        patch.object(rig.store.ack_first_starts, "remove_first", side_effect=RuntimeError("bug")),
        patch("faststream_sqlbroker.flow.deliver.worker.ERROR_PAUSE", 0.1),
    ):
        consumer = rig.consumer(ack_first=True, max_fetch_interval=0.05)
        await consumer.start()
        await eventually(lambda: rig.logged("outside of the handler"))
        await eventually(lambda: not consumer.inflight.writing_count)
    await eventually(lambda: rig.handled)


async def test_a_claim_that_cannot_be_given_back_stops_nothing(rig: Rig) -> None:
    running = asyncio.Event()
    go_on = asyncio.Event()

    async def written() -> bool:
        return not await rig.rows()

    async def handle(row: ClaimedMessage) -> None:
        running.set()
        await go_on.wait()
        await rig.ack(row)

    consumer = rig.consumer(handle, max_fetch_interval=0.05, flush_interval=60)
    with patch.object(rig.store, "release_claim", side_effect=StoreError("no")) as release:
        await consumer.start()
        consumer._fetcher._claimer._unanswered.append(uuid4())
        await rig.put()
        await running.wait()
        assert consumer.healthy
        assert rig.logged("could not release claims without an answer")
        stopped = consumer.request_stop()
        go_on.set()
        await eventually(written)
        release.side_effect = TimeoutError  # as when the time of the stop is over
        await stopped


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("busy", [0.2, 10.0], ids=["repeats", "waits"])
async def test_a_locked_database_costs_the_time_limit_and_no_more(rig: Rig, busy: float) -> None:
    """Repeats included: the limit is one for all of them."""
    store = Store(rig.store.engine, rig.store.tables, statement_timeout=1.0)
    async with rig.store.engine.connect() as connection:
        await connection.exec_driver_sql("BEGIN IMMEDIATE")
        with patch("faststream_sqlbroker.database.sqlite.dialect.BUSY_TIMEOUT", busy):
            async with Awake() as awake:
                with pytest.raises(TransientStoreError):
                    await store.insert([NewMessage("q", b"1")])
        assert awake.seconds < 4
        await connection.exec_driver_sql("ROLLBACK")


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_listener_whose_server_is_silent_gives_up(far: tuple[Proxy, Store]) -> None:
    proxy, store = far
    await store.server.read_now()
    proxy.die_at = re.compile(rb"LISTEN")

    async def listen() -> None:
        async with store.listen("channel", lambda _payload: None, asyncio.Event()):
            pass

    with pytest.raises(TransientStoreError):
        await unanswered(lambda: proxy.died, listen())
    assert proxy.died == 1


async def test_cancelled_publishes_leave_no_trace_in_the_pool(rig: Rig) -> None:
    """At any moment: confirmed rows exist, nothing is committed later, no connection is kept."""
    random = Random(1)
    answered = []
    for n in range(60):
        task = asyncio.create_task(rig.store.insert([NewMessage("q", f"{n}".encode())]))
        await asyncio.sleep(random.random() * 0.02)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            answered += await task
    await eventually(lambda: rig.store.engine.pool.checkedout() == 0)
    ids = {row["id"] for row in await rig.rows()}
    assert set(answered) <= ids
    await rig.store.insert([NewMessage("q", b"last")])
    assert len(await rig.rows()) == len(ids) + 1


async def test_whatever_settles_answer_everything_ends_once(rig: Rig) -> None:
    """Refused, passing and unknown answers, at random."""
    random = Random(7)
    original = rig.store.settle

    async def moody(batch: list[Settlement], **options: Any) -> Any:
        mood = random.random()
        if mood < 0.15:
            raise StoreError("refused")
        if mood < 0.2:
            raise TransientStoreError("not now")
        result = await original(batch, **options)
        if mood < 0.3:
            raise UnknownOutcomeError("the answer was lost")
        return result

    await rig.put(150)
    sizes: Any = {"max_workers": 4, "fetch_batch_size": 20, "flush_batch_size": 7}
    with patch.object(rig.store, "settle", moody):
        consumer = rig.consumer(**sizes, flush_interval=0.005, max_fetch_interval=0.05)
        await consumer.start()
        await eventually(lambda: _count(rig, 150))
        await eventually(lambda: not consumer.inflight.held)
    assert sorted(row.id for row in rig.handled) == sorted(
        r["id"] for r in await rig.rows(archive=True)
    )
    assert {r["state"] for r in await rig.rows(archive=True)} == {"COMPLETED"}
    assert not rig.logged("lease lost")


async def test_outcomes_that_cannot_be_written_while_stopping_are_reported(rig: Rig) -> None:
    await rig.put()
    consumer = rig.consumer(flush_interval=60)
    with (
        patch.object(rig.store, "settle", side_effect=TransientStoreError("down")),
        patch("faststream_sqlbroker.flow.consumer.FINAL_FLUSH_TIMEOUT", 0.2),
    ):
        await consumer.start()
        await eventually(lambda: rig.handled)
        await consumer.stop(1)
    row = await rig.one()
    assert row["state"] == "PROCESSING"
    assert rig.logged(
        f"1 outcomes could not be written while stopping; messages [{row['id']}] are delivered "
        "again"
    )


async def test_an_outcome_whose_write_hangs_while_stopping_is_reported(rig: Rig) -> None:
    """It is cut off in the middle, and still counted."""
    await rig.put()
    consumer = rig.consumer(flush_interval=60)

    async def hang(_batch: list[Settlement], **_: Any) -> None:
        await asyncio.Event().wait()

    with (
        patch.object(rig.store, "settle", hang),
        patch("faststream_sqlbroker.flow.consumer.FINAL_FLUSH_TIMEOUT", 0.2),
    ):
        await consumer.start()
        await eventually(lambda: rig.handled)
        await consumer.stop(1)
    assert rig.logged("1 outcomes could not be written while stopping")
    assert len(consumer.inflight.queued) == 1


async def test_errors_are_classed(rig: Rig) -> None:
    """A refused statement is not repeated; it is no reason to wait."""
    await rig.execute("DROP TABLE message_archive")
    await rig.put()
    [row] = await rig.claim()
    with pytest.raises(StoreError) as info:
        await rig.store.settle([settle(row, Ack(), RULES, ended_after=0.0)])
    assert not isinstance(info.value, TransientStoreError)
    assert "message_archive" in str(info.value)


async def _count(rig: Rig, count: int) -> bool:
    return await rig.count(archive=True) == count


async def test_halves_written_before_a_failure_are_no_lost_leases(rig: Rig) -> None:
    await rig.put(4)
    rows = await rig.claim(4)
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=10, interval=1)
    inflight.add(rows)
    for row in rows:
        inflight.queue_outcome(settle(row, Ack(), RULES, ended_after=0.0))
    original = rig.store.settle
    calls = []

    async def failing(batch: list[Settlement], **options: Any) -> Any:
        calls.append(len(batch))
        if len(calls) == 1:
            raise StoreError("one of them is bad")
        if len(calls) == 3:
            raise TransientStoreError("gone")
        return await original(batch, **options)

    with patch.object(rig.store, "settle", failing):
        with pytest.raises(TransientStoreError):
            await flusher.flush_batch()
        assert len(inflight.queued) == 2
        await flusher.flush_batch()
    assert calls == [4, 2, 2, 2]
    assert inflight.lease_lost_count == 0
    assert inflight.settled_count == 4
    assert len(await rig.rows(archive=True)) == 4


async def test_drivers_own_errors_are_worth_a_repeat(rig: Rig) -> None:
    """Some reach us without SQLAlchemy's translation; a loop must not die of them."""
    import asyncpg
    import pymysql

    errors = rig.store._errors
    for error in (
        asyncpg.InterfaceError("connection is closed"),
        pymysql.err.InterfaceError("(0, '')"),
    ):
        assert isinstance(errors.to_store_error(error), TransientStoreError)
    assert errors.to_store_error(KeyError("a bug")) is None


@on_servers
async def test_a_claim_whose_commit_was_not_answered_is_given_back(
    rig: Rig, far: tuple[Proxy, Store]
) -> None:
    """No worker has its rows: they come back at once and uncharged, not when the lease ends."""
    proxy, store = far
    await rig.put(5)
    consumer = rig.consumer(store=store, max_fetch_interval=0.05)
    original = store.claim
    unanswered = 0

    async def claim(*arguments: Any, **options: Any) -> Any:
        nonlocal unanswered
        if not unanswered:
            await asyncio.gather(consumer._release_loop.stop(), consumer._lease_loop.stop())
            proxy.swallow_answer_to = COMMIT
        try:
            return await original(*arguments, **options)
        except UnknownOutcomeError:
            unanswered += 1
            assert {r["state"] for r in await rig.rows()} == {"PROCESSING"}
            raise

    with patch.object(store, "claim", claim):
        await consumer.start()
        count_as_quick(consumer)
        await eventually(lambda: _count(rig, 5))
    assert unanswered == 1
    assert {r["deliveries_count"] for r in await rig.rows(archive=True)} == {1}


async def test_only_what_the_token_holds_is_given_back(rig: Rig) -> None:
    await rig.put(4)
    first = await rig.claim(2)
    second = await rig.claim(2)
    assert await rig.store.release_claim(["q", "other"], first[0].lease_token) == 2
    states = {r["id"]: (r["state"], r["deliveries_count"]) for r in await rig.rows()}
    assert {states[r.id] for r in first} == {("PENDING", 0)}
    assert {states[r.id] for r in second} == {("PROCESSING", 1)}
    assert await rig.store.release_claim(["q"], first[0].lease_token) == 0


@on_servers
async def test_connections_that_broke_in_the_pool_are_replaced_unseen(
    rig: Rig, far: tuple[Proxy, Store]
) -> None:
    """An idle web process must not lose its first publish of the day."""
    proxy, store = far
    await asyncio.gather(*(store.server.read_now() for _ in range(3)))
    await proxy.stop()
    await proxy.start()
    assert len(await store.insert([NewMessage("q", b"1")])) == 1
    assert len(await rig.rows()) == 1
    await proxy.stop()
    async with Awake() as awake:
        with pytest.raises(TransientStoreError):
            await store.insert([NewMessage("q", b"2")])
    assert awake.seconds < 5


async def test_a_commit_that_the_database_undid_is_repeated(rig: Rig) -> None:
    """It is known not to be committed, so the caller is told of no doubt."""
    passing = {
        "sqlite": type("Busy", (Exception,), {"sqlite_errorcode": 5})("database is locked"),
        "postgresql": type("Serialization", (Exception,), {"sqlstate": "40001"})(),
    }.get(rig.store.dialect_name, Exception(1213, "Deadlock found"))
    refused = []

    @event.listens_for(rig.store.engine.sync_engine, "commit")
    def refuse(_connection: Any) -> None:
        if not refused:
            refused.append(1)
            raise OperationalError("COMMIT", {}, passing)

    await rig.store.insert([NewMessage("q", b"1")])
    assert refused == [1]
    await rig.store.insert([NewMessage("q", b"2")])
    assert [bytes(row["payload"]) for row in await rig.rows()] == [b"1", b"2"], "once each"


async def test_an_autocommit_engine_still_gives_transactions(rig: Rig) -> None:
    engine = create_async_engine(rig.store.engine.url, isolation_level="AUTOCOMMIT")
    with pytest.raises(SetupError, match="pass the original engine, without this option"):
        Store(rig.store.engine.execution_options(isolation_level="AUTOCOMMIT"), rig.store.tables)
    store = Store(engine, rig.store.tables)

    def half(connection: Any) -> None:
        store.dialect.insert(connection, [NewMessage("q", b"1")])
        raise KeyError("the second half fails")

    with pytest.raises(KeyError):
        await store._database.run(half)
    assert await rig.rows() == []
    await store.insert([NewMessage("q", b"2")])
    assert len(await rig.rows()) == 1
    await engine.dispose()


async def test_a_strategy_that_raises_ends_in_the_dead_letters(rig: Rig) -> None:
    """The row must not hang on a user's mistake; both errors can be read."""

    class Broken:
        def get_next_attempt_at(self, **_: Any) -> Any:
            raise ZeroDivisionError("in the strategy")

    async def handle(row: ClaimedMessage) -> None:
        row.record_outcome(Nack(error=ValueError("in the handler")))

    await rig.put()
    await rig.consumer(handle, retry_strategy=Broken()).start()
    await eventually(lambda: _count(rig, 1))
    row = await rig.one(archive=True)
    assert (row["state"], row["reason"]) == ("FAILED", "retry_strategy_error")
    assert "in the strategy" in row["last_error"]


async def test_f6_suspects_are_never_charged_together(rig: Rig) -> None:
    """Were one of them to kill the process, the others would be charged with it; also with one
    delivery left."""
    charged: list[int] = []

    async def handle(row: ClaimedMessage) -> None:
        charged.append(sum(r["deliveries_count"] - 1 for r in await rig.rows()))
        await rig.ack(row)

    await rig.put(3)
    await rig.execute("UPDATE message SET deliveries_count = 1")
    await rig.consumer(
        handle, retry_strategy=None, max_deliveries=2, max_workers=4, max_fetch_interval=0.05
    ).start()
    await eventually(lambda: _count(rig, 3))
    assert charged == [1, 1, 1]
    assert {r["deliveries_count"] for r in await rig.rows(archive=True)} == {2}


@pytest.mark.parametrize("database", ["postgresql", *MYSQL, "sqlite"], indirect=True)
async def test_repeated_cancellation_leaves_no_task_behind(rig: Rig) -> None:
    """As anyio cancels until a task has ended; `asyncio.run` would wait for ever for one that is
    left."""
    before = asyncio.all_tasks()
    for pause in (0.0, 0.0, 0.001, 0.003, 0.01):
        work = asyncio.create_task(rig.store.server.read_now())
        while not work.done():
            await asyncio.sleep(pause)
            work.cancel()
    await eventually(lambda: not (asyncio.all_tasks() - before))


@on_servers
async def test_after_the_first_success_the_other_loops_try_at_once(
    rig: Rig, far: tuple[Proxy, Store]
) -> None:
    """Time stands still from then on, so no pause ends by itself."""
    proxy, store = far
    source = VirtualTime()
    rig.wakeups.clock.use(source)
    rig.wakeups.outages.count_answers = store.count_answers
    loops = []
    for queue, interval in (("a", 1.0), ("b", 1.7)):
        consumer = rig.consumer(queues=queue, store=store, max_fetch_interval=interval)
        await consumer.start()
        loops.append(consumer._fetch_loop)

    async def all_have_worked() -> bool:
        await source.advance(0.3)
        return all(loop.succeeded_at is not None for loop in loops)

    async def all_have_failed() -> bool:
        await source.advance(0.3)
        return all(loop.failures > 7 for loop in loops)

    async def one_works() -> bool:
        if not any(loop.healthy for loop in loops):
            await source.advance(0.3)
        return any(loop.healthy for loop in loops)

    await eventually(all_have_worked)
    await proxy.stop()
    await eventually(all_have_failed)
    await proxy.start()
    await eventually(one_works)
    await eventually(lambda: all(loop.healthy for loop in loops))


@pytest.mark.parametrize("database", MYSQL, indirect=True)
async def test_a_change_of_the_primary_is_an_outage(rig: Rig) -> None:
    """Group replication then answers all statements with error 4094, for no fault of a batch."""
    blocked, started = asyncio.Event(), asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        started.set()
        await blocked.wait()
        row.record_outcome(Ack())

    consumer = rig.consumer(handle, max_fetch_interval=0.05, flush_interval=0.01)
    await rig.put()
    await consumer.start()
    await started.wait()
    for verb in ("UPDATE", "DELETE"):
        await rig.execute(
            f"CREATE TRIGGER blocked_{verb} BEFORE {verb} ON message FOR EACH ROW "
            "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 4094, MESSAGE_TEXT = 'blocked'"
        )
    blocked.set()
    await eventually(lambda: consumer._flush_loop.failures > 4)
    for verb in ("UPDATE", "DELETE"):
        await rig.execute(f"DROP TRIGGER blocked_{verb}")

    await eventually(lambda: rig.logged("the database works again"))
    begin, end = (text for level, text in rig.logs if level >= logging.WARNING)
    assert "failed, and tries again" in begin
    assert "4094" in begin
    assert "the database works again" in end
    assert [row["state"] for row in await rig.rows(archive=True)] == ["COMPLETED"]

"""The database refuses outcomes: none is dropped, none delays another, no ack becomes a dead
letter."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.core.outcome import Ack, Defer, Nack, Reject, Relocate
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError
from faststream_sqlbroker.flow.deliver.flush import Flusher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_states import DeliveryState
from faststream_sqlbroker.flow.deliver.outcome_writer import DEAD_LETTER_AFTER
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.conftest import Servers
from tests.flow.conftest import Rig, count_as_quick
from tests.flow.test_database_failures import NoLimit
from tests.helpers import eventually

RULES = SettleRules()
on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
"""SQLite has no logins."""


async def test_one_bad_outcome_does_not_delay_the_others(rig: Rig) -> None:
    """Halved until the culprit is alone; it is settled without what the database refused."""
    refuse = "last_error NOT LIKE '%poison%'"
    if rig.store.dialect_name == "sqlite":
        trigger = "BEGIN SELECT RAISE(ABORT, 'refused by a trigger'); END"
        await rig.execute(
            f"CREATE TRIGGER refuse BEFORE UPDATE ON message WHEN NOT (NEW.{refuse}) {trigger}"
        )
    else:
        await rig.execute(f"ALTER TABLE message ADD CONSTRAINT refused_by_check CHECK ({refuse})")
    await rig.put(9)
    rows = await rig.claim(9)
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=100, interval=1)
    inflight.add(rows)
    for n, row in enumerate(rows):
        nack = Nack(delay=5, error=ValueError("poison" if n == 4 else "no"))
        inflight.queue_outcome(
            settle(row, nack, SettleRules(retry_strategy=NoLimit()), ended_after=0.0)
        )
    await flusher.flush_batch()
    states = {r["id"]: (r["state"], r["last_error"]) for r in await rig.rows()}
    assert states.pop(rows[4].id) == ("PROCESSING", None)
    assert set(states.values()) == {("RETRYABLE", "ValueError: no")}
    assert inflight.queued == []
    assert _refused(inflight) == [rows[4].id]
    assert rig.logged("refused by the database")
    await eventually(lambda: _retried(flusher))
    assert [(r["state"], r["last_error"]) for r in await rig.rows() if r["id"] == rows[4].id] == [
        ("RETRYABLE", "(the text of the error was refused by the database)")
    ]
    assert inflight.is_empty


async def test_a_move_that_cannot_be_made_is_a_dead_letter(rig: Rig) -> None:
    """Nothing less can be written of it; the message itself is kept."""
    await rig.put(2)
    rows = await rig.claim(2)
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=100, interval=1)
    inflight.add(rows)
    original = rig.store.settle

    async def refusing(batch: list[Settlement], **options: Any) -> Any:
        if any(s.queue == "nowhere" for s in batch):
            raise StoreError("no such place")
        return await original(batch, **options)

    for row, queue in zip(rows, ("nowhere", "elsewhere"), strict=True):
        inflight.queue_outcome(settle(row, Relocate(queue), RULES, ended_after=0.0))
    with patch.object(rig.store, "settle", refusing):
        await flusher.flush_batch()
        for _ in range(DEAD_LETTER_AFTER - 2):
            assert not await _retried(flusher)
        assert await rig.rows(archive=True) == []
        await eventually(lambda: _retried(flusher))
    [dead] = await rig.rows(archive=True)
    assert (dead["id"], dead["state"], dead["reason"]) == (rows[0].id, "FAILED", "settle_error")
    assert dead["payload"] == rows[0].payload
    assert [r["queue"] for r in await rig.rows()] == ["elsewhere"]


async def test_a_dead_letter_whose_queue_is_refused_stays_one(rig: Rig) -> None:
    """M4: in the archive, with its own reason, even where rejected messages are not retained."""
    rules = SettleRules(retain_on_reject=False, dead_letter_queue="nowhere")
    await rig.put()
    [row] = await rig.claim()
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=100, interval=1)
    inflight.add([row])
    inflight.queue_outcome(settle(row, Reject("bad", ValueError("no")), rules, ended_after=0.0))
    original = rig.store.settle

    async def refusing(batch: list[Settlement], **options: Any) -> Any:
        if any(s.queue == "nowhere" for s in batch):
            raise StoreError("no such place")
        return await original(batch, **options)

    with patch.object(rig.store, "settle", refusing):
        await flusher.flush_batch()
        await eventually(lambda: _retried(flusher))
    dead = await rig.one(archive=True)
    assert (dead["state"], dead["reason"], dead["queue"], dead["headers"]) == (
        "FAILED",
        "bad",
        "q",
        None,
    )
    assert await rig.rows() == []


async def test_acks_that_are_all_refused_are_kept_and_run_once(rig: Rig) -> None:
    """The archive is away for a moment (renamed, a partition missing, rights withdrawn)."""
    await rig.execute("ALTER TABLE message_archive RENAME TO away")
    await rig.put(30)
    time = rig.shifted()
    quick = {
        "release_stuck_timeout": 600.0,
        "release_stuck_interval": 0.1,
        "max_fetch_interval": 0.05,
    }
    consumer = rig.consumer(fetch_batch_size=10, flush_interval=0.01, **quick)
    await consumer.start()
    await eventually(lambda: rig.logged("they are kept and tried again"))
    assert not consumer.healthy

    async def claims_have_stopped() -> bool:
        return len(await held()) == len(_refused(consumer.inflight)) == len(rig.handled)

    async def held() -> list[datetime]:
        return [r["lease_expires_at"] for r in await rig.rows() if r["state"] == "PROCESSING"]

    await eventually(claims_have_stopped)
    count = len(rig.handled)
    first = max(await held())
    time.shift = 400.0

    async def renewed() -> bool:
        # A look leaves out the rows that are just being written, or locked by that.
        time.shift += 60.0
        consumer._lease_loop.wake()
        return min(await held()) > first

    await eventually(renewed, step=0.1)
    assert len(rig.handled) == count
    await rig.execute("ALTER TABLE away RENAME TO message_archive")
    await eventually(lambda: _count(rig, 30))
    rows = await rig.rows(archive=True)
    assert {(r["state"], r["deliveries_count"]) for r in rows} == {("COMPLETED", 1)}, rig.logs
    assert len({r.id for r in rig.handled}) == len(rig.handled) == 30
    await eventually(lambda: consumer.healthy)


async def test_an_ack_refused_once_is_still_an_ack(rig: Rig) -> None:
    await rig.put()
    [row] = await rig.claim()
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=10, interval=1)
    inflight.add([row])
    inflight.queue_outcome(settle(row, Ack(), RULES, ended_after=0.0))
    with patch.object(rig.store, "settle", side_effect=StoreError("not now")):
        await flusher.flush_batch()
        for _ in range(3):
            inflight.batches[0].due = 0.0
            await flusher.quarantine.tick()
    assert inflight.batches[0].tries == 4
    await eventually(lambda: _retried(flusher))
    assert (await rig.one(archive=True))["state"] == "COMPLETED"
    assert inflight.is_empty


async def test_a_row_that_was_claimed_again_is_not_refused_twice(rig: Rig) -> None:
    """Its lease ran out while it was being written: the older outcome is void."""
    await rig.put()
    [row] = await rig.claim()
    again = replace(row, lease_token=uuid4())
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=10, interval=1)
    inflight.add([row])
    inflight.queue_outcome(settle(row, Ack(), RULES, ended_after=0.0))

    async def refusing(_batch: list[Settlement], **_: Any) -> Any:
        inflight.add([again])
        raise StoreError("no")

    with patch.object(rig.store, "settle", refusing):
        await flusher.flush_batch()
    assert (inflight.batches, inflight.queued) == ([], [])
    assert inflight.held == {row.id: again}


@pytest.mark.parametrize("archive", ["message_archive", None])
@pytest.mark.parametrize("outcome", [Nack(error=ValueError("x")), Nack(delay=5), Defer(5.0)])
async def test_a_row_that_cannot_be_updated_for_a_moment_is_not_lost(
    rig: Rig, outcome: Any, archive: str | None
) -> None:
    """Least of all where there is no archive, in which a dead letter would be a deleted message."""
    store = Store(
        rig.store.engine, build_tables(SqlBrokerSchemaConfig(message_archive_table_name=archive))
    )
    await rig.put(3)
    rows = await rig.claim(3)
    inflight = Inflight()
    flusher = Flusher(store, inflight, rig.log, batch_size=10, interval=1)
    inflight.add(rows)
    for row in rows:
        inflight.queue_outcome(
            settle(row, outcome, SettleRules(retry_strategy=NoLimit()), ended_after=0.0)
        )
    with patch.object(store, "settle", side_effect=StoreError("no")):
        await flusher.flush_batch()
        for _ in range(2 * DEAD_LETTER_AFTER):
            await _retried(flusher)
    assert len(_refused(inflight)) == 3
    await eventually(lambda: _retried(flusher))
    assert {r["state"] for r in await rig.rows()} <= {"RETRYABLE", "PENDING"}
    assert len(await rig.rows()) == 3
    assert await rig.rows(archive=True) == []


async def test_refused_outcomes_leave_the_others_their_room(rig: Rig) -> None:
    await rig.put(20, key="bad")
    await rig.put(50)
    bad = {row["id"] for row in await rig.rows() if row["key"]}
    original = rig.store.settle

    async def refusing(batch: list[Settlement], **options: Any) -> Any:
        if any(s.id in bad for s in batch):
            raise StoreError("a trigger of the user's")
        return await original(batch, **options)

    with patch.object(rig.store, "settle", refusing):
        consumer = rig.consumer(fetch_batch_size=10, flush_batch_size=10, max_fetch_interval=0.05)
        await consumer.start()
        await eventually(lambda: _count(rig, 50))
        await eventually(lambda: len(_refused(consumer.inflight)) == 20)
        await eventually(lambda: consumer.healthy)
        with (
            patch("faststream_sqlbroker.flow.deliver.fetch.MAX_QUARANTINED", 20),
            patch("faststream_sqlbroker.flow.consumer.MAX_QUARANTINED", 20),
        ):
            assert consumer._fetcher.get_capacity(150) == 0
            assert not consumer.healthy
    await eventually(lambda: _count(rig, 70))
    assert len(rig.handled) == 70


@on_servers
async def test_a_row_locked_by_another_session_does_not_delay_the_others(rig: Rig) -> None:
    """An operator's forgotten SELECT … FOR UPDATE."""
    store = Store(rig.store.engine, rig.store.tables, statement_timeout=1.0)
    gate = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        if row.id == 1:
            await gate.wait()
        await rig.ack(row)

    await rig.put(1)
    consumer = rig.consumer(handle, store=store, max_workers=2, max_fetch_interval=0.05)
    await consumer.start()
    await eventually(lambda: consumer.inflight.running == 1)
    async with rig.store.engine.connect() as connection:
        await connection.execute(text("SELECT * FROM message WHERE id = 1 FOR UPDATE"))
        gate.set()
        await eventually(lambda: len(rig.handled) == 1)
        await rig.put(5)
        await eventually(lambda: _count(rig, 5))
        assert [r["id"] for r in await rig.rows()] == [1]
        await connection.rollback()
    await eventually(lambda: _count(rig, 6))
    assert len(rig.handled) == 6


async def test_a_refused_outcome_whose_lease_is_lost_is_dropped(rig: Rig) -> None:
    await rig.put()
    [row] = await rig.claim()
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=10, interval=1)
    inflight.add([row])
    inflight.queue_outcome(settle(row, Ack(), RULES, ended_after=0.0))
    with patch.object(rig.store, "settle", side_effect=StoreError("not now")):
        await flusher.flush_batch()
    inflight.lose([row], "renew", "")
    assert inflight.is_empty
    assert await flusher.tick() is None


@on_servers
async def test_a_login_refused_for_a_moment_does_not_count_against_outcomes(
    rig: Rig, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passwords rotate; on PostgreSQL (28000), MariaDB and MySQL (1045) nothing is dropped or
    dead-lettered."""
    kind = rig.store.dialect_name
    lock, unlock = _account(servers.admin(kind), kind)
    engine = create_async_engine(rig.store.engine.url.set(username="rotating", password="x"))
    store = Store(engine, rig.store.tables)
    running = asyncio.Event()
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        running.set()
        await go_on.wait()
        await rig.ack(row)

    unlock()
    try:
        await rig.put(5)
        # What waits stays, with its lease.
        monkeypatch.setattr("faststream_sqlbroker.flow.deliver.fetch.MAX_PREFETCH_WAIT", 600.0)
        monkeypatch.setattr("faststream_sqlbroker.flow.deliver.prefetch.PREFETCH_LEASE", 600.0)
        consumer = rig.consumer(handle, store=store, max_fetch_interval=0.05)
        await consumer.start()
        count_as_quick(consumer)
        await running.wait()
        await eventually(lambda: consumer.inflight.claimed_count == 5)
        lock()
        await engine.dispose()
        go_on.set()
        await eventually(lambda: len(rig.handled) == 5)
        await eventually(lambda: consumer._flush_loop.failures >= 2)
        with pytest.raises(TransientStoreError):
            await store.server.read_now()
        unlock()
        await eventually(lambda: _count(rig, 5))
        await eventually(lambda: consumer.healthy)
        rows = await rig.rows(archive=True)
        assert {(r["state"], r["deliveries_count"]) for r in rows} == {("COMPLETED", 1)}
        await consumer.stop()
    finally:
        await engine.dispose()
        lock(drop=True)


KILLS = "SELECT CONCAT('KILL ', id) FROM performance_schema.processlist WHERE user = 'rotating'"
"""MySQL ends one session at a time."""


def _account(admin: Engine, kind: str) -> tuple[Callable[..., None], Callable[[], None]]:
    """What withdraws the right to log in (or drops the account), and what gives it."""

    def run(*statements: str) -> None:
        with admin.connect() as connection:
            for statement in statements:
                answer = connection.execute(text(statement))
                for kill in answer.scalars().all() if statement is KILLS else ():
                    connection.execute(text(kill))

    if kind == "postgresql":
        run("DROP ROLE IF EXISTS rotating", "CREATE ROLE rotating SUPERUSER PASSWORD 'x'")
        unlock = ["ALTER ROLE rotating LOGIN"]
        drop = ["DROP ROLE IF EXISTS rotating"]
        withdraw = [
            "ALTER ROLE rotating NOLOGIN",
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'rotating'",
        ]
    else:
        run(
            "DROP USER IF EXISTS rotating",
            "CREATE USER rotating IDENTIFIED BY 'x'",
            "GRANT ALL ON *.* TO rotating",
        )
        unlock = ["ALTER USER rotating IDENTIFIED BY 'x'"]
        withdraw = [
            "ALTER USER rotating IDENTIFIED BY 'other'",
            "KILL USER rotating" if kind == "mariadb" else KILLS,
        ]
        drop = ["DROP USER rotating"]
    return lambda *, drop_too=drop, drop=False: run(*(drop_too if drop else withdraw)), lambda: run(
        *unlock
    )


async def _retried(flusher: Flusher) -> bool:
    """Send everything that is kept once more; whether nothing is left."""
    for batch in list(flusher._inflight.batches):
        batch.due = 0.0
    for _ in list(flusher._inflight.batches):
        await flusher.quarantine.tick()
    return not flusher._inflight.batches


def _refused(inflight: Inflight) -> list[int]:
    return [
        s.id
        for b in inflight.batches
        if DeliveryState.REFUSED in (b.state, b.origin)
        for s in b.parts
    ]


async def _count(rig: Rig, count: int) -> bool:
    return await rig.count(archive=True) == count

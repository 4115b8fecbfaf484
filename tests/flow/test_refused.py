"""The database refuses outcomes: none is dropped, none delays another, no ack becomes a dead letter."""

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.core.outcome import Ack, Move, Nack
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError
from faststream_sqlbroker.flow.flush import Flusher
from faststream_sqlbroker.flow.inflight import Inflight
from faststream_sqlbroker.store import Store
from tests.conftest import Servers
from tests.flow.conftest import Rig
from tests.flow.test_faults import NoLimit
from tests.helpers import eventually

RULES = SettleRules()
on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
"""SQLite has no logins."""


async def test_one_bad_outcome_does_not_delay_the_others(rig: Rig) -> None:
    """Halved until the culprit is alone; it is settled without what the database refused."""
    refuse = "last_error NOT LIKE '%poison%'"
    if rig.store.dialect_name == "sqlite":
        trigger = "BEGIN SELECT RAISE(ABORT, 'refused by a trigger'); END"
        await rig.execute(f"CREATE TRIGGER refuse BEFORE UPDATE ON message WHEN NOT (NEW.{refuse}) {trigger}")
    else:
        await rig.execute(f"ALTER TABLE message ADD CONSTRAINT refused_by_check CHECK ({refuse})")
    await rig.put(9)
    rows = await rig.claim(9)
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=100, interval=1)
    inflight.add(rows)
    for n, row in enumerate(rows):
        nack = Nack(delay=5, error=ValueError("poison" if n == 4 else "no"))
        inflight.finish(settle(row, nack, SettleRules(retry_strategy=NoLimit()), ended_after=0.0))
    await flusher.flush_one()
    states = {r["id"]: (r["state"], r["last_error"]) for r in await rig.rows()}
    assert states.pop(rows[4].id) == ("PROCESSING", None)
    assert set(states.values()) == {("RETRYABLE", "ValueError: no")}
    assert inflight.outcomes == []
    assert [r.settlement.id for r in inflight.refused] == [rows[4].id]
    assert rig.logged("refused by the database")
    await eventually(lambda: _retried(flusher))
    assert [(r["state"], r["last_error"]) for r in await rig.rows() if r["id"] == rows[4].id] == [
        ("RETRYABLE", "(the text of the error was refused by the database)")
    ]
    assert inflight.empty


async def test_a_move_that_cannot_be_made_is_a_dead_letter(rig: Rig) -> None:
    """Nothing less can be written of it; the message itself is kept."""
    await rig.put(2)
    rows = await rig.claim(2)
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=100, interval=1)
    inflight.add(rows)
    original = rig.store.settle

    async def refusing(batch: list[Settlement]) -> Any:
        if any(s.queue == "nowhere" for s in batch):
            raise StoreError("no such place")
        return await original(batch)

    for row, queue in zip(rows, ("nowhere", "elsewhere"), strict=True):
        inflight.finish(settle(row, Move(queue), RULES, ended_after=0.0))
    with patch.object(rig.store, "settle", refusing):
        await flusher.flush_one()
        await eventually(lambda: _retried(flusher))
    [dead] = await rig.rows(archive=True)
    assert (dead["id"], dead["state"], dead["reason"]) == (rows[0].id, "FAILED", "settle_error")
    assert dead["payload"] == rows[0].payload
    assert [r["queue"] for r in await rig.rows()] == ["elsewhere"]


async def test_acks_that_are_all_refused_are_kept_and_run_once(rig: Rig) -> None:
    """The archive is away for a moment (renamed, a partition missing, rights withdrawn)."""
    await rig.execute("ALTER TABLE message_archive RENAME TO away")
    await rig.put(30)
    quick = {"release_stuck_timeout": 1.0, "release_stuck_interval": 0.1, "max_fetch_interval": 0.05}
    consumer = rig.consumer(fetch_batch_size=10, flush_interval=0.01, **quick)
    await consumer.start()
    await eventually(lambda: rig.logged("they are kept and tried again"))
    await eventually(lambda: consumer.inflight.unwritten >= 20)
    assert not consumer.healthy
    await asyncio.sleep(1.5)  # longer than the lease, which is kept meanwhile
    assert len(rig.handled) <= 30, "claims stop while outcomes cannot be written"
    await rig.execute("ALTER TABLE away RENAME TO message_archive")
    await eventually(lambda: _count(rig, 30), timeout=30)
    rows = await rig.rows(archive=True)
    assert {(r["state"], r["deliveries_count"]) for r in rows} == {("COMPLETED", 1)}
    assert len({r.id for r in rig.handled}) == len(rig.handled) == 30
    await eventually(lambda: consumer.healthy)


async def test_an_ack_refused_once_is_still_an_ack(rig: Rig) -> None:
    await rig.put()
    [row] = await rig.claim()
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=10, interval=1)
    inflight.add([row])
    inflight.finish(settle(row, Ack(), RULES, ended_after=0.0))
    with patch.object(rig.store, "settle", side_effect=StoreError("not now")):
        await flusher.flush_one()
        for _ in range(3):
            inflight.refused[0].due = 0.0
            await flusher.tick()
    assert inflight.refused[0].tries == 4
    await eventually(lambda: _retried(flusher))
    assert (await rig.one(archive=True))["state"] == "COMPLETED"
    assert inflight.empty


async def test_a_refused_outcome_whose_lease_is_lost_is_dropped(rig: Rig) -> None:
    await rig.put()
    [row] = await rig.claim()
    inflight = Inflight()
    flusher = Flusher(rig.store, inflight, rig.log, batch_size=10, interval=1)
    inflight.add([row])
    inflight.finish(settle(row, Ack(), RULES, ended_after=0.0))
    with patch.object(rig.store, "settle", side_effect=StoreError("not now")):
        await flusher.flush_one()
    inflight.forget(row)
    assert inflight.empty
    assert await flusher.tick() is None


@on_servers
async def test_a_login_that_is_refused_for_a_moment_is_no_bad_outcome(rig: Rig, servers: Servers) -> None:
    """Passwords rotate; on PostgreSQL (28000) and MariaDB (1045) nothing is dropped or dead-lettered."""
    kind = rig.store.dialect_name
    lock, unlock = _account(servers.admin(kind), kind)
    engine = create_async_engine(rig.store.engine.url.set(username="rotating", password="x"))
    store = Store(engine, rig.store.tables, statement_timeout=3.0)
    running, go_on = asyncio.Event(), asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        running.set()
        await go_on.wait()
        await rig.ack(row)

    unlock()
    try:
        await rig.put(5)
        consumer = rig.consumer(handle, store=store, max_fetch_interval=0.05)
        await consumer.start()
        await running.wait()
        lock()
        await engine.dispose()
        go_on.set()
        await eventually(lambda: len(rig.handled) == 5)
        await eventually(lambda: consumer._flush_loop.failures >= 2)
        with pytest.raises(TransientStoreError):
            await store.now()
        unlock()
        await eventually(lambda: _count(rig, 5), timeout=30)
        await eventually(lambda: consumer.healthy)
        rows = await rig.rows(archive=True)
        assert {(r["state"], r["deliveries_count"]) for r in rows} == {("COMPLETED", 1)}
        await consumer.stop(1)
    finally:
        await engine.dispose()
        lock(drop=True)


def _account(admin: Engine, kind: str) -> tuple[Callable[..., None], Callable[[], None]]:
    """What withdraws the right to log in (or drops the account), and what gives it."""

    def run(*statements: str) -> None:
        with admin.connect() as connection:
            for statement in statements:
                connection.execute(text(statement))

    if kind == "postgresql":
        run("DROP ROLE IF EXISTS rotating", "CREATE ROLE rotating SUPERUSER PASSWORD 'x'")
        unlock, drop = ["ALTER ROLE rotating LOGIN"], ["DROP ROLE IF EXISTS rotating"]
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
        withdraw, drop = (
            ["ALTER USER rotating IDENTIFIED BY 'other'", "KILL USER rotating"],
            ["DROP USER rotating"],
        )
    return lambda *, drop_too=drop, drop=False: run(*(drop_too if drop else withdraw)), lambda: run(*unlock)


async def _retried(flusher: Flusher) -> bool:
    for refused in flusher._inflight.refused:
        refused.due = 0.0
    return await flusher.tick() is None


async def _count(rig: Rig, count: int) -> bool:
    return len(await rig.rows(archive=True)) == count

"""One outcome cannot be written for a passing reason, on real databases: the subscriber goes on."""

from typing import Any

import pytest
from sqlalchemy import text

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.database.store import Store
from tests.flow.conftest import Rig
from tests.helpers import eventually

on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
"""SQLite has one writer: a transaction that holds a dedup_id holds everything."""
QUICK: Any = {
    "fetch_batch_size": 10,
    "flush_batch_size": 10,
    "max_fetch_interval": 0.05,
    "flush_interval": 0.01,
}


async def _archived(rig: Rig, count: int) -> bool:
    return await rig.count(archive=True) == count


@on_servers
async def test_an_answer_whose_dedup_id_an_open_transaction_holds_delays_no_others(
    rig: Rig,
) -> None:
    store = Store(rig.store.engine, rig.store.tables, statement_timeout=1.0)
    [held] = await rig.put()

    async def handle(row: ClaimedMessage) -> None:
        if row.id == held:
            row.chained = [NewMessage("out", b"answer", dedup_id="D")]
        rig.handled.append(row)
        row.record_outcome(Ack())

    await rig.put(40)
    async with rig.store.engine.connect() as other:
        await rig.store.insert_in(other, [NewMessage("out", b"theirs", dedup_id="D")])
        consumer = rig.consumer(handle, store=store, **QUICK)
        await consumer.start()
        await eventually(lambda: _archived(rig, 40), step=0.1)
        assert [row["id"] for row in await rig.rows()] == [held]
        assert len(rig.handled) == 41, "none ran twice"
        await other.rollback()
    await eventually(lambda: _archived(rig, 41), step=0.1)
    assert [(row["queue"], row["dedup_id"]) for row in await rig.rows()] == [("out", "D")]
    assert {(row["state"], row["attempts_count"]) for row in await rig.rows(archive=True)} == {
        ("COMPLETED", 1)
    }
    assert not rig.logged("lease lost")


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
async def test_the_time_to_wait_for_a_lock_is_given_back_with_the_connection(rig: Rig) -> None:
    """The pool is the application's, too."""
    await rig.put(2)
    rows = await rig.claim(2)
    async with rig.store.engine.connect() as connection:
        before = (await connection.execute(text("SELECT @@innodb_lock_wait_timeout"))).scalar_one()
    seen: list[int] = []
    dialect = rig.store.dialect
    insert = dialect.insert

    def looking(connection: Any, new: Any) -> Any:
        seen.append(connection.execute(text("SELECT @@innodb_lock_wait_timeout")).scalar_one())
        return insert(connection, new)

    dialect.insert = looking  # type: ignore[method-assign]
    for row, skip in zip(rows, (True, False), strict=True):
        settlement = _with_answer(row)
        await rig.store.settle([settlement], skip_locked=skip)
    assert seen == [1, 29]
    async with rig.store.engine.connect() as connection:
        after = (await connection.execute(text("SELECT @@innodb_lock_wait_timeout"))).scalar_one()
    assert after == before


def _with_answer(row: ClaimedMessage) -> Any:
    from faststream_sqlbroker.core.rows import Unit
    from tests.contract.conftest import done

    return done(row, unit=Unit([NewMessage("out", b"x", dedup_id=str(row.id))]))

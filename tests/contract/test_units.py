"""Units: messages and their answers are written together or not at all."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement, Unit
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError
from faststream_sqlbroker.flow.deliver.outcome_states import DeliveryState, OutcomeBatch
from faststream_sqlbroker.flow.deliver.outcome_writer import write_batch
from faststream_sqlbroker.flow.deliver.outcomes import Outcomes
from tests.contract.conftest import Bench, done
from tests.helpers import eventually

with_row_locks = pytest.mark.parametrize(
    "database", ["postgresql", "mariadb", "mysql"], indirect=True
)
"""SQLite has none."""


def together(rows: list[ClaimedMessage], *answers: str) -> list[Settlement]:
    """Acks of `rows`, with answers to the queue "out"."""
    unit = Unit([NewMessage("out", answer.encode()) for answer in answers])
    return [done(row, unit=unit) for row in rows]


async def release(bench: Bench, row: ClaimedMessage) -> None:
    """Return a row as an expired lease does."""
    await bench.execute(
        "UPDATE message SET state = 'PENDING', acquired_at = NULL, lease_token = NULL, "
        f"lease_expires_at = NULL WHERE id = {row.id}"
    )


@pytest.mark.parametrize("moved", [False, True], ids=["acks", "an ack and moves"])
async def test_a_unit_is_written_with_its_answers(bench: Bench, moved: bool) -> None:
    await bench.put(3)
    rows = await bench.claim()
    settlements = together(rows, "a", "b")
    if moved:
        for settlement in settlements[1:]:
            settlement.state = MessageState.PENDING
            settlement.queue = "next"
    result = await bench.store.settle(settlements)
    assert (result.settled_ids, result.lost_ids) == ({row.id for row in rows}, set())
    queues = [row["queue"] for row in await bench.rows()]
    assert queues == (["next", "next", "out", "out"] if moved else ["out", "out"])
    assert [row["state"] for row in await bench.rows(archive=True)] == ["COMPLETED"] * (
        1 if moved else 3
    )


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_lost_lease_keeps_the_whole_unit_from_being_written(
    bench: Bench, lost: int
) -> None:
    """And no other outcome of the same flush."""
    await bench.put(5)
    rows = await bench.claim()
    await release(bench, rows[lost])
    before = (await bench.rows())[:3]
    batch = [*together(rows[:3], "a"), done(rows[3]), *together(rows[4:], "b")]
    result = await bench.store.settle(batch)
    assert (result.settled_ids, result.lost_ids) == ({rows[3].id, rows[4].id}, {rows[lost].id})
    live = await bench.rows()
    assert live[:3] == before
    assert [bytes(row["payload"]) for row in live[3:]] == [b"b"]
    assert [row["id"] for row in await bench.rows(archive=True)] == [rows[3].id, rows[4].id]


@pytest.mark.parametrize("archive", [True, False])
async def test_units_of_one_message_are_written_with_their_own_answers(
    bench: Bench, archive: bool
) -> None:
    """What is published keeps its order and all its fields; of a lost lease, nothing is."""
    await bench.put(4)
    rows = await bench.claim()
    await release(bench, rows[1])
    units = {
        rows[0].id: Unit(
            [
                NewMessage("out", b"first", '{"a": "1"}', 3, "K", delay=60.0, expires_in=120.0),
                NewMessage("out", b"\x00second"),
            ]
        ),
        rows[1].id: Unit([NewMessage("out", b"lost")]),
        rows[3].id: Unit([NewMessage("other", b"third")]),
    }
    batch = [done(row, archive=archive, unit=units.get(row.id)) for row in rows]
    result = await bench.store.settle(batch)
    assert (result.settled_ids, result.lost_ids) == ({rows[n].id for n in (0, 2, 3)}, {rows[1].id})
    back, first, *others = await bench.rows()
    assert back["id"] == rows[1].id
    names = ("payload", "priority", "key", "attempts_count", "deliveries_count", "dedup_id")
    assert [first[name] for name in names] == [b"first", 3, "K", 0, 0, None]
    assert first["created_at"] < first["next_attempt_at"] < first["expires_at"]
    assert [(row["queue"], bytes(row["payload"])) for row in others] == [
        ("out", b"\x00second"),
        ("other", b"third"),
    ]
    assert all(row["created_at"] == row["next_attempt_at"] for row in others)
    kept = [row["id"] for row in await bench.rows(archive=True)]
    assert kept == ([rows[n].id for n in (0, 2, 3)] if archive else [])


async def test_a_message_settled_with_a_unit_but_not_part_of_it_may_be_lost(bench: Bench) -> None:
    await bench.put(3)
    rows = await bench.claim()
    await release(bench, rows[2])
    nack = done(rows[2], state=MessageState.RETRYABLE, delay=0.0)
    result = await bench.store.settle([*together(rows[:2], "a"), nack])
    assert (result.settled_ids, result.lost_ids) == ({rows[0].id, rows[1].id}, {rows[2].id})
    assert [row["queue"] for row in await bench.rows()] == ["q", "out"]


@pytest.mark.parametrize("size", [1, 2])
async def test_a_refused_answer_leaves_the_unit_as_it_was(bench: Bench, size: int) -> None:
    await bench.put(size)
    rows = await bench.claim()
    nowhere: Any = None
    unit = Unit([NewMessage("out", b"fine"), NewMessage(nowhere, b"x")])
    before = await bench.rows()
    with pytest.raises(StoreError):
        await bench.store.settle([done(row, unit=unit) for row in rows])
    assert await bench.rows() == before
    assert await bench.rows(archive=True) == []


@with_row_locks
async def test_a_locked_row_keeps_the_whole_unit_waiting(bench: Bench) -> None:
    await bench.put(4)
    rows = await bench.claim()
    before = (await bench.rows())[:3]
    async with bench.store.engine.connect() as other:
        await other.execute(text(f"SELECT * FROM message WHERE id = {rows[1].id} FOR UPDATE"))
        result = await bench.store.settle(
            [*together(rows[:3], "a"), done(rows[3])], skip_locked=True
        )
        assert (result.settled_ids, result.lost_ids) == ({rows[3].id}, set())
        assert await bench.rows() == before
        await release(bench, rows[2])
        result = await bench.store.settle(together(rows[:3], "a"), skip_locked=True)
        assert (result.settled_ids, result.lost_ids) == (set(), {rows[2].id})
        await other.rollback()
    result = await bench.store.settle(together(rows[:2], "a"), skip_locked=True)
    assert result.settled_ids == {rows[0].id, rows[1].id}
    assert [row["queue"] for row in await bench.rows()] == ["q", "out"]


@with_row_locks
async def test_the_rows_of_a_unit_are_locked_in_the_order_of_their_ids(bench: Bench) -> None:
    """Another session that locks in that order can never be in a deadlock with it."""
    await bench.put(3)
    rows = await bench.claim()
    async with bench.store.engine.connect() as other:
        await other.execute(text(f"SELECT * FROM message WHERE id = {rows[0].id} FOR UPDATE"))
        settling = asyncio.create_task(bench.store.settle(together(rows[::-1], "a")))
        # InnoDB shows what it knew 0.1 s ago.
        await eventually(lambda: _waits(bench, other), step=0.3)
        for row in rows[1:]:
            await other.execute(
                text(f"SELECT * FROM message WHERE id = {row.id} FOR UPDATE NOWAIT")
            )
        await other.rollback()
    assert (await settling).settled_ids == {row.id for row in rows}


async def _waits(bench: Bench, other: AsyncConnection) -> bool:
    if bench.store.dialect_name == "postgresql":
        waiting = (
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
    else:
        waiting = (
            "SELECT count(*) FROM information_schema.innodb_trx t "
            "JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id "
            "WHERE t.trx_state = 'LOCK WAIT' AND p.db = DATABASE()"
        )
    return bool((await other.execute(text(waiting))).scalar_one())


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_unit_that_a_trigger_cuts_is_not_written(bench: Bench) -> None:
    """Only there a trigger can keep a row without an error."""
    await bench.execute(
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF OLD.payload = '1' THEN RETURN NULL; END IF; RETURN OLD; END $$"
    )
    await bench.execute(
        "CREATE TRIGGER keep BEFORE DELETE ON message FOR EACH ROW EXECUTE FUNCTION keep()"
    )
    await bench.put(3)
    rows = await bench.claim()
    before = await bench.rows()
    with pytest.raises(StoreError, match="settled together, but only 2 were written"):
        await bench.store.settle(together(rows, "a"))
    assert await bench.rows() == before
    assert await bench.rows(archive=True) == []


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_an_answer_that_a_trigger_swallows_is_told(bench: Bench) -> None:
    """The message is acked then: no later delivery would get its answer stored."""
    await bench.execute(
        "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.queue = 'out' THEN RETURN NULL; END IF; RETURN NEW; END $$"
    )
    await bench.execute(
        "CREATE TRIGGER swallow BEFORE INSERT ON message FOR EACH ROW EXECUTE FUNCTION swallow()"
    )
    await bench.put(1)
    [row] = await bench.claim()
    with pytest.raises(
        StoreError, match=r"1 messages must be published on ack, but 0 were inserted"
    ):
        await bench.store.settle(together([row], "a"))


@with_row_locks
async def test_an_answer_that_waits_for_its_dedup_id_blocks_no_other_outcome(bench: Bench) -> None:
    """InnoDB locks the gap before a duplicate that an INSERT waits for: where messages without a
    dedup_id go."""
    await bench.put()
    [row] = await bench.claim()
    waiting = (
        "SELECT COUNT(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        if bench.store.dialect_name == "postgresql"
        else "SELECT COUNT(*) FROM information_schema.innodb_trx "
        "WHERE trx_state = 'LOCK WAIT' AND trx_mysql_thread_id IN "
        "(SELECT id FROM information_schema.processlist WHERE db = DATABASE())"
    )

    async def waits() -> bool:
        async with bench.store.engine.connect() as connection:
            return bool((await connection.execute(text(waiting))).scalar_one())

    async with bench.store.engine.connect() as other:
        await bench.store.insert_in(other, [NewMessage("out", b"theirs", dedup_id="D")])
        unit = Unit([NewMessage("out", b"ours", dedup_id="D")])
        settling = asyncio.create_task(bench.store.settle([done(row, unit=unit)]))
        # InnoDB refreshes this table when it has not been read for 0.1 s.
        await eventually(waits, step=0.2)
        async with asyncio.timeout(60):
            await bench.store.insert([NewMessage("out", b"not alike")])
        assert not settling.done()
        await other.rollback()
    assert (await settling).settled_ids == {row.id}
    assert {bytes(r["payload"]) for r in await bench.rows()} == {b"ours", b"not alike"}


@with_row_locks
async def test_past_locked_rows_a_lock_is_waited_for_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop that repeats outcomes has others to write: it would wait five times as long for each
    of them."""
    await bench.put()
    [row] = await bench.claim()
    tries: list[Any] = []
    wait = bench.store.dialect.wait_for_dedup_ids

    def counted(connection: Any, rows: Any) -> None:
        tries.append(rows)
        wait(connection, rows)

    monkeypatch.setattr(bench.store.dialect, "wait_for_dedup_ids", counted)
    async with bench.store.engine.connect() as other:
        await bench.store.insert_in(other, [NewMessage("out", b"theirs", dedup_id="D")])
        unit = Unit([NewMessage("out", b"ours", dedup_id="D")])
        with pytest.raises(TransientStoreError):
            await bench.store.settle([done(row, unit=unit)], skip_locked=True)
        await other.rollback()
    assert len(tries) == 1
    assert (await bench.store.settle([done(row, unit=unit)], skip_locked=True)).settled_ids == {
        row.id
    }


async def test_two_outcomes_of_a_message_are_not_written_together(bench: Bench) -> None:
    """The flush sends them one by one then: the older's answer is not published."""
    await bench.put()
    [older] = await bench.claim()
    await release(bench, older)
    [later] = await bench.claim()
    both = [*together([older], "old"), *together([later], "new")]
    with pytest.raises(StoreError, match="two outcomes"):
        await bench.store.settle(both)
    outcomes = Outcomes()
    batch = OutcomeBatch(both, DeliveryState.WRITING, DeliveryState.QUEUED)
    outcomes.batches.append(batch)
    assert not await write_batch(bench.store, outcomes, batch, skip_locked=False)
    assert not batch.parts
    assert [bytes(row["payload"]) for row in await bench.rows()] == [b"new"]

"""Notes of what ACK_FIRST has started (promise 4: what may not have run is listed)."""

import asyncio
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.core.rows import ClaimedMessage
from tests.contract.conftest import Bench, done

LEASE = 60.0


async def started(bench: Bench, lease: float = LEASE) -> tuple[ClaimedMessage, UUID]:
    await bench.put(1, key="k")
    [row] = await bench.claim()
    holder = uuid4()
    result = await bench.store.ack_first_starts.remove_first([done(row)], [row], holder, lease)
    assert result.settled_ids == {row.id}
    return row, holder


async def listed(bench: Bench, queue: str | None = None, limit: int = 10) -> list[int]:
    return [
        found.message_id for found in await bench.store.ack_first_starts.list_unknown(queue, limit)
    ]


async def overdue(bench: Bench) -> None:
    await bench.execute(f"UPDATE message_policy_state SET lease_expires_at = {bench.past(1)}")


async def test_a_start_is_listed_when_its_holder_is_silent(bench: Bench) -> None:
    row, _ = await started(bench)
    assert await listed(bench) == []
    assert (await bench.one(archive=True))["state"] == "COMPLETED"
    await overdue(bench)
    [found] = await bench.store.ack_first_starts.list_unknown(None, 10)
    assert (found.message_id, found.queue, found.key) == (row.id, "q", "k")
    assert abs((found.started_at - await bench.store.server.read_now()).total_seconds()) < 600
    assert ":" in found.worker
    assert await listed(bench, "q") == [row.id]
    assert await listed(bench, "other") == []


async def test_an_end_and_a_renewal_count_only_from_the_holder(bench: Bench) -> None:
    row, holder = await started(bench)
    await overdue(bench)
    await bench.store.ack_first_starts.renew([("q", row.id)], uuid4(), LEASE)
    await bench.store.ack_first_starts.end([("q", row.id)], uuid4())
    assert await listed(bench) == [row.id]
    await bench.store.ack_first_starts.renew([("q", row.id)], holder, LEASE)
    assert await listed(bench) == []
    await bench.store.ack_first_starts.end([("q", row.id)], holder)
    await overdue(bench)
    assert await listed(bench) == []


async def test_a_lost_lease_starts_nothing(bench: Bench) -> None:
    await bench.put()
    [row] = await bench.claim()
    await bench.expire()
    await bench.store.release_stuck(("q",), 10)
    result = await bench.store.ack_first_starts.remove_first([done(row)], [row], uuid4(), LEASE)
    assert result.lost_ids == {row.id}
    await overdue(bench)
    assert await listed(bench) == []


async def test_the_oldest_are_listed_first_and_can_be_forgotten(bench: Bench) -> None:
    rows = [(await started(bench))[0].id for _ in range(3)]
    assert await bench.store.ack_first_starts.forget(rows) == 0, "they run"
    await overdue(bench)
    assert await listed(bench, limit=2) == rows[:2]
    assert await bench.store.ack_first_starts.forget([rows[0], 10**9]) == 1
    assert await listed(bench) == rows[1:]


async def test_a_message_that_comes_back_is_noted_anew(bench: Bench) -> None:
    """The same id, after an operator has brought it back."""
    row, _ = await started(bench)
    await overdue(bench)
    holder = uuid4()
    await bench.execute("DELETE FROM message_archive")
    await bench.put()
    await bench.execute(f"UPDATE message SET id = {row.id}")
    [claimed] = await bench.claim()
    assert (
        await bench.store.ack_first_starts.remove_first([done(claimed)], [claimed], holder, LEASE)
    ).settled_ids
    assert await listed(bench) == []


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_write_of_marks_does_not_wait_for_other_marks(bench: Bench) -> None:
    """MariaDB scans a small table for a list of keys, and would wait for every locked row."""
    rows = [await started(bench) for _ in range(3)]
    other = create_async_engine(bench.store.engine.url)
    async with other.connect() as connection:
        await connection.execute(
            text(
                "UPDATE message_policy_state SET info = NULL WHERE scope = 'ack_first:q' "
                f"AND {bench.quoted('key')} = '{rows[0][0].id}'"
            )
        )
        async with asyncio.timeout(60):
            for row, holder in rows[1:]:
                await bench.store.ack_first_starts.renew([("q", row.id)], holder, LEASE)
            await bench.store.ack_first_starts.end([("q", rows[1][0].id)], rows[1][1])
    await other.dispose()

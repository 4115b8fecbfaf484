"""Operators change a message that waits, and never one that a worker has, but by a request."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select

from faststream_sqlbroker.core.states import MessageState
from tests.contract.conftest import Bench, done

pytestmark = pytest.mark.capability("`broker.admin`: cancel, retry, postpone, move, edit")


async def actions(bench: Bench, message_id: int) -> dict[str, str]:
    """The verdicts of all actions on a message that none of them may change."""
    repairs = bench.store.repairs
    found = {
        "cancel": await repairs.cancel(message_id, "cancelled by Ann"),
        "set_due": await repairs.set_due(message_id, 0.0),
        "move": await repairs.move(message_id, "other"),
        "edit": await repairs.edit(message_id, {"priority": 5}, 60.0),
    }
    assert all(each.message_id == message_id for each in found.values())
    return {name: each.verdict for name, each in found.items()}


async def test_a_message_that_waits_is_cancelled_into_the_archive(bench: Bench) -> None:
    [first, other] = await bench.put(2, key="k", headers='{"a": "b"}', delay=60.0)
    found = await bench.store.repairs.cancel(first, "cancelled by Ann: wrong address")
    assert (found.verdict, found.queue, found.done) == ("done", "q", True)
    row = await bench.one(archive=True)
    assert (row["id"], row["state"], row["reason"]) == (first, "DISCARDED", "cancelled")
    assert (row["last_error"], row["payload"]) == ("cancelled by Ann: wrong address", b"0")
    assert [r["id"] for r in await bench.rows()] == [other]
    assert set((await actions(bench, first)).values()) == {"ended"}
    assert set((await actions(bench, 10**9)).values()) == {"not_found"}


async def test_a_failed_attempt_keeps_its_error_when_it_is_cancelled(bench: Bench) -> None:
    [message_id] = await bench.put(1)
    [row] = await bench.claim(1)
    again = done(row, state=MessageState.RETRYABLE, delay=60.0, error="ValueError: no")
    await bench.store.settle([again])
    assert (await bench.store.repairs.cancel(message_id, "cancelled by Ann")).done
    ended = await bench.one(archive=True)
    assert ended["last_error"] == "cancelled by Ann\nValueError: no"
    assert ended["attempts_count"] == 1


async def test_a_leased_message_is_left_to_its_worker(bench: Bench) -> None:
    [message_id] = await bench.put(1)
    [row] = await bench.claim(1)
    before = await bench.one()
    verdicts = await actions(bench, message_id)
    assert verdicts.pop("cancel") == "requested"
    assert set(verdicts.values()) == {"running"}
    assert await bench.one() == before
    result = await bench.store.settle([done(row)])
    assert result.settled_ids == {message_id}


async def test_a_message_is_due_when_an_operator_says(bench: Bench) -> None:
    [message_id] = await bench.put(1, delay=600.0)
    assert await bench.claim(1) == []
    assert (await bench.store.repairs.set_due(message_id, 0.0)).done
    [row] = await bench.claim(1)
    assert row.id == message_id
    await bench.store.settle([done(row, state=MessageState.RETRYABLE, delay=600.0)])
    assert (await bench.store.repairs.set_due(message_id, 0.0)).done
    [row] = await bench.claim(1)
    assert (row.attempts_count, row.deliveries_count) == (1, 2)
    await bench.store.settle([done(row, state=MessageState.PENDING)])
    assert (await bench.store.repairs.set_due(message_id, 600.0)).done
    assert await bench.claim(1) == []
    now = await bench.store.server.read_now()
    assert (await bench.store.repairs.set_due(message_id, now - timedelta(seconds=5))).done
    assert len(await bench.claim(1)) == 1


async def test_a_moved_message_begins_anew(bench: Bench) -> None:
    [message_id] = await bench.put(1, dedup_id="d", key="k", priority=7)
    [row] = await bench.claim(1)
    await bench.store.settle([done(row, state=MessageState.RETRYABLE, delay=600.0, error="no")])
    found = await bench.store.repairs.move(message_id, "other")
    assert (found.done, found.queue) == (True, "q")
    moved = await bench.one()
    assert (moved["queue"], moved["state"], moved["dedup_id"]) == ("other", "PENDING", None)
    assert (moved["attempts_count"], moved["deliveries_count"]) == (0, 0)
    assert (moved["key"], moved["priority"], moved["last_error"]) == ("k", 7, "no")
    assert (moved["first_attempt_at"], moved["last_attempt_at"]) == (None, None)
    assert [r.id for r in await bench.claim(1, "other")] == [message_id]
    await bench.put(1, dedup_id="d")


async def test_only_what_is_given_is_edited(bench: Bench) -> None:
    [message_id] = await bench.put(1, key="k", priority=3)
    before = await bench.one()
    assert (await bench.store.repairs.edit(message_id, {"priority": -5}, None)).done
    assert await bench.one() == {**before, "priority": -5}
    assert (await bench.store.repairs.edit(message_id, {"key": None}, 600.0)).done
    after = await bench.one()
    assert (after["key"], after["priority"]) == (None, -5)
    assert await bench.claim(1) == []


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_row_that_is_locked_is_left_alone(bench: Bench) -> None:
    """SQLite has one lock for all writes, which an action waits for."""
    [message_id] = await bench.put(1)
    table = bench.store.tables.message
    async with bench.store.engine.begin() as holder:
        await holder.execute(select(table.c.id).where(table.c.id == message_id).with_for_update())
        assert set((await actions(bench, message_id)).values()) == {"busy"}
    assert (await bench.store.repairs.set_due(message_id, 0.0)).done


async def test_of_a_cancel_and_a_claim_at_once_one_wins(bench: Bench) -> None:
    """Each message is either cancelled or delivered, and a delivered one can be settled."""
    ids = await bench.put(40)
    pairs = await bench.store.find_ready_pairs(["q"])

    async def cancel(message_id: int) -> str:
        return (await bench.store.repairs.cancel(message_id, "cancelled by Ann")).verdict

    async def claim() -> list[Any]:
        found = []
        for _ in range(10):
            found += await bench.store.claim(pairs, 2, 60.0, uuid4())
        return found

    verdicts, claimed = await asyncio.gather(
        asyncio.gather(*(cancel(message_id) for message_id in ids)), claim()
    )
    cancelled = {i for i, verdict in zip(ids, verdicts, strict=True) if verdict == "done"}
    delivered = {row.id for row in claimed}
    assert not cancelled & delivered
    assert set(verdicts) <= {"done", "requested", "running", "busy"}
    result = await bench.store.settle([done(row) for row in claimed])
    assert result.settled_ids == delivered
    archived = await bench.rows(archive=True)
    assert {r["id"] for r in archived if r["reason"] == "cancelled"} == cancelled
    assert {r["id"] for r in archived} == cancelled | delivered
    assert {r["id"] for r in await bench.rows()} == set(ids) - cancelled - delivered


@pytest.mark.capability("`broker.admin`: bulk actions as jobs, audit, undo")
async def test_what_was_done_is_in_the_audit_and_what_was_not_is_not(bench: Bench) -> None:
    first, second = await bench.put(2, delay=600.0)
    repairs = bench.store.repairs
    assert (await repairs.move(first, "other", "Ann")).done
    assert (await repairs.edit(second, {"priority": 5}, None, "Bob")).done
    assert (await repairs.cancel(second, "cancelled by Ann", "Ann")).done
    assert not (await repairs.cancel(second, "cancelled by Ann", "Ann")).done
    found = await bench.store.jobs.list_jobs(None, 10)
    assert [(job.action, job.by, job.arguments["message_id"]) for job in found] == [
        ("cancel", "Ann", second),
        ("edit", "Bob", second),
        ("move", "Ann", first),
    ]
    assert found[2].arguments["to"] == "other"
    assert {(job.state, job.done, job.is_bulk) for job in found} == {("ended", 1, False)}
    assert await bench.store.jobs.start_undo(found[0].id, "Bob", "c") is None

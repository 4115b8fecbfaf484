"""Bulk actions: each message is visited once, what has changed since is left, and undo takes back
only what is as the job has left it.
"""

import asyncio
from dataclasses import replace
from datetime import datetime
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import Connection, delete, select

from faststream_sqlbroker.core import bulk_jobs as core_jobs
from faststream_sqlbroker.core.bulk_jobs import CANCEL, MOVE, REDRIVE, REPLAY, RETRY, Job, dump_job
from faststream_sqlbroker.core.policies.flags import DELAYED
from faststream_sqlbroker.core.settle import ARCHIVED_BEFORE
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.database.bulk import replay
from faststream_sqlbroker.database.bulk import store as jobs
from faststream_sqlbroker.database.bulk.changes import CHANGES
from faststream_sqlbroker.database.parts import audit, message_walks
from faststream_sqlbroker.exceptions import AccessError
from tests.contract.conftest import Bench, done
from tests.contract.test_message_lists import archive

pytestmark = pytest.mark.capability("`broker.admin`: bulk actions as jobs, audit, undo")
FAILED: dict[str, Any] = {"state": MessageState.FAILED}


@pytest.fixture(params=[1, 3, 500])
def batch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many messages a transaction changes, and how many it looks at."""
    count: int = request.param
    monkeypatch.setattr(jobs, "BATCH_SIZE", count)
    monkeypatch.setattr(message_walks, "STEP_SIZE", max(2, count // 2))
    return count


async def planned(
    bench: Bench,
    action: str,
    arguments: dict[str, Any] | None = None,
    limit: int | None = None,
    **filters: Any,
) -> Job:
    of_archive = action in {REDRIVE, REPLAY}
    wanted = Filters(archived=of_archive, **filters)
    job = Job(action=action, by="Ann", filters=wanted, arguments=arguments or {}, limit=limit)
    return await bench.store.jobs.plan(job)


async def ended(bench: Bench, begun: Job) -> Job:
    for _ in range(100):
        step = await bench.store.jobs.run_step(begun.id)
        assert step.job is not None
        if step.pause is None:
            assert step.job == await bench.store.jobs.find(begun.id)
            assert step.job.ended_at is not None
            return step.job
    raise AssertionError("it does not end")


async def do(
    bench: Bench, action: str, arguments: dict[str, Any] | None = None, **filters: Any
) -> Job:
    plan = await planned(bench, action, arguments, **filters)
    return await ended(bench, await bench.store.jobs.start(plan, "c"))


async def undone(bench: Bench, job: Job) -> Job:
    begun = await bench.store.jobs.start_undo(job.id, "Bob", "c")
    assert begun is not None
    return await ended(bench, begun)


def counts(job: Job) -> tuple[int, int, int]:
    return job.expected, job.done, job.skipped


async def test_a_dry_run_counts_exactly_and_changes_nothing(bench: Bench, batch: int) -> None:
    await bench.put(7)
    await bench.put(4, "other")
    before = await bench.rows()
    plan = await planned(bench, CANCEL)
    assert (plan.expected, plan.queues, plan.state) == (11, {"q": 7, "other": 4}, "planned")
    assert (await planned(bench, CANCEL, queue="q")).expected == 7
    assert (await planned(bench, CANCEL, queue="q", key="k")).expected == 0
    assert await bench.rows() == before
    assert await bench.store.jobs.list_jobs(None, 10) == []


async def test_all_that_match_are_cancelled_and_come_back(bench: Bench, batch: int) -> None:
    ids = await bench.put(5, key="k", delay=600.0)
    others = await bench.put(2, "other")
    before = await bench.rows()
    job = await do(bench, CANCEL, {"text": "cancelled by Ann"}, queue="q", key="k")
    assert counts(job) == (5, 5, 0)
    gone = await bench.rows(archive=True)
    assert [row["id"] for row in gone] == ids
    assert {(row["state"], row["reason"], row["last_error"]) for row in gone} == {
        ("DISCARDED", "cancelled", "cancelled by Ann")
    }
    assert [row["id"] for row in await bench.rows()] == others
    assert counts(await undone(bench, job)) == (5, 5, 0)
    assert await bench.rows(archive=True) == []
    back = [{**row, "last_error": None} for row in await bench.rows()]
    assert back == before


async def test_what_comes_back_has_the_marks_of_its_policies(bench: Bench) -> None:
    """Without them Delay would shift it a second time."""
    await bench.put(3, delay=600.0)
    await bench.execute(f"UPDATE message SET policy_marks = {DELAYED} WHERE id > 1")
    before = await bench.rows()
    job = await do(bench, CANCEL, {"text": "cancelled by Ann"}, queue="q")
    assert counts(await undone(bench, job)) == (3, 3, 0)
    assert [{**row, "last_error": None} for row in await bench.rows()] == before


@pytest.mark.parametrize("action", [RETRY, MOVE, REDRIVE, REPLAY])
async def test_an_undo_leaves_what_an_operator_has_edited_since(bench: Bench, action: str) -> None:
    if action in {RETRY, MOVE}:
        await bench.put(3, delay=600.0, key="k")
    else:
        await archive(bench, 3, **FAILED)
    job = await do(bench, action, {"to": "mended", "name": "n"})
    done_ = await bench.rows()
    keyed, raised, _ = (row["id"] for row in done_)
    await bench.store.repairs.edit(keyed, {"key": "other"}, None)
    await bench.store.repairs.edit(raised, {"priority": 7}, None)
    assert counts(await undone(bench, job)) == (3, 1, 2)
    left = {row["id"]: row for row in await bench.rows()}
    for row, edited in zip(done_, ({"key": "other"}, {"priority": 7}), strict=False):
        assert left[row["id"]] == {**row, **edited}


async def test_a_reason_is_compared_with_its_spaces(bench: Bench) -> None:
    first, second = await archive(bench, 2, **FAILED)
    await bench.execute(f"UPDATE message_archive SET reason = 'late ' WHERE id = {first}")
    await bench.execute(f"UPDATE message_archive SET reason = 'late' WHERE id = {second}")
    assert (await planned(bench, REDRIVE, reason="late")).expected == 1
    assert counts(await do(bench, REDRIVE, reason="late ")) == (1, 1, 0)
    assert [row["id"] for row in await bench.rows()] == [first]


async def test_messages_are_due_at_once_and_an_undo_lets_them_wait(
    bench: Bench, batch: int
) -> None:
    ids = await bench.put(4, delay=600.0)
    before = await bench.rows()
    assert counts(job := await do(bench, RETRY, queue="q")) == (4, 4, 0)
    [row] = await bench.claim(1)
    assert row.id in ids
    assert counts(await undone(bench, job)) == (4, 3, 1)
    assert [r for r in await bench.rows() if r["id"] != row.id] == [
        r for r in before if r["id"] != row.id
    ]


async def test_messages_are_moved_and_moved_back(bench: Bench, batch: int) -> None:
    await bench.put(3, delay=600.0, priority=4)
    [retried] = await bench.put(1)
    [row] = await bench.claim(1)
    await bench.store.settle([done(row, state=MessageState.RETRYABLE, delay=600.0, error="no")])
    before = await bench.rows()
    assert counts(job := await do(bench, MOVE, {"to": "mended"}, queue="q")) == (4, 4, 0)
    rows = await bench.rows()
    assert {(r["queue"], r["state"], r["attempts_count"]) for r in rows} == {
        ("mended", "PENDING", 0)
    }
    await bench.store.repairs.edit(retried, {}, 900.0)
    assert counts(await undone(bench, job)) == (4, 3, 1)
    after = await bench.rows()
    assert [r for r in after if r["id"] != retried] == [r for r in before if r["id"] != retried]
    assert [r["queue"] for r in after if r["id"] == retried] == ["mended"]


async def test_dead_letters_are_redriven_under_their_ids(bench: Bench, batch: int) -> None:
    await bench.put(1, dedup_id="d", expires_in=3600.0)
    [row] = await bench.claim(1)
    await bench.store.settle([done(row, **FAILED, error="E: 1", reason="rejected")])
    ids = [row.id, *await archive(bench, 4, **FAILED, error="E: 2", fingerprint="1" * 16)]
    await archive(bench, 3)
    await archive(bench, 2, "other", **FAILED)
    before = await bench.rows(archive=True)
    job = await do(bench, REDRIVE, queue="q", **FAILED)
    assert counts(job) == (5, 5, 0)
    rows = await bench.rows()
    assert [r["id"] for r in rows] == ids
    assert {(r["state"], r["attempts_count"], r["deliveries_count"]) for r in rows} == {
        ("PENDING", 0, 0)
    }
    assert {(r["publish_count"], r["dedup_id"], r["expires_at"]) for r in rows} == {(2, None, None)}
    assert {r["last_error"] for r in rows} == {"E: 1", "E: 2"}
    assert len(await bench.rows(archive=True)) == 5
    assert counts(await undone(bench, job)) == (5, 5, 0)
    assert await bench.rows() == []
    returned = await bench.rows(archive=True)
    assert all(row["archived_at"] >= job.ended_at for row in returned if row["id"] in ids)
    assert [
        {**row, "archived_at": ended_at(row), "headers": without_it(row)} for row in returned
    ] == [{**row, "headers": without_it(row)} for row in before]


def ended_at(row: dict[str, Any]) -> datetime:
    """When a message ended, also if an undo has put it back into the archive since."""
    known = (row["headers"] or {}).get(ARCHIVED_BEFORE)
    if known is None or known["publish_count"] != row["publish_count"]:
        return row["archived_at"]
    return datetime.fromisoformat(known["at"])


def without_it(row: dict[str, Any]) -> dict[str, Any]:
    return {**(row["headers"] or {}), ARCHIVED_BEFORE: None}


async def test_an_undo_keeps_when_a_message_ended_first(bench: Bench) -> None:
    """After two undos it is still the first time; after it has ended anew it is the new one. A copy
    that a replay makes has not ended.
    """
    [message_id] = await archive(bench, 1, **FAILED)
    [first] = await bench.rows(archive=True)
    for _ in range(2):
        await undone(bench, await do(bench, REDRIVE, **FAILED))
    [row] = await bench.rows(archive=True)
    assert (row["id"], row["publish_count"], ended_at(row)) == (message_id, 1, first["archived_at"])
    assert row["archived_at"] > first["archived_at"]
    await do(bench, REPLAY, {"name": "r"}, **FAILED)
    [copy] = await bench.rows()
    assert ARCHIVED_BEFORE not in copy["headers"]
    await bench.execute("DELETE FROM message")
    await do(bench, REDRIVE, **FAILED)
    [claimed] = await bench.claim(1)
    await bench.store.settle([done(claimed, **FAILED, error="E: 2", reason="rejected")])
    [second] = await bench.rows(archive=True)
    assert ended_at(second) == second["archived_at"] > row["archived_at"]
    await undone(bench, await do(bench, REDRIVE, **FAILED))
    [last] = await bench.rows(archive=True)
    assert ended_at(last) == second["archived_at"] < last["archived_at"]


async def test_a_message_that_fails_again_is_not_met_again(bench: Bench, batch: int) -> None:
    ids = await archive(bench, 6, **FAILED)
    plan = await planned(bench, REDRIVE, **FAILED)
    job = await bench.store.jobs.start(plan, "c")
    for _ in range(100):
        step = await bench.store.jobs.run_step(job.id)
        claimed = await bench.claim(10)
        await bench.store.settle([done(row, **FAILED) for row in claimed])
        if step.pause is None:
            break
    assert step.job is not None
    assert counts(step.job) == (6, 6, 0)
    rows = await bench.rows(archive=True)
    assert [(r["id"], r["publish_count"]) for r in rows] == [(i, 2) for i in ids]


@pytest.mark.parametrize("batch", [1, 500], indirect=True)
async def test_a_limit_takes_the_oldest_that_were_counted_and_no_more(
    bench: Bench, batch: int
) -> None:
    """All of them are archived at one moment. What a colleague takes first is not made up for."""
    ids = await archive(bench, 7, **FAILED)
    later = await archive(bench, 2, "r", **FAILED)
    plan = await planned(bench, REDRIVE, limit=3, **FAILED)
    assert (plan.expected, plan.queues) == (3, {"q": 3})
    begun = await bench.store.jobs.start(plan, "c")
    assert counts(await do(bench, REDRIVE, ids=(ids[1],), **FAILED)) == (1, 1, 0)
    assert counts(await ended(bench, begun)) == (3, 2, 1)
    assert [row["id"] for row in await bench.rows()] == ids[:3]
    taken = await bench.claim(3)
    await bench.store.settle([done(row, **FAILED) for row in taken])
    job = await do(bench, REDRIVE, limit=5, **FAILED)
    assert (counts(job), job.queues) == ((5, 5, 0), {"q": 4, "r": 1})
    assert [row["id"] for row in await bench.rows()] == [*ids[3:], later[0]]
    assert counts(await undone(bench, job)) == (5, 5, 0)
    assert counts(await do(bench, REDRIVE, limit=100, **FAILED)) == (9, 9, 0)


async def test_a_limit_holds_when_another_message_comes_in_front(bench: Bench) -> None:
    first, *ids = await bench.put(4)
    await bench.store.repairs.move(first, "other")
    plan = await planned(bench, CANCEL, {"text": "cancelled by Ann"}, limit=2, queue="q")
    await bench.store.repairs.move(first, "q")
    job = await ended(bench, await bench.store.jobs.start(plan, "c"))
    assert counts(job) == (2, 2, 0)
    assert [row["id"] for row in await bench.rows()] == ids[1:]


@pytest.mark.parametrize("action", [CANCEL, MOVE, RETRY, REPLAY])
async def test_ids_and_a_limit_choose_messages_for_each_action(bench: Bench, action: str) -> None:
    of_archive = action == REPLAY
    put = archive if of_archive else Bench.put
    ids = await put(bench, 6)
    [other] = await put(bench, 1, "r")
    arguments = {"to": "mended", "name": "n", "text": "cancelled by Ann"}
    wanted = (ids[1], ids[2], ids[4], other)
    if action == REPLAY:
        assert counts(await do(bench, action, arguments, ids=wanted[:1])) == (1, 1, 0)
    job = await do(bench, action, arguments, ids=wanted, queue="q", limit=2)
    assert counts(job) == (2, 2, 0)
    expected = {CANCEL: ids[1:3], MOVE: ids[1:3], RETRY: ids[1:3], REPLAY: [ids[2], ids[4]]}
    async with bench.store.engine.connect() as connection:
        c = bench.store.dialect.tables.policy_state.c
        scope = replay.get_scope(job) if of_archive else jobs.LIST_SCOPE + job.id
        keys = (await connection.execute(select(c.key, c.info).where(c.scope == scope))).all()
    marked = sorted(int(row.key) for row in keys if row.info.get("run", job.id) == job.id)
    assert marked == expected[action]


def test_a_job_without_ids_and_limit_is_stored_as_before_there_were_such() -> None:
    """Processes of an older version refuse fields that they do not know."""
    info = dump_job(Job(action=CANCEL, by="Ann", filters=Filters()))
    assert "limit" not in info
    assert "ids" not in info["filters"]


async def test_a_job_says_why_it_does_not_take_an_id_and_what_does(bench: Bench) -> None:
    [failed] = await archive(bench, 1, **FAILED)
    [discarded] = await archive(bench, 1, state=MessageState.DISCARDED)
    [completed] = await archive(bench, 1)
    [running] = await bench.put(1)
    await bench.claim(1)
    [waiting] = await bench.put(1, delay=600.0)
    ids = (failed, discarded, completed, running, waiting, 10**9)
    plan = await planned(bench, REDRIVE, ids=ids, **FAILED)
    assert plan.expected == 1
    assert plan.note == (
        f"message {discarded}: it is in the archive as DISCARDED: "
        f"`redrive {discarded} --state DISCARDED` returns it to its queue; "
        f"message {completed}: it is in the archive as COMPLETED: "
        f"`replay NAME {completed}` publishes it again; "
        f"message {running}: a subscriber has leased it: `cancel {running}` requests its end; "
        f"message {waiting}: it is PENDING: `retry {waiting}` makes it due now; "
        "message 1000000000: no live or archived message has this id"
    )
    job = await ended(bench, await bench.store.jobs.start(plan, "c"))
    assert (counts(job), job.note) == ((1, 1, 0), plan.note)
    live = await planned(bench, RETRY, ids=(*ids, 10**9 + 1), queue="r")
    assert live.expected == 0
    assert live.note is not None
    assert f"message {waiting}: it does not match the other filters" in live.note
    assert live.note.endswith("; and 2 more")


async def test_what_has_changed_since_the_dry_run_is_skipped(bench: Bench, batch: int) -> None:
    ids = await bench.put(6)
    plan = await planned(bench, CANCEL, {"text": "cancelled by Ann"}, queue="q")
    later = await bench.put(2)
    leased = await bench.claim(2)
    await bench.store.repairs.move(ids[2], "other")
    begun = await bench.store.jobs.start(plan, "c")
    job = await ended(bench, begun)
    assert counts(job) == (6, 3, 3)
    left = [row["id"] for row in await bench.rows()]
    assert left == [row.id for row in leased] + [ids[2]] + later
    result = await bench.store.settle([done(row) for row in leased])
    assert result.settled_ids == {row.id for row in leased}


async def test_a_row_that_another_transaction_has_locked_is_skipped(
    bench: Bench, database: str
) -> None:
    if database == "sqlite":
        pytest.skip("SQLite locks the whole file")
    first, second = await bench.put(2)
    plan = await planned(bench, CANCEL, {"text": "x"}, queue="q")
    begun = await bench.store.jobs.start(plan, "c")
    async with bench.store.engine.begin() as connection:
        from sqlalchemy import text

        await connection.execute(text(f"SELECT id FROM message WHERE id = {first} FOR UPDATE"))
        assert counts(await ended(bench, begun)) == (2, 1, 1)
    assert [row["id"] for row in await bench.rows()] == [first]
    assert [row["id"] for row in await bench.rows(archive=True)] == [second]


async def test_a_replay_publishes_each_once_for_its_name(bench: Bench, batch: int) -> None:
    ids = await archive(bench, 5, **FAILED, error="no")
    await archive(bench, 2, "other")
    before = await bench.rows(archive=True)
    job = await do(bench, REPLAY, {"name": "bug 7"}, queue="q")
    assert counts(job) == (5, 5, 0)
    rows = await bench.rows()
    assert sorted(r["origin_id"] for r in rows) == ids
    assert {(r["publish_count"], r["state"], r["last_error"]) for r in rows} == {
        (2, "PENDING", None)
    }
    headers = [r["headers"] for r in rows]
    assert [h["replay-of"] for h in headers] == [r["origin_id"] for r in rows]
    assert {h["replay-job"] for h in headers} == {"bug 7"}
    bodies = {r["id"]: r["payload"] for r in before}
    assert {r["origin_id"]: r["payload"] for r in rows} == {i: bodies[i] for i in ids}
    assert await bench.rows(archive=True) == before
    again = await do(bench, REPLAY, {"name": "bug 7", "to": "mended"})
    assert counts(again) == (2, 2, 0)
    assert counts(await do(bench, REPLAY, {"name": "bug 7"})) == (0, 0, 0)
    plan = await planned(bench, REPLAY, {"name": "bug 7"}, ids=ids[:1])
    assert (plan.expected, plan.note) == (
        0,
        f"message {ids[0]}: replay bug 7 has already published it",
    )
    assert counts(await do(bench, REPLAY, {"name": "bug 8"}, **FAILED)) == (5, 5, 0)


async def test_what_is_pruned_during_a_replay_is_not_counted_as_published(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lake may still have it, for a replay under the same name."""
    first, gone, last = await archive(bench, 3)
    archived = bench.store.dialect.tables.archive
    assert archived is not None
    real = replay.list_matching

    def then_prune(connection: Connection, *rest: Any) -> Any:
        rows = real(connection, *rest)
        connection.execute(delete(archived).where(archived.c.id == gone))
        return rows

    monkeypatch.setattr(replay, "list_matching", then_prune)
    job = await do(bench, REPLAY, {"name": "n"})
    assert (job.done, job.skipped) == (2, 1)
    assert sorted(r["origin_id"] for r in await bench.rows()) == [first, last]
    scope = replay.get_scope(job)
    async with bench.store.engine.connect() as connection:
        state = bench.store.dialect.tables.policy_state
        marks = await connection.execute(select(state.c.key).where(state.c.scope == scope))
        assert sorted(int(key) for key in marks.scalars()) == [first, last]


async def test_an_undone_replay_can_be_made_again(bench: Bench, batch: int) -> None:
    await archive(bench, 4)
    job = await do(bench, REPLAY, {"name": "n"})
    [row] = await bench.claim(1)
    assert counts(await undone(bench, job)) == (4, 3, 1)
    assert [r["id"] for r in await bench.rows()] == [row.id]
    assert counts(await do(bench, REPLAY, {"name": "n"})) == (3, 3, 0)


async def test_a_job_rests_while_it_is_stopped(bench: Bench) -> None:
    await bench.put(5)
    store = bench.store.jobs
    begun = await store.start(await planned(bench, CANCEL, {"text": "x"}), "c")
    with patch.object(jobs, "BATCH_SIZE", 2):
        await store.run_step(begun.id)
        stopped = await store.stop(begun.id)
        assert stopped is not None
        assert (stopped.state, stopped.done, stopped.remaining) == ("stopped", 2, 3)
        step = await store.run_step(begun.id)
        assert (step.job, step.pause) == (stopped, None)
        assert (await store.run_step()).job is None
        assert await store.get_due_in() is None
        resumed = await store.resume(begun.id)
        assert resumed is not None
        assert resumed.state == "running"
        assert await store.get_due_in() is not None
        assert counts(await ended(bench, begun)) == (5, 5, 0)
    assert (await store.resume(begun.id)) == await store.find(begun.id)
    assert await store.stop("no such job") is None


async def bulk_ids(bench: Bench, before: str | None) -> list[str]:
    return [job.id for job in await bench.store.jobs.list_jobs(before, 10) if job.is_bulk]


async def test_a_stopped_job_can_be_undone_and_goes_on_no_more(bench: Bench) -> None:
    await bench.put(5)
    store = bench.store.jobs
    begun = await store.start(await planned(bench, CANCEL, {"text": "x"}), "c")
    with patch.object(jobs, "BATCH_SIZE", 2):
        await store.run_step(begun.id)
    assert await store.start_undo(begun.id, "Bob", "c") is None, "it still runs"
    stopped = await store.stop(begun.id)
    assert stopped is not None
    undo = await undone(bench, stopped)
    assert counts(undo) == (2, 2, 0)
    assert len(await bench.rows()) == 5
    now = await store.find(begun.id)
    assert now is not None
    assert (now.state, now.undone_by) == ("ended", undo.id)
    assert (await store.run_step()).job is None
    assert await store.start_undo(begun.id, "Bob", "c") is None, "it is undone"
    assert await store.start_undo(undo.id, "Bob", "c") is None, "an undo cannot be undone"
    assert await bulk_ids(bench, None) == [undo.id, begun.id]
    assert await bulk_ids(bench, undo.id) == [begun.id]


async def test_a_rate_spreads_the_batches(bench: Bench) -> None:
    await bench.put(5)
    store = bench.store.jobs
    plan = await planned(bench, CANCEL, {"text": "x"})
    for rate, count, pause in ((2.0, 2, 1.0), (0.001, 1, 1_000.0)):
        begun = await store.start(replace(plan, rate=rate), "c")
        step = await store.run_step(begun.id)
        assert step.job is not None
        assert (step.job.done, step.pause) == (count, pause)
        due_in = await store.get_due_in(begun.id)
        assert due_in is not None
        assert due_in <= pause
    assert due_in > 0.0


async def test_a_failed_batch_changes_nothing_and_the_next_goes_on(
    bench: Bench, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is changed, noted and counted is one transaction."""
    await archive(bench, 7, **FAILED)
    plan = await planned(bench, REDRIVE, **FAILED)
    begun = await bench.store.jobs.start(plan, "c")
    real = audit.save_job

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(audit, "save_job", broken)
    with pytest.raises(ZeroDivisionError):
        await bench.store.jobs.run_step(begun.id)
    monkeypatch.setattr(audit, "save_job", real)
    assert await bench.rows() == []
    assert counts(await ended(bench, begun)) == (7, 7, 0)
    assert len(await bench.rows()) == 7


async def test_a_job_that_may_not_be_run_lets_the_others_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await archive(bench, 2, **FAILED)
    refused = await bench.store.jobs.start(await planned(bench, REDRIVE, **FAILED), "c")
    await bench.put()
    other = await bench.store.jobs.start(await planned(bench, RETRY), "c")

    def no_right(*_: Any) -> None:
        raise AccessError("no right")

    monkeypatch.setitem(CHANGES, REDRIVE, no_right)  # type: ignore[arg-type]
    with pytest.raises(AccessError):
        await bench.store.jobs.run_step()
    step = await bench.store.jobs.run_step()
    assert step.job is not None
    assert (step.job.id, step.job.state, step.job.done) == (other.id, "ended", 1)
    due_in = await bench.store.jobs.get_due_in(refused.id)
    assert due_in is not None
    assert due_in > 0


async def refuse(bench: Bench, key: str, queue: str) -> None:
    """Let the database refuse a live message of that key in that queue."""
    database = bench.store.dialect_name
    if database == "sqlite":
        for event in ("INSERT", "UPDATE"):
            await bench.execute(
                f"CREATE TRIGGER no_{event} BEFORE {event} ON message WHEN NEW.key = '{key}' AND "
                f"NEW.queue = '{queue}' BEGIN SELECT RAISE(ABORT, 'not here'); END"
            )
        return
    name = "key" if database == "postgresql" else "`key`"
    bad = f"{name} = '{key}' AND queue = '{queue}'"
    await bench.execute(
        f"ALTER TABLE message ADD CONSTRAINT not_here CHECK ({name} IS NULL OR NOT ({bad}))"
    )


@pytest.mark.parametrize("action", [MOVE, REDRIVE, REPLAY])
async def test_a_message_that_the_database_refuses_is_left_alone(
    bench: Bench, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of its batch are changed, and the job ends."""
    monkeypatch.setattr(jobs, "BATCH_SIZE", 4)
    arguments = {"to": "other", "name": "n"}
    ids = [(await bench.put(key="bad" if n in (2, 3, 6) else "k"))[0] for n in range(8)]
    if action != MOVE:
        for row in await bench.claim(8):
            await bench.store.settle([done(row, **FAILED)])
    await refuse(bench, "bad", "other")
    job = await do(bench, action, arguments, **({} if action == MOVE else FAILED))
    assert (job.expected, job.done, job.skipped, job.failed) == (8, 5, 0, 3)
    assert [each.message_id for each in job.failures] == [ids[2], ids[3], ids[6]]
    assert all("not" in each.error.lower() for each in job.failures)
    assert "3 failed" in str(job)
    changed = [row for row in await bench.rows() if row["queue"] == "other"]
    good = [i for n, i in enumerate(ids) if n not in (2, 3, 6)]
    assert sorted(row["origin_id" if action == REPLAY else "id"] for row in changed) == good


async def test_an_undo_goes_on_behind_what_the_database_refuses(bench: Bench) -> None:
    ids = [(await bench.put(key="bad" if n == 2 else "k"))[0] for n in range(5)]
    job = await do(bench, MOVE, {"to": "other"}, queue="q")
    await refuse(bench, "bad", "q")
    undo = await undone(bench, job)
    assert (undo.done, undo.skipped, undo.failed) == (4, 0, 1)
    assert [each.message_id for each in undo.failures] == [ids[2]]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_an_undo_of_a_replay_goes_on_behind_the_notes_of_others(bench: Bench) -> None:
    """Two runs of one name have their notes together, here the other one's first."""
    for queue in ("q", "r"):
        await bench.put(queue=queue)
        for row in await bench.claim(1, queue):
            await bench.store.settle([done(row, **FAILED)])
    await do(bench, REPLAY, {"name": "n"}, queue="q")
    ours = await do(bench, REPLAY, {"name": "n"}, queue="r")
    await bench.execute(
        "CREATE TRIGGER no_delete BEFORE DELETE ON message WHEN OLD.queue = 'r' "
        "BEGIN SELECT RAISE(ABORT, 'not now'); END"
    )
    undo = await undone(bench, ours)
    assert (undo.state, undo.done, undo.failed) == ("ended", 0, 1)


async def test_only_so_many_errors_are_kept(bench: Bench) -> None:
    await bench.put(29, key="bad")
    await bench.put()
    await refuse(bench, "bad", "other")
    job = await do(bench, MOVE, {"to": "other"})
    assert (job.state, job.done, job.failed, len(job.failures)) == ("ended", 1, 29, 20)


async def allow(bench: Bench) -> None:
    """Take `refuse` back."""
    if bench.store.dialect_name == "sqlite":
        for event in ("INSERT", "UPDATE"):
            await bench.execute(f"DROP TRIGGER no_{event}")
    else:
        await bench.execute("ALTER TABLE message DROP CONSTRAINT not_here")


async def steps(bench: Bench, job: Job) -> Job:
    """Run the job until it rests for good, or a step raises."""
    while (step := await bench.store.jobs.run_step(job.id)).pause is not None:
        pass
    assert step.job is not None
    assert step.job == await bench.store.jobs.find(job.id)
    return step.job


@pytest.mark.parametrize("action", [MOVE, REDRIVE, REPLAY])
async def test_an_error_that_meets_a_whole_batch_fails_the_job(
    bench: Bench, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position stays in front of that batch, so it goes on there when it is resumed."""
    monkeypatch.setattr(core_jobs, "MIN_EQUAL_FAILURES", 5)
    monkeypatch.setattr(jobs, "BATCH_SIZE", 6)
    arguments = {"to": "other", "name": "n"}
    await bench.put(6, key="good")
    await bench.put(9, key="bad")
    if action != MOVE:
        rows = await bench.claim(15)
        await bench.store.settle([done(row, **FAILED) for row in rows])
    await refuse(bench, "bad", "other")
    plan = await planned(bench, action, arguments, **({} if action == MOVE else FAILED))
    job = await bench.store.jobs.start(plan, "c")
    failed = await steps(bench, job)
    assert (failed.state, failed.done, failed.failed, failed.visited) == ("failed", 6, 0, 6)
    assert failed.error is not None
    assert "not" in failed.error.lower()
    assert failed.error in str(failed)
    assert await bench.store.jobs.get_due_in(job.id) is None
    resumed = await bench.store.jobs.resume(job.id)
    assert resumed is not None
    assert (resumed.state, resumed.error) == ("running", None)
    again = await steps(bench, job)
    assert (again.state, again.visited, again.error) == ("failed", 6, failed.error)
    await allow(bench)
    await bench.store.jobs.resume(job.id)
    ended = await steps(bench, job)
    assert (ended.state, ended.done, ended.failed, ended.error) == ("ended", 15, 0, None)
    moved = [row for row in await bench.rows() if row["queue"] == "other"]
    assert len(moved) == 15


async def test_processes_that_take_turns_see_that_an_error_meets_a_whole_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_jobs, "MIN_EQUAL_FAILURES", 5)
    monkeypatch.setattr(jobs, "BATCH_SIZE", 6)
    await bench.put(8, key="bad")
    await refuse(bench, "bad", "other")
    job = await bench.store.jobs.start(await planned(bench, MOVE, {"to": "other"}), "c")
    store = bench.store
    other = jobs.JobStore(store._database)
    fleet = [store.jobs, other]
    for turn in range(400):
        step = await fleet[turn % 2].run_step(job.id)
        if step.pause is None:
            break
    assert step.job is not None
    assert (step.job.state, step.job.failed, step.job.visited) == ("failed", 0, 0)
    await allow(bench)
    await other.resume(job.id)
    ended = await steps(bench, job)
    assert (ended.state, ended.done, ended.failed) == ("ended", 8, 0)


async def test_a_killed_process_leaves_what_was_refused_to_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has counted as failed counts for the verdict on the whole batch."""
    monkeypatch.setattr(core_jobs, "MIN_EQUAL_FAILURES", 5)
    monkeypatch.setattr(jobs, "BATCH_SIZE", 6)
    await bench.put(6, key="good")
    await bench.put(8, key="bad")
    await refuse(bench, "bad", "other")
    job = await bench.store.jobs.start(await planned(bench, MOVE, {"to": "other"}), "c")
    await bench.store.jobs.run_step(job.id)
    real = jobs.JobStore._run_part
    writes = 0

    async def killed(*arguments: Any) -> None:
        nonlocal writes
        writes += 1
        if writes > 9:
            raise asyncio.CancelledError
        await real(*arguments)

    monkeypatch.setattr(jobs.JobStore, "_run_part", killed)
    with pytest.raises(asyncio.CancelledError):
        await bench.store.jobs.run_step(job.id)
    monkeypatch.setattr(jobs.JobStore, "_run_part", real)
    halfway = await bench.store.jobs.find(job.id)
    assert halfway is not None
    assert (halfway.state, halfway.done) == ("running", 6)
    assert 0 < halfway.failed < 6
    failed = await steps(bench, job)
    assert (failed.state, failed.done, failed.failed, failed.failures) == ("failed", 6, 0, ())
    await allow(bench)
    await bench.store.jobs.resume(job.id)
    assert counts(await steps(bench, job)) == (14, 14, 0)
    rows = await bench.rows()
    assert [row["queue"] for row in rows] == ["other"] * 14


async def test_small_batches_are_refused_together(bench: Bench) -> None:
    """A job with a rate of two a second has batches of two."""
    await bench.put(30, key="bad")
    await refuse(bench, "bad", "other")
    plan = replace(await planned(bench, MOVE, {"to": "other"}), rate=2.0)
    begun = await bench.store.jobs.start(plan, "c")
    visited = []
    while True:
        step = await bench.store.jobs.run_step(begun.id)
        assert step.job is not None
        if step.pause is None:
            break
        visited.append(step.job.visited)
        await bench.execute(
            f"UPDATE message_policy_state SET due_at = {bench.past(1)} WHERE scope = 'job'"
        )
    assert (step.job.state, step.job.visited, max(visited)) == ("failed", 0, 19)


async def test_a_table_that_is_gone_lets_the_job_rest_then_fail(bench: Bench) -> None:
    """The first time another process may have the right to see it."""
    await archive(bench, 3, **FAILED)
    plan = await planned(bench, REDRIVE, **FAILED)
    job = await bench.store.jobs.start(plan, "c")
    await bench.execute("ALTER TABLE message_archive RENAME TO elsewhere")
    with pytest.raises(AccessError):
        await bench.store.jobs.run_step(job.id)
    rested = await bench.store.jobs.find(job.id)
    assert rested is not None
    assert (rested.state, rested.visited) == ("running", 0)
    assert rested.error is not None
    due = bench.past(1)
    await bench.execute(f"UPDATE message_policy_state SET due_at = {due} WHERE scope = 'job'")
    with pytest.raises(AccessError):
        await bench.store.jobs.run_step(job.id)
    failed = await bench.store.jobs.find(job.id)
    assert failed is not None
    assert (failed.state, failed.visited) == ("failed", 0)
    assert "message_archive" in str(failed)
    await bench.execute("ALTER TABLE elsewhere RENAME TO message_archive")
    await bench.store.jobs.resume(job.id)
    assert counts(await steps(bench, job)) == (3, 3, 0)

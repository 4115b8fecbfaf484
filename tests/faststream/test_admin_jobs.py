"""broker.admin: bulk actions next to running subscribers, and jobs that outlive their process."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import RightsError, SetupError, SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.core.clock import Clock, RealTime
from faststream_sqlbroker.database.bulk import store as jobs
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.flow.fleet.housekeeping import BUSY_PAUSE, RIGHTS_INTERVAL, JobRunner
from tests.accounts import account
from tests.clock import ShiftedTime
from tests.faststream.conftest import QUICK, Look, Make
from tests.helpers import eventually
from tests.quick_tables import TABLES

pytestmark = pytest.mark.capability("`broker.admin`: bulk actions as jobs, audit, undo")


async def failed(broker: SqlBroker, count: int) -> None:
    async def all_of_them() -> bool:
        return (await broker.admin.dead_letters()).count == count

    await eventually(all_of_them)


async def test_dead_letters_are_redriven_once_their_cause_is_mended(
    broker: SqlBroker, look: Look
) -> None:
    mended = False
    handled: list[str] = []

    @broker.subscriber("q", **QUICK, retry_strategy=None)
    async def handle(body: str) -> None:
        if not mended:
            raise ConnectionError(f"no route for {body}")
        handled.append(body)

    await broker.publish_batch("1", "2", "3", queue="q")
    await broker.start()
    await failed(broker, 3)
    [group] = (await broker.admin.dead_letters()).groups
    which: Any = {"queue": "q", "fingerprint": group.fingerprint}
    planned = await broker.admin.redrive(**which)
    assert (planned.state, planned.expected, planned.queues) == ("planned", 3, {"q": 3})
    mended = True
    job = await broker.admin.run_job(planned)
    assert (job.state, job.done, job.skipped) == ("ended", 3, 0)

    async def all_handled() -> bool:
        return sorted(handled) == ["1", "2", "3"]

    await eventually(all_handled)
    [last, *_] = await broker.admin.audit()
    assert last == job
    assert str(job) == f"redrive {job.id}: ended, 3 of 3 done, 0 skipped"
    undone = await broker.admin.undo(job.id, by="Ann")
    assert (undone.done, undone.skipped, undone.by) == (0, 3, "Ann")
    found = await broker.admin.audit(bulk=True)
    assert [(each.action, each.undone_by) for each in found] == [
        ("undo", None),
        ("redrive", undone.id),
    ]


async def test_a_job_that_is_left_is_done_by_another_process(
    engine: AsyncEngine, broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BATCH_SIZE", 2)

    @broker.subscriber("other", **QUICK, release_stuck_interval=0.5)
    async def handle(_body: str) -> None:
        pass

    for n in range(7):
        await broker.publish(str(n), "q", delay=600.0)
    operator = SqlBroker(engine, logger=None).admin
    begun = await operator.bulk_cancel(queue="q", dry_run=False, wait=False, by="Ann")
    assert (begun.state, begun.expected, begun.done) == ("running", 7, 0)
    await broker.start()

    async def has_ended() -> bool:
        job = await operator.job(begun.id)
        return job is not None and job.state == "ended"

    await eventually(has_ended)
    job = await operator.job(begun.id)
    assert job is not None
    assert (job.done, job.skipped) == (7, 0)
    assert len((await operator.messages(state="DISCARDED", reason="cancelled")).messages) == 7


async def test_several_processes_work_on_one_job_and_each_message_is_changed_once(
    engine: AsyncEngine, broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BATCH_SIZE", 3)
    for n in range(20):
        await broker.publish(str(n), "q", delay=600.0)
    begun = await broker.admin.bulk_move("mended", queue="q", dry_run=False, wait=False)
    others = [SqlBroker(engine, logger=None).admin for _ in range(3)]
    found = await asyncio.gather(*(admin.wait_for_job(begun.id) for admin in others))
    assert {(job.state, job.done, job.skipped) for job in found} == {("ended", 20, 0)}
    assert len((await broker.admin.messages(queue="mended")).messages) == 20


class Pauses(RealTime):
    """Time in which no pause ends; it keeps their lengths."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[float] = asyncio.Queue()

    async def sleep(self, seconds: float) -> None:
        self.asked.put_nowait(seconds)
        await asyncio.Event().wait()


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_job_that_another_process_is_at_is_not_asked_for_again_and_again(
    engine: AsyncEngine, broker: SqlBroker
) -> None:
    await broker.publish("1", "q", delay=600.0)
    await broker.admin.bulk_retry(queue="q", dry_run=False, wait=False)
    pauses = Pauses()
    runner = JobRunner(Store(engine, TABLES), lambda *_args, **_fields: None, Clock(pauses))
    state = TABLES.policy_state
    async with engine.begin() as connection:
        await connection.execute(
            select(state.c.key).where(state.c.scope == "job").with_for_update()
        )
        runner.start()
        runner.run_due()
        assert await asyncio.wait_for(pauses.asked.get(), 60) == BUSY_PAUSE
        await runner.stop()


CANCELS = (
    "GRANT SELECT, UPDATE, DELETE ON message TO {who}",
    "GRANT SELECT, INSERT ON message_archive TO {who}",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON message_policy_state TO {who}",
)


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_what_an_operator_may_not_do_is_not_left_to_others_by_mistake(
    broker: SqlBroker, database_url: str, database: str
) -> None:
    await broker.publish("1", "q", delay=600.0)
    with account(database_url) as user:
        schema = "GRANT USAGE ON SCHEMA public TO {who}"
        user.execute(*([schema] if database == "postgresql" else []), *CANCELS)
        engine = user.engine()
        admin = SqlBroker(engine, logger=None).admin
        cancelled = await admin.bulk_cancel(queue="q", dry_run=False)
        assert (cancelled.state, cancelled.done) == ("ended", 1)
        with pytest.raises(RightsError, match="to redrive and replay archived messages"):
            await admin.redrive(state="DISCARDED", dry_run=False)
        with pytest.raises(RightsError, match="to redrive and replay archived messages"):
            await admin.undo(cancelled.id)
        assert await admin.audit() == [cancelled]
        left = await admin.redrive(state="DISCARDED", dry_run=False, wait=False)
        await engine.dispose()
    assert (await broker.admin.wait_for_job(left.id)).done == 1


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_process_that_gets_the_rights_for_jobs_needs_no_restart(
    broker: SqlBroker, database_url: str, database: str
) -> None:
    await broker.publish("1", "q", delay=600.0)
    begun = await broker.admin.bulk_retry(queue="q", dry_run=False, wait=False)
    lines: list[str] = []
    time = ShiftedTime()
    with account(database_url) as user:
        schema = "GRANT USAGE ON SCHEMA public TO {who}"
        user.execute(*([schema] if database == "postgresql" else []), *CANCELS)
        engine = user.engine()
        runner = JobRunner(
            Store(engine, TABLES), lambda _level, text, **_fields: lines.append(text), Clock(time)
        )
        runner.start()
        runner.run_due()
        await eventually(lambda: lines)
        assert "leaves operators' jobs to others" in lines[0]
        # Of each table: MariaDB and MySQL apply a grant of the database to new connections only.
        tables = ("message", "message_archive", "message_policy_state")
        user.execute(*(f"GRANT ALL ON {table} TO {{who}}" for table in tables))
        if database == "postgresql":
            user.execute("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {who}")

        async def has_ended() -> bool:
            runner.run_due()
            job = await broker.admin.job(begun.id)
            return job is not None and job.state == "ended"

        time.shift += RIGHTS_INTERVAL
        await eventually(has_ended)
        assert len(lines) == 2
        await runner.stop()
        await engine.dispose()


async def test_a_job_is_stopped_and_resumed(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BATCH_SIZE", 1)
    await broker.publish_batch(*range(4), queue="q", delay=600.0)
    admin = broker.admin
    begun = await admin.bulk_retry(queue="q", dry_run=False, wait=False)
    step = jobs.JobStore.run_step
    first_done = asyncio.Event()
    go_on = asyncio.Event()

    async def one_at_a_time(self: jobs.JobStore, job_id: str | None = None) -> jobs.StepResult:
        found = await step(self, job_id)
        first_done.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(jobs.JobStore, "run_step", one_at_a_time)
    waiting = asyncio.create_task(admin.wait_for_job(begun.id))
    await first_done.wait()
    stopped = await admin.stop_job(begun.id, by="ola")
    assert (stopped.state, stopped.done) == ("stopped", 1)
    go_on.set()
    assert (await asyncio.wait_for(waiting, 60)).state == "stopped"
    await admin.resume_job(begun.id, wait=False, by="ola")
    done = [(each.action, each.by, dict(each.arguments)) for each in await admin.audit(limit=2)]
    assert sorted(done) == [(x, "ola", {"job": begun.id}) for x in ("resume_job", "stop_job")]
    seen: list[int] = []
    ended = await admin.wait_for_job(begun.id, progress=lambda job: seen.append(job.done))
    assert (ended.state, ended.done) == ("ended", 4)
    assert seen == [2, 3, 4]


async def test_a_replay_goes_to_another_queue_with_its_lineage(
    broker: SqlBroker, look: Look
) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(_body: str) -> None:
        pass

    message_id = await broker.publish("x", "q", key="k", headers={"tenant": "a"})
    await broker.start()
    await look.archived()
    job = await broker.admin.replay("fix", queue="q", key="k", to="again", dry_run=False)
    assert (job.done, job.arguments) == (1, {"name": "fix", "to": "again"})
    [copy] = (await broker.admin.messages(queue="again", bodies=True)).messages
    assert (copy.origin_id, copy.key, copy.body, copy.publish_count) == (message_id, "k", "x", 2)
    assert copy.headers is not None
    assert copy.headers["tenant"] == "a"
    assert (copy.headers["replay-of"], copy.headers["replay-job"]) == (message_id, "fix")
    assert (await broker.admin.replay("fix", queue="q")).expected == 0


REFUSED: dict[str, tuple[Any, str]] = {
    "a rate of nothing": (lambda a: a.bulk_retry(rate=0), "rate must be a number"),
    "a rate of words": (lambda a: a.redrive(rate="fast"), "rate must be a number"),
    "a huge rate": (lambda a: a.redrive(rate=10**400), "rate must be a number"),
    "no ids": (
        lambda a: a.redrive(ids=[]),
        r"ids must be a list of 1 to 1000 message ids, got \[\]",
    ),
    "a text of ids": (lambda a: a.redrive(ids="17"), "ids must be a list"),
    "an id": (lambda a: a.bulk_cancel(ids=["x"]), "must be a 64-bit integer"),
    "a limit": (lambda a: a.redrive(limit=0), "limit must be a whole number of 1 or more, got 0"),
    "a queue": (lambda a: a.bulk_move(""), "cannot be the name of a queue"),
    "a template": (
        lambda a: a.redrive(to="logs.{level}"),
        "templates such as .* are not supported",
    ),
    "a key": (lambda a: a.bulk_cancel(key="a\x00"), "key must be text without NUL"),
    "a key with a space": (lambda a: a.bulk_cancel(key="k "), "key must not end in a space"),
    "an archived state": (lambda a: a.bulk_move("m", state="FAILED"), "got state='FAILED'"),
    "the archive": (lambda a: a.bulk_retry(archived=True), "got archived=True"),
    "an error": (lambda a: a.bulk_cancel(error=5), "error must be text"),
    "a reason": (lambda a: a.redrive(reason="\ud800"), "reason must be text"),
    "headers": (lambda a: a.bulk_cancel(headers="a=b"), "headers must map names to texts"),
    "a header": (lambda a: a.bulk_cancel(headers={"a": "\x00"}), "the header 'a' must be text"),
    "a job's id": (lambda a: a.job("\ud800"), "job_id must be the id of a job"),
    "a page": (lambda a: a.audit(before="\x00"), "before must be text"),
    "a state": (
        lambda a: a.redrive(state="COMPLETED"),
        "redrive needs the state FAILED or DISCARDED",
    ),
    "a live state": (lambda a: a.replay("n", state="PENDING"), "no archived message is PENDING"),
    "a name": (lambda a: a.replay(""), "cannot be the name of a replay"),
    "an age": (lambda a: a.bulk_cancel(since="yesterday"), "since"),
    "dry_run": (lambda a: a.redrive(dry_run="no"), "dry_run"),
    "a job": (lambda a: a.wait_for_job("x"), "job 'x' does not exist"),
    "an undo": (lambda a: a.undo("x"), "job 'x' does not exist"),
    "a stop": (lambda a: a.stop_job("x"), "job 'x' does not exist"),
    "a resume": (lambda a: a.resume_job("x"), "job 'x' does not exist"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_wrong_arguments_are_refused(broker: SqlBroker, what: str) -> None:
    call, words = REFUSED[what]
    with pytest.raises(SetupError, match=words):
        await call(broker.admin)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_only_what_is_planned_is_run_and_only_bulk_actions_are_undone(
    broker: SqlBroker,
) -> None:
    message_id = await broker.publish("x", "q", delay=600.0) or 0
    ended = await broker.admin.bulk_retry(queue="q", dry_run=False)
    with pytest.raises(SetupError, match="job must be the result of a dry run"):
        await broker.admin.run_job(ended)
    assert (await broker.admin.cancel(message_id)).done
    [single, *_] = await broker.admin.audit()
    with pytest.raises(SetupError, match="cannot undo "):
        await broker.admin.undo(single.id)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_undo_of_a_cancel_without_an_archive_says_why_nothing_comes_back(
    make: Make,
) -> None:
    broker = make(schema=SqlBrokerSchemaConfig(message_archive_table_name=None))
    await broker.create_tables()
    await broker.publish("x", "q")
    job = await broker.admin.bulk_cancel(queue="q", dry_run=False)
    assert job.note is None
    undone = await broker.admin.undo(job.id)
    assert (undone.done, undone.skipped) == (0, 1)
    assert "there is no archive, so what was cancelled is deleted" in str(undone)
    [listed, _] = await broker.admin.audit()
    assert listed.note == undone.note

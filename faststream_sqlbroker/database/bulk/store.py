"""Bulk actions of operators: plans, jobs, and their batches."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, bindparam, delete, insert, select

from faststream_sqlbroker.core.access import Activities, Activity
from faststream_sqlbroker.core.bulk_jobs import (
    CANCEL,
    MOVE,
    REPLAY,
    RETRY,
    UNDO,
    Failure,
    Job,
    Position,
    get_error_kind,
    parse_job,
)
from faststream_sqlbroker.core.halving import write_in_halves
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.core.text import clean_text
from faststream_sqlbroker.database.bulk import replay, visits
from faststream_sqlbroker.database.bulk.changes import CHANGES, UNDOS
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.parts import audit
from faststream_sqlbroker.database.parts.audit import JOB, record_action
from faststream_sqlbroker.database.parts.live_subscribers import notify_state_changed
from faststream_sqlbroker.database.parts.message_walks import STEP_SIZE
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.exceptions import AccessError, StoreError, TransientStoreError
from faststream_sqlbroker.schema.types import clock

T = TypeVar("T")

BATCH_SIZE = 500
"""Maximum messages that one transaction changes: it keeps them locked until it commits."""
COUNT_SIZE = STEP_SIZE - 1
"""Maximum messages that one transaction counts, so that it does not last long. One row more tells
whether there are more: both are in one step of the index range.
"""
REFUSED_PAUSE = 60.0
"""Seconds for which a job pauses that cannot run here; other jobs go on."""
GONE = "there is no archive, so what was cancelled is deleted and cannot come back"
"""Note of the undo of a cancel, which skips all messages."""
LIST_SCOPE = "job:"
"""Prefix of the scope of a job's notes, followed by its id; the key is the message's id."""
LIST_RETENTION = 30 * 86_400.0
"""Seconds for which the notes of a job are stored: without them nothing can be undone."""
MAX_ERROR_BYTES = 500
"""Maximum bytes stored of a message's error; a job's row has up to twenty errors."""
ACTIVITIES: Mapping[str, Activities] = {
    CANCEL: frozenset({Activity.OPERATE, Activity.REPAIR}),
    RETRY: frozenset({Activity.OPERATE, Activity.REPAIR}),
    MOVE: frozenset({Activity.OPERATE, Activity.REPAIR}),
}
"""Activities in the database by job action; other actions need `ALL_ACTIVITIES`."""
ALL_ACTIVITIES = frozenset({Activity.OPERATE, Activity.REPAIR, Activity.REDRIVE})


def get_activities(action: str) -> Activities:
    """Return the activities of a job of `action` in the database."""
    return ACTIVITIES.get(action, ALL_ACTIVITIES)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a call of `run_step`."""

    job: Job | None
    """The current job; None if none is due."""
    pause: float | None
    """Seconds until the next batch is due; None if no batch remains."""


@dataclass(frozen=True, slots=True)
class _BatchPart:
    """The part of a batch that a transaction handles."""

    size: int
    """Number of messages to visit."""
    failure: Failure | None = None
    """The only message is skipped: the database has refused it."""
    kind: str = ""
    """Kind of the error with which it was refused."""


@dataclass(slots=True)
class _BatchState:
    """The state of the last transaction of a batch."""

    job: Job | None = None
    """The job before the transaction; None if none was due."""
    ids: Sequence[int] = ()
    """The visited messages."""
    step: StepResult | None = None
    """The result of the last committed transaction."""


def _split_part(state: _BatchState, part: _BatchPart, error: StoreError) -> list[_BatchPart]:
    """Split `part`, which the database has refused, to find the refused message.

    A part is the messages of a batch that one transaction handles. A part of one message becomes a
    part that only records the failure, and the job continues.

    Raises:
        StoreError: `error`, which no message has caused.
    """
    # A missing right refuses every message, and a recorded failure changes no message.
    if isinstance(error, AccessError) or part.failure is not None or not state.ids:
        raise error
    if half := len(state.ids) // 2:
        return [_BatchPart(half), _BatchPart(len(state.ids) - half)]
    failure = Failure(state.ids[0], clean_text(str(error), limit=MAX_ERROR_BYTES))
    return [_BatchPart(1, failure, get_error_kind(error))]


class JobStore(StoreSubject):
    """Reads and writes jobs; each operation is a transaction, a count is several.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    async def plan(self, job: Job) -> Job:
        """Return `job` with the exact number of messages to visit; writes nothing.

        The dry run of a job. It also fixes the last message to visit (`bound`), so that messages
        which come later are not visited, and turns ages into times. One transaction counts a
        limited number. For a job with ids, the note says why some are not visited.
        """

        def begin(connection: Connection) -> Job:
            now = self._dialect.now(connection)
            bound = visits.find_last_position(connection, self._dialect, job.action)
            filters = None if job.filters is None else _resolve_ages(job.filters, now)
            return replace(job, filters=filters, bound=bound)

        planned = await self._run_read(begin)
        queues: Counter[str] = Counter()
        progress = planned
        has_more = planned.bound is not None
        while has_more:
            rows, after, bound = await self._run_read(
                partial(
                    visits.read_next,
                    dialect=self._dialect,
                    job=progress,
                    size=COUNT_SIZE,
                    names=["queue"],
                )
            )
            queues.update(row.queue for row in rows)
            progress = replace(
                progress,
                cursor=after,
                done=progress.done + len(rows),
                bound=bound or progress.bound,
            )
            has_more = after is not None
        planned = replace(
            planned, bound=progress.bound, queues=dict(queues), expected=progress.done
        )
        if planned.filters is None or not planned.filters.ids:
            return planned
        return replace(
            planned, note=await self._run_read(partial(self._describe_unmatched, job=planned))
        )

    def _describe_unmatched(self, connection: Connection, job: Job) -> str | None:
        """Describe why the job does not visit some requested ids; None if all are visited.

        For example, a message is unknown, in another state, or was replayed before under the same
        name.
        """
        assert job.filters is not None  # noqa: S101 - `plan` has looked
        ids = job.filters.ids
        rows = visits.list_matching(connection, self._dialect, job, ids, ("id",))
        replayed_ids: set[int] = set()
        if job.action == REPLAY:
            replayed_ids = visits.find_replayed(connection, self._dialect, job, ids)
        missing = sorted(set(ids) - {row.id for row in rows} | replayed_ids)
        states = visits.load_states(connection, self._dialect, missing)
        return job.note_unmatched(states, missing, replayed_ids) if missing else None

    async def start(self, job: Job, channel: str) -> Job:
        """Store the planned job, whose first batch is due immediately, and notify `channel`.

        Processes that run jobs listen there, and need not wait for their next poll. A job without
        messages has ended already.
        """

        def work(connection: Connection) -> Job:
            now = self._dialect.now(connection)
            is_empty = job.bound is None and job.action != UNDO
            stored = replace(job, state="ended" if is_empty else "running")
            started = audit.add_job(connection, self._table, stored, now)
            if self._dialect.can_listen and not is_empty:
                notify_state_changed(connection, channel)
            return started

        return await self._database.run(work, Activity.OPERATE)

    async def start_undo(self, job_id: str, by: str, channel: str) -> Job | None:
        """Store a job that undoes the job `job_id`; return None if no such job can be undone.

        The undone job ends: a stopped job must not be resumed while it is undone.
        """

        def work(connection: Connection) -> Job | None:
            job = audit.find_job(connection, self._table, job_id, lock=True)
            # A running batch has locked the row, so this has waited for its COMMIT.
            if job is None or not job.can_be_undone:
                return None
            undo = Job(
                action=UNDO,
                by=by,
                arguments={"of": job.id, "action": job.action, "scope": _get_list_scope(job)},
                rate=job.rate,
                state="running",
                expected=job.done,
                queues=job.queues,
                note=None if self._dialect.has_archive or job.action != CANCEL else GONE,
            )
            started = audit.add_job(connection, self._table, undo, self._dialect.now(connection))
            # Also for a stopped job: it must not go on while it is undone.
            ended = replace(job, undone_by=started.id, state="ended")
            audit.save_job(connection, self._table, ended, None)
            if self._dialect.can_listen:
                notify_state_changed(connection, channel)
            return started

        return await self._database.run(work, Activity.OPERATE)

    async def find(self, job_id: str) -> Job | None:
        """Return the current job."""
        return await self._run_read(lambda c: audit.find_job(c, self._table, job_id))

    async def list_jobs(self, before: str | None, limit: int) -> list[Job]:
        """Return up to `limit` jobs that are older than the job `before`, the latest first.

        Ids of jobs rise with time, so they serve as the cursor of the list.
        """
        c = self._table.c
        jobs = select(c.key, c.created_at, c.info).where(c.scope == JOB)
        if before is not None:
            jobs = jobs.where(c.key < before)
        statement = jobs.order_by(c.key.desc()).limit(limit)

        def load(connection: Connection) -> list[Job]:
            return [parse_job(*row) for row in connection.execute(statement)]

        return await self._run_read(load)

    async def stop(self, job_id: str, by: str = "") -> Job | None:
        """Stop the job after the running batch; return None if no such job exists."""
        audit_entry = ("stop_job", by)
        return await self._set_state(job_id, ("running",), "stopped", None, audit_entry)

    async def resume(self, job_id: str, by: str = "") -> Job | None:
        """Resume a job that was stopped or has failed; return None if no such job exists."""
        audit_entry = ("resume_job", by)
        return await self._set_state(job_id, ("stopped", "failed"), "running", 0.0, audit_entry)

    async def _set_state(
        self,
        job_id: str,
        allowed: Sequence[str],
        new_state: Any,
        pause: float | None,
        audit_entry: tuple[str, str],
    ) -> Job | None:
        """Change the job's state if allowed, and record the operator in the audit.

        The current state must be in `allowed`. `audit_entry` is the action and the operator. The
        next batch is due in `pause` seconds, or never. Returns the job, unchanged in another state;
        None if it does not exist.
        """

        def work(connection: Connection) -> Job | None:
            job = audit.find_job(connection, self._table, job_id, lock=True)
            if job is None or job.state not in allowed:
                return job
            # Without the streak (refusals in a row) a resumed job gets a new chance.
            job = replace(job, state=new_state, error=None, streak=None)
            audit.save_job(connection, self._table, job, pause)
            record_action(connection, self._dialect, *audit_entry, {"job": job_id})
            return job

        return await self._database.run(work, Activity.OPERATE)

    async def get_due_in(self, job_id: str | None = None) -> float | None:
        """Return the seconds until a batch of the job, or of any, is due; None without a batch."""
        return await self._run_read(lambda c: audit.get_due_in(c, self._dialect, job_id))

    async def run_step(self, job_id: str | None = None) -> StepResult:
        """Run a batch of the job, or of the first due job, if due and free.

        If the database refuses a batch, the batch is halved until the refused message is alone.
        That message is counted as failed, and the job goes on after it. If all messages of a batch
        are refused one by one with the same error, the job fails before that batch. A job that
        cannot run here pauses, so that other jobs go on; the second time it fails.
        """
        state = _BatchState()
        write = partial(self._run_part, state, job_id)
        try:
            await write_in_halves(_BatchPart(BATCH_SIZE), write, partial(_split_part, state))
        except TransientStoreError:
            raise
        except Exception as error:
            if state.job is not None:
                with suppress(StoreError):
                    await self._defer(state.job.id, error)
            raise
        assert state.step is not None  # noqa: S101 - the last transaction has set it
        return state.step

    async def _run_part(self, state: _BatchState, job_id: str | None, part: _BatchPart) -> None:
        """Run a part of a batch in a transaction, and store the result in `state`.

        A batch is one part, unless the database refuses a message: then smaller parts find it.
        Several processes may run the same job: each locks its row for a batch, and continues from
        the position stored there.
        """
        # The rest of a halved batch belongs to the same job.
        part_job_id = job_id if state.job is None else state.job.id

        def work(connection: Connection) -> StepResult:
            # The race of two processes at one job: the second skips the locked row, and reads the
            # position that the first has committed with its next call.
            state.ids = ()
            job = self._lock_due(connection, part_job_id)
            if job is None:
                stored = (
                    None
                    if part_job_id is None
                    else audit.find_job(connection, self._table, part_job_id)
                )
                return StepResult(stored, audit.get_due_in(connection, self._dialect, job_id))
            state.job = job
            max_size = (
                BATCH_SIZE if job.rate is None else min(BATCH_SIZE, max(1, math.ceil(job.rate)))
            )
            state.ids, cursor = self._find_next(connection, job, min(max_size, part.size))
            # An undo of a replay skips the marks of other runs, so `ids` may be empty: then only
            # the position moves.
            if part.failure is None or not state.ids:
                moved_job = self._apply_change(connection, job, state.ids, cursor)
            elif list(state.ids) == [part.failure.message_id]:
                moved_job = job.failed_at(cursor, part.failure, part.kind, max_size)
            else:
                # Another process has moved on, or the message has changed in the meantime.
                moved_job = job
            return self._save_progress(connection, job, moved_job, job_id)

        def get_doing() -> Activities:
            return ALL_ACTIVITIES if state.job is None else get_activities(state.job.action)

        state.step = await self._database.run(work, activity_source=get_doing)

    def _save_progress(
        self, connection: Connection, job: Job, moved_job: Job, job_id: str | None
    ) -> StepResult:
        """Write the position and counts of the locked job, and when the next batch is due.

        `job` is as it was before the batch, `moved_job` after it. Without `job_id` the result has
        a pause even after the end, because another job may be due.
        """
        # The rate counts visited messages of all processes: the pause is stored in the row.
        pause = 0.0 if job.rate is None else (moved_job.visited - job.visited) / job.rate
        ended = moved_job.state in ("ended", "failed")
        if moved_job.state != "failed":
            moved_job = replace(moved_job, error=None)
        if moved_job.state == "ended":
            moved_job = replace(moved_job, ended_at=self._dialect.now(connection))
        audit.save_job(connection, self._table, moved_job, None if ended else pause)
        return StepResult(moved_job, None if ended and job_id is not None else pause)

    async def _defer(self, job_id: str, error: Exception) -> None:
        """Pause the job after an error that no message has caused, such as a missing right.

        Another process may have the right that this process lacks. The job fails if it has paused
        for such an error before.
        """
        message = clean_text(str(error) or repr(error), limit=MAX_ERROR_BYTES)

        def work(connection: Connection) -> None:
            job = audit.find_job(connection, self._table, job_id, lock=True)
            if job is not None and job.state == "running":
                has_paused = job.error is not None
                paused = replace(job, error=message, state="failed" if has_paused else "running")
                audit.save_job(
                    connection, self._table, paused, None if has_paused else REFUSED_PAUSE
                )

        await self._database.run(work, Activity.OPERATE)

    def _lock_due(self, connection: Connection, job_id: str | None) -> Job | None:
        """Lock the job `job_id`, or the first due job; return None if none is due and free.

        A job whose row another process has locked is skipped: that process runs its batch.
        """
        c = self._table.c
        due = select(c.key, c.created_at, c.info).where(c.scope == JOB, c.due_at <= clock())
        if job_id is not None:
            due = due.where(c.key == job_id)
        locking = due.order_by(c.due_at, c.key).limit(1).with_for_update(skip_locked=True)
        row = connection.execute(locking).first()
        return None if row is None else parse_job(*row)

    def _apply_change(
        self, connection: Connection, job: Job, ids: Sequence[int], cursor: Position | None
    ) -> Job:
        """Change the messages `ids`, store the notes for an undo, and return the updated job.

        A note has the columns of a message before and after the change. A message that has a note
        was changed by this job before, and is skipped.
        """
        if job.action == UNDO:
            return self._undo(connection, job, ids, cursor)
        now = self._dialect.now(connection)
        if job.action == REPLAY:
            done = replay.replay(connection, self._dialect, job, ids, now) if ids else 0
            return job.advance(cursor, done=done, skipped=len(ids) - done)
        scope = _get_list_scope(job)
        # No message is changed twice, whatever its later state.
        unchanged = sorted(set(ids) - self._load_notes(connection, scope, ids).keys())
        changed = (
            CHANGES[job.action](connection, self._dialect, job, unchanged) if unchanged else {}
        )
        note_values = {
            "scope": scope,
            "created_at": now,
            "expires_at": now + timedelta(seconds=LIST_RETENTION),
        }
        if changed:
            connection.execute(
                insert(self._table),
                [
                    {**note_values, "key": str(message_id), "info": dict(changed[message_id])}
                    for message_id in sorted(changed)
                ],
            )
        return job.advance(cursor, done=len(changed), skipped=len(ids) - len(changed))

    def _find_next(
        self, connection: Connection, job: Job, size: int
    ) -> tuple[list[int], Position | None]:
        """Return the messages of the next batch, and the next position, or None at the end.

        An undo visits the messages that the undone job has notes of (their old columns). For a
        replay these are marks (rows that keep a message from being replayed twice), which other
        runs of the same name have written, too: those are skipped.
        """
        if job.action != UNDO:
            return visits.find_next(connection, self._dialect, job, size)
        after = "" if job.cursor is None else str(job.cursor[0])
        scope = str(job.arguments["scope"])
        # In the order of keys, so that removed notes do not matter: they are before the position.
        c = self._table.c
        statement = select(c.key, c.info).where(c.scope == scope, c.key > after).order_by(c.key)
        notes = connection.execute(statement.limit(size)).all()
        cursor = [notes[-1].key] if len(notes) == size else None
        run_id = job.arguments["of"]
        # The marks of a replay include all of its runs.
        return [
            int(row.key) for row in notes if (row.info or {}).get("run", run_id) == run_id
        ], cursor

    def _undo(
        self, connection: Connection, job: Job, ids: Sequence[int], cursor: Position | None
    ) -> Job:
        """Revert the changes of the messages `ids`, and remove the notes of reverted messages.

        A note has the columns of a message before and after the change. Messages that have changed
        since are skipped, and keep their notes.
        """
        scope = str(job.arguments["scope"])
        notes = self._load_notes(connection, scope, ids)
        undone = UNDOS[str(job.arguments["action"])](connection, self._dialect, notes)
        c = self._table.c
        statement = delete(self._table).where(c.scope == scope, c.key == bindparam("of_key"))
        if keys := sorted(str(message_id) for message_id in undone):
            connection.execute(statement, [{"of_key": key} for key in keys])
        return job.advance(cursor, done=len(undone), skipped=len(notes) - len(undone))

    def _load_notes(
        self, connection: Connection, scope: str, ids: Sequence[int]
    ) -> dict[int, Mapping[str, Any]]:
        """Return the notes that the job of `scope` has stored about the messages `ids`.

        A note has the columns of a message before and after the job's change.
        """
        notes: dict[int, Mapping[str, Any]] = {}
        c = self._table.c
        for part in iter_chunks([str(message_id) for message_id in ids]):
            statement = select(c.key, c.info).where(c.scope == scope, c.key.in_(part))
            notes.update((int(row.key), row.info or {}) for row in connection.execute(statement))
        return notes

    async def _run_read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.run(work, Activity.OPERATE, write=False)


def _get_list_scope(job: Job) -> str:
    """Return the scope of the job's notes about messages; a replay's notes are the marks."""
    return replay.get_scope(job) if job.action == REPLAY else LIST_SCOPE + job.id


def _resolve_ages(filters: Filters, now: datetime) -> Filters:
    """Return the filters with timestamps in place of ages, so that all batches use the same."""
    since, until = (
        now - timedelta(seconds=value) if isinstance(value, int | float) else value
        for value in (filters.since, filters.until)
    )
    return replace(filters, since=since, until=until)

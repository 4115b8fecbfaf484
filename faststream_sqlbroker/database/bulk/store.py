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
from faststream_sqlbroker.core.halving import write_in_halves
from faststream_sqlbroker.core.jobs import (
    CANCEL,
    MOVE,
    REPLAY,
    RETRY,
    UNDO,
    Failure,
    Job,
    Position,
    job_of,
    kind_of,
)
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.core.text import clean_text
from faststream_sqlbroker.database.bulk import replay, visits
from faststream_sqlbroker.database.bulk.changes import CHANGES, UNDOS
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import audit
from faststream_sqlbroker.database.parts.audit import JOB, note_action
from faststream_sqlbroker.database.parts.live_subscribers import notify_state_changed
from faststream_sqlbroker.database.parts.message_walks import STEP
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.exceptions import AccessError, StoreError, TransientStoreError
from faststream_sqlbroker.schema.types import clock

T = TypeVar("T")

BATCH = 500
"""Messages that one transaction changes at most: it keeps them locked until it commits."""
COUNTED = STEP - 1
"""Messages that one transaction counts at most, so that it does not last long. One row more tells
whether there are more: both are in one step of the walk."""
REFUSED_PAUSE = 60.0
"""Seconds for which a job rests that cannot be run here; other jobs go on."""
GONE = "there is no archive, so what was cancelled is deleted and cannot come back"
"""Of the undo of a cancel: it skips all messages."""
LIST = "job:"
"""The scope of what a job has changed is this and its id; the key is the message's id."""
LIST_KEPT = 30 * 86_400.0
"""Seconds that the list of what it has changed is kept: without it nothing can be undone."""
ERROR_BYTES = 500
"""Of an error that is kept of a message; a job's row has up to twenty."""
ACTIVITIES: Mapping[str, Activities] = {
    CANCEL: frozenset({Activity.OPERATE, Activity.REPAIR}),
    RETRY: frozenset({Activity.OPERATE, Activity.REPAIR}),
    MOVE: frozenset({Activity.OPERATE, Activity.REPAIR}),
}
"""What a job does in the database; what is not here does all of `ALL`."""
ALL = frozenset({Activity.OPERATE, Activity.REPAIR, Activity.REDRIVE})


def activities_of(action: str) -> Activities:
    """Return the activities of a job of `action` in the database."""
    return ACTIVITIES.get(action, ALL)


@dataclass(frozen=True, slots=True)
class Step:
    """What a call of `step` found."""

    job: Job | None
    """The job as it is now; None: there is none that is due."""
    pause: float | None
    """Seconds until the next batch is due; None: none is left."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one transaction is to do of a batch."""

    size: int
    """How many of the next messages it visits."""
    failure: Failure | None = None
    """The only message is left alone: the database has refused it."""
    kind: str = ""
    """Of the error with which it was refused."""


@dataclass(slots=True)
class _Tried:
    """What the last transaction of a batch has tried."""

    job: Job | None = None
    """As it was before; None: none was due."""
    ids: Sequence[int] = ()
    """The messages that it has visited."""
    step: Step | None = None
    """What the last transaction that was committed has done."""


def _smaller(tried: _Tried, part: _Part, error: StoreError) -> list[_Part]:
    """Split `part`, which the database has refused.

    Raises:
        StoreError: `error`, which no message has caused.
    """
    if isinstance(error, AccessError) or part.failure is not None or not tried.ids:
        raise error
    if half := len(tried.ids) // 2:
        return [_Part(half), _Part(len(tried.ids) - half)]
    failure = Failure(tried.ids[0], clean_text(str(error), limit=ERROR_BYTES))
    return [_Part(1, failure, kind_of(error))]


class JobStore:
    """Reads and writes jobs; each operation is one transaction, a count is several.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    async def plan(self, job: Job) -> Job:
        """Count what `job` would visit, exactly, and fix where it ends; nothing is written.

        With ids, its note says why it does not take some of them.
        """

        def begin(connection: Connection) -> Job:
            now = self._dialect.now(connection)
            bound = visits.last_row(connection, self._dialect, job.action)
            filters = None if job.filters is None else _absolute(job.filters, now)
            return replace(job, filters=filters, bound=bound)

        planned = await self._read(begin)
        queues: Counter[str] = Counter()
        at = planned
        goes_on = planned.bound is not None
        while goes_on:
            rows, after, bound = await self._read(
                partial(visits.read, dialect=self._dialect, job=at, size=COUNTED, names=["queue"])
            )
            queues.update(row.queue for row in rows)
            at = replace(at, cursor=after, done=at.done + len(rows), bound=bound or at.bound)
            goes_on = after is not None
        planned = replace(planned, bound=at.bound, queues=dict(queues), expected=at.done)
        if planned.filters is None or not planned.filters.ids:
            return planned
        return replace(planned, note=await self._read(partial(self._unmatched, job=planned)))

    def _unmatched(self, connection: Connection, job: Job) -> str | None:
        """Say why the job does not take some of its ids; None: it takes all."""
        assert job.filters is not None  # noqa: S101 - `plan` has looked
        ids = job.filters.ids
        rows = visits.matching(connection, self._dialect, job, ids, ("id",))
        replayed: set[int] = set()
        if job.action == REPLAY:
            replayed = visits.replayed(connection, self._dialect, job, ids)
        missing = sorted(set(ids) - {row.id for row in rows} | replayed)
        states = visits.states_of(connection, self._dialect, missing)
        return job.note_unmatched(states, missing, replayed) if missing else None

    async def begin(self, job: Job, channel: str) -> Job:
        """Store the planned job, whose first batch is due at once, and tell `channel` of it."""

        def work(connection: Connection) -> Job:
            now = self._dialect.now(connection)
            nothing = job.bound is None and job.action != UNDO
            stored = replace(job, state="ended" if nothing else "running")
            begun = audit.add(connection, self._table, stored, now)
            if self._dialect.can_listen and not nothing:
                notify_state_changed(connection, channel)
            return begun

        return await self._database.run(work, Activity.OPERATE)

    async def begin_undo(self, job_id: str, by: str, channel: str) -> Job | None:
        """Store a job that undoes this one; None: there is no such job, or it cannot be undone."""

        def work(connection: Connection) -> Job | None:
            job = audit.find(connection, self._table, job_id, lock=True)
            # A batch that runs now has locked the row, so this has waited for its COMMIT.
            if job is None or not job.can_be_undone:
                return None
            undo = Job(
                action=UNDO,
                by=by,
                arguments={"of": job.id, "action": job.action, "scope": _list_of(job)},
                rate=job.rate,
                state="running",
                expected=job.done,
                queues=job.queues,
                note=None if self._dialect.has_archive or job.action != CANCEL else GONE,
            )
            begun = audit.add(connection, self._table, undo, self._dialect.now(connection))
            # Also of a job that was stopped: it must not go on while it is undone.
            ended = replace(job, undone_by=begun.id, state="ended")
            audit.save(connection, self._table, ended, None)
            if self._dialect.can_listen:
                notify_state_changed(connection, channel)
            return begun

        return await self._database.run(work, Activity.OPERATE)

    async def find(self, job_id: str) -> Job | None:
        """The job as it is now."""
        return await self._read(lambda c: audit.find(c, self._table, job_id))

    async def listed(self, before: str | None, limit: int) -> list[Job]:
        """Up to `limit` jobs, the newest first; only those that are older than `before`."""
        c = self._table.c
        jobs = select(c.key, c.created_at, c.info).where(c.scope == JOB)
        if before is not None:
            jobs = jobs.where(c.key < before)
        newest = jobs.order_by(c.key.desc()).limit(limit)

        def read(connection: Connection) -> list[Job]:
            return [job_of(*row) for row in connection.execute(newest)]

        return await self._read(read)

    async def stop(self, job_id: str, by: str = "") -> Job | None:
        """Let the job rest behind its running batch; None: there is no such job."""
        noted = ("stop_job", by)
        return await self._set_state(job_id, ("running",), "stopped", None, noted)

    async def resume(self, job_id: str, by: str = "") -> Job | None:
        """Let a job go on that was stopped or has failed; None: there is no such job."""
        noted = ("resume_job", by)
        return await self._set_state(job_id, ("stopped", "failed"), "running", 0.0, noted)

    async def _set_state(
        self,
        job_id: str,
        before: Sequence[str],
        after: Any,
        pause: float | None,
        noted: tuple[str, str],
    ) -> Job | None:
        """Change the state if it is one of `before`; the audit notes what was done, and by whom."""

        def work(connection: Connection) -> Job | None:
            job = audit.find(connection, self._table, job_id, lock=True)
            if job is None or job.state not in before:
                return job
            job = replace(job, state=after, error=None, streak=None)
            audit.save(connection, self._table, job, pause)
            note_action(connection, self._dialect, *noted, {"job": job_id})
            return job

        return await self._database.run(work, Activity.OPERATE)

    async def due_in(self, job_id: str | None = None) -> float | None:
        """Seconds until the next batch of the job, or of any, is due; None: none is left."""
        return await self._read(lambda c: audit.due_in(c, self._dialect, job_id))

    async def step(self, job_id: str | None = None) -> Step:
        """Do one batch of the job, or of the first one that is due, if it is due and free.

        A batch that the database refuses is halved, until the message is alone that it refuses;
        that one is counted as failed, and the job goes on behind it. If a whole batch is refused
        with the same error, one by one, the job fails, in front of that batch. A job that cannot be
        run here rests, so that those behind it go on; the second time it fails.
        """
        tried = _Tried()
        write = partial(self._write, tried, job_id)
        try:
            await write_in_halves(_Part(BATCH), write, partial(_smaller, tried))
        except TransientStoreError:
            raise
        except Exception as error:
            if tried.job is not None:
                with suppress(StoreError):
                    await self._put_off(tried.job.id, error)
            raise
        assert tried.step is not None  # noqa: S101 - the last transaction has set it
        return tried.step

    async def _write(self, tried: _Tried, job_id: str | None, part: _Part) -> None:
        """Do a part of a batch in one transaction."""
        # Of a batch that was halved, the rest belongs to the same job.
        wanted = job_id if tried.job is None else tried.job.id

        def work(connection: Connection) -> Step:
            # The race of two processes at one job: the second skips the locked row, and finds the
            # position that the first one has committed when it asks again.
            tried.ids = ()
            job = self._lock_due(connection, wanted)
            if job is None:
                found = None if wanted is None else audit.find(connection, self._table, wanted)
                return Step(found, audit.due_in(connection, self._dialect, job_id))
            tried.job = job
            most = BATCH if job.rate is None else min(BATCH, max(1, math.ceil(job.rate)))
            tried.ids, cursor = self._next(connection, job, min(most, part.size))
            # Notes that are not of this job have no messages: only the position moves.
            if part.failure is None or not tried.ids:
                moved = self._change(connection, job, tried.ids, cursor)
            elif list(tried.ids) == [part.failure.message_id]:
                moved = job.failed_at(cursor, part.failure, part.kind, most)
            else:
                # Another process has gone on, or the message has changed since.
                moved = job
            return self._saved(connection, job, moved, job_id)

        def doing() -> Activities:
            return ALL if tried.job is None else activities_of(tried.job.action)

        tried.step = await self._database.run(work, doing=doing)

    def _saved(self, connection: Connection, job: Job, moved: Job, job_id: str | None) -> Step:
        """Write how far the locked job has come."""
        # The rate is of what was visited, in whichever process: the pause is in the row.
        pause = 0.0 if job.rate is None else (moved.visited - job.visited) / job.rate
        ended = moved.state in ("ended", "failed")
        if moved.state != "failed":
            moved = replace(moved, error=None)
        if moved.state == "ended":
            moved = replace(moved, ended_at=self._dialect.now(connection))
        audit.save(connection, self._table, moved, None if ended else pause)
        return Step(moved, None if ended and job_id is not None else pause)

    async def _put_off(self, job_id: str, error: Exception) -> None:
        """Let the job rest: another process may have the right that this one lacks. It fails if it
        has rested for such an error before.
        """
        text = clean_text(str(error) or repr(error), limit=ERROR_BYTES)

        def work(connection: Connection) -> None:
            job = audit.find(connection, self._table, job_id, lock=True)
            if job is not None and job.state == "running":
                again = job.error is not None
                rested = replace(job, error=text, state="failed" if again else "running")
                audit.save(connection, self._table, rested, None if again else REFUSED_PAUSE)

        await self._database.run(work, Activity.OPERATE)

    def _lock_due(self, connection: Connection, job_id: str | None) -> Job | None:
        """Lock the job, or the first of all, if its next batch is due and no other process is at
        it.
        """
        c = self._table.c
        due = select(c.key, c.created_at, c.info).where(c.scope == JOB, c.due_at <= clock())
        if job_id is not None:
            due = due.where(c.key == job_id)
        locking = due.order_by(c.due_at, c.key).limit(1).with_for_update(skip_locked=True)
        row = connection.execute(locking).first()
        return None if row is None else job_of(*row)

    def _change(
        self, connection: Connection, job: Job, ids: Sequence[int], cursor: Position | None
    ) -> Job:
        if job.action == UNDO:
            return self._undo(connection, job, ids, cursor)
        now = self._dialect.now(connection)
        if job.action == REPLAY:
            done = replay.replay(connection, self._dialect, job, ids, now) if ids else 0
            return job.moved(cursor, done=done, skipped=len(ids) - done)
        scope = _list_of(job)
        # No message is changed twice, whatever has become of it since.
        fresh = sorted(set(ids) - self._notes(connection, scope, ids).keys())
        changed = CHANGES[job.action](connection, self._dialect, job, fresh) if fresh else {}
        noted = {
            "scope": scope,
            "created_at": now,
            "expires_at": now + timedelta(seconds=LIST_KEPT),
        }
        if changed:
            connection.execute(
                insert(self._table),
                [{**noted, "key": str(i), "info": dict(changed[i])} for i in sorted(changed)],
            )
        return job.moved(cursor, done=len(changed), skipped=len(ids) - len(changed))

    def _next(
        self, connection: Connection, job: Job, size: int
    ) -> tuple[list[int], Position | None]:
        """The messages of the next batch, and the position behind them; None: the last ones."""
        if job.action != UNDO:
            return visits.visit(connection, self._dialect, job, size)
        after = "" if job.cursor is None else str(job.cursor[0])
        scope = str(job.arguments["scope"])
        # By key: what is forgotten on the way lies behind the position.
        c = self._table.c
        behind = select(c.key, c.info).where(c.scope == scope, c.key > after).order_by(c.key)
        noted = connection.execute(behind.limit(size)).all()
        cursor = [noted[-1].key] if len(noted) == size else None
        of = job.arguments["of"]
        # The marks of a replay are those of all its runs.
        return [int(row.key) for row in noted if (row.info or {}).get("run", of) == of], cursor

    def _undo(
        self, connection: Connection, job: Job, ids: Sequence[int], cursor: Position | None
    ) -> Job:
        scope = str(job.arguments["scope"])
        ours = self._notes(connection, scope, ids)
        undone = UNDOS[str(job.arguments["action"])](connection, self._dialect, ours)
        c = self._table.c
        noted = delete(self._table).where(c.scope == scope, c.key == bindparam("of_key"))
        if keys := sorted(str(i) for i in undone):
            connection.execute(noted, [{"of_key": key} for key in keys])
        return job.moved(cursor, done=len(undone), skipped=len(ours) - len(undone))

    def _notes(
        self, connection: Connection, scope: str, ids: Sequence[int]
    ) -> dict[int, Mapping[str, Any]]:
        """What is noted of each of `ids`."""
        notes: dict[int, Mapping[str, Any]] = {}
        c = self._table.c
        for part in chunks([str(i) for i in ids]):
            noted = select(c.key, c.info).where(c.scope == scope, c.key.in_(part))
            notes.update((int(row.key), row.info or {}) for row in connection.execute(noted))
        return notes

    async def _read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.run(work, Activity.OPERATE, write=False)


def _list_of(job: Job) -> str:
    """The scope of what the job notes of each message."""
    return replay.scope_of(job) if job.action == REPLAY else LIST + job.id


def _absolute(filters: Filters, now: datetime) -> Filters:
    """The filters with moments in place of ages."""
    since, until = (
        now - timedelta(seconds=value) if isinstance(value, int | float) else value
        for value in (filters.since, filters.until)
    )
    return replace(filters, since=since, until=until)

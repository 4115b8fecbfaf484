"""The audit: each row is an action of an operator, which has ended at once or is a job.

A batch locks its job's row first. The lock is the job's lease: what the batch changes, what it
notes for an undo, and the job's new position are one transaction, so a process that dies leaves
nothing half-done, and the next one, of whichever process, goes on behind the last committed batch.
"""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Table, bindparam, func, insert, null, select, update

from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.schema.types import later

if TYPE_CHECKING:
    from faststream_sqlbroker.core.jobs import Job

JOB = "job"
"""Scope of jobs; the key is the job's id, which sorts by time."""
KEPT = 365 * 86_400.0
"""Seconds that a job is kept, from its begin on."""
_RANDOM = 2
"""Bytes that tell jobs of one moment from each other."""


# A broker looks at its start whether a job is due. What a job holds is imported where there is one.


def add(connection: Connection, table: Table, job: "Job", now: datetime) -> "Job":
    """Store a new job at the database's time `now`; with its id and times."""
    from faststream_sqlbroker.core.jobs import job_info  # noqa: PLC0415

    stored = replace(
        job,
        id=f"{now:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(_RANDOM)}",
        created_at=now,
        ended_at=now if job.state == "ended" else None,
    )
    values = {"created_at": now, "expires_at": now + timedelta(seconds=KEPT)}
    due = now if stored.state == "running" else None
    statement = insert(table).values(scope=JOB, key=stored.id, due_at=due, **values)
    connection.execute(statement.values(info=job_info(stored)))
    return stored


def find(connection: Connection, table: Table, job_id: str, *, lock: bool = False) -> "Job | None":
    """The job, with `lock` locked until the transaction ends; a batch of it is waited for."""
    from faststream_sqlbroker.core.jobs import job_of  # noqa: PLC0415

    statement = select(table.c.key, table.c.created_at, table.c.info).where(*_one(table, job_id))
    row = connection.execute(statement.with_for_update() if lock else statement).first()
    return None if row is None else job_of(*row)


def due_in(connection: Connection, dialect: Dialect, job_id: str | None = None) -> float | None:
    """Seconds until the next batch of the job, or of any, is due; None: none is left."""
    c = dialect.tables.policy_state.c
    next_due = select(func.min(c.due_at)).where(c.scope == JOB, c.due_at.is_not(None))
    if job_id is not None:
        next_due = next_due.where(c.key == job_id)
    due: datetime | None = connection.execute(next_due).scalar_one()
    return None if due is None else max(0.0, (due - dialect.now(connection)).total_seconds())


def save(connection: Connection, table: Table, job: "Job", pause: float | None) -> None:
    """Write the job, whose row is locked; its next batch is due in `pause` seconds, or never."""
    from faststream_sqlbroker.core.jobs import job_info  # noqa: PLC0415

    due: Any = null() if pause is None else later(bindparam("pause"))
    statement = update(table).where(*_one(table, job.id)).values(info=job_info(job), due_at=due)
    connection.execute(statement, {} if pause is None else {"pause": round(pause * 1_000_000)})


def _one(table: Table, job_id: str) -> tuple[Any, ...]:
    return table.c.scope == JOB, table.c.key == job_id


def note_action(
    connection: Connection,
    dialect: Dialect,
    action: str,
    by: str,
    given: Mapping[str, Any],
    done: int = 1,
) -> None:
    """Note who did what on how many, in the transaction that does it, so that the audit is true.

    What is None in `given` is left out.
    """
    from faststream_sqlbroker.core.jobs import Job  # noqa: PLC0415

    arguments = {name: value for name, value in given.items() if value is not None}
    job = Job(action=action, by=by, arguments=arguments, state="ended", expected=done, done=done)
    add(connection, dialect.tables.policy_state, job, dialect.now(connection))

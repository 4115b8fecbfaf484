"""The audit log: each row is an action of an operator, either finished at once or a job.

A batch locks its job's row first. The lock is the job's lease: the changes of the batch, its
notes for an undo and the new position of the job are one transaction. So a process that dies
leaves nothing half-done, and any other process continues after the last committed batch.
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
    from faststream_sqlbroker.core.bulk_jobs import Job

JOB = "job"
"""Scope of jobs; the key is the job's id, which sorts by time."""
JOB_RETENTION = 365 * 86_400.0
"""Seconds for which a job is stored after its start."""
_RANDOM_BYTES = 2
"""Random bytes in a job id, which distinguish jobs created at the same time."""


# A broker checks at its start whether a job is due. Modules of jobs are imported only if there is
# one.


def add_job(connection: Connection, table: Table, job: "Job", now: datetime) -> "Job":
    """Store a new job at the database's time `now`; return the job with id and times.

    A job is an operator's action: either finished at once, and stored for the audit only, or due
    for its first batch. Its id sorts by time.
    """
    from faststream_sqlbroker.core.bulk_jobs import dump_job  # noqa: PLC0415

    stored = replace(
        job,
        id=f"{now:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(_RANDOM_BYTES)}",
        created_at=now,
        ended_at=now if job.state == "ended" else None,
    )
    values = {"created_at": now, "expires_at": now + timedelta(seconds=JOB_RETENTION)}
    due = now if stored.state == "running" else None
    statement = insert(table).values(scope=JOB, key=stored.id, due_at=due, **values)
    connection.execute(statement.values(info=dump_job(stored)))
    return stored


def find_job(
    connection: Connection, table: Table, job_id: str, *, lock: bool = False
) -> "Job | None":
    """Return the job; with `lock` also lock the row until the transaction ends.

    The lock is the right to run the next batch. It waits for a running batch of the job.
    """
    from faststream_sqlbroker.core.bulk_jobs import parse_job  # noqa: PLC0415

    statement = select(table.c.key, table.c.created_at, table.c.info).where(
        *_match_job(table, job_id)
    )
    row = connection.execute(statement.with_for_update() if lock else statement).first()
    return None if row is None else parse_job(*row)


def get_due_in(connection: Connection, dialect: Dialect, job_id: str | None = None) -> float | None:
    """Return the seconds until the next batch of the job, or of any job.

    None if no batch remains.
    """
    c = dialect.tables.policy_state.c
    next_due = select(func.min(c.due_at)).where(c.scope == JOB, c.due_at.is_not(None))
    if job_id is not None:
        next_due = next_due.where(c.key == job_id)
    due: datetime | None = connection.execute(next_due).scalar_one()
    return None if due is None else max(0.0, (due - dialect.now(connection)).total_seconds())


def save_job(connection: Connection, table: Table, job: "Job", pause: float | None) -> None:
    """Write the locked job; the next batch is due in `pause` seconds, or never.

    In the transaction of a batch, so that its changes and the job's new position are one.
    """
    from faststream_sqlbroker.core.bulk_jobs import dump_job  # noqa: PLC0415

    due: Any = null() if pause is None else later(bindparam("pause"))
    statement = (
        update(table).where(*_match_job(table, job.id)).values(info=dump_job(job), due_at=due)
    )
    connection.execute(statement, {} if pause is None else {"pause": round(pause * 1_000_000)})


def _match_job(table: Table, job_id: str) -> tuple[Any, ...]:
    return table.c.scope == JOB, table.c.key == job_id


def record_action(
    connection: Connection,
    dialect: Dialect,
    action: str,
    by: str,
    options: Mapping[str, Any],
    done: int = 1,
) -> None:
    """Record who did what with how many messages, for the audit.

    In the same transaction as the action, so that the audit is true. Options that are None are
    omitted.
    """
    from faststream_sqlbroker.core.bulk_jobs import Job  # noqa: PLC0415

    arguments = {name: value for name, value in options.items() if value is not None}
    job = Job(action=action, by=by, arguments=arguments, state="ended", expected=done, done=done)
    add_job(connection, dialect.tables.policy_state, job, dialect.now(connection))

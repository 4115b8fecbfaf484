"""Entries of the audit for actions that end at once."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Table, bindparam, delete, func, insert, null, select, update

from faststream_sqlbroker.core.jobs import Job, job_info, job_of
from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import clock, later

JOB = "job"
"""Scope of jobs; the key is the job's id, which sorts by time."""
LIST = "job:"
"""The scope of what a job has changed is this and its id; the key is the message's id."""
KEPT = 365 * 86_400.0
"""Seconds that a job is kept, from its begin on."""
LIST_KEPT = 30 * 86_400.0
"""Seconds that the list of what it has changed is kept: without it nothing can be undone."""
_RANDOM = 2
"""Bytes that tell jobs of one moment from each other."""


def add(connection: Connection, table: Table, job: Job, now: datetime) -> Job:
    """Store a new job at the database's time `now`; with its id and times."""
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


def find(connection: Connection, table: Table, job_id: str, *, lock: bool = False) -> Job | None:
    """The job, with `lock` locked until the transaction ends; a batch of it is waited for."""
    statement = select(table.c.key, table.c.created_at, table.c.info).where(*_one(table, job_id))
    row = connection.execute(statement.with_for_update() if lock else statement).first()
    return None if row is None else job_of(*row)


def lock_due(connection: Connection, table: Table, job_id: str | None) -> Job | None:
    """Lock the job, or the first of all, if its next batch is due and no other process is at it."""
    c = table.c
    due = select(c.key, c.created_at, c.info).where(c.scope == JOB, c.due_at <= clock())
    if job_id is not None:
        due = due.where(c.key == job_id)
    locking = due.order_by(c.due_at, c.key).limit(1).with_for_update(skip_locked=True)
    row = connection.execute(locking).first()
    return None if row is None else job_of(*row)


def next_due(connection: Connection, table: Table, job_id: str | None) -> datetime | None:
    """When the next batch of the job, or of any, is due; None: none is left."""
    c = table.c
    statement = select(func.min(c.due_at)).where(c.scope == JOB, c.due_at.is_not(None))
    if job_id is not None:
        statement = statement.where(c.key == job_id)
    found: datetime | None = connection.execute(statement).scalar_one()
    return found


def save(connection: Connection, table: Table, job: Job, pause: float | None) -> None:
    """Write the job, whose row is locked; its next batch is due in `pause` seconds, or never."""
    due: Any = null() if pause is None else later(bindparam("pause"))
    statement = update(table).where(*_one(table, job.id)).values(info=job_info(job), due_at=due)
    connection.execute(statement, {} if pause is None else {"pause": round(pause * 1_000_000)})


def listed(connection: Connection, table: Table, before: str | None, limit: int) -> list[Job]:
    """Up to `limit` jobs, the newest first; only those that are older than the job `before`."""
    c = table.c
    statement = select(c.key, c.created_at, c.info).where(c.scope == JOB)
    if before is not None:
        statement = statement.where(c.key < before)
    rows = connection.execute(statement.order_by(c.key.desc()).limit(limit))
    return [job_of(*row) for row in rows]


def _one(table: Table, job_id: str) -> tuple[Any, ...]:
    return table.c.scope == JOB, table.c.key == job_id


# What a job has changed, message by message.


def note_changed(
    connection: Connection,
    table: Table,
    scope: str,
    changed: Mapping[int, Mapping[str, Any]],
    now: datetime,
    kept: float = LIST_KEPT,
) -> None:
    """Note what is known of each message that was changed; none of them is noted already."""
    until = now + timedelta(seconds=kept)
    rows = [
        {"scope": scope, "key": str(i), "created_at": now, "info": dict(info), "expires_at": until}
        for i, info in sorted(changed.items())
    ]
    if rows:
        connection.execute(insert(table), rows)


def known(connection: Connection, table: Table, scope: str, ids: Iterable[int]) -> set[int]:
    """Those of `ids` that are noted."""
    found: set[int] = set()
    for part in chunks([str(i) for i in ids]):
        noted = select(table.c.key).where(table.c.scope == scope, table.c.key.in_(part))
        found |= {int(key) for key in connection.execute(noted).scalars()}
    return found


def noted(
    connection: Connection, table: Table, scope: str, after: str, limit: int
) -> list[tuple[str, Mapping[str, Any]]]:
    """Up to `limit` of what is noted, by key, behind the key `after`."""
    c = table.c
    statement = select(c.key, c.info).where(c.scope == scope, c.key > after)
    rows = connection.execute(statement.order_by(c.key).limit(limit))
    return [(row.key, row.info or {}) for row in rows]


def notes_of(
    connection: Connection, table: Table, scope: str, ids: Sequence[int]
) -> dict[int, Mapping[str, Any]]:
    """What is noted of each of `ids`."""
    found: dict[int, Mapping[str, Any]] = {}
    for part in chunks([str(i) for i in ids]):
        noted = select(table.c.key, table.c.info).where(
            table.c.scope == scope, table.c.key.in_(part)
        )
        found.update((int(row.key), row.info or {}) for row in connection.execute(noted))
    return found


def forget(connection: Connection, table: Table, scope: str, keys: Sequence[str]) -> None:
    """Remove what is noted under `keys`."""
    one = delete(table).where(table.c.scope == scope, table.c.key == bindparam("of_key"))
    if keys:
        connection.execute(one, [{"of_key": key} for key in keys])


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
    arguments = {name: value for name, value in given.items() if value is not None}
    job = Job(action=action, by=by, arguments=arguments, state="ended", expected=done, done=done)
    add(connection, dialect.tables.policy_state, job, dialect.now(connection))

"""A replay: archived messages published again as new ones, each once for a name.

The marks are those of a replay by Spark (`spark.replays`), so a message is replayed once for a name
whichever of both is used. Bodies do not leave the database.
"""

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    Connection,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    select,
    update,
)

from faststream_sqlbroker.core.jobs import Job
from faststream_sqlbroker.core.replays import REPLAY_JOB_HEADER, SCOPE, Copy, Plan, copy_row
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.bulk.visits import matching
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.policy_state import insert_new
from faststream_sqlbroker.exceptions import PublishError
from faststream_sqlbroker.schema.types import clock

REMEMBERED = 720 * 3600.0
"""Seconds for which a message is known to have been replayed; `replay` of Spark has the same
default."""
_READ = ("id", "queue", "priority", "key", "headers", "publish_count")
_WRITTEN = ("queue", "priority", "key", "headers", "publish_count", "origin_id")


def scope_of(job: Job) -> str:
    """The scope of the replay's marks."""
    return SCOPE + str(job.arguments["name"])


def replay(
    connection: Connection, dialect: Operations, job: Job, ids: Sequence[int], now: datetime
) -> int:
    """Publish the archived messages `ids` again, unless replayed before; how many."""
    copies = _copies(matching(connection, dialect, job, ids, _READ), job)
    # A replay by Spark may insert the same marks now: who sees its own token there publishes.
    token = uuid.uuid4()
    if not copies:
        return 0
    table = dialect.tables.policy_state
    # In the order of ids, as all tasks of Spark do: so they cannot deadlock.
    insert_new(connection, table, [_mark(copies[i], job, token, now) for i in sorted(copies)])
    ours = select(table.c.key).where(
        table.c.scope == scope_of(job),
        table.c.key.in_([str(i) for i in copies]),
        table.c.lease_token == token,
    )
    marked = [int(key) for key in connection.execute(ours).scalars()]
    kept = _lock(connection, dialect, marked)
    gone = [str(i) for i in marked if i not in kept]
    if gone:
        # A prune has removed them since they were read. A lake may still have them: without their
        # marks, a replay by Spark under this name publishes them.
        unmarked = and_(table.c.key.in_(gone), table.c.lease_token == token)
        connection.execute(delete(table).where(table.c.scope == scope_of(job), unmarked))
    if kept:
        _publish(connection, dialect, job, [copies[i] for i in marked if i in kept])
    return len(kept)


def _lock(connection: Connection, dialect: Operations, ids: Sequence[int]) -> set[int]:
    """Those of the archived messages that are still there, and stay until the commit."""
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the store has looked
    found = select(archive.c.id).where(archive.c.id.in_(ids)).order_by(archive.c.id)
    return set(connection.execute(found.with_for_update()).scalars())


def _copies(rows: Sequence[Any], job: Job) -> dict[int, Copy]:
    """By id what is published; without rows that no message can be made of."""
    plan = Plan(str(job.arguments["name"]), job.arguments.get("to"), {})
    found = {}
    for row in rows:
        fields = dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's public name for a row's mapping
        try:
            found[row.id] = copy_row({**fields, "bytes": 0}, plan)
        except PublishError:
            continue  # it is counted as skipped
    return found


def _mark(copy: Copy, job: Job, token: uuid.UUID, now: datetime) -> dict[str, Any]:
    return {
        "scope": scope_of(job),
        "key": str(copy.origin),
        "created_at": now,
        "lease_token": token,
        "info": {"run": job.id, "queue": copy.queue},
        "expires_at": now + timedelta(seconds=REMEMBERED),
    }


def _publish(connection: Connection, dialect: Operations, job: Job, copies: Sequence[Copy]) -> None:
    message = dialect.tables.message
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the store has looked
    # Ids rise, so what is inserted now is above this one; others may be, too.
    last = connection.execute(select(func.max(message.c.id))).scalar_one() or 0
    bound = [bindparam(f"new_{name}", type_=message.c[name].type) for name in _WRITTEN]
    copy = select(*bound, archive.c.payload, clock(), clock())
    names = [*_WRITTEN, "payload", "created_at", "next_attempt_at"]
    statement = insert(message).from_select(names, copy.where(archive.c.id == bindparam("of_id")))
    connection.execute(
        statement,
        [
            {"of_id": each.origin, **{f"new_{name}": each.values[name] for name in _WRITTEN}}
            for each in copies
        ],
    )
    _note_ids(connection, dialect, job, _published(connection, dialect, job, copies, last))


def _published(
    connection: Connection, dialect: Operations, job: Job, copies: Sequence[Copy], last: int
) -> Sequence[Any]:
    """The messages that were inserted: their ids are above `last`, the highest one before."""
    c = dialect.tables.message.c
    name: Any = c.headers[REPLAY_JOB_HEADER].as_string()
    if dialect.name == "sqlite":
        # Another program may have stored there what is not JSON, which would be an error.
        name = case((func.json_valid(c.headers) == 1, name))
    columns = c.id, c.origin_id, c.queue, c.next_attempt_at, c.priority, c.key
    ours = select(*columns).where(
        c.id > literal_column(str(int(last))),
        c.origin_id.in_([each.origin for each in copies]),
        name == str(job.arguments["name"]),
    )
    return connection.execute(ours).all()


def _note_ids(
    connection: Connection, dialect: Operations, job: Job, published: Sequence[Any]
) -> None:
    """Add the new messages to their marks, for an undo."""
    c = dialect.tables.policy_state.c
    one = update(dialect.tables.policy_state).where(
        c.scope == scope_of(job), c.key == bindparam("of_key")
    )
    binds: list[Mapping[str, Any]] = [
        {
            "of_key": str(row.origin_id),
            "new_info": {
                "run": job.id,
                "queue": row.queue,
                "message": row.id,
                "after": {
                    "queue": row.queue,
                    "due": to_microseconds(row.next_attempt_at),
                    "deliveries": 0,
                    "priority": row.priority,
                    "key": row.key,
                },
            },
        }
        for row in published
    ]
    if binds:
        connection.execute(one.values(info=bindparam("new_info")), binds)

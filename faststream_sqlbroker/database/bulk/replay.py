"""Replay: publish archived messages again as new ones, each once for a name.

The marks are those of a replay by Spark (`spark.replays`), so a message is replayed once for a
name whichever of both is used. Bodies do not leave the database.
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

from faststream_sqlbroker.core.bulk_jobs import Job
from faststream_sqlbroker.core.replays import (
    REPLAY_JOB_HEADER,
    REPLAY_SCOPE,
    ReplayCopy,
    ReplayPlan,
    copy_row,
)
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.bulk.visits import list_matching
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.policy_state import insert_new
from faststream_sqlbroker.exceptions import PublishError
from faststream_sqlbroker.schema.types import clock

MARK_RETENTION = 720 * 3600.0
"""Seconds for which the mark of a replayed message is stored; `replay` of Spark has the same
default.
"""
_SOURCE_COLUMNS = ("id", "queue", "priority", "key", "headers", "publish_count")
_COPY_COLUMNS = ("queue", "priority", "key", "headers", "publish_count", "origin_id")


def get_scope(job: Job) -> str:
    """Return the scope of the replay's marks."""
    return REPLAY_SCOPE + str(job.arguments["name"])


def replay(
    connection: Connection, dialect: DialectOperations, job: Job, ids: Sequence[int], now: datetime
) -> int:
    """Publish the archived messages `ids` again, unless replayed before; return their number.

    A mark in the policy state for each name and message keeps a message from being replayed twice,
    here or by Spark. Marks come first: only messages whose mark this run inserted are published.
    """
    copies = _build_copies(list_matching(connection, dialect, job, ids, _SOURCE_COLUMNS), job)
    # A replay by Spark may insert the same marks now: the run whose token is in the row publishes.
    token = uuid.uuid4()
    if not copies:
        return 0
    table = dialect.tables.policy_state
    # In the order of ids, as all tasks of Spark do, so that they cannot deadlock.
    insert_new(
        connection,
        table,
        [_build_mark(copies[message_id], job, token, now) for message_id in sorted(copies)],
    )
    statement = select(table.c.key).where(
        table.c.scope == get_scope(job),
        table.c.key.in_([str(message_id) for message_id in copies]),
        table.c.lease_token == token,
    )
    marked = [int(key) for key in connection.execute(statement).scalars()]
    locked = _lock(connection, dialect, marked)
    missing = [str(message_id) for message_id in marked if message_id not in locked]
    if missing:
        # A prune has removed these messages in the meantime. A lake may still have them: without
        # their marks, a replay by Spark under this name publishes them.
        condition = and_(table.c.key.in_(missing), table.c.lease_token == token)
        connection.execute(delete(table).where(table.c.scope == get_scope(job), condition))
    if locked:
        _publish(
            connection,
            dialect,
            job,
            [copies[message_id] for message_id in marked if message_id in locked],
        )
    return len(locked)


def _lock(connection: Connection, dialect: DialectOperations, ids: Sequence[int]) -> set[int]:
    """Lock archived messages until the commit; return the ids that still exist.

    A prune could otherwise delete them before their bodies are copied.
    """
    archive = dialect.archive
    statement = select(archive.c.id).where(archive.c.id.in_(ids)).order_by(archive.c.id)
    return set(connection.execute(statement.with_for_update()).scalars())


def _build_copies(rows: Sequence[Any], job: Job) -> dict[int, ReplayCopy]:
    """Return the messages to publish by the id of the original.

    A row that cannot be converted to a message is missing, and counts as skipped.
    """
    plan = ReplayPlan(str(job.arguments["name"]), job.arguments.get("to"), {})
    copies = {}
    for row in rows:
        fields = dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's public name for a row's mapping
        try:
            # The body is copied inside the database, so its size does not matter here.
            copies[row.id] = copy_row({**fields, "bytes": 0}, plan)
        except PublishError:
            continue  # counted as skipped
    return copies


def _build_mark(copy: ReplayCopy, job: Job, token: uuid.UUID, now: datetime) -> dict[str, Any]:
    """Build the mark of a replayed message; `token` shows which run has inserted the mark.

    A mark is a row of the policy state that keeps replays of the same name, here or by Spark, from
    publishing the message again.
    """
    return {
        "scope": get_scope(job),
        "key": str(copy.origin),
        "created_at": now,
        "lease_token": token,
        "info": {"run": job.id, "queue": copy.queue},
        "expires_at": now + timedelta(seconds=MARK_RETENTION),
    }


def _publish(
    connection: Connection, dialect: DialectOperations, job: Job, copies: Sequence[ReplayCopy]
) -> None:
    """Insert the copies, with bodies copied inside the database, and add their ids to the marks.

    A mark is the row of the policy state that records a replayed message. By the new id an undo
    finds the copy.
    """
    message = dialect.tables.message
    archive = dialect.archive
    # Ids rise, so the new messages are above this id; messages of others may be, too.
    last = connection.execute(select(func.max(message.c.id))).scalar_one() or 0
    bound = [bindparam(f"new_{name}", type_=message.c[name].type) for name in _COPY_COLUMNS]
    copy = select(*bound, archive.c.payload, clock(), clock())
    names = [*_COPY_COLUMNS, "payload", "created_at", "next_attempt_at"]
    statement = insert(message).from_select(names, copy.where(archive.c.id == bindparam("of_id")))
    connection.execute(
        statement,
        [
            {
                "of_id": source.origin,
                **{f"new_{name}": source.values[name] for name in _COPY_COLUMNS},
            }
            for source in copies
        ],
    )
    _save_new_ids(connection, dialect, job, _load_published(connection, dialect, job, copies, last))


def _load_published(
    connection: Connection,
    dialect: DialectOperations,
    job: Job,
    copies: Sequence[ReplayCopy],
    last: int,
) -> Sequence[Any]:
    """Return the inserted messages, found by their originals and the name of the replay.

    The INSERT … SELECT does not return ids on every database. Their ids are above `last`, the
    highest id before.
    """
    c = dialect.tables.message.c
    name: Any = c.headers[REPLAY_JOB_HEADER].as_string()
    if dialect.name == "sqlite":
        # Another program may have stored invalid JSON, which would raise an error.
        name = case((func.json_valid(c.headers) == 1, name))
    columns = c.id, c.origin_id, c.queue, c.next_attempt_at, c.priority, c.key
    statement = select(*columns).where(
        c.id > literal_column(str(int(last))),
        c.origin_id.in_([source.origin for source in copies]),
        name == str(job.arguments["name"]),
    )
    return connection.execute(statement).all()


def _save_new_ids(
    connection: Connection, dialect: DialectOperations, job: Job, published: Sequence[Any]
) -> None:
    """Add the ids of the new messages to the marks of their originals, for an undo.

    A mark records that a message was replayed. `after` is the copy as published: an undo deletes
    the copy only while it is unchanged.
    """
    c = dialect.tables.policy_state.c
    statement = update(dialect.tables.policy_state).where(
        c.scope == get_scope(job), c.key == bindparam("of_key")
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
        connection.execute(statement.values(info=bindparam("new_info")), binds)

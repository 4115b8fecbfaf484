"""What a job does with the messages of a batch, and what it notes of each so that it can be undone.

All of it happens under the lock of the job's row. A message is locked, or skipped if another
transaction has locked it, and changed only if it still matches.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, case, delete, insert, literal, or_, select, update

from faststream_sqlbroker.core.jobs import Job
from faststream_sqlbroker.core.policies.standby import stands_by
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts import brought_back
from faststream_sqlbroker.database.parts.job_walks import lock
from faststream_sqlbroker.database.parts.repairs import MOVED, due_at
from faststream_sqlbroker.schema.types import clock

Changed = Mapping[int, Mapping[str, Any]]
"""By message what is noted: `before` are columns as they were, `after` says how it was left."""
Change = Callable[[Connection, Operations, Job, Sequence[int]], Changed]
"""Changes those of the messages that may be changed."""

LOWERED = "lowered"
"""Under this name is noted which records of a lake's windows a redrive has lowered."""
_BEFORE_MOVE = (
    "id",
    "queue",
    "state",
    "attempts_count",
    "deliveries_count",
    "first_attempt_at",
    "last_attempt_at",
    "next_attempt_at",
    "dedup_id",
    "policy_marks",
    # Its marks say whether it is from the headers, and the other queue may go by another header.
    "policy_key",
    "hops",
)
_BEFORE_REDRIVE = (
    "id",
    "queue",
    "state",
    "attempts_count",
    "deliveries_count",
    "publish_count",
    "first_attempt_at",
    "last_attempt_at",
    "next_attempt_at",
    "acquired_at",
    "expires_at",
    "dedup_id",
    "hops",
    "archived_at",
    "reason",
    "related_id",
    "error_fingerprint",
)


def retry_now(connection: Connection, dialect: Operations, job: Job, ids: Sequence[int]) -> Changed:
    """Make the messages due now; what stands by keeps its place."""
    names = ("id", "queue", "next_attempt_at", "policy_marks")
    rows = lock(connection, dialect, job, ids, names)
    these = [row for row in rows if not _stands_by(row)]
    return _update(connection, dialect, these, due_at(dialect, 0.0))


def _stands_by(row: Any) -> bool:
    return stands_by(to_microseconds(row.next_attempt_at), row.policy_marks)


def move(connection: Connection, dialect: Operations, job: Job, ids: Sequence[int]) -> Changed:
    """Move the messages to another queue, with new counters."""
    rows = lock(connection, dialect, job, ids, _BEFORE_MOVE)
    return _update(connection, dialect, rows, {**MOVED, "queue": job.arguments["to"]})


def redrive(connection: Connection, dialect: Operations, job: Job, ids: Sequence[int]) -> Changed:
    """Bring messages of the archive back under their ids, due now, with new counters."""
    records = brought_back.lock_records(connection, dialect, ids)
    rows = lock(connection, dialect, job, ids, _BEFORE_REDRIVE)
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the store has looked
    to = job.arguments.get("to")
    new = {
        **{name: literal(value) for name, value in _FRESH.items()},
        **dict.fromkeys(_EMPTIED),
        "queue": archive.c.queue if to is None else literal(to),
        "publish_count": archive.c.publish_count + 1,
        "next_attempt_at": clock(),
    }
    lowered = bring_back(connection, dialect, [row.id for row in rows], new, records)
    noted = _noted(connection, dialect, rows)
    return {i: {**note, LOWERED: lowered.get(i, [])} for i, note in noted.items()}


_FRESH = {"state": "PENDING", "attempts_count": 0, "deliveries_count": 0, "hops": 0}
# Without an expiry, which is over by now: who brings it back wants it to run.
_EMPTIED = ("first_attempt_at", "last_attempt_at", "acquired_at", "dedup_id", "expires_at")


def bring_back(
    connection: Connection,
    dialect: Operations,
    ids: Sequence[int],
    new: Mapping[str, Any],
    records: Sequence[brought_back.LockedRecord],
) -> Mapping[int, list[list[Any]]]:
    """Move archived messages, which the transaction has locked, to the message table; `new` are
    expressions for columns that change, None for those that are left empty. `records` are those of
    their windows, which were locked before the messages.

    Returns:
        By message, the notes of the records that were lowered.
    """
    tables = dialect.tables
    assert tables.archive is not None  # noqa: S101 - the store has looked
    left_out = {name for name, value in new.items() if value is None}
    both = [c.name for c in tables.archive.c if c.name in tables.message.c]
    names = [name for name in both if name not in left_out]
    columns = [new.get(name, tables.archive.c[name]) for name in names]
    these = tables.archive.c.id.in_(ids)
    lowered: Mapping[int, list[list[Any]]] = {}
    if ids:
        # Both statements see the same rows: they are locked.
        if records:
            ended = select(tables.archive.c.id, tables.archive.c.archived_at).where(these)
            moments = [(row.id, row.archived_at) for row in connection.execute(ended)]
            lowered = brought_back.lower(connection, dialect, records, moments)
        copy = select(*columns).where(these)
        connection.execute(insert(tables.message).from_select(names, copy))
        connection.execute(delete(tables.archive).where(these))
    return lowered


def _update(
    connection: Connection, dialect: Operations, rows: Sequence[Any], values: Mapping[str, Any]
) -> Changed:
    table = dialect.tables.message
    if rows:
        these = table.c.id.in_([row.id for row in rows])
        connection.execute(update(table).where(these).values(dict(values)))
    return _noted(connection, dialect, rows)


def _noted(connection: Connection, dialect: Operations, rows: Sequence[Any]) -> Changed:
    """What was, and how the messages are left: read back, as the database's clock has set it."""
    if not rows:
        return {}
    c = dialect.tables.message.c
    left = select(
        c.id,
        c.queue,
        c.next_attempt_at.label("due"),
        c.deliveries_count.label("deliveries"),
        c.priority,
        c.key,
    )
    found = connection.execute(left.where(c.id.in_([row.id for row in rows])))
    after = {row.id: before_of(row) for row in found}
    return {row.id: {"before": before_of(row), "after": after[row.id]} for row in rows}


def before_of(row: Any) -> dict[str, Any]:
    """The columns of a row but its id, as JSON has them."""
    fields = dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's public name for a row's mapping
    del fields["id"]
    return _plain(fields)


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: to_microseconds(value) if isinstance(value, datetime) else value
        for name, value in fields.items()
    }


def note_cancelled(
    connection: Connection, dialect: Operations, ids: Sequence[int], text: str
) -> None:
    """Put `text` before the last error of the messages."""
    c = dialect.tables.message.c
    error = case(
        (or_(c.last_error.is_(None), c.last_error == ""), literal(text)),
        else_=literal(f"{text}\n").concat(c.last_error),
    )
    connection.execute(update(dialect.tables.message).where(c.id.in_(ids)).values(last_error=error))


def cancelled(connection: Connection, dialect: Operations, were: Sequence[Any]) -> Changed:
    """What is noted of messages that were cancelled: when they were archived, and what the archive
    does not keep of the rows that they `were`.
    """
    table = dialect.tables.archive
    if table is None:
        return {row.id: {} for row in were}
    marks = {row.id: {"policy_marks": row.policy_marks} for row in were}
    rows = connection.execute(select(table.c.id, table.c.archived_at).where(table.c.id.in_(marks)))
    return {
        row.id: {"before": marks[row.id], "after": _plain({"archived": row.archived_at})}
        for row in rows
    }

"""The changes of a job to the messages of a batch, the notes about them, and their undo.

Everything happens under the lock of the job's row. A message is locked, or skipped if another
transaction has locked it, and changed only if it still matches.

An undo reverts the changes of messages that nothing has touched since. A message counts as
untouched if it waits as the job has left it, with the same due time, deliveries, priority and
key; a cancelled message counts as untouched if it was archived by the job.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Connection,
    Table,
    bindparam,
    case,
    delete,
    insert,
    literal,
    select,
    update,
)

from faststream_sqlbroker.core.bulk_jobs import CANCEL, MOVE, REDRIVE, REPLAY, RETRY, Job, to_json
from faststream_sqlbroker.core.policies.flags import BURST, HELD_BURST
from faststream_sqlbroker.core.policies.standby import STANDBY, has_standby_flags
from faststream_sqlbroker.core.reasons import CANCELLED
from faststream_sqlbroker.core.settle import ARCHIVED_BEFORE
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.bulk.visits import CLAIMABLE, lock_matching
from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts import brought_back
from faststream_sqlbroker.database.parts.message_walks import get_readable_columns
from faststream_sqlbroker.database.parts.waiting_edits import (
    MOVED_VALUES,
    build_due_values,
    discard,
    is_standby_row,
)
from faststream_sqlbroker.schema.types import UtcTimestamp, clock

ChangeNotes = Mapping[int, Mapping[str, Any]]
"""Notes by message: `before` has the old columns, `after` says how the message was left."""
Change = Callable[[Connection, Dialect, Job, Sequence[int]], ChangeNotes]
"""Changes the messages that may be changed."""

# The flags say whether policy_key is from the headers, and the other queue may use another header.
_RESET_COLUMNS = (
    "id queue state attempts_count deliveries_count publish_count first_attempt_at last_attempt_at "
    "next_attempt_at acquired_at expires_at dedup_id hops policy_marks policy_key archived_at "
    "reason related_id error_fingerprint"
)
"""Columns whose old values a move or a redrive notes, as far as the table has them."""


def cancel(connection: Connection, dialect: Dialect, job: Job, ids: Sequence[int]) -> ChangeNotes:
    """Discard the messages, with the job's text before the last error of each.

    The notes have the time of archiving, by which an undo recognises the job's own rows, and values
    that the archive does not store.
    """
    rows = lock_matching(connection, dialect, job, ids, ("id", "queue", "policy_marks"))
    discard(connection, dialect, rows, str(job.arguments["text"]))
    archive = dialect.tables.archive
    if archive is None:
        # The messages are deleted: the notes only say that they were visited.
        return {row.id: {} for row in rows}
    flags = {row.id: {"policy_marks": row.policy_marks} for row in rows}
    query = select(archive.c.id, archive.c.archived_at).where(archive.c.id.in_(flags))
    return {
        row.id: {"before": flags[row.id], "after": to_json({"archived": row.archived_at})}
        for row in connection.execute(query)
    }


def retry_now(
    connection: Connection, dialect: DialectOperations, job: Job, ids: Sequence[int]
) -> ChangeNotes:
    """Make the messages due now.

    Standby messages stay unchanged: another message of their key is to be delivered in their place.
    """
    names = ("id", "queue", "next_attempt_at", "policy_marks")
    rows = lock_matching(connection, dialect, job, ids, names)
    changeable = [row for row in rows if not is_standby_row(row)]
    return _update(connection, dialect, changeable, build_due_values(dialect, 0.0))


def move(
    connection: Connection, dialect: DialectOperations, job: Job, ids: Sequence[int]
) -> ChangeNotes:
    """Move the messages to the job's queue, due now, with new counters; return undo notes."""
    rows = lock_matching(connection, dialect, job, ids, _list_columns(dialect.tables.message))
    return _update(connection, dialect, rows, {**MOVED_VALUES, "queue": job.arguments["to"]})


def redrive(
    connection: Connection, dialect: DialectOperations, job: Job, ids: Sequence[int]
) -> ChangeNotes:
    """Restore messages of the archive to the message table under their ids, due now.

    Their counters start again. An export records how many rows of an hour or a day (its window) it
    has loaded, and a prune compares the archive with that record. So the records are lowered; they
    are locked before the messages, in the order of the prune.
    """
    records = brought_back.lock_records(connection, dialect, ids)
    archive = dialect.archive
    rows = lock_matching(connection, dialect, job, ids, _list_columns(archive))
    target_queue = job.arguments.get("to")
    new_values = {
        **{name: literal(value) for name, value in _NEW_VALUES.items()},
        **dict.fromkeys(_NULL_COLUMNS),
        "queue": archive.c.queue if target_queue is None else literal(target_queue),
        "publish_count": archive.c.publish_count + 1,
        "next_attempt_at": clock(),
    }
    brought_back.restore_messages(
        connection, dialect, [row.id for row in rows], new_values, records
    )
    return _build_notes(connection, dialect, rows)


_NEW_VALUES = {"state": "PENDING", "attempts_count": 0, "deliveries_count": 0, "hops": 0}
# Without an expiry, which has passed by now: an operator who restores a message wants it to run.
_NULL_COLUMNS = ("first_attempt_at", "last_attempt_at", "acquired_at", "dedup_id", "expires_at")


def _list_columns(table: Table) -> list[str]:
    """Return the columns to note that exist in the table."""
    return [name for name in _RESET_COLUMNS.split() if name in table.c]


def _update(
    connection: Connection,
    dialect: DialectOperations,
    rows: Sequence[Any],
    values: Mapping[str, Any],
) -> ChangeNotes:
    """Set `values` in the locked `rows`, and return the notes for an undo.

    A note has the columns of a message before (from `rows`) and after the change.
    """
    table = dialect.tables.message
    if rows:
        condition = table.c.id.in_([row.id for row in rows])
        connection.execute(update(table).where(condition).values(dict(values)))
    return _build_notes(connection, dialect, rows)


def _build_notes(
    connection: Connection, dialect: DialectOperations, rows: Sequence[Any]
) -> ChangeNotes:
    """Return the notes of changed messages: the old columns, and the state that the job has left.

    `rows` were read before the change. Reads the messages back, because the database's clock has
    set some of the times. An undo compares `after` with the message, to see that nothing has
    touched it.
    """
    if not rows:
        return {}
    c = dialect.tables.message.c
    statement = select(
        c.id,
        c.queue,
        c.next_attempt_at.label("due"),
        c.deliveries_count.label("deliveries"),
        c.priority,
        c.key,
    )
    changed_rows = connection.execute(statement.where(c.id.in_([row.id for row in rows])))
    after = {row.id: to_json_values(row) for row in changed_rows}
    return {row.id: {"before": to_json_values(row), "after": after[row.id]} for row in rows}


def to_json_values(row: Any) -> dict[str, Any]:
    """Return the columns of a row as JSON values, without the id."""
    values: dict[str, Any] = to_json(row._mapping)  # noqa: SLF001 - SQLAlchemy's public name
    del values["id"]
    return values


# The undo of each change.

Notes = Mapping[int, Mapping[str, Any]]
"""Notes of the job by message: `before` and `after`."""
Undo = Callable[[Connection, DialectOperations, Notes], set[int]]


_UNRESTORED = {"dedup_id", "publish_count", "acquired_at", "expires_at"}
"""Columns that an undo of a move does not restore. Another message may have the first one by now,
and its index is unique. No move changes the others, and an operator needs no right to change
them.
"""


def undo_change(connection: Connection, dialect: DialectOperations, notes: Notes) -> set[int]:
    """Undo a retry or a move: restore the noted columns of untouched messages; return their ids.

    A message is untouched if it still waits as the job left it. A moved message takes part in
    bursts (messages of a key that Debounce joins) again. Its `dedup_id` stays removed: another
    message may have it now.
    """
    untouched = _lock_untouched(connection, dialect, notes)
    for names, message_ids in _group_by_columns(notes, untouched).items():
        table = dialect.tables.message
        restored = [name for name in names if name not in _UNRESTORED]
        values: dict[str, Any] = {name: bindparam(f"old_{name}") for name in restored}
        statement = update(table).where(table.c.id == bindparam("of_id")).values(values)
        restored_values = {
            message_id: _build_restored_values(notes[message_id]) for message_id in message_ids
        }
        connection.execute(
            statement,
            [
                _build_binds(table, message_id, restored_values[message_id], restored)
                for message_id in message_ids
            ],
        )
    return untouched


def undo_redrive(connection: Connection, dialect: DialectOperations, notes: Notes) -> set[int]:
    """Put untouched messages back into the archive with their old values, but archived now.

    A message is untouched if it still waits as the redrive left it. Readers of the archive have
    passed the time at which a message was first archived, and would never see the row there. The
    header `ARCHIVED_BEFORE` has that time. Returns the ids.
    """
    untouched = _lock_untouched(connection, dialect, notes)
    message = dialect.tables.message
    archive = dialect.archive
    condition = message.c.id.in_(untouched)
    columns = get_readable_columns(message, ("id", "headers"), dialect.name)
    headers_by_id = {
        row.id: row.headers for row in connection.execute(select(*columns).where(condition))
    }
    archive_notes = {
        message_id: {
            "before": _build_archive_values(notes[message_id]["before"], headers_by_id[message_id])
        }
        for message_id in untouched
    }
    for names, message_ids in _group_by_columns(archive_notes, untouched).items():
        copied = [c.name for c in archive.c if c.name not in {*names, "archived_at"}]
        old = [bindparam(f"old_{name}", type_=archive.c[name].type) for name in names]
        copy = select(*(message.c[name] for name in copied), *old, clock())
        select_one = copy.where(message.c.id == bindparam("of_id"))
        connection.execute(
            insert(archive).from_select([*copied, *names, "archived_at"], select_one),
            [
                _build_binds(archive, message_id, archive_notes[message_id]["before"], names)
                for message_id in message_ids
            ],
        )
    if untouched:
        connection.execute(delete(message).where(condition))
    return untouched


def _build_archive_values(before: Mapping[str, Any], stored: Any) -> dict[str, Any]:
    """Return the columns to set in the archive; `stored` are the headers as selected.

    Called to undo a redrive, which archives the message at a new time. The header `ARCHIVED_BEFORE`
    keeps the time of its real end, and the `publish_count` that tells this end from others.
    """
    old = {name: value for name, value in before.items() if name != "archived_at"}
    headers = load_headers(stored)
    archived_at = from_microseconds(before["archived_at"]).isoformat()
    archived_before = headers.get(ARCHIVED_BEFORE)
    # An earlier undo has restored the same end: the time that it stored is the first one.
    if (
        not isinstance(archived_before, dict)
        or archived_before.get("publish_count") != before["publish_count"]
    ):
        archived_before = {"at": archived_at, "publish_count": before["publish_count"]}
    return {**old, "headers": {**headers, ARCHIVED_BEFORE: archived_before}}


def undo_cancel(connection: Connection, dialect: DialectOperations, notes: Notes) -> set[int]:
    """Bring messages that the job discarded back to their queues; return their ids.

    They wait again, with their attempts and due times, but without a `dedup_id`, and take part in
    bursts (messages of a key that Debounce joins) again. Only messages that the job has archived,
    by the noted time, are restored.
    """
    archive = dialect.tables.archive
    if archive is None:
        return set()
    records = brought_back.lock_records(connection, dialect, list(notes))
    c = archive.c
    statement = select(c.id, c.archived_at).where(
        c.id.in_(list(notes)), c.state == "DISCARDED", c.reason == CANCELLED
    )
    rows = connection.execute(statement.with_for_update(skip_locked=True)).all()
    untouched = {
        row.id
        for row in rows
        if to_microseconds(row.archived_at) == notes[row.id].get("after", {}).get("archived")
    }
    state = case((c.attempts_count > 0, "RETRYABLE"), else_="PENDING")
    new_values = {"state": state, "dedup_id": None}
    brought_back.restore_messages(connection, dialect, sorted(untouched), new_values, records)
    flags_by_id = {
        message_id: _remove_burst_flags(notes[message_id].get("before", {}))
        for message_id in sorted(untouched)
    }
    binds = [
        {"of_id": message_id, "marks": flags} for message_id, flags in flags_by_id.items() if flags
    ]
    if binds:
        # Without the flags, Delay would shift the message a second time, for example.
        table = dialect.tables.message
        update_one = update(table).where(table.c.id == bindparam("of_id"))
        connection.execute(update_one.values(policy_marks=bindparam("marks")), binds)
    return untouched


def undo_replay(connection: Connection, dialect: DialectOperations, notes: Notes) -> set[int]:
    """Delete untouched copies that the replay has published; return the ids of their originals.

    A copy is untouched if it still waits as it was published. The caller removes the marks of the
    originals, which would keep them from being replayed again.
    """
    copies = {note["message"]: note for note in notes.values() if "message" in note}
    # Copies are found by their own ids; the notes are stored by the ids of the originals.
    untouched = _lock_untouched(connection, dialect, copies)
    table = dialect.tables.message
    if untouched:
        connection.execute(delete(table).where(table.c.id.in_(untouched)))
    return {message_id for message_id, note in notes.items() if note.get("message") in untouched}


CHANGES: Mapping[str, Change] = {CANCEL: cancel, RETRY: retry_now, MOVE: move, REDRIVE: redrive}
UNDOS: Mapping[str, Undo] = {
    CANCEL: undo_cancel,
    RETRY: undo_change,
    MOVE: undo_change,
    REDRIVE: undo_redrive,
    REPLAY: undo_replay,
}


def _lock_untouched(connection: Connection, dialect: DialectOperations, notes: Notes) -> set[int]:
    """Lock the messages that still wait as left by the job; return the ids.

    An undo must not revert later changes, or take a message from a worker.
    """
    c = dialect.tables.message.c
    columns = c.id, c.queue, c.next_attempt_at, c.deliveries_count, c.priority, c.key
    waiting = select(*columns).where(c.id.in_(list(notes)), *CLAIMABLE)
    rows = connection.execute(waiting.order_by(c.id).with_for_update(skip_locked=True)).all()
    return {row.id for row in rows if _is_unchanged(row, notes[row.id].get("after", {}))}


def _is_unchanged(row: Any, after: Mapping[str, Any]) -> bool:
    """Return True if the message is still as the job left the row, by the note `after`.

    An undo must not revert a later change: a delivery, a move, or an edit by an operator.
    """
    due: datetime = row.next_attempt_at
    current = {"queue": row.queue, "due": to_microseconds(due), "deliveries": row.deliveries_count}
    # Jobs of an earlier version have no notes of these.
    edited = {name: getattr(row, name) for name in ("priority", "key") if name in after}
    return {**current, **edited} == dict(after)


def _remove_burst_flags(before: Mapping[str, Any]) -> int:
    """Return the noted flags without the flags of a burst.

    A burst is a series of messages of one key (Debounce). It has gone on without this message.
    """
    return (before.get("policy_marks") or 0) & ~(BURST | HELD_BURST)


def _build_restored_values(note: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the column values that undo a change of a message.

    A standby message waits in case another message of its key is cancelled, expires or is moved;
    its due time is `STANDBY` later. Back in its old queue it must not stand by again, because that
    message may be gone: it gets its plain due time.
    """
    old_values: Mapping[str, Any] = note["before"]
    if note["after"]["queue"] == old_values["queue"]:
        return old_values
    due = old_values["next_attempt_at"]
    plain_due = due - STANDBY if has_standby_flags(due, old_values["policy_marks"]) else due
    return {
        **old_values,
        "next_attempt_at": plain_due,
        "policy_marks": _remove_burst_flags(old_values),
    }


def _group_by_columns(notes: Notes, ids: set[int]) -> dict[tuple[str, ...], list[int]]:
    """Group the messages by noted columns, so that each group takes a single statement.

    All messages of a job have the same columns, unless versions differ.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for message_id in sorted(ids):
        groups.setdefault(tuple(notes[message_id]["before"]), []).append(message_id)
    return groups


def _build_binds(
    table: Table,
    message_id: int,
    before: Mapping[str, Any],
    names: Iterable[str],
) -> dict[str, Any]:
    """Build the binds that restore the noted columns `names` of a message.

    Notes are JSON, in which times are microseconds; `before` has the old values.
    """
    binds: dict[str, Any] = {"of_id": message_id}
    for name in names:
        value = before[name]
        is_time = isinstance(table.c[name].type, UtcTimestamp)
        binds[f"old_{name}"] = from_microseconds(value) if is_time and value is not None else value
    return binds

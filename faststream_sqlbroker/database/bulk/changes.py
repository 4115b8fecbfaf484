"""What a job does with the messages of a batch, what it notes of each, and how that is undone.

All of it happens under the lock of the job's row. A message is locked, or skipped if another
transaction has locked it, and changed only if it still matches.

An undo takes back what was done with messages that nothing has touched since. A message counts as
untouched if it waits where the job has left it, with the due time, the deliveries, the priority and
the key of then; a cancelled one if it was archived by the job.
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

from faststream_sqlbroker.core.jobs import CANCEL, MOVE, REDRIVE, REPLAY, RETRY, Job, plain
from faststream_sqlbroker.core.policies.flags import BURST, HELD_BURST
from faststream_sqlbroker.core.policies.standby import STANDBY, stands_by
from faststream_sqlbroker.core.reasons import CANCELLED
from faststream_sqlbroker.core.settle import ARCHIVED_BEFORE
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.bulk.visits import CLAIMABLE, lock
from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts import brought_back
from faststream_sqlbroker.database.parts.message_walks import shown_columns
from faststream_sqlbroker.database.parts.repairs import MOVED, discard, due_at, is_standing
from faststream_sqlbroker.schema.types import UtcTimestamp, clock

Changed = Mapping[int, Mapping[str, Any]]
"""By message what is noted: `before` are columns as they were, `after` says how it was left."""
Change = Callable[[Connection, Dialect, Job, Sequence[int]], Changed]
"""Changes those of the messages that may be changed."""

# The marks say whether policy_key is from the headers, and the other queue may go by another one.
_SET_ANEW = (
    "id queue state attempts_count deliveries_count publish_count first_attempt_at last_attempt_at "
    "next_attempt_at acquired_at expires_at dedup_id hops policy_marks policy_key archived_at "
    "reason related_id error_fingerprint"
)
"""Columns of which a move or a redrive notes the values before, as far as the table has them."""


def cancel(connection: Connection, dialect: Dialect, job: Job, ids: Sequence[int]) -> Changed:
    """Discard the messages, with the job's text before the last error of each.

    Noted is when they were archived, and what the archive does not keep of the rows.
    """
    rows = lock(connection, dialect, job, ids, ("id", "queue", "policy_marks"))
    discard(connection, dialect, rows, str(job.arguments["text"]))
    archive = dialect.tables.archive
    if archive is None:
        return {row.id: {} for row in rows}
    marks = {row.id: {"policy_marks": row.policy_marks} for row in rows}
    ended = select(archive.c.id, archive.c.archived_at).where(archive.c.id.in_(marks))
    return {
        row.id: {"before": marks[row.id], "after": plain({"archived": row.archived_at})}
        for row in connection.execute(ended)
    }


def retry_now(connection: Connection, dialect: Operations, job: Job, ids: Sequence[int]) -> Changed:
    """Make the messages due now; what stands by keeps its place."""
    names = ("id", "queue", "next_attempt_at", "policy_marks")
    rows = lock(connection, dialect, job, ids, names)
    these = [row for row in rows if not is_standing(row)]
    return _update(connection, dialect, these, due_at(dialect, 0.0))


def move(connection: Connection, dialect: Operations, job: Job, ids: Sequence[int]) -> Changed:
    """Move the messages to another queue, with new counters."""
    rows = lock(connection, dialect, job, ids, _columns_of(dialect.tables.message))
    return _update(connection, dialect, rows, {**MOVED, "queue": job.arguments["to"]})


def redrive(connection: Connection, dialect: Operations, job: Job, ids: Sequence[int]) -> Changed:
    """Bring messages of the archive back under their ids, due now, with new counters."""
    records = brought_back.lock_records(connection, dialect, ids)
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the store has looked
    rows = lock(connection, dialect, job, ids, _columns_of(archive))
    to = job.arguments.get("to")
    new = {
        **{name: literal(value) for name, value in _FRESH.items()},
        **dict.fromkeys(_EMPTIED),
        "queue": archive.c.queue if to is None else literal(to),
        "publish_count": archive.c.publish_count + 1,
        "next_attempt_at": clock(),
    }
    brought_back.bring_back(connection, dialect, [row.id for row in rows], new, records)
    return _noted(connection, dialect, rows)


_FRESH = {"state": "PENDING", "attempts_count": 0, "deliveries_count": 0, "hops": 0}
# Without an expiry, which is over by now: who brings it back wants it to run.
_EMPTIED = ("first_attempt_at", "last_attempt_at", "acquired_at", "dedup_id", "expires_at")


def _columns_of(table: Table) -> list[str]:
    return [name for name in _SET_ANEW.split() if name in table.c]


def _update(
    connection: Connection, dialect: Operations, rows: Sequence[Any], values: Mapping[str, Any]
) -> Changed:
    table = dialect.tables.message
    if rows:
        these = table.c.id.in_([row.id for row in rows])
        connection.execute(update(table).where(these).values(dict(values)))
    return _noted(connection, dialect, rows)


def _noted(connection: Connection, dialect: Operations, rows: Sequence[Any]) -> Changed:
    """Note the messages before and after: read back, as the database's clock has set them."""
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
    noted: dict[str, Any] = plain(row._mapping)  # noqa: SLF001 - SQLAlchemy's public name
    del noted["id"]
    return noted


# The undo of each.

Notes = Mapping[int, Mapping[str, Any]]
"""What the job has noted, by message: `before` and `after`."""
Undo = Callable[[Connection, Operations, Notes], set[int]]


_LEFT = {"dedup_id", "publish_count", "acquired_at", "expires_at"}
"""Columns that an undo of a move leaves. Another message may have the first by now, and its index
is unique. No move changes the others, and an operator needs no right to change them."""


def undo_change(connection: Connection, dialect: Operations, notes: Notes) -> set[int]:
    """Set the columns to what they were; what was moved takes part in bursts anew. A `dedup_id`
    stays dropped: it may be used again.
    """
    untouched = _untouched(connection, dialect, notes)
    for names, rows in _by_columns(notes, untouched).items():
        table = dialect.tables.message
        restored = [name for name in names if name not in _LEFT]
        values: dict[str, Any] = {name: bindparam(f"old_{name}") for name in restored}
        one = update(table).where(table.c.id == bindparam("of_id")).values(values)
        before = {i: _anew(notes[i]) for i in rows}
        connection.execute(one, [_binds(table, i, before[i], restored) for i in rows])
    return untouched


def undo_redrive(connection: Connection, dialect: Operations, notes: Notes) -> set[int]:
    """Put the messages back into the archive as they were there, but archived now.

    Readers of the archive have passed the moment at which it was first archived, and would never
    see the row there. The header `ARCHIVED_BEFORE` keeps that moment.
    """
    untouched = _untouched(connection, dialect, notes)
    message = dialect.tables.message
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - they came from there
    these = message.c.id.in_(untouched)
    columns = shown_columns(message, ("id", "headers"), dialect.name)
    stored = {row.id: row.headers for row in connection.execute(select(*columns).where(these))}
    returned = {i: {"before": _archived_anew(notes[i]["before"], stored[i])} for i in untouched}
    for names, rows in _by_columns(returned, untouched).items():
        kept = [c.name for c in archive.c if c.name not in {*names, "archived_at"}]
        old = [bindparam(f"old_{name}", type_=archive.c[name].type) for name in names]
        copy = select(*(message.c[name] for name in kept), *old, clock())
        one = copy.where(message.c.id == bindparam("of_id"))
        connection.execute(
            insert(archive).from_select([*kept, *names, "archived_at"], one),
            [_binds(archive, i, returned[i]["before"], names) for i in rows],
        )
    if untouched:
        connection.execute(delete(message).where(these))
    return untouched


def _archived_anew(before: Mapping[str, Any], stored: Any) -> dict[str, Any]:
    """The columns that are set anew in the archive; `stored` are the headers as selected."""
    old = {name: value for name, value in before.items() if name != "archived_at"}
    headers = load_headers(stored)
    moment = from_microseconds(before["archived_at"]).isoformat()
    known = headers.get(ARCHIVED_BEFORE)
    # An earlier undo has put back the same end: the moment that it has kept is the first one.
    if not isinstance(known, dict) or known.get("publish_count") != before["publish_count"]:
        known = {"at": moment, "publish_count": before["publish_count"]}
    return {**old, "headers": {**headers, ARCHIVED_BEFORE: known}}


def undo_cancel(connection: Connection, dialect: Operations, notes: Notes) -> set[int]:
    """Let the messages wait again, with their attempts and due times, but without a `dedup_id`.
    They take part in bursts anew.
    """
    archive = dialect.tables.archive
    if archive is None:
        return set()
    records = brought_back.lock_records(connection, dialect, list(notes))
    c = archive.c
    ours = select(c.id, c.archived_at).where(
        c.id.in_(list(notes)), c.state == "DISCARDED", c.reason == CANCELLED
    )
    rows = connection.execute(ours.with_for_update(skip_locked=True)).all()
    untouched = {
        row.id
        for row in rows
        if to_microseconds(row.archived_at) == notes[row.id].get("after", {}).get("archived")
    }
    state = case((c.attempts_count > 0, "RETRYABLE"), else_="PENDING")
    new = {"state": state, "dedup_id": None}
    brought_back.bring_back(connection, dialect, sorted(untouched), new, records)
    marks = {i: _without_burst(notes[i].get("before", {})) for i in sorted(untouched)}
    binds = [{"of_id": i, "marks": of_one} for i, of_one in marks.items() if of_one]
    if binds:
        # Else Delay would shift it a second time, for example.
        table = dialect.tables.message
        one = update(table).where(table.c.id == bindparam("of_id"))
        connection.execute(one.values(policy_marks=bindparam("marks")), binds)
    return untouched


def undo_replay(connection: Connection, dialect: Operations, notes: Notes) -> set[int]:
    """Delete the copies; their originals can be replayed again, once the marks are gone."""
    copies = {note["message"]: note for note in notes.values() if "message" in note}
    # Their ids are of the copies; what is noted goes by the originals.
    untouched = _untouched(connection, dialect, copies)
    table = dialect.tables.message
    if untouched:
        connection.execute(delete(table).where(table.c.id.in_(untouched)))
    return {i for i, note in notes.items() if note.get("message") in untouched}


CHANGES: Mapping[str, Change] = {CANCEL: cancel, RETRY: retry_now, MOVE: move, REDRIVE: redrive}
UNDOS: Mapping[str, Undo] = {
    CANCEL: undo_cancel,
    RETRY: undo_change,
    MOVE: undo_change,
    REDRIVE: undo_redrive,
    REPLAY: undo_replay,
}


def _untouched(connection: Connection, dialect: Operations, notes: Notes) -> set[int]:
    """Lock the messages that wait as the job has left them; their ids."""
    c = dialect.tables.message.c
    columns = c.id, c.queue, c.next_attempt_at, c.deliveries_count, c.priority, c.key
    waiting = select(*columns).where(c.id.in_(list(notes)), *CLAIMABLE)
    rows = connection.execute(waiting.order_by(c.id).with_for_update(skip_locked=True)).all()
    return {row.id for row in rows if _is_as_left(row, notes[row.id].get("after", {}))}


def _is_as_left(row: Any, after: Mapping[str, Any]) -> bool:
    due: datetime = row.next_attempt_at
    now = {"queue": row.queue, "due": to_microseconds(due), "deliveries": row.deliveries_count}
    # A job of an earlier version has not noted these.
    edited = {name: getattr(row, name) for name in ("priority", "key") if name in after}
    return {**now, **edited} == dict(after)


def _without_burst(before: Mapping[str, Any]) -> int:
    """The marks of a message that has left its burst, which has gone on without it."""
    return (before.get("policy_marks") or 0) & ~(BURST | HELD_BURST)


def _anew(note: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is to be restored of a message."""
    before: Mapping[str, Any] = note["before"]
    if note["after"]["queue"] == before["queue"]:
        return before
    due = before["next_attempt_at"]
    plain = due - STANDBY if stands_by(due, before["policy_marks"]) else due
    return {**before, "next_attempt_at": plain, "policy_marks": _without_burst(before)}


def _by_columns(notes: Notes, ids: set[int]) -> dict[tuple[str, ...], list[int]]:
    """The messages by which columns were noted of them: all of a job have the same."""
    found: dict[tuple[str, ...], list[int]] = {}
    for i in sorted(ids):
        found.setdefault(tuple(notes[i]["before"]), []).append(i)
    return found


def _binds(
    table: Table,
    message_id: int,
    before: Mapping[str, Any],
    names: Iterable[str],
) -> dict[str, Any]:
    found: dict[str, Any] = {"of_id": message_id}
    for name in names:
        value = before[name]
        is_time = isinstance(table.c[name].type, UtcTimestamp)
        found[f"old_{name}"] = from_microseconds(value) if is_time and value is not None else value
    return found

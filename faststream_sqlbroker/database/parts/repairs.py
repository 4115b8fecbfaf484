"""Operators' changes of one message that waits: each locks its row first, and skips it if another
transaction has locked it.

A claim that comes first leaves the row PROCESSING, and nothing is changed; one that comes later
finds the changed row. So no worker's delivery is ever changed by an operator.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, false, literal_column, select, update
from sqlalchemy.sql.dml import Update

from faststream_sqlbroker.core.policies.flags import BURST, HEADER_KEY, HELD_BURST, KEPT
from faststream_sqlbroker.core.repairs import Repair
from faststream_sqlbroker.core.states import CLAIMABLE_STATES, MessageState
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.standby import standing
from faststream_sqlbroker.schema.types import clock, later

Change = Callable[[Connection, Any], None]
"""What is done with the locked row: its id, queue, state, key, marks and last_error, and whether
it stands by."""
OfLeased = Callable[[Connection, Any], Repair]
"""What is done of a row with a lease: its id, queue and lease_token, and whether that lease is
over."""
MOVED: dict[str, Any] = {
    "state": MessageState.PENDING.name,
    "attempts_count": 0,
    "deliveries_count": 0,
    "first_attempt_at": None,
    "last_attempt_at": None,
    "dedup_id": None,
    "policy_marks": 0,
    # A person has looked at it: the count of the broker's own moves begins anew.
    "hops": 0,
    "next_attempt_at": clock(),
}
"""The columns of a message that an operator moves, but its queue."""


def repair(
    connection: Connection,
    dialect: Operations,
    message_id: int,
    change: Change,
    of_leased: OfLeased | None = None,
) -> Repair:
    """Lock the message and change it, if it waits; `connection` is in a transaction that writes.

    `of_leased` is called if a subscriber has leased it, also if a handler's transaction has locked
    it.
    """
    table = dialect.tables.message
    c = table.c
    over = (c.lease_expires_at < clock()).label("over")
    columns = c.id, c.queue, c.state, c.policy_marks, c.last_error, c.lease_token, over
    stands = standing(table).label("stands")
    locking = select(*columns, stands).where(c.id == message_id)
    # Skipped, not waited for: a handler's transaction may hold its row for as long as it runs.
    row = connection.execute(locking.with_for_update(skip_locked=True)).first()
    if row is None:
        return _missing(connection, dialect, message_id, of_leased)
    if MessageState[row.state] not in CLAIMABLE_STATES:
        if of_leased is not None and row.lease_token is not None:
            return of_leased(connection, row)
        return Repair(message_id, "running", row.queue)
    change(connection, row)
    return Repair(message_id, "done", row.queue)


def _missing(
    connection: Connection, dialect: Operations, message_id: int, of_leased: OfLeased | None
) -> Repair:
    """Why no row could be locked."""
    tables = dialect.tables
    c = tables.message.c
    # Read without a lock, which shows a row that another transaction has locked. Its lease is not
    # over as long as that transaction lasts.
    live = select(c.id, c.queue, c.lease_token, false().label("over")).where(c.id == message_id)
    row = connection.execute(live).first()
    if row is not None:
        if of_leased is not None and row.lease_token is not None:
            return of_leased(connection, row)
        return Repair(message_id, "busy", row.queue)
    if tables.archive is not None:
        ended = select(tables.archive.c.id).where(tables.archive.c.id == message_id)
        if connection.execute(ended).first() is not None:
            return Repair(message_id, "ended")
    return Repair(message_id, "not_found")


def note(connection: Connection, dialect: Operations, row: Any, text: str) -> None:
    """Put `text` before the row's last error."""
    error = text if not row.last_error else f"{text}\n{row.last_error}"
    connection.execute(_of(dialect, row).values(last_error=error))


def set_due(dialect: Operations, at: datetime | float) -> Change:
    """Make the message due at a moment, or in so many seconds, unless it stands by."""

    def change(connection: Connection, row: Any) -> None:
        if not row.stands:
            connection.execute(_of(dialect, row).values(due_at(dialect, at)))

    return change


def set_fields(dialect: Operations, fields: dict[str, Any], at: datetime | float | None) -> Change:
    """Set columns, and the due time unless `at` is None; with another key it is part of no burst
    any more.
    """

    def change(connection: Connection, row: Any) -> None:
        values = dict(fields)
        if at is not None and not row.stands:
            values |= due_at(dialect, at)
        if "key" in fields and not _has_key(connection, dialect, row, fields["key"]):
            marks = row.policy_marks & ~(BURST | HELD_BURST)
            values["policy_marks"] = marks if at is None else marks & KEPT
            if at is not None or row.policy_marks & HELD_BURST:
                values["next_attempt_at"] = clock() if at is None else _moment(at)
        if values:
            connection.execute(_of(dialect, row).values(values))

    return change


def _has_key(connection: Connection, dialect: Operations, row: Any, key: str | None) -> bool:
    """Whether that is its key. Compared there: SQLite may hold text that is not UTF-8."""
    if row.policy_marks & HEADER_KEY:
        return True  # policies go by that of a header, which stays
    c = dialect.tables.message.c
    same = c.key.is_(None) if key is None else c.key == key
    return connection.execute(select(c.id).where(c.id == row.id, same)).first() is not None


def move_to(dialect: Operations, queue: str) -> Change:
    """Move the message as a handler's `Move` does: due now, with new counters."""
    values = {**MOVED, "queue": queue}
    return lambda connection, row: _run(connection, _of(dialect, row).values(values))


def _run(connection: Connection, statement: Update) -> None:
    connection.execute(statement)


def _of(dialect: Operations, row: Any) -> Update:
    table = dialect.tables.message
    return update(table).where(and_(table.c.id == row.id, table.c.queue == row.queue))


def due_at(dialect: Operations, at: datetime | float) -> dict[str, Any]:
    """What makes a message due at a moment, or in so many seconds: columns and their new values. It
    keeps no slot of a Throttle.

    Not for one that stands by: elsewhere, the message that is delivered in its place would not find
    it, and it would come after that one.
    """
    marks = dialect.tables.message.c.policy_marks.op("&")(KEPT)
    return {"next_attempt_at": _moment(at), "policy_marks": marks}


def _moment(at: datetime | float) -> Any:
    if isinstance(at, datetime):
        return at
    return later(literal_column(str(round(at * 1_000_000))))

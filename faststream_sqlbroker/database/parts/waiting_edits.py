"""Actions of operators on waiting messages, one or many: discard, move, make due."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, case, literal, literal_column, or_, update

from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies.flags import PERSISTENT_MASK
from faststream_sqlbroker.core.policies.standby import has_standby_flags
from faststream_sqlbroker.core.reasons import CANCELLED
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.policies.rows import PolicyRows
from faststream_sqlbroker.schema.types import clock, later

MOVED_VALUES: dict[str, Any] = {
    "state": MessageState.PENDING.name,
    "attempts_count": 0,
    "deliveries_count": 0,
    "first_attempt_at": None,
    "last_attempt_at": None,
    "dedup_id": None,
    "policy_marks": 0,
    # An operator has reviewed the message, so the count of the broker's own moves starts again.
    "hops": 0,
    "next_attempt_at": clock(),
}
"""New column values of a message that an operator moves, except its queue."""


def prepend_error(
    connection: Connection, dialect: DialectOperations, message_ids: Sequence[int], text: str
) -> None:
    """Put `text` before the last error of live messages.

    An operator's reason for a change; archived rows copy it, and the earlier error stays readable.
    """
    table = dialect.tables.message
    last = table.c.last_error
    error = case(
        (or_(last.is_(None), last == ""), literal(text)),
        else_=literal(f"{text}\n").concat(last),
    )
    condition = table.c.id.in_(message_ids)
    connection.execute(update(table).where(condition).values(last_error=error))


def discard(connection: Connection, dialect: Dialect, rows: Sequence[Any], text: str) -> None:
    """Discard the messages of locked `rows`, with `text` before the last error of each.

    `text` is the operator's reason. The messages wait: a leased message is cancelled by a request
    to its worker instead.
    """
    if rows:
        prepend_error(connection, dialect, [row.id for row in rows], text)
    by_queue: dict[str, list[int]] = {}
    for row in rows:
        by_queue.setdefault(row.queue, []).append(row.id)
    for queue, message_ids in sorted(by_queue.items()):
        ends = {message_id: Discard(CANCELLED) for message_id in message_ids}
        PolicyRows(dialect, connection, queue).discard(ends, keep=True)


def is_standby_row(row: Any) -> bool:
    """Return True if a message stands by, by due time and flags (`core.policies.standby`)."""
    return has_standby_flags(to_microseconds(row.next_attempt_at), row.policy_marks)


def build_due_values(dialect: DialectOperations, at: datetime | float) -> dict[str, Any]:
    """Return the new column values of a message that becomes due at a time, or in some seconds.

    The message keeps no slot of a Throttle. Do not use it for a standby message, in whose place a
    newer message of its key is to be delivered. The due time marks it as such: with another, it
    would not be discarded then, and be delivered after the newer message.
    """
    flags = dialect.tables.message.c.policy_marks.op("&")(PERSISTENT_MASK)
    return {"next_attempt_at": to_timestamp(at), "policy_marks": flags}


def to_timestamp(at: datetime | float) -> Any:
    """Return a time, or the time in so many seconds by the database's clock."""
    if isinstance(at, datetime):
        return at
    return later(literal_column(str(round(at * 1_000_000))))

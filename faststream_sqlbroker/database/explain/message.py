"""Why a message does not run: short reads in one snapshot, none of which counts a whole queue."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Column, Connection, and_, select

from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import Explanation, Reason, error_text, moment_text
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.explain.live import COLUMNS, LiveMessage
from faststream_sqlbroker.database.parts.claimed_rows import NEEDED_TIMES, UNREADABLE
from faststream_sqlbroker.database.parts.policy_state import ACK_FIRST
from faststream_sqlbroker.schema.types import MYSQL, UtcTimestamp, clock

_SNAPSHOT: dict[str, tuple[str, ...]] = {
    "postgresql": ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",),
    "sqlite": ("BEGIN",),
    **dict.fromkeys(
        MYSQL,
        (
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
            "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
        ),
    ),
}


def explain(connection: Connection, dialect: Dialect, message_id: int) -> Explanation:
    """Why message `message_id` is where it is.

    All reads see one snapshot. The transaction of `connection` must not have read before.
    """
    begin_snapshot(connection)
    table = dialect.tables.message
    of_id = table.c.id == message_id
    # First the two columns that are always readable, whatever another program has stored elsewhere.
    head = connection.execute(select(table.c.state, table.c.queue).where(of_id)).first()
    if head is None:
        return _ended(connection, dialect, message_id)
    row, wrong = _read(connection, [table.c[name] for name in COLUMNS], of_id)
    if row is None:
        words = (
            "its row holds what no message can have, such as a count that is not a number: "
            "the next claim rejects it"
        )
        reasons = [Reason("undecodable", words)]
    else:
        reasons = [*_unusable(wrong), *LiveMessage(connection, dialect, row).reasons()]
    return Explanation(message_id, MessageState[head.state], head.queue, tuple(reasons))


def _read(
    connection: Connection, columns: Sequence[Column[Any]], of_id: Any
) -> tuple[Any, list[str]]:
    """The row with `now`, and the names of its columns that hold an invalid time.

    Invalid times have the value that a claim would give them. No row if another column is invalid.
    """
    wrong: list[str] = []
    try:
        found = connection.execute(select(*columns, clock().label("now")).where(of_id))
        values = dict(found.mappings().one())
    except UNREADABLE:
        values, wrong = _read_singly(connection, columns, of_id)
    # MySQL's drivers read a zero date as None.
    wrong += [name for name in NEEDED_TIMES if values[name] is None and name not in wrong]
    times = {column.name for column in columns if isinstance(column.type, UtcTimestamp)}
    if not times.issuperset(wrong) or not _has_counts(values):
        return None, wrong
    values |= {name: values["now"] for name in NEEDED_TIMES if name in wrong}
    return SimpleNamespace(**values), wrong


def _read_singly(
    connection: Connection, columns: Sequence[Column[Any]], of_id: Any
) -> tuple[dict[str, Any], list[str]]:
    """The values with `now`, each read by itself, and the names of those that cannot be read; they
    are None.
    """
    values: dict[str, Any] = {"now": connection.execute(select(clock())).scalar_one()}
    unreadable: list[str] = []
    for column in columns:
        try:
            values[column.name] = connection.execute(select(column).where(of_id)).scalar_one()
        except UNREADABLE:
            values[column.name] = None
            unreadable.append(column.name)
    return values, unreadable


def _has_counts(values: Mapping[str, Any]) -> bool:
    return all(isinstance(values[name], int) for name in ("attempts_count", "deliveries_count"))


def _unusable(names: Sequence[str]) -> list[Reason]:
    if not names:
        return []
    due = ": it is due now" if "next_attempt_at" in names else ""
    words = (
        f"its {' and '.join(names)} is no time, as another program has written it{due}; the next "
        "claim puts that right, with a warning"
    )
    return [Reason("unusable_time", words)]


def begin_snapshot(connection: Connection) -> None:
    """From now on `connection` reads one snapshot, and writes nothing."""
    driver: Any = connection.connection.driver_connection
    # A listener of the application may have begun already. In SQLite every transaction is a
    # snapshot, so that is enough.
    if connection.dialect.name == "sqlite" and driver.in_transaction:
        return
    for statement in _SNAPSHOT[connection.dialect.name]:
        connection.exec_driver_sql(statement)


def _ended(connection: Connection, dialect: Dialect, message_id: int) -> Explanation:
    archive = dialect.tables.archive
    row = None
    if archive is not None:
        columns = (
            archive.c.state,
            archive.c.queue,
            archive.c.archived_at,
            archive.c.reason,
            archive.c.related_id,
            archive.c.last_error,
        )
        found = select(*columns, clock().label("now")).where(archive.c.id == message_id)
        row = connection.execute(found).first()
    if row is None:
        words = (
            "no message with this id is live or archived: it was never published, not kept in the "
            "archive, or removed from it"
        )
        return Explanation(message_id, None, None, (Reason("not_found", words),))
    words = f"it ended as {row.state} at {moment_text(row.archived_at, row.now)}"
    words += _why(row) + error_text(row.last_error)
    reasons = [Reason("archived", words, message_id=row.related_id)]
    reasons += _started(connection, dialect, row.queue, message_id, row.now)
    return Explanation(message_id, MessageState[row.state], row.queue, tuple(reasons))


def _why(row: Any) -> str:
    about = "" if row.related_id is None else f" (message {row.related_id})"
    return "" if row.reason is None else f": {row.reason}{about}"


def _started(
    connection: Connection, dialect: Dialect, queue: str, message_id: int, now: datetime
) -> list[Reason]:
    """What is known of the start of a message that ACK_FIRST removed."""
    table = dialect.tables.policy_state
    of = and_(table.c.scope == ACK_FIRST + queue, table.c.key == str(message_id))
    row = connection.execute(
        select(table.c.info, table.c.created_at, table.c.lease_expires_at).where(of)
    ).first()
    if row is None:
        return []
    worker = str((row.info or {}).get("worker"))
    since = moment_text(row.created_at, now)
    if row.lease_expires_at > now:
        words = (
            f"ACK_FIRST removed it, and {worker} began its handler {since}; its outcome is unknown "
            f"if that process gives no sign of life until {moment_text(row.lease_expires_at, now)}"
        )
        return [Reason("processing", words, until=row.lease_expires_at, worker=worker)]
    words = f"ACK_FIRST removed it, {worker} started its handler {since} and was not heard of again"
    return [Reason("unknown_outcome", words, worker=worker)]

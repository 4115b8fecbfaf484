"""Messages as operators see them.

Pages continue from the last row's position, in the order of an index; dead letters are grouped by
what they have in common; long handlers report progress.
"""

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Table, bindparam, case, func, literal_column, select

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.overview import DeadLetterGroup, DeadLetters
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import LiveSubscriber, find_holder
from faststream_sqlbroker.core.stored import (
    Filters,
    InvalidCursorError,
    MessagePage,
    Progress,
    StoredMessage,
    decode_body,
)
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.parts.message_walks import (
    MAX_SCANNED,
    IndexRange,
    Position,
    RangeReader,
    get_archive_range,
    get_readable_columns,
    iter_index_ranges,
)
from faststream_sqlbroker.database.parts.policy_state import upsert
from faststream_sqlbroker.schema.types import clock, later

T = TypeVar("T")

HIDDEN_COLUMNS = ("payload", "headers")
_VISIBLE_COLUMNS = {column.name for column in fields(StoredMessage)} - set(HIDDEN_COLUMNS) | {
    "lease_token"
}
COUNTED_COLUMNS = ("id", "queue", "reason", "error_fingerprint", "archived_at")
"""The columns of dead letters that are counted."""
GroupKey = tuple[str | None, str | None]
"""The fingerprint of a group of dead letters or, without a fingerprint, the reason."""
_HOUR_AGO: Any = literal_column(str(-3_600_000_000))
PROGRESS = "progress"
"""The scope of progress rows; the key is the message's id, the token that of the delivery."""
PROGRESS_RETENTION = 86_400.0
"""Seconds that a progress row is kept after its last write; the last row outlives its handler."""


@dataclass(slots=True)
class _DeadLetterCounts:
    """The counts of a group of dead letters so far."""

    newest_id: int
    first_at: datetime
    last_at: datetime
    last_hour: int = 0
    reasons: Counter[str | None] = field(default_factory=Counter)
    queues: Counter[str] = field(default_factory=Counter)

    def add_row(self, row: Any) -> None:
        """Add the counts of messages of the group that have the same reason and queue.

        `row` is the sum of one step of the scan.
        """
        self.first_at = min(self.first_at, row.first_at)
        if row.last_at > self.last_at:
            self.last_at = row.last_at
            self.newest_id = row.newest_id
        self.last_hour += int(row.last_hour)
        self.reasons[row.reason] += row.found
        self.queues[row.queue] += row.found


class StoredMessages(StoreSubject):
    """Stored messages, live and archived; each operation is a single transaction.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    @property
    def has_archive(self) -> bool:
        """True if finished messages can be kept."""
        return self._dialect.has_archive

    async def read_page(
        self, filters: Filters, limit: int, after: str | None, *, with_hidden: bool
    ) -> MessagePage:
        """Read up to `limit` messages; with `with_hidden`, also their headers and bodies.

        Raises:
            InvalidCursorError: `after` is not a cursor of this list.
        """
        tables = self._dialect.tables
        columns = _list_columns(
            tables.archive if filters.archived else tables.message, with_hidden=with_hidden
        )

        def read_page(connection: Connection) -> MessagePage:
            rows, cursor, scanned = self._list_rows(connection, columns, filters, limit, after)
            return MessagePage(tuple(self._to_messages(connection, rows)), cursor, scanned)

        return await self._run_read(read_page, with_hidden=with_hidden or bool(filters.headers))

    def _list_rows(
        self,
        connection: Connection,
        columns: Sequence[str],
        filters: Filters,
        limit: int,
        after: str | None,
    ) -> tuple[list[Any], str | None, datetime | None]:
        """List up to `limit` matching rows, from several index ranges in turn.

        A range is a part of a table in the order of an index, such as a priority of a queue; the
        cursor names the range and the last row. At most `MAX_SCANNED` rows are read, however few of
        them match.

        Returns:
            The rows; the cursor to continue from, None at the end; and the time of the last scanned
            row if
            the page ended at that limit.
        """
        name, position = (None, None) if after is None else _load_cursor(after)
        rows: list[Any] = []
        budget = MAX_SCANNED
        ranges = _skip_ranges(list(iter_index_ranges(connection, self._dialect, filters)), name)
        for index_range in ranges:
            start = position if index_range.name == name else None
            # Even when the page is full, one more row shows whether there is another page.
            capacity = limit - len(rows)
            reader = RangeReader(self._dialect, index_range, start, filters)
            matches, end = reader.read_rows(connection, columns, capacity, budget)
            rows += matches[:capacity]
            if matches[:capacity]:
                after = _dump_cursor(
                    index_range,
                    [getattr(matches[:capacity][-1], str(c.key)) for c in index_range.order],
                )
            if len(matches) > capacity:
                return rows, after, None
            if end is not None:
                # Continue from the end rather than from the last match: the rows in between have
                # been scanned.
                return rows, _dump_cursor(index_range, end), reader.get_time(connection, end)
            if index_range is not ranges[-1]:
                budget -= reader.count_scanned(connection)
        return rows, None, None

    async def read_message(self, message_id: int, *, with_hidden: bool) -> StoredMessage | None:
        """Read the message, live or archived; with `with_hidden`, also the headers and body."""

        def read_message(connection: Connection) -> StoredMessage | None:
            # Search the live table first: the message may then move to the archive.
            tables = self._dialect.tables
            for table in (tables.message, tables.archive):
                if table is None:
                    continue
                columns = get_readable_columns(
                    table, _list_columns(table, with_hidden=with_hidden), self._dialect.name
                )
                rows = connection.execute(select(*columns).where(table.c.id == message_id)).all()
                for message in self._to_messages(connection, rows):
                    return message
            return None

        return await self._run_read(read_message, with_hidden=with_hidden)

    async def list_times(self, ids: Sequence[int]) -> list[tuple[int, datetime]]:
        """Return id and `created_at` of each message of `ids`, live or archived."""

        def read_times(connection: Connection) -> list[tuple[int, datetime]]:
            tables = [self._dialect.tables.message, self._dialect.tables.archive]
            return [
                (row.id, row.created_at)
                for table in tables
                if table is not None
                for row in connection.execute(
                    select(
                        *get_readable_columns(table, ("id", "created_at"), self._dialect.name)
                    ).where(table.c.id.in_(ids))
                )
            ]

        return await self._run_read(read_times, with_hidden=False)

    def _to_messages(self, connection: Connection, rows: Iterable[Any]) -> list[StoredMessage]:
        """Convert rows to messages; a leased message gets the name of the holding worker.

        The worker is found by the lease token, which begins with bytes of its subscriber. An ended
        subscriber counts, too: its leases may not have expired yet.
        """
        subscribers = list[LiveSubscriber]()
        if any(getattr(row, "lease_token", None) is not None for row in rows):
            subscribers = read_subscribers(connection, self._table, ended=True)
        return [_to_message(row, subscribers) for row in rows]

    async def group_dead_letters(self, filters: Filters, limit: int) -> DeadLetters:
        """Find the `limit` largest groups of FAILED messages that match `filters`.

        A group has the same error fingerprint or, without an error, the same reason. At most
        `MAX_SCANNED` messages are read, the last archived first; the result says if that limit was
        reached.
        """

        def count_groups(connection: Connection) -> DeadLetters:
            groups: dict[GroupKey, _DeadLetterCounts] = {}
            index_range = get_archive_range(self._dialect, filters)
            reader = RangeReader(self._dialect, index_range, None, filters)
            end = None
            for rows, position in reader.iter_steps(connection, MAX_SCANNED):
                end = position
                for row in self._count_by_group(connection, rows):
                    fingerprint = row.error_fingerprint
                    group_key = (fingerprint, None if fingerprint else row.reason)
                    if group_key not in groups:
                        groups[group_key] = _DeadLetterCounts(
                            row.newest_id, row.first_at, row.last_at
                        )
                    groups[group_key].add_row(row)
            # There are few groups: as many as there are kinds of errors among the scanned messages.
            largest = sorted(groups.items(), key=lambda item: -item[1].queues.total())[:limit]
            errors = self._read_errors(connection, [group.newest_id for _, group in largest])
            return DeadLetters(
                tuple(
                    DeadLetterGroup(
                        fingerprint=fingerprint,
                        reasons=dict(group.reasons.most_common()),
                        queues=dict(group.queues.most_common()),
                        first_at=group.first_at,
                        last_at=group.last_at,
                        last_hour=group.last_hour,
                        newest_id=group.newest_id,
                        error=errors.get(group.newest_id),
                    )
                    for (fingerprint, _), group in largest
                ),
                None if end is None else reader.get_time(connection, end),
            )

        return await self._run_read(count_groups, with_hidden=bool(filters.headers))

    def _count_by_group(self, connection: Connection, rows: Any) -> Iterator[Any]:
        """Count the matching messages of a step of the scan by fingerprint, reason and queue.

        A fingerprint is equal for errors of one type from the same place in the code. `rows` builds
        a select of the given columns over the step.
        """
        table = self._dialect.archive
        s = rows(*get_readable_columns(table, COUNTED_COLUMNS, self._dialect.name)).subquery().c
        group_columns = (s.error_fingerprint, s.reason, s.queue)
        counting = select(
            *group_columns,
            func.count().label("found"),
            func.min(s.archived_at).label("first_at"),
            func.max(s.archived_at).label("last_at"),
            func.sum(case((s.archived_at > later(_HOUR_AGO), 1), else_=0)).label("last_hour"),
            # Ids rise with the time of publishing, not of the end, but this is an equally good
            # example.
            func.max(s.id).label("newest_id"),
        )
        yield from connection.execute(counting.group_by(*group_columns))

    def _read_errors(self, connection: Connection, ids: Sequence[int]) -> dict[int, str | None]:
        """Return the last error of each archived message of `ids`."""
        if not ids:
            return {}
        c = self._dialect.tables.archive.c  # type: ignore[union-attr]
        rows = connection.execute(select(c.id, c.last_error).where(c.id.in_(ids)))
        return {row.id: row.last_error for row in rows}

    async def record_progress(self, message_id: int, token: UUID, info: dict[str, Any]) -> bool:
        """Write a delivery's progress; return False, without a change, after a lost lease.

        `info` is the fraction and the text that the handler has reported.
        """

        def record(connection: Connection) -> bool:
            # A worker that has lost its lease must not overwrite the next worker's progress.
            if not self._dialect.find_held(connection, [(message_id, token)]):
                return False
            binds = {"scope": PROGRESS, "key": str(message_id), "lease_token": token, "info": info}
            binds["kept"] = round(PROGRESS_RETENTION * 1_000_000)
            times = {"created_at": clock(), "expires_at": later(bindparam("kept"))}
            replaced = (*times, "lease_token", "info")
            upsert(connection, self._table, [binds], replaced=replaced, **times)
            return True

        return await self._database.run(record, Activity.CONSUME, Activity.STATE)

    async def find_progress(self, message_id: int) -> Progress | None:
        """Read the progress of the delivery that holds the lease, None without a report.

        A handler may report its progress (a fraction and a text) while it runs.
        """

        def read_progress(connection: Connection) -> Progress | None:
            message = self._dialect.tables.message.c
            query = select(message.lease_token).where(message.id == message_id)
            token = connection.execute(query).scalar()
            if token is None:
                return None
            c = self._table.c
            # A row with another token belongs to an earlier delivery.
            reported = select(c.info, c.created_at).where(
                c.scope == PROGRESS, c.key == str(message_id), c.lease_token == token
            )
            row = connection.execute(reported).first()
            if row is None:
                return None
            return Progress(float(row.info["fraction"]), row.info["text"], row.created_at)

        return await self._database.run(read_progress, Activity.OPERATE, write=False)

    async def _run_read(self, work: Callable[[Connection], T], *, with_hidden: bool) -> T:
        inspect = (Activity.INSPECT,) if with_hidden else ()
        return await self._database.run(work, Activity.OPERATE, *inspect, write=False)


def _list_columns(table: Table | None, *, with_hidden: bool) -> list[str]:
    """List the columns of `table` that are read; empty for an archive that does not exist.

    Body and headers are hidden: an operator needs a separate right to read them.
    """
    visible = (
        []
        if table is None
        else [column.name for column in table.c if column.name in _VISIBLE_COLUMNS]
    )
    return [*visible, *HIDDEN_COLUMNS] if with_hidden else visible


def _to_message(row: Any, subscribers: Iterable[LiveSubscriber]) -> StoredMessage:
    """Convert a row to a message; `subscribers` tell which worker holds the lease token.

    The message has a body and headers only if the row was read with these hidden columns.
    """
    fields = dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's public name for a row's mapping
    token = fields.pop("lease_token", None)
    payload = fields.pop("payload", None)
    stored_headers = fields.pop("headers", None)
    message = StoredMessage(
        **{**fields, "state": MessageState[fields["state"]]},
        worker=find_holder(subscribers, token),
    )
    if payload is None:
        return message
    headers = load_headers(stored_headers)
    # In SQLite the column of a body may hold text, too.
    body = decode_body(load_payload(payload), headers)
    return replace(message, headers=headers, body=body)


def _skip_ranges(walks: list[IndexRange], name: str | None) -> list[IndexRange]:
    """Return the ranges from `name`, where the last page ended, on.

    A range is a part of the table in the order of an index, such as "ready 5" for a priority. The
    range of a priority disappears with its last message. Then the ranges of lower priorities
    follow.

    Raises:
        InvalidCursorError: no range ever has this name.
    """
    if name is None:
        return walks
    for position, walk in enumerate(walks):
        if walk.name == name:
            return walks[position:]
    if not name.startswith("ready "):
        raise InvalidCursorError(name)
    try:
        priority = int(name.removeprefix("ready "))
    except ValueError as error:
        raise InvalidCursorError(name) from error
    return [w for w in walks if w.name.startswith("ready ") and int(w.name[6:]) < priority]


# Cursors: the name of the index range and the position of the last row.


def _dump_cursor(walk: IndexRange, position: Position) -> str:
    """Return the cursor of a row: the range's name and the position there, as base64."""
    values = [to_microseconds(v) if isinstance(v, datetime) else v for v in position]
    return base64.urlsafe_b64encode(json.dumps([walk.name, *values]).encode()).decode()


def _load_cursor(cursor: str) -> tuple[str, Position]:
    """Parse a cursor of `_dump_cursor`, which comes back from a client.

    Raises:
        InvalidCursorError: it is not such a cursor.
    """
    try:
        name, *values = json.loads(base64.urlsafe_b64decode(cursor.encode()))
        *timestamps, message_id = [int(value) for value in values]
        return str(name), [*map(from_microseconds, timestamps), message_id]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidCursorError(cursor) from error

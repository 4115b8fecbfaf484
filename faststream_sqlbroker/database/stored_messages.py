"""Messages as operators see them: pages by the last row's position, in the order of an index; dead
letters by what they have in common; how far long handlers have come.
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
from faststream_sqlbroker.core.status import LiveSubscriber
from faststream_sqlbroker.core.stored import (
    Filters,
    MessagePage,
    NotACursorError,
    Progress,
    StoredMessage,
    decode_body,
)
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.parts.message_walks import (
    SCANNED,
    Part,
    Position,
    Walk,
    archive_walk,
    shown_columns,
    walks_of,
)
from faststream_sqlbroker.database.parts.policy_state import upsert
from faststream_sqlbroker.schema.types import clock, later

T = TypeVar("T")

HIDDEN_COLUMNS = ("payload", "headers")
_SHOWN = {each.name for each in fields(StoredMessage)} - set(HIDDEN_COLUMNS) | {"lease_token"}
COUNTED_COLUMNS = ("id", "queue", "reason", "error_fingerprint", "archived_at")
"""Of dead letters."""
Likeness = tuple[str | None, str | None]
"""The fingerprint; or, without one, the reason."""
_HOUR_AGO: Any = literal_column(str(-3_600_000_000))
PROGRESS = "progress"
"""The scope; the key is the message's id, the token that of the delivery that says so."""
KEPT = 86_400.0
"""Seconds that a row of it is kept after it was written; the last one outlives its handler."""


@dataclass(slots=True)
class _Group:
    """What was found of a group so far; the newest messages come first."""

    newest_id: int
    first_at: datetime
    last_at: datetime
    last_hour: int = 0
    reasons: Counter[str | None] = field(default_factory=Counter)
    queues: Counter[str] = field(default_factory=Counter)

    def add(self, row: Any) -> None:
        """Some messages of one reason and queue."""
        self.first_at = min(self.first_at, row.first_at)
        if row.last_at > self.last_at:
            self.last_at = row.last_at
            self.newest_id = row.newest_id
        self.last_hour += int(row.last_hour)
        self.reasons[row.reason] += row.found
        self.queues[row.queue] += row.found


class StoredMessages:
    """Reads them; each operation is one transaction.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    @property
    def has_archive(self) -> bool:
        """Whether finished messages can be kept."""
        return self._dialect.has_archive

    async def page(
        self, filters: Filters, limit: int, after: str | None, *, hidden: bool
    ) -> MessagePage:
        """Up to `limit` messages; with `hidden`, also their headers and bodies.

        Raises:
            NotACursorError: `after` is not of such a list.
        """
        tables = self._dialect.tables
        columns = _names(tables.archive if filters.archived else tables.message, hidden=hidden)

        def read_page(connection: Connection) -> MessagePage:
            rows, cursor, scanned = self._list(connection, columns, filters, limit, after)
            return MessagePage(tuple(self._messages(connection, rows)), cursor, scanned)

        return await self._read(read_page, hidden=hidden or bool(filters.headers))

    def _list(
        self,
        connection: Connection,
        columns: Sequence[str],
        filters: Filters,
        limit: int,
        after: str | None,
    ) -> tuple[list[Any], str | None, datetime | None]:
        """Up to `limit` rows, where to go on, and the time of the last row that was looked at, if
        the page ended there.
        """
        name, position = (None, None) if after is None else _load(after)
        rows: list[Any] = []
        budget = SCANNED
        walks = _walks_from(list(walks_of(connection, self._dialect, filters)), name)
        for walk in walks:
            at = position if walk.name == name else None
            # With no room left, one more row still tells whether there is another page.
            room = limit - len(rows)
            part = Part(self._dialect, walk, at, filters)
            matches, end = part.read(connection, columns, room, budget)
            rows += matches[:room]
            if matches[:room]:
                after = _dump(walk, [getattr(matches[:room][-1], str(c.key)) for c in walk.order])
            if len(matches) > room:
                return rows, after, None
            if end is not None:
                # Not the last match: what lies between it and the end has been looked at.
                return rows, _dump(walk, end), part.time_of(connection, end)
            if walk is not walks[-1]:
                budget -= part.looked_at(connection)
        return rows, None, None

    async def one(self, message_id: int, *, hidden: bool) -> StoredMessage | None:
        """The message, live or archived; with `hidden`, also its headers and body."""

        def read_message(connection: Connection) -> StoredMessage | None:
            # First where it lives: while it is looked for, it may move to the archive.
            tables = self._dialect.tables
            for table in (tables.message, tables.archive):
                if table is None:
                    continue
                columns = shown_columns(table, _names(table, hidden=hidden), self._dialect.name)
                rows = connection.execute(select(*columns).where(table.c.id == message_id)).all()
                for message in self._messages(connection, rows):
                    return message
            return None

        return await self._read(read_message, hidden=hidden)

    def _messages(self, connection: Connection, rows: Iterable[Any]) -> list[StoredMessage]:
        subscribers = list[LiveSubscriber]()
        if any(getattr(row, "lease_token", None) is not None for row in rows):
            subscribers = read_subscribers(connection, self._table, ended=True)
        return [_message(row, subscribers) for row in rows]

    async def dead_letters(self, filters: Filters, limit: int) -> DeadLetters:
        """The `limit` largest groups of FAILED messages that match `filters`.

        At most `SCANNED` messages are looked at, the last archived first.
        """

        def count_groups(connection: Connection) -> DeadLetters:
            groups: dict[Likeness, _Group] = {}
            walk = archive_walk(self._dialect, filters)
            part = Part(self._dialect, walk, None, filters)
            end = None
            for rows, at in part.steps(connection, SCANNED):
                end = at
                for row in self._count_alike(connection, rows):
                    fingerprint = row.error_fingerprint
                    likeness = (fingerprint, None if fingerprint else row.reason)
                    if likeness not in groups:
                        groups[likeness] = _Group(row.newest_id, row.first_at, row.last_at)
                    groups[likeness].add(row)
            # Few groups: as many as there are kinds of errors among the messages looked at.
            largest = sorted(groups.items(), key=lambda item: -item[1].queues.total())[:limit]
            errors = self._errors(connection, [group.newest_id for _, group in largest])
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
                None if end is None else part.time_of(connection, end),
            )

        return await self._read(count_groups, hidden=bool(filters.headers))

    def _count_alike(self, connection: Connection, rows: Any) -> Iterator[Any]:
        """Count the messages of a stretch by fingerprint, reason and queue."""
        table = self._dialect.tables.archive
        assert table is not None  # noqa: S101 - the store has looked
        s = rows(*shown_columns(table, COUNTED_COLUMNS, self._dialect.name)).subquery().c
        likeness = (s.error_fingerprint, s.reason, s.queue)
        counting = select(
            *likeness,
            func.count().label("found"),
            func.min(s.archived_at).label("first_at"),
            func.max(s.archived_at).label("last_at"),
            func.sum(case((s.archived_at > later(_HOUR_AGO), 1), else_=0)).label("last_hour"),
            # Ids rise with the time of publishing, not of the end; it is as good an example.
            func.max(s.id).label("newest_id"),
        )
        yield from connection.execute(counting.group_by(*likeness))

    def _errors(self, connection: Connection, ids: Sequence[int]) -> dict[int, str | None]:
        if not ids:
            return {}
        c = self._dialect.tables.archive.c  # type: ignore[union-attr]
        rows = connection.execute(select(c.id, c.last_error).where(c.id.in_(ids)))
        return {row.id: row.last_error for row in rows}

    async def note_progress(self, message_id: int, token: UUID, info: dict[str, Any]) -> bool:
        """Write how far a delivery has come, if it still has its lease; whether it has."""

        def note(connection: Connection) -> bool:
            # A worker that has lost its lease must not hide what the next one says.
            if not self._dialect.still_held(connection, [(message_id, token)]):
                return False
            binds = {"scope": PROGRESS, "key": str(message_id), "lease_token": token, "info": info}
            binds["kept"] = round(KEPT * 1_000_000)
            times = {"created_at": clock(), "expires_at": later(bindparam("kept"))}
            replaced = (*times, "lease_token", "info")
            upsert(connection, self._table, [binds], replaced=replaced, **times)
            return True

        return await self._database.run(note, Activity.CONSUME, Activity.STATE)

    async def progress(self, message_id: int) -> Progress | None:
        """How far the delivery has come that has the lease now; None: it does not say."""

        def read_progress(connection: Connection) -> Progress | None:
            message = self._dialect.tables.message.c
            leased = select(message.lease_token).where(message.id == message_id)
            token = connection.execute(leased).scalar()
            if token is None:
                return None
            c = self._table.c
            # With another token it is of an earlier delivery, and says nothing of this one.
            said = select(c.info, c.created_at).where(
                c.scope == PROGRESS, c.key == str(message_id), c.lease_token == token
            )
            row = connection.execute(said).first()
            if row is None:
                return None
            return Progress(float(row.info["fraction"]), row.info["text"], row.created_at)

        return await self._database.run(read_progress, Activity.OPERATE, write=False)

    async def _read(self, work: Callable[[Connection], T], *, hidden: bool) -> T:
        inspect = (Activity.INSPECT,) if hidden else ()
        return await self._database.run(work, Activity.OPERATE, *inspect, write=False)


def _names(table: Table | None, *, hidden: bool) -> list[str]:
    """The columns of `table` that are read; None: there is no archive, and nothing to read."""
    shown = [] if table is None else [each.name for each in table.c if each.name in _SHOWN]
    return [*shown, *HIDDEN_COLUMNS] if hidden else shown


def _message(row: Any, subscribers: Iterable[LiveSubscriber]) -> StoredMessage:
    fields = dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's public name for a row's mapping
    token = fields.pop("lease_token", None)
    payload = fields.pop("payload", None)
    stored = fields.pop("headers", None)
    message = StoredMessage(
        **{**fields, "state": MessageState[fields["state"]]},
        worker=next((s.worker for s in subscribers if s.holds(token)), None),
    )
    if payload is None:
        return message
    headers = load_headers(stored)
    # SQLite's columns take text for a body, too.
    body = decode_body(load_payload(payload), headers)
    return replace(message, headers=headers, body=body)


def _walks_from(walks: list[Walk], name: str | None) -> list[Walk]:
    """The walks from the one called `name` on; if it is gone, those that come after it."""
    if name is None:
        return walks
    for at, walk in enumerate(walks):
        if walk.name == name:
            return walks[at:]
    if not name.startswith("ready "):
        raise NotACursorError(name)
    try:
        priority = int(name.removeprefix("ready "))
    except ValueError as error:
        raise NotACursorError(name) from error
    return [w for w in walks if w.name.startswith("ready ") and int(w.name[6:]) < priority]


# Cursors: the walk and the position of the last row.


def _dump(walk: Walk, position: Position) -> str:
    values = [to_microseconds(v) if isinstance(v, datetime) else v for v in position]
    return base64.urlsafe_b64encode(json.dumps([walk.name, *values]).encode()).decode()


def _load(cursor: str) -> tuple[str, Position]:
    try:
        name, *values = json.loads(base64.urlsafe_b64decode(cursor.encode()))
        *moments, message_id = [int(value) for value in values]
        return str(name), [*map(from_microseconds, moments), message_id]
    except (TypeError, ValueError, OverflowError) as error:
        raise NotACursorError(cursor) from error

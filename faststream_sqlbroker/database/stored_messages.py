"""Messages as operators see them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Connection, select

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.dead_letters import DeadLetters
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import LiveSubscriber
from faststream_sqlbroker.core.stored import (
    Filters,
    MessagePage,
    Progress,
    StoredMessage,
    decode_body,
)
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import progress
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.parts.dead_letters import dead_letters
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.parts.message_lists import (
    ARCHIVED_COLUMNS,
    HIDDEN_COLUMNS,
    LIVE_COLUMNS,
    read_page,
)
from faststream_sqlbroker.database.parts.message_walks import shown_columns

T = TypeVar("T")


class StoredMessages:
    """Reads them; each operation is one transaction.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect

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

        def work(connection: Connection) -> MessagePage:
            page = read_page(connection, self._dialect, filters, limit, after, hidden=hidden)
            messages = self._messages(connection, page.rows)
            return MessagePage(tuple(messages), page.after, page.scanned)

        return await self._read(work, hidden=hidden or bool(filters.headers))

    async def dead_letters(self, filters: Filters, limit: int) -> DeadLetters:
        """The `limit` largest groups of the archived messages that match `filters`."""
        return await self._read(
            lambda c: dead_letters(c, self._dialect, filters, limit), hidden=bool(filters.headers)
        )

    async def one(self, message_id: int, *, hidden: bool) -> StoredMessage | None:
        """The message, live or archived; with `hidden`, also its headers and body."""

        def work(connection: Connection) -> StoredMessage | None:
            # First where it lives: while it is looked for, it may move to the archive.
            tables = self._dialect.tables
            for table, names in (
                (tables.message, LIVE_COLUMNS),
                (tables.archive, ARCHIVED_COLUMNS),
            ):
                if table is None:
                    continue
                wanted = (*names, *HIDDEN_COLUMNS) if hidden else names
                columns = shown_columns(table, wanted, self._dialect.name)
                rows = connection.execute(select(*columns).where(table.c.id == message_id)).all()
                for message in self._messages(connection, rows):
                    return message
            return None

        return await self._read(work, hidden=hidden)

    async def _read(self, work: Callable[[Connection], T], *, hidden: bool) -> T:
        inspect = (Activity.INSPECT,) if hidden else ()
        return await self._database.run(work, Activity.OPERATE, *inspect, write=False)

    async def note_progress(self, message_id: int, token: UUID, info: dict[str, Any]) -> bool:
        """Write how far a delivery has come, if it still has its lease; whether it has."""
        return await self._database.run(
            lambda c: progress.note(c, self._dialect, message_id, token, info),
            Activity.CONSUME,
            Activity.STATE,
        )

    async def progress(self, message_id: int) -> Progress | None:
        """How far the delivery has come that has the lease now; None: it does not say."""
        return await self._database.run(
            lambda c: progress.read(c, self._dialect, message_id), Activity.OPERATE, write=False
        )

    def _messages(self, connection: Connection, rows: Iterable[Any]) -> list[StoredMessage]:
        known = list[LiveSubscriber]()
        leased = [row for row in rows if getattr(row, "lease_token", None) is not None]
        if leased:
            known = read_subscribers(connection, self._dialect.tables.policy_state, ended=True)
        return [_message(row, known) for row in rows]


def _message(row: Any, known: Iterable[LiveSubscriber]) -> StoredMessage:
    fields = dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's public name for a row's mapping
    token = fields.pop("lease_token", None)
    payload = fields.pop("payload", None)
    stored = fields.pop("headers", None)
    message = StoredMessage(
        **{**fields, "state": MessageState[fields["state"]]},
        worker=next((s.worker for s in known if s.holds(token)), None),
    )
    if payload is None:
        return message
    headers = load_headers(stored)
    # SQLite's columns take text for a body, too.
    body = decode_body(load_payload(payload), headers)
    return replace(message, headers=headers, body=body)

"""Operators' changes of one message that waits: each locks its row first, and skips it if another
transaction has locked it.

A claim that comes first leaves the row PROCESSING, and nothing is changed; one that comes later
finds the changed row. So no worker's delivery is ever changed by an operator.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, false, func, select, update
from sqlalchemy.sql.dml import Update

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.jobs import CANCEL, MOVE, Job
from faststream_sqlbroker.core.orders import CancelRequest, Repair
from faststream_sqlbroker.core.policies.flags import BURST, HEADER_KEY, HELD_BURST, KEPT
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.states import CLAIMABLE_STATES, MessageState
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import audit, cancels
from faststream_sqlbroker.database.parts.audit import note_action
from faststream_sqlbroker.database.parts.live_subscribers import notify_state_changed
from faststream_sqlbroker.database.parts.message_walks import shown_columns
from faststream_sqlbroker.database.parts.mirror import insert_mirrored
from faststream_sqlbroker.database.parts.repairs import (
    MOVED,
    discard,
    due_at,
    is_standing,
    moment,
    put_before,
)
from faststream_sqlbroker.schema.types import MYSQL, clock

Change = Callable[[Connection, Any], None]
"""What is done with the locked row: its id, queue, state, marks and due time."""
OfLeased = Callable[[Connection, Any], Repair]
"""What is done of a row with a lease: its id, queue and lease_token, and whether that lease is
over."""


class Repairs:
    """Writes them; each operation is one transaction, and changes only a message that waits.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect

    async def publish(self, row: NewMessage, by: str) -> int | None:
        """Insert `row`, and note who did; its id, None if its queue has its dedup_id already."""

        def insert(connection: Connection) -> int | None:
            [message_id] = insert_mirrored(self._dialect, connection, [row])
            if message_id is not None:
                given = {"queue": row.queue, "id": message_id}
                note_action(connection, self._dialect, "publish", by, given)
            return message_id

        return await self._database.run(insert, Activity.OPERATE, Activity.PUBLISH)

    async def cancel(
        self,
        message_id: int,
        text: str,
        by: str = "",
        *,
        on_asked: Callable[[CancelRequest], None] = lambda _request: None,
    ) -> Repair:
        """End the message as DISCARDED; `text` goes before its last error.

        If it is leased, its holder is asked to do so: this process's by `on_asked`, once the
        request is committed; others by NOTIFY (PostgreSQL), or when they look.
        """
        asked: list[CancelRequest] = []

        def of_leased(connection: Connection, row: Any) -> Repair:
            request = CancelRequest(row.id, row.lease_token, text)
            if row.over:
                self._end_expired(connection, row, request)
                return Repair(row.id, "done", row.queue)
            # Again, if the transaction is repeated.
            asked[:] = [request]
            tables = self._dialect.tables
            cancels.ask(connection, tables.policy_state, request)
            if self._dialect.can_listen:
                notify_state_changed(connection, tables.config.channel)
            return Repair(row.id, "requested", row.queue)

        def end(connection: Connection, row: Any) -> None:
            discard(connection, self._dialect, [row], text)

        repair = await self._run(message_id, end, Job(action=CANCEL, by=by), of_leased)
        for request in asked if repair.verdict == "requested" else ():
            on_asked(request)
        return repair

    def _end_expired(self, connection: Connection, row: Any, request: CancelRequest) -> None:
        """The lease of the locked `row` is over: no holder can write an outcome before us."""
        put_before(connection, self._dialect, [row.id], request.text)
        settlement = cancels.discarded(request, archive=self._dialect.has_archive)
        settlement.error = None
        self._dialect.settle(connection, [settlement])

    async def set_due(
        self, message_id: int, at: datetime | float, by: str = "", action: str = "postpone"
    ) -> Repair:
        """Make the message due at a moment, or in so many seconds, unless it stands by."""

        def set_due(connection: Connection, row: Any) -> None:
            if not is_standing(row):
                connection.execute(self._update(row).values(due_at(self._dialect, at)))

        return await self._run(message_id, set_due, Job(action=action, by=by))

    async def move(self, message_id: int, queue: str, by: str = "") -> Repair:
        """Move the message as a handler's `Move` does: to the end of `queue`, due now, with new
        counters.
        """

        def move(connection: Connection, row: Any) -> None:
            connection.execute(self._update(row).values({**MOVED, "queue": queue}))

        job = Job(action=MOVE, by=by, arguments={"to": queue})
        return await self._run(message_id, move, job)

    async def edit(
        self, message_id: int, fields: Mapping[str, Any], at: datetime | float | None, by: str = ""
    ) -> Repair:
        """Set columns of the message, and its due time unless `at` is None; with another key it is
        part of no burst any more.
        """

        def set_fields(connection: Connection, row: Any) -> None:
            values = dict(fields)
            if at is not None and not is_standing(row):
                values |= due_at(self._dialect, at)
            if "key" in fields and not self._has_key(connection, row, fields["key"]):
                marks = row.policy_marks & ~(BURST | HELD_BURST)
                values["policy_marks"] = marks if at is None else marks & KEPT
                if at is not None or row.policy_marks & HELD_BURST:
                    values["next_attempt_at"] = clock() if at is None else moment(at)
            if values:
                connection.execute(self._update(row).values(values))

        job = Job(action="edit", by=by, arguments=dict(fields))
        return await self._run(message_id, set_fields, job)

    def _has_key(self, connection: Connection, row: Any, key: str | None) -> bool:
        """Whether policies take `key` for its key. Not if they go by that of a header, which stays.

        The database compares: SQLite may hold text that is not UTF-8.
        """
        if row.policy_marks & HEADER_KEY:
            return True
        c = self._dialect.tables.message.c
        same = [c.key.is_(None) if key is None else c.key == key]
        if key is not None and self._dialect.name in MYSQL:
            # Trap: for MySQL, keys that differ in spaces at their end are equal.
            same.append(func.char_length(c.key) == len(key))
        return connection.execute(select(c.id).where(c.id == row.id, *same)).first() is not None

    def _update(self, row: Any) -> Update:
        table = self._dialect.tables.message
        return update(table).where(and_(table.c.id == row.id, table.c.queue == row.queue))

    async def _run(
        self, message_id: int, change: Change, job: Job, of_leased: OfLeased | None = None
    ) -> Repair:
        """Change the message, if it waits, and note who did: in one transaction, so that the audit
        is true.

        `of_leased` is called if a subscriber has leased it, also if a handler's transaction has
        locked it.
        """

        def change_and_note(connection: Connection) -> Repair:
            repair = self._change(connection, message_id, change, of_leased)
            if repair.accepted:
                arguments = {"message_id": message_id, **job.arguments}
                if repair.requested:
                    arguments["requested"] = True
                done = int(repair.done)
                ended = replace(job, arguments=arguments, state="ended", expected=1, done=done)
                table = self._dialect.tables.policy_state
                audit.add(connection, table, ended, self._dialect.now(connection))
            return repair

        return await self._database.run(change_and_note, Activity.OPERATE, Activity.REPAIR)

    def _change(
        self, connection: Connection, message_id: int, change: Change, of_leased: OfLeased | None
    ) -> Repair:
        """Lock the message and change it, if it waits."""
        table = self._dialect.tables.message
        c = table.c
        over = (c.lease_expires_at < clock()).label("over")
        names = "id", "queue", "state", "policy_marks", "lease_token", "next_attempt_at"
        columns = shown_columns(table, names, self._dialect.name)
        locking = select(*columns, over).where(c.id == message_id)
        # Skipped, not waited for: a handler's transaction may hold its row for as long as it runs.
        row = connection.execute(locking.with_for_update(skip_locked=True)).first()
        if row is None:
            return self._explain_missing(connection, message_id, of_leased)
        if MessageState[row.state] not in CLAIMABLE_STATES:
            if of_leased is not None and row.lease_token is not None:
                return of_leased(connection, row)
            return Repair(message_id, "running", row.queue)
        change(connection, row)
        return Repair(message_id, "done", row.queue)

    def _explain_missing(
        self, connection: Connection, message_id: int, of_leased: OfLeased | None
    ) -> Repair:
        """Say why no row could be locked."""
        tables = self._dialect.tables
        c = tables.message.c
        # Read without a lock, which shows a row that another transaction has locked. Its lease is
        # not over as long as that transaction lasts.
        live = select(c.id, c.queue, c.lease_token, false().label("over")).where(c.id == message_id)
        row = connection.execute(live).first()
        if row is not None:
            if of_leased is not None and row.lease_token is not None:
                return of_leased(connection, row)
            return Repair(message_id, "busy", row.queue)
        if tables.archive is not None:
            ended = select(tables.archive.c.state).where(tables.archive.c.id == message_id)
            if (state := connection.execute(ended).scalar()) is not None:
                return Repair(message_id, "ended", state=MessageState[state])
        return Repair(message_id, "not_found")

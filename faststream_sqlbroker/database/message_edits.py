"""Operators' changes of one waiting message.

Each locks the row first, and skips a row that another transaction has locked. A claim that comes
first leaves the row PROCESSING, and nothing is changed; a claim that comes later finds the changed
row. So no worker's delivery is ever changed by an operator.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, false, func, select, update
from sqlalchemy.sql.dml import Update

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.bulk_jobs import CANCEL, MOVE, Job
from faststream_sqlbroker.core.orders import CancelRequest, Repair
from faststream_sqlbroker.core.policies.flags import BURST, HEADER_KEY, HELD_BURST, PERSISTENT_MASK
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.states import CLAIMABLE_STATES, MessageState
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.parts import audit, cancel_requests
from faststream_sqlbroker.database.parts.audit import record_action
from faststream_sqlbroker.database.parts.live_subscribers import notify_state_changed
from faststream_sqlbroker.database.parts.message_walks import get_readable_columns
from faststream_sqlbroker.database.parts.mirror_rows import insert_mirrored
from faststream_sqlbroker.database.parts.waiting_edits import (
    MOVED_VALUES,
    build_due_values,
    discard,
    is_standby_row,
    prepend_error,
    to_timestamp,
)
from faststream_sqlbroker.schema.types import MYSQL, clock

Change = Callable[[Connection, Any], None]
"""A change of the locked row: its id, queue, state, flags and due time."""
ChangeLeased = Callable[[Connection, Any], Repair]
"""A change of a leased row: its id, queue and lease_token, and `over` for an expired lease."""


class MessageEdits(StoreSubject):
    """Operators' edits of waiting messages; each operation is a single transaction.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    async def publish(self, row: NewMessage, by: str) -> int | None:
        """Insert `row` for an operator, and record that in the audit; return the id.

        None, and no entry in the audit, if the queue has a message with the same dedup_id.
        """

        def insert(connection: Connection) -> int | None:
            [message_id] = insert_mirrored(self._dialect, connection, [row])
            if message_id is not None:
                arguments = {"queue": row.queue, "id": message_id}
                record_action(connection, self._dialect, "publish", by, arguments)
            return message_id

        return await self._database.run(insert, Activity.OPERATE, Activity.PUBLISH)

    async def cancel(
        self,
        message_id: int,
        reason: str,
        by: str = "",
        *,
        on_requested: Callable[[CancelRequest], None] = lambda _request: None,
    ) -> Repair:
        """End the message as DISCARDED; `reason` goes before the last error.

        A waiting message ends now. For a leased message its holder gets a request to cancel it: in
        this process by `on_requested`, after the commit; in others by NOTIFY (PostgreSQL), or at
        their next poll. A message with an expired lease is discarded without its holder.
        """
        requests: list[CancelRequest] = []

        def request_cancel(connection: Connection, row: Any) -> Repair:
            request = CancelRequest(row.id, row.lease_token, reason)
            if row.over:
                self._end_expired(connection, row, request)
                return Repair(row.id, "done", row.queue)
            # Replace the item: the transaction may be repeated.
            requests[:] = [request]
            tables = self._dialect.tables
            cancel_requests.save_request(connection, tables.policy_state, request)
            if self._dialect.can_listen:
                notify_state_changed(connection, tables.config.channel)
            return Repair(row.id, "requested", row.queue)

        def discard_row(connection: Connection, row: Any) -> None:
            discard(connection, self._dialect, [row], reason)

        repair = await self._run(message_id, discard_row, Job(action=CANCEL, by=by), request_cancel)
        for request in requests if repair.verdict == "requested" else ():
            on_requested(request)
        return repair

    def _end_expired(self, connection: Connection, row: Any, request: CancelRequest) -> None:
        """Discard the locked `row`, whose lease has expired, without the former holder.

        The row lock keeps the holder from settling first.
        """
        prepend_error(connection, self._dialect, [row.id], request.text)
        settlement = cancel_requests.create_settlement(request, archive=self._dialect.has_archive)
        # The row has its error already, with the reason in front.
        settlement.error = None
        self._dialect.settle(connection, [settlement])

    async def set_due(
        self, message_id: int, at: datetime | float, by: str = "", action: str = "postpone"
    ) -> Repair:
        """Make the message due at a time, or in so many seconds.

        A standby message keeps its due time: another message of its key is to be delivered in its
        place.
        """

        def set_due(connection: Connection, row: Any) -> None:
            if not is_standby_row(row):
                connection.execute(
                    self._build_update(row).values(build_due_values(self._dialect, at))
                )

        return await self._run(message_id, set_due, Job(action=action, by=by))

    async def move(self, message_id: int, queue: str, by: str = "") -> Repair:
        """Move the message to the end of `queue`, due now, with new counters.

        A handler's `Move` does the same.
        """

        def move(connection: Connection, row: Any) -> None:
            connection.execute(self._build_update(row).values({**MOVED_VALUES, "queue": queue}))

        job = Job(action=MOVE, by=by, arguments={"to": queue})
        return await self._run(message_id, move, job)

    async def edit(
        self, message_id: int, fields: Mapping[str, Any], at: datetime | float | None, by: str = ""
    ) -> Repair:
        """Set columns of the message, and the due time unless `at` is None.

        A new key removes the message from its burst: Debounce groups messages of one key that
        follow each other closely. Its due time was the end of that burst, so without `at` it
        becomes due now.
        """

        def set_fields(connection: Connection, row: Any) -> None:
            values = dict(fields)
            if at is not None and not is_standby_row(row):
                values |= build_due_values(self._dialect, at)
            if "key" in fields and not self._has_key(connection, row, fields["key"]):
                flags = row.policy_marks & ~(BURST | HELD_BURST)
                values["policy_marks"] = flags if at is None else flags & PERSISTENT_MASK
                if at is not None or row.policy_marks & HELD_BURST:
                    values["next_attempt_at"] = clock() if at is None else to_timestamp(at)
            if values:
                connection.execute(self._build_update(row).values(values))

        job = Job(action="edit", by=by, arguments=dict(fields))
        return await self._run(message_id, set_fields, job)

    def _has_key(self, connection: Connection, row: Any, key: str | None) -> bool:
        """Return True if setting `key` leaves the key that the policies use unchanged.

        That is so if the new key equals the old one, or if the policies take their key from a
        header. The comparison runs in the database, because SQLite may hold text that is not UTF-8.
        """
        if row.policy_marks & HEADER_KEY:
            return True
        c = self._dialect.tables.message.c
        same = [c.key.is_(None) if key is None else c.key == key]
        if key is not None and self._dialect.name in MYSQL:
            # Trap: MySQL considers keys that differ only in trailing spaces equal.
            same.append(func.char_length(c.key) == len(key))
        return connection.execute(select(c.id).where(c.id == row.id, *same)).first() is not None

    def _build_update(self, row: Any) -> Update:
        """Start an UPDATE of the locked `row`, with the queue among the conditions."""
        table = self._dialect.tables.message
        return update(table).where(and_(table.c.id == row.id, table.c.queue == row.queue))

    async def _run(
        self, message_id: int, change: Change, job: Job, change_leased: ChangeLeased | None = None
    ) -> Repair:
        """Apply `change` to a waiting message, and record the operator in the same transaction.

        So the audit has an entry for each change, and none for a change that was rolled back. For a
        message that a subscriber has leased, `change_leased` is called instead, if given; it may
        request a cancel from the holder.
        """

        def change_and_note(connection: Connection) -> Repair:
            repair = self._change(connection, message_id, change, change_leased)
            if repair.is_accepted:
                arguments = {"message_id": message_id, **job.arguments}
                if repair.is_requested:
                    arguments["requested"] = True
                done = int(repair.done)
                ended = replace(job, arguments=arguments, state="ended", expected=1, done=done)
                table = self._dialect.tables.policy_state
                audit.add_job(connection, table, ended, self._dialect.now(connection))
            return repair

        return await self._database.run(change_and_note, Activity.OPERATE, Activity.REPAIR)

    def _change(
        self,
        connection: Connection,
        message_id: int,
        change: Change,
        change_leased: ChangeLeased | None,
    ) -> Repair:
        """Lock the message, apply the change that fits the state, and return the result.

        A waiting message gets `change`. A leased message gets `change_leased`, or is left alone and
        reported as running.
        """
        table = self._dialect.tables.message
        c = table.c
        over = (c.lease_expires_at < clock()).label("over")
        names = "id", "queue", "state", "policy_marks", "lease_token", "next_attempt_at"
        columns = get_readable_columns(table, names, self._dialect.name)
        locking = select(*columns, over).where(c.id == message_id)
        # Skip locked rows: a handler's transaction may hold its row for as long as it runs.
        row = connection.execute(locking.with_for_update(skip_locked=True)).first()
        if row is None:
            return self._explain_missing(connection, message_id, change_leased)
        if MessageState[row.state] not in CLAIMABLE_STATES:
            if change_leased is not None and row.lease_token is not None:
                return change_leased(connection, row)
            return Repair(message_id, "running", row.queue)
        change(connection, row)
        return Repair(message_id, "done", row.queue)

    def _explain_missing(
        self, connection: Connection, message_id: int, change_leased: ChangeLeased | None
    ) -> Repair:
        """Return the result for a message whose row could not be locked.

        Another transaction has locked it, it has ended, or it does not exist. A message that is
        locked and leased still gets `change_leased`: a handler's transaction holds the row while
        the handler runs.
        """
        tables = self._dialect.tables
        c = tables.message.c
        # Read without a lock, so that a row locked by another transaction is seen. Its lease is not
        # over as long as that transaction lasts.
        live = select(c.id, c.queue, c.lease_token, false().label("over")).where(c.id == message_id)
        row = connection.execute(live).first()
        if row is not None:
            if change_leased is not None and row.lease_token is not None:
                return change_leased(connection, row)
            return Repair(message_id, "busy", row.queue)
        if tables.archive is not None:
            ended = select(tables.archive.c.state).where(tables.archive.c.id == message_id)
            if (state := connection.execute(ended).scalar()) is not None:
                return Repair(message_id, "ended", state=MessageState[state])
        return Repair(message_id, "not_found")

"""Operators' changes of single messages."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.jobs import CANCEL, MOVE, Job
from faststream_sqlbroker.core.orders import CancelRequest
from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.reasons import CANCELLED
from faststream_sqlbroker.core.repairs import Repair
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import cancels, jobs
from faststream_sqlbroker.database.parts import repairs as rows
from faststream_sqlbroker.database.parts.audit import note_action
from faststream_sqlbroker.database.parts.live_subscribers import notify_state_changed
from faststream_sqlbroker.database.parts.mirror import insert_mirrored
from faststream_sqlbroker.database.policies.rows import PolicyRows


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

        def work(connection: Connection) -> int | None:
            [message_id] = insert_mirrored(self._dialect, connection, [row])
            if message_id is not None:
                given = {"queue": row.queue, "id": message_id}
                note_action(connection, self._dialect, "publish", by, given)
            return message_id

        return await self._database.run(work, Activity.OPERATE, Activity.PUBLISH)

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

        def change(connection: Connection, row: Any) -> None:
            # In the live row: the archived one is a copy of it.
            rows.note(connection, self._dialect, row, text)
            ends = {row.id: Discard(CANCELLED)}
            PolicyRows(self._dialect).discard(connection, row.queue, ends, keep=True)

        found = await self._run(message_id, change, Job(action=CANCEL, by=by), of_leased)
        for request in asked if found.verdict == "requested" else ():
            on_asked(request)
        return found

    def _end_expired(self, connection: Connection, row: Any, request: CancelRequest) -> None:
        """The lease of the locked `row` is over: no holder can write an outcome before us."""
        rows.note(connection, self._dialect, row, request.text)
        settlement = cancels.discarded(request, archive=self._dialect.has_archive)
        settlement.error = None
        self._dialect.settle(connection, [settlement])

    async def set_due(
        self, message_id: int, at: datetime | float, by: str = "", action: str = "postpone"
    ) -> Repair:
        """Make the message due at a moment, or in so many seconds."""
        job = Job(action=action, by=by)
        return await self._run(message_id, rows.set_due(self._dialect, at), job)

    async def move(self, message_id: int, queue: str, by: str = "") -> Repair:
        """Move the message to the end of `queue`, with new counters."""
        job = Job(action=MOVE, by=by, arguments={"to": queue})
        return await self._run(message_id, rows.move_to(self._dialect, queue), job)

    async def edit(
        self, message_id: int, fields: Mapping[str, Any], at: datetime | float | None, by: str = ""
    ) -> Repair:
        """Set columns of the message, and its due time unless `at` is None."""
        job = Job(action="edit", by=by, arguments=dict(fields))
        change = rows.set_fields(self._dialect, dict(fields), at)
        return await self._run(message_id, change, job)

    async def _run(
        self,
        message_id: int,
        change: rows.Change,
        job: Job,
        of_leased: rows.OfLeased | None = None,
    ) -> Repair:
        """Change the message, and note who did: in one transaction, so that the audit is true."""
        table = self._dialect.tables.policy_state

        def work(connection: Connection) -> Repair:
            found = rows.repair(connection, self._dialect, message_id, change, of_leased)
            if found.accepted:
                arguments = {"message_id": message_id, **job.arguments}
                if found.requested:
                    arguments["requested"] = True
                done = int(found.done)
                ended = replace(job, arguments=arguments, state="ended", expected=1, done=done)
                jobs.add(connection, table, ended, self._dialect.now(connection))
            return found

        return await self._database.run(work, Activity.OPERATE, Activity.REPAIR)

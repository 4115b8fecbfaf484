"""Messages of `AckPolicy.ACK_FIRST`: removed before their handlers start."""

import os
import socket
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, SettleResult, UnknownOutcome
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import policy_state
from faststream_sqlbroker.database.parts.audit import note_action

MOST_NOTED = 100
"""Ids that one entry of the audit names; all are counted."""


class AckFirstStarts:
    """Records in the database which of these handlers have started and not yet ended.

    Each start belongs to a holder, the subscriber of one process, which renews it while the handler
    runs. A start that its holder stops renewing has an unknown outcome.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state
        self._worker = worker_name()

    async def remove_first(
        self,
        settlements: Sequence[Settlement],
        rows: Sequence[ClaimedMessage],
        holder: UUID,
        lease: float,
    ) -> SettleResult:
        """Write `settlements` of `rows` and record the starts of those written, in one transaction.

        If `holder` neither ends nor renews a start for `lease` seconds, `unknown` lists it.
        """
        remove = self._dialect.remove_first
        worker = self._worker
        return await self._database.run(
            lambda c: remove(c, settlements, rows, holder, lease, worker),
            Activity.CONSUME,
            Activity.STATE,
        )

    async def renew(
        self, started: Sequence[policy_state.Started], holder: UUID, lease: float
    ) -> None:
        """Extend these starts of `holder` to `lease` seconds from now: their handlers still run."""
        await self._database.run(
            lambda c: policy_state.renew_started(c, self._table, started, holder, lease),
            Activity.CONSUME,
            Activity.STATE,
        )

    async def end(self, started: Sequence[policy_state.Started], holder: UUID) -> None:
        """Remove these starts of `holder`: their handlers have ended."""
        await self._database.run(
            lambda c: policy_state.note_ended(c, self._table, started, holder),
            Activity.CONSUME,
            Activity.STATE,
        )

    async def unknown(self, queue: str | None, limit: int) -> list[UnknownOutcome]:
        """Up to `limit` starts whose lease has run out, the oldest first; None: of any queue."""
        return await self._database.run(
            lambda c: policy_state.unknown(c, self._table, queue, limit),
            Activity.OPERATE,
            write=False,
        )

    async def forget(self, ids: Sequence[int], by: str = "") -> int:
        """Remove messages from that list, and note who did; how many were on it."""

        def work(connection: Connection) -> int:
            count = policy_state.forget_unknown(connection, self._table, ids)
            if count:
                given = {"message_ids": list(ids[:MOST_NOTED])}
                note_action(connection, self._dialect, "forget_unknown", by, given, done=count)
            return count

        return await self._database.run(work, Activity.OPERATE)


def worker_name() -> str:
    """Host and process id of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"

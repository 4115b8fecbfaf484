"""Operators' changes of single messages."""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.reasons import CANCELLED
from faststream_sqlbroker.core.repairs import Repair
from faststream_sqlbroker.dialects import Dialect
from faststream_sqlbroker.dialects import repairs as rows
from faststream_sqlbroker.policies.rows import PolicyRows
from faststream_sqlbroker.store.transaction import Transactions


class Repairs:
    """Writes them; each operation is one transaction, and changes only a message that waits.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self, transactions: Transactions, dialect: Dialect, places: asyncio.Semaphore
    ) -> None:
        """Each operation takes one of the store's `places`."""
        self._transactions = transactions.doing(Activity.OPERATE, Activity.REPAIR)
        self._dialect = dialect
        self._places = places

    async def cancel(self, message_id: int, text: str) -> Repair:
        """End the message as DISCARDED; `text` goes before its last error."""

        def change(connection: Connection, row: Any) -> None:
            # In the live row: the archived one is a copy of it.
            rows.note(connection, self._dialect, row, text)
            ends = {row.id: Discard(CANCELLED)}
            PolicyRows(self._dialect).discard(connection, row.queue, ends, keep=True)

        return await self._run(message_id, change)

    async def set_due(self, message_id: int, at: datetime | float) -> Repair:
        """Make the message due at a moment, or in so many seconds."""
        return await self._run(message_id, rows.set_due(self._dialect, at))

    async def move(self, message_id: int, queue: str) -> Repair:
        """Move the message to the end of `queue`, with new counters."""
        return await self._run(message_id, rows.move_to(self._dialect, queue))

    async def edit(
        self, message_id: int, fields: Mapping[str, Any], at: datetime | float | None
    ) -> Repair:
        """Set columns of the message, and its due time unless `at` is None."""
        return await self._run(message_id, rows.set_fields(self._dialect, dict(fields), at))

    async def _run(self, message_id: int, change: rows.Change) -> Repair:
        return await self._transactions.run(
            lambda c: rows.repair(c, self._dialect, message_id, change), self._places
        )

"""Messages that are removed before their handlers start, and what is not known of them."""

import asyncio
import os
import socket
from collections.abc import Sequence
from uuid import UUID

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, SettleResult, UnknownOutcome
from faststream_sqlbroker.dialects import Dialect, policy_state
from faststream_sqlbroker.store.transaction import Transactions


class AckFirstStarts:
    """Notes in the database what has started and not yet ended, for `AckPolicy.ACK_FIRST`.

    A start is known by its holder, the subscriber of one process, which renews it while the handler
    runs.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self, transactions: Transactions, dialect: Dialect, places: asyncio.Semaphore
    ) -> None:
        """Share the store's `places`."""
        self._transactions, self._dialect, self._places = (
            transactions.doing(Activity.CONSUME, Activity.STATE),
            dialect,
            places,
        )
        self._operating = transactions.doing(Activity.OPERATE)
        self._table = dialect.tables.policy_state
        self._worker = worker_name()

    async def remove_first(
        self,
        settlements: Sequence[Settlement],
        rows: Sequence[ClaimedMessage],
        holder: UUID,
        lease: float,
    ) -> SettleResult:
        """Write `settlements` of `rows` and note the starts of those written, in one transaction.

        If `holder` neither ends nor renews one for `lease` seconds, `unknown` lists it.
        """
        remove, worker = self._dialect.remove_first, self._worker
        return await self._transactions.run(
            lambda c: remove(c, settlements, rows, holder, lease, worker), self._places
        )

    async def renew(
        self, started: Sequence[policy_state.Started], holder: UUID, lease: float
    ) -> None:
        """What `holder` has started still runs."""
        await self._transactions.run(
            lambda c: policy_state.renew_started(c, self._table, started, holder, lease),
            self._places,
        )

    async def end(self, started: Sequence[policy_state.Started], holder: UUID) -> None:
        """What `holder` has started has ended."""
        await self._transactions.run(
            lambda c: policy_state.note_ended(c, self._table, started, holder), self._places
        )

    async def unknown(self, queue: str | None, limit: int) -> list[UnknownOutcome]:
        """Up to `limit` starts whose holder was not heard of for its lease, the oldest first; None:
        any queue.
        """
        return await self._operating.run(
            lambda c: policy_state.unknown(c, self._table, queue, limit), self._places, write=False
        )

    async def forget(self, ids: Sequence[int]) -> int:
        """Take messages off that list; how many were on it."""
        return await self._operating.run(
            lambda c: policy_state.forget_unknown(c, self._table, ids), self._places
        )


def worker_name() -> str:
    """Host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"

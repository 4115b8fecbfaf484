"""Messages that the application takes one by one, each operation one transaction."""

import asyncio
from collections.abc import Sequence
from functools import partial
from uuid import UUID

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, SettleResult
from faststream_sqlbroker.core.settle import needed_to_write
from faststream_sqlbroker.dialects import Dialect
from faststream_sqlbroker.dialects.direct_claim import (
    DirectClaim,
    Judge,
    Replaced,
    settle_replaced,
    take,
)
from faststream_sqlbroker.store.transaction import Transactions


class DirectClaims:
    """DirectClaims single messages, outside of subscribers.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self, transactions: Transactions, dialect: Dialect, places: asyncio.Semaphore
    ) -> None:
        """Share the store's `places`."""
        self._transactions = transactions.planning_anew()
        self._dialect, self._places = dialect, places

    async def take(
        self, queues: Sequence[str], lease: float, token: UUID, judge: Judge, *, release: bool
    ) -> DirectClaim:
        """Lease the first due message of `queues`, in their order, that `judge` lets through.

        What `judge` wants to be written is written in the same transaction. It may be asked twice
        of the same row, if the database wants the transaction to be repeated. Expired leases of
        `queues` are given back where nothing else is due, with `release` in any case.
        """
        written: list[Settlement] = []

        def noted(row: ClaimedMessage) -> tuple[Settlement | None, bool]:
            settlement, wanted = judge(row)
            if settlement is not None:
                written.append(settlement)
            return settlement, wanted

        return await self._transactions.run(
            lambda c: take(self._dialect, c, queues, lease, token, noted, release=release),
            self._places,
            doing=lambda: needed_to_write(written) | {Activity.TAKE},
        )

    async def settle(self, settlement: Settlement, replaced: Replaced | None) -> SettleResult:
        """Write `settlement`, with a new body if there is one, in one transaction, if its lease is
        still held.
        """
        run, doing = self._transactions.run, partial(needed_to_write, [settlement])
        if replaced is None:
            return await run(self._dialect.settling_one(settlement), self._places, doing=doing)
        return await run(
            lambda c: settle_replaced(self._dialect, c, settlement, replaced),
            self._places,
            doing=doing,
        )

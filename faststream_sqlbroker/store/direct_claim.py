"""Claims of single messages by application code; each operation is one transaction."""

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
    """Claims and settles single messages, without a subscriber.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self, transactions: Transactions, dialect: Dialect, places: asyncio.Semaphore
    ) -> None:
        """Each operation takes one of the store's `places`."""
        self._transactions = transactions.planning_anew()
        self._dialect = dialect
        self._places = places

    async def take(
        self, queues: Sequence[str], lease: float, token: UUID, judge: Judge, *, release: bool
    ) -> DirectClaim:
        """Lease the first due message of `queues`, in their order, that `judge` accepts.

        A settlement that `judge` returns is written in the same transaction. `judge` may be called
        twice for a row, if the database makes the broker repeat the transaction. Expired leases of
        `queues` are released if nothing is due, and always with `release`.
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
        """Write `settlement`, and a new body if given, if its lease is still held."""
        run = self._transactions.run
        doing = partial(needed_to_write, [settlement])
        if replaced is None:
            return await run(self._dialect.settling_one(settlement), self._places, doing=doing)
        return await run(
            lambda c: settle_replaced(self._dialect, c, settlement, replaced),
            self._places,
            doing=doing,
        )

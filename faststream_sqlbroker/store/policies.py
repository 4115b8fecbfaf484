"""Claims under scheduling policies, and keys that are handled once."""

import asyncio
from collections.abc import Sequence

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.dialects import Dialect, once, policy_state
from faststream_sqlbroker.dialects.policy_request import Claim, PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.store.ack_first import worker_name
from faststream_sqlbroker.store.transaction import Transactions


class PolicyStore:
    """What policies need of the database.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self, transactions: Transactions, dialect: Dialect, places: asyncio.Semaphore
    ) -> None:
        """Share the store's `places`."""
        self._transactions = transactions.doing(Activity.CONSUME, Activity.STATE)
        self._dialect, self._places = dialect, places

    async def claim(
        self, wanted: PolicyClaimRequest, memory: ScanPosition
    ) -> tuple[Claim, ScanPosition]:
        """Lease what the policies let start; the memory is for the next claim."""

        def claim(connection: Connection) -> tuple[Claim, ScanPosition]:
            moved = memory.copy()
            return self._dialect.scheduled.claim(connection, wanted, moved), moved

        return await self._transactions.run(claim, self._places)

    async def claim_keys(
        self, rows: Sequence[ClaimedMessage], ttl: float
    ) -> dict[int, tuple[once.Verdict, int | None]]:
        """Claim the keys of `rows`, whose handlers are about to start, for `ttl` seconds, and
        commit that.

        Repeating it with the same leases changes nothing.

        Returns:
            What is to become of each row, by id, and the message that has its key.
        """
        table, lock = self._dialect.tables.policy_state, self._dialect.lock
        return await self._transactions.run(
            lambda c: once.claim_keys(c, table, lock, rows, ttl, worker_name()), self._places
        )

    async def forget_expired(self, limit: int) -> int:
        """Remove up to `limit` states that may be forgotten by now; how many."""
        table = self._dialect.tables.policy_state
        return await self._transactions.run(
            lambda c: policy_state.forget_expired(c, table, limit), self._places
        )

    async def give_back_keys(self, rows: Sequence[ClaimedMessage]) -> None:
        """Let the keys of `rows`, if they are still claimed by them, be claimed again."""
        table = self._dialect.tables.policy_state
        await self._transactions.run(lambda c: once.give_back_keys(c, table, rows), self._places)

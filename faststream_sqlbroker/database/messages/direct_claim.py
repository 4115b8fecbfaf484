"""Claims of single messages by application code; each operation is one transaction."""

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from uuid import UUID

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, SettleResult
from faststream_sqlbroker.core.settle import needed_to_write
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts.cancels import of_leases
from faststream_sqlbroker.database.parts.database_id import read_database_id
from faststream_sqlbroker.database.parts.direct_claim import (
    DirectClaim,
    Judge,
    Replaced,
    extend,
    hold,
    settle_replaced,
    take,
)

LOOK_INTERVAL = 10.0
"""Seconds between two looks for the database's part of correlation ids; the first subscriber of the
fleet draws it."""


class DirectClaims:
    """Claims and settles single messages, without a subscriber.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self,
        database: Database,
        correlation_ids: CorrelationIds,
    ) -> None:
        """`take` completes `correlation_ids`."""
        self._database = database
        self._correlation_ids = correlation_ids
        self._look_at = float("-inf")
        """When to look again for what they are made of (monotonic seconds)."""
        self._dialect = database.dialect
        self._state = database.tables.policy_state

    async def take(
        self,
        queues: Sequence[str],
        lease: float,
        token: UUID,
        judge: Judge,
        *,
        release: bool,
        archive: bool = True,
        limit: int = 1,
    ) -> DirectClaim:
        """Lease the first due messages of `queues`, in their order, that `judge` accepts: up to
        `limit`, perhaps fewer than there are.

        A settlement that `judge` returns is written in the same transaction. `judge` may be called
        twice for a row, if the database makes the broker repeat the transaction. Expired leases of
        `queues` are released if nothing is due, and always with `release`; what of them
        was to be cancelled is discarded instead, and kept if `archive`.
        """
        ids = self._correlation_ids
        now = self._database.clock.monotonic()
        looks = ids.database_id is None and now >= self._look_at
        found: str | None = None
        written: list[Settlement] = []

        def noted(row: ClaimedMessage) -> tuple[Settlement | None, bool]:
            settlement, wanted = judge(row)
            if settlement is not None:
                written.append(settlement)
            return settlement, wanted

        def work(connection: Connection) -> DirectClaim:
            nonlocal found
            if looks:
                found = read_database_id(connection, self._dialect.tables.policy_state)
            return take(
                self._dialect,
                connection,
                queues,
                lease,
                token,
                noted,
                release=release,
                archive=archive,
                limit=limit,
            )

        taken = await self._database.run(
            work, doing=lambda: needed_to_write(written) | {Activity.TAKE}, planned_anew=True
        )
        if looks:
            ids.database_id = found or ids.database_id
            self._look_at = now + LOOK_INTERVAL
        return taken

    async def settle(self, settlement: Settlement, replaced: Replaced | None) -> SettleResult:
        """Write `settlement`, and a new body if given, if its lease is still held."""
        run = partial(
            self._database.run, doing=partial(needed_to_write, [settlement]), planned_anew=True
        )
        if replaced is None:
            return await run(self._dialect.settling_one(settlement))
        return await run(lambda c: settle_replaced(self._dialect, c, settlement, replaced))

    async def settle_held(
        self,
        queue: str,
        message_id: int,
        token: UUID,
        decide: Callable[[ClaimedMessage, float], Settlement],
        replace: Callable[[ClaimedMessage], Replaced] | None = None,
    ) -> Settlement | None:
        """Write what `decide` makes of a message that is leased with `token`; None: the lease is
        another's, and nothing is written.

        `decide` gets the message and the seconds since its claim; it may be called twice, if the
        database makes the broker repeat the transaction. `replace` gives a new body.
        """
        written: list[Settlement] = []

        def work(connection: Connection) -> Settlement | None:
            written.clear()
            row = hold(self._dialect, connection, queue, message_id, token)
            if row is None:
                return None
            age = (self._dialect.now(connection) - row.acquired_at).total_seconds()
            settlement = decide(row, max(0.0, age))
            if not settlement.leaves:
                # Nothing brings a message back which an operator has cancelled.
                asked = of_leases(connection, self._state, [(message_id, token)])
                if message_id in asked:
                    row.cancelled = asked[message_id].text
                    settlement = decide(row, max(0.0, age))
            written.append(settlement)
            if replace is None:
                result = self._dialect.settle(connection, [settlement])
            else:
                new = replace(row)
                result = settle_replaced(self._dialect, connection, settlement, new)
            return settlement if result.settled else None

        doing = {Activity.TAKE, Activity.ARCHIVE}
        found: Settlement | None = await self._database.run(
            work, doing=lambda: frozenset(needed_to_write(written) | doing), planned_anew=True
        )
        return found

    async def extend_held(
        self, queue: str, message_id: int, token: UUID, lease: float
    ) -> datetime | None:
        """Let a lease end `lease` seconds from now, never sooner than it does; its end, by the
        database's clock. None: the lease is another's.
        """
        found: datetime | None = await self._database.run(
            lambda c: extend(self._dialect, c, queue, message_id, token, lease),
            Activity.TAKE,
            planned_anew=True,
        )
        return found

"""Schedules, each operation one transaction."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.status import Schedule, ScheduleState
from faststream_sqlbroker.dialects import Dialect, schedules
from faststream_sqlbroker.store.transaction import Transactions


class Schedules:
    """Remembers what has fired; who publishes what is due is known by its token.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self, transactions: Transactions, dialect: Dialect, places: asyncio.Semaphore
    ) -> None:
        """Share the store's `places`."""
        self._transactions, self._dialect, self._places = (
            transactions.doing(Activity.SCHEDULE, Activity.PUBLISH),
            dialect,
            places,
        )
        self._operating = transactions.doing(Activity.OPERATE)
        self._table = dialect.tables.policy_state

    async def define(self, name: str, decide: schedules.Decide) -> ScheduleState | None:
        """Let `decide` write the state of a schedule, which is made if it is new; the state then."""
        return await self._transactions.run(
            lambda c: schedules.define(self._dialect, c, name, decide), self._places
        )

    async def read(self, names: Sequence[str]) -> tuple[datetime, dict[str, schedules.Seen]]:
        """The database's clock, and the schedules `names` as far as there are any."""
        return await self._transactions.run(
            lambda c: schedules.read(self._dialect, c, names), self._places, write=False
        )

    async def hold(self, name: str, token: UUID, lease: float) -> ScheduleState | None:
        """Take a schedule for `lease` seconds, if it is due and nobody has it; its state, or None."""
        return await self._transactions.run(
            lambda c: schedules.hold(self._dialect, c, name, token, lease), self._places
        )

    async def extend(self, name: str, token: UUID, lease: float) -> bool:
        """Lengthen the lease to `lease` seconds from now; false if `token` has the schedule no
        more.
        """
        return await self._transactions.run(
            lambda c: schedules.extend(c, self._table, name, token, lease), self._places
        )

    async def publish(
        self,
        name: str,
        token: UUID,
        state: ScheduleState,
        rows: Sequence[NewMessage],
        lease: float | None,
    ) -> bool:
        """Insert `rows` and write `state` in one transaction; false, and nothing written, if
        `token` lost the schedule.

        It stays taken for `lease` seconds; None gives it back.
        """
        return await self._transactions.run(
            lambda c: schedules.publish(self._dialect, c, name, token, state, rows, lease),
            self._places,
        )

    async def put_off(self, name: str, token: UUID, state: ScheduleState, pause: float) -> None:
        """Give a schedule back, if `token` has it; nobody takes it for `pause` seconds."""
        await self._transactions.run(
            lambda c: schedules.put_off(c, self._table, name, token, state, pause), self._places
        )

    async def give_back(self, name: str, token: UUID) -> None:
        """Let a schedule be taken by others at once, if `token` has it."""
        await self._transactions.run(
            lambda c: schedules.give_back(c, self._table, name, token), self._places
        )

    async def forget(self, name: str) -> bool:
        """Remove a schedule; whether it was there."""
        return await self._operating.run(
            lambda c: schedules.forget(c, self._table, name), self._places
        )

    async def listed(self, limit: int) -> list[Schedule]:
        """Up to `limit` schedules, by name."""
        return await self._operating.run(
            lambda c: schedules.listed(c, self._table, limit), self._places, write=False
        )

"""Keep the leases of everything this process holds: one fenced statement renews them all."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.messages.handler import current
from faststream_sqlbroker.flow.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.prefetch import prefetch_lease

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

MAX_PER_STATEMENT = 5_000
"""Leases that one statement renews: it locks their rows, and its text names each of them."""
_LOST = "its outcome will not be written"


class LeaseKeeper:
    """Renews rows held longer than a third of their lease; fast messages cost no renewal."""

    def __init__(
        self, store: "Store", inflight: Inflight, log: Log, *, lease: float, max_lease: float | None
    ) -> None:
        """`lease` and `max_lease` in seconds."""
        self._store = store
        self._inflight = inflight
        self._log = log
        self._clock = inflight.clock
        self._lease = lease
        self._max_lease = max_lease

    async def tick(self) -> float:
        """Renew what is due, what waits for a worker by the shorter lease; look again after a
        twelfth of that.
        """
        shorter = prefetch_lease(self._lease)
        if self._inflight.metrics.on:
            self._tell_margin(shorter)
        if due := self._inflight.due_for_renewal(self._lease, self._max_lease):
            waiting = {id(row) for row in self._inflight.waiting.items}
            waits = [row for row in due if row.prefetched and id(row) in waiting]
            # A row that is locked elsewhere is not waited for: its transaction may last for long,
            # and its lock keeps the lease.
            await self._renew(waits, shorter, wait=False)
            kept = {id(row) for row in waits}
            await self._renew([row for row in due if id(row) not in kept], self._lease, wait=False)
        return max(0.02, shorter / 12)

    def _tell_margin(self, shorter: float) -> None:
        """Tell how soon the first lease runs out, before this look renews any."""
        full = self._lease
        ends = [
            max(
                max(row.renewed_monotonic, row.locked_monotonic)
                + (shorter if row.prefetched else full),
                row.held_until,
            )
            for row in self._inflight.held.values()
        ]
        if ends:
            self._inflight.metrics.lease_margin(min(ends) - self._clock.monotonic())

    async def hold_for_start(self, rows: Sequence[ClaimedMessage]) -> None:
        """Renew `rows`, which have waited and are to start now; those that are not held any more
        are lost.

        Raises:
            StoreError: the database could not be asked, or a row was locked elsewhere for too
                long.
        """
        # Here a locked row is waited for: the handler must not start without its lease.
        await self._renew(rows, self._lease, wait=True)

    async def _renew(self, rows: Sequence[ClaimedMessage], lease: float, *, wait: bool) -> None:
        for start in range(0, len(rows), MAX_PER_STATEMENT):
            part = rows[start : start + MAX_PER_STATEMENT]
            asked = self._clock.monotonic()
            # The database counts from when it executes this, later than `asked`. So we may take a
            # lease for shorter than it is, never for longer.
            leases = [(row.id, row.lease_token) for row in part]
            locked: set[int] = set()
            if wait:
                renewed = await self._store.renew(leases, lease)
            else:
                renewed, locked = await self._store.renew_free(leases, lease)
            for row in part:
                if row.id in renewed:
                    row.renewed(asked, shorter=lease < self._lease)
                elif row.id in locked:
                    row.locked_monotonic = asked
            lost = [row for row in part if row.id not in renewed and row.id not in locked]
            self._inflight.lose(lost, "renew", _LOST)

    async def extend(self, rows: Sequence[ClaimedMessage], seconds: float) -> bool:
        """Hold `rows` for at least `seconds` from now, which `max_lease` does not end; whether all
        are still held.

        Inside a handler's transaction its locks are the leases, and are only looked after.
        Elsewhere a row that another session has locked is waited for.

        Raises:
            StoreError: the database could not be asked, or a row was locked elsewhere for too
                long.
        """
        asked = self._clock.monotonic()
        transaction = current.get()
        leases = [(r.id, r.lease_token) for r in rows if not r.lease_lost]
        if transaction is not None:
            held = await transaction.hold(leases, max(seconds, self._lease))
        else:
            # A handler may have asked for more before; a renewal must not shorten that.
            longest = max(row.held_until - asked for row in rows)
            held = await self._store.renew(leases, max(seconds, self._lease, longest))
        for row in rows:
            # Inside a transaction nothing was written: the lock keeps the lease until the
            # transaction ends.
            if row.id in held and transaction is None:
                row.renewed(asked, shorter=False)
                row.held_until = max(row.held_until, asked + seconds)
        lost = [row for row in rows if row.id not in held]
        self._inflight.lose(lost, "renew", _LOST)
        return not lost

"""Keep the leases of everything this process holds: one fenced statement renews them all."""

from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.flow.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.transactional import current

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

MAX_PER_STATEMENT = 5_000
_LOST = "its outcome will not be written"


class LeaseKeeper:
    """Renews rows held longer than a third of their lease; fast messages cost no renewal."""

    def __init__(
        self, store: "Store", inflight: Inflight, log: Log, *, lease: float, max_lease: float | None
    ) -> None:
        """`lease` and `max_lease` in seconds."""
        self._store, self._inflight, self._log = store, inflight, log
        self._lease, self._max_lease = lease, max_lease

    async def tick(self) -> float:
        """Renew what is due; look again after a twelfth of the lease."""
        due = self._inflight.due_for_renewal(self._lease, self._max_lease)
        for start in range(0, len(due), MAX_PER_STATEMENT):
            part = due[start : start + MAX_PER_STATEMENT]
            asked = monotonic()
            leases = [(r.id, r.lease_token) for r in part]
            held = await self._store.renew(leases, self._lease, skip_locked=True)
            for row in part:
                if row.id in held:
                    row.renewed_monotonic = asked
            self._inflight.lose([row for row in part if row.id not in held], "renew", _LOST)
        return max(0.02, self._lease / 12)

    async def extend(self, rows: Sequence[ClaimedMessage], seconds: float) -> bool:
        """Hold `rows` for at least `seconds` from now, which `max_lease` does not end; whether all are still held.

        Inside a handler's transaction its locks are the leases, and are only looked after. Elsewhere a row that
        somebody else has locked is waited for.

        Raises:
            StoreError: the database could not be asked, or somebody else had a row locked for too long.
        """
        asked, transaction = monotonic(), current.get()
        leases = [(r.id, r.lease_token) for r in rows if not r.lease_lost]
        if transaction is not None:
            held = await transaction.hold(leases, max(seconds, self._lease))
        else:
            longest = max(row.held_until - asked for row in rows)
            held = await self._store.renew(leases, max(seconds, self._lease, longest))
        for row in rows:
            if row.id in held and transaction is None:
                row.renewed_monotonic = asked
                row.held_until = max(row.held_until, asked + seconds)
        lost = [row for row in rows if row.id not in held]
        self._inflight.lose(lost, "renew", _LOST)
        return not lost

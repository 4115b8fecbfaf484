"""Give expired leases back (the release-stuck loop)."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from faststream_sqlbroker.exceptions import AccessError
from faststream_sqlbroker.flow.housekeeping import Housekeeping
from faststream_sqlbroker.flow.lookout import LONGEST_TRUST, TOLD_INTERVAL, Lookout
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.metrics import SubscriberMetrics
from faststream_sqlbroker.flow.prefetch import PREFETCH_LEASE

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

BATCH = 1_000
"""Rows that one transaction gives back: it locks them until it commits."""
SEARCH_INTERVAL = 5.0
"""Most seconds between two searches while leases are held in the queues."""
IDLE_INTERVAL = PREFETCH_LEASE - LONGEST_TRUST
"""Most seconds between two searches while none is held: a lease that begins right after what the
lookout knows ends about then."""
SHORTEST_WAIT = 0.02
"""Seconds: a lease that ends in a moment must not make the loop spin."""


class StuckReleaser:
    """Returns rows whose lease has expired, by the database's clock and nothing else.

    Processes with different settings can run side by side: each row carries its own expiry. A
    search only reads.
    """

    def __init__(
        self,
        store: "Store",
        queues: Sequence[str],
        log: Log,
        *,
        interval: float,
        archive: bool = True,
        told: bool = False,
        released: Callable[[], None],
        lookout: Lookout,
        housekeeping: Housekeeping,
        metrics: SubscriberMetrics | None = None,
    ) -> None:
        """`interval`: most seconds between two searches, and between two calls of `housekeeping`;
        `archive`: whether what operators have cancelled is kept; `told`: the lookout wakes it when
        there are leases.

        `released` is called when rows came back; `metrics` are told how many. The `lookout` knows
        when leases end.
        """
        self._store = store
        self._queues = queues
        self._log = log
        self._interval = interval
        self._archive = archive
        self._told = told
        self._released = released
        self._lookout = lookout
        self._housekeeping = housekeeping
        self._metrics = SubscriberMetrics() if metrics is None else metrics

    async def tick(self) -> float:
        """Search, and release one batch; at once again after a full one."""
        count = cancelled = 0
        ends_in = await self._lookout.lease_ends_in(self._queues, told=self._told)
        if ends_in is not None and ends_in <= 0:
            # A lease that ends while cancels are looked for may be one of them: it waits for the
            # next search.
            before = await self._store.server.now()
            cancelled = await self._end_cancelled()
            count = await self._store.release_stuck(self._queues, BATCH, before)
        if count:
            self._log(
                logging.WARNING, f"{count} expired leases given back in {', '.join(self._queues)}"
            )
            self._metrics.released(count)
        if count or cancelled:
            self._lookout.released()
            self._released()
            return 0.0  # there may be more, and when the next one ends is not known yet
        longest = TOLD_INTERVAL if self._told and ends_in is None else self._interval
        clean_in = await self._housekeeping.clean(longest)
        if ends_in is None:
            return TOLD_INTERVAL if self._told else min(IDLE_INTERVAL, clean_in)
        # One that has just ended may not have by the database's clock; one that has ended long ago
        # is locked by a handler's transaction. As long as it is over, so long is waited again.
        return max(SHORTEST_WAIT, min(abs(ends_in), SEARCH_INTERVAL, clean_in))

    async def _end_cancelled(self) -> int:
        """Discard what was to be cancelled, before it is given back with the others; how many."""
        try:
            count = await self._store.end_cancelled(self._queues, archive=self._archive)
        except AccessError:
            return 0  # other leases are given back without this right
        if count:
            text = f"{count} cancelled messages discarded in {', '.join(self._queues)}, whose "
            self._log(logging.WARNING, f"{text}leases have run out")
        return count

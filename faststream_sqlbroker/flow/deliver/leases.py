"""Leases: keep those of this process, give expired ones back, and write the progress of handlers
that hold one.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.messages.handler import current
from faststream_sqlbroker.exceptions import AccessError, StoreError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.prefetch import PREFETCH_LEASE, prefetch_lease
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping
from faststream_sqlbroker.flow.fleet.lookout import LONGEST_TRUST, TOLD_INTERVAL, Lookout
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.metrics import SubscriberMetrics

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


MAX_PER_STATEMENT = 5_000
"""Leases that one statement renews: it locks their rows, and its text names each of them."""
_LOST = "its outcome will not be written"


class LeaseKeeper:
    """Renews rows held longer than a third of their lease; fast messages cost no renewal.

    One fenced statement renews all that this process holds.
    """

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
    """The release-stuck loop: returns rows whose lease has expired, by the database's clock only.

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


PROGRESS_INTERVAL = 1.0
"""Seconds for which nothing more is written of a message."""


class ProgressNotes:
    """Writes what handlers say of their progress, at most once a second for each message."""

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        self._store = store
        self._log = log
        self._clock = clock
        self._written: dict[int, float] = {}

    async def note(self, row: ClaimedMessage, fraction: float, text: str | None) -> bool:
        """Write it, unless something was written less than a second ago; whether the lease is
        held, as far as is known.

        A failing database ends no handler: the next call tries again.
        """
        if row.lease_lost:
            return False
        now = self._clock.monotonic()
        if now - self._written.get(row.id, float("-inf")) < PROGRESS_INTERVAL:
            return True
        if current.get() is not None and self._store.dialect.one_writer:
            # SQLite: the handler's transaction is the only writer, and hides what it writes.
            return True
        # What is older has no effect any more, so the dictionary stays small.
        self._written = {i: at for i, at in self._written.items() if now - at < PROGRESS_INTERVAL}
        self._written[row.id] = now
        info = {"fraction": fraction, "text": text}
        try:
            return await self._store.messages.note_progress(row.id, row.lease_token, info)
        except StoreError as error:
            self._log(logging.DEBUG, f"the progress of message {row.id} is not written: {error}")
            return True

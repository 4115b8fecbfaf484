"""Lease renewal, release of expired leases, and progress reports of handlers that hold one."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.messages.handler import current_transaction
from faststream_sqlbroker.exceptions import AccessError, StoreError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.prefetch import PREFETCH_LEASE, get_prefetch_lease
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping
from faststream_sqlbroker.flow.fleet.lookout import (
    MAX_LEASE_INFO_AGE,
    NOTIFIED_INTERVAL,
    SharedPoller,
)
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.metrics import SubscriberMetrics

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


MAX_PER_STATEMENT = 5_000
"""Leases that one statement renews: it locks their rows, and its text names each of them."""
_LOST = "its outcome will not be written"


class LeaseKeeper:
    """Renews rows held longer than a third of their lease; fast messages need no renewal.

    One fenced statement renews all rows that this process holds.
    """

    def __init__(
        self, store: "Store", inflight: Inflight, log: Log, *, lease: float, max_lease: float | None
    ) -> None:
        """Take `lease` and `max_lease` in seconds."""
        self._store = store
        self._inflight = inflight
        self._log = log
        self._clock = inflight.clock
        self._lease = lease
        self._max_lease = max_lease

    async def tick(self) -> float:
        """Renew the due leases; return a twelfth of the prefetch lease as the pause.

        Rows that wait for a worker get the shorter prefetch lease: if this process dies, messages
        that it had not started are soon back.
        """
        prefetch_lease_seconds = get_prefetch_lease(self._lease)
        if self._inflight.metrics.is_enabled:
            self._record_margin(prefetch_lease_seconds)
        if due := self._inflight.list_due_for_renewal(self._lease, self._max_lease):
            waiting = {id(row) for row in self._inflight.waiting.items}
            waiting_rows = [row for row in due if row.prefetched and id(row) in waiting]
            # Skip rows that are locked elsewhere: their transaction may last for long, and its lock
            # keeps the lease.
            await self._renew(waiting_rows, prefetch_lease_seconds, wait=False)
            waiting_ids = {id(row) for row in waiting_rows}
            await self._renew(
                [row for row in due if id(row) not in waiting_ids], self._lease, wait=False
            )
        return max(0.02, prefetch_lease_seconds / 12)

    def _record_margin(self, prefetch_lease_seconds: float) -> None:
        """Record how soon the first lease expires, before this tick renews any.

        For metrics: a small margin tells that renewals come late. A lock by another transaction
        keeps a lease, too, and a handler may have asked for a longer lease.
        """
        lease = self._lease
        expirations = [
            max(
                max(row.renewed_monotonic, row.locked_monotonic)
                + (prefetch_lease_seconds if row.prefetched else lease),
                row.held_until,
            )
            for row in self._inflight.held.values()
        ]
        if expirations:
            self._inflight.metrics.record_lease_margin(min(expirations) - self._clock.monotonic())

    async def renew_for_start(self, rows: Sequence[ClaimedMessage]) -> None:
        """Renew `rows`, which have waited and start now; rows whose lease is gone are lost.

        Raises:
            StoreError: the database could not be queried, or a row was locked elsewhere for too
                long.
        """
        # Wait for locked rows here: the handler must not start without its lease.
        await self._renew(rows, self._lease, wait=True)

    async def _renew(self, rows: Sequence[ClaimedMessage], lease: float, *, wait: bool) -> None:
        """Renew the leases of `rows` to `lease` seconds; rows that are not found are lost.

        Without `wait`, rows that another transaction has locked are skipped, and stay held: the
        lock keeps other processes from taking them. With `wait` the statement waits for the lock,
        for a handler that must not start without its lease.
        """
        for start in range(0, len(rows), MAX_PER_STATEMENT):
            chunk = rows[start : start + MAX_PER_STATEMENT]
            started_at = self._clock.monotonic()
            # The database counts from the execution of the statement, later than `started_at`. So
            # the lease may be underestimated here, but never overestimated.
            leases = [(row.id, row.lease_token) for row in chunk]
            locked: set[int] = set()
            if wait:
                renewed = await self._store.renew(leases, lease)
            else:
                renewed, locked = await self._store.renew_free(leases, lease)
            for row in chunk:
                if row.id in renewed:
                    row.record_renewal(started_at, shorter=lease < self._lease)
                elif row.id in locked:
                    row.locked_monotonic = started_at
            lost_rows = [row for row in chunk if row.id not in renewed and row.id not in locked]
            self._inflight.lose(lost_rows, "renew", _LOST)

    async def extend(self, rows: Sequence[ClaimedMessage], seconds: float) -> bool:
        """Hold `rows` for at least `seconds` from now, regardless of `max_lease`.

        Called by a handler that knows that it takes long. Inside of its transaction, if any, the
        locks keep the leases: these are checked, and the server lets the session be silent for so
        long. Elsewhere a row that another session has locked is waited for.

        Returns:
            True if all rows are still held.

        Raises:
            StoreError: the database could not be queried, or a row was locked elsewhere for too
                long.
        """
        started_at = self._clock.monotonic()
        transaction = current_transaction.get()
        leases = [(r.id, r.lease_token) for r in rows if not r.lease_lost]
        if transaction is not None:
            held_ids = await transaction.hold(leases, max(seconds, self._lease))
        else:
            # A handler may have extended the lease further before; a renewal must not shorten that.
            max_remaining = max(row.held_until - started_at for row in rows)
            held_ids = await self._store.renew(leases, max(seconds, self._lease, max_remaining))
        for row in rows:
            # Inside a transaction nothing was written: the lock keeps the lease until the
            # transaction ends.
            if row.id in held_ids and transaction is None:
                row.record_renewal(started_at, shorter=False)
                row.held_until = max(row.held_until, started_at + seconds)
        lost_rows = [row for row in rows if row.id not in held_ids]
        self._inflight.lose(lost_rows, "renew", _LOST)
        return not lost_rows


BATCH = 1_000
"""Maximum rows that one transaction releases: it locks them until it commits."""
SEARCH_INTERVAL = 5.0
"""Maximum seconds between two searches while leases are held in the queues."""
IDLE_INTERVAL = PREFETCH_LEASE - MAX_LEASE_INFO_AGE
"""Maximum seconds between two searches while no lease is held. A lease that begins right after the
shared poll's last result ends about then.
"""
MIN_WAIT = 0.02
"""Seconds: a lease that is about to end must not make the loop spin."""


class StuckReleaser:
    """Releases rows whose lease has expired, by the database's clock only.

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
        notify_only: bool = False,
        on_released: Callable[[], None],
        poller: SharedPoller,
        housekeeping: Housekeeping,
        metrics: SubscriberMetrics | None = None,
    ) -> None:
        """Search at least every `interval` seconds, and call `housekeeping` as often.

        `archive` keeps messages that operators have cancelled. With `notify_only` the shared
        `poller`, which knows when leases end, wakes the loop when leases exist. `on_released` is
        called after rows were released, and `metrics` count them.
        """
        self._store = store
        self._queues = queues
        self._log = log
        self._interval = interval
        self._archive = archive
        self._notify_only = notify_only
        self._on_released = on_released
        self._poller = poller
        self._housekeeping = housekeeping
        self._metrics = SubscriberMetrics() if metrics is None else metrics

    async def tick(self) -> float:
        """Release up to a batch of rows with expired leases; return the pause in seconds.

        The shared poll knows when the first lease ends, so a search is sent only after that. 0 is
        returned after a release, as there may be more. Without any, due housekeeping is done.
        """
        count = cancelled = 0
        expires_in = await self._poller.lease_expires_in(
            self._queues, notify_only=self._notify_only
        )
        if expires_in is not None and expires_in <= 0:
            # A lease that ends during the search for cancels may belong to a cancelled message: it
            # waits for the next search.
            search_started_at = await self._store.server.read_now()
            cancelled = await self._discard_cancelled()
            count = await self._store.release_stuck(self._queues, BATCH, search_started_at)
        if count:
            text = (
                f"{count} expired leases released in {', '.join(self._queues)}: their holders died "
                "or did not renew them in time; the messages are delivered again"
            )
            self._log(logging.WARNING, text)
            self._metrics.record_released(count)
        if count or cancelled:
            self._poller.forget_leases()
            self._on_released()
            return 0.0  # there may be more, and the end of the next lease is unknown
        clean_interval = (
            NOTIFIED_INTERVAL if self._notify_only and expires_in is None else self._interval
        )
        clean_in = await self._housekeeping.clean(clean_interval)
        if expires_in is None:
            return NOTIFIED_INTERVAL if self._notify_only else min(IDLE_INTERVAL, clean_in)
        # A lease that has just ended may still run by the database's clock. One that ended long ago
        # is locked by a handler's transaction. So wait as long as it is overdue.
        return max(MIN_WAIT, min(abs(expires_in), SEARCH_INTERVAL, clean_in))

    async def _discard_cancelled(self) -> int:
        """Discard messages with expired leases that operators have cancelled; return the number.

        Called before the release, which would deliver them again.
        """
        try:
            count = await self._store.end_cancelled(self._queues, archive=self._archive)
        except AccessError:
            return 0  # other leases are released without this right
        if count:
            queues = ", ".join(self._queues)
            text = f"{count} cancelled messages with expired leases discarded in {queues}"
            self._log(logging.WARNING, text)
        return count


PROGRESS_INTERVAL = 1.0
"""Seconds after a report in which no other one of the same message is written."""


class ProgressWriter:
    """Writes the progress that handlers report, at most once a second per message."""

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        self._store = store
        self._log = log
        self._clock = clock
        self._written: dict[int, float] = {}

    async def write(self, row: ClaimedMessage, fraction: float, text: str | None) -> bool:
        """Write the progress of `row`, unless a report was written less than a second ago.

        A failing database does not fail the handler: the next call tries again.

        Returns:
            True if the lease is held, as far as is known.
        """
        if row.lease_lost:
            return False
        now = self._clock.monotonic()
        if now - self._written.get(row.id, float("-inf")) < PROGRESS_INTERVAL:
            return True
        if current_transaction.get() is not None and self._store.dialect.one_writer:
            # SQLite: the handler's transaction is the only writer, and hides what it writes.
            return True
        # Older entries have no effect any more, so the dictionary stays small.
        self._written = {i: at for i, at in self._written.items() if now - at < PROGRESS_INTERVAL}
        self._written[row.id] = now
        info = {"fraction": fraction, "text": text}
        try:
            return await self._store.messages.record_progress(row.id, row.lease_token, info)
        except StoreError as error:
            self._log(logging.DEBUG, f"could not write the progress of message {row.id}: {error}")
            return True

"""AckPolicy.ACK_FIRST, at most once: a message is removed right before its handler starts.

The same transaction notes the start; the note is deleted when the handler has ended. A note that
stays and is not renewed belongs to a handler that was cut off: whether it has run is unknown.
"""

import asyncio
import logging
from typing import TYPE_CHECKING
from uuid import uuid4

from faststream_sqlbroker.core.clock import Timer
from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log, retry_until

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


class AckFirstTracker:
    """The starts of a subscriber whose messages are removed first."""

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        rules: SettleRules,
        log: Log,
        *,
        lease: float,
        interval: float,
    ) -> None:
        """Renew starts to `lease` seconds, and write their ends every `interval` seconds.

        A start that is not renewed counts as cut off.
        """
        self._store = store
        self._inflight = inflight
        self._rules = rules
        self._log = log
        self._clock = inflight.clock
        self._lease = lease
        self._interval = interval
        self._holder = uuid4()
        self._timer: Timer | None = None
        self._running: dict[int, ClaimedMessage] = {}
        self._ended_rows: list[ClaimedMessage] = []
        self._is_stopped = False

    async def remove(self, rows: list[ClaimedMessage]) -> list[ClaimedMessage]:
        """Commit the removal of `rows`; return the rows that may start.

        The transaction also notes the start of each row. A row that is not known to be removed does
        not run, because it may be delivered again.
        """
        now = self._clock.monotonic()
        settlements = [
            settle(r, Ack(), self._rules, ended_after=now - r.claimed_monotonic) for r in rows
        ]
        try:
            with self._inflight.track_writing(settlements) as batch:
                result = await self._store.ack_first_starts.remove_first(
                    settlements, rows, self._holder, self._lease
                )
                self._inflight.apply_result(batch, result, "ack first", "its handler does not run")
        except StoreError as error:
            self._log(
                logging.ERROR,
                f"ACK_FIRST: the removal of messages {[r.id for r in rows]} is not confirmed, so "
                "their handlers do not run now; those that were not removed are delivered again "
                f"when their leases expire: {error}",
            )
            # Dropped, not released: if the removal was committed, there is no row to release; if
            # not, the row comes again when its lease has expired.
            self._inflight.drop(rows)
            result = None
        except asyncio.CancelledError:
            # The removal may be committed all the same, which the flush finds out; if not, the rows
            # are released.
            self._inflight.mark_unanswered(batch)
            self._inflight.release(row for row in rows if not row.lease_lost)
            raise
        # Only rows that are known to be removed start: any other row may be delivered again.
        started_rows = [r for r in rows if result is not None and r.id in result.settled_ids]
        for row in rows:
            row.record_outcome(Ack())
        for row in started_rows:
            row.record_renewal(now)
            self._running[row.id] = row
        return started_rows

    def finish(self, rows: list[ClaimedMessage]) -> None:
        """Note that the handlers of `rows` have ended, successfully or not.

        The noted start of each is deleted in the database some time later, together with others.
        """
        self._ended_rows += [row for row in rows if self._running.pop(row.id, None) is not None]
        if not self._ended_rows:
            return
        if self._timer is None and not self._is_stopped:
            self._timer = self._clock.call_later(
                self._interval, self._inflight.signals.starts_ended
            )

    async def stop(self, deadline: float) -> None:
        """Write the ended starts by `deadline` (the event loop's time); `tick` must not follow.

        A start whose end is not written counts as cut off, and its message as unknown.
        """
        self._is_stopped = True
        if not await retry_until(self.write_ended, deadline, self._clock) and self._ended_rows:
            text = (
                "ACK_FIRST: could not record that the handlers of messages "
                f"{[row.id for row in self._ended_rows]} have ended, so admin.unknown() will list "
                "these messages: the stop timed out"
            )
            self._log(logging.ERROR, text)

    def drop_cut_off(self, rows: list[ClaimedMessage]) -> None:
        """Leave the noted starts of `rows`, whose handlers were cancelled, in the database.

        They are not renewed any more. When their lease is over, `admin.unknown()` lists the
        messages: whether the handlers have done their work is unknown.
        """
        for row in rows:
            self._running.pop(row.id, None)

    async def tick(self) -> float:
        """Renew running starts, write ended starts; return a twelfth of the lease as the pause.

        A start is a row that says that a handler runs whose message is removed already.

        Raises:
            StoreError: not everything is known to be written; call again.
        """
        try:
            await self._renew()
        finally:
            await self.write_ended()
        return max(0.02, self._lease / 12)

    async def _renew(self) -> None:
        """Renew the noted starts of running handlers after each third of the lease.

        A start that is not renewed counts as cut off: whether its handler has run is unknown.
        """
        now = self._clock.monotonic()
        due = [r for r in self._running.values() if r.renewed_monotonic <= now - self._lease / 3]
        if due:
            await self._store.ack_first_starts.renew(_get_keys(due), self._holder, self._lease)
        for row in due:
            row.record_renewal(now)

    async def write_ended(self) -> None:
        """Write which handlers have ended, which deletes their noted starts.

        Raises:
            StoreError: the ends are not known to be written; call again.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A copy: handlers end while the database writes, and the next call writes their ends.
        if ended_rows := list(self._ended_rows):
            await self._store.ack_first_starts.end(_get_keys(ended_rows), self._holder)
            written_ids = {row.id for row in ended_rows}
            self._ended_rows = [row for row in self._ended_rows if row.id not in written_ids]


def _get_keys(rows: list[ClaimedMessage]) -> list[tuple[str, int]]:
    return [(row.queue, row.id) for row in rows]

"""AckPolicy.ACK_FIRST, at most once: a message is removed right before its handler starts.

The removal notes the start, in the same transaction; the note goes when the handler has ended. What
stays noted, and is not renewed, was cut off: whether it has run is unknown.
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
from faststream_sqlbroker.flow.loop import Log, persist

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


class FirstAcks:
    """The starts of one subscriber whose messages are removed first."""

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
        """A start that is not renewed for `lease` seconds counts as cut off; ends are written
        within `interval`.
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
        self._ended: list[ClaimedMessage] = []
        self._stopped = False

    async def remove(self, rows: list[ClaimedMessage]) -> list[ClaimedMessage]:
        """Commit the removal of `rows`; those that may start.

        What is not known to be committed does not run.
        """
        now = self._clock.monotonic()
        settlements = [
            settle(r, Ack(), self._rules, ended_after=now - r.claimed_monotonic) for r in rows
        ]
        try:
            with self._inflight.writing(settlements) as batch:
                result = await self._store.starts.remove_first(
                    settlements, rows, self._holder, self._lease
                )
                self._inflight.answered(batch, result, "ack first", "it does not run here")
        except StoreError as error:
            self._log(
                logging.ERROR,
                f"ACK_FIRST: the removal of messages {[r.id for r in rows]} is not known to be "
                f"committed, so they do not run ({error})",
            )
            # Dropped, not given back: if the removal was committed, there is no row to give back;
            # if not, the row comes again when its lease has run out.
            self._inflight.drop(rows)
            result = None
        except asyncio.CancelledError:
            # It may be committed all the same, which the flush finds out; if not, they go back.
            self._inflight.note_unanswered(batch)
            self._inflight.give_back(row for row in rows if not row.lease_lost)
            raise
        # Only what is known to be removed starts: anything else may be delivered again.
        started = [r for r in rows if result is not None and r.id in result.settled]
        for row in rows:
            row.settle_as(Ack())
        for row in started:
            row.renewed(now)
            self._running[row.id] = row
        return started

    def end(self, rows: list[ClaimedMessage]) -> None:
        """The handlers of `rows` have ended, well or not."""
        self._ended += [row for row in rows if self._running.pop(row.id, None) is not None]
        if not self._ended:
            return
        if self._timer is None and not self._stopped:
            self._timer = self._clock.call_later(
                self._interval, self._inflight.signals.starts_ended
            )

    def _unwritten(self, why: object) -> str:
        ids = [row.id for row in self._ended]
        return (
            f"ACK_FIRST: it could not be written that the handlers of messages {ids} have ended, "
            f"so that admin.unknown() will list them: {why}"
        )

    async def stop(self, deadline: float) -> None:
        """Write what has ended, by `deadline` (the event loop's time); `tick` is not called
        any more.
        """
        self._stopped = True
        if not await persist(self.write, deadline, self._clock) and self._ended:
            self._log(logging.ERROR, self._unwritten("not within the time of the stop"))

    def cut_off(self, rows: list[ClaimedMessage]) -> None:
        """The handlers of `rows` were cancelled: they stay noted, and are listed when their time is
        over.
        """
        for row in rows:
            self._running.pop(row.id, None)

    async def tick(self) -> float:
        """Renew what runs, write what has ended; look again after a twelfth of the lease.

        Raises:
            StoreError: not all of it is known to be written; call again.
        """
        try:
            await self._renew()
        finally:
            await self.write()
        return max(0.02, self._lease / 12)

    async def _renew(self) -> None:
        asked = self._clock.monotonic()
        due = [r for r in self._running.values() if r.renewed_monotonic <= asked - self._lease / 3]
        if due:
            await self._store.starts.renew(_started(due), self._holder, self._lease)
        for row in due:
            row.renewed(asked)

    async def write(self) -> None:
        """Write that handlers have ended.

        Raises:
            StoreError: it is not known to be written; call again.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A copy: handlers end while the database writes, and the next call writes those.
        if ended := list(self._ended):
            await self._store.starts.end(_started(ended), self._holder)
            written = {row.id for row in ended}
            self._ended = [row for row in self._ended if row.id not in written]


def _started(rows: list[ClaimedMessage]) -> list[tuple[str, int]]:
    return [(row.queue, row.id) for row in rows]

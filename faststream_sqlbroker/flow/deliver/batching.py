"""The batches of one subscriber: filled before they start, and handed out again in parts.

A batch is filled with what waits already, and with `batch_max_wait` with what comes within that
time. Of one that did not start as a whole, the handler gets the rest again in parts.
"""

import asyncio
from contextlib import suppress
from itertools import groupby
from operator import itemgetter

from faststream_sqlbroker.core.outcome import Ack, Again
from faststream_sqlbroker.core.rows import ClaimedMessage, end_publishing
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.policies import seconds_to_slot
from faststream_sqlbroker.flow.deliver.prefetch import body_bytes
from faststream_sqlbroker.flow.publish_on_ack import ACK_FIRST
from faststream_sqlbroker.flow.settings import ConsumerSettings


class BatchFiller:
    """Takes what waits for workers, in its order, as far as it goes into one batch."""

    def __init__(self, inflight: Inflight, settings: ConsumerSettings) -> None:
        """A worker's own."""
        self._inflight = inflight
        self._waiting = inflight.waiting
        self._clock = inflight.clock
        self._most = settings.run_size
        self._longest = settings.batch_max_wait
        self._suspicion = Suspicion.under(settings.max_deliveries)

    async def fill(self, first: ClaimedMessage) -> list[ClaimedMessage]:
        """`first` and what else there is, up to a batch; all are given back if the worker is ended.

        A stop, a pause and a message that is to run alone end the wait for more at once, and so
        does a message that would expire or miss its slot by waiting.
        """
        rows = [first]
        goes_on = self._take(rows)
        if self._waiting.qsize() <= self._inflight.low_water:
            self._inflight.made_room()
        try:
            if self._longest is not None and goes_on:
                await self._wait_for_more(rows, self._longest)
            # A batch may keep the event loop for long: the next claim and the last flush are sent
            # before.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        except BaseException:
            self._inflight.give_back(rows)
            raise
        return rows

    def _take(self, rows: list[ClaimedMessage]) -> bool:
        """Add to `rows` what waits, while the bodies are no larger together than may wait for a
        worker; whether the batch has room for what comes.
        """
        prefetch = self._inflight.prefetch
        counts = prefetch.counts
        size = body_bytes(rows) if counts else 0
        items = self._waiting.items
        while len(rows) < self._most:
            if not items:
                return not counts or size + prefetch.mean <= prefetch.limit
            row = items[0]
            if row is None:
                return False
            if self._seconds_to_slot() > 0:
                return self._longest is not None
            if counts and (size := size + len(row.payload)) > prefetch.limit:
                return False
            rows.append(row)
            items.popleft()
        return False

    async def _wait_for_more(self, rows: list[ClaimedMessage], longest: float) -> None:
        end = self._clock.monotonic() + longest
        known = 0
        with suppress(TimeoutError), self._inflight.gathering() as gathering:
            async with self._clock.timeout(longest):
                while not gathering.ended:
                    if any(self._cannot_wait(row, end) for row in rows[known:]):
                        return
                    known = len(rows)
                    gathering.missing = self._most - known
                    if self._inflight.prefetch.counts:
                        gathering.held = body_bytes(rows), known
                    # The fetch loop may not have had room before.
                    self._inflight.made_room()
                    if (wait := self._seconds_to_slot()) > 0:
                        await self._clock.sleep(wait)
                    else:
                        await self._waiting.coming()
                    if not self._take(rows):
                        return

    def _seconds_to_slot(self) -> float:
        """Until what waits first may start; 0 if nothing waits."""
        items = self._waiting.items
        row = items[0] if items else None
        return 0.0 if row is None else seconds_to_slot(row, self._clock)

    def _cannot_wait(self, row: ClaimedMessage, end: float) -> bool:
        """Whether `row` must start before `end` (monotonic seconds), or is to run alone."""
        if row.slot is not None and row.slot.latest < end:
            return True
        if row.expires_at is not None:
            left = (row.expires_at - row.acquired_at).total_seconds()
            if row.claimed_monotonic + left < end:
                return True
        suspicion = self._suspicion
        lost = row.deliveries_count - 1 - row.attempts_count
        return suspicion is not None and suspicion.of(lost) is not None


Rows = list[ClaimedMessage]


def take_again(rows: Rows, *, ack_first: bool) -> tuple[Rows, list[Rows]]:
    """Those of `rows` that have ended, and the parts in which the handler is to get the others
    again.

    These are as they were before it was called.
    """
    again = [(row.outcome.part, row) for row in rows if isinstance(row.outcome, Again)]
    if not again:
        return rows, []
    ended = [row for row in rows if not isinstance(row.outcome, Again)]
    for _, row in again:
        row.settle_anew(Ack() if ack_first else None)
        row.chained = ()
    end_publishing([row for _, row in again], ACK_FIRST if ack_first else "")
    again.sort(key=itemgetter(0))
    return ended, [[row for _, row in pairs] for _, pairs in groupby(again, key=itemgetter(0))]

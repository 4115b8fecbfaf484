"""Filling of a subscriber's batches, and their repetition in parts.

A batch is filled with waiting messages and, with `batch_max_wait`, with messages that come within
that time. If a batch could not start as a whole, the handler gets the rest again in parts.
"""

import asyncio
from contextlib import suppress
from itertools import groupby
from operator import itemgetter

from faststream_sqlbroker.core.outcome import Ack, Again
from faststream_sqlbroker.core.rows import ClaimedMessage, set_no_chain_reason
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.policy_starts import get_slot_wait
from faststream_sqlbroker.flow.deliver.prefetch import count_body_bytes
from faststream_sqlbroker.flow.publish_on_ack import ACK_FIRST
from faststream_sqlbroker.flow.settings import ConsumerSettings


class BatchFiller:
    """Fills batches from the waiting messages, in their order, for a worker."""

    def __init__(self, inflight: Inflight, settings: ConsumerSettings) -> None:
        self._inflight = inflight
        self._waiting = inflight.waiting
        self._clock = inflight.clock
        self._max_rows = settings.run_size
        self._max_wait = settings.batch_max_wait
        self._suspect_rule = SuspectRule.from_max_deliveries(settings.max_deliveries)

    async def fill(self, first: ClaimedMessage) -> list[ClaimedMessage]:
        """Return `first` and further messages, up to a batch. On cancellation all are released.

        A stop, a pause and a message that is to run alone end the wait for more at once, and so
        does a message that would expire or miss its slot by waiting.
        """
        rows = [first]
        has_capacity = self._add_waiting(rows)
        if self._waiting.qsize() <= self._inflight.low_water:
            self._inflight.on_capacity()
        try:
            if self._max_wait is not None and has_capacity:
                await self._wait_for_more(rows, self._max_wait)
            # A batch may block the event loop for long: let the next claim and the last flush be
            # sent first.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        except BaseException:
            self._inflight.release(rows)
            raise
        return rows

    def _add_waiting(self, rows: list[ClaimedMessage]) -> bool:
        """Add waiting messages to `rows`; return True if the batch has capacity for more.

        The bodies together stay within `max_prefetch_bytes`. A message whose slot (the start that a
        Throttle allows) has not come, and a sentinel that ends workers, stay in the buffer.
        """
        prefetch = self._inflight.prefetch
        counts = prefetch.is_counting
        size = count_body_bytes(rows) if counts else 0
        items = self._waiting.items
        while len(rows) < self._max_rows:
            if not items:
                return not counts or size + prefetch.mean_bytes <= prefetch.limit
            row = items[0]
            if row is None:
                return False  # the subscriber stops
            if row.slot is not None and get_slot_wait(row, self._clock) > 0:
                return self._max_wait is not None
            if counts and (size := size + len(row.payload)) > prefetch.limit:
                return False
            rows.append(row)
            items.popleft()
        return False

    async def _wait_for_more(self, rows: list[ClaimedMessage], max_wait: float) -> None:
        """Add arriving messages to `rows` until the batch is full or `max_wait` seconds are over.

        End early if a stop, a pause or a drain finishes the batch, or if a row must start before
        that time. The fetch loop claims as many messages as are missing, although no worker is
        free.
        """
        end = self._clock.monotonic() + max_wait
        checked_count = 0
        with suppress(TimeoutError), self._inflight.add_pending_batch() as gathering:
            async with self._clock.timeout(max_wait):
                while not gathering.is_finished:
                    # Only the rows that were added since the last round.
                    if any(self._must_start_before(row, end) for row in rows[checked_count:]):
                        return
                    checked_count = len(rows)
                    gathering.missing_count = self._max_rows - checked_count
                    if self._inflight.prefetch.is_counting:
                        gathering.held_size = count_body_bytes(rows), checked_count
                    # The fetch loop may have had no capacity before.
                    self._inflight.on_capacity()
                    if (wait := self._get_slot_wait()) > 0:
                        await self._clock.sleep(wait)
                    else:
                        await self._waiting.wait_nonempty()
                    if not self._add_waiting(rows):
                        return

    def _get_slot_wait(self) -> float:
        """Return the seconds until the slot of the first waiting message; 0 if none waits.

        A slot is the time at which a Throttle allows a message to start.
        """
        items = self._waiting.items
        row = items[0] if items else None
        return 0.0 if row is None else get_slot_wait(row, self._clock)

    def _must_start_before(self, row: ClaimedMessage, end: float) -> bool:
        """Return True if `row` must start before `end` (monotonic seconds), or must run alone.

        It would expire or miss its slot by then. A row with several lost leases may be a poison
        message: with more rows in its batch, these would be charged if the process dies.
        """
        if row.slot is not None and row.slot.latest < end:
            return True
        if row.expires_at is not None:
            remaining = (row.expires_at - row.acquired_at).total_seconds()
            if row.claimed_monotonic + remaining < end:
                return True
        suspect_rule = self._suspect_rule
        lost_count = row.deliveries_count - 1 - row.attempts_count
        return suspect_rule is not None and suspect_rule.classify(lost_count) is not None


Rows = list[ClaimedMessage]


def split_repeated(rows: Rows, *, ack_first: bool) -> tuple[Rows, list[Rows]]:
    """Split `rows` of a batch into ended rows, and parts that the handler gets again.

    The outcome Again means that the batch could not start as a whole, and names the part of the
    row. The rows of these parts are reset to their state before the call.
    """
    repeated = [(row.outcome.part, row) for row in rows if isinstance(row.outcome, Again)]
    if not repeated:
        return rows, []
    ended = [row for row in rows if not isinstance(row.outcome, Again)]
    for _, row in repeated:
        row.replace_outcome(Ack() if ack_first else None)
        row.chained = ()
    set_no_chain_reason([row for _, row in repeated], ACK_FIRST if ack_first else "")
    repeated.sort(key=itemgetter(0))
    return ended, [[row for _, row in pairs] for _, pairs in groupby(repeated, key=itemgetter(0))]

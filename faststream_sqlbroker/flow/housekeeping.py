"""What one subscriber of a process does for all: end dead sessions, forget what has expired."""

import logging
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

BATCH = 1_000
"""Rows that one transaction forgets: it locks them until it commits."""


class Housekeeping:
    """Cleans the tables of one broker; subscribers call it in turn."""

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        self._store = store
        self._log = log
        self._clock = clock
        self._clean_at = float("-inf")

    async def clean(self, interval: float) -> float:
        """Clean, unless that was done less than `interval` seconds ago; seconds until the next
        time.

        Raises:
            StoreError: the database failed; call again.
        """
        if (wait := self._clean_at - self._clock.monotonic()) > 0:
            return min(wait, interval)
        before = self._clean_at
        # No other subscriber begins while it runs.
        self._clean_at = self._clock.monotonic() + interval
        try:
            return await self._clean(interval)
        except BaseException:
            self._clean_at = before
            raise

    async def _clean(self, interval: float) -> float:
        if ended := await self._store.silent.end():
            text = (
                f"database sessions {ended} were ended: their clients had been silent for long in "
                "the middle of a statement, and they kept rows of the broker locked"
            )
            self._log(logging.WARNING, text)
        forgotten = await self._store.policies.forget_expired(BATCH)
        wait = 0.0 if forgotten == BATCH else interval
        self._clean_at = self._clock.monotonic() + wait
        return wait

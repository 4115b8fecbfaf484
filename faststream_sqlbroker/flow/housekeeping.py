"""What one subscriber of a process does for all: end dead sessions, forget what has expired, go on
with operators' jobs.
"""

import logging
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.flow.jobs import JobRunner
from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

BATCH = 1_000
"""Rows that one transaction forgets: it locks them until it commits."""


class Housekeeping:
    """Cleans the tables of one broker; subscribers call it in turn."""

    def __init__(
        self, store: "Store", log: Log, clock: Clock, jobs: JobRunner | None = None
    ) -> None:
        self._jobs = jobs
        self._store = store
        self._log = log
        self._clock = clock
        self._cleaned_at = float("-inf")

    async def clean(self, interval: float) -> float:
        """Clean, unless that was done less than `interval` seconds ago; seconds until the next
        time by that interval.

        Raises:
            StoreError: the database failed; call again.
        """
        if (wait := self._cleaned_at + interval - self._clock.monotonic()) > 0:
            return wait
        before = self._cleaned_at
        # No other subscriber begins while it runs.
        self._cleaned_at = self._clock.monotonic()
        try:
            if await self._clean():
                return interval
        except BaseException:
            self._cleaned_at = before
            raise
        self._cleaned_at = before
        return 0.0

    async def _clean(self) -> bool:
        """Whether all is clean."""
        if self._jobs is not None:
            self._jobs.look()
        if ended := await self._store.silent.end():
            text = (
                f"database sessions {ended} were ended: their clients had been silent for long in "
                "the middle of a statement, and they kept rows of the broker locked"
            )
            self._log(logging.WARNING, text)
        return await self._store.policies.forget_expired(BATCH) < BATCH

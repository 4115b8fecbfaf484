"""Writes what handlers say of their progress, at most once a second for each message."""

import logging
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.messages.handler import current
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

INTERVAL = 1.0
"""Seconds for which nothing more is written of a message."""


class ProgressNotes:
    """Those of one subscriber."""

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
        if now - self._written.get(row.id, float("-inf")) < INTERVAL:
            return True
        if current.get() is not None and self._store.dialect.one_writer:
            # SQLite: the handler's transaction is the only writer, and hides what it writes.
            return True
        # What is older has no effect any more, so the dictionary stays small.
        self._written = {i: at for i, at in self._written.items() if now - at < INTERVAL}
        self._written[row.id] = now
        info = {"fraction": fraction, "text": text}
        try:
            return await self._store.messages.note_progress(row.id, row.lease_token, info)
        except StoreError as error:
            self._log(logging.DEBUG, f"the progress of message {row.id} is not written: {error}")
            return True

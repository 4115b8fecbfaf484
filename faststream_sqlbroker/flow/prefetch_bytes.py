"""How many bytes of bodies wait in this process for a worker.

A claim takes rows, and how large they are is known when they are there. So it is sized by the mean
of recent bodies, and what is too much after all is given back. As long as no body is large, nothing
is counted.
"""

import logging
from collections.abc import Iterable, Sequence
from math import inf

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.settings import ConsumerSettings

REMEMBERED = 0.5
"""Share of what is known that still counts with the next claim."""
TOLD_EVERY = 600.0
"""Seconds between two lines of the log about messages that were given back."""


def body_bytes(rows: Iterable[ClaimedMessage | None]) -> int:
    """Bytes of the bodies of `rows`."""
    return sum(len(row.payload) for row in rows if row is not None)


class PrefetchBytes:
    """Keeps to `max_prefetch_bytes` of one subscriber."""

    def __init__(self, settings: ConsumerSettings | None = None) -> None:
        """Without `settings` there is no limit."""
        limit = None if settings is None else settings.max_prefetch_bytes
        self.limit: float = inf if limit is None else limit
        self._rows = 0
        if settings is not None:
            waiting = int(settings.fetch_batch_size * settings.max_not_processed_factor)
            self._rows = waiting + settings.run_size
        self._bytes = 0.0
        self._count = 0.0
        self.counts = False
        """Whether bodies were so large that the limit may be reached."""
        self.drains = False
        """Whether the first message that is due is so large that it waits until nothing else does.
        """
        self._told_at = float("-inf")
        self._given_back = 0

    @property
    def mean(self) -> float:
        """Bytes of a recent body."""
        return self._bytes / self._count if self._count else 0.0

    @property
    def most_rows(self) -> float:
        """Rows of the mean size that may wait: one or more."""
        return max(1, self.limit // max(1.0, self.mean)) if self.counts else inf

    def room(self, held: Sequence[int]) -> float:
        """Rows of the mean size that may be claimed while `held` bytes, of so many rows, wait."""
        size, count = held
        if not count:
            self.drains = False
            return self.most_rows
        return 0 if self.drains else (self.limit - size) // max(1.0, self.mean)

    def note(self, rows: Sequence[ClaimedMessage]) -> None:
        """A claim has leased `rows`."""
        sizes = [len(row.payload) for row in rows]
        if not sizes:
            return
        self._bytes = REMEMBERED * self._bytes + sum(sizes)
        self._count = REMEMBERED * self._count + len(sizes)
        # It stays so: to count costs little, and a queue with large bodies will have others.
        self.counts = self.counts or max(sizes) * self._rows > self.limit

    def keeps(self, rows: Sequence[ClaimedMessage], held: Sequence[int]) -> int:
        """How many of `rows`, from the first on, may wait with what is held already: one or more if
        that is nothing.
        """
        size, count = held
        for place, row in enumerate(rows):
            size += len(row.payload)
            if size > self.limit and place + count:
                self.drains = not place
                return place
        return len(rows)

    def tell(self, log: Log, surplus: Sequence[ClaimedMessage], now: float) -> None:
        """Log that `surplus` is given back, every ten minutes at most."""
        self._given_back += len(surplus)
        if now - self._told_at < TOLD_EVERY:
            return
        self._told_at = now
        log(
            logging.INFO,
            f"{self._given_back} claimed messages given back uncharged: with them more than "
            f"max_prefetch_bytes={self.limit:.0f} would wait for a worker (one of them is "
            f"message {surplus[0].id} of queue {surplus[0].queue!r} with "
            f"{len(surplus[0].payload)} bytes)",
            message_id=surplus[0].id,
        )
        self._given_back = 0

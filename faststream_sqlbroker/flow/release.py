"""Give expired leases back (the release-stuck loop)."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

BATCH = 1_000


class StuckReleaser:
    """Returns rows whose lease has expired, by the database's clock and nothing else.

    Processes with different settings can run side by side: each row carries its own expiry.
    """

    def __init__(
        self,
        store: "Store",
        queues: Sequence[str],
        log: Log,
        *,
        interval: float,
        released: Callable[[], None],
    ) -> None:
        """`interval` in seconds; `released` is called when rows came back."""
        self._store, self._queues, self._log = store, queues, log
        self._interval, self._released = interval, released

    async def tick(self) -> float:
        """Release one batch; at once again after a full one."""
        count = await self._store.release_stuck(self._queues, BATCH)
        if count:
            self._log(logging.WARNING, f"{count} expired leases given back in {', '.join(self._queues)}")
            self._released()
        if ended := await self._store.silent.end():
            self._log(
                logging.WARNING,
                f"database sessions {ended} were ended: their clients had been silent for long in the middle of a "
                "statement, and they kept rows of the broker locked",
            )
        forgotten = await self._store.policies.forget_expired(BATCH)
        return 0.0 if BATCH in (count, forgotten) else self._interval

"""What waits in each queue, for metrics."""

import asyncio
from functools import partial

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.metrics import QueueState
from faststream_sqlbroker.dialects import Dialect, queue_states
from faststream_sqlbroker.dialects.sizes import chunks
from faststream_sqlbroker.store.transaction import Transactions

TOGETHER = 16
"""Queues that are counted in one transaction, so that none lasts long: a snapshot that is held
keeps dead rows."""


class QueueStates:
    """Reads it; each operation is one transaction.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(
        self, transactions: Transactions, dialect: Dialect, places: asyncio.Semaphore
    ) -> None:
        """Each transaction takes one of the store's `places`."""
        self._transactions = transactions.doing(Activity.CONSUME, Activity.STATE)
        self._dialect = dialect
        self._places = places

    async def read(self) -> list[QueueState]:
        """The state of each queue that has a message or a live subscriber, by name.

        At most 500 queues; at most 100 000 messages of each are counted as ready, as delayed and as
        in flight. The queues are read one after the other, in several transactions.
        """
        dialect = self._dialect
        known = await self._transactions.run(
            lambda c: queue_states.live_queues(c, dialect), self._places, write=False
        )
        found: list[QueueState] = []
        for part in chunks(known.names, TOGETHER):
            look = partial(queue_states.queue_states, dialect=dialect, queues=part, live=known.live)
            found += await self._transactions.run(look, self._places, write=False)
        return found

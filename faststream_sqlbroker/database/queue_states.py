"""What waits in each queue, for metrics."""

from functools import partial

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.metrics import QueueState
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import queue_states
from faststream_sqlbroker.database.parts.sizes import chunks

TOGETHER = 16
"""Queues that are counted in one transaction, so that none lasts long: a snapshot that is held
keeps dead rows."""


class QueueStates:
    """Reads it; each operation is one transaction.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect

    async def read(self) -> list[QueueState]:
        """The state of each queue that has a message or a live subscriber, by name.

        At most 500 queues; at most 100 000 messages of each are counted as ready, as delayed and as
        in flight. The queues are read one after the other, in several transactions.
        """
        dialect = self._dialect
        known = await self._database.run(
            lambda c: queue_states.live_queues(c, dialect),
            Activity.CONSUME,
            Activity.STATE,
            write=False,
        )
        found: list[QueueState] = []
        for part in chunks(known.names, TOGETHER):
            look = partial(queue_states.queue_states, dialect=dialect, queues=part, live=known.live)
            found += await self._database.run(look, Activity.CONSUME, Activity.STATE, write=False)
        return found

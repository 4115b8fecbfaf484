"""The state of each queue, for metrics.

No statement counts a whole table. The names of the queues are found by an index skip scan. The
messages of a queue and a priority are three ranges of an index: due, delayed, and standby messages.
Each is counted up to a limit.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.metrics import QueueState
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.live_queues import read_live_queues
from faststream_sqlbroker.database.parts.sizes import iter_chunks

MAX_QUEUES_TOGETHER = 16
"""Queues that are counted in one transaction, so that none lasts long: a snapshot that is held
keeps dead rows.
"""
MAX_COUNTED = 100_000
"""Messages of each state that are counted in a queue: some 20 ms each."""


class QueueStates(StoreSubject):
    """The states of all queues; each operation is a single transaction.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    async def read_all(self) -> list[QueueState]:
        """Read the state of each queue that has a message or a live subscriber, by name.

        At most 500 queues; at most 100 000 messages of each are counted as ready, as delayed, as in
        flight and as standing by. The queues are read one after the other, in several transactions.
        """
        dialect = self._dialect
        live = await self._database.run(
            lambda c: read_live_queues(c, dialect), Activity.CONSUME, Activity.STATE, write=False
        )
        states: list[QueueState] = []
        for part in iter_chunks(live.names, MAX_QUEUES_TOGETHER):
            read_part = partial(
                read_states, dialect=dialect, queues=part, subscribers=live.subscribers
            )
            states += await self._database.run(
                read_part, Activity.CONSUME, Activity.STATE, write=False
            )
        return states


def read_states(
    connection: Connection,
    dialect: DialectOperations,
    queues: Sequence[str],
    subscribers: Counter[str],
) -> list[QueueState]:
    """Read the state of each of `queues`; `subscribers` counts live subscribers by queue.

    Due, delayed and standby messages are counted for each priority of a queue, up to `MAX_COUNTED`
    of each in the queue. A standby message waits in case another message of its key, which is
    delivered in its place, ends first.
    """
    ready = Counter[str]()
    delayed = Counter[str]()
    standing = Counter[str]()
    # Seconds since a claim should have checked the first standby message.
    overdue = dict[str, float]()
    oldest = dict[str, float]()
    for pair in dialect.find_ready_pairs(connection, queues):
        queue = pair.queue
        if pair.due_in <= 0:
            oldest[queue] = max(oldest.get(queue, 0.0), -pair.due_in)
        binds = {
            "queue": queue,
            "priority": pair.priority,
            "most_due": MAX_COUNTED - ready[queue],
            "most_later": MAX_COUNTED - delayed[queue],
            "most_standing": MAX_COUNTED - standing[queue],
        }
        counts = connection.execute(dialect.sql["count_waiting"], binds).one()
        due, later, standing_by, overdue_seconds = counts
        ready[queue] += due
        delayed[queue] += later
        standing[queue] += standing_by
        overdue[queue] = max(overdue.get(queue, 0.0), float(overdue_seconds or 0.0))
    states = []
    for queue in queues:
        binds = {"queue": queue, "most": MAX_COUNTED}
        leased = connection.execute(dialect.sql["count_leased"], binds).scalar_one()
        states.append(
            QueueState(
                queue=queue,
                ready=ready[queue],
                delayed=delayed[queue],
                in_flight=leased,
                oldest_due_age=oldest.get(queue, 0.0),
                live_subscribers=subscribers[queue],
                standing=standing[queue],
                standing_overdue=overdue.get(queue, 0.0),
            )
        )
    return states

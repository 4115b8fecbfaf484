"""What operators see of the queues."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.channels import queue_of
from faststream_sqlbroker.core.overview import JobCounts, QueueOverview
from faststream_sqlbroker.core.status import PausedQueue
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import channels
from faststream_sqlbroker.database.parts.job_counts import job_counts
from faststream_sqlbroker.database.parts.live_subscribers import (
    MAX_SUBSCRIBERS,
    paused,
    subscribed_queues,
)
from faststream_sqlbroker.database.parts.queue_counts import (
    QueueCounts,
    QueueRates,
    ever_used,
    queue_counts,
    queue_rates,
)
from faststream_sqlbroker.database.parts.queue_states import (
    LiveQueues,
    live_queues,
    queues_with_messages,
)
from faststream_sqlbroker.database.parts.sizes import chunks

TOGETHER = 16
"""Queues that are counted in one transaction, so that none lasts long."""
A_PAGE = 1_000
"""Subscribers that one statement reads for the names of their queues."""


@dataclass(frozen=True, slots=True)
class _Fleet:
    """What is known of all queues."""

    names: Sequence[str]
    known: LiveQueues
    paused: dict[str, PausedQueue]
    rates: QueueRates
    pulled: frozenset[str]
    """The queues of pull consumers."""

    def out_per_minute(self, queue: str) -> float | None:
        """What the subscribers of `queue` tell, else what is archived; None without both."""
        archived = self.rates.ended
        if queue in self.known.ended or archived is None:
            return self.known.ended.get(queue)
        return archived.get(queue, 0.0)


class QueueOverviews:
    """Reads them; the queues are read one after the other, in several transactions.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect

    async def read(self, queue: str | None = None) -> list[QueueOverview]:
        """The queues that have a message, a live subscriber or a pause, by name; or `queue`.

        At most 500 queues with a message or a subscriber.
        """
        walk = queue is None
        fleet = await self._database.run(
            lambda c: self._fleet(c, walk=walk), Activity.OPERATE, write=False
        )
        names = fleet.names if queue is None else [queue]
        found: list[QueueOverview] = []
        for part in chunks(names, TOGETHER):

            def look(connection: Connection, part: Sequence[str] = part) -> list[QueueOverview]:
                return self._part(connection, fleet, part)

            found += await self._database.run(look, Activity.OPERATE, write=False)
        return found

    async def jobs(self, queues: Sequence[str]) -> list[JobCounts]:
        """The jobs by state in each of `queues`, which are those of pull consumers."""
        found: list[JobCounts] = []
        for part in chunks(queues, TOGETHER):
            look = partial(job_counts, dialect=self._dialect, queues=part)
            found += await self._database.run(look, Activity.OPERATE, write=False)
        return found

    async def names(self, like: str) -> list[str]:
        """Names that `like` may be a slip of: queues with a message, a live subscriber or a pause.

        Of those with a message the first 500, and the first 500 behind the first half of `like`.
        The queues of at most 10 000 subscribers, a thousand in each transaction.
        """

        def begin(connection: Connection) -> set[str]:
            found = {p.queue for p in paused(connection, self._dialect.tables.policy_state)}
            for after in sorted({"", like[: len(like) // 2]}):
                found |= queues_with_messages(connection, self._dialect, after)
            return found

        names = await self._database.run(begin, Activity.OPERATE, write=False)
        table = self._dialect.tables.policy_state
        after = ""
        for _ in range(MAX_SUBSCRIBERS // A_PAGE):
            # A transaction for each: one for all would hold back vacuum of the rows that every
            # heartbeat rewrites.
            page = partial(subscribed_queues, table=table, after=after, limit=A_PAGE)
            found, last = await self._database.run(page, Activity.OPERATE, write=False)
            names |= found
            if last is None:
                break
            after = last
        return sorted(names)

    def _fleet(self, connection: Connection, *, walk: bool) -> _Fleet:
        # One look for all queues, so that their rates are those of the same minute.
        known = live_queues(connection, self._dialect, walk=walk)
        stopped = {p.queue: p for p in paused(connection, self._dialect.tables.policy_state)}
        rates = queue_rates(connection, self._dialect)
        found = channels.pulled(connection, self._dialect.tables.policy_state)
        pulled = frozenset(queue_of(*each) for each in found)
        return _Fleet(sorted({*known.names, *stopped}), known, stopped, rates, pulled)

    def _part(
        self, connection: Connection, fleet: _Fleet, queues: Sequence[str]
    ) -> list[QueueOverview]:
        counts = queue_counts(connection, self._dialect, queues)
        return [self._overview(connection, fleet, queue, counts[queue]) for queue in counts]

    def _overview(
        self, connection: Connection, fleet: _Fleet, queue: str, counts: QueueCounts
    ) -> QueueOverview:
        some = counts.ready.value + counts.delayed.value + counts.in_flight.value
        return QueueOverview(
            queue=queue,
            ready=counts.ready,
            delayed=counts.delayed,
            in_flight=counts.in_flight,
            retrying=counts.retrying,
            oldest_due_age=counts.oldest_due_age,
            in_per_minute=fleet.rates.came.get(queue, 0.0),
            out_per_minute=fleet.out_per_minute(queue),
            live_subscribers=fleet.known.live[queue],
            drained_subscribers=fleet.known.drained[queue],
            paused=fleet.paused.get(queue),
            pulled=queue in fleet.pulled,
            used=some > 0 or ever_used(connection, self._dialect, queue),
        )

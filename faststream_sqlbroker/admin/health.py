"""Whether all is well: the database, its tables, and this process."""

from datetime import datetime, timezone
from typing import TYPE_CHECKING

from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.health import OLD_TRANSACTION, Health
from faststream_sqlbroker.core.times import Duration, positive_seconds
from faststream_sqlbroker.exceptions import AccessError

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


MOST_DRAINED = 20
"""Drained subscribers that are named."""


class HealthReport(Operations):
    """One look at everything that may be wrong."""

    async def health(self, *, old_transaction: Duration = OLD_TRANSACTION) -> Health:
        """Look at the server, the tables, the rights, the clocks, the pool and the subscribers of
        this process.

        Nothing is written, and no table of messages is read. `Health.problems` says what is wrong,
        one line each with what to do. What a database cannot tell, or not to this user, is None,
        and `Health.database.hidden` names the right that is missing. SQLite tells its version only.

        Args:
            old_transaction: The age from which an open transaction of any session is a problem:
                seconds, a timedelta or text like "5m".

        Raises:
            SetupError: `old_transaction` is not a duration, or not longer than 0.
        """
        oldest = positive_seconds("old_transaction", old_transaction)
        process = self._process()
        difference, doubt = await compare_clocks(self._store)
        used, limit = self._store.pool_use
        access = await self._store.access.find_lacks(
            process.activities or frozenset({Activity.OPERATE})
        )
        schema = tuple(await self._store.server.differences())
        return Health(
            database=await self._store.server.health(),
            clock_difference=difference,
            clock_doubt=doubt,
            pool_used=used,
            pool_limit=limit,
            process=process,
            lacks=tuple(str(lack) for lack in access.lacks),
            schema=schema,
            differing_windows=() if schema else await self._differing(),
            drained=() if schema else await self._drained(),
            old_transaction=oldest,
        )

    async def _differing(self) -> tuple[str, ...]:
        """Windows of lakes that are not pruned."""
        try:
            found = await self._store.retention.loaded.differing()
        except AccessError:
            return ()  # A producer needs no right on the records.
        return tuple(f"window {window} of lake {lake!r}" for lake, window in found)

    async def _drained(self) -> tuple[str, ...]:
        try:
            return tuple(await self._store.live_subscribers.drained(MOST_DRAINED))
        except AccessError:
            return ()  # A producer needs no right on the registrations.


async def compare_clocks(store: "Store") -> tuple[float, float]:
    """The database's clock minus this machine's, and by how much that may be wrong (seconds)."""
    # The database reads its clock between the two, and nothing tells when: the middle is wrong by
    # half of the time between them at most.
    before = datetime.now(timezone.utc)
    now = await store.server.now()
    after = datetime.now(timezone.utc)
    half = (after - before) / 2
    return (now - (before + half)).total_seconds(), half.total_seconds()

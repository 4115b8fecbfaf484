"""`broker.lock`: a lock for all processes."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from faststream_sqlbroker.broker.publishing import SqlBrokerPublishing
from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, lease_seconds, wait_seconds
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.tasks.locks import Lock, Locks


class SqlBrokerLocking(SqlBrokerPublishing):
    """Locks by key, across all processes that use the tables."""

    _locks: Locks

    def lock(
        self, key: str, *, lease: Duration = "30s", wait: Duration | None = None
    ) -> AbstractAsyncContextManager[Lock]:
        """Lock `key` while a block runs: `async with broker.lock("report") as lock:`.

        At most one holder has the lock at a time, in all processes, while its lease runs by the
        database's clock. The lease is renewed after each third of it while the block runs, and runs
        out when the process dies. Each holder gets a `fence` greater than all earlier ones. The
        lock holds no transaction and no connection. It is not reentrant, and needs no started
        broker.

        A cancelled `lock` leaves the key unlocked. If the answer to its COMMIT is lost, the key may
        stay locked until the lease runs out.

        Args:
            key: 1 to 255 characters. Its row stays in the table for ever, so the set of keys should
                be limited.
            lease: How long the lock stays locked after its process died: seconds, a timedelta or
                text like "30s". Make it longer than any pause of the event loop.
            wait: How long to wait for the current holder: None without limit, 0 tries once. A
                statement under way at the end is waited for.

        Raises:
            LockNotAcquiredError: another holder kept the lock for the whole waiting time.
            LockLostError: at the end of a block that may have run without the lock, unless the
                block raised itself.
            SetupError: an argument is not valid.
            NotSupportedError: on SQLite, in a handler with transactional=True.
            StoreError: the database refused the statement, or could not be reached at the first
                try; a later outage is waited out.
        """
        if (problem := name_problem(key)) is not None:
            raise SetupError(f"{short(key)} cannot be the key of a lock: {problem}")
        return self._lock(key, lease_seconds(lease), wait_seconds(wait))

    @asynccontextmanager
    async def _lock(self, key: str, lease: float, wait: float | None) -> AsyncIterator[Lock]:
        await self.connect()
        async with self._locks.hold(key, lease, wait) as lock:
            yield lock

"""`broker.lock`."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from faststream_sqlbroker.broker.publishing import SqlBrokerPublishing
from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, lease_seconds, wait_seconds
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.locks import Lock, Locks


class SqlBrokerLocking(SqlBrokerPublishing):
    """Locks by key, for the whole fleet."""

    _locks: Locks

    def lock(
        self, key: str, *, lease: Duration = "30s", wait: Duration | None = None
    ) -> AbstractAsyncContextManager[Lock]:
        """Lock `key` while a block runs: `async with broker.lock("report") as lock:`.

        At most one holder at a time, in all processes, by the database's clock, for as long as its
        lease runs: it is renewed after each third while the block runs, and ends by itself when the
        process dies. Each holder gets a `fence` greater than all before. No transaction and no
        connection is held. Not reentrant. Needs no started broker.

        A cancelled `lock` leaves nothing locked, nor does one whose COMMIT stays unanswered, once
        its lease is over.

        Args:
            key: 1 to 255 characters. Its row stays in the table for ever, so keys should not be
                made without end.
            lease: How long the lock outlives its process; longer than any pause of the event loop.
            wait: How long to wait for whoever has it: None without limit, 0 tries once. A statement
                under way at the end is waited for.

        Raises:
            LockNotAcquiredError: somebody else had it all the while.
            LockLostError: at the end of a block that may have worked without the lock, unless it
                raised itself.
            SetupError: an argument that cannot be used.
            StoreError: the database refused, or could not be reached at the first try; what passes
                later is waited for.
        """
        if (problem := name_problem(key)) is not None:
            raise SetupError(f"{short(key)} cannot be the key of a lock: {problem}")
        return self._lock(key, lease_seconds(lease), wait_seconds(wait))

    @asynccontextmanager
    async def _lock(self, key: str, lease: float, wait: float | None) -> AsyncIterator[Lock]:
        await self.connect()
        async with self._locks.hold(key, lease, wait) as lock:
            yield lock

"""Query results that all viewers of a process share for some seconds."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

from faststream_sqlbroker.core.overview import QueueOverview

if TYPE_CHECKING:
    from faststream_sqlbroker.admin import Admin, Findings

PERIOD = 2.0
"""Seconds between two queries of the queues."""
REST = 9.0
"""Factor of the pause after a slow query: so many times its duration."""
MAX_CACHED = 64
"""Maximum pages, by path and search, in the cache."""
T = TypeVar("T")


class SharedQuery(Generic[T]):
    """A query whose result is shared."""

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        """Query the database with `read`."""
        self.read = read
        self._lock = asyncio.Lock()
        self._results: list[T] = []
        self._fresh_until = float("-inf")
        self._changes = 0

    @property
    def is_stale(self) -> bool:
        """True if the result is no longer shared, and no query is running."""
        return not self._lock.locked() and monotonic() >= self._fresh_until

    async def get(self) -> T:
        """Return a shared result, or run the query.

        A result is shared for `PERIOD` seconds, or for `REST` times the duration of its query if
        that is longer. Concurrent callers wait for one query. Errors of `read` are raised.
        """
        async with self._lock:
            if not self._results or monotonic() >= self._fresh_until:
                return await self._run_query()
            return self._results[0]

    async def refresh(self) -> T:
        """Query again, and share the new result."""
        async with self._lock:
            return await self._run_query()

    def invalidate(self) -> None:
        """Make the next caller query again, after a change."""
        self._changes += 1
        self._fresh_until = float("-inf")

    async def _run_query(self) -> T:
        """Run the query and share the result; the caller holds the lock.

        The result of a slow query is shared for longer, so that the query runs for at most a tenth
        of the time, however many pages are open.
        """
        changes = self._changes
        started_at = monotonic()
        result = await self.read()
        ended_at = monotonic()
        self._results = [result]
        # A change during the query may be missing from the result.
        if self._changes == changes:
            self._fresh_until = ended_at + max(PERIOD, REST * (ended_at - started_at))
        return result


class QueryCache(Generic[T]):
    """Shared results of many queries; stale results are dropped."""

    def __init__(self) -> None:
        self._queries: dict[Hashable, SharedQuery[T]] = {}

    async def get(
        self, key: Hashable, read: Callable[[], Awaitable[T]], *, refresh: bool = False
    ) -> T:
        """Return the result of `read`, or with `refresh` a new result.

        `key` identifies the query, such as the path of a page with its search. The first user who
        asks starts it; others share the result.
        """
        query = self._queries.pop(key, None) or SharedQuery(read)
        # Use the new function: objects of an earlier request may be closed.
        query.read = read
        # A page may hold a body of megabytes, so drop each page when it is stale.
        self._queries = {
            name: cached for name, cached in self._queries.items() if not cached.is_stale
        }
        self._queries[key] = query
        if len(self._queries) > MAX_CACHED:
            del self._queries[next(iter(self._queries))]
        return await (query.refresh() if refresh else query.get())

    def clear(self) -> None:
        """Drop all results, after a change; waiting callers still get theirs."""
        self._queries.clear()


@dataclass(frozen=True, slots=True)
class SharedQueries:
    """Queries that pages share."""

    queues: SharedQuery[list[QueueOverview]]
    findings: "SharedQuery[Findings]"
    check_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a page verifies the tables or runs the diagnosis."""

    def invalidate(self) -> None:
        """Make all results stale, after an operator's change."""
        self.queues.invalidate()
        self.findings.invalidate()


def create_shared_queries(admin: Callable[[], "Admin"]) -> SharedQueries:
    """Create the shared queries of a broker."""
    queues = SharedQuery(lambda: admin().queues())

    async def read_findings() -> "Findings":
        return await admin().findings(queues=await queues.get())

    return SharedQueries(queues, SharedQuery(read_findings))

"""The store of a test: the real one, with counted calls."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from sqlalchemy import Connection
from typing_extensions import override

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.times import EPOCH
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.testing.clock import StandingClock, VirtualClock

T = TypeVar("T")

CORRELATION_PREFIX = "00000000-0000-8000"
"""Start of all correlation ids."""


class StoreClock(Clock):
    """The broker's clock, driven by the test's clock."""

    def __init__(self, virtual: VirtualClock) -> None:
        """Use `virtual` as the time source."""
        super().__init__(virtual)
        self.virtual = virtual
        if isinstance(virtual, StandingClock):
            # Nothing moves this clock, so waits of the test itself (`get_one`) use real time.
            self.callers = Clock()


class CountingDatabase(Database):
    """Notifies the test's clock of each running transaction."""

    @override
    async def run(
        self, work: Callable[[Connection], T], *activities: Activity, **options: Any
    ) -> T:
        """Run a transaction as `Database.run`, and count the running calls.

        `VirtualClock.advance` waits until no call of the store runs.
        """
        clock: Any = self.clock
        clock.virtual.begin_call()
        try:
            return await super().run(work, *activities, **options)
        finally:
            clock.virtual.end_call()


ReadFunction = Callable[..., Coroutine[Any, Any, Any]]


class TestStore(Store):
    """A SQLite store in place of any database's store."""

    __test__ = False
    database_class = CountingDatabase
    send_heartbeat: Callable[[], Awaitable[object]]
    """Sends the heartbeat of all subscribers of the broker."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Create a `Store`; generated correlation ids are the same in each test."""
        super().__init__(*args, **options)
        ids: Any = self.correlation_ids
        ids.database_id = CORRELATION_PREFIX
        # Without the time of the publish, which differs from run to run.
        build_id = ids.build_id
        ids.build_id = lambda row_id, _created_at: build_id(row_id, EPOCH)
        subscribers: Any = self.live_subscribers
        subscribers.list_subscribers = self._wrap_with_heartbeat(subscribers.list_subscribers)
        subscribers.find_subscriber = self._wrap_with_heartbeat(subscribers.find_subscriber)
        explanations: Any = self.explanations
        explanations.explain = self._wrap_with_heartbeat(explanations.explain)
        read_queues = explanations.list_policied_queues
        explanations.list_policied_queues = self._wrap_with_heartbeat(read_queues)

    def _wrap_with_heartbeat(self, read: ReadFunction) -> ReadFunction:
        """Let `read` run after a heartbeat, because no loop sends heartbeats in a test.

        These reads show the live subscribers, which the database knows by their heartbeats.
        """

        async def read_after_heartbeat(*args: Any) -> Any:
            await self.send_heartbeat()
            return await read(*args)

        return read_after_heartbeat

    @property
    @override
    def can_listen(self) -> bool:
        """True, so that wakeup="listen" is accepted as with PostgreSQL: tests need no hints."""
        return True

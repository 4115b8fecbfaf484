"""The store of a test: the real one, whose calls are counted."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sqlalchemy import Connection
from typing_extensions import override

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policy_waits import PoliciedQueue
from faststream_sqlbroker.core.status import Explanation, LiveSubscriber
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.explain.explanations import Explanations
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.database.subscribers import LiveSubscribers
from faststream_sqlbroker.testing.clock import StandingClock, VirtualClock

T = TypeVar("T")

DATABASE_ID = "00000000-0000-8000"
"""What correlation ids begin with."""


class StoreClock(Clock):
    """The broker's, which knows the test's."""

    def __init__(self, virtual: VirtualClock) -> None:
        """Ask `virtual`."""
        super().__init__(virtual)
        self.virtual = virtual
        if isinstance(virtual, StandingClock):
            self.callers = Clock()


class CountedDatabase(Database):
    """Tells the test's clock of each transaction that runs."""

    @override
    async def run(
        self, work: Callable[[Connection], T], *activities: Activity, **options: Any
    ) -> T:
        """As `Database.run`."""
        clock: Any = self.clock
        clock.virtual.begin_call()
        try:
            return await super().run(work, *activities, **options)
        finally:
            clock.virtual.end_call()


async def _no_sign() -> None:
    return None


class ToldSubscribers(LiveSubscribers):
    """Those of a test, which give a sign of life before each look at them: no loop gives one."""

    sign: Callable[[], Awaitable[object]] = staticmethod(_no_sign)
    """Gives the sign of all subscribers of the broker."""

    @override
    async def subscribers(self) -> list[LiveSubscriber]:
        """As `LiveSubscribers.subscribers`."""
        await self.sign()
        return await super().subscribers()

    @override
    async def subscriber(self, name: str) -> tuple[LiveSubscriber, bool] | None:
        """As `LiveSubscribers.subscriber`."""
        await self.sign()
        return await super().subscriber(name)


class ToldExplanations(Explanations):
    """Those of a test, after a sign of life as well."""

    def __init__(self, database: Database, subscribers: ToldSubscribers) -> None:
        """`subscribers` give the sign."""
        super().__init__(database)
        self._subscribers = subscribers

    @override
    async def explain(self, message_id: int) -> Explanation:
        """As `Explanations.explain`."""
        await self._subscribers.sign()
        return await super().explain(message_id)

    @override
    async def policied_queues(
        self, queue: str | None, after: str | None, limit: int
    ) -> list[PoliciedQueue]:
        """As `Explanations.policied_queues`."""
        await self._subscribers.sign()
        return await super().policied_queues(queue, after, limit)


class TestStore(Store):
    """A store in SQLite that takes the place of any database's."""

    __test__ = False
    database_class = CountedDatabase
    subscribers = ToldSubscribers
    live_subscribers: ToldSubscribers

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `Store`; the correlation ids of messages without one are the same in each test."""
        super().__init__(*args, **options)
        self.correlation_ids.database_id = DATABASE_ID
        self.explanations = ToldExplanations(self._database, self.live_subscribers)

    @property
    @override
    def can_listen(self) -> bool:
        """So that wakeup="listen" is accepted, as PostgreSQL would: hints are not needed here."""
        return True

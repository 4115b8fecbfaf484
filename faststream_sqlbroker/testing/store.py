"""The store of a test: the real one, whose calls are counted."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from sqlalchemy import Connection
from typing_extensions import override

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.store import Store
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


Look = Callable[..., Coroutine[Any, Any, Any]]


class TestStore(Store):
    """A store in SQLite that takes the place of any database's."""

    __test__ = False
    database_class = CountedDatabase
    sign: Callable[[], Awaitable[object]]
    """Gives the sign of life of all subscribers of the broker."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `Store`; the correlation ids of messages without one are the same in each test."""
        super().__init__(*args, **options)
        self.correlation_ids.database_id = DATABASE_ID
        subscribers: Any = self.live_subscribers
        subscribers.subscribers = self._after_sign(subscribers.subscribers)
        subscribers.subscriber = self._after_sign(subscribers.subscriber)
        explanations: Any = self.explanations
        explanations.explain = self._after_sign(explanations.explain)
        explanations.policied_queues = self._after_sign(explanations.policied_queues)

    def _after_sign(self, look: Look) -> Look:
        """`look` at subscribers once they have given a sign of life: no loop gives one."""

        async def told(*args: Any) -> Any:
            await self.sign()
            return await look(*args)

        return told

    @property
    @override
    def can_listen(self) -> bool:
        """So that wakeup="listen" is accepted, as PostgreSQL would: hints are not needed here."""
        return True

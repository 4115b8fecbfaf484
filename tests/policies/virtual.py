"""A world whose database and clock are those of `TestSqlBroker`."""

from typing import Any

from typing_extensions import override

from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.testing import VirtualClock
from faststream_sqlbroker.testing.database import TestDatabase
from faststream_sqlbroker.testing.store import StoreClock, TestStore
from tests.policies.clock import MICROSECONDS, START
from tests.policies.world import World


class _Hands:
    """Moves a VirtualClock as `tests.policies.clock.Clock` is moved."""

    def __init__(self, virtual: VirtualClock, database: TestDatabase) -> None:
        self.virtual = virtual
        self.engine = database.engine

    @property
    def now(self) -> int:
        return self.virtual.microseconds

    async def set(self, now: int) -> None:
        """Microseconds since 1970; the models begin anew at the same moment."""
        if now < self.now:
            self.virtual.microseconds = now
        await self.virtual.advance((now - self.now) / MICROSECONDS)


class VirtualWorld(World):
    """The tables are in a private file, and time is virtual."""

    clock: Any

    @override
    async def _open(self) -> None:
        virtual = VirtualClock(START)
        self._database = TestDatabase(virtual)
        self._database.create_tables(SqlBrokerSchemaConfig())
        self.clock = _Hands(virtual, self._database)
        tables = build_tables(SqlBrokerSchemaConfig())
        self.process_clock = StoreClock(virtual)
        self.store = TestStore(self._database.engine, tables, clock=self.process_clock)
        await self.store.server.setup()

"""A store over fresh tables, and a direct look at what is in them."""

from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.schema.types import SQLITE_CLOCK
from tests.helpers import eventually
from tests.quick_tables import TABLES

LEASE = 60.0


class Bench:
    """The store and the verbs that the contract's tests share."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def rows(self, archive: bool = False) -> list[dict[str, Any]]:
        """All rows, by id."""
        table = self.store.tables.archive if archive else self.store.tables.message
        assert table is not None
        async with self.store.engine.connect() as connection:
            result = await connection.execute(select(table).order_by(table.c.id))
            return [dict(row._mapping) for row in result]

    async def count(self, archive: bool = False) -> int:
        """How many rows there are."""
        table = self.store.tables.archive if archive else self.store.tables.message
        assert table is not None
        async with self.store.engine.connect() as connection:
            found = await connection.execute(select(func.count()).select_from(table))
            return int(found.scalar_one())

    async def one(self, archive: bool = False) -> dict[str, Any]:
        """The only row."""
        rows = await self.rows(archive)
        assert len(rows) == 1, rows
        return rows[0]

    async def execute(self, sql: str, **binds: Any) -> None:
        """Run `sql` in a transaction of its own."""
        async with self.store.engine.begin() as connection:
            await connection.execute(text(sql), binds)

    async def put(self, count: int = 1, queue: str = "q", **fields: Any) -> list[int]:
        """Insert messages with numbered bodies."""
        ids = await self.store.insert(
            [NewMessage(queue, f"{n}".encode(), **fields) for n in range(count)]
        )
        assert all(i is not None for i in ids)
        return [i for i in ids if i is not None]

    async def claim(
        self, limit: int = 10, *queues: str, lease: float = LEASE
    ) -> list[ClaimedMessage]:
        """Look for pairs and claim from those that are due."""
        from uuid import uuid4

        pairs = await self.store.find_ready_pairs(queues or ("q",))
        return await self.store.claim([p for p in pairs if p.due_in <= 0], limit, lease, uuid4())

    async def expire(self) -> None:
        """Let every lease run out."""
        past = self.past(3600)
        await self.execute(
            f"UPDATE message SET lease_expires_at = {past} WHERE state = 'PROCESSING'"
        )

    def past(self, seconds: int) -> str:
        """SQL of the moment `seconds` ago, by the database's clock."""
        if self.store.dialect_name == "postgresql":
            # PostgreSQL 14 reads no interval of more than 2**31 seconds.
            return f"statement_timestamp() - {seconds} * interval '1 second'"
        if self.store.dialect_name == "sqlite":
            return f"{SQLITE_CLOCK} - {seconds} * 1000000"
        return f"UTC_TIMESTAMP(6) - INTERVAL {seconds} SECOND"

    def quoted(self, name: str) -> str:
        """A column's name in this database's SQL."""
        return self.store.engine.dialect.identifier_preparer.quote(name)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb", "mysql", "pgbouncer"])
def database(request: pytest.FixtureRequest) -> str:
    """The contract holds through PgBouncer in transaction mode, too."""
    kind: str = request.param
    return kind


@pytest.fixture
async def store(engine: AsyncEngine, database: str) -> Store:
    if database == "pgbouncer":
        # Before 1.24 a cancellation by the test before may strike the first statement of the next
        # client.
        await eventually(lambda: _answers(engine))
    store = Store(engine, TABLES, pgbouncer=database == "pgbouncer")
    await store.server.create_tables()
    await store.server.setup()
    return store


async def _answers(engine: AsyncEngine) -> bool:
    try:
        async with engine.connect() as connection:
            await connection.execute(select(1))
    except DBAPIError:
        return False
    return True


@pytest.fixture
async def bench(store: Store) -> Bench:
    return Bench(store)


def done(row: ClaimedMessage, **fields: Any) -> Settlement:
    """An acked delivery of `row`."""
    return Settlement(
        row.id, row.lease_token, fields.pop("state", MessageState.COMPLETED), **fields
    )

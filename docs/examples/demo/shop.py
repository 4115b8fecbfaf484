"""The order service's own tables, and placing an order: a row and a message in one transaction."""

from sqlalchemy import Boolean, Column, Integer, MetaData, String, Table, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from faststream_sqlbroker import SqlBroker

HOPELESS_EVERY = 50
"""Every so many orders have an address that does not exist."""

metadata = MetaData()
orders = Table(
    "orders",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("amount", Integer, nullable=False),
)
shipments = Table(
    "shipments",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("order_id", Integer, nullable=False, index=True),
    Column("worker", String(20), nullable=False),
    Column("finished", Boolean, nullable=False),
)


class CardDeclinedError(Exception):
    """The customer's card was refused: the whole transaction is rolled back."""


async def place_order(
    engine: AsyncEngine, broker: SqlBroker, order_id: int, *, declined: bool
) -> None:
    """Store an order and its message together, or neither."""
    async with engine.begin() as connection:
        await connection.execute(insert(orders).values(id=order_id, amount=100 + order_id))
        await broker.publish({"order_id": order_id}, "orders", connection=connection)
        if declined:
            raise CardDeclinedError(order_id)


async def ship(connection: AsyncConnection, order_id: int, worker: str) -> None:
    """Note that an order was shipped."""
    await connection.execute(
        insert(shipments).values(order_id=order_id, worker=worker, finished=True)
    )


async def shipped_more_than_once(connection: AsyncConnection) -> set[int]:
    """Orders with several shipments."""
    query = select(shipments.c.order_id).group_by(shipments.c.order_id).having(func.count() > 1)
    return set((await connection.execute(query)).scalars())

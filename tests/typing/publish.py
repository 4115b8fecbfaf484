"""Read by mypy only: `publish` returns an id, or None."""

from typing import Any, assert_type

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from faststream_sqlbroker import SqlBroker


async def of_a_broker(
    broker: SqlBroker, body: Any, connection: AsyncConnection, session: AsyncSession
) -> None:
    assert_type(await broker.publish(body, "q"), int | None)
    assert_type(
        await broker.publish({"a": 1}, queue="q", priority=5, delay="1h", key="k"), int | None
    )
    assert_type(await broker.publish(body, "q", connection=connection), int | None)
    assert_type(await broker.publish(body, "q", session=session, headers={"a": 1}), int | None)
    assert_type(await broker.publish(body, "q", dedup_id="d"), int | None)
    assert_type(await broker.publish(body, "q", with_ack=True), int | None)
    assert_type(await broker.publish(body, "q", with_ack=False), int | None)
    assert_type(await broker.publish(body, "q", with_ack=None), int | None)
    assert_type(await broker.publish_batch(body, body, queue="q"), list[int | None])


def of_synchronous_code(broker: SqlBroker, connection: Connection) -> None:
    assert_type(broker.publish_sync("x", "q", connection=connection, key="k"), int | None)
    assert_type(broker.publish_sync("x", "q", connection=connection, dedup_id="d"), int | None)


async def of_a_publisher(broker: SqlBroker) -> None:
    publisher = broker.publisher("q")
    assert_type(await publisher.publish("x", priority=5), int | None)
    assert_type(await publisher.publish("x", dedup_id="d"), int | None)
    assert_type(await publisher.publish("x", with_ack=True), int | None)


async def of_an_operator(broker: SqlBroker) -> None:
    await broker.admin.explain(await broker.publish("x", "q") or 0)
    await broker.admin.explain("17")

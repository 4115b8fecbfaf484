"""The page of an AsgiFastStream: the document, and its button "try it out"."""

import json
from typing import Any

import httpx
import pytest
from faststream.asgi import AsgiFastStream
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker, SqlBrokerRouter
from tests.faststream.conftest import Look

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
UNREACHABLE = "postgresql+asyncpg://ann@192.0.2.1/never"


class Order(BaseModel):
    """A body."""

    number: int


def client_of(app: AsgiFastStream) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://docs")


async def tried(app: AsgiFastStream, channel: str, body: Any, **options: Any) -> Any:
    """What the button gets."""
    form = {"channelName": channel, "message": {"message": body}, "options": options}
    async with client_of(app) as client:
        answer = await client.post("/docs/try", content=json.dumps(form))
    return answer.status_code, answer.json()


def application(broker: SqlBroker) -> AsgiFastStream:
    router = SqlBrokerRouter(prefix="shop.")

    @router.subscriber("orders", "returns")
    @router.publisher("confirmed")
    async def confirm(order: Order) -> str:
        return f"order {order.number} is confirmed"

    broker.include_router(router)
    return AsgiFastStream(broker, asyncapi_path="/docs")


async def test_the_page_and_the_document() -> None:
    app = application(SqlBroker(UNREACHABLE, logger=None))
    async with client_of(app) as client:
        page = await client.get("/docs")
        document = (await client.get("/docs.json")).json()
    assert "shop.orders:Confirm" in page.text
    assert "/docs/try" in page.text
    assert {"shop.orders:Confirm", "shop.returns:Confirm"} < set(document["channels"])


@pytest.mark.parametrize("queue", ["shop.orders", "shop.returns"])
async def test_a_try_runs_the_handler_and_leaves_the_database_alone(queue: str) -> None:
    app = application(SqlBroker(UNREACHABLE, logger=None))
    status, answer = await tried(app, f"{queue}:Confirm", {"number": 5})
    assert (status, answer) == (200, "order 5 is confirmed")


async def test_a_try_that_fails_says_why() -> None:
    app = application(SqlBroker(UNREACHABLE, logger=None))
    status, answer = await tried(app, "shop.orders:Confirm", {"number": "x"})
    assert status == 500
    assert "number" in answer["details"]
    status, _ = await tried(app, "shop.nowhere:Confirm", {"number": 1})
    assert status == 404


@on_sqlite
async def test_a_try_of_a_running_application_changes_nothing(
    engine: AsyncEngine, look: Look
) -> None:
    broker = SqlBroker(engine, logger=None)
    app = application(broker)
    await broker.create_tables()
    await broker.start()
    assert await tried(app, "shop.orders:Confirm", {"number": 5}) == (200, "order 5 is confirmed")
    assert broker.running
    assert [*await look.rows(), *await look.rows(archive=True)] == []
    await broker.publish({"number": 6}, "shop.orders")
    await broker.stop()


@on_sqlite
async def test_a_message_for_the_real_broker(engine: AsyncEngine, look: Look) -> None:
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    app = application(broker)
    status, answer = await tried(app, "shop.orders:Confirm", {"number": 5}, sendToRealBroker=True)
    assert (status, answer) == (200, "ok")
    [row] = await look.rows()
    assert (row["queue"], json.loads(bytes(row["payload"]))) == ("shop.orders", {"number": 5})
    await broker.stop()

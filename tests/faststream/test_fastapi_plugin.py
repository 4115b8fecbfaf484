"""The package faststream-fastapi with our broker: FastStream's way from 1.0 on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Header
from faststream_fastapi import FastStreamAPI
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from faststream_sqlbroker import SchemaError, SqlBroker
from faststream_sqlbroker.database.messages.handler import current_transaction
from faststream_sqlbroker.fastapi import shared_session
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


class Order(BaseModel):
    """A body."""

    number: int


def plugin(broker: SqlBroker, app: FastAPI) -> FastStreamAPI:
    """The broker in an application whose start fails if the broker's does."""
    return FastStreamAPI(broker, application=app, safe_connection=True)


@asynccontextmanager
async def served(app: FastStreamAPI) -> AsyncIterator[httpx.AsyncClient]:
    """The running application."""
    async with (
        app._application.router.lifespan_context(app._application),
        app._lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client,
    ):
        yield client


@on_sqlite
@pytest.mark.parametrize("batch", [False, True])
async def test_parameters_and_bodies_that_do_not_fit(
    broker: SqlBroker, look: Look, batch: bool
) -> None:
    got: list[Any] = []
    kind = list[Order] if batch else Order

    @broker.subscriber("orders", batch=batch, **QUICK)
    async def handle(
        orders: kind,  # type: ignore[valid-type]
        source: Annotated[str, Header()],
        word: Annotated[str, Depends(lambda: "word")],
    ) -> None:
        numbers = [order.number for order in (orders if batch else [orders])]
        got.extend((number, source, word) for number in numbers)

    bodies = [{"number": 1}, {"number": "x"}, {"number": 3}]
    await broker.publish_batch(*bodies, queue="orders", headers={"source": "shop"})
    async with served(plugin(broker, FastAPI())):
        rows = await look.archived(3)
    assert [row["reason"] for row in rows] == [None, "invalid_body", None]
    assert sorted(got) == [(n, "shop", "word") for n in (1, 3)]


async def test_one_session_for_endpoint_publish_and_handler(
    engine: AsyncEngine, broker: SqlBroker, look: Look
) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE sale (id INTEGER, state VARCHAR(20))"))
    Session = Annotated[AsyncSession, shared_session(async_sessionmaker(engine))]
    api = FastAPI()

    async def put(session: AsyncSession, number: int, state: str) -> None:
        statement = text("INSERT INTO sale (id, state) VALUES (:number, :state)")
        await session.execute(statement, {"number": number, "state": state})

    @api.post("/sales/{number}")
    async def sell(number: int, session: Session) -> None:
        await put(session, number, "new")
        await broker.publish(number, "sales", session=session)
        if number == 13:
            raise ValueError("no")

    failures = ["the first attempt"]

    @broker.subscriber("sales", transactional=True, **QUICK)
    async def confirm(
        number: int,
        session: Session,
    ) -> None:
        transaction = current_transaction.get()
        assert transaction is not None
        assert session is transaction.session
        await put(session, number, "confirmed")
        if failures:
            failures.pop()
            raise ValueError("rolled back")

    # The plugin wraps the handlers that it finds when it is made.
    app = plugin(broker, api)
    async with served(app) as client:
        assert (await client.post("/sales/1")).status_code == 200
        with pytest.raises(ValueError, match="no"):
            await client.post("/sales/13")
        await eventually(lambda: not failures)
        [row] = await look.archived()
    assert row["attempts_count"] == 2
    async with engine.connect() as connection:
        found = (await connection.execute(text("SELECT id, state FROM sale"))).all()
    assert sorted(tuple(each) for each in found) == [(1, "confirmed"), (1, "new")]


@on_sqlite
async def test_a_start_that_fails_needs_safe_connection(engine: AsyncEngine) -> None:
    """Without it the plugin logs the error, and the application runs without its broker."""
    broker = SqlBroker(engine, logger=None)
    with pytest.raises(SchemaError):
        async with served(FastStreamAPI(broker, application=FastAPI(), safe_connection=True)):
            pass
    async with served(FastStreamAPI(broker, application=FastAPI())):
        assert not broker.running


@on_sqlite
async def test_the_document_is_served(broker: SqlBroker) -> None:
    @broker.subscriber("orders")
    async def handle(order: Order) -> None: ...

    async with served(
        FastStreamAPI(broker, application=FastAPI(), asyncapi_path="/docs/asyncapi")
    ) as client:
        document = (await client.get("/docs/asyncapi.json")).json()
    assert list(document["channels"]) == ["orders:Handle"]

"""The broker in FastStream's applications: probes, ends, and what its context holds."""

import asyncio
from typing import Annotated, Any

import httpx
import pytest
from faststream import Context, ContextRepo, FastStream, TestApp
from faststream.asgi import AsgiFastStream, make_ping_asgi
from faststream.exceptions import IgnoredException, StopApplication
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually


async def test_a_probe_is_true_only_while_the_tables_are_there(
    broker: SqlBroker, look: Look
) -> None:
    app = AsgiFastStream(broker, asgi_routes=[("/health", make_ping_asgi(broker, timeout=60.0))])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://probe") as client:
        assert (await client.get("/health")).status_code == 204
        async with look.engine.begin() as connection:
            await connection.run_sync(look.tables.message.drop)
        assert (await client.get("/health")).status_code == 500


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("ending", [StopApplication, SystemExit])
async def test_a_handler_ends_the_application(
    broker: SqlBroker, look: Look, ending: type[BaseException]
) -> None:
    """Nothing is lost: what it had not acked stays in the table."""
    app = FastStream(broker)

    @broker.subscriber("q", max_workers=1, **QUICK)
    async def handle(body: str) -> None:
        raise ending

    await broker.publish_batch("a", "b", queue="q")
    async with asyncio.timeout(60):
        await app.run()
    assert not broker.running
    rows = [*await look.rows(), *await look.rows(archive=True)]
    assert len(rows) == 2


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_an_ignored_exception_is_not_an_error_of_the_log(
    broker: SqlBroker, look: Look, heard: Any
) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(body: str) -> None:
        raise IgnoredException

    await broker.start()
    await broker.publish("x", "q")
    await eventually(lambda: heard.texts("Processed"))
    assert [record for record in heard.records if record.levelname in {"ERROR", "CRITICAL"}] == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_context_of_a_handler(engine: AsyncEngine, look: Look) -> None:
    """The application's values, the broker, the logger and the message."""
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    app = FastStream(broker, context=ContextRepo({"shop": "here"}))
    got: list[Any] = []

    @app.on_startup
    async def begin(context: ContextRepo) -> None:
        context.set_global("later", "too")

    @broker.subscriber("q", **QUICK)
    async def handle(
        body: str,
        own: Annotated[Any, Context("broker")],
        shop: Annotated[str, Context()],
        later: Annotated[str, Context()],
        queue: Annotated[str, Context("message.raw_message.queue")],
    ) -> None:
        got.append((own is broker, shop, later, queue))

    async with TestApp(app):
        await broker.publish("x", "q")
        await look.archived()
    assert got == [(True, "here", "too", "q")]

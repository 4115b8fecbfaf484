"""AsyncAPI documents."""

import json
from typing import Any

import pytest
from faststream.asgi import AsgiFastStream
from faststream.specification import AsyncAPI
from pydantic import BaseModel

from faststream_sqlbroker import SqlBroker, SqlBrokerRouter

pytestmark = pytest.mark.parametrize("version", ["2.6.0", "3.0.0"])
URL = "postgresql+asyncpg://user:hunter2@db.example:5433/app"


class Order(BaseModel):
    """A body."""

    number: int


def render(broker: SqlBroker, version: str) -> tuple[dict[str, Any], str]:
    document = AsyncAPI(broker, title="t", schema_version=version).to_specification().to_json()
    return json.loads(document), document


def test_a_document(version: str) -> None:
    broker = SqlBroker(URL, logger=None)
    router = SqlBrokerRouter(prefix="p.")

    @router.subscriber("a", "b", max_workers=2)
    @router.publisher("out", title="Results", description="what came of it")
    async def handle(order: Order) -> int:
        """Handles orders."""
        return order.number

    @broker.subscriber("hidden", include_in_schema=False)
    async def secret(body: str) -> None: ...

    @broker.subscriber("named", title="Named", description="by hand", batch=True)
    async def batched(bodies: list[Order]) -> None: ...

    broker.include_router(router)
    document, text = render(broker, version)
    assert {"p.a:Handle", "p.b:Handle", "Results", "Named"} == set(document["channels"])
    assert "Handles orders." in text
    assert "hidden" not in text
    assert "Order" in document["components"]["schemas"]


def test_the_document_does_not_show_the_password(version: str) -> None:
    document, text = render(SqlBroker(URL, logger=None), version)
    assert "hunter2" not in text
    assert "db.example:5433" in text
    [server] = document["servers"].values()
    assert server["protocol"] == "postgresql"


def test_an_address_given(version: str) -> None:
    broker = SqlBroker(
        URL, logger=None, specification_url="sql://somewhere", protocol="sql", description="d"
    )
    [server] = render(broker, version)[0]["servers"].values()
    assert (server["protocol"], server["description"]) == ("sql", "d")
    assert "somewhere" in json.dumps(server)


def test_an_application_without_try_it_out(version: str) -> None:
    AsgiFastStream(SqlBroker(URL, logger=None))

"""AsyncAPI documents."""

import json
from typing import Any

import pytest
from faststream.asgi import AsgiFastStream, AsyncAPIRoute
from faststream.security import SASLPlaintext
from faststream.specification import AsyncAPI
from faststream.specification.asyncapi.v2_6_0 import schema as v2_6_0
from faststream.specification.asyncapi.v3_0_0 import schema as v3_0_0
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


def test_the_address_shows_no_secret_and_no_user(version: str) -> None:
    broker = SqlBroker(f"{URL}?password=hunter3", logger=None)
    [server] = render(broker, version)[0]["servers"].values()
    shown = {"url": "postgresql+asyncpg://db.example:5433/app"}
    if version == "3.0.0":
        shown = {"host": "db.example:5433", "pathname": "/app"}
    assert {name: server[name] for name in shown} == shown
    assert "hunter" not in json.dumps(server)


def test_the_security_of_the_server(version: str) -> None:
    url = "postgresql+asyncpg://db.example/app"
    broker = SqlBroker(url, logger=None, security=SASLPlaintext("ann", "hunter2"))
    document, text = render(broker, version)
    [server] = document["servers"].values()
    by_reference = version == "3.0.0"
    assert server["security"] == (
        [{"$ref": "#/components/securitySchemes/user-password"}]
        if by_reference
        else [{"user-password": []}]
    )
    assert document["components"]["securitySchemes"] == {"user-password": {"type": "userPassword"}}
    assert "hunter2" not in text


def test_there_are_no_bindings(version: str) -> None:
    """AsyncAPI has none for databases, and another protocol's would be wrong."""
    broker = SqlBroker(URL, logger=None)

    @broker.subscriber("in")
    @broker.publisher("out")
    async def handle(body: str) -> str:
        return body

    document, text = render(broker, version)
    assert len(document["channels"]) == 2
    assert "bindings" not in text


def test_a_document_is_valid_for_its_reader(version: str) -> None:
    """`faststream docs serve asyncapi.json` reads it back into FastStream's model."""
    broker = SqlBroker(URL, logger=None, tags=[{"name": "shop"}], description="d")

    @broker.subscriber("in", "other", batch=True)
    @broker.publisher("out", schema=Order)
    async def handle(bodies: list[Order]) -> Order:
        return bodies[0]

    document, _ = render(broker, version)
    model = (v3_0_0 if version == "3.0.0" else v2_6_0).ApplicationSchema
    assert json.loads(model.model_validate(document).to_json()) == document


def test_an_application_without_try_it_out(version: str) -> None:
    AsgiFastStream(SqlBroker(URL, logger=None))
    AsgiFastStream(
        SqlBroker(URL, logger=None), asyncapi_path=AsyncAPIRoute("/docs", try_it_out_path=None)
    )

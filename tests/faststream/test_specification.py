"""AsyncAPI documents."""

import json
from functools import partial
from typing import Any

import pytest
from faststream.asgi import AsgiFastStream, AsyncAPIRoute
from faststream.security import SASLPlaintext
from faststream.specification import AsyncAPI
from faststream.specification.asyncapi.v2_6_0 import schema as v2_6_0
from faststream.specification.asyncapi.v3_0_0 import schema as v3_0_0
from pydantic import BaseModel, create_model

from faststream_sqlbroker import SqlBroker, SqlBrokerResponse, SqlBrokerRouter

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


def test_a_handler_may_return_a_response(version: str) -> None:
    broker = SqlBroker(URL, logger=None)

    @broker.subscriber("in")
    @broker.publisher("out")
    async def handle(body: str) -> SqlBrokerResponse | None:
        return None

    document, _ = render(broker, version)
    assert "out:Publisher" in document["channels"]


def models(*annotations: Any) -> list[type[BaseModel]]:
    """Different models of one name."""
    return [create_model("Twin", value=(annotation, ...)) for annotation in annotations]


def schema_of(document: dict[str, Any], queue: str) -> dict[str, Any]:
    """The payload of `queue`."""
    schemas = document["components"]["schemas"]
    message = next(m for name, m in document["components"]["messages"].items() if queue in name)
    name = message["payload"]["$ref"].rpartition("/")[2]
    return dict(schemas[name])


def test_two_models_of_one_name_have_a_schema_each(version: str) -> None:
    broker = SqlBroker(URL, logger=None)
    router = SqlBrokerRouter(prefix="p.")
    first, second, third = models(int, str, bool)

    @broker.subscriber("first")
    async def handle(body: first) -> None: ...  # type: ignore[valid-type]

    @router.subscriber("second")
    @router.publisher("third")
    async def answer(body: second) -> third: ...  # type: ignore[valid-type, empty-body]

    @router.subscriber("again")
    async def once_more(body: first) -> None: ...  # type: ignore[valid-type]

    broker.include_router(router)
    document, text = render(broker, version)
    kinds = {
        queue: schema_of(document, queue)["properties"]["value"]["type"]
        for queue in ("first", "p.second", "p.third", "p.again")
    }
    assert kinds == {
        "first": "integer",
        "p.second": "string",
        "p.third": "boolean",
        "p.again": "integer",
    }
    assert document["components"]["schemas"].keys() == {"Twin", "Twin2", "Twin3"}
    assert render(broker, version)[1] == text


def test_parts_of_models_that_have_one_name_have_a_schema_each(version: str) -> None:
    broker = SqlBroker(URL, logger=None)
    first, second = (
        create_model(f"Outer{twin.__name__}{number}", part=(list[twin], ...))  # type: ignore[valid-type]
        for number, twin in enumerate(models(int, str))
    )

    @broker.subscriber("first")
    async def handle(body: first) -> None: ...  # type: ignore[valid-type]

    @broker.subscriber("second")
    async def handle_other(body: second) -> None: ...  # type: ignore[valid-type]

    document, _ = render(broker, version)
    kinds = []
    for queue in ("first", "second"):
        part = schema_of(document, queue)["properties"]["part"]["items"]["$ref"]
        twin = document["components"]["schemas"][part.rpartition("/")[2]]
        kinds.append(twin["properties"]["value"]["type"])
    assert kinds == ["integer", "string"]


def test_handlers_of_one_name_have_a_schema_each(version: str) -> None:
    broker = SqlBroker(URL, logger=None)

    def handler(annotation: Any) -> Any:
        async def handle(body: annotation) -> None: ...

        return handle

    for queue, annotation in (("numbers", int), ("texts", str)):
        broker.subscriber(queue)(handler(annotation))
    document, _ = render(broker, version)
    kinds = [schema_of(document, queue)["type"] for queue in ("numbers", "texts")]
    assert kinds == ["integer", "string"]


class Handler:
    """A callable object."""

    async def __call__(self, body: str) -> int:
        return len(body)


class SlottedHandler:
    """One that takes no attributes."""

    __slots__ = ()

    async def __call__(self, body: str) -> int:
        return len(body)


async def add(more: int, body: int) -> int:
    return more + body


@pytest.mark.parametrize(
    ("handler", "name"),
    [(Handler(), "Handler"), (partial(add, 1), "Add"), (SlottedHandler(), "Call")],
)
def test_a_callable_object_has_a_name(version: str, handler: Any, name: str) -> None:
    broker = SqlBroker(URL, logger=None)
    broker.subscriber("in")(broker.publisher("out")(handler))
    document, text = render(broker, version)
    assert f"in:{name}" in document["channels"]
    assert "0x" not in text.lower()


def test_endpoints_are_in_the_order_of_their_declarations(version: str) -> None:
    broker = SqlBroker(URL, logger=None)
    router = SqlBrokerRouter()
    queues = [f"queue{number}" for number in range(20)]
    for number, queue in enumerate(queues):
        (router if number % 3 else broker).subscriber(queue)(Handler())
    broker.include_router(router)
    assert list(render(broker, version)[0]["channels"]) == [f"{q}:Handler" for q in queues]


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

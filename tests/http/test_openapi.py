"""The OpenAPI document: complete, and true."""

from typing import Any

import httpx
import jsonschema_rs
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http import Channels
from faststream_sqlbroker.http.described import OPERATIONS
from faststream_sqlbroker.http.openapi import document
from tests.http.conftest import as_user, client_of, logins, on_sqlite
from tests.http.documented import is_documented, whole
from tests.http.queueing import queues

pytestmark = pytest.mark.capability("HTTP: an OpenAPI document")
API = ("/channel/", "/health/", "/v1/", "/metrics", "/csrf-token", "/openapi.json")
"""What the paths of the API begin with; the others are pages for people."""


@on_sqlite
async def test_each_route_stands_in_the_document(broker: SqlBroker) -> None:
    app = broker.asgi(logins(), channels=Channels(), queues=queues())
    routes = app.starlette.routes
    found = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in routes
        if isinstance(route, Route) and route.path.startswith(API)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert found == {(each.method, each.path) for each in OPERATIONS}
    names = [each.name for each in OPERATIONS]
    assert len(set(names)) == len(names)


def test_every_example_is_valid() -> None:
    schemas = whole()["components"]["schemas"]
    shown = [each.body for each in OPERATIONS]
    shown += [model for each in OPERATIONS for model in each.answers.values()]
    for model in {each.__name__ for each in shown if isinstance(each, type)}:
        examples = schemas[model]["examples"]
        assert examples, model
        schema = {"$ref": f"#/components/schemas/{model}", "components": whole()["components"]}
        for example in examples:
            assert jsonschema_rs.Draft202012Validator(schema).is_valid(example), model


@on_sqlite
async def test_the_document_is_served_to_users(broker: SqlBroker) -> None:
    """Only of what there is, and with the path at which the application is mounted."""
    async with client_of(broker.asgi(logins(), queues=queues())) as client:
        assert (await client.get("/openapi.json")).status_code == 401
        found = await client.get("/openapi.json", auth=as_user("vic"))
        assert found.json() == document(["probes", "mirror", "queues"])
    mounted = Starlette(routes=[Mount("/broker", broker.asgi(logins()))])
    async with client_of(mounted) as client:
        found = await client.get("/broker/openapi.json", auth=as_user("vic"))
        assert found.json() == document(["probes", "mirror"], "/broker")


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, {"messages": [{"id": 1}]}), (200, {"messages": [], "more": 1}), (418, {"error": ""})],
)
async def test_what_is_not_as_documented_is_found(status: int, body: Any) -> None:
    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json=body)

    hooks: Any = {"response": [is_documented]}
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, event_hooks=hooks) as client:
        with pytest.raises(AssertionError):
            await client.post("http://x/v1/queues/a/b/reserve")

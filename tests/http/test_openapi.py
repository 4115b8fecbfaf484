"""The OpenAPI document: complete, and true."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http import Channels
from tests.http.conftest import as_user, client_of, logins, on_sqlite
from tests.http.documented import is_documented, operations, whole
from tests.http.queueing import queues
from tests.http.shapes import shapes

pytestmark = pytest.mark.capability("HTTP: an OpenAPI document")
FOLDER = Path(__file__).parents[2]
API = ("/channel/", "/health/", "/v1/", "/metrics", "/csrf-token", "/openapi.json")
"""What the paths of the API begin with; the others are pages for people."""


@on_sqlite
async def test_each_route_stands_in_the_document(broker: SqlBroker) -> None:
    app = broker.asgi(logins(), channels=Channels(), queues=queues())
    routes = app.api.routes
    found = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in routes
        if isinstance(route, Route) and route.path.startswith(API)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert found == {(method, path) for method, path, _ in operations()}
    names = [told["operationId"] for _, _, told in operations()]
    assert len(set(names)) == len(names)


def test_paths_parameters_statuses_and_bodies_are_those_that_clients_know() -> None:
    """Those of a document that is kept; clients do not see titles and descriptions."""
    known = json.loads((FOLDER / "tests/http/golden/openapi.json").read_text())
    schemas = known["components"]["schemas"]
    # FastAPI leaves null out, so the examples have values.
    ready = schemas["Ready"]
    ready["examples"] = whole()["components"]["schemas"]["Ready"]["examples"]
    # A field that came later.
    ready["properties"]["reason"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    ready["required"].insert(2, "reason")
    schemas["Reserved"]["examples"][0]["messages"][0]["key"] = "ann"
    # What it has always taken and refused.
    info = schemas["InfoChange"]
    info["additionalProperties"] = False
    info["properties"]["Info"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    info["properties"]["Name"]["anyOf"][0]["pattern"] = "^[0-9]{1,19}$"
    # FastAPI adds what the enum says already.
    token = known["paths"]["/v1/queues/{queue}/tokens/{role}"]["put"]
    token["parameters"][1]["schema"]["type"] = "string"
    expected = shapes(known)
    now = shapes(whole())
    assert now["schemes"] == expected["schemes"]
    assert now["paths"].keys() == expected["paths"].keys()
    for name, shape in expected["paths"].items():
        assert now["paths"][name] == shape, name


def test_every_example_is_valid() -> None:
    schemas = whole()["components"]["schemas"]
    references = re.findall(r'"\$ref": "(#/components/schemas/\w+)"', json.dumps(whole()["paths"]))
    for reference in set(references):
        examples = schemas[reference.rpartition("/")[2]].get("examples")
        if "Form" in reference or "Rotation" in reference:
            continue
        assert examples, reference
        schema = {"$ref": reference, "components": whole()["components"]}
        for example in examples:
            assert jsonschema_rs.Draft202012Validator(schema).is_valid(example), reference


@on_sqlite
async def test_the_document_is_served_to_users(broker: SqlBroker) -> None:
    """Only of what there is, and with the path at which the application is mounted."""
    async with client_of(broker.asgi(logins(), queues=queues())) as client:
        assert (await client.get("/openapi.json")).status_code == 401
        found = await client.get("/openapi.json", auth=as_user("vic"))
        served = {"probes", "mirror", "queues"}
        assert found.json()["paths"] == {
            path: methods
            for path, methods in whole()["paths"].items()
            if all(served.issuperset(told["tags"]) for told in methods.values())
        }
        assert found.json()["servers"] == whole()["servers"]
    mounted = Starlette(routes=[Mount("/broker", broker.asgi(logins()))])
    async with client_of(mounted) as client:
        found = await client.get("/broker/openapi.json", auth=as_user("vic"))
        assert found.json()["servers"] == [{"url": "/broker"}]
        assert "/v1/queues/{queue}/publish" not in found.json()["paths"]


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

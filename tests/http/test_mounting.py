"""broker.asgi: where it is mounted, and that it refuses to be open."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI
from faststream.asgi import AsgiFastStream
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from faststream_sqlbroker import SetupError, SqlBroker
from faststream_sqlbroker.http import HttpApp, User
from faststream_sqlbroker.http.local import LocalOnly
from faststream_sqlbroker.http.mounting import PathPrefix
from tests.faststream.conftest import Heard
from tests.http.conftest import as_user, client_of, logins, on_sqlite
from tests.http.pulling import JOBS, channels
from tests.http.queueing import PATH, PUBLISH, bearer, queues

pytestmark = pytest.mark.capability("HTTP: mounted in AsgiFastStream, FastAPI, Starlette; probes")


def in_faststream(app: HttpApp, broker: SqlBroker) -> Any:
    return AsgiFastStream(broker, asgi_routes=[app.at("/broker")])


def in_fastapi(app: HttpApp, _broker: SqlBroker) -> Any:
    found = FastAPI()
    found.mount("/broker", app)
    return found


def in_starlette(app: HttpApp, _broker: SqlBroker) -> Any:
    return Starlette(routes=[Mount("/broker", app)])


@pytest.mark.parametrize("mount", [in_faststream, in_fastapi, in_starlette])
async def test_it_is_mounted_below_a_path(app: HttpApp, broker: SqlBroker, mount: Any) -> None:
    async with client_of(mount(app, broker)) as client:
        ready = await client.get("/broker/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert (await client.get("/broker/csrf-token")).status_code == 401
        token = await client.get("/broker/csrf-token", auth=as_user("vic"))
        assert token.status_code == 200
        assert (await client.get("/brokerage/health/live")).status_code == 404
        assert (await client.get("/health/live")).status_code == 404


async def test_the_application_around_it_keeps_its_own_state(app: HttpApp) -> None:
    outer = FastAPI()
    seen: list[Any] = []

    @outer.middleware("http")
    async def note(request: Request, call_next: Any) -> Any:
        request.state.user = "outer"
        answer = await call_next(request)
        seen.append(request.state.user)
        return answer

    outer.mount("/broker", app)
    async with client_of(outer) as client:
        found = await client.get("/broker/csrf-token", auth=as_user("vic"))
        assert found.status_code == 200
        assert (await client.get("/broker/health/live")).status_code == 200
    assert seen == ["outer", "outer"]


async def test_it_runs_alone(app: HttpApp) -> None:
    async with client_of(app) as client:
        assert (await client.get("/health/live")).json() == {"status": "live"}
        missing = await client.get("/no/such/path")
        assert missing.status_code == 404
        assert "path '/no/such/path' does not exist here" in missing.json()["error"]
        wrong = await client.post("/health/live")
        assert wrong.status_code == 405
        assert wrong.headers["Allow"] == "GET, HEAD"


@on_sqlite
async def test_several_ways_and_a_function(broker: SqlBroker) -> None:
    async def by_header(connection: Any) -> User | None:
        name = connection.headers.get("x-test-user")
        return User(name, "viewer") if name else None

    async with client_of(broker.asgi([by_header, logins()])) as client:
        assert (await client.get("/csrf-token")).status_code == 401
        found = await client.get("/csrf-token", headers={"x-test-user": "eve"})
        assert found.status_code == 200
        assert (await client.get("/csrf-token", auth=as_user("vic"))).status_code == 200


@on_sqlite
async def test_what_a_function_returns_wrongly_is_not_shown(
    broker: SqlBroker, heard: Heard
) -> None:
    def found(_connection: Any) -> Any:
        return {"name": "ann", "password": "a-secret"}

    async with client_of(broker.asgi(found)) as client:
        answer = await client.get("/csrf-token")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    [told] = heard.texts("auth must return a User or None")
    assert "got a dict" in told


@on_sqlite
@pytest.mark.parametrize("auth", [None, [], "", User, LocalOnly(), 5, [None]])
async def test_it_refuses_to_be_without_authentication(broker: SqlBroker, auth: Any) -> None:
    with pytest.raises(SetupError, match="authentication"):
        broker.asgi(auth)


@on_sqlite
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_body": 0}, "max_body must be a whole number of 1 or more of bytes, got 0"),
        ({"body_timeout": 0}, "body_timeout"),
        ({"max_failures": -1}, "max_failures"),
        ({"proxies": ["a.b.c"]}, "'a.b.c' is not an address or network"),
        ({"csrf_secret": "short"}, "csrf_secret must be text of 16 characters or more"),
    ],
)
async def test_an_option_that_is_not_valid(
    broker: SqlBroker, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(SetupError, match=told):
        broker.asgi(logins(), **options)


@on_sqlite
async def test_a_path_to_mount_at(app: HttpApp) -> None:
    for wrong in ("broker", "/", ""):
        with pytest.raises(SetupError, match="must be a path such as /broker"):
            app.at(wrong)
    assert app.at("/broker/")[0] == "/broker/health"


def test_a_path_equals_what_is_below_it() -> None:
    path = PathPrefix("/a")
    for same in ("/a", "/a/", "/a/b"):
        assert same == path
        assert not same != path
    for other in ("/", "/ab", "", "/b/a"):
        assert other != path
        assert not other == path
    assert path != 5
    assert {path: 1}[PathPrefix("/a")] == 1


SPANS = """
import asyncio, httpx
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from faststream_sqlbroker import SqlBroker
provider = TracerProvider()
exporter = InMemorySpanExporter()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
app = SqlBroker("sqlite+aiosqlite:///x.db", logger=None).asgi(lambda connection: None)
async def main():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        print((await client.get("/health/live")).status_code, len(exporter.get_finished_spans()))
asyncio.run(main())
"""


def test_requests_have_no_spans_but_those_of_the_application() -> None:
    """FastAPI would make some for each application that is mounted."""
    done = subprocess.run(
        [sys.executable, "-c", SPANS], capture_output=True, text=True, check=False
    )
    assert done.stdout == "200 0\n", done.stderr


@pytest.mark.parametrize("missing", ["fastapi", "starlette", "uvicorn"])
def test_a_missing_package_names_the_extra(missing: str) -> None:
    code = (
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "from faststream_sqlbroker import SqlBroker\n"
        "from faststream_sqlbroker.exceptions import MissingExtraError\n"
        "broker = SqlBroker('sqlite+aiosqlite:///x.db')\n"
        "try:\n"
        "    broker.asgi(lambda connection: None)\n"
        "except MissingExtraError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == (
        f"HTTP needs '{missing}', which is not installed: pip install 'sqlbroker[http]'\n"
    ), done.stderr
    code = f"import sys\nsys.modules[{missing!r}] = None\nimport faststream_sqlbroker.http\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ("sqlbroker[http]" in done.stderr) is (missing != "uvicorn")


def test_the_broker_imports_nothing_of_it() -> None:
    code = (
        "import sys\nimport faststream_sqlbroker\n"
        "ours = ('starlette', 'faststream_sqlbroker.http')\n"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


@on_sqlite
async def test_after_a_stop_requests_are_refused(broker: SqlBroker) -> None:
    """They are not answered as if the broker worked; a probe tells that the process lives."""
    app = broker.asgi(logins(), channels=channels(), queues=queues())
    async with client_of(app) as client:
        publish = partial(client.post, f"{PATH}/publish", json={"body": 1}, headers=bearer(PUBLISH))
        assert (await publish()).status_code == 201
        await broker.stop()
        pages = ("/", "/csrf-token", "/metrics", f"{JOBS}/queued-jobs", "/no/such/path")
        for refused in [await publish(), *[await client.get(page) for page in pages]]:
            assert refused.status_code == 503
            assert "the broker of this process has stopped" in refused.json()["error"]
            assert refused.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/health/live")).status_code == 200
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.json()["checks"]["started"]) == (503, False)
        await broker.start()
        assert (await publish()).status_code == 201
        await broker.stop()
        # An application without subscribers only connects.
        await broker.connect()
        assert (await publish()).status_code == 201

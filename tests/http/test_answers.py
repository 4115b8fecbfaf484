"""What all answers have in common; bodies within their limits; writes of browsers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from faststream_sqlbroker import PublishError, SetupError, SqlBroker
from faststream_sqlbroker.exceptions import (
    QueueFullError,
    StoreError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.http import Channels, HttpApp
from faststream_sqlbroker.http.app import probe_app
from faststream_sqlbroker.http.csrf import Csrf
from faststream_sqlbroker.http.local import check_local
from faststream_sqlbroker.http.proxies import parse_host_name
from faststream_sqlbroker.http.responses import (
    BodyLimits,
    Problem,
    read_body,
    read_form,
    read_object,
)
from faststream_sqlbroker.http.shield import HANDLERS, SECURITY_HEADERS, SecurityMiddleware
from tests.http.conftest import BASE, as_user, client_of, logins, on_sqlite
from tests.http.known import CHANNEL, JOBS, PATH, PUBLISH, bearer
from tests.http.pulling import channels
from tests.http.queueing import queues

SECRET = "postgresql://user:secret@db/shop"


FEW = BodyLimits(100, 600.0)


def answering(read: Any, limits: BodyLimits = FEW) -> Any:
    async def endpoint(request: Request) -> JSONResponse:
        found = await read(request, limits)
        return JSONResponse(found.decode() if isinstance(found, bytes) else found)

    routes = [Route("/", endpoint, methods=["POST"])]
    return SecurityMiddleware(
        Starlette(routes=routes, exception_handlers=dict(HANDLERS)), local_only=False
    )


@on_sqlite
async def test_each_answer_has_the_headers_of_the_shield(app: HttpApp) -> None:
    async with client_of(app) as client:
        for path, status in (("/health/live", 200), ("/csrf-token", 401), ("/none", 404)):
            found = await client.get(path)
            assert found.status_code == status
            for name, value in SECURITY_HEADERS.items():
                assert found.headers[name] == value
    policy = SECURITY_HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy


@on_sqlite
async def test_what_does_not_exist_is_named(broker: SqlBroker, app: HttpApp) -> None:
    """With what there is; mounted, too. A long path is cut."""
    mounted = Starlette(routes=[Mount("/broker", app)])
    for served, root in ((app, ""), (mounted, "/broker")):
        async with client_of(served) as client:
            none = await client.get(f"{root}/none")
            assert none.status_code == 404
            assert none.json()["error"].startswith(
                f"path '{root}/none' does not exist here: {root}/openapi.json lists the paths."
            )
            other = await client.delete(f"{root}/v1/count")
            assert other.status_code == 405
            told = other.json()["error"]
            assert told.startswith(f"'{root}/v1/count' accepts ")
            assert "GET" in told
            assert told.endswith(", got the method 'DELETE'")
            assert other.headers["allow"]
            assert len((await client.get(f"{root}/{'x' * 5_000}")).json()["error"]) < 300
    probes = probe_app(app._service)
    async with client_of(probes) as client:
        assert (await client.get("/none")).json()["error"] == (
            "path '/none' does not exist here: use /health/live, /health/ready, /metrics"
        )


@on_sqlite
@pytest.mark.parametrize(
    ("path", "accept", "kind"),
    [
        ("/ui/none", "text/html,application/xhtml+xml,*/*;q=0.8", "text/html"),
        ("/ui/none", "*/*", "application/json"),
        ("/ui/none", "application/json", "application/json"),
        ("/ui/", "TEXT/HTML", "text/html"),
        ("/ui/<script>x", "text/html", "text/html"),
        ("/ui/static/none.css", "text/css,*/*;q=0.1", "application/json"),
        ("/uix", "text/html", "application/json"),
        ("/v1/none", "text/html", "application/json"),
    ],
)
@pytest.mark.parametrize("root", ["", "/broker"])
async def test_a_browser_gets_a_page_of_an_unknown_address_of_the_dashboard(
    app: HttpApp, path: str, accept: str, kind: str, root: str
) -> None:
    served = Starlette(routes=[Mount(root, app)]) if root else app
    async with client_of(served) as client:
        found = await client.get(f"{root}{path}", headers={"Accept": accept})
        assert (found.status_code, found.headers["content-type"].partition(";")[0]) == (404, kind)
        assert "<script>x" not in found.text
        if kind == "text/html":
            assert "does not exist here" in found.text
            assert f'href="{root}/"' in found.text
        # A method that a page does not take, too.
        if path == "/ui/none":
            known = await client.delete(f"{root}/ui/queues", headers={"Accept": accept})
            given = known.headers["content-type"].partition(";")[0]
            assert (known.status_code, given) == (405, kind)


@on_sqlite
async def test_without_a_dashboard_there_is_no_page(broker: SqlBroker) -> None:
    async with client_of(broker.asgi(logins(), dashboard="off")) as client:
        found = await client.get("/ui/queues", headers={"Accept": "text/html"})
        assert (found.status_code, found.headers["content-type"]) == (404, "application/json")


@on_sqlite
async def test_a_role_that_is_too_low_is_named(app: HttpApp) -> None:
    async with client_of(app) as client:
        found = await client.get("/v1/diagnosis", auth=as_user("vic"))
        assert (found.status_code, found.json()["error"]) == (
            403,
            "this request needs the role admin, your role is viewer: ask an administrator",
        )


@on_sqlite
@pytest.mark.parametrize(
    "path",
    [
        "/health/../csrf-token",
        "/%2e%2e/etc/passwd",
        "//evil.test/",
        "/health/live/",
        "/.git/config",
    ],
)
async def test_paths_lead_nowhere_else(app: HttpApp, path: str) -> None:
    """Path traversal, and redirects to another host."""
    async with client_of(app) as client:
        found = await client.get(path)
        assert found.status_code in {401, 404}
        assert "location" not in found.headers


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (SetupError("limit must be 1 to 1000"), 400, "limit must be 1 to 1000"),
        (PublishError("no such queue"), 400, "no such queue"),
        (QueueFullError("q", "q is full"), 429, "q is full"),
        (TransientStoreError(SECRET), 503, "the database is unreachable or busy: try again"),
        (
            UnknownOutcomeError(SECRET),
            503,
            "the database's response was lost: the request may have taken effect",
        ),
        (StoreError(SECRET), 500, "the database refused the request: see the server's log"),
        (ValueError(SECRET), 500, "internal server error: see the server's log"),
        (Problem(418, "tea"), 418, "tea"),
    ],
)
async def test_an_error_tells_its_caller_what_is_the_callers(
    error: Exception, status: int, told: str
) -> None:
    async def read(_request: Request, _limits: BodyLimits) -> Any:
        raise error

    async with client_of(answering(read)) as client:
        found = await client.post("/")
    assert (found.status_code, found.json()) == (status, {"error": told})
    assert "secret" not in found.text
    assert found.headers["x-content-type-options"] == "nosniff"


async def parts(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_a_body_has_a_limit_whatever_its_length_says() -> None:
    async with client_of(answering(read_body)) as client:
        assert (await client.post("/", content=b"x" * 100)).json() == "x" * 100
        large = await client.post("/", content=b"x" * 101)
        text = "the body must have at most 100 bytes (max_body), got Content-Length '101'"
        assert (large.status_code, large.json()["error"]) == (413, f"{text}: send less at a time")
        # Without a length, in parts.
        chunked = await client.post("/", content=parts(b"x" * 60, b"x" * 60))
        assert chunked.status_code == 413
        assert ", got 120 bytes or more: " in chunked.json()["error"]
        for length in ("-1", "x", "9" * 5_000, "\u00b2"):
            headers = {b"content-length": length.encode()}
            found = await client.post("/", content=b"x", headers=headers)
            assert found.status_code == 413


async def test_a_slow_body_is_cut_off() -> None:
    never = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        await never.wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
    }
    chunks = slow()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": await anext(chunks), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    app = answering(read_body, BodyLimits(100, 0.05))
    await asyncio.wait_for(app(scope, receive, send), 60)
    assert sent[0]["status"] == 408


@pytest.mark.parametrize("body", [b"[]", b"{", b'"x"', b"[" * 50_000, b"\xff", b"1" * 5_000])
async def test_what_is_no_object(body: bytes) -> None:
    async with client_of(answering(read_object, BodyLimits(100_000, 600.0))) as client:
        found = await client.post("/", content=body)
        assert (found.status_code, found.json()["error"][:8]) == (400, "the body")
        assert (await client.post("/", content=b'{"a": 1}')).json() == {"a": 1}
        assert (await client.post("/")).json() == {}


async def test_a_form() -> None:
    kind = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}
    async with client_of(answering(read_form)) as client:
        assert (await client.post("/")).json() == {}
        assert (await client.post("/", content=b"a=1&b=", headers=kind)).json() == {
            "a": "1",
            "b": "",
        }
        form = "the body must be a form of up to 20 fields such as rotate=true, joined by &, in UTF"
        for wrong, text in (
            (b"a=1&a=2", "a field may occur once, got 'a' twice: remove one"),
            (b"x", f"{form}-8; got 1 bytes in another form"),
            (b"\xff=1", form),
            (b"&".join([b"a=1"] * 21), form),
        ):
            refused = await client.post("/", content=wrong, headers=kind)
            assert refused.status_code == 400
            assert refused.json()["error"].startswith(text)
        of_type = "the body must be a form of the type application/x-www-form-urlencoded, got "
        untyped = await client.post("/", content=b"a=1")
        assert (untyped.status_code, untyped.json()["error"]) == (415, of_type + "no Content-Type")
        other = await client.post("/", json={"a": 1})
        assert (other.status_code, other.json()["error"]) == (415, f"{of_type}'application/json'")


CSRF = Csrf(b"0123456789abcdef")
GOOD = CSRF.create_token("ann")
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "headers", "passes"),
    [
        ("GET", {"origin": "https://evil.test", "sec-fetch-site": "cross-site"}, True),
        # A program, not a browser.
        ("POST", JSON, True),
        ("PUT", {}, True),
        ("DELETE", {}, True),
        # What a form of any page sends without asking.
        ("POST", {}, False),
        ("POST", {"content-type": "text/plain"}, False),
        ("POST", {"content-type": "application/x-www-form-urlencoded"}, False),
        ("POST", {"content-type": "multipart/form-data; boundary=x"}, False),
        # A browser.
        ("POST", {**JSON, "cookie": "session=1"}, False),
        ("PUT", {"cookie": "session=1"}, False),
        ("PUT", {"origin": "http://broker.test"}, False),
        ("PUT", {"referer": "http://broker.test/"}, False),
        ("PUT", {"sec-fetch-site": "same-origin"}, False),
        ("PUT", {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, False),
        ("PUT", {"sec-fetch-mode": "cors", "cookie": "session=1"}, False),
        ("PUT", {"sec-fetch-mode": "cors", "origin": "http://broker.test"}, False),
        # A program all the same: Node's fetch.
        ("PUT", {"sec-fetch-mode": "cors", "accept-language": "*"}, True),
        ("PATCH", {**JSON, "sec-fetch-mode": "cors"}, True),
        ("POST", {**JSON, "sec-fetch-mode": "cors"}, True),
        ("POST", {"content-type": "text/plain;charset=UTF-8", "sec-fetch-mode": "cors"}, False),
        ("PUT", {"sec-fetch-site": "same-origin", "x-csrf-token": GOOD}, True),
        ("POST", {"cookie": "session=1", "x-csrf-token": GOOD}, True),
        ("PUT", {"origin": "http://broker.test", "x-csrf-token": GOOD}, True),
        # Another site, with a token or without.
        ("PUT", {"origin": "http://evil.test", "x-csrf-token": GOOD}, False),
        ("PUT", {"origin": "null", "x-csrf-token": GOOD}, False),
        ("PUT", {"origin": "http://broker.test.evil.test", "x-csrf-token": GOOD}, False),
        ("PUT", {"origin": "http://[broker.test", "x-csrf-token": GOOD}, False),
        ("PUT", {"sec-fetch-site": "cross-site", "x-csrf-token": GOOD}, False),
        ("PUT", {"sec-fetch-site": "same-site", "x-csrf-token": GOOD}, False),
        # Forged tokens.
        ("PUT", {"x-csrf-token": ""}, False),
        ("PUT", {"x-csrf-token": CSRF.create_token("vic")}, False),
        ("PUT", {"x-csrf-token": Csrf(b"other secret----").create_token("ann")}, False),
        ("PUT", {"x-csrf-token": "\u00e9"}, False),
    ],
)
def test_writes_of_browsers_need_a_token(
    method: str, headers: dict[str, str], passes: bool
) -> None:
    request = request_of({"host": "broker.test", **headers})
    if passes:
        CSRF.check(request, method, "ann")
        return
    with pytest.raises(Problem) as caught:
        CSRF.check(request, method, "ann")
    assert caught.value.status == 403


@on_sqlite
async def test_the_fetch_of_node_needs_no_token(broker: SqlBroker) -> None:
    """Its headers, as Node 20 sends them."""
    node = {"Accept-Language": "*", "Sec-Fetch-Mode": "cors", "User-Agent": "node"}
    async with client_of(broker.asgi(logins(), channels=Channels())) as client:
        for more, status in (
            ({}, 201),
            ({"Cookie": "a=1"}, 403),
            ({"Origin": BASE}, 403),
            ({"Sec-Fetch-Site": "same-origin"}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
        ):
            write = {"data": {"rotate": "true"}, "headers": {**node, **more}}
            found = await client.put("/channel/news", auth=as_user("ann"), **write)
            assert found.status_code == status, more


def request_of(
    headers: dict[str, str], *more: tuple[str, str], client: tuple[str, int] | None = None
) -> Request:
    pairs = [*headers.items(), *more]
    raw = [(name.encode(), value.encode("latin-1")) for name, value in pairs]
    return Request({"type": "http", "headers": raw, "client": client})


def test_what_is_not_of_this_machine() -> None:
    here = ("127.0.0.1", 1)
    check_local(request_of({"host": "localhost:80"}, client=here))
    check_local(request_of({"host": "localhost"}, client=("::1", 1)))
    refused = [
        request_of({"host": "localhost"}, ("host", "evil.test"), client=here),
        request_of({}, client=here),
        request_of({"host": "localhost"}, client=("192.0.2.1", 1)),
        request_of({"host": "localhost"}, client=("0.0.0.0", 1)),
        request_of({"host": "localhost"}),
        request_of({"host": "localhost", "forwarded": "for=192.0.2.1"}, client=here),
    ]
    for each in refused:
        with pytest.raises(Problem):
            check_local(each)


@on_sqlite
async def test_a_token_is_its_users(app: HttpApp) -> None:
    async with client_of(app) as client:
        found = [
            (await client.get("/csrf-token", auth=as_user(name))).json()["token"]
            for name in ("ann", "vic", "ann")
        ]
    assert found[0] == found[2] != found[1]


def test_the_name_in_host() -> None:
    assert parse_host_name("LocalHost:80") == "localhost"
    assert parse_host_name("[::1]:80") == "[::1]"
    assert parse_host_name("[::1]") == "[::1]"
    assert parse_host_name("localhost:evil") == "localhost:evil"


@on_sqlite
async def test_head_is_answered_as_get(broker: SqlBroker) -> None:
    """By probes of an orchestrator, too."""
    async with client_of(broker.asgi(logins(), queues=queues())) as client:
        for path, auth, status in (
            ("/health/live", None, 200),
            ("/csrf-token", as_user("vic"), 200),
            ("/csrf-token", None, 401),
            (f"{PATH}/reserve", None, 405),
            ("/none", None, 404),
        ):
            assert (await client.head(path, auth=auth)).status_code == status


@on_sqlite
async def test_a_body_is_read_only_if_its_sender_is_known(broker: SqlBroker) -> None:
    """Then it is JSON whatever its type says: `curl -d` says that it is a form."""
    read: list[str] = []

    async def body(name: str) -> AsyncIterator[bytes]:
        read.append(name)
        yield b'{"body": 1}'

    form = {"Content-Type": "application/x-www-form-urlencoded"}
    async with client_of(broker.asgi(logins(), channels=channels(), queues=queues())) as client:
        for name, method, path, headers, status in (
            ("stranger", "POST", f"{PATH}/publish", {}, 401),
            ("wrong token", "POST", f"{PATH}/publish", bearer("w" * 43), 403),
            ("no user", "PUT", f"{PATH}/tokens/publish", {}, 401),
            ("no consumer", "POST", f"{JOBS}/job/1", {}, 403),
            ("no producer", "POST", f"/channel/{CHANNEL}/broadcast", {}, 403),
            ("known", "POST", f"{PATH}/publish", bearer(PUBLISH), 201),
        ):
            found = await client.request(
                method, path, content=body(name), headers={**form, **headers}
            )
            assert found.status_code == status, name
    assert read == ["known"]

"""Attacks on a real server, each a line of the table in docs/howto/security.md."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.routing import Mount, Route

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.listening import create_server_config
from faststream_sqlbroker.http import server as module
from faststream_sqlbroker.http.server import InnerServer
from tests.faststream.conftest import Look
from tests.helpers import eventually
from tests.http.conftest import LONG, as_user, logins, on_sqlite
from tests.http.pulling import channels
from tests.http.queueing import PATH, PUBLISH, bearer, queues

pytestmark = on_sqlite
OPEN = {"/health/live", "/health/ready", "/ui/static"}
"""What anyone may read, on purpose."""
BY_TOKEN = ("/channel/", "/v1/queues/")
"""Paths whose callers have a token; administrators make the tokens by PUT."""
IDS = {"channel": "orders", "consumer": "billing", "job": "1", "queue:path": "shop/orders"}
IDS |= {"message": "1", "role": "consume"}


class Site:
    """A server on this machine, and its application's paths."""

    def __init__(self, app: Any, port: int) -> None:
        self.port = port
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self.routes: list[tuple[str, str, str]] = []
        for route in app.api.routes:
            if isinstance(route, Route):
                methods = sorted((route.methods or set()) - {"HEAD"})
                self.routes += [(each, route.path, filled(route.path)) for each in methods]
            else:
                assert isinstance(route, Mount)
                assert route.path in OPEN

    async def raw(self, sent: bytes, more: bytes = b"") -> bytes:
        """All that is answered until the server closes the connection."""
        loop = asyncio.get_running_loop()
        answer = b""
        # Not a stream: it forgets what came before a reset.
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.setblocking(False)
            async with asyncio.timeout(60):
                with suppress(ConnectionError):
                    for part in filter(None, (sent, more)):
                        await loop.sock_sendall(client, part)
                with suppress(ConnectionError):
                    while part := await loop.sock_recv(client, 65_536):
                        answer += part
        return answer


def filled(path: str) -> str:
    for name, value in IDS.items():
        path = path.replace("{" + name + "}", value)
    assert "{" not in path or path.startswith("/ui/jobs/"), path
    return path.replace("{job}", "1")


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[Site]:
    """As `sqlbroker serve` runs it."""
    config, listener = create_server_config(app, "127.0.0.1", 0, {})
    server = InnerServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    site = Site(app, listener.getsockname()[1])
    await eventually(lambda: server.started)
    try:
        async with site.http:
            yield site
    finally:
        server.should_exit = True
        await task


@pytest.fixture
async def site(broker: SqlBroker) -> AsyncIterator[Site]:
    app = broker.asgi(logins(), channels=channels(), queues=queues(), max_failures=1000)
    async with running(app) as found:
        yield found


@pytest.mark.attack("no credentials, on every path", "401 or 403, but for probes and style sheets")
async def test_every_path_asks_who_it_is(site: Site) -> None:
    assert len(site.routes) > 40
    for method, route, path in site.routes:
        answer = await site.http.request(method, path)
        if route in OPEN:
            assert answer.status_code == 200, path
        else:
            assert answer.status_code in {401, 403}, (method, path, answer.status_code)
            assert "shop/orders" not in answer.text


@pytest.mark.attack("a viewer writes, on every path", "403, and a user's password is no token")
async def test_every_write_asks_for_a_role(site: Site) -> None:
    auth = as_user("vic")
    token = (await site.http.get("/csrf-token", auth=auth)).json()["token"]
    headers = {"X-CSRF-Token": token}
    for method, route, path in site.routes:
        if method == "GET":
            continue
        answer = await site.http.request(method, path, auth=auth, headers=headers)
        by_token = route.startswith(BY_TOKEN) and method != "PUT"
        allowed = {401, 403} if by_token else {403}
        assert answer.status_code in allowed, (method, path, answer.status_code)


@pytest.mark.attack(
    "a write with no CSRF token, a forged one, or that of another user; another site's Origin",
    "403 on every path of a user",
)
async def test_every_write_of_a_browser_asks_for_its_token(site: Site) -> None:
    auth = as_user("ann")
    own = (await site.http.get("/csrf-token", auth=auth)).json()["token"]
    others = (await site.http.get("/csrf-token", auth=as_user("vic"))).json()["token"]
    here = f"http://127.0.0.1:{site.port}"
    forged: list[dict[str, str]] = [{"Origin": here}, {"Origin": here, "X-CSRF-Token": others}]
    forged += [{"X-CSRF-Token": "0" * 64}, {"X-CSRF-Token": own, "Origin": "https://evil.test"}]
    for method, route, path in site.routes:
        if method == "GET" or (route.startswith(BY_TOKEN) and method != "PUT"):
            continue
        for headers in forged:
            answer = await site.http.request(method, path, auth=auth, headers=headers)
            assert answer.status_code == 403, (method, path, headers, answer.status_code)


@pytest.mark.attack("path traversal, encoded once and twice, on files and in names", "400 to 404")
async def test_paths_lead_to_no_file(site: Site) -> None:
    auth = as_user("ann")
    for begin in ("/ui/static/", "/ui/messages/", "/v1/queues/", "/channel/", "/ui/jobs/"):
        for up in ("../" * 6, "..%2f" * 6, "%2e%2e/" * 6, "%252e%252e%252f" * 6, "..%5c" * 6):
            target = f"{begin}{up}etc/passwd"
            head = f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            answer = await site.raw(head.encode() + b"\r\n")
            assert answer.split(b" ")[1] in {b"400", b"401", b"403", b"404", b"405"}, target
            assert b"root:" not in answer
            found = await site.http.get(f"{begin}{up.replace('../', '%2e%2e/')}x", auth=auth)
            assert found.status_code in {400, 401, 403, 404, 405}, target


@pytest.mark.attack(
    "a body over the limit, by Content-Length and in chunks", "413, before it is read to its end"
)
async def test_large_bodies_are_cut_off(site: Site, look: Look) -> None:
    start = f"POST {PATH}/publish HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {PUBLISH}\r\n"
    told = start.encode() + b"Content-Length: 2000000\r\n\r\n"
    assert (await site.raw(told)).startswith(b"HTTP/1.1 413")
    parts = start.encode() + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    assert (await site.raw(parts, chunk * 17)).startswith(b"HTTP/1.1 413")
    # What is sent behind the answer may cut it off: then only the end is seen.
    assert (await site.raw(parts, chunk * 100))[:12] in {b"HTTP/1.1 413", b""}
    assert await look.rows() == []


@pytest.mark.attack("a head of megabytes, or of thousands of headers", "400, and it is closed")
async def test_large_heads_are_cut_off(site: Site) -> None:
    line = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"
    for head in (b"X: " + b"y" * 1_000_000, b"".join(b"X%d: y\r\n" % n for n in range(50_000))):
        answer = await site.raw(line + head)
        assert answer[:12] in {b"HTTP/1.1 400", b""}
    assert (await site.http.get("/health/live")).status_code == 200


@pytest.mark.attack(
    "two lengths, a length with chunks, line breaks and NUL in headers, no Host",
    "400: no request hides in another",
)
async def test_requests_cannot_be_smuggled(site: Site) -> None:
    host = b"Host: x\r\n"
    for headers in (
        host + b"Content-Length: 3\r\nContent-Length: 5\r\n",
        host + b"X: a\0b\r\n",
        host + b"X : a\r\n",
        host + b"X: a\rSet-Cookie: b\r\n",
        host + b"Transfer-Encoding: gzip, chunked\r\n",
        host + host,
        b"",
    ):
        start = b"POST /v1/queues/a/publish HTTP/1.1\r\n"
        answer = await site.raw(start + headers + b"\r\n")
        assert answer[9:10] in {b"4", b"5"}, (headers, answer)
        assert answer.count(b"HTTP/1.1 ") == 1, headers


@pytest.mark.attack(
    "a body whose chunks have no length, before and after the answer", "400, and one line of log"
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_chunks_without_length(
    broker: SqlBroker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    at_once: bool,
) -> None:
    head = b"POST /v1/queues/q/reserve HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    wrong = b"0x5\r\nabcde\r\n0\r\n\r\n"
    # When it has stopped, the application's own answer has come, too.
    async with running(broker.asgi(logins(), queues=queues())) as site:
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
        # The first request of all waits for the database, the second is refused at once.
        assert (await site.http.post("/v1/queues/q/reserve")).status_code == 401
        if at_once:
            answer = await site.raw(head + wrong)
        else:
            answer = await answered_before(site, head, wrong)
        assert answer.startswith(b"HTTP/1.1 400" if at_once else b"HTTP/1.1 401")
    [line] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert line.getMessage() == "Invalid HTTP request received."
    assert line.exc_info is None


async def answered_before(site: Site, head: bytes, body: bytes) -> bytes:
    """The answer to `head`, after which `body` is sent until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(head)
    answer = await reader.readuntil(b"\r\n\r\n")
    writer.write(body)
    async with asyncio.timeout(60):
        answer += await reader.read()
    writer.close()
    return answer


@pytest.mark.attack("a line break in a name that an answer could repeat", "no header is added")
async def test_no_header_is_added(site: Site) -> None:
    for path in ("/ui/queue?name=a%0d%0aSet-Cookie:%20b", "/none%0d%0aSet-Cookie:%20b"):
        found = await site.http.get(path, auth=as_user("vic"))
        assert "set-cookie" not in found.headers


@pytest.mark.attack("a head, or a body of a refused request, that never ends", "closed in 10 s")
async def test_slow_requests_are_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    short = partial(monkeypatch.setattr, module, "HEAD_TIMEOUT", 0.1)
    answered = module.LimitedProtocol.on_response_complete

    def answered_once(connection: Any) -> None:
        # Not before: a busy machine may need longer for a head that is sent at once.
        short()
        answered(connection)

    with monkeypatch.context() as patch:
        patch.setattr(module, "HEAD_TIMEOUT", 0.1)
        assert await site.raw(b"GET /health/live HTTP/1.1\r\nX-Slow: ") == b""
    monkeypatch.setattr(module.LimitedProtocol, "on_response_complete", answered_once)
    begun = b"PUT /channel/a HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    assert (await site.raw(begun, b"x")).startswith(b"HTTP/1.1 401")
    # The second request of a connection, too.
    monkeypatch.setattr(module, "HEAD_TIMEOUT", LONG)
    first = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    assert (await site.raw(first, b"GET / HT")).startswith(b"HTTP/1.1 200")


@pytest.mark.attack("a client that does not read its answer", "closed in 30 s")
async def test_slow_readers_are_closed(broker: SqlBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_TIMEOUT", 0.2)
    ended = asyncio.Event()

    async def endless(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for _ in range(1_000):
                await send({"type": "http.response.body", "body": b"x" * 1_000_000} | MORE)
        finally:
            ended.set()

    app = broker.asgi(logins())
    monkeypatch.setattr(app, "_app", endless)
    async with running(app) as site:
        _, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(60):
            await ended.wait()
        writer.close()


MORE = {"more_body": True}


@pytest.mark.attack("deep JSON, huge numbers, NUL, a field twice, NaN", "400 to 409, never 500")
async def test_odd_values_are_refused(site: Site) -> None:
    huge = "9" * 5_000
    bodies = ["[" * 100_000, '{"body":' * 50_000, f'{{"body": 1, "priority": {huge}}}']
    bodies += ['{"body": 1, "key": "a\\u0000"}', '{"body": NaN}', '{"body": 1, "delay": 1e999}']
    bodies += [
        f'{{"body": 1, "headers": {{"a": {huge}}}}}',
        f'{{"body": 1, "headers": {{"a": {"[" * 99}{"]" * 99}}}}}',
    ]
    for body in bodies:
        found = await site.http.post(f"{PATH}/publish", content=body, headers=bearer(PUBLISH))
        assert found.status_code == 400, (body[:40], found.text)
    twice = '{"body": 1, "body": ' + json.dumps("x") + "}"
    found = await site.http.post(f"{PATH}/publish", content=twice, headers=bearer(PUBLISH))
    assert found.status_code < 500
    auth = as_user("ann")
    for method, route, path in site.routes:
        if method != "GET" or route in OPEN or route == "/ui/live":
            continue
        for query in ("name=%00&name=b", f"limit={huge}&after=%00", "Lookup=%00", "since=1e999"):
            found = await site.http.get(f"{path}?{query}", auth=auth)
            assert found.status_code < 500, (path, query, found.text)

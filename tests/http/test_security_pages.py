"""Attacks on a real server by what its pages show, by headers of proxies, and by many clients."""

import asyncio
from base64 import b64encode

import httpx
import pytest

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http import ProxyAuth
from faststream_sqlbroker.http.dashboard import live
from faststream_sqlbroker.http.local import PROXY_HEADERS, LocalOnly
from tests.helpers import eventually
from tests.http.conftest import as_user, logins, on_sqlite
from tests.http.dashboard.conftest import EVIL, PAGES, fill
from tests.http.dashboard.reading import shown
from tests.http.pulling import CHANNEL, CONSUMER, JOBS, channels
from tests.http.queueing import CONSUME, PATH, bearer, queues
from tests.http.test_security import running

pytestmark = on_sqlite
MOST_FAILURES = 3
OTHERS = {"X-Forwarded-Host": "evil.test", "X-Forwarded-Proto": "https", "X-Forwarded-Port": "1"}


def is_closed_to_script(answer: httpx.Response) -> None:
    """A browser runs nothing that stands in the answer itself, and takes it for nothing else."""
    [policy] = answer.headers.get_list("content-security-policy")
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == "'none'"
    assert parts["script-src"] == parts["style-src"] == "'self'"
    assert parts["base-uri"] == parts["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    shown(answer)


@pytest.mark.attack(
    "markup and script as names of queues, keys, headers, bodies, errors and addresses",
    "shown as text on every page of the dashboard, and no inline script may run on any answer",
)
async def test_nothing_that_is_shown_runs(broker: SqlBroker) -> None:
    ids = await fill(broker, EVIL)
    one = str(httpx.QueryParams({"name": EVIL}))
    search = str(httpx.QueryParams({"queue": EVIL, "key": EVIL, "header": EVIL, "value": EVIL}))
    told = ["/", "/ui/queues", f"/ui/queue?{one}", f"/ui/messages?{search}", "/ui/dead-letters"]
    pages = [*PAGES, *told, *(f"/ui/messages/{each}" for each in ids.values())]
    # Their answers repeat what was asked, or say what is wrong with it.
    odd = httpx.QueryParams(dict.fromkeys(("state", "since", "after", "error", "Lookup"), EVIL))
    wrong = [f"{path}?{odd}" for path in ("/ui/messages", "/ui/dead-letters", "/v1/count")]
    quoted = httpx.URL("http://x").copy_with(path=f"/{EVIL}").raw_path.decode()
    wrong += [f"/ui/none{quoted}", f"/ui/messages{quoted}", f"/v1/queues{quoted}/count"]
    async with running(broker.asgi(logins(), channels=channels(), queues=queues())) as site:
        for path in [*pages, *wrong]:
            answer = await site.http.get(path, auth=as_user("ola"))
            assert (answer.status_code == 200) == (path in pages), (path, answer.text)
            is_closed_to_script(answer)
            if path in told:
                assert EVIL in shown(answer).text, path
        assert "alert(1)" in (await site.http.get("/", auth=as_user("vic"))).text
        is_closed_to_script(await site.http.get("/", auth=(EVIL, EVIL)))
        is_closed_to_script(await site.http.get("/health/ready"))


@pytest.mark.attack(
    "a header of a proxy, or the name of another site, before a server without authentication",
    "403 on every path",
)
async def test_without_authentication_nothing_is_forwarded(broker: SqlBroker) -> None:
    app = broker._make_standalone_app(LocalOnly(), channels(), queues(), proxies=())
    async with running(app) as site:
        assert (await site.http.get("/csrf-token")).status_code == 200
        sent = [{name: "127.0.0.1"} for name in PROXY_HEADERS]
        sent += [{"Host": host} for host in ("evil.test", f"evil.test:{site.port}", "127.0.0.1.x")]
        for headers in sent:
            for method, _, path in site.routes:
                answer = await site.http.request(method, path, headers=headers)
                assert answer.status_code == 403, (method, path, headers)


@pytest.mark.attack(
    "forged X-Forwarded-For, -Host, -Proto and the header of a proxy's user",
    "ignored unless a listed proxy has sent them; no answer repeats them",
)
async def test_forged_headers_of_proxies_are_ignored(broker: SqlBroker) -> None:
    by_proxy = ProxyAuth("X-Forwarded-User", proxies=["10.0.3.7"], roles={"ann": "admin"})
    app = broker.asgi([by_proxy, logins()], max_failures=MOST_FAILURES)
    async with running(app) as site:
        for forged in ("10.0.3.7", "127.0.0.1", "10.0.3.7, 127.0.0.1"):
            headers = {"X-Forwarded-User": "ann", "X-Forwarded-For": forged}
            found = await site.http.get("/csrf-token", headers=headers | {"Forwarded": forged})
            assert found.status_code == 401
        # Another site cannot pass for this one.
        auth = as_user("ola")
        token = (await site.http.get("/csrf-token", auth=auth)).json()["token"]
        of_site = {"Origin": "https://evil.test", "X-CSRF-Token": token, **OTHERS}
        write = await site.http.post("/ui/pause", auth=auth, headers=of_site, data={"queue": "q"})
        assert write.status_code == 403
        assert await broker.admin.queues() == []
        for path in ("/", "/ui/queues", "/openapi.json", "/none", "/ui"):
            answer = await site.http.get(path, auth=auth, headers=OTHERS)
            assert "evil.test" not in answer.text + str(answer.headers), path
        # A guesser does not become another one by the header.
        statuses = [
            await status(site.http, "/csrf-token", ("ann", "wrong"), f"203.0.113.{number}")
            for number in range(MOST_FAILURES + 2)
        ]
        assert statuses == [401] * MOST_FAILURES + [429] * 2


async def status(
    client: httpx.AsyncClient, path: str, auth: tuple[str, str], forwarded: str = "203.0.113.1"
) -> int:
    found = await client.get(path, auth=auth, headers={"X-Forwarded-For": forwarded})
    return found.status_code


@pytest.mark.attack(
    "many wrong passwords and tokens, also on different paths and by different connections",
    "429 with Retry-After, whichever path it is; probes are answered",
)
async def test_failures_are_limited_on_every_path(broker: SqlBroker) -> None:
    app = broker.asgi(logins(), channels=channels(), queues=queues(), max_failures=MOST_FAILURES)
    async with running(app) as site:
        for path in ("/", "/metrics", "/v1/count"):
            assert await status(site.http, path, ("ann", "wrong-password")) == 401
        for method, route, path in site.routes:
            if route.startswith(("/health/", "/channel/", "/v1/queues/")):
                continue
            headers = {"X-CSRF-Token": "0"}
            async with httpx.AsyncClient(base_url=site.http.base_url, timeout=60) as other:
                refused = await other.request(method, path, auth=as_user("ann"), headers=headers)
            assert refused.status_code == 429, (method, path)
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        take = f"{PATH}/reserve"
        for _ in range(MOST_FAILURES):
            wrong = await site.http.post(take, json={}, headers=bearer("wrong-token-1234"))
            assert wrong.status_code == 403
        # Tokens of channels are counted with those of queues.
        tokens = {"X-Broker-Channel-Token": "wrong", "X-Broker-Consumer-Token": "wrong"}
        for path in (f"{JOBS}/queued-jobs", f"/channel/{CHANNEL}/consumer/{CONSUMER}x/queued-jobs"):
            assert (await site.http.get(path, headers=tokens)).status_code == 429
        right = await site.http.post(take, json={}, headers=bearer(CONSUME))
        assert right.status_code == 429
        assert (await site.http.get("/health/live")).status_code == 200
        assert await status(site.http, "/csrf-token", as_user("vic")) == 200


@pytest.mark.attack(
    "hundreds of open pages that wait for news",
    "100 streams a process, then 503 with Retry-After; pages and jobs are answered all the same",
)
async def test_live_pages_are_limited(broker: SqlBroker) -> None:
    basic = b64encode(":".join(as_user("vic")).encode())
    ask = b"GET /ui/live HTTP/1.1\r\nHost: x\r\nAuthorization: Basic " + basic + b"\r\n\r\n"
    await broker.publish("x", "orders")
    open_pages: list[asyncio.StreamWriter] = []

    async def opened() -> bytes:
        """The first line of the answer, once there is news or an end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        open_pages.append(writer)
        writer.write(ask)
        async with asyncio.timeout(60):
            first = await reader.readline()
            if b" 200 " in first:
                await reader.readuntil(b"data: ")
        return first

    async with running(broker.asgi(logins())) as site:
        try:
            for _ in range(live.MAX_VIEWERS):
                assert b" 200 " in await opened()
            refused = await site.http.get("/ui/live", auth=as_user("vic"))
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            for path in ("/", "/ui/queues", "/health/ready", "/csrf-token"):
                found = await site.http.get(path, auth=as_user("vic"))
                assert found.status_code == 200, path
            # One that leaves makes room.
            open_pages.pop(0).close()

            async def has_room() -> bool:
                return b" 200 " in await opened()

            await eventually(has_room, timeout=60)
        finally:
            for writer in open_pages:
                writer.close()

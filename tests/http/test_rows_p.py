"""Rows P12 and P15 of the mission: counts of mirrored messages, and the diagnosis.

The other rows P are tested where their subjects are: a name such as test_p3 tells.
"""

import asyncio
import base64
import json
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from faststream.redis import RedisBroker
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import health
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.http import HttpApp
from faststream_sqlbroker.schema.migrate import HEAD
from tests.faststream.conftest import QUICK, Heard, Look, Make, make
from tests.http.conftest import LONG, as_user, client_of, logins, on_sqlite
from tests.http.queueing import QUEUE, Queueing

__all__ = ("make",)

mirror = pytest.mark.capability("mirror: messages found by a lookup value until they leave")
diagnosed = pytest.mark.capability("`broker.admin.diagnosis`, /v1/diagnosis and its page")


@mirror
async def test_p12_the_bare_number_of_mirrored_messages(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    """P12: each filter is optional, both apply; uncached; Basic auth, else 401."""
    ids = [
        await broker.publish("body", "q", delay="1h", lookup=lookup, info=info)
        for lookup, info in (("a b", "x&y"), ("a b", "z"), ("c", "x&y"))
    ]
    await broker.publish("not mirrored", "q", delay="1h")

    async def count(**filters: str) -> str:
        found = await web.get("/v1/count", params=filters, auth=as_user("vic"))
        assert found.status_code == 200, found.text
        assert found.headers["cache-control"] == "no-store"
        return found.text

    assert await count() == "3"
    assert await count(Lookup="a b") == "2"
    assert await count(Info="x&y") == "2"
    assert await count(Lookup="a b", Info="x&y") == "1"
    assert await count(Lookup="", Info="") == "3"
    assert await count(Lookup="A B") == await count(Lookup="%") == "0"
    # MySQL and MariaDB compare texts without the spaces at their end.
    assert await count(Info="z ") == await count(Info="Z") == "0"
    # Until it leaves.
    await broker.admin.cancel(ids[0] or 0, by="ann")
    assert await count() == "2"
    assert await count(Lookup="a b", Info="x&y") == "0"
    for auth in (None, ("vic", "wrong-password"), ("eve", "vic-password")):
        refused = await web.get("/v1/count?Lookup=c", auth=auth)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        assert "1" not in refused.text


@mirror
async def test_p11_the_records_and_their_info_over_http(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    """P11."""
    first = await broker.publish(b"\xff\x00", "q", delay="1h", lookup="a", headers={"x": [1]})
    await broker.publish("b", "q", destination="mails", lookup="a", info="i")
    found = await web.get("/v1/mirror?Lookup=a", auth=as_user("ola"))
    assert found.status_code == 200, found.text
    one, two = found.json()["Result"]
    assert set(one) == {
        *("Name", "DestinationTopic", "EntryTime", "Info", "Lookup", "Payload", "Properties"),
        *("PublishAfter", "PublishCount", "PublishTime"),
    }
    assert (one["Name"], one["Info"], one["PublishCount"]) == (str(first), None, 1)
    assert base64.b64decode(one["Payload"]) == b"\xff\x00"
    assert one["Properties"]["x"] == [1]
    assert (one["Lookup"], one["DestinationTopic"]) == ("a", "q")
    entry, publish, after = (
        datetime.fromisoformat(one[name]) for name in ("EntryTime", "PublishTime", "PublishAfter")
    )
    assert publish <= entry
    assert after - publish == timedelta(hours=1)
    assert (two["DestinationTopic"], two["Info"]) == ("mails", "i")
    assert (await web.get("/v1/mirror", auth=as_user("vic"))).status_code == 403

    async def change(body: Any, user: str = "ola", **headers: str) -> httpx.Response:
        token = await web.get("/csrf-token", auth=as_user(user))
        headers = {"X-CSRF-Token": token.json()["token"], **headers}
        return await web.patch("/v1/mirror", json=body, auth=as_user(user), headers=headers)

    changed = await change({"Lookup": "a", "Info": "new", "Name": str(first)})
    assert (changed.status_code, changed.json()) == (200, {"Changed": 1}), changed.text
    assert (await change({"Lookup": "a", "Info": None})).json() == {"Changed": 2}
    assert (await change({"Lookup": "a", "Info": "x"}, "vic")).status_code == 403
    for wrong in (
        {"Lookup": "a"},
        {"Lookup": "", "Info": "x"},
        {"Lookup": None, "Info": "x"},
        {"Lookup": "a", "Info": 7},
        {"Lookup": "a", "Info": "x" * 1_001},
        {"Lookup": "a", "Info": "x", "Name": "one"},
        {"Lookup": "a", "Info": "x", "Name": 1},
        {"Lookup": "a", "Info": "x", "Name": str(first).zfill(19) + "7"},  # another's
        {"Lookup": "a", "Info": "x", "More": 1},
    ):
        assert (await change(wrong)).status_code == 400, wrong
    for query in ("?Lookup=a&Lookup=b", "?lookup=a", f"?Lookup={'x' * 256}", "?Info=%00"):
        assert (await web.get(f"/v1/count{query}", auth=as_user("vic"))).status_code == 400


@mirror
async def test_p11_records_show_no_more_than_the_pages(broker: SqlBroker) -> None:
    """P11: what is hidden on the dashboard is not in them either."""
    options: dict[str, Any] = {"destination": "mails", "lookup": "a", "info": "of ann"}
    await broker.publish("a secret", "q", headers={"x": "secret"}, **options)
    bodies = {"Payload", "Properties", "DestinationTopic"}
    for given, hidden in (
        ({}, set()),
        ({"show_bodies": False}, bodies),
        ({"redact": lambda message: message}, bodies | {"Info"}),
    ):
        async with client_of(broker.asgi(logins(), **given)) as client:
            found = await client.get("/v1/mirror?Lookup=a", auth=as_user("ola"))
            [record] = found.json()["Result"]
            assert {name for name, value in record.items() if value is None} == hidden
            assert "mails" not in found.text or not hidden


PARTS = [
    *("database", "schema", "rights", "clock", "pool"),
    *("listener", "subscribers", "relays", "versions"),
]


@diagnosed
async def test_p15_the_diagnosis(broker: SqlBroker, web: httpx.AsyncClient) -> None:
    """P15: as JSON and as a page, for administrators, without a secret."""
    found = await web.get("/v1/diagnosis", auth=as_user("ann"))
    assert found.status_code == 200, found.text
    told = found.json()
    assert list(told["parts"]) == PARTS
    assert told["ok"] is True, told
    parts = {name: part["facts"] for name, part in told["parts"].items()}
    url = broker.engine.url
    database = parts["database"]
    names = {"postgresql"} if url.get_backend_name() == "postgresql" else {"mysql", "mariadb"}
    assert database["name"] in (names if url.host else {"sqlite"})
    assert database["database"] == url.database
    assert database["version"]
    assert parts["schema"]["version"] == parts["schema"]["needed"] == HEAD
    assert abs(parts["clock"]["difference"]) < 60
    assert parts["versions"].keys() >= {"python", "faststream", "sqlalchemy", broker.engine.driver}
    if url.password:
        assert url.password not in found.text.replace(str(url.database), "")
    page = await web.get("/diagnosis", auth=as_user("ann"))
    assert page.headers["content-type"].startswith("text/html")
    for name in PARTS:
        assert f"<h2>{name}: ok</h2>" in page.text
    for path in ("/v1/diagnosis", "/diagnosis"):
        assert (await web.get(path)).status_code == 401
        for name in ("vic", "ola"):
            assert (await web.get(path, auth=as_user(name))).status_code == 403


@diagnosed
@on_sqlite
async def test_p15_a_part_that_hangs_or_fails_stays_alone(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P15: each part is bounded in time, and fails by itself."""
    # The limit is short for the one that hangs: the others may need longer on a busy machine.
    part = health._run_check
    monkeypatch.setattr(
        health,
        "_run_check",
        lambda name, look, limit: part(name, look, limit if name == "database" else LONG),
    )
    store = broker.config.store
    secret = "postgresql://shop:s3cr3t@db/shop"

    async def hangs() -> Any:
        await asyncio.Event().wait()

    with (
        patch.object(store.server, "read_health", hangs),
        patch.object(
            store.server, "read_schema_version", side_effect=TransientStoreError("is away")
        ),
        patch.object(store.access, "find_missing_rights", side_effect=RuntimeError(secret)),
    ):
        found = await broker.admin.diagnosis(timeout=0.15)
    parts = {part.name: part for part in found.parts}
    assert not found.ok
    assert parts["database"].error == "no answer within 0.15 s"
    assert parts["schema"].error == "is away"
    assert parts["rights"].error == "failed with RuntimeError"
    assert all(part.ok for name, part in parts.items() if name not in PARTS[:3])
    assert "s3cr3t" not in json.dumps(found.as_json)


@diagnosed
@on_sqlite
async def test_p15_it_names_the_brokers_that_answers_go_to(engine: AsyncEngine) -> None:
    """P15, F2."""
    redis = RedisBroker()
    broker = SqlBroker(engine, logger=None)

    @broker.subscriber("q")
    @redis.publisher("<b>out</b>")
    async def handle(body: str) -> str:
        return body

    await broker.create_tables()
    async with client_of(broker.asgi(logins())) as client:
        told = (await client.get("/v1/diagnosis", auth=as_user("ann"))).json()
        [(name, can_publish)] = told["parts"]["relays"]["facts"].items()
        assert "faststream.redis" in name
        assert can_publish is False
        assert told["parts"]["relays"]["ok"] is True  # it does not run yet
        await broker.start()
        told = (await client.get("/v1/diagnosis", auth=as_user("ann"))).json()
        assert "start its broker" in told["parts"]["relays"]["problems"][0]
        [subscriber] = told["parts"]["subscribers"]["facts"]["subscribers"]
        assert subscriber["queues"] == ["q"]
        page = await client.get("/diagnosis", auth=as_user("ann"))
        assert "<b>" not in page.text
        assert "relays: problem" in page.text
    await broker.stop()


@diagnosed
@on_sqlite
async def test_p15_what_is_wrong_is_told(engine: AsyncEngine, app: HttpApp) -> None:
    """P15."""
    async with engine.begin() as connection:
        await connection.exec_driver_sql("DROP TABLE message_archive")
    async with client_of(app) as client:
        told = (await client.get("/v1/diagnosis", auth=as_user("ann"))).json()
    assert told["ok"] is False
    assert "message_archive" in told["parts"]["schema"]["problems"][0]
    away = SqlBroker(create_async_engine("sqlite+aiosqlite:////nowhere/at/all.db"), logger=None)
    found = await away.admin.diagnosis(timeout="5s")
    parts = {part.name: part for part in found.parts}
    assert parts["database"].error is not None
    assert parts["versions"].ok


@pytest.mark.capability("`debug_header`: one message is logged at each step")
async def test_p14_a_client_over_http_asks_for_one_message(
    make: Make, broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """P14."""
    debugged = make(debug_header="X-Debug")

    @debugged.subscriber(QUEUE, **QUICK)
    async def handle(body: int) -> None: ...

    web = Queueing(debugged)
    async with web.http:
        told = await web.publish(1, headers={"X-Debug": "1"})
        quiet = await web.publish(2)
        await debugged.start()
        await look.archived(2)
        await debugged.stop()
    texts = heard.texts("debug: ")
    assert any("published" in text for text in texts), texts
    assert all(f"message {told}" in text for text in texts), texts
    assert not any(f"message {quiet}" in text for text in texts)

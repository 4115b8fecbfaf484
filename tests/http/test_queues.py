"""Any queue over HTTP: publish, reserve, heartbeat, commit, rollback."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from typing import Any, ClassVar

import httpx
import pytest
from faststream import BaseMiddleware
from prometheus_client import CollectorRegistry
from sqlalchemy import func, literal_column, select, update

from faststream_sqlbroker import ConstantRetryStrategy, SetupError, SqlBroker
from faststream_sqlbroker.database.messages import single_claim
from faststream_sqlbroker.exceptions import TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.tasks import queue_jobs
from faststream_sqlbroker.flow.tasks.queue_jobs import RemoteConsumer
from faststream_sqlbroker.http import Queues, QueueTokens
from faststream_sqlbroker.http.server import ProbeServer
from faststream_sqlbroker.prometheus import SqlBrokerPrometheusMetrics
from faststream_sqlbroker.schema.types import clock
from tests.faststream.conftest import Look
from tests.helpers import eventually
from tests.http.conftest import as_user, on_sqlite
from tests.http.queueing import CONSUME, PATH, PUBLISH, QUEUE, Queueing, bearer
from tests.http.test_pull_consumers import over

pytestmark = pytest.mark.capability("HTTP: publish, reserve, commit and rollback on any queue")


@pytest.fixture
async def web(broker: SqlBroker) -> AsyncIterator[Queueing]:
    found = Queueing(broker, retry_strategy=ConstantRetryStrategy(delay_seconds=0, max_attempts=3))
    async with found.http:
        yield found


# The contract, on four databases.


async def test_messages_are_published_reserved_and_committed(web: Queueing, look: Look) -> None:
    first = await web.publish({"id": 1}, key="ann", headers={"source": "node"}, priority=1)
    second = await web.publish("two", encoding="text")
    third = await web.publish(
        base64.b64encode(b"\xff\x00").decode(), encoding="base64", content_type="image/png"
    )
    assert None not in {first, second, third}
    [one] = await web.reserve()
    two, three = await web.reserve(limit=10)
    assert await web.reserve() == []
    assert (one["id"], one["body"], one["encoding"]) == (first, '{"id":1}', "text")
    assert (one["content_type"], one["key"], one["priority"]) == ("application/json", "ann", 1)
    assert one["headers"] == {"content-type": "application/json", "source": "node"}
    assert (one["attempt"], one["deliveries"], one["queue"]) == (1, 1, QUEUE)
    assert (two["body"], two["content_type"], two["encoding"]) == ("two", "text/plain", "text")
    assert (three["content_type"], three["encoding"]) == ("image/png", "base64")
    assert base64.b64decode(three["body"]) == b"\xff\x00"
    rows = {row["id"]: row for row in await look.rows()}
    for shown in (one, two, three):
        ends = datetime.fromisoformat(shown["lease_ends_at"])
        # The end is told by the claim's time, which may be a moment before that of the lease.
        assert abs((rows[shown["id"]]["lease_expires_at"] - ends).total_seconds()) < 60
    done = await web.end(one)
    assert (done.status_code, done.json()) == (200, {"state": "COMPLETED"})
    result = {"body": {"invoice": 7}}
    assert (await web.end(two, result=result)).json() == {"state": "COMPLETED"}
    assert (await web.end(three)).status_code == 200
    kept = {row["id"]: row for row in await look.rows(archive=True)}
    assert {row["state"] for row in kept.values()} == {"COMPLETED"}
    assert json.loads(kept[second]["payload"]) == {"invoice": 7}
    assert kept[second]["headers"] == {"content-type": "application/json"}
    assert kept[third]["payload"] == b"\xff\x00"
    assert kept[first]["attempts_count"] == 1
    # What has ended has no lease any more.
    assert (await web.end(one)).status_code == 409


async def test_a_stale_lease_changes_nothing(web: Queueing, look: Look) -> None:
    """Promise 3."""
    await web.publish({"id": 1})
    [stale] = await web.reserve()
    await over(look)
    [fresh] = await web.reserve()
    assert (fresh["id"], fresh["deliveries"]) == (stale["id"], 2)
    assert fresh["lease_token"] != stale["lease_token"]
    [before] = await look.rows()
    for how, fields in (
        ("commit", {}),
        ("commit", {"result": {"body": 1}}),
        ("rollback", {}),
        ("rollback", {"outcome": "release"}),
        ("rollback", {"outcome": "fail"}),
        ("rollback", {"outcome": "discard"}),
        ("heartbeat", {"lease_seconds": 7200}),
    ):
        answer = await web.end(stale, how, **fields)
        assert answer.status_code == 409, (how, fields)
        assert "another consumer" in answer.json()["error"]
    assert await look.rows() == [before]
    # The right token with the wrong queue or id is no lease either.
    wrong = {**fresh, "id": fresh["id"] + 1}
    assert (await web.end(wrong)).status_code == 409
    assert (await web.end(fresh)).status_code == 200


async def test_a_heartbeat_extends_the_lease(web: Queueing, look: Look) -> None:
    await web.publish({"id": 1})
    [message] = await web.reserve(lease_seconds=1000)
    answer = await web.end(message, "heartbeat", lease_seconds=5000)
    ends = datetime.fromisoformat(answer.json()["lease_ends_at"])
    assert (ends - datetime.fromisoformat(message["lease_ends_at"])).total_seconds() > 3000
    # A lease is never shortened.
    again = await web.end(message, "heartbeat", lease_seconds=10)
    assert datetime.fromisoformat(again.json()["lease_ends_at"]) == ends
    [row] = await look.rows()
    assert row["lease_expires_at"] == ends
    await over(look)
    # No other client has taken it, so it is still this one's.
    assert (await web.end(message, "heartbeat")).status_code == 200


async def test_a_rollback_gives_back_or_up(web: Queueing, look: Look) -> None:
    await web.publish({"id": 1})
    [message] = await web.reserve()
    answer = await web.end(message, "rollback", error="the shop is closed")
    assert answer.json() == {"state": "RETRYABLE"}
    [message] = await web.reserve()
    assert (message["attempt"], message["deliveries"]) == (2, 2)
    [row] = await look.rows()
    assert row["last_error"] == "the shop is closed"
    assert (await web.end(message, "rollback", outcome="release")).json() == {"state": "RETRYABLE"}
    [row] = await look.rows()
    assert row["state"] == "RETRYABLE"
    [message] = await web.reserve()
    assert (message["attempt"], message["deliveries"]) == (2, 2)
    assert (await web.end(message, "rollback", delay="1h")).json() == {"state": "RETRYABLE"}
    assert await web.reserve() == []
    [row] = await look.rows()
    assert (row["next_attempt_at"] - row["last_attempt_at"]).total_seconds() > 3000
    async with look.engine.begin() as connection:
        await connection.execute(update(look.tables.message).values(next_attempt_at=clock()))
    [message] = await web.reserve()
    # The strategy allows three attempts.
    assert (await web.end(message, "rollback")).json() == {"state": "FAILED"}
    for outcome, state, reason in (
        ("fail", "FAILED", "no such shop"),
        ("discard", "DISCARDED", "not wanted"),
        ("fail", "FAILED", None),
        ("discard", "DISCARDED", None),
    ):
        number = await web.publish({"id": 2})
        [message] = await web.reserve()
        given = {} if reason is None else {"reason": reason}
        answer = await web.end(message, "rollback", outcome=outcome, error="why", **given)
        assert answer.json() == {"state": state}
        kept = {row["id"]: row for row in await look.rows(archive=True)}[number]
        assert (kept["state"], kept["reason"]) == (state, reason or "rejected")
        assert kept["last_error"] == "why"


async def test_a_batch_is_published_together(web: Queueing, look: Look) -> None:
    answer = await web.post(
        "/publish-batch",
        {
            "messages": [
                {"body": 1, "dedup_id": "a"},
                {"body": 2, "dedup_id": "a"},
                {"body": 3, "delay": "1h", "expires_in": 7200},
                {"body": 4, "next_attempt_at": 4_000_000_000, "correlation_id": "c-4"},
            ]
        },
        PUBLISH,
    )
    assert answer.status_code == 201
    first, second, third, fourth = answer.json()["ids"]
    assert second is None
    assert await web.publish(5, dedup_id="a") is None
    rows = {row["id"]: row for row in await look.rows()}
    assert rows.keys() == {first, third, fourth}
    assert rows[third]["expires_at"] > rows[third]["next_attempt_at"] > rows[first]["created_at"]
    due = datetime.fromtimestamp(4_000_000_000, timezone.utc)
    assert rows[fourth]["next_attempt_at"] == due
    assert rows[fourth]["headers"]["correlation_id"] == "c-4"
    assert [message["id"] for message in await web.reserve(limit=100)] == [first]
    refused = await web.post(
        "/publish-batch", {"messages": [{"body": 1}, {"body": 2, "delay": "soon"}]}, PUBLISH
    )
    assert refused.status_code == 400
    assert len(await look.rows()) == 3


async def test_a_request_waits_for_a_message(web: Queueing, broker: SqlBroker, look: Look) -> None:
    """A publish of this process calls it; what is due later, and a lease that ends, do, too."""
    waiting = asyncio.create_task(web.reserve(wait=30))
    await until_waiting(web, 1)
    await web.publish({"id": 1})
    [message] = await waiting
    waiting = asyncio.create_task(web.reserve(wait=30))
    await until_waiting(web, 1)
    await over(look)
    [again] = await waiting
    assert (again["id"], again["deliveries"]) == (message["id"], 2)
    await web.end(again)
    await web.publish({"id": 2}, delay=0.3)
    [later] = await web.reserve(wait=30)
    assert later["body"] == '{"id":2}'
    await web.end(later)
    waiting = asyncio.create_task(web.reserve(wait=30))
    await until_waiting(web, 1)
    # Another broker's publish is found by the look, or is told by the database.
    other = SqlBroker(broker.engine, logger=None)
    await other.publish("three", QUEUE)
    await other.stop()
    [found] = await waiting
    assert found["body"] == "three"


async def until_waiting(web: Queueing, count: int) -> None:
    """Until so many requests wait."""
    jobs = web.app._service.queues()  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        while sum(len(line) for line in jobs.long_polls._lines.values()) < count:
            await asyncio.sleep(0.01)


# The rest needs one database.


@on_sqlite
async def test_many_that_wait_share_one_look_and_one_claim(
    web: Queueing, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = web.app._service.queues()  # type: ignore[attr-defined]
    store = jobs.store
    looks: list[Any] = []
    claims: list[Any] = []
    look_around = store.poll_all
    take = store.direct_claims.claim

    async def looking(queues: Any, leased: Any, sign: Any = None) -> Any:
        looks.append(list(queues))
        return await look_around(queues, leased, sign)

    async def taking(*args: Any, **options: Any) -> Any:
        claims.append(args)
        return await take(*args, **options)

    monkeypatch.setattr(store, "poll_all", looking)
    monkeypatch.setattr(store.direct_claims, "claim", taking)
    waiting = [asyncio.create_task(web.reserve(wait=30)) for _ in range(20)]
    await until_waiting(web, 20)
    while len(claims) < 20:
        await asyncio.sleep(0.01)
    claims.clear()
    looks.clear()
    async with asyncio.timeout(60):
        while len(looks) < 3:
            await asyncio.sleep(0.05)
    assert all(queues == [QUEUE] for queues in looks)
    # None is called for nothing.
    assert claims == []
    await web.publish({"id": 1})
    done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    # The one that found it calls the next one, and that finds nothing.
    assert len(claims) < 10
    answer = await web.post(
        "/publish-batch", {"messages": [{"body": n} for n in range(19)]}, PUBLISH
    )
    assert answer.status_code == 201
    bodies = [(await each)[0]["body"] for each in rest]
    assert sorted(bodies, key=int) == [str(n) for n in range(19)]
    assert jobs.long_polls._lines == {}


@on_sqlite
async def test_a_wait_holds_no_connection(web: Queueing, broker: SqlBroker) -> None:
    waiting = [asyncio.create_task(web.reserve(wait=30)) for _ in range(10)]
    await until_waiting(web, 10)
    async with asyncio.timeout(60):
        while broker.engine.pool.checkedout():  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
    await web.app._service.queues().stop()  # type: ignore[attr-defined,misc]
    assert await asyncio.gather(*waiting) == [[]] * 10


@on_sqlite
async def test_a_stop_of_the_broker_ends_the_waits(web: Queueing, broker: SqlBroker) -> None:
    waiting = asyncio.create_task(web.reserve(wait=30))
    await until_waiting(web, 1)
    await broker.stop()
    assert await waiting == []
    refused = await web.post("/reserve", {"wait": 30})
    assert refused.status_code == 503
    # Nor has it begun to look again, which no one would end.
    assert not web.app._service.queues().long_polls._loop.is_running  # type: ignore[attr-defined,misc]
    await broker.start()
    waiting = asyncio.create_task(web.reserve(wait=30))
    await until_waiting(web, 1)
    await web.publish(1)
    assert len(await waiting) == 1


@on_sqlite
async def test_a_server_that_stops_answers_those_who_wait(web: Queueing) -> None:
    """It does not cut them off: each gets an answer without messages."""
    server = ProbeServer(web.app, "127.0.0.1", 0)
    port = await server.start()
    async with httpx.AsyncClient(timeout=90) as client:
        waiting = asyncio.create_task(
            client.post(
                f"http://127.0.0.1:{port}{PATH}/reserve", json={"wait": 30}, headers=bearer(CONSUME)
            )
        )
        await until_waiting(web, 1)
        # It gives those it answers a second, which a busy machine may exceed.
        server._running[0].config.timeout_graceful_shutdown = 60  # type: ignore[index]
        await server.stop()
        answer = await waiting
    assert (answer.status_code, answer.json()) == (200, {"messages": []})


@on_sqlite
async def test_a_client_that_leaves_ends_its_wait(web: Queueing, look: Look) -> None:
    """What it would have been given is not leased."""
    body = json.dumps({"wait": 30}).encode()
    leave = asyncio.Event()
    sent: list[Any] = []
    given = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        for message in given:
            return message
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"{PATH}/reserve",
        "raw_path": f"{PATH}/reserve".encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {CONSUME}".encode())],
        "client": ("192.0.2.1", 4711),
        "server": ("broker.test", 80),
        "scheme": "http",
    }
    running = asyncio.create_task(web.app(scope, receive, send))
    await until_waiting(web, 1)
    leave.set()
    async with asyncio.timeout(60):
        await running
    assert web.app._service.queues().long_polls._lines == {}  # type: ignore[attr-defined,misc]
    await web.publish({"id": 1})
    [row] = await look.rows()
    assert (row["state"], row["deliveries_count"]) == ("PENDING", 0)


@pytest.fixture
def no_looks(web: Queueing, monkeypatch: pytest.MonkeyPatch) -> RemoteConsumer:
    """Requests that wait are called by what this process knows, as if the next look were far."""
    found: RemoteConsumer = web.app._service.queues()  # type: ignore[attr-defined,misc]
    monkeypatch.setattr(queue_jobs, "LAST_PAUSE", 1000.0)
    monkeypatch.setattr(queue_jobs, "FIRST_PAUSE", 1000.0)
    found.long_polls._pause = 1000.0
    return found


@on_sqlite
async def test_what_is_known_to_be_due_later_is_looked_for_then(
    web: Queueing, no_looks: RemoteConsumer
) -> None:
    """By the publish, by the claim that finds nothing yet, and by the rollback."""
    waiting = asyncio.create_task(web.reserve(wait=30))
    await until_waiting(web, 1)
    await web.publish(1, delay=0.3)
    [message] = await waiting
    assert message["body"] == "1"
    waiting = asyncio.create_task(web.reserve(wait=30))
    await until_waiting(web, 1)
    assert (await web.end(message, "rollback", delay=0.3)).json() == {"state": "RETRYABLE"}
    [again] = await waiting
    assert again["id"] == message["id"]
    await web.end(again)
    no_looks.long_polls._pause = 1000.0
    await web.publish(2, delay=0.3)
    [later] = await web.reserve(wait=30)
    assert later["body"] == "2"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_wake_ups_make_no_look_later(web: Queueing) -> None:
    """A message that another process delays sends none: only a look finds it."""
    waiting = asyncio.create_task(web.reserve(wait=30))
    await until_waiting(web, 1)
    polls = web.app._service.queues().long_polls  # type: ignore[attr-defined,misc]
    await eventually(lambda: polls._wakeups.is_listening)
    polls._pause = 1000.0
    await eventually(lambda: polls._pause <= queue_jobs.LAST_PAUSE)
    assert polls._poll_at <= polls._clock.monotonic() + 2 * queue_jobs.LAST_PAUSE
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@on_sqlite
async def test_one_that_leaves_during_its_claim_calls_the_next_one(
    web: Queueing, no_looks: RemoteConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had got is given back, and no other would know of it."""
    take = no_looks.store.direct_claims.claim
    claimed = asyncio.Event()
    leave = asyncio.Event()
    claims = 0

    async def slowly(*args: Any, **options: Any) -> Any:
        nonlocal claims
        taken = await take(*args, **options)
        claims += 1
        if taken.rows and not claimed.is_set():
            claimed.set()
            await leave.wait()
        return taken

    monkeypatch.setattr(no_looks.store.direct_claims, "claim", slowly)

    def wait() -> "asyncio.Task[Any]":
        return asyncio.create_task(no_looks.reserve(QUEUE, limit=1, lease=3600.0, wait=30.0))

    first = wait()
    await until_waiting(web, 1)
    second = wait()
    async with asyncio.timeout(60):
        while claims < 2:
            await asyncio.sleep(0.01)
    number = await web.publish(1)
    await claimed.wait()
    first.cancel()
    await asyncio.sleep(0)
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    [row] = await second
    assert (row.id, row.deliveries_count) == (number, 1)


@on_sqlite
async def test_a_paused_queue_counts_as_empty(web: Queueing, broker: SqlBroker) -> None:
    await web.publish(1)
    await broker.admin.pause(QUEUE, by="ann")
    assert await web.reserve() == []
    await broker.admin.resume(QUEUE, by="ann")
    assert len(await web.reserve()) == 1


@on_sqlite
async def test_who_may_do_what(web: Queueing, look: Look) -> None:
    """A token allows one thing in one queue; administrators make it, and it is told once."""
    missing = await web.http.post(f"{PATH}/reserve", json={})
    assert missing.status_code == 401
    assert missing.headers["WWW-Authenticate"].startswith("Bearer")
    for path, token in (("/reserve", PUBLISH), ("/publish", CONSUME), ("/reserve", "wrong")):
        refused = await web.post(path, {"body": 1} if path == "/publish" else {}, token)
        assert refused.status_code == 403
    other = await web.http.post("/v1/queues/other/reserve", json={}, headers=bearer(CONSUME))
    assert other.status_code == 403
    path = "/v1/queues/other/tokens/consume"
    for user in ("vic", "ola"):
        refused = await web.http.put(path, auth=as_user(user))
        assert refused.status_code == 403
    made = await web.http.put(path, auth=as_user("ann"))
    assert made.status_code == 201
    token = made.json().pop("token")
    assert made.json() == {"queue": "other", "role": "consume", "token": token}
    again = await web.http.put(path, auth=as_user("ann"))
    assert (again.status_code, again.json()) == (200, {"queue": "other", "role": "consume"})
    other = await web.http.post("/v1/queues/other/reserve", json={}, headers=bearer(token))
    assert (other.status_code, other.json()) == (200, {"messages": []})
    rotated = await web.http.put(path, data={"rotate": "true"}, auth=as_user("ann"))
    assert rotated.json()["token"] != token
    other = await web.http.post("/v1/queues/other/reserve", json={}, headers=bearer(token))
    assert other.status_code == 403
    for wrong, form, status in (
        ("/v1/queues/other/tokens/admin", {}, 404),
        (path, {"token": "mine"}, 400),
        (path, {"rotate": "yes"}, 400),
        ("/v1/queues/a%00b/tokens/consume", {}, 400),
    ):
        refused = await web.http.put(wrong, data=form, auth=as_user("ann"))
        assert refused.status_code == status
    async with look.engine.connect() as connection:
        rows = str((await connection.execute(select(look.tables.policy_state))).all())
    assert token not in rows
    assert CONSUME not in rows


@on_sqlite
async def test_traffic_is_counted_and_not_audited(broker: SqlBroker) -> None:
    registry = CollectorRegistry()
    counting = SqlBroker(broker.engine, logger=None, metrics=SqlBrokerPrometheusMetrics(registry))
    web = Queueing(counting)
    async with web.http:
        await web.publish(1, dedup_id="once")
        assert await web.publish(1, dedup_id="once") is None
        [message] = await web.reserve()
        await web.end(message)
        await web.end(message)
        later = {"messages": [{"body": n, "delay": 3600} for n in range(3)]}
        await web.post("/publish-batch", later, PUBLISH)
        audited = [job.action for job in await broker.admin.audit()]
    await counting.stop()
    assert audited == ["put_queue_token", "put_queue_token"]
    for name, value in (("claimed", 1), ("settled", 1), ("lost", 1), ("http_published", 4)):
        counted = [
            sample.value
            for metric in registry.collect()
            for sample in metric.samples
            if name in sample.name and sample.labels.get("queue") == QUEUE
        ]
        assert value in counted, name


class Stamp(BaseMiddleware):
    """Adds a header to each publish, and does not let all go on."""

    seen: ClassVar[list[tuple[str, int]]] = []

    async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
        self.seen.append((cmd.destination, len(cmd.batch_bodies)))
        if cmd.headers.get("do") == "drop":
            return None
        if cmd.headers.get("do") == "encode":
            cmd.body = {"text": cmd.body.decode()}
        if len(cmd.batch_bodies) == MOST_OF_STAMP:
            cmd.batch_bodies = cmd.batch_bodies[:1]
        cmd.add_headers({"stamped": "yes"})
        await call_next(cmd)
        return "not an id"


MOST_OF_STAMP = 5
"""Bodies of a batch of which the middleware leaves one."""


async def test_middlewares_see_what_is_published(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stamp, "seen", [])
    web = Queueing(broker)
    broker.add_middleware(Stamp)
    async with web.http:
        first = await web.publish({"id": 1}, key="ann", correlation_id="c", headers={"do": "no"})
        second = await web.publish("é", encoding="text", headers={"do": "encode"})
        assert await web.publish(2, headers={"do": "drop"}) is None
        messages: list[dict[str, Any]] = [
            {"body": 3, "delay": 3600, "headers": {"own": 1}},
            {"body": 4, "dedup_id": "once", "priority": 7, "expires_in": 7200},
            {"body": 4, "dedup_id": "once"},
        ]
        answer = await web.post("/publish-batch", {"messages": messages}, PUBLISH)
        third, fourth, none = answer.json()["ids"]
        assert none is None
        rows = {row["id"]: row for row in await look.rows()}
        assert set(rows) == {first, second, third, fourth}
        assert all(row["headers"]["stamped"] == "yes" for row in rows.values())
        assert rows[first]["headers"] == {
            "content-type": "application/json",
            "correlation_id": "c",
            "do": "no",
            "stamped": "yes",
        }
        assert (rows[first]["payload"], rows[first]["key"]) == (b'{"id":1}', "ann")
        assert json.loads(rows[second]["payload"]) == {"text": "é"}
        assert rows[third]["headers"]["own"] == 1
        assert rows[third]["next_attempt_at"] > rows[first]["next_attempt_at"]
        assert (rows[fourth]["payload"], rows[fourth]["priority"]) == (b"4", 7)
        assert rows[fourth]["expires_at"] is not None
        assert Stamp.seen == [(QUEUE, 1), (QUEUE, 1), (QUEUE, 1), (QUEUE, 3)]
        # The answer has an id for each message: with fewer of them it would be of no use.
        several = {"messages": [{"body": n} for n in range(MOST_OF_STAMP)]}
        assert (await web.post("/publish-batch", several, PUBLISH)).status_code == 500
        assert len(await look.rows()) == len(rows)


SECRET = "a-secret-of-the-caller"


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/reserve", {"limit": 0}, "limit"),
        ("/reserve", {"limit": 101}, "limit"),
        ("/reserve", {"wait": 31}, "wait"),
        ("/reserve", {"lease_seconds": 0}, "lease_seconds"),
        ("/reserve", {"lease": 5}, "lease"),
        ("/reserve", [], "object"),
        ("/publish", {}, "body"),
        ("/publish", {"body": 1, "priority": 101}, "priority"),
        ("/publish", {"body": 1, "delay": "soon"}, "delay"),
        ("/publish", {"body": 1, "delay": 1, "next_attempt_at": 1}, "delay"),
        ("/publish", {"body": 1, "encoding": "text"}, "text"),
        ("/publish", {"body": "?", "encoding": "base64"}, "base64"),
        ("/publish", {"body": 1, "headers": {"Reply_To": "x"}}, "reply_to"),
        ("/publish", {"body": 1, "content_type": "a\nb"}, "content_type"),
        ("/publish-batch", {"messages": []}, "messages"),
        ("/messages/1/commit", {}, "lease_token"),
        ("/messages/1/rollback", {"lease_token": "x"}, "lease_token"),
    ],
)
@on_sqlite
async def test_what_is_refused(web: Queueing, path: str, body: Any, part: str) -> None:
    token = PUBLISH if path.startswith("/publish") else CONSUME
    answer = await web.post(path, body, token)
    assert answer.status_code == 400
    assert part in answer.json()["error"]


TOKEN = "0c5e6b0e-2f0c-4b53-9d55-5fd8a3f1a0b1"
COMMIT = "/messages/1/commit"
LEASE_TOKEN = "the lease_token that reserve returned"


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/reserve", b"", None),
        ("/reserve", {"limit": 0}, "limit must be greater than or equal to 1, got 0"),
        ("/reserve", {"limit": "1"}, "limit must be a valid integer, got '1'"),
        ("/publish-batch", {"messages": []}, "messages must have at least 1 item, not 0, got []"),
        (
            "/reserve",
            {"limit": 0, "lease": 5, "wait": 31},
            (
                "limit must be greater than or equal to 1, got 0; "
                "wait must be less than or equal to 30, got 31; "
                "unknown field lease: use limit, wait, lease_seconds"
            ),
        ),
        ("/reserve", [SECRET], "the body must be a JSON object, got a JSON array"),
        (
            "/reserve",
            f'{{"limit": "{SECRET}'.encode(),
            (
                "the body must be a JSON object, but is not valid JSON: EOF while parsing a "
                "string at line 1 column 33"
            ),
        ),
        (
            "/publish",
            b'{"\\ud800": 1}',
            (
                "the body must be a JSON object, but is not valid JSON: unexpected end of hex "
                "escape at line 1 column 9"
            ),
        ),
        (
            "/publish",
            b'{"body": ' + b"[" * 956 + b"]" * 956 + b"}",
            (
                "the body must be a JSON object, but is not valid JSON: recursion limit "
                "exceeded at line 1 column 210"
            ),
        ),
        (COMMIT, {}, f"lease_token is missing: it must be {LEASE_TOKEN}"),
        (COMMIT, {"lease_token": SECRET}, f"lease_token must be {LEASE_TOKEN}, got another text"),
        (COMMIT, {"lease_token": 7}, f"lease_token must be {LEASE_TOKEN}, got a JSON number"),
        (
            COMMIT,
            {"lease_token": TOKEN, "result": {}},
            "result.body is missing: add it",
        ),
        (
            COMMIT,
            {"lease_token": TOKEN, "result": {"body": 1, "more": SECRET}},
            "unknown field result.more: omit it",
        ),
        (
            "/messages/1/rollback",
            {"lease_token": TOKEN, "delay": []},
            'delay must be seconds, or text like "1.5h", got []',
        ),
        (
            "/messages/1/rollback",
            {"lease_token": TOKEN, "outcome": "give"},
            "outcome must be 'retry', 'release', 'fail' or 'discard', got 'give'",
        ),
        (
            "/messages/1/rollback",
            {"lease_token": TOKEN, "outcome": "fail", "delay": 1},
            "the outcome fail accepts error, reason, got delay: omit it",
        ),
        ("/publish", {}, "body is missing: add it"),
        (
            "/publish",
            {"body": 1, "content_type": "a\nb"},
            "content_type must be 1 to 200 printable ASCII characters, got 'a\\nb'",
        ),
        ("/publish", {"body": 1, "key": ""}, "key must have at least 1 character, got ''"),
        (
            "/publish",
            {"body": 1, "key": "x" * 300},
            f"key must have at most 255 characters, got '{'x' * 76}...",
        ),
        (
            "/publish",
            {"body": 1, "encoding": "text"},
            "for the encoding text body must be text, got a JSON number",
        ),
        (
            "/publish",
            {"body": SECRET, "encoding": "base64"},
            (
                "for the encoding base64 body must be base64 of RFC 4648, with padding, got a "
                "JSON string"
            ),
        ),
        (
            "/publish-batch",
            {"messages": [{"body": 1}, {"body": 1, "priority": 101}]},
            "messages[1].priority must be less than or equal to 100, got 101",
        ),
    ],
)
@on_sqlite
async def test_mistakes_say_what_was_given_and_what_is_allowed(
    web: Queueing, path: str, body: Any, text: str | None
) -> None:
    """Neither a secret, nor a whole body, nor a regular expression."""
    token = PUBLISH if path.startswith("/publish") else CONSUME
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = await web.http.post(f"{PATH}{path}", headers=bearer(token), **given)
    if text is None:
        assert answer.status_code == 200, answer.text
        return
    assert (answer.status_code, answer.json()["error"]) == (400, text)
    assert SECRET not in answer.text


@on_sqlite
async def test_what_cannot_be_is_named(web: Queueing) -> None:
    lost = await web.end({"id": 7, "lease_token": TOKEN})
    assert lost.json()["error"] == (
        "the lease is lost, another consumer may have the message: abandon it and reserve again"
    )
    none = await web.end({"id": "x7", "lease_token": TOKEN})
    assert none.json()["error"] == (
        "message 'x7' does not exist: use the number that the server returned"
    )
    without = await web.http.post(f"{PATH}/reserve", json={})
    assert without.json()["error"] == (
        "the request has no token: send the queue's consume token as Authorization: Bearer TOKEN"
    )
    name = await web.http.put("/v1/queues/a%00b/tokens/consume", auth=as_user("ann"))
    assert name.json()["error"].startswith("'a\\x00b' cannot be the name of a queue: ")


@on_sqlite
async def test_fields_that_do_not_fit_the_outcome_are_refused(web: Queueing) -> None:
    await web.publish(1)
    [message] = await web.reserve()
    for fields in (
        {"outcome": "fail", "delay": 1},
        {"outcome": "retry", "reason": "x"},
        {"outcome": "release", "error": "x"},
        {"outcome": "retry", "delay": "soon"},
        {"outcome": "give"},
    ):
        assert (await web.end(message, "rollback", **fields)).status_code == 400
    for number in ("0x1", "01", "9" * 20, "-1"):
        answer = await web.end({**message, "id": number})
        assert answer.status_code == 404
    assert (await web.end(message)).status_code == 200


@on_sqlite
async def test_messages_over_a_limit_are_rejected(broker: SqlBroker, look: Look) -> None:
    """What plain `reserve` does."""
    web = Queueing(broker, max_deliveries=1)
    async with web.http:
        await web.publish(1)
        await web.reserve()
        await over(look)
        assert await web.reserve() == []
    [row] = await look.rows(archive=True)
    assert (row["state"], row["reason"]) == ("FAILED", "max_deliveries")


@on_sqlite
async def test_messages_behind_many_that_are_rejected_are_found(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One transaction rejects so many only, and no more than one request is needed."""
    monkeypatch.setattr(single_claim, "MAX_REFUSED", 1)
    web = Queueing(broker, max_deliveries=1)
    table = look.tables.message
    async with web.http:
        for n in range(3):
            await web.publish(n, priority=1)
        async with look.engine.begin() as connection:
            await connection.execute(update(table).values(deliveries_count=1))
        last = await web.publish(3)
        assert [message["id"] for message in await web.reserve()] == [last]
    assert len(await look.rows(archive=True)) == 3


@on_sqlite
async def test_headers_that_json_cannot_tell(web: Queueing, look: Look) -> None:
    """Another program may have stored them; the messages that come with them are not held up."""
    await web.publish(1, headers={"a": [1]})
    await web.publish(2)
    stored = literal_column("""'{"a": [NaN], "b": "\\ud800", "c": 1, "content-type": "\\udfff"}'""")
    async with look.engine.begin() as connection:
        table = look.tables.message
        first = select(func.min(table.c.id)).scalar_subquery()
        await connection.execute(update(table).where(table.c.id == first).values(headers=stored))
    one, two = await web.reserve(limit=2)
    assert one["headers"] == {"a": ["NaN"], "b": "?", "c": 1, "content-type": "?"}
    assert one["content_type"] == "?"
    assert two["body"] == "2"
    assert (await web.end(one)).status_code == 200


@pytest.mark.parametrize("database", ["sqlite", "mariadb"], indirect=True)
async def test_a_result_is_stored_with_headers_that_json_cannot_tell(
    web: Queueing, look: Look
) -> None:
    """MariaDB reads 1e999, and takes no Infinity: each commit failed, and the message came back."""
    await web.publish(1)
    async with look.engine.begin() as connection:
        stored = literal_column("""'{"a": 1e999}'""")
        await connection.execute(update(look.tables.message).values(headers=stored))
    [message] = await web.reserve()
    assert (await web.end(message, result={"body": 2})).status_code == 200
    [row] = await look.rows(archive=True)
    assert bytes(row["payload"]) == b"2"


async def test_a_message_that_is_cancelled_does_not_come_back(
    web: Queueing, broker: SqlBroker, look: Look
) -> None:
    """As that of a subscriber: what its client has done or given up stays so."""
    for how, fields, state in (
        ("rollback", {"error": "mine"}, "DISCARDED"),
        ("rollback", {"outcome": "release"}, "DISCARDED"),
        ("rollback", {"outcome": "fail"}, "FAILED"),
        ("commit", {}, "COMPLETED"),
    ):
        number = await web.publish(1)
        [message] = await web.reserve()
        await broker.admin.cancel(message["id"], by="ann", reason="no stock")
        answer = await web.end(message, how, **fields)
        assert answer.json() == {"state": state}, (how, fields)
        kept = {row["id"]: row for row in await look.rows(archive=True)}[number]
        assert kept["state"] == state
        if state == "DISCARDED":
            assert (kept["reason"], kept["last_error"]) == (
                "cancelled",
                "cancelled by ann: no stock",
            )
    assert await look.rows() == []


@on_sqlite
async def test_an_answer_has_a_bounded_size(
    web: Queueing, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_jobs, "MAX_BYTES", 10)
    for body in ("a" * 20, "b" * 6, "c" * 4, "d"):
        await web.publish(body, encoding="text")
    assert [len(message["body"]) for message in await web.reserve(limit=4)] == [20]
    assert [message["body"] for message in await web.reserve(limit=4)] == ["bbbbbb", "cccc"]
    rest = [row for row in await look.rows() if row["state"] == "PENDING"]
    assert [row["deliveries_count"] for row in rest] == [0]
    # What cannot be given back now keeps nothing from the client.
    jobs = web.app._service.queues()  # type: ignore[attr-defined]

    async def failing(*_: Any) -> Any:
        raise TransientStoreError("planted")

    await web.publish("e" * 20, encoding="text")
    monkeypatch.setattr(jobs.store, "settle", failing)
    assert [message["body"] for message in await web.reserve(limit=4)] == ["d"]


@on_sqlite
async def test_a_lost_answer_to_a_commit(
    web: Queueing, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    jobs = web.app._service.queues()  # type: ignore[attr-defined]
    settle_held = jobs.store.direct_claims.settle_held
    lost: list[Any] = []

    async def losing(*args: Any) -> Any:
        found = await settle_held(*args)
        lost.append(found)
        if len(lost) == 1:
            raise UnknownOutcomeError("planted")
        return found

    await web.publish(1)
    [message] = await web.reserve()
    monkeypatch.setattr(jobs.store.direct_claims, "settle_held", losing)
    answer = await web.end(message)
    # The repetition has found nothing to write: perhaps because it is written.
    assert answer.status_code == 503
    assert "may have taken effect" in answer.json()["error"]
    [row] = await look.rows(archive=True)
    assert row["state"] == "COMPLETED"


def test_options_are_checked() -> None:
    with pytest.raises(SetupError, match="30 seconds or less"):
        Queues(longest_wait=31)
    with pytest.raises(SetupError, match="cannot be the name of a queue"):
        Queues(queues={"a ": QueueTokens()})
    with pytest.raises(SetupError, match="16 characters"):
        QueueTokens(publish="short")
    assert PUBLISH not in repr(QueueTokens(publish=PUBLISH, consume=CONSUME))


@on_sqlite
async def test_the_options_of_reserve_are_checked(broker: SqlBroker) -> None:
    with pytest.raises(SetupError, match="max_deliveries"):
        Queueing(broker, max_deliveries=0)
    with pytest.raises(SetupError, match="retry_strategy"):
        Queueing(broker, retry_strategy=5)

"""faststream_sqlbroker.client: any queue in Python, over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timezone

import httpx
import pytest

from faststream_sqlbroker import HttpError, LeaseLostError, SetupError, SqlBroker
from faststream_sqlbroker.client import NewHttpMessage, QueueClient
from faststream_sqlbroker.http.server import ProbeServer
from tests.faststream.conftest import Look
from tests.helpers import eventually
from tests.http.conftest import BASE, on_sqlite
from tests.http.queueing import CONSUME, PUBLISH, QUEUE, Queueing
from tests.http.test_pull_consumers import over

pytestmark = [
    pytest.mark.capability("HTTP: a client in Python of any queue"),
    on_sqlite,
]


@pytest.fixture
async def client(broker: SqlBroker) -> AsyncIterator[QueueClient]:
    web = Queueing(broker)
    tokens = {"publish_token": PUBLISH, "consume_token": CONSUME}
    async with (
        web.http,
        QueueClient(f"{BASE}/", queue=QUEUE, http=web.http, **tokens) as found,
    ):
        yield found


async def test_messages_are_published_and_reserved(client: QueueClient, look: Look) -> None:
    due = datetime(2020, 1, 1, tzinfo=timezone.utc)
    first = await client.publish({"id": 1})
    rest = await client.publish_batch(
        "two",
        b"\xff\x00",
        NewHttpMessage(
            body=b"4",
            content_type="text/csv",
            key="ann",
            priority=5,
            dedup_id="d",
            next_attempt_at=due,
            expires_in="1h",
            headers={"a": 1},
            correlation_id="c",
        ),
        NewHttpMessage(body=5, delay="1h"),
    )
    assert await client.publish(NewHttpMessage(body=1, dedup_id="d")) is None
    messages = await client.reserve(10, wait=1)
    assert [each.id for each in messages] == [rest[2], first, rest[0], rest[1]]
    assert [each.payload for each in messages] == [b"4", b'{"id":1}', b"two", b"\xff\x00"]
    four, one, two, three = messages
    assert (four.content_type, four.key, four.priority) == ("text/csv", "ann", 5)
    assert four.headers == {"a": 1, "content-type": "text/csv", "correlation_id": "c"}
    assert (one.json(), one.queue, one.attempt, one.deliveries) == ({"id": 1}, QUEUE, 1, 1)
    assert three.content_type is None
    before = one.lease_ends_at
    await one.heartbeat(5000)
    assert one.lease_ends_at > before
    async with one:
        pass
    with pytest.raises(SetupError, match="already settled"):
        await one.commit()
    await four.commit({"done": True})
    with pytest.raises(ValueError, match="mine"):
        async with two:
            raise ValueError("mine")
    async with three:
        await three.give_up("discard", reason="not wanted")
    kept = {row["id"]: row for row in await look.rows(archive=True)}
    assert kept[four.id]["payload"] == b'{"done":true}'
    assert (kept[three.id]["state"], kept[three.id]["reason"]) == ("DISCARDED", "not wanted")
    live = {row["id"]: row for row in await look.rows()}
    assert live.keys() == {two.id, rest[3]}
    assert (live[two.id]["state"], live[two.id]["last_error"]) == ("RETRYABLE", "ValueError: mine")


async def test_a_message_is_given_back(client: QueueClient, look: Look) -> None:
    await client.publish(1)
    [message] = await client.reserve()
    await message.release()
    [row] = await look.rows()
    assert (row["state"], row["deliveries_count"]) == ("PENDING", 0)
    [message] = await client.reserve()
    await message.rollback("1h", error="closed")
    assert await client.reserve() == []


async def test_a_lease_that_is_lost(client: QueueClient, look: Look) -> None:
    """Promise 3."""
    await client.publish(1)
    [stale] = await client.reserve()
    await over(look)
    [fresh] = await client.reserve()
    for change in (stale.commit, stale.rollback, stale.release, stale.give_up, stale.heartbeat):
        with pytest.raises(LeaseLostError, match="another client"):
            await change()
    with pytest.raises(LeaseLostError):
        async with stale:
            await stale.heartbeat()
    async with fresh:
        pass
    [row] = await look.rows(archive=True)
    assert row["state"] == "COMPLETED"


async def test_what_the_server_refuses(client: QueueClient) -> None:
    with pytest.raises(HttpError, match="400"):
        await client.reserve(0)
    client._consume_token = "wrong-token-1234"
    with pytest.raises(HttpError, match="403"):
        await client.reserve()


async def test_it_makes_and_closes_a_client_of_its_own(broker: SqlBroker) -> None:
    web = Queueing(broker)
    server = ProbeServer(web.app, "127.0.0.1", 0)
    port = await server.start()
    async with (
        web.http,
        QueueClient(
            f"http://127.0.0.1:{port}", queue=QUEUE, publish_token=PUBLISH, consume_token=CONSUME
        ) as client,
    ):
        await client.publish("over TCP")
        [message] = await client.reserve()
        assert message.payload == b"over TCP"
    with pytest.raises(RuntimeError, match="closed"):
        await client.reserve()
    await server.stop()


class _Silent(httpx.AsyncBaseTransport):
    """The server's answer is on its way and never arrives."""

    def __init__(self, web: Queueing) -> None:
        self._inner = httpx.ASGITransport(web.app)
        self.answered = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self._inner.handle_async_request(request)
        assert answer.status_code == 200
        self.answered.set()
        await asyncio.Event().wait()
        return answer


async def test_a_reserve_that_is_cancelled_loses_no_message(broker: SqlBroker, look: Look) -> None:
    """The server has leased it: the lease ends by its time, and the next one gets the message."""
    web = Queueing(broker)
    async with web.http:
        published = await web.publish(1)
        silent = _Silent(web)
        http = httpx.AsyncClient(transport=silent, base_url=BASE)
        async with http, QueueClient(BASE, queue=QUEUE, http=http, consume_token=CONSUME) as client:
            task = asyncio.create_task(client.reserve(lease=3600))
            await silent.answered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        [row] = await look.rows()
        assert row["state"] == "PROCESSING"
        assert await web.reserve() == []
        await over(look)
        [message] = await web.reserve(wait=30)
        assert (message["id"], message["attempt"]) == (published, 1)
        assert (await web.end(message)).status_code == 200


async def test_a_reserve_that_is_cancelled_before_its_claim_leases_nothing(
    broker: SqlBroker, look: Look
) -> None:
    """With real sockets: the server sees that the client has gone."""
    web = Queueing(broker)
    server = ProbeServer(web.app, "127.0.0.1", 0)
    port = await server.start()
    try:
        async with web.http, httpx.AsyncClient(timeout=None) as http:
            address = f"http://127.0.0.1:{port}"
            client = QueueClient(address, queue=QUEUE, http=http, consume_token=CONSUME)
            task = asyncio.create_task(client.reserve(wait=30))
            jobs = web.app._service.queues()  # type: ignore[misc]
            await eventually(lambda: jobs.long_polls._lines)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await eventually(lambda: not jobs.long_polls._lines)
            await web.publish(1)
            [row] = await look.rows()
            assert row["state"] == "PENDING"
            assert len(await web.reserve()) == 1
    finally:
        await server.stop()

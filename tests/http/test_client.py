"""faststream_sqlbroker.client: a consumer in Python, over HTTP."""

import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from faststream_sqlbroker import HttpError, LeaseLostError, SetupError, SqlBroker
from faststream_sqlbroker.client import PullConsumer, QueuedJob
from faststream_sqlbroker.http.server import ProbeServer
from tests.faststream.conftest import Look
from tests.http.conftest import BASE, on_sqlite
from tests.http.pulling import CHANNEL, CONSUMER, TOKENS, Pulling
from tests.http.test_pull_consumers import over

pytestmark = pytest.mark.capability("HTTP: a client in Python of pull consumers")


@asynccontextmanager
async def consuming(pulling: Pulling, **options: Any) -> AsyncIterator[PullConsumer]:
    settings = {
        "channel": CHANNEL,
        "consumer": CONSUMER,
        "channel_token": TOKENS["X-Broker-Channel-Token"],
        "consumer_token": TOKENS["X-Broker-Consumer-Token"],
        "http": pulling.http,
        **options,
    }
    async with pulling.http, PullConsumer(f"{BASE}/", **settings) as consumer:
        await pulling.queued()
        yield consumer


async def test_jobs_are_taken_and_ended(broker: SqlBroker) -> None:
    pulling = Pulling(broker)
    async with consuming(pulling) as consumer:
        for number, priority in enumerate((0, 5, 0)):
            await pulling.broadcast(str(number).encode(), "text/plain", priority)
        message = await pulling.broadcast(b"\xff\x00", "image/png", -1)
        jobs = [job async for job in consumer.jobs(limit=1)]
        assert [job.payload for job in jobs] == [b"1", b"0", b"2", b"\xff\x00"]
        assert jobs[3] == QueuedJob(jobs[3].id, -1, message, b"\xff\x00", "image/png")
        done, dead, left, kept = jobs
        taken = await consumer.take(done)
        assert taken is not None
        # Another client has it; and it has ended.
        assert await consumer.take(done) is None
        await taken.delivered()
        assert await consumer.take(done) is None
        assert await pulling.state(done.id) == ("DELIVERED", 0)
        taken = await consumer.take(dead, longer=60)
        assert taken is not None
        async with taken:
            await taken.dead()
        assert await pulling.state(dead.id) == ("DEAD", 0)
        taken = await consumer.take(left)
        assert taken is not None
        with pytest.raises(ValueError, match="mine"):
            async with taken:
                raise ValueError("mine")
        assert await pulling.state(left.id) == ("INFLIGHT", 0)
        taken = await consumer.take(kept)
        assert taken is not None
        async with taken:
            await taken.heartbeat(longer=600)
        assert await pulling.state(kept.id) == ("DELIVERED", 0)


@on_sqlite
async def test_any_job_of_the_highest_priority_is_taken(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulling = Pulling(broker)
    async with consuming(pulling) as consumer:
        assert await consumer.take_any() is None
        for number, priority in enumerate((0, 5, 5)):
            await pulling.broadcast(str(number).encode(), "text/plain", priority)
        monkeypatch.setattr(random, "shuffle", list.reverse)
        last = await consumer.take_any()
        assert last is not None
        assert last.job.payload == b"2"
        await last.delivered()
        page = await consumer.send("GET", "/queued-jobs")
        taken = await consumer.take_any(limit=1, longer=60)
        assert taken is not None
        assert taken.job.payload == b"1"
        # Its page is from before another client took one of them: the next one is free.
        monkeypatch.setattr(consumer, "_load_page", AsyncMock(return_value=page))
        free = await consumer.take_any()
        assert free is not None
        assert free.job.payload == b"0"
        assert await consumer.take_any() is None


async def test_a_type_that_ends_like_that_of_base64(broker: SqlBroker) -> None:
    """A producer cannot make the client read text as base64."""
    pulling = Pulling(broker)
    async with consuming(pulling) as consumer:
        await pulling.broadcast(b"hello", "text/plain;base64")
        [job] = [job async for job in consumer.jobs()]
        assert (job.payload, job.content_type) == (b"hello", "text/plain;base64")


@pytest.mark.parametrize("longer", [-1, 1.5, "60", True, 10**9])
async def test_a_time_that_is_not_valid_is_no_job_that_is_taken(longer: Any) -> None:
    async with PullConsumer(
        BASE, channel=CHANNEL, consumer=CONSUMER, channel_token="", consumer_token=""
    ) as consumer:
        job = QueuedJob("1", 0, "1", b"", "text/plain")
        with pytest.raises(SetupError, match="whole number of seconds"):
            await consumer.take(job, longer=longer)


async def test_a_lease_that_is_lost(broker: SqlBroker, look: Look) -> None:
    """Promise 3."""
    pulling = Pulling(broker)
    async with consuming(pulling) as consumer:
        await pulling.broadcast()
        [job] = [job async for job in consumer.jobs()]
        taken = await consumer.take(job)
        assert taken is not None
        await over(look)
        again = await consumer.take(job)
        assert again is not None
        for change in (taken.delivered, taken.dead, taken.heartbeat):
            with pytest.raises(LeaseLostError, match="another client"):
                await change()
        async with again:
            pass
        assert await pulling.state(job.id) == ("DELIVERED", 1)


@on_sqlite
async def test_what_the_server_refuses(broker: SqlBroker) -> None:
    pulling = Pulling(broker)
    async with consuming(pulling, consumer_token="wrong-token-1234") as consumer:
        job = QueuedJob("1", 0, "1", b"", "text/plain")
        with pytest.raises(HttpError, match=r"the server answered 403: .* must be valid") as caught:
            await anext(consumer.jobs())
        assert caught.value.status == 403
        with pytest.raises(HttpError, match="403"):
            await consumer.take(job)


async def test_an_answer_of_another_server() -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(502, text="<html>"))
    async with httpx.AsyncClient(transport=transport) as http:
        consumer = PullConsumer(
            BASE, channel="a", consumer="b", channel_token="x", consumer_token="y", http=http
        )
        with pytest.raises(
            HttpError, match="the server answered 502: the response has no error text"
        ):
            await anext(consumer.jobs())


@on_sqlite
async def test_it_makes_and_closes_a_client_of_its_own(broker: SqlBroker) -> None:
    pulling = Pulling(broker)
    server = ProbeServer(pulling.app, "127.0.0.1", 0)
    port = await server.start()
    async with pulling.http:
        await pulling.queued()
        await pulling.broadcast()
        async with PullConsumer(
            f"http://127.0.0.1:{port}",
            channel=CHANNEL,
            consumer=CONSUMER,
            channel_token=TOKENS["X-Broker-Channel-Token"],
            consumer_token=TOKENS["X-Broker-Consumer-Token"],
        ) as consumer:
            [job] = [job async for job in consumer.jobs()]
            taken = await consumer.take(job)
            assert taken is not None
            await taken.delivered()
        with pytest.raises(RuntimeError, match="closed"):
            await consumer.take(job)
    await server.stop()


def test_a_missing_package_names_the_extra() -> None:
    code = "import sys\nsys.modules['httpx'] = None\nimport faststream_sqlbroker.client\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'sqlbroker[client]'" in done.stderr

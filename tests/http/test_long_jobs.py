"""A long job in another process, which dies and is replaced."""

import asyncio
import sys

import pytest

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http.server import ProbeServer
from tests.faststream.conftest import Look
from tests.http.pulling import Pulling
from tests.http.test_pull_consumers import over

pytestmark = pytest.mark.capability("HTTP: channels with pull consumers")


async def client(port: int, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.http.long_job",
        f"http://127.0.0.1:{port}",
        *options,
        stdout=asyncio.subprocess.PIPE,
    )


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()


async def test_w8_a_client_that_dies_is_replaced(broker: SqlBroker, look: Look) -> None:
    """W8: it takes work when it wants, and its heartbeats hold the job while it lives."""
    pulling = Pulling(broker)
    server = ProbeServer(pulling.app, "127.0.0.1", 0)
    port = await server.start()
    async with pulling.http:
        await pulling.queued()
        await pulling.broadcast()
        [job] = await pulling.queued()
        first = await client(port)
        try:
            took = await line(first)
            assert took.startswith("took ")
            lease = took.split()[1]
            for _ in range(3):
                assert await line(first) == "beat 202"
            assert await pulling.state(job["ID"]) == ("INFLIGHT", 0)
        finally:
            first.kill()
            await first.wait()
        await over(look)
        second = await client(port, "finish")
        taken = await line(second)
        assert taken.startswith("took ")
        assert taken.split()[1] != lease
        assert await line(second) == "ended 202"
        await asyncio.wait_for(second.wait(), 60)
        assert await pulling.state(job["ID"]) == ("DELIVERED", 1)
        # What the first one may still send changes nothing.
        assert (await pulling.post(job["ID"], "DEAD", lease=lease)).status_code == 409
        assert await pulling.state(job["ID"]) == ("DELIVERED", 1)
    await server.stop()

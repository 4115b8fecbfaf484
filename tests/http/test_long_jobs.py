"""A long job in another process, which dies and is replaced."""

from pathlib import Path

import pytest

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http.server import ProbeServer
from tests.faststream.conftest import Look
from tests.http import long_job
from tests.http.pulling import Pulling
from tests.http.running import Client
from tests.http.test_pull_consumers import over

pytestmark = pytest.mark.capability("HTTP: channels with pull consumers")


async def test_w8_a_client_that_dies_is_replaced(
    broker: SqlBroker, look: Look, tmp_path: Path
) -> None:
    """W8: it takes work when it wants, and its heartbeats hold the job while it lives."""
    pulling = Pulling(broker)
    server = ProbeServer(pulling.app, "127.0.0.1", 0)
    port = await server.start()
    async with pulling.http:
        await pulling.queued()
        await pulling.broadcast()
        [job] = await pulling.queued()
        first = Client(tmp_path / "first", long_job.__name__, port)
        try:
            took, *beats = await first.says(1 + long_job.BEATS)
            assert beats == ["beat 202"] * long_job.BEATS
            assert await pulling.state(job["ID"]) == ("INFLIGHT", 0)
        finally:
            first.kill()
        await over(look)
        second = Client(tmp_path / "second", long_job.__name__, port, "finish")
        try:
            taken, ended = await second.says(2)
        finally:
            second.kill()
        assert took.startswith("took ")
        assert taken.startswith("took ")
        lease = took.split()[1]
        assert taken.split()[1] != lease
        assert ended == "ended 202"
        assert await pulling.state(job["ID"]) == ("DELIVERED", 1)
        # What the first one may still send changes nothing.
        assert (await pulling.post(job["ID"], "DEAD", lease=lease)).status_code == 409
        assert await pulling.state(job["ID"]) == ("DELIVERED", 1)
    await server.stop()

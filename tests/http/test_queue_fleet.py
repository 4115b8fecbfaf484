"""Processes that take messages over HTTP, are killed, and are replaced."""

import asyncio
from pathlib import Path

import httpx
import pytest

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http.server import ProbeServer
from tests.faststream.conftest import Look
from tests.helpers import eventually
from tests.http import queue_worker
from tests.http.conftest import on_sqlite
from tests.http.queueing import PUBLISH, Queueing, bearer
from tests.http.running import STARTED, Client
from tests.http.test_pull_consumers import over
from tests.http.test_serve import serving

pytestmark = pytest.mark.capability("HTTP: publish, reserve, commit and rollback on any queue")

MESSAGES = 40


@on_sqlite
async def test_a_fleet_of_clients_loses_nothing(
    broker: SqlBroker, look: Look, tmp_path: Path
) -> None:
    """Promises 1 and 3: killed processes lose no message, and what they had is refused to them."""

    def worker(*options: str) -> Client:
        started = Client(tmp_path / f"{len(fleet)}", queue_worker.__name__, port, *options)
        fleet.append(started)
        return started

    web = Queueing(broker, max_deliveries=None)
    server = ProbeServer(web.app, "127.0.0.1", 0)
    port = await server.start()
    fleet: list[Client] = []
    stale: list[dict[str, str]] = []
    async with web.http:
        batch = {"messages": [{"body": n} for n in range(MESSAGES)]}
        published = await web.post("/publish-batch", batch, PUBLISH)
        ids = set(published.json()["ids"])
        try:
            for each in [worker("hold") for _ in range(3)]:
                for line in await each.says(2):
                    _, number, token = line.split()
                    stale.append({"id": number, "lease_token": token})
                each.kill()
            await over(look)
            living = [worker() for _ in range(2)]
            await eventually(lambda: any(each.lines() for each in living), timeout=STARTED)
            # What the living ones have just taken is given to others, too.
            await over(look)

            async def all_done() -> bool:
                return not await look.rows()

            await eventually(all_done)
        finally:
            for each in fleet:
                each.kill()
        kept = await look.rows(archive=True)
        assert {row["id"] for row in kept} == ids
        assert {row["state"] for row in kept} == {"COMPLETED"}
        for lease in stale:
            for how, fields in (("commit", {}), ("rollback", {"outcome": "fail"})):
                assert (await web.end(lease, how, **fields)).status_code == 409
        assert await look.rows(archive=True) == kept
    await server.stop()


@on_sqlite
async def test_the_command_serves_queues_and_ends_waits(
    broker: SqlBroker, database_url: str, tmp_path: Path
) -> None:
    async with httpx.AsyncClient(timeout=90) as client:
        async with serving(database_url, tmp_path / "log", "--insecure", "--queues") as address:
            queue = f"{address}/v1/queues/orders"
            made = {
                role: bearer((await client.put(f"{queue}/tokens/{role}")).json()["token"])
                for role in ("publish", "consume")
            }
            sent = {"body": {"id": 1}}
            published = await client.post(f"{queue}/publish", json=sent, headers=made["publish"])
            assert published.status_code == 201
            found = await client.post(f"{queue}/reserve", json={}, headers=made["consume"])
            assert [each["body"] for each in found.json()["messages"]] == ['{"id":1}']
            # A request that is under way when the signal comes is answered.
            waiting = asyncio.create_task(
                client.post(f"{queue}/reserve", json={"wait": 30}, headers=made["consume"])
            )
            for _ in range(20):
                assert (await client.get(f"{address}/health/live")).status_code == 200
        answer = await waiting
    assert (answer.status_code, answer.json()) == (200, {"messages": []})

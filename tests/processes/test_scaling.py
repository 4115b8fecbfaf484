"""The autoscaler's query against real workers that go up and down, on every database with
functions."""

import asyncio
import math
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from httpx import ASGITransport, AsyncClient
from sqlalchemy import text

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.schema.functions import install_functions
from tests.helpers import eventually
from tests.processes.conftest import Fleet

DOCS = Path(__file__).parent.parent.parent / "docs"
KUBERNETES = DOCS / "kubernetes"
PAGE = (DOCS / "howto" / "scaling.md").read_text()
KEYS = {"postgresql": ("postgresql", "targetQueryValue"), "mysql": ("mysql", "queryValue")}
servers_only = pytest.mark.parametrize(
    "database", ["postgresql", "mariadb", "mysql"], indirect=True
)


def scaler(database: str) -> dict[str, Any]:
    """The autoscaler's settings for this database."""
    kind = "postgresql" if database == "postgresql" else "mysql"
    return yaml.safe_load((KUBERNETES / f"keda-{kind}.yml").read_text())["spec"]


def query(database: str) -> str:
    [trigger] = scaler(database)["triggers"]
    asked: str = trigger["metadata"]["query"]
    return asked.replace("'orders'", "'q'")


async def load(fleet: Fleet, asked: str) -> int:
    async with fleet.store.engine.connect() as connection:
        return int(await connection.scalar(text(asked)))


async def with_functions(fleet: Fleet) -> None:
    async with fleet.store.engine.begin() as connection:
        await connection.run_sync(install_functions)


@servers_only
@pytest.mark.capability("SQL functions to publish, cancel and read the load of a queue")
async def test_workers_follow_the_load(fleet: Fleet, database: str) -> None:
    await with_functions(fleet)
    asked = query(database)
    most = 3
    target = 8
    assert await load(fleet, asked) == 0
    await fleet.publish(40)
    assert await load(fleet, asked) == 40
    sizes: list[int] = []
    running: list[Any] = []

    async def scale() -> bool:
        """One look of the autoscaler; whether all is done and all workers are gone."""
        found = await load(fleet, asked)
        wanted = min(most, math.ceil(found / target))
        while len(running) < wanted:
            running.append(
                fleet.start("steady", max_workers=2, max_fetch_interval=0.1, wakeup="poll")
            )
        while len(running) > wanted:
            worker = running.pop()
            worker.send_signal(signal.SIGTERM)
            await asyncio.to_thread(worker.wait, 240)
            assert worker.returncode in (0, -signal.SIGTERM)
        sizes.append(wanted)
        return found == 0

    await eventually(scale, timeout=240, step=0.2)
    # Up to the most, and never to none while a message is being handled.
    assert max(sizes) == most
    assert sizes.index(0) == len(sizes) - 1
    sizes.clear()
    await fleet.publish(5)
    await eventually(scale, timeout=240, step=0.2)
    assert max(sizes) == 1
    assert sizes.index(0) == len(sizes) - 1
    started = sum(fleet.started().values(), Counter())
    assert started == Counter(range(40)) + Counter(range(5))
    assert await fleet.rows() == []


@servers_only
async def test_a_busy_worker_with_an_empty_queue_counts(fleet: Fleet, database: str) -> None:
    await with_functions(fleet)
    asked = query(database)
    await fleet.publish(3)
    worker = fleet.start("hang", max_workers=3, max_fetch_interval=0.1, graceful_timeout=0.2)
    await eventually(lambda: sum(sum(c.values()) for c in fleet.started().values()) == 3)
    assert await load(fleet, asked) == 3
    assert all(row["state"] == "PROCESSING" for row in await fleet.rows())
    worker.send_signal(signal.SIGTERM)
    await asyncio.to_thread(worker.wait, 240)
    # It gave them back, so there is work again.
    assert await load(fleet, asked) == 3


@servers_only
async def test_what_does_not_count(fleet: Fleet, database: str) -> None:
    await with_functions(fleet)
    asked = query(database)
    await fleet.put(4, priority=3)
    await fleet.put(2, priority=-3)
    await fleet.put(50, delay=600.0)
    await fleet.put(50, "other")
    assert await load(fleet, asked) == 6
    broker = SqlBroker(fleet.store.engine, logger=None)
    await broker.admin.pause("q")
    assert await load(fleet, asked) == 0
    await broker.admin.resume("q")
    assert await load(fleet, asked) == 6
    await broker.stop()


@servers_only
async def test_a_count_ends_at_its_cap(fleet: Fleet, database: str) -> None:
    await with_functions(fleet)
    await fleet.publish(10_050)
    await fleet.claim(20)
    assert await load(fleet, query(database)) == 10_000
    if database != "postgresql":
        [plain] = re.findall(r"-- without the function[^\n]*\n(.*?)```", PAGE, re.DOTALL)
        assert await load(fleet, plain.replace("'orders'", "'q'")) == 10_000 + 20


def test_the_page_shows_the_files() -> None:
    for database in KEYS:
        kind, value = KEYS[database]
        [trigger] = scaler(database)["triggers"]
        [shown] = [
            yaml.safe_load(block)["triggers"]
            for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
            if f"type: {kind}" in block
        ]
        assert shown == [trigger]
        assert trigger["type"] == kind
        assert int(trigger["metadata"][value]) > 0


def test_a_pod_has_time_to_stop() -> None:
    pod = yaml.safe_load((KUBERNETES / "worker.yml").read_text())["spec"]["template"]["spec"]
    [graceful] = re.findall(r"graceful_timeout=(\d+)", PAGE)
    grace = pod["terminationGracePeriodSeconds"]
    assert grace >= int(graceful) + 12
    [of_uvicorn] = re.findall(
        r'"--timeout-graceful-shutdown", "(\d+)"', (KUBERNETES / "Dockerfile").read_text()
    )
    assert int(graceful) + 12 < int(of_uvicorn) < grace


async def test_the_probes_are_answered(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the database the process is alive, and not ready."""
    pod = yaml.safe_load((KUBERNETES / "worker.yml").read_text())["spec"]["template"]["spec"]
    [container] = pod["containers"]
    paths = {
        name: container[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")
    }
    [program] = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.setenv("DATABASE_URL", database_url)
    found: dict[str, Any] = {"os": os, "SqlBroker": SqlBroker}
    exec(program, found)
    broker, app = found["broker"], found["app"]
    await broker.create_tables()
    transport = ASGITransport(app=app)
    async with AsyncClient(transport=transport, base_url="http://pod") as client:
        await broker.start()

        async def answer(live: int, ready: int) -> bool:
            answers = {name: (await client.get(path)).status_code for name, path in paths.items()}
            return answers == {"livenessProbe": live, "readinessProbe": ready}

        # A database that stands still is not ready.
        await eventually(lambda: answer(204, 204))
        with patch.object(broker._store.access, "ping", return_value=False):
            assert await answer(204, 500)
    await broker.stop()

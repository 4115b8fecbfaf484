"""Probes: alive, ready, metrics; mounted, and on a port of their own."""

import asyncio
import logging
import socket
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SetupError, SqlBroker
from faststream_sqlbroker.broker.serving import parse_probe_address
from faststream_sqlbroker.http import HttpApp, probes
from faststream_sqlbroker.prometheus import SqlBrokerPrometheusMetrics
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually
from tests.http.conftest import as_user, client_of, logins, on_sqlite
from tests.http.running import client_at, is_ready

pytestmark = pytest.mark.capability("HTTP: mounted in AsgiFastStream, FastAPI, Starlette; probes")


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "CACHE_SECONDS", 0.0)
    monkeypatch.setattr(probes, "SCHEMA_CACHE_SECONDS", 0.0)


async def test_ready_tells_what_is_missing(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("orders", **QUICK)
    async def handle(body: str) -> None:
        pass

    async with client_of(broker.asgi(logins())) as client:
        before = await client.get("/health/ready")
        assert before.status_code == 503
        good = {"database": True, "schema": True, "subscribers": True}
        assert before.json()["checks"] == {"started": False, **good}
        await broker.start()
        await broker.publish("x", "orders")
        await look.archived()

        async def flushed() -> dict[str, Any] | None:
            found = await client.get("/health/ready")
            return found.json() if found.json()["last_flush_ago"] is not None else None

        found = await eventually(flushed)
        assert found["status"] == "ready"
        assert found["checks"] == {"started": True, **good}
        assert 0 <= found["last_claim_ago"] < 60
        # It tells nothing of queues to those whom it does not know.
        assert "orders" not in str(found)
        async with look.engine.begin() as connection:
            await connection.run_sync(look.tables.message.drop)
        missing = await client.get("/health/ready")
        assert missing.status_code == 503
        assert missing.json()["checks"]["database"] is False
        assert (await client.get("/health/live")).status_code == 200


async def test_ready_compares_the_tables(broker: SqlBroker, look: Look) -> None:
    async with client_of(broker.asgi(logins())) as client:
        assert (await client.get("/health/ready")).status_code == 200
        index = next(iter(look.tables.message.indexes))
        async with look.engine.begin() as connection:
            await connection.run_sync(index.drop)
        found = await client.get("/health/ready")
        assert found.json()["checks"] == {
            "started": True,
            "database": True,
            "schema": False,
            "subscribers": True,
        }


@on_sqlite
async def test_many_askers_cost_one_look(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "CACHE_SECONDS", 3600.0)
    asked = 0
    real = SqlBroker.ping

    async def ping(self: SqlBroker, timeout: Any) -> bool:
        nonlocal asked
        asked += 1
        return await real(self, timeout)

    monkeypatch.setattr(SqlBroker, "ping", ping)
    async with client_of(broker.asgi(logins())) as client:
        found = await asyncio.gather(*(client.get("/health/ready") for _ in range(20)))
    assert {each.status_code for each in found} == {200}
    assert asked == 1


@on_sqlite
async def test_metrics_are_for_viewers(engine: AsyncEngine, app: HttpApp) -> None:
    async with client_of(app) as client:
        none = await client.get("/metrics", auth=as_user("vic"))
        assert none.status_code == 404
        assert "SqlBrokerPrometheusMetrics" in none.json()["error"]
    registry = CollectorRegistry()
    broker = SqlBroker(engine, metrics=SqlBrokerPrometheusMetrics(registry), logger=None)
    async with client_of(broker.asgi(logins())) as client:
        assert (await client.get("/metrics")).status_code == 401
        found = await client.get("/metrics", auth=as_user("vic"))
        assert found.status_code == 200
        assert found.headers["content-type"].startswith("text/plain; version=")
        assert "# HELP sqlbroker_claimed_messages_total" in found.text


async def test_a_worker_serves_probes_on_a_port_of_its_own(
    engine: AsyncEngine, broker: SqlBroker
) -> None:
    registry = CollectorRegistry()
    worker = SqlBroker(
        engine,
        metrics=SqlBrokerPrometheusMetrics(registry),
        health_port="127.0.0.1:0",
        logger=None,
    )

    @worker.subscriber("orders", **QUICK)
    async def handle(body: str) -> None:
        pass

    for _ in range(2):  # A broker can be started again.
        port = await started(worker)
        async with client_at(f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/health/live")).json() == {"status": "live"}
            await eventually(partial(is_ready, client))
            metrics = await client.get("/metrics")
            assert "sqlbroker_claimed_messages_total" in metrics.text
            assert metrics.headers["x-content-type-options"] == "nosniff"
            assert "server" not in metrics.headers
            assert (await client.get("/csrf-token")).status_code == 404
            assert (await client.post("/health/live")).status_code == 405
        await worker.stop()
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        assert "sqlbroker-probes" not in tasks


async def started(worker: SqlBroker) -> int:
    """Start it; the port that the system has chosen for its probes."""
    ports: list[int] = []
    server = worker._probes
    real = type(server).start

    async def start() -> int:
        ports.append(await real(server))
        return ports[0]

    server.start = start
    await worker.start()
    [port] = ports
    return port


@on_sqlite
async def test_a_port_that_is_taken(engine: AsyncEngine, broker: SqlBroker) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        worker = SqlBroker(engine, health_port=f"127.0.0.1:{port}", logger=None)
        with pytest.raises(SetupError, match=f"cannot listen on 127.0.0.1:{port}.*its own port"):
            await worker.start()
        assert not worker.running
        await worker.stop()


@on_sqlite
async def test_processes_share_a_range_of_ports(
    engine: AsyncEngine, broker: SqlBroker, logger: logging.Logger, heard: Heard
) -> None:
    """The first that is free; and none is left for one more."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first = min(taken.getsockname()[1], 65_000)
    ports = f"127.0.0.1:{first}-{first + 20}"
    workers = [SqlBroker(engine, health_port=ports, logger=logger) for _ in range(2)]
    found = [await started(worker) for worker in workers]
    assert first <= found[0] < found[1] <= first + 20
    assert heard.texts("probes are served", logging.INFO) == [
        f"probes are served on port {port}" for port in found
    ]
    for port in found:
        async with client_at(f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/health/live")).status_code == 200
    one_more = SqlBroker(engine, health_port=f"127.0.0.1:{found[0]}-{found[0]}", logger=None)
    with pytest.raises(SetupError, match="its own port"):
        await one_more.start()
    for worker in (*workers, one_more):
        await worker.stop()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (8080, ("0.0.0.0", 8080, 8080)),
        ("8080", ("0.0.0.0", 8080, 8080)),
        ("8080-8082", ("0.0.0.0", 8080, 8082)),
        ("127.0.0.1:9", ("127.0.0.1", 9, 9)),
        ("[::1]:9-10", ("::1", 9, 10)),
    ],
)
def test_the_address_of_probes(given: Any, found: Any) -> None:
    assert parse_probe_address(given) == found


@pytest.mark.parametrize(
    "wrong",
    [-1, 65_536, "x", "localhost:", ":9", "a:b", True, 1.5, "9999999", "9-8", "9-", "1-200", "-9"],
)
def test_what_is_no_port(wrong: Any) -> None:
    with pytest.raises(SetupError, match="health_port"):
        parse_probe_address(wrong)

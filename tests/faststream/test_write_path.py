"""A database that takes no writes is named by readiness, findings, metrics and the log, although
nothing is to be done, and each look that a process makes is answered.
"""

import asyncio
import re
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import make_url, select
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.database.rehearsal import AccessChecks
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.fleet import write_path
from faststream_sqlbroker.http import probes
from faststream_sqlbroker.prometheus import SqlBrokerPrometheusMetrics
from tests.faststream.conftest import QUICK, Heard, Look, Make, clean_up
from tests.flow.test_read_only import Server
from tests.helpers import eventually
from tests.http.conftest import client_of, logins
from tests.http.running import is_ready

pytestmark = pytest.mark.capability("HTTP: mounted in AsgiFastStream, FastAPI, Starlette; probes")


@pytest.mark.parametrize("subscribes", [False, True])
async def test_an_idle_process_tells_that_nothing_can_be_written(
    engine: AsyncEngine,
    database: str,
    heard: Heard,
    logger: Any,
    monkeypatch: pytest.MonkeyPatch,
    subscribes: bool,
) -> None:
    """One that subscribes learns it of its signs of life, one that only publishes of probes."""
    monkeypatch.setattr(probes, "CACHE_SECONDS", 0.0)
    monkeypatch.setattr(probes, "LIMIT", 60.0)
    if not subscribes:
        monkeypatch.setattr(write_path, "FRESH", 0.0)
    server = Server(engine, database)
    registry = CollectorRegistry()
    metrics = SqlBrokerPrometheusMetrics(registry, sample_interval=0.05)
    broker = SqlBroker(engine, logger=logger, metrics=metrics, presence_interval=0.1)
    if subscribes:

        @broker.subscriber("orders", **QUICK)
        async def handle(body: str) -> None: ...

    async def writable(value: float) -> bool:
        labels = {"database": database}
        return registry.get_sample_value("sqlbroker_database_writable", labels) == value

    async with client_of(broker.asgi(logins())) as client:

        async def refused() -> dict[str, Any] | None:
            found = await client.get("/health/ready")
            return found.json() if "takes no writes" in (found.json()["reason"] or "") else None

        await broker.create_tables()
        await broker.start()
        await eventually(partial(is_ready, client))
        await eventually(partial(writable, 1.0))
        server.read_only = True
        await engine.dispose()
        found = await eventually(refused)
        assert found["checks"]["started"]
        assert not found["checks"]["database"]
        assert re.search("(?i)read.?only", found["reason"])
        assert not await broker.ping(60.0)
        assert (await client.get("/health/live")).status_code == 200
        await eventually(partial(writable, 0.0))
        report = await broker.admin.findings()
        [finding] = [each for each in report.findings if each.kind in {"writes", "rights"}]
        assert (finding.kind, finding.is_error) == ("writes", True)
        assert finding.text == found["reason"]
        [part] = [p for p in (await broker.admin.diagnosis()).parts if p.name == "database"]
        assert finding.text in part.problems
        server.read_only = False
        await eventually(partial(is_ready, client))
        assert await broker.ping(60.0)
        await eventually(partial(writable, 1.0))
        assert (await broker.admin.health()).writes is None
    assert heard.texts("tries again with growing pauses")
    if not subscribes:
        assert len(heard.texts("the write probe loop failed")) == 1
        assert len(heard.texts("the database works again")) == 1
    await clean_up(broker)


async def test_all_who_ask_share_a_probe_of_which_nothing_is_left(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0
    real = AccessChecks.try_write

    async def counted(self: AccessChecks) -> None:
        nonlocal tries
        tries += 1
        await real(self)

    monkeypatch.setattr(AccessChecks, "try_write", counted)
    assert all(await asyncio.gather(*(broker.ping(60.0) for _ in range(20))))
    assert await broker.ping(60.0)
    assert tries == 1
    monkeypatch.setattr(write_path, "FRESH", 0.0)
    assert await broker.ping(60.0)
    assert tries == 2
    async with look.engine.connect() as connection:
        assert not (await connection.execute(select(look.tables.policy_state))).all()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_write_without_an_answer_is_not_waited_for(
    broker: SqlBroker, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes when it is due, and all goes on when the write is done."""
    monkeypatch.setattr(probes, "LIMIT", 1.0)
    monkeypatch.setattr(probes, "CACHE_SECONDS", 0.0)
    await broker.connect()
    with closing(sqlite3.connect(make_url(database_url).database or "")) as other:
        other.execute("BEGIN IMMEDIATE")
        async with client_of(broker.asgi(logins())) as client:

            async def refused() -> str | None:
                found = await client.get("/health/ready")
                assert found.status_code == 503
                reason: str | None = found.json()["reason"]
                return reason

            said = await eventually(refused)
            assert said is not None
            assert said.startswith(
                "the database takes no writes: a write has not been answered for "
            )
            assert (await client.get("/health/live")).status_code == 200
        assert not await broker.ping(60.0), "it is known"
        assert (await broker.admin.health()).writes == said
    await eventually(lambda: broker.ping(60.0))


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_an_impatient_look_decides_for_no_other(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the write has had no answer for long."""
    monkeypatch.setattr(write_path, "MAX_RESPONSE_TIME", 600.0)
    answered = asyncio.Event()

    async def slow(_: AccessChecks) -> None:
        await answered.wait()

    monkeypatch.setattr(AccessChecks, "try_write", slow)
    await broker.connect()
    assert not await broker.ping(0.01)
    patient = asyncio.create_task(broker.ping(60.0))
    assert not await broker.ping(0.01)
    assert not patient.done()
    answered.set()
    assert await patient
    monkeypatch.setattr(write_path, "FRESH", 0.0)
    monkeypatch.setattr(write_path, "MAX_RESPONSE_TIME", 0.0)
    answered.clear()
    assert not await broker.ping(0.01)
    assert not await broker.ping(60.0), "it is known"
    answered.set()
    await eventually(lambda: broker.ping(60.0))


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("stopped", [False, True])
async def test_no_probe_outlives_a_look_of_a_broker_that_nothing_stops(
    make: Make,
    heard: Heard,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    stopped: bool,
) -> None:
    """One that is stopped, or was never connected."""
    monkeypatch.setattr(write_path, "FRESH", 0.0)
    broker = make()
    await broker.create_tables()
    if stopped:
        await broker.start()
        await broker.stop()
    assert await broker.ping(60.0)
    with closing(sqlite3.connect(make_url(database_url).database or "")) as other:
        other.execute("BEGIN IMMEDIATE")
        assert not await broker.ping(1.0)
    await eventually(lambda: broker.ping(60.0))
    monkeypatch.setattr(AccessChecks, "try_write", AsyncMock(side_effect=StoreError("refused")))
    assert not await broker.ping(60.0)

    async def ended() -> bool:
        return "sqlbroker-write probe" not in {task.get_name() for task in asyncio.all_tasks()}

    await eventually(ended)
    assert (await broker.admin.health()).writes == "the database takes no writes: refused"
    assert not heard.texts("the write probe loop failed")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_database_that_is_away_is_a_reason(
    engine: AsyncEngine, broker: SqlBroker, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is the first statement that fails, which tells none."""
    monkeypatch.setattr(probes, "CACHE_SECONDS", 0.0)
    monkeypatch.setattr(probes, "LIMIT", 60.0)
    async with client_of(broker.asgi(logins())) as client:
        await broker.connect()
        await eventually(partial(is_ready, client))
        monkeypatch.setattr(write_path, "FRESH", 0.0)
        Path(make_url(database_url).database or "").unlink()
        found = (await client.get("/health/ready")).json()
        assert not found["checks"]["database"]
        assert found["reason"].startswith("the database takes no writes: ")

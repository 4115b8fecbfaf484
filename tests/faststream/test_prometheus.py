"""Prometheus: FastStream's metrics and the broker's own, and how they are scraped."""

import asyncio
import math
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from faststream import AckPolicy
from faststream.asgi import AsgiFastStream
from faststream.exceptions import IgnoredException, RejectMessage
from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import ConstantRetryStrategy, SqlBroker, SqlBrokerMessage, Throttle
from faststream_sqlbroker.core.metrics import FLEET_GAUGES, HELD, METRICS, READY, Kind
from faststream_sqlbroker.exceptions import LeaseLostError, MissingExtraError, SetupError
from faststream_sqlbroker.prometheus import (
    SqlBrokerPrometheusMetrics,
    SqlBrokerPrometheusMiddleware,
)
from faststream_sqlbroker.prometheus.metrics import get_exported_name
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@asynccontextmanager
async def made(engine: AsyncEngine, **options: Any) -> AsyncIterator[SqlBroker]:
    broker = SqlBroker(engine, logger=None, graceful_timeout=60.0, **options)
    await broker.create_tables()
    try:
        yield broker
    finally:
        await broker.stop()


def values(registry: CollectorRegistry, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The samples of this name that are not 0, by their labels."""
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for sample in samples(registry)
        if sample.name == name and sample.value
    }


def samples(registry: CollectorRegistry) -> Iterator[Sample]:
    for family in registry.collect():
        yield from family.samples


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


# -- FastStream's ----------------------------------------------------------------------------------

STATUSES = [
    pytest.param("ack", None, "acked", id="acked"),
    pytest.param("nack", None, "nacked", id="nacked"),
    pytest.param("reject", None, "rejected", id="rejected"),
    pytest.param(None, None, "acked", id="nothing said"),
    pytest.param(None, ValueError, "error", id="an error"),
    pytest.param(None, RejectMessage, "rejected", id="RejectMessage"),
    pytest.param(None, IgnoredException, "error", id="IgnoredException"),
]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("method", "error", "status"), STATUSES)
async def test_a_delivery_is_counted_timed_and_sized(
    engine: AsyncEngine,
    look: Look,
    registry: CollectorRegistry,
    method: str | None,
    error: type[Exception] | None,
    status: str,
) -> None:
    middleware = SqlBrokerPrometheusMiddleware(
        registry=registry, custom_labels={"static": "s", "dynamic": lambda _raw: "d"}
    )
    async with made(engine, middlewares=[middleware]) as broker:

        @broker.subscriber("q", retry_strategy=None, **QUICK)
        async def handle(body: str, message: SqlBrokerMessage) -> None:
            if method is not None:
                await getattr(message, method)()
            if error is not None:
                raise error

        await broker.start()
        await broker.publish("hello", "q")
        await look.archived()
    own = {"app_name": "faststream", "broker": "sqlbroker", "static": "s", "dynamic": "d"}
    ours = {**own, "handler": "q"}
    assert value(registry, "faststream_received_messages_total", **ours) == 1
    assert value(registry, "faststream_received_messages_size_bytes_sum", **ours) == len("hello")
    assert value(registry, "faststream_received_messages_in_process", **ours) == 0
    name = "faststream_received_processed_messages"
    assert value(registry, f"{name}_total", **ours, status=status) == 1
    assert value(registry, f"{name}_duration_seconds_count", **ours) == 1
    failures = values(registry, f"{name}_exceptions_total")
    counted = error is ValueError
    assert len(failures) == counted
    if counted:
        assert value(registry, f"{name}_exceptions_total", **ours, exception_type="ValueError") == 1
    published = {**own, "destination": "q"}
    assert (
        value(registry, "faststream_published_messages_total", **published, status="success") == 1
    )
    assert value(registry, "faststream_published_messages_duration_seconds_count", **published) == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_batch_counts_its_messages(
    engine: AsyncEngine, look: Look, registry: CollectorRegistry
) -> None:
    middleware = SqlBrokerPrometheusMiddleware(registry=registry, app_name="shop")
    async with made(engine, middlewares=[middleware]) as broker:

        @broker.subscriber("q", batch=True, **QUICK)
        async def handle(bodies: list[str]) -> None:
            pass

        await broker.publish_batch("a", "bc", "def", queue="q")
        await broker.start()
        await look.archived(3)
    own = {"app_name": "shop", "broker": "sqlbroker"}
    ours = {**own, "handler": "q"}
    assert value(registry, "faststream_received_messages_total", **ours) == 3
    assert value(registry, "faststream_received_messages_size_bytes_sum", **ours) == 6
    name = "faststream_published_messages_total"
    assert value(registry, name, **own, destination="q", status="success") == 3


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_publish_that_fails_is_counted(
    engine: AsyncEngine, registry: CollectorRegistry
) -> None:
    middleware = SqlBrokerPrometheusMiddleware(registry=registry)
    async with made(engine, middlewares=[middleware]) as broker:
        await broker.connect()
        with pytest.raises(ValueError, match="priority"):
            await broker.publish("x", "q", priority=1_000)
    own = {"app_name": "faststream", "broker": "sqlbroker", "destination": "q"}
    assert value(registry, "faststream_published_messages_total", **own, status="error") == 1
    name = "faststream_published_messages_exceptions_total"
    assert value(registry, name, **own, exception_type="PublishError") == 1


def test_middlewares_share_a_registry(registry: CollectorRegistry) -> None:
    first, second = (SqlBrokerPrometheusMiddleware(registry=registry) for _ in range(2))
    container = "_metrics_container"
    assert (
        getattr(first, container).received_messages_total
        is getattr(second, container).received_messages_total
    )


# -- the broker's own ------------------------------------------------------------------------------


@asynccontextmanager
async def measured(
    engine: AsyncEngine, registry: CollectorRegistry, **options: Any
) -> AsyncIterator[SqlBroker]:
    metrics = SqlBrokerPrometheusMetrics(registry, sample_interval=0.05)
    async with made(engine, metrics=metrics, **options) as broker:
        yield broker


async def test_what_was_claimed_and_settled_is_counted(
    engine: AsyncEngine, look: Look, registry: CollectorRegistry
) -> None:
    retries = ConstantRetryStrategy(delay_seconds=0, max_total_delay_seconds=None, max_attempts=3)
    async with measured(engine, registry) as broker:

        @broker.subscriber(
            ["good", "bad"], ack_policy=AckPolicy.NACK_ON_ERROR, retry_strategy=retries, **QUICK
        )
        async def handle(body: str) -> None:
            if body == "bad":
                raise ValueError(body)

        await broker.start()
        await broker.publish_batch("good", "good", queue="good")
        await broker.publish("bad", "bad")
        await look.archived(3)
    assert value(registry, "sqlbroker_claimed_messages_total", queue="good") == 2
    assert value(registry, "sqlbroker_claimed_messages_total", queue="bad") == 3
    assert values(registry, "sqlbroker_settled_messages_total") == {
        (("outcome", "acked"), ("queue", "good"), ("reason", "")): 2,
        (("outcome", "retried"), ("queue", "bad"), ("reason", "")): 2,
        (("outcome", "failed"), ("queue", "bad"), ("reason", "max_attempts")): 1,
    }
    assert value(registry, "sqlbroker_retried_messages_total", queue="bad") == 2
    for name in ("claim", "flush"):
        of = {"subscriber": "good,bad"}
        assert value(registry, f"sqlbroker_{name}_seconds_count", **of) >= 1
        assert value(registry, f"sqlbroker_{name}_seconds_sum", **of) > 0


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_gauges_tell_what_waits_and_what_is_held(
    engine: AsyncEngine, registry: CollectorRegistry
) -> None:
    running = asyncio.Event()
    end = asyncio.Event()
    async with measured(engine, registry) as broker:

        @broker.subscriber("q", **QUICK)
        async def handle(body: str) -> None:
            running.set()
            await end.wait()

        await broker.start()
        await broker.publish("now", "q")
        await broker.publish("later", "q", delay=600)
        await broker.publish("nobody's", "forgotten")
        await running.wait()

        async def told() -> bool:
            wanted = {"in_flight": 1.0, "delayed": 1.0, "ready": 0.0}
            found = {
                name: registry.get_sample_value(f"sqlbroker_{name}_messages", {"queue": "q"})
                for name in wanted
            }
            stage = {"subscriber": "q", "stage": "running"}
            held = registry.get_sample_value("sqlbroker_held_messages", stage)
            live = registry.get_sample_value("sqlbroker_live_subscribers", {"queue": "q"})
            forgotten = {"queue": "forgotten"}
            last = registry.get_sample_value("sqlbroker_ready_messages", forgotten)
            # A look may come before the last message, or before the subscriber's sign of life.
            return found == wanted and held == live == last == 1.0

        await eventually(told)
        assert value(registry, "sqlbroker_live_subscribers", queue="forgotten") == 0
        await eventually(lambda: value(registry, "sqlbroker_subscriber_healthy", subscriber="q"))
        assert value(registry, "sqlbroker_pool_limit_connections", database="sqlite") == 15

        async def margin() -> bool:
            told = value(registry, "sqlbroker_lease_margin_seconds_sum", subscriber="q")
            return told > 100.0  # the lease of a running handler is 600 s

        await eventually(margin)

        async def tells_findings() -> bool:
            """Alerts ask so whether any process does."""
            known = {"kind": "no subscriber", "level": "error", "queue": ""}
            return registry.get_sample_value("sqlbroker_findings", known) == 0.0

        await eventually(tells_findings)
        end.set()
    gauges = {get_exported_name(m) for m in METRICS if m.kind is Kind.GAUGE}
    assert not [s for s in samples(registry) if s.name in gauges], "a stopped broker tells none"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_throttle_that_makes_wait_is_seen(
    engine: AsyncEngine, look: Look, registry: CollectorRegistry
) -> None:
    async with measured(engine, registry) as broker:

        @broker.subscriber("q", policies=[Throttle(1, per="1h")], **QUICK)
        async def handle(body: str) -> None:
            pass

        await broker.publish_batch("now", "in an hour", queue="q")
        await broker.start()
        name = "sqlbroker_policy_wait_seconds_count"
        await eventually(lambda: sum(values(registry, name).values()) >= 1)
    waits = values(registry, name)
    assert {dict(labels)["wait"] for labels in waits} <= {"claim", "slot"}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_lost_lease_is_counted(
    engine: AsyncEngine, look: Look, registry: CollectorRegistry
) -> None:
    async with measured(engine, registry) as broker:
        running = asyncio.Event()
        end = asyncio.Event()

        @broker.subscriber("q", **QUICK)
        async def handle(body: str) -> None:
            running.set()
            await end.wait()

        await broker.start()
        await broker.publish("x", "q")
        await running.wait()
        [live] = await broker.admin.subscribers()
        await broker.admin.pause("q")
        assert await broker.admin.release(live.worker, force=True) == 1
        end.set()

        async def lost() -> bool:
            return value(registry, "sqlbroker_lost_messages_total", queue="q", outcome="lost") == 1

        await eventually(lost)
    assert values(registry, "sqlbroker_settled_messages_total") == {}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_recorder_of_ones_own_that_raises_stops_no_message(
    engine: AsyncEngine, look: Look
) -> None:
    class Broken:
        sample_interval = 0.05

        def count(self, *_: Any) -> None:
            raise RuntimeError

        observe = gauge = count

    async with made(engine, metrics=Broken()) as broker:

        @broker.subscriber("q", **QUICK)
        async def handle(body: str) -> None:
            pass

        await broker.start()
        await broker.publish("x", "q")
        await look.archived()
        assert await broker.ping(60.0)


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_gauges_go_on_in_another_asyncio_run(tmp_path: Path, registry: CollectorRegistry) -> None:
    """Also if the first has ended without a stop."""
    metrics = SqlBrokerPrometheusMetrics(registry, sample_interval=0.05)
    broker = SqlBroker(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}", metrics=metrics, logger=None)
    broker.subscriber("q", **QUICK)(_nothing)

    async def run(count: int) -> None:
        await broker.start()
        await broker.publish("later", "q", delay=600)

        async def told() -> bool:
            return value(registry, "sqlbroker_delayed_messages", queue="q") == count

        await eventually(told)

    asyncio.run(broker.create_tables())
    asyncio.run(run(1))
    asyncio.run(run(2))
    asyncio.run(broker.stop())
    assert values(registry, "sqlbroker_delayed_messages") == {}


async def _nothing(body: str) -> None:
    pass


def test_two_brokers_in_a_registry_need_two_prefixes(registry: CollectorRegistry) -> None:
    SqlBrokerPrometheusMetrics(registry)
    with pytest.raises(ValueError, match="sqlbroker_claimed_messages"):
        SqlBrokerPrometheusMetrics(registry)
    SqlBrokerPrometheusMetrics(registry, prefix="billing")


@pytest.mark.parametrize("interval", [0, -1, "soon", None])
def test_an_interval_is_longer_than_nothing(registry: CollectorRegistry, interval: Any) -> None:
    with pytest.raises(SetupError, match="sample_interval"):
        SqlBrokerPrometheusMetrics(registry, sample_interval=interval)


# -- scraped ---------------------------------------------------------------------------------------


@asynccontextmanager
async def served(app: AsgiFastStream) -> AsyncIterator[str]:
    """The application in a real server; the address of its metrics."""
    config = uvicorn.Config(app, port=0, log_level="error", ws="none", timeout_graceful_shutdown=60)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())

    async def started() -> bool:
        assert not task.done(), task.exception()
        return server.started

    await eventually(started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        server.should_exit = True
        await task


def fetch(address: str) -> str:
    request = urllib.request.Request(address, headers={"Accept": "text/plain"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_scrape_has_all_metrics(
    engine: AsyncEngine, look: Look, registry: CollectorRegistry
) -> None:
    middleware = SqlBrokerPrometheusMiddleware(registry=registry)
    async with measured(engine, registry, middlewares=[middleware]) as broker:

        @broker.subscriber("q", **QUICK)
        async def handle(body: str) -> None:
            pass

        await broker.admin.pause("p")  # a finding
        app = AsgiFastStream(broker, asgi_routes=[("/metrics", make_asgi_app(registry))])
        async with served(app) as address:
            await broker.publish("x", "q")
            await look.archived()

            async def complete() -> bool:
                text = await asyncio.to_thread(fetch, address)
                wanted = *map(get_exported_name, FLEET_GAUGES), "sqlbroker_settled_messages_total"
                return all(f"\n{name}{{" in text for name in wanted)

            await eventually(complete)
            text = await asyncio.to_thread(fetch, address)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in METRICS:
        family = families[f"sqlbroker_{metric.name}"]
        assert family.type == metric.kind.value
        assert family.documentation == metric.description
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
    [acked] = [
        s for s in families["sqlbroker_settled_messages"].samples if s.name.endswith("_total")
    ]
    assert (acked.labels["outcome"], acked.value) == ("acked", 1.0)
    assert "faststream_received_messages" in families


def test_a_missing_extra_is_named() -> None:
    program = f"""
import sys
sys.modules["prometheus_client"] = sys.modules["opentelemetry"] = None
import faststream_sqlbroker
from faststream_sqlbroker.exceptions import {MissingExtraError.__name__} as Missing
try:
    import faststream_sqlbroker.prometheus
except Missing as error:
    print(error)
try:
    import faststream_sqlbroker.opentelemetry
except Missing as error:
    print(error)
"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    prometheus, telemetry = done.stdout.splitlines()
    assert "pip install 'sqlbroker[prometheus]'" in prometheus
    assert "prometheus_client" in prometheus
    assert "pip install 'sqlbroker[otel]'" in telemetry
    assert "opentelemetry" in telemetry


async def test_single_messages_are_counted_as_those_of_handlers(
    engine: AsyncEngine, registry: CollectorRegistry
) -> None:
    """Those of pop, reserve, get_one and iterations, what they end in, and lost leases."""
    metrics = SqlBrokerPrometheusMetrics(registry=registry)
    async with made(engine, metrics=metrics) as broker:
        await broker.publish_batch(*range(7), queue="q")
        assert await broker.pop("q") is not None
        reserved = await broker.reserve("q")
        assert reserved is not None
        await reserved.reject("broken")
        async with asyncio.timeout(60):
            again = await broker.reserve("q", wait=None)
        assert again is not None
        await again.rollback("1h")
        subscriber = broker.subscriber("q")
        pulled = await subscriber.get_one()
        assert pulled is not None
        await pulled.nack(delay="1h")
        async for message in subscriber:
            if message.body == b"5":
                break
        await message.ack()
        late = await broker.reserve("q")
        assert late is not None
        async with engine.begin() as connection:
            await connection.execute(text("DELETE FROM message WHERE state = 'PROCESSING'"))
        with pytest.raises(LeaseLostError):
            await late.commit()
    assert value(registry, "sqlbroker_claimed_messages_total", queue="q") == 7
    settled = values(registry, "sqlbroker_settled_messages_total")
    assert {(dict(k)["outcome"], dict(k)["reason"]): n for k, n in settled.items()} == {
        ("acked", ""): 3,
        ("failed", "other"): 1,
        ("retried", ""): 2,
    }
    assert value(registry, "sqlbroker_retried_messages_total", queue="q") == 2
    assert value(registry, "sqlbroker_lost_messages_total", queue="q", outcome="lost") == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_message_that_a_direct_claim_refuses_is_counted_as_failed(
    engine: AsyncEngine, registry: CollectorRegistry
) -> None:
    async with made(engine, metrics=SqlBrokerPrometheusMetrics(registry=registry)) as broker:
        old, _ = await broker.publish_batch("old", "new", queue="q")
        async with engine.begin() as connection:
            sql = "UPDATE message SET deliveries_count = 99 WHERE id = :id"
            await connection.execute(text(sql), {"id": old})
        taken = await broker.pop("q")
        assert taken is not None
        assert taken.body == "new"
    assert value(registry, "sqlbroker_claimed_messages_total", queue="q") == 2
    settled = values(registry, "sqlbroker_settled_messages_total")
    assert sorted(dict(k)["outcome"] for k in settled) == ["acked", "failed"]


# -- Several processes on one host -----------------------------------------------------------------

OF_A_PROCESS = """
import sys, warnings
from prometheus_client import CollectorRegistry
from faststream_sqlbroker.core.metrics import HELD, READY
from faststream_sqlbroker.prometheus import SqlBrokerPrometheusMetrics
warnings.simplefilter("error")
metrics = SqlBrokerPrometheusMetrics(CollectorRegistry())
for gauge, values in eval(sys.argv[1]):
    metrics.gauge({"ready": READY, "held": HELD}[gauge], values)
"""


def test_what_one_process_tells_of_the_fleet_is_told_once(tmp_path: Path) -> None:
    """By `PROMETHEUS_MULTIPROC_DIR`: the last value counts, whichever process had it."""
    first = [
        ("ready", {("jobs",): 49.0, ("gone",): 3.0, ("ended",): 5.0}),
        ("held", {("jobs", "running"): 2.0}),
        ("ready", {("jobs",): 50.0, ("ended",): 5.0}),
        # It stops; another process tells of the queues.
        ("held", {}),
        ("ready", {}),
    ]
    second = [("ready", {("jobs",): 7.0, ("ended",): 0.0})]
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))

    def run(told: list[Any]) -> dict[str, float]:
        subprocess.run(
            [sys.executable, "-c", OF_A_PROCESS, repr(told)],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
            check=True,
        )
        found = [each for each in samples(registry) if each.name == get_exported_name(READY)]
        assert all(each.labels.keys() == {"queue"} for each in found)
        return {each.labels["queue"]: each.value for each in found}

    values = run(first)
    assert math.isnan(values["jobs"]), "a process of another host may look now"
    assert math.isnan(values["ended"])
    assert run(second) == {"jobs": 7.0, "gone": 0.0, "ended": 0.0}
    [held] = [each for each in samples(registry) if each.name == get_exported_name(HELD)]
    assert "pid" in held.labels
    assert held.value == 0

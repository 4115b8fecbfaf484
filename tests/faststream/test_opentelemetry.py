"""OpenTelemetry: traces from publish by row to handler and answer, and what an exporter sends."""

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from faststream.opentelemetry import Baggage, CurrentBaggage, CurrentSpan
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    SqlBroker,
    SqlBrokerBatchMessage,
    SqlBrokerMessage,
)
from faststream_sqlbroker.core.metrics import METRICS, Kind
from faststream_sqlbroker.opentelemetry import (
    SqlBrokerTelemetryMetrics,
    SqlBrokerTelemetryMiddleware,
)
from faststream_sqlbroker.opentelemetry.metrics import get_exported_name
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

ONE_DATABASE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
PATIENCE = 60
"""Seconds that an exporter waits for its collector, which may stand still."""


class Traces:
    """A tracer that keeps its spans."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """Those that have ended, in the order of their starts."""
        return sorted(self._exporter.get_finished_spans(), key=lambda s: s.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span


def parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def own(span: ReadableSpan) -> int:
    return span.get_span_context().span_id  # type: ignore[union-attr]


def trace_of(span: ReadableSpan) -> int:
    return span.get_span_context().trace_id  # type: ignore[union-attr]


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
async def broker(engine: AsyncEngine, traces: Traces) -> AsyncIterator[SqlBroker]:
    middleware = SqlBrokerTelemetryMiddleware(tracer_provider=traces.provider)
    async with made(engine, middlewares=[middleware]) as broker:
        yield broker


@asynccontextmanager
async def made(engine: AsyncEngine, **options: Any) -> AsyncIterator[SqlBroker]:
    broker = SqlBroker(engine, logger=None, graceful_timeout=60.0, **options)
    await broker.create_tables()
    try:
        yield broker
    finally:
        await broker.stop()


# -- traces ----------------------------------------------------------------------------------------


async def test_a_trace_goes_from_publish_to_handler_to_answer(
    broker: SqlBroker, look: Look, traces: Traces
) -> None:
    @broker.subscriber("first", **QUICK)
    @broker.publisher("second")
    async def first(body: str) -> str:
        await broker.publish("aside", "third")
        return body

    @broker.subscriber("second", **QUICK)
    async def second(body: str) -> None:
        pass

    await broker.start()
    message_id = await broker.publish("hello", "first", key="k")

    async def done() -> bool:
        return len(await look.rows(archive=True)) == 2 and bool(traces.named("second process"))

    await eventually(done)
    create = traces.one("first create")
    publish = traces.one("first publish")
    process = traces.one("first process")
    answer = traces.one("second publish")
    last = traces.one("second process")
    aside = traces.one("third publish")
    assert {trace_of(span) for span in traces.spans} == {trace_of(create)}
    assert parent(create) is None
    assert parent(publish) == parent(process) == own(create)
    assert parent(answer) == own(process)
    assert parent(traces.one("third create")) == own(process)
    assert parent(aside) == own(traces.one("third create"))
    assert parent(last) == own(create), "FastStream's answers go on from the first publish"
    # What a message is called on its way: the publish knows the id of the row.
    assert publish.attributes is not None
    assert process.attributes is not None
    for span in (publish, process):
        assert span.attributes is not None
        assert span.attributes["messaging.system"] == "sqlbroker"
        assert span.attributes["messaging.message.id"] == str(message_id)
        assert span.attributes["messaging.sqlbroker.message.key"] == "k"
    conversation = "messaging.message.conversation_id"
    assert publish.attributes[conversation] == process.attributes[conversation]
    assert publish.kind is SpanKind.PRODUCER
    assert process.kind is SpanKind.CONSUMER
    assert publish.attributes["messaging.destination.name"] == "first"
    assert process.attributes["messaging.destination_publish.name"] == "first"
    assert process.attributes["messaging.message.body.size"] == len("hello")
    assert process.attributes["messaging.sqlbroker.message.delivery"] == 1
    assert process.attributes["messaging.operation"] == "process"


@ONE_DATABASE
async def test_a_retry_and_a_move_stay_in_the_trace(
    broker: SqlBroker, look: Look, traces: Traces
) -> None:
    retries = ConstantRetryStrategy(delay_seconds=0, max_total_delay_seconds=None, max_attempts=2)

    @broker.subscriber("moved", retry_strategy=retries, **QUICK)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        if message.attempts_count == 0:
            raise ValueError(body)

    broker.subscriber("first", forward_to="moved", **QUICK)
    await broker.start()
    await broker.publish("x", "first")
    await look.archived()
    tries = await eventually(lambda: traces.named("moved process")[:2])
    assert len(tries) == 2
    create = traces.one("first create")
    assert {parent(span) for span in tries} == {own(create)}
    assert [span.status.status_code for span in tries] == [StatusCode.ERROR, StatusCode.UNSET]
    deliveries = [(s.attributes or {})["messaging.sqlbroker.message.delivery"] for s in tries]
    assert deliveries == [1, 2]


@ONE_DATABASE
async def test_a_failure_does_not_leak_into_the_next_message(
    broker: SqlBroker, look: Look, traces: Traces
) -> None:
    """Workers handle one message after the other in the same context."""
    seen: list[Any] = []

    @broker.subscriber("q", retry_strategy=None, **QUICK)
    async def handle(body: str) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)
        if body == "bad":
            raise ValueError(body)

    async with broker.engine.begin() as connection:
        for body in ("bad", "good"):
            await connection.execute(
                insert(look.tables.message).values(queue="q", payload=body.encode())
            )
    await broker.start()
    await look.archived(2)
    processes = await eventually(lambda: traces.named("q process")[:2])
    creates = traces.named("q create")
    assert [parent(span) for span in creates] == [None, None]
    assert len({trace_of(span) for span in processes}) == 2
    assert seen == [own(span) for span in processes]


@ONE_DATABASE
async def test_a_handler_sees_its_span_and_its_baggage(
    broker: SqlBroker, look: Look, traces: Traces
) -> None:
    seen: list[Any] = []

    @broker.subscriber("first", **QUICK)
    @broker.publisher("second")
    async def first(body: str, span: CurrentSpan, baggage: CurrentBaggage) -> str:
        seen.append((span is trace.get_current_span(), baggage.get_all()))
        baggage.set("bar", "baz")
        baggage.remove("foo")
        return body

    @broker.subscriber("second", **QUICK)
    async def second(body: str, baggage: CurrentBaggage) -> None:
        seen.append(baggage.get_all())

    await broker.start()
    await broker.publish("x", "first", headers=Baggage({"foo": "bar"}).to_headers())
    await look.archived(2)
    assert seen == [(True, {"foo": "bar"}), {"bar": "baz"}]


# -- links -----------------------------------------------------------------------------------------


async def test_a_batch_links_to_each_publish(broker: SqlBroker, look: Look, traces: Traces) -> None:
    headers: list[Any] = []

    @broker.subscriber("q", batch=True, max_fetch_interval=0.05, flush_interval=0.01)
    async def handle(bodies: list[str], message: SqlBrokerBatchMessage) -> None:
        headers.append([dict(each) for each in message.batch_headers])

    await broker.publish("one", "q")
    await broker.publish("two", "q")
    await broker.publish_batch("three", "four", queue="q")
    async with broker.engine.begin() as connection:
        # As another program does, without any header.
        await connection.execute(insert(look.tables.message).values(queue="q", payload=b"five"))
    stored = [row["headers"] for row in await look.rows()]
    await broker.start()
    await look.archived(5)
    process = await eventually(lambda: traces.named("q process")[-1:])
    begun = [s for s in traces.named("q create") if s.kind is SpanKind.CONSUMER]
    published = [s for s in traces.named("q create") if s.kind is SpanKind.PRODUCER]
    assert len(published) == 3
    assert set().union(*map(linked, begun)) == {own(span) for span in published}
    assert {trace_of(span) for span in published}.isdisjoint({trace_of(process[0])})
    counts = [
        (link.attributes or {}).get("messaging.batch.message_count")
        for s in begun
        for link in s.links
    ]
    if len(begun) == 1:
        assert sorted(counts, key=str) == [2, None, None]
    seen = [each for batch in headers for each in batch]
    assert seen == [each or {} for each in stored], "handlers see the headers as stored"


@ONE_DATABASE
async def test_a_message_of_a_batch_links_to_its_publish(
    broker: SqlBroker, look: Look, traces: Traces
) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(body: str) -> None:
        pass

    await broker.publish_batch("one", "two", queue="q")
    await broker.start()
    await look.archived(2)
    await eventually(lambda: len(traces.named("q process")) == 2)
    [published, *begun] = traces.named("q create")
    assert [linked(span) for span in begun] == [{own(published)}] * 2
    assert len({trace_of(span) for span in traces.spans}) == 3


@ONE_DATABASE
async def test_a_replay_links_to_the_first_publish(
    broker: SqlBroker, look: Look, traces: Traces
) -> None:
    headers: list[Any] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        headers.append(message.headers)
        if message.publish_count == 1:
            await message.republish()

    await broker.start()
    await broker.publish("x", "q")
    await look.archived()
    first, second = await eventually(lambda: traces.named("q process")[:2] if _two(traces) else ())
    published = traces.named("q create")[0]
    assert parent(first) == own(published)
    assert trace_of(second) != trace_of(published)
    assert linked(second) == {own(published)}
    [link] = second.links
    assert link.attributes == {"messaging.sqlbroker.link": "replay"}
    assert headers[0] == headers[1]
    assert "traceparent" in headers[1]


def _two(traces: Traces) -> bool:
    return len(traces.named("q process")) == 2


@ONE_DATABASE
async def test_a_publish_goes_on_with_the_trace_of_its_header(
    broker: SqlBroker, look: Look, traces: Traces
) -> None:
    """As clients over HTTP give it, unless a span runs here already."""
    given = f"00-{7:032x}-{5:016x}-01"
    await broker.publish("x", "q", headers={"traceparent": given})
    assert (trace_of(traces.one("q publish")), parent(traces.one("q create"))) == (7, 5)
    [row] = await look.rows()
    assert row["headers"]["traceparent"].split("-")[1] == given.split("-")[1]
    with traces.provider.get_tracer("t").start_as_current_span("ours"):
        await broker.publish("y", "other", headers={"traceparent": given})
    assert trace_of(traces.one("other publish")) == trace_of(traces.one("ours"))


@ONE_DATABASE
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("count", [1, 2])
async def test_headers_that_are_no_text_lose_no_message(
    broker: SqlBroker, look: Look, traces: Traces, batch: bool, count: int
) -> None:
    """Another program may have stored anything."""
    handled: list[Any] = []

    @broker.subscriber("q", batch=batch, **QUICK)
    async def handle(body: Any) -> None:
        handled.append(body)

    bad = {"traceparent": 7, "tracestate": [1], "baggage": {"a": 1}, "correlation_id": 5}
    async with broker.engine.begin() as connection:
        row = {"queue": "q", "payload": b"x", "headers": bad, "publish_count": count}
        await connection.execute(insert(look.tables.message).values(**row))
    await broker.start()
    [archived] = await look.archived()
    assert archived["state"] == "COMPLETED"
    assert len(handled) == 1
    await eventually(lambda: traces.named("q process"))


@ONE_DATABASE
async def test_nothing_is_recorded_of_what_is_not_sampled(engine: AsyncEngine, look: Look) -> None:
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    middleware = SqlBrokerTelemetryMiddleware(tracer_provider=provider)
    async with made(engine, middlewares=[middleware]) as broker:

        @broker.subscriber("q", **QUICK)
        async def handle(body: str) -> None:
            pass

        await broker.start()
        await broker.publish("x", "q")
        [row] = await look.archived()
    assert exporter.get_finished_spans() == ()
    flags = int(row["headers"]["traceparent"].rpartition("-")[2], 16)
    assert flags & trace.TraceFlags.SAMPLED == 0, "the decision is carried on"


# -- FastStream's metrics --------------------------------------------------------------------------


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    return {
        metric.name: list(metric.data.data_points)
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


@ONE_DATABASE
@pytest.mark.parametrize("counters", [True, False])
@pytest.mark.parametrize("fails", [True, False])
async def test_durations_and_messages_are_measured(
    engine: AsyncEngine, look: Look, counters: bool, fails: bool
) -> None:
    reader = InMemoryMetricReader()
    middleware = SqlBrokerTelemetryMiddleware(
        meter_provider=MeterProvider([reader]), include_messages_counters=counters
    )
    async with made(engine, middlewares=[middleware]) as broker:

        @broker.subscriber("q", batch=True, retry_strategy=None, **QUICK)
        async def handle(bodies: list[str]) -> None:
            if fails:
                raise ValueError

        await broker.publish_batch("a", "b", "c", queue="q")
        await broker.start()
        await look.archived(3)
    found = points(reader)
    names = {"messaging.publish.duration", "messaging.process.duration"}
    if counters:
        names |= {"messaging.publish.messages", "messaging.process.messages"}
        assert found["messaging.process.messages"][0].value == 3
        assert found["messaging.publish.messages"][0].value == 3
    assert set(found) == names
    [process] = found["messaging.process.duration"]
    assert process.count == 1
    assert process.attributes.get("error.type") == ("ValueError" if fails else None)


# -- the broker's own, exported --------------------------------------------------------------------


class Collector:
    """A collector: takes what is posted by OTLP over HTTP, and decodes it."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, self.headers["Content-Type"], body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, content_type: str, body: bytes) -> None:
        assert content_type == "application/x-protobuf"
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            return
        assert path == "/v1/metrics"
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for scope in resource.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(of: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "")
        for each in of.attributes
    }


@ONE_DATABASE
async def test_an_exporter_sends_traces_and_metrics(
    engine: AsyncEngine, look: Look, collector: Collector
) -> None:
    resource = Resource.create({"service.name": "shop"})
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(
        SimpleSpanProcessor(OTLPSpanExporter(f"{collector.address}/v1/traces", timeout=PATIENCE))
    )
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(f"{collector.address}/v1/metrics", timeout=PATIENCE),
        export_interval_millis=3_600_000,
        export_timeout_millis=PATIENCE * 1_000,
    )
    meters = MeterProvider([reader], resource=resource)
    async with made(
        engine,
        metrics=SqlBrokerTelemetryMetrics(meter_provider=meters, sample_interval=0.05),
        middlewares=[SqlBrokerTelemetryMiddleware(tracer_provider=tracers, meter_provider=meters)],
    ) as broker:

        @broker.subscriber("q", **QUICK)
        async def handle(body: str) -> None:
            pass

        await broker.publish("later", "q", delay=600)
        message_id = await broker.publish("now", "q")
        await broker.start()

        async def complete() -> bool:
            await asyncio.to_thread(meters.force_flush, PATIENCE * 1_000)
            # A new counter is exported as 0, before the handler runs.
            settled = collector.metrics.get("sqlbroker.settled_messages")
            return (
                settled is not None
                and settled.sum.data_points[0].as_int == 1
                and "sqlbroker.delayed_messages" in collector.metrics
            )

        await eventually(complete)
    # Exporters block: what ends them must not be the event loop's thread.
    await asyncio.to_thread(tracers.shutdown)
    await asyncio.to_thread(meters.shutdown, PATIENCE * 1_000)
    by_name = {span.name: span for span in collector.spans if span.name != "q create"}
    assert set(by_name) == {"q publish", "q process"}
    process = by_name["q process"]
    assert attributes(process)["messaging.message.id"] == str(message_id)
    creates = {s.span_id: s.trace_id for s in collector.spans if s.name == "q create"}
    assert creates[process.parent_span_id] == process.trace_id
    [settled] = collector.metrics["sqlbroker.settled_messages"].sum.data_points
    assert attributes(settled) == {"queue": "q", "outcome": "acked", "reason": ""}
    assert settled.as_int == 1
    [delayed] = collector.metrics["sqlbroker.delayed_messages"].gauge.data_points
    assert (attributes(delayed), delayed.as_double) == ({"queue": "q"}, 1.0)
    [flushes] = collector.metrics["sqlbroker.flush_seconds"].histogram.data_points
    assert flushes.count >= 1
    assert collector.metrics["sqlbroker.flush_seconds"].unit == "s"
    assert "messaging.process.duration" in collector.metrics


def test_each_metric_has_an_instrument() -> None:
    reader = InMemoryMetricReader()
    recorder = SqlBrokerTelemetryMetrics(meter_provider=MeterProvider([reader]))
    for metric in METRICS:
        labels = tuple("x" for _ in metric.labels)
        if metric.kind is Kind.COUNTER:
            recorder.count(metric, labels, 2)
        elif metric.kind is Kind.HISTOGRAM:
            recorder.observe(metric, labels, 0.5)
        else:
            recorder.gauge(metric, {labels: 3.0})
    found = points(reader)
    assert set(found) == {get_exported_name(metric) for metric in METRICS}
    for metric in METRICS:
        [point] = found[get_exported_name(metric)]
        assert set(point.attributes) == set(metric.labels)
    for metric in METRICS:
        if metric.kind is Kind.GAUGE:
            recorder.gauge(metric, {})
    assert not {get_exported_name(m) for m in METRICS if m.kind is Kind.GAUGE} & set(points(reader))

"""What is given to a broker that is watched: its own metrics, or FastStream's middlewares."""

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from prometheus_client import CollectorRegistry

from faststream_sqlbroker.opentelemetry import SqlBrokerTelemetryMiddleware
from faststream_sqlbroker.prometheus import (
    SqlBrokerPrometheusMetrics,
    SqlBrokerPrometheusMiddleware,
)

SAMPLED = 0.01
"""Of the traces."""


class _Nowhere(SpanExporter):
    """Where the sampled spans go: what a network costs is not measured."""

    def export(self, spans: Any) -> SpanExportResult:  # noqa: ARG002
        return SpanExportResult.SUCCESS


def watching(watch: str) -> dict[str, Any]:
    """Arguments of `SqlBroker`: for `watch` "metrics", "middlewares", or "" for none."""
    registry = CollectorRegistry()
    if watch == "metrics":
        return {"metrics": SqlBrokerPrometheusMetrics(registry)}
    if watch == "middlewares":
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(SAMPLED))
        provider.add_span_processor(BatchSpanProcessor(_Nowhere()))
        traces = SqlBrokerTelemetryMiddleware(
            tracer_provider=provider, meter_provider=MeterProvider()
        )
        return {"middlewares": [SqlBrokerPrometheusMiddleware(registry=registry), traces]}
    return {}

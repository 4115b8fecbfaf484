"""The broker's own metrics in a registry of prometheus_client."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from faststream_sqlbroker.core.metrics import FLEET_GAUGES, METRICS, Kind, Labels, Metric
from faststream_sqlbroker.core.times import Duration, parse_positive

MULTIPROC = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that makes prometheus_client store the values of several processes in files."""


def get_exported_name(metric: Metric, prefix: str = "sqlbroker") -> str:
    """Return the scraped name of `metric`; a histogram adds `_bucket`, `_sum`, `_count`."""
    return f"{prefix}_{metric.name}{'_total' if metric.kind is Kind.COUNTER else ''}"


class SqlBrokerPrometheusMetrics:
    """Exports the broker's own metrics: `SqlBroker(metrics=SqlBrokerPrometheusMetrics(…))`.

    docs/reference/metrics.md lists the metrics. Values are updated once per claim, per write of
    outcomes and per sample, so there is no cost per message.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        prefix: str = "sqlbroker",
        sample_interval: Duration = 15.0,
    ) -> None:
        """Register the metrics.

        Args:
            registry: The registry. Two brokers in one process need two prefixes or two registries.
            prefix: The first word of every name.
            sample_interval: Time between two samples of the gauges: seconds, a timedelta or text
                like "15s". Only one process of the fleet reads the queues for a sample.

        Raises:
            ValueError: the registry already has metrics with these names.
            SetupError: `sample_interval` is not a duration greater than 0.
        """
        self.sample_interval = parse_positive("sample_interval", sample_interval)
        self._registry = registry
        self._registered: dict[str, Any] = {
            metric.name: _register_metric(metric, prefix, registry) for metric in METRICS
        }
        self._children: dict[tuple[str, Labels], Any] = {}
        self._label_sets: dict[str, set[Labels]] = {}

    def count(self, metric: Metric, labels: Labels, amount: int) -> None:
        """Increase a counter by `amount`."""
        self._get_child(metric, labels).inc(amount)

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Add a value to a histogram."""
        self._get_child(metric, labels).observe(value)

    def gauge(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """Replace all values of a gauge."""
        for labels, value in values.items():
            self._get_child(metric, labels).set(value)
        # Remove afterwards: a scrape by another thread in between must not miss remaining values.
        for labels in self._label_sets.get(metric.name, set()) - values.keys():
            child = self._children.pop((metric.name, labels))
            if MULTIPROC not in os.environ:
                self._registered[metric.name].remove(*labels)
            else:
                # The files of several processes keep every value. A process without values of the
                # fleet reports NaN, because an old value would look true while another host reports
                # the current one.
                child.set(0.0 if values or metric not in FLEET_GAUGES else float("nan"))
        self._label_sets[metric.name] = set(values)

    def exposition(self) -> tuple[bytes, str]:
        """Return the content of the registry in Prometheus's format, and the content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _get_child(self, metric: Metric, labels: Labels) -> Any:
        """Return the series with these labels, cached because each event needs it."""
        child = self._children.get((metric.name, labels))
        if child is None:
            child = self._registered[metric.name].labels(*labels)
            self._children[metric.name, labels] = child
        return child


def _register_metric(metric: Metric, prefix: str, registry: CollectorRegistry) -> Any:
    """Create a metric of the right kind in the registry."""
    kinds: dict[Kind, Callable[..., Any]] = {
        Kind.COUNTER: Counter,
        Kind.HISTOGRAM: Histogram,
        Kind.GAUGE: Gauge,
    }
    options: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
    if metric in FLEET_GAUGES:
        # Of several processes on a host, the one that samples changes.
        options["multiprocess_mode"] = "mostrecent"
    return kinds[metric.kind](
        f"{prefix}_{metric.name}", metric.description, metric.labels, registry=registry, **options
    )


def create_private_metrics() -> SqlBrokerPrometheusMetrics:
    """Create metrics that only `/metrics` of their broker shows."""
    return SqlBrokerPrometheusMetrics(CollectorRegistry())

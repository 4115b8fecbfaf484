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

from faststream_sqlbroker.core.metrics import METRICS, OF_FLEET, Kind, Labels, Metric
from faststream_sqlbroker.core.times import Duration, positive_seconds

MULTIPROC = "PROMETHEUS_MULTIPROC_DIR"
"""The variable by which prometheus_client keeps the values of several processes in files."""


def exported_name(metric: Metric, prefix: str = "sqlbroker") -> str:
    """The name under which `metric` is scraped; a histogram adds `_bucket`, `_sum`, `_count`."""
    return f"{prefix}_{metric.name}{'_total' if metric.kind is Kind.COUNTER else ''}"


class SqlBrokerPrometheusMetrics:
    """Exports what only this broker knows: `SqlBroker(metrics=SqlBrokerPrometheusMetrics(…))`.

    docs/reference/metrics.md lists the metrics. Values are kept once a claim, once a write of
    outcomes and once a look: none costs anything for each message.
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
            registry: Where. Two brokers in one process need two prefixes or two registries.
            prefix: The first word of every name.
            sample_interval: Time between two looks at gauges: seconds, a timedelta or text like
                "15s". One process of the fleet then reads the queues.

        Raises:
            ValueError: the registry has metrics of these names already.
            SetupError: `sample_interval` is not a duration above 0.
        """
        self.sample_interval = positive_seconds("sample_interval", sample_interval)
        self._registry = registry
        self._registered: dict[str, Any] = {
            metric.name: _registered(metric, prefix, registry) for metric in METRICS
        }
        self._children: dict[tuple[str, Labels], Any] = {}
        self._known: dict[str, set[Labels]] = {}

    def count(self, metric: Metric, labels: Labels, amount: int) -> None:
        """A counter has grown by `amount`."""
        self._child(metric, labels).inc(amount)

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """A histogram has one more value."""
        self._child(metric, labels).observe(value)

    def gauge(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """A gauge has these values, and no others."""
        for labels, value in values.items():
            self._child(metric, labels).set(value)
        # Afterwards: a scrape by another thread in between must not miss what stays.
        for labels in self._known.get(metric.name, set()) - values.keys():
            child = self._children.pop((metric.name, labels))
            if MULTIPROC not in os.environ:
                self._registered[metric.name].remove(*labels)
            else:
                # Files of several processes forget no value. One that has none of the fleet's knows
                # no more: a frozen value would be taken for true, where another host tells them.
                child.set(0.0 if values or metric not in OF_FLEET else float("nan"))
        self._known[metric.name] = set(values)

    def exposition(self) -> tuple[bytes, str]:
        """All that is in the registry as Prometheus reads it, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _child(self, metric: Metric, labels: Labels) -> Any:
        child = self._children.get((metric.name, labels))
        if child is None:
            child = self._registered[metric.name].labels(*labels)
            self._children[metric.name, labels] = child
        return child


def _registered(metric: Metric, prefix: str, registry: CollectorRegistry) -> Any:
    kinds: dict[Kind, Callable[..., Any]] = {
        Kind.COUNTER: Counter,
        Kind.HISTOGRAM: Histogram,
        Kind.GAUGE: Gauge,
    }
    options: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
    if metric in OF_FLEET:
        # With several processes on a host: the one that looks changes.
        options["multiprocess_mode"] = "mostrecent"
    return kinds[metric.kind](
        f"{prefix}_{metric.name}", metric.meaning, metric.labels, registry=registry, **options
    )


def in_own_registry() -> SqlBrokerPrometheusMetrics:
    """Metrics that only `/metrics` of their broker shows."""
    return SqlBrokerPrometheusMetrics(CollectorRegistry())

"""The broker's own metrics in a meter of OpenTelemetry."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry.metrics import (
    CallbackOptions,
    Meter,
    MeterProvider,
    Observation,
    get_meter,
)

from faststream_sqlbroker.core.metrics import METRICS, Kind, Labels, Metric
from faststream_sqlbroker.core.times import Duration, parse_positive

UNITS = {"seconds": "s", "1 or 0": "1"}
"""The UCUM names of units; other units are exported as annotations, such as {messages}."""


def get_exported_name(metric: Metric) -> str:
    """Return the name of the instrument of `metric`."""
    return f"sqlbroker.{metric.name}"


class SqlBrokerTelemetryMetrics:
    """Exports the broker's own metrics: `SqlBroker(metrics=SqlBrokerTelemetryMetrics(…))`.

    The metrics are the same as those of `SqlBrokerPrometheusMetrics`; docs/reference/metrics.md
    lists them.
    """

    def __init__(
        self,
        *,
        meter_provider: MeterProvider | None = None,
        meter: Meter | None = None,
        sample_interval: Duration = 15.0,
    ) -> None:
        """Create the instruments.

        Args:
            meter_provider: Provider of the meter; default the global one.
            meter: A meter to use instead of a provider.
            sample_interval: Time between two samples of the gauges: seconds, a timedelta or text
                like "15s". Only one process of the fleet reads the queues for a sample.

        Raises:
            SetupError: `sample_interval` is not a duration greater than 0.
        """
        self.sample_interval = parse_positive("sample_interval", sample_interval)
        self._attributes: dict[tuple[str, Labels], dict[str, str]] = {}
        self._values: dict[str, Mapping[Labels, float]] = {}
        self._instruments: dict[str, Any] = {}
        resolved_meter = (
            get_meter("faststream_sqlbroker", "", meter_provider) if meter is None else meter
        )
        for metric in METRICS:
            self._make_instrument(metric, resolved_meter)

    def count(self, metric: Metric, labels: Labels, amount: int) -> None:
        """Increase a counter by `amount`."""
        self._instruments[metric.name].add(amount, self._get_attributes(metric, labels))

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Add a value to a histogram."""
        self._instruments[metric.name].record(value, self._get_attributes(metric, labels))

    def gauge(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """Replace all values of a gauge; the meter exports the values when the gauge is read."""
        # A single assignment, because the meter may read the values in another thread.
        self._values[metric.name] = dict(values)

    def _get_attributes(self, metric: Metric, labels: Labels) -> dict[str, str]:
        """Return the labels as a dict, cached because needed for each event."""
        attributes = self._attributes.get((metric.name, labels))
        if attributes is None:
            attributes = dict(zip(metric.labels, labels, strict=True))
            self._attributes[metric.name, labels] = attributes
        return attributes

    def _make_instrument(self, metric: Metric, meter: Meter) -> None:
        """Create and store the instrument of a metric."""
        name = get_exported_name(metric)
        unit = UNITS.get(metric.unit, f"{{{metric.unit}}}")
        match metric.kind:
            case Kind.COUNTER:
                instrument: Any = meter.create_counter(name, unit, metric.description)
            case Kind.HISTOGRAM:
                instrument = meter.create_histogram(
                    name,
                    unit,
                    metric.description,
                    explicit_bucket_boundaries_advisory=metric.buckets,
                )
            case Kind.GAUGE:
                instrument = meter.create_observable_gauge(
                    name, [self._make_gauge_callback(metric)], unit, metric.description
                )
        self._instruments[metric.name] = instrument

    def _make_gauge_callback(
        self, metric: Metric
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """Return the function that the meter calls to read the current values of a gauge."""

        def read_gauge(_options: CallbackOptions) -> Iterable[Observation]:
            values = self._values.get(metric.name, {})
            return [
                Observation(value, dict(zip(metric.labels, labels, strict=True)))
                for labels, value in values.items()
            ]

        return read_gauge

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
from faststream_sqlbroker.core.times import Duration, positive_seconds

UNITS = {"seconds": "s", "1 or 0": "1"}
"""The names of units in UCUM; the others are annotations, such as {messages}."""


def exported_name(metric: Metric) -> str:
    """The name of the instrument of `metric`."""
    return f"sqlbroker.{metric.name}"


class SqlBrokerTelemetryMetrics:
    """Exports what only this broker knows: `SqlBroker(metrics=SqlBrokerTelemetryMetrics(…))`.

    The metrics are those of `SqlBrokerPrometheusMetrics`; docs/reference/metrics.md lists them.
    """

    def __init__(
        self,
        *,
        meter_provider: MeterProvider | None = None,
        meter: Meter | None = None,
        sample_interval: Duration = 15.0,
    ) -> None:
        """Make the instruments.

        Args:
            meter_provider: Of the meter; default the global one.
            meter: A meter in its place.
            sample_interval: Time between two looks at gauges: seconds, a timedelta or text like
                "15s". One process of the fleet then reads the queues.

        Raises:
            SetupError: `sample_interval` is not a duration above 0.
        """
        self.sample_interval = positive_seconds("sample_interval", sample_interval)
        self._attributes: dict[tuple[str, Labels], dict[str, str]] = {}
        self._values: dict[str, Mapping[Labels, float]] = {}
        self._instruments: dict[str, Any] = {}
        made = get_meter("faststream_sqlbroker", "", meter_provider) if meter is None else meter
        for metric in METRICS:
            self._make(metric, made)

    def count(self, metric: Metric, labels: Labels, amount: int) -> None:
        """A counter has grown by `amount`."""
        self._instruments[metric.name].add(amount, self._attributes_of(metric, labels))

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """A histogram has one more value."""
        self._instruments[metric.name].record(value, self._attributes_of(metric, labels))

    def gauge(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """A gauge has these values, and no others; they are exported when the meter asks."""
        # One assignment: the meter may read it in another thread.
        self._values[metric.name] = dict(values)

    def _attributes_of(self, metric: Metric, labels: Labels) -> dict[str, str]:
        known = self._attributes.get((metric.name, labels))
        if known is None:
            known = dict(zip(metric.labels, labels, strict=True))
            self._attributes[metric.name, labels] = known
        return known

    def _make(self, metric: Metric, meter: Meter) -> None:
        name = exported_name(metric)
        unit = UNITS.get(metric.unit, f"{{{metric.unit}}}")
        match metric.kind:
            case Kind.COUNTER:
                made: Any = meter.create_counter(name, unit, metric.meaning)
            case Kind.HISTOGRAM:
                made = meter.create_histogram(
                    name, unit, metric.meaning, explicit_bucket_boundaries_advisory=metric.buckets
                )
            case Kind.GAUGE:
                made = meter.create_observable_gauge(
                    name, [self._reading(metric)], unit, metric.meaning
                )
        self._instruments[metric.name] = made

    def _reading(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_options: CallbackOptions) -> Iterable[Observation]:
            values = self._values.get(metric.name, {})
            return [
                Observation(value, dict(zip(metric.labels, labels, strict=True)))
                for labels, value in values.items()
            ]

        return read

"""Traces and metrics for OpenTelemetry: `pip install "sqlbroker[otel]"`.

`SqlBrokerTelemetryMiddleware` creates the spans of each publish and each run of a handler.
`SqlBrokerTelemetryMetrics` exports the metrics that only this broker has. They are independent of
each other.
"""

from faststream_sqlbroker.exceptions import MissingExtraError

try:
    from faststream_sqlbroker.opentelemetry.metrics import SqlBrokerTelemetryMetrics
    from faststream_sqlbroker.opentelemetry.middleware import SqlBrokerTelemetryMiddleware
except ImportError as error:
    if error.name is None or error.name.split(".")[0] != "opentelemetry":
        raise
    msg = f"{error.name!r} is not installed: pip install 'sqlbroker[otel]'"
    raise MissingExtraError(msg) from error

__all__ = ("SqlBrokerTelemetryMetrics", "SqlBrokerTelemetryMiddleware")

"""Metrics for Prometheus: `pip install "sqlbroker[prometheus]"`.

`SqlBrokerPrometheusMiddleware` exports FastStream's metrics of each message, as for every broker.
`SqlBrokerPrometheusMetrics` exports the metrics that only this broker has: waiting, claimed and
settled messages, leases, the pool. They are independent of each other.
"""

from faststream_sqlbroker.exceptions import MissingExtraError

try:
    from faststream_sqlbroker.prometheus.metrics import SqlBrokerPrometheusMetrics
    from faststream_sqlbroker.prometheus.middleware import SqlBrokerPrometheusMiddleware
except ImportError as error:
    if error.name is None or error.name.split(".")[0] != "prometheus_client":
        raise
    msg = f"{error.name!r} is not installed: pip install 'sqlbroker[prometheus]'"
    raise MissingExtraError(msg) from error

__all__ = ("SqlBrokerPrometheusMetrics", "SqlBrokerPrometheusMiddleware")

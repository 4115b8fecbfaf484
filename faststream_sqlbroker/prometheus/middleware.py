"""FastStream's metrics of each publish and each delivery, for this broker."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from faststream.prometheus import ConsumeAttrs, MetricsSettingsProvider, PrometheusMiddleware

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.response import SqlBrokerPublishCommand

if TYPE_CHECKING:
    from faststream.message import StreamMessage
    from prometheus_client import CollectorRegistry

SYSTEM = "sqlbroker"
"""The value of the label `broker`."""
Raw = ClaimedMessage | tuple[ClaimedMessage, ...]
"""The raw message of a subscriber: a row, or the rows of a batch."""


class SqlBrokerMetricsSettingsProvider(MetricsSettingsProvider[Any, SqlBrokerPublishCommand]):
    """Reads the attributes of a message or a batch; stateless, so a single instance is shared."""

    __slots__ = ()
    messaging_system = SYSTEM

    def get_publish_destination_name_from_cmd(self, cmd: SqlBrokerPublishCommand) -> str:
        """Return the queue."""
        return cmd.destination

    def get_consume_attrs_from_message(self, msg: "StreamMessage[Raw]") -> ConsumeAttrs:
        """Return the first message's queue, the total size of the bodies, and the count."""
        raw = msg.raw_message
        rows = raw if isinstance(raw, tuple) else (raw,)
        return {
            "destination_name": rows[0].queue,
            "message_size": sum([len(row.payload) for row in rows]),
            "messages_count": len(rows),
        }


_PROVIDER = SqlBrokerMetricsSettingsProvider()


class SqlBrokerPrometheusMiddleware(PrometheusMiddleware[Any, SqlBrokerPublishCommand]):
    """Counts and times each publish and each run of a handler: `SqlBroker(middlewares=[…])`."""

    def __init__(
        self,
        *,
        registry: "CollectorRegistry",
        app_name: str | None = None,
        metrics_prefix: str = "faststream",
        received_messages_size_buckets: Sequence[float] | None = None,
        custom_labels: dict[str, str | Callable[[Any], str]] | None = None,
    ) -> None:
        """Register FastStream's metrics; several middlewares may share a registry.

        Args:
            registry: The registry.
            app_name: The label `app_name`; default `metrics_prefix`.
            metrics_prefix: The first word of every name.
            received_messages_size_buckets: Upper bounds of the buckets, in bytes; default 16 B to
                16 MiB.
            custom_labels: Further labels: a value, or a function of the raw message (None for a
                publish).
        """
        super().__init__(
            settings_provider_factory=lambda _raw: _PROVIDER,
            registry=registry,
            app_name=metrics_prefix if app_name is None else app_name,
            metrics_prefix=metrics_prefix,
            received_messages_size_buckets=received_messages_size_buckets,
            custom_labels=custom_labels,
        )

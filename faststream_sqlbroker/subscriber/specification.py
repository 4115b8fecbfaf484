"""A subscriber in AsyncAPI documents."""

from faststream._internal.configs import BrokerConfig
from faststream._internal.endpoint.subscriber import SubscriberSpecification
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, SubscriberSpec

from faststream_sqlbroker.subscriber.config import QueueSubscriberSpecificationConfig


class QueueSubscriberSpecification(SubscriberSpecification[BrokerConfig, QueueSubscriberSpecificationConfig]):
    """One channel for each queue. AsyncAPI has no bindings for SQL."""

    @property
    def channel_labels(self) -> list[str]:
        """The queues, with the routers' prefix."""
        return [f"{self._outer_config.prefix}{queue}" for queue in self.config.queues]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """The channels by their keys."""
        payloads, labels = self.get_payloads(), self.channel_labels
        schema = {}
        for queue in labels:
            key = self._channel_key(queue, split=len(labels) > 1)
            schema[key] = SubscriberSpec(
                address=queue,
                description=self.description,
                operation=Operation(
                    message=Message(title=f"{key}:Message", payload=resolve_payloads(payloads)),
                    bindings=None,
                ),
                bindings=None,
            )
        return schema

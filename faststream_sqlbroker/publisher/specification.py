"""The AsyncAPI documentation of a publisher."""

from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, PublisherSpec

from faststream_sqlbroker.adapter.broker import BrokerConfig
from faststream_sqlbroker.adapter.endpoints import PublisherSpecification
from faststream_sqlbroker.publisher.config import QueuePublisherSpecificationConfig


class QueuePublisherSpecification(
    PublisherSpecification[BrokerConfig, QueuePublisherSpecificationConfig]
):
    """One channel for the queue. AsyncAPI has no bindings for SQL, so they stay empty."""

    @property
    def address(self) -> str:
        """The queue, with the routers' prefix."""
        return f"{self._outer_config.prefix}{self.config.queue}"

    @property
    def name(self) -> str:
        """The channel's key."""
        return self.config.title_ or f"{self.address}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        """The channel by its key."""
        return {
            self.name: PublisherSpec(
                address=self.address,
                description=self.config.description_,
                operation=Operation(
                    message=Message(
                        title=f"{self.name}:Message",
                        payload=resolve_payloads(self.get_payloads(), "Publisher"),
                    ),
                    bindings=None,
                ),
                bindings=None,
            )
        }

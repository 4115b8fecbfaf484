"""What a subscriber is given, and what AsyncAPI documents show of it."""

from dataclasses import dataclass
from typing import Any

from faststream import AckPolicy
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, SubscriberSpec
from typing_extensions import override

from faststream_sqlbroker.adapter.broker import BrokerConfig
from faststream_sqlbroker.adapter.endpoints import (
    SubscriberSpecification,
    SubscriberSpecificationConfig,
    SubscriberUsecaseConfig,
)
from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.core.routing import Destination, PipelineStep
from faststream_sqlbroker.payload_names import make_names_unique
from faststream_sqlbroker.subscriber.options import SubscriberSettings


@dataclass(kw_only=True)
class QueueSubscriberConfig(SubscriberUsecaseConfig):
    """A subscriber's checked settings; they can be read as attributes (`config.max_workers`, …)."""

    settings: SubscriberSettings

    @property
    def ack_policy(self) -> AckPolicy:
        """The subscriber's, else its router's or broker's, else NACK_ON_ERROR."""
        for policy in (self._ack_policy, self._outer_config.ack_policy):
            if policy is not EMPTY:
                return policy
        return AckPolicy.NACK_ON_ERROR

    def __getattr__(self, name: str) -> Any:
        """Settings by their names."""
        if name.startswith("_") or name == "settings":
            raise AttributeError(name)
        return getattr(self.settings, name)


@dataclass(kw_only=True)
class QueueSubscriberSpecificationConfig(SubscriberSpecificationConfig):
    """What a subscriber's documentation is made of."""

    queues: tuple[str, ...] = ()
    forward_to: str | Destination | None = None
    place: PipelineStep | None = None
    """The step of a pipeline that it is."""


class QueueSubscriberSpecification(
    SubscriberSpecification[BrokerConfig, QueueSubscriberSpecificationConfig]
):
    """One channel for each queue. AsyncAPI has no bindings for SQL."""

    @property
    def channel_labels(self) -> list[str]:
        """The queues, with the routers' prefix."""
        return [f"{self._outer_config.prefix}{queue}" for queue in self.config.queues]

    @property
    @override
    def call_name(self) -> str:
        """The handler's name; without one, the pipeline's."""
        if self.config.forward_to is None:
            return super().call_name
        return "Forward" if self.config.place is None else self.config.place.pipeline

    @property
    @override
    def description(self) -> str | None:
        """As given, else the handler's docstring; without one, where messages go."""
        given = super().description
        target = self.config.forward_to
        place = self.config.place
        if given is not None or target is None:
            return given
        if place is None:
            return f"Messages are moved to {self._shown(target)}, their bodies are not decoded."
        hops = " → ".join(map(self._shown, place.hops))
        return (
            f"Step {place.number} of {len(place.hops) - 1} of the service {place.pipeline}: "
            f"{hops}. Messages are moved on, their bodies are not decoded."
        )

    @override
    def get_payloads(self) -> "list[tuple[dict[str, Any], str]]":
        """What the handlers take; without one, anything."""
        payloads = super().get_payloads()
        if self.config.forward_to is not None:
            for payload, _ in payloads:
                payload["description"] = "Opaque: any bytes."
        return make_names_unique(payloads, self._outer_config)

    def _shown(self, target: str | Destination) -> str:
        if isinstance(target, Destination):
            return f"the queue in the header {target.value!r}"
        return f"{self._outer_config.prefix}{target}"

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """The channels by their keys."""
        payloads = self.get_payloads()
        labels = self.channel_labels
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

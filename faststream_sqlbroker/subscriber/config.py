"""Configuration of a subscriber, and its AsyncAPI documentation."""

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
    """A subscriber's validated settings, also readable as attributes (`config.max_workers`, …)."""

    settings: SubscriberSettings

    @property
    def ack_policy(self) -> AckPolicy:
        """The policy of the subscriber, else of the router or broker, else NACK_ON_ERROR."""
        for policy in (self._ack_policy, self._outer_config.ack_policy):
            if policy is not EMPTY:
                return policy
        return AckPolicy.NACK_ON_ERROR

    def __getattr__(self, name: str) -> Any:
        """Return the setting `name`."""
        if name.startswith("_") or name == "settings":
            raise AttributeError(name)
        return getattr(self.settings, name)


@dataclass(kw_only=True)
class QueueSubscriberSpecificationConfig(SubscriberSpecificationConfig):
    """The data of a subscriber's AsyncAPI documentation."""

    queues: tuple[str, ...] = ()
    forward_to: str | Destination | None = None
    pipeline_step: PipelineStep | None = None
    """The step of a pipeline that this subscriber runs."""


class QueueSubscriberSpecification(
    SubscriberSpecification[BrokerConfig, QueueSubscriberSpecificationConfig]
):
    """Documents each queue as a channel. AsyncAPI has no bindings for SQL."""

    @property
    def channel_labels(self) -> list[str]:
        """The queues, with the routers' prefix."""
        return [f"{self._outer_config.prefix}{queue}" for queue in self.config.queues]

    @property
    @override
    def call_name(self) -> str:
        """The name of the handler, or else of the pipeline."""
        if self.config.forward_to is None:
            return super().call_name
        return (
            "Forward" if self.config.pipeline_step is None else self.config.pipeline_step.pipeline
        )

    @property
    @override
    def description(self) -> str | None:
        """The configured description, else the handler's docstring, else the target of messages."""
        description = super().description
        target = self.config.forward_to
        step = self.config.pipeline_step
        if description is not None or target is None:
            return description
        if step is None:
            queue = self._format_target(target)
            return f"Moves messages to {queue} without decoding their bodies."
        hops = " → ".join(map(self._format_target, step.hops))
        return (
            f"Step {step.number} of {len(step.hops) - 1} of the service {step.pipeline}: {hops}. "
            "Moves messages without decoding their bodies."
        )

    @override
    def get_payloads(self) -> "list[tuple[dict[str, Any], str]]":
        """Return the schemas of the handlers' bodies; without a handler, a schema for any body."""
        payloads = super().get_payloads()
        if self.config.forward_to is not None:
            for payload, _ in payloads:
                payload["description"] = "Opaque: any bytes."
        return make_names_unique(payloads, self._outer_config)

    def _format_target(self, target: str | Destination) -> str:
        """Describe the queue that messages are moved to, with the routers' prefix."""
        if isinstance(target, Destination):
            return f"the queue named in the header {target.value!r}"
        return f"{self._outer_config.prefix}{target}"

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """Return the channels by key."""
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

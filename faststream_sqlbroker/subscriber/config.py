"""What a subscriber is given."""

from dataclasses import dataclass
from typing import Any

from faststream import AckPolicy

from faststream_sqlbroker.adapter.endpoints import (
    SubscriberSpecificationConfig,
    SubscriberUsecaseConfig,
)
from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.core.routing import Destination, PipelineStep
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

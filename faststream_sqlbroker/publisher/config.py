"""What a publisher is given."""

from dataclasses import dataclass, field
from typing import Any

from faststream._internal.configs import PublisherSpecificationConfig, PublisherUsecaseConfig


@dataclass(kw_only=True)
class QueuePublisherConfig(PublisherUsecaseConfig):
    """What `broker.publisher` was given; the queue without the routers' prefix."""

    queue: str = ""
    headers: dict[str, Any] = field(default_factory=dict)
    reply_to: str = ""
    batch: bool = False


@dataclass(kw_only=True)
class QueuePublisherSpecificationConfig(PublisherSpecificationConfig):
    """What a publisher's documentation is made of."""

    queue: str = ""

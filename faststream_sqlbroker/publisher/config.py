"""The configuration of a publisher."""

from dataclasses import dataclass, field
from typing import Any

from faststream_sqlbroker.adapter.endpoints import (
    PublisherSpecificationConfig,
    PublisherUsecaseConfig,
)


@dataclass(kw_only=True)
class QueuePublisherConfig(PublisherUsecaseConfig):
    """The arguments of `broker.publisher`; `queue` is without the routers' prefix."""

    queue: str = ""
    headers: dict[str, Any] = field(default_factory=dict)
    reply_to: str = ""
    batch: bool = False


@dataclass(kw_only=True)
class QueuePublisherSpecificationConfig(PublisherSpecificationConfig):
    """The data of a publisher's AsyncAPI documentation."""

    queue: str = ""

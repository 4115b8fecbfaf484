"""What operators have asked of the fleet; each process reads it with its signs of life."""

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """An operator wants this delivery to end."""

    message_id: int
    lease_token: UUID
    """Of the delivery: the request means no later one."""
    text: str
    """Who asks, and why: it becomes the message's error."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What is paused, what is to be cancelled, and which subscribers are drained."""

    paused: frozenset[str] = frozenset()
    """Names of queues."""
    cancels: tuple[CancelRequest, ...] = ()
    drained: frozenset[str] | None = frozenset()
    """Names of subscribers of this process that claim nothing; None: not asked."""

"""What operators have asked of the fleet; each process reads it with its signs of life.

A `Repair` says what came of an action on one message.
"""

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

Verdict = Literal["done", "requested", "running", "busy", "ended", "not_found"]

_TEXTS: dict[Verdict, str] = {
    "done": "done",
    "requested": "asked its subscriber to cancel it; a handler that ends first wins",
    "running": "not changed: a subscriber has leased it",
    "busy": "not changed: another transaction has locked it just now; try again",
    "ended": "not changed: it has ended, and is in the archive",
    "not_found": "not changed: there is no such message, live or archived",
}


@dataclass(frozen=True, slots=True)
class Repair:
    """Whether an operator's action changed a message; `str()` is for people."""

    message_id: int
    verdict: Verdict
    queue: str | None = None
    """Where the message was; None: it was not found, or is archived."""

    @property
    def done(self) -> bool:
        """Whether the message was changed now."""
        return self.verdict == "done"

    @property
    def requested(self) -> bool:
        """Whether a subscriber is asked to end it."""
        return self.verdict == "requested"

    @property
    def accepted(self) -> bool:
        """Whether it is done, or requested."""
        return self.done or self.requested

    def __str__(self) -> str:
        """The message and the verdict."""
        return f"message {self.message_id}: {_TEXTS[self.verdict]}"


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

"""What a test is told of: attempts, failures, what waits, what was published."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a handler on one message."""

    message_id: int
    queue: str
    attempt: int
    """1 for the first."""
    outcome: str
    """"ack", "nack", "reject", …: what the delivery ended in (see the glossary)."""
    error: BaseException | None
    """What the handler has raised."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that is neither finished nor being handled."""

    message_id: int
    queue: str
    until: datetime
    """When it is due; or when its lease ends, if something holds it."""
    attempts: int
    """How often a handler has run for it."""
    why: str
    """In words: what it waits for."""

    def __str__(self) -> str:
        """As failed assertions show it."""
        return f"message {self.message_id} in queue {self.queue!r} {self.why}"


@dataclass(frozen=True, slots=True)
class Drained:
    """What `drain` has found."""

    ran: list[Attempt]
    """Attempts since the last `drain`, in order."""
    waiting: list[Waiting]
    """By due time, priority, id."""

    @property
    def failed(self) -> list[Attempt]:
        """The attempts that raised."""
        return [attempt for attempt in self.ran if attempt.error is not None]


@dataclass(frozen=True, slots=True)
class Published:
    """A message as it was published."""

    id: int
    queue: str
    body: Any
    """Decoded by its content type; bytes if that is not possible."""
    payload: bytes
    """As it is stored."""
    headers: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    priority: int = 0
    dedup_id: str | None = None
    delay: float = 0.0
    """Seconds from its publish until it was due."""
    due_at: datetime | None = None
    expires_at: datetime | None = None
    correlation_id: str | None = None
    reply_to: str = ""

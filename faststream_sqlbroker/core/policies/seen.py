"""A claim's view of the queues, read in one statement, and the write that depends on its version.

Times are microseconds since 1970.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID


class Candidate(NamedTuple):
    """A due message."""

    id: int
    flags: int
    """Flags set by policies; see `core.policies.flags`."""
    expired: bool
    keyless: bool
    """True if the message has no key."""
    lost_leases: int
    """Deliveries that ended without an attempt."""


@dataclass(slots=True)
class QueueSnapshot:
    """A queue with due messages."""

    queue: str
    version: int | None
    """Increased by every claim of the queue; None if no claim under policies has run yet."""
    running: int
    """Leases of the queue, counted up to the requested number."""
    states: Mapping[str, Any]
    """Stored states of its throttles, by scope."""
    candidates: list[Candidate] = field(default_factory=list)
    """The first due messages, in the order of their starts."""


@dataclass(slots=True)
class QueueSnapshots:
    """Queues as read by a claim, all at the same time."""

    now: int
    """The database's time."""
    queues: dict[str, QueueSnapshot] = field(default_factory=dict)
    """The queues with due messages."""
    delays: list[float] = field(default_factory=list)
    """Seconds until further messages are due."""


@dataclass(frozen=True, slots=True)
class CompareAndSwap:
    """A write that succeeds only if the version of the queue is unchanged."""

    queue: str
    version: int
    ids: Sequence[int]
    """Ids of the messages to lease."""
    lease: float
    """Length of the leases in seconds."""
    token: UUID
    states: Mapping[str, tuple[Any, int]]
    """By scope, the state to store and the time after which it may be removed."""

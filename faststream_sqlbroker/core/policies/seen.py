"""What a claim has read of a queue in one statement, and what it writes if that still holds.

Times are microseconds since 1970.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID


class Candidate(NamedTuple):
    """A message that is due."""

    id: int
    marks: int
    """What policies have done with it: `flags`."""
    expired: bool
    keyless: bool
    """Whether it has no key."""
    lost: int
    """Its deliveries that ended without an attempt."""


@dataclass(slots=True)
class SeenQueue:
    """A queue with due messages."""

    queue: str
    version: int | None
    """Raised by every claim of the queue; None: no claim under policies has been here yet."""
    running: int
    """Its leases, counted up to the number that was asked for."""
    states: Mapping[str, Any]
    """What is stored of its throttles, by scope."""
    candidates: list[Candidate] = field(default_factory=list)
    """Its first due messages, in the order in which they are to start."""


@dataclass(slots=True)
class Seen:
    """Queues as a claim sees them, all at the same moment."""

    now: int
    """The database's time."""
    queues: dict[str, SeenQueue] = field(default_factory=dict)
    """Those with due messages."""
    waits: list[float] = field(default_factory=list)
    """In how many seconds something is due that is not due now."""


@dataclass(frozen=True, slots=True)
class Swap:
    """The write that follows if the version of the queue is still the same."""

    queue: str
    version: int
    ids: Sequence[int]
    """The messages to lease."""
    lease: float
    """Seconds."""
    token: UUID
    kept: Mapping[str, tuple[Any, int]]
    """By scope, what is to be stored, and when it may be forgotten."""

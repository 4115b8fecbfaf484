"""Who consumes, and what is paused, as operators see it. Times are the database's (aware, UTC)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

HOLDER_BYTES = 8
"""Bytes at the beginning of a lease token that name the subscriber which holds the lease."""


@dataclass(frozen=True, slots=True)
class PausedQueue:
    """A queue from which no process claims."""

    queue: str
    since: datetime
    until: datetime | None
    """When it ends by itself; None: when somebody resumes it."""
    by: str
    """Who paused it: the name given, else host and process id."""
    reason: str | None


@dataclass(frozen=True, slots=True)
class LiveSubscriber:
    """One subscriber of one process, as it told the database last."""

    worker: str
    """Host, process id and a random number: no other subscriber has this name."""
    queues: tuple[str, ...]
    since: datetime
    """When it was started."""
    lease_expires_at: datetime
    """Until when it counts as alive if it is not heard of again."""
    max_workers: int
    ordered: bool
    paused: bool
    """Whether `subscriber.pause()` was called in its process."""
    stopping: bool
    """Whether it drains: it does not claim any more."""
    policies: tuple[str, ...]

    @property
    def claims(self) -> bool:
        """Whether it takes messages, as far as its own process is concerned."""
        return not self.paused and not self.stopping

    @property
    def way(self) -> str:
        """What its queues promise by it, for people: equal where two subscribers go together."""
        given = [*(["ordered=True"] if self.ordered else []), *self.policies]
        return " and ".join(given) if given else "plain"

    def holds(self, lease_token: UUID | None) -> bool:
        """Whether a lease with this token was given to it."""
        return lease_token is not None and self.worker.endswith(
            f":{lease_token.bytes[:HOLDER_BYTES].hex()}"
        )


def by_way(queue: str, subscribers: Iterable[LiveSubscriber]) -> dict[str, list[LiveSubscriber]]:
    """Those of `queue` that do not drain, by what they promise: more than one way breaks the promises of each."""
    found: dict[str, list[LiveSubscriber]] = {}
    for subscriber in subscribers:
        if queue in subscriber.queues and not subscriber.stopping:
            found.setdefault(subscriber.way, []).append(subscriber)
    return found


def names_text(subscribers: Sequence[LiveSubscriber]) -> str:
    """The first of them by name, and how many others there are."""
    more = len(subscribers) - 1
    return subscribers[0].worker + (f" and {more} more" if more else "")


MIXED = (
    "what policies and ordered=True promise holds only while every subscriber of a queue has the same: give all of "
    "them the same, or let the change of the fleet end"
)


def worker_name(process: str, holder: bytes) -> str:
    """The name of the subscriber whose lease tokens begin with `holder`."""
    return f"{process[:200]}:{holder.hex()}"


def describe(settings: Any, *, paused: bool, stopping: bool) -> dict[str, Any]:
    """What a subscriber tells of itself, as JSON: `subscriber_of` reads it."""
    return {
        "queues": list(settings.queues),
        "max_workers": settings.max_workers,
        "ordered": settings.ordered,
        "paused": paused,
        "stopping": stopping,
        "policies": [str(policy) for policy in getattr(settings, "policies", ())],
    }


def subscriber_of(
    worker: str, info: Mapping[str, Any], since: datetime, lease_expires_at: datetime
) -> LiveSubscriber:
    """A subscriber as it described itself; what another version did not say is as by default."""
    return LiveSubscriber(
        worker,
        _texts(info.get("queues")),
        since,
        lease_expires_at,
        int(info.get("max_workers", 1)),
        bool(info.get("ordered")),
        bool(info.get("paused")),
        bool(info.get("stopping")),
        _texts(info.get("policies")),
    )


def _texts(value: Sequence[Any] | None) -> tuple[str, ...]:
    return tuple(str(item) for item in value or ())

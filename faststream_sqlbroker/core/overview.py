"""Overviews of queues, and of dead letters grouped by common properties.

Times are the database's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Literal

from faststream_sqlbroker.core.status import PausedQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterGroup:
    """FAILED messages with errors of the same type from the same place in the code.

    Messages without an error are grouped by their reason.
    """

    fingerprint: str | None
    """Pass this as `fingerprint` to `messages`, `redrive` or `replay`. None if the messages have no
    error, or ended before fingerprints were stored."""
    reasons: Mapping[str | None, int]
    """Number of messages by reason, the most frequent first."""
    queues: Mapping[str, int]
    """Number of messages by queue, the most frequent first."""
    first_at: datetime
    last_at: datetime
    last_hour: int
    """Number of messages archived in the last hour."""
    newest_id: int
    """Id of one of the messages archived last."""
    error: str | None = None
    """The last error of that message."""

    @property
    def count(self) -> int:
        """The number of messages."""
        return sum(self.queues.values())


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The groups of dead letters, the largest first."""

    groups: tuple[DeadLetterGroup, ...]
    scanned_until: datetime | None = None
    """If the search stopped after 20 000 messages, the time of the last one: older messages are not
    counted. None if all matching messages were counted."""

    @property
    def count(self) -> int:
        """The number of counted messages."""
        return sum(group.count for group in self.groups)


MIN_SIMILARITY = 0.75
"""Similarity of two names, of 1.0, from which one may be a misspelling of the other: "ordres" and
"orders" have 0.83."""

CountKind = Literal["exact", "about", "at least"]


@dataclass(frozen=True, slots=True)
class Count:
    """A counted or estimated number of messages; `str()` shows the difference."""

    value: int
    how: CountKind = "exact"
    """"about": the database's estimate, which may be wrong by a factor. "at least": the count
    stopped there."""

    @property
    def is_exact(self) -> bool:
        """True if the number is neither an estimate nor a lower limit."""
        return self.how == "exact"

    def __str__(self) -> str:
        """Return the number, with "about" before an estimate and "at least" before a limit."""
        return f"{self.value}" if self.is_exact else f"{self.how} {self.value}"

    def __add__(self, other: "Count") -> "Count":
        """Return the sum, exact if both are exact."""
        kind = other.how if self.is_exact or other.how == "about" else self.how
        return Count(self.value + other.value, kind)

    def share(self, part: int, of: int) -> int:
        """Return the share of this number for a ratio of `part` in `of`."""
        return round(self.value * part / of)


MAX_STANDBY_DELAY = 600.0
"""Seconds by which claims may be late to check standby messages, counted from the planned time of
the check, before that is a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOverview:
    """A snapshot of a queue. Messages are counted up to 1 000, and estimated above."""

    queue: str
    ready: Count
    """Due messages that wait for a subscriber."""
    delayed: Count
    """Messages that are not due yet, for their first attempt or another one."""
    in_flight: Count
    """Leased messages, running or waiting in a process for a worker."""
    retrying: Count
    """Messages of `ready`, `delayed` and `in_flight` whose last attempt failed."""
    oldest_due_age: float
    """Seconds since the oldest ready message became due; 0 without one."""
    in_per_minute: float
    """Messages created in the last minute that are, or ended, in this queue."""
    out_per_minute: float | None
    """Messages of this queue that ended in the last minute. None if there is no archive and the
    subscribers report no rates."""
    live_subscribers: int
    paused: PausedQueue | None
    used: bool
    """True if a message of the queue is live or archived."""
    standing: Count = Count(0)
    """Standby messages: a newer message of their key is delivered in their place (`Debounce`,
    `KeepLast`). They are neither ready nor delayed."""
    standing_overdue: float = 0.0
    """Seconds for which claims have not checked the standby messages although they were due to; 0
    if they have."""
    pulled: bool = False
    """True if the messages are taken over HTTP, by a pull consumer or with a token of the queue, so
    that the queue needs no subscriber."""
    failed_per_minute: float = 0.0
    """Messages of this queue that were archived as FAILED in the last minute."""
    suspects: Count = Count(0)
    """Messages of `ready` and `in_flight` that have lost their lease twice or more without an
    outcome: their process may have been killed, or its event loop blocked."""
    drained_subscribers: int = 0
    """Number of live subscribers that an operator has drained."""
    nearest: str | None = None
    """Name of another queue with a similar name, probably intended by those that publish to this
    queue without a subscriber, or subscribe to this queue without a message."""

    @property
    def waiting(self) -> int:
        """The number of ready and delayed messages."""
        return self.ready.value + self.delayed.value

    @property
    def _all_drained(self) -> bool:
        """True if messages are due, and every live subscriber is drained."""
        drained = self.drained_subscribers
        return bool(self.ready.value and drained and drained == self.live_subscribers)

    @property
    def has_messages(self) -> bool:
        """True if the queue has messages that have not ended."""
        return any(c.value for c in (self.ready, self.delayed, self.in_flight, self.standing))

    @property
    def late_standing(self) -> str | None:
        """The problem with standby messages as text, or None."""
        if self.standing_overdue < MAX_STANDBY_DELAY:
            return None
        seconds = f"{self.standing_overdue:.0f} s"
        return f"{self.standing} standby messages have not been checked for {seconds}"

    @property
    def lacks_subscriber(self) -> bool:
        """True if the queue has messages that need a subscriber, and no live subscriber."""
        return self.used and self.has_messages and not (self.live_subscribers or self.pulled)

    @property
    def is_unused(self) -> bool:
        """True if the queue has live subscribers and never had a message.

        That is no problem by itself: the queue may be new, or forward its messages.
        """
        return bool(self.live_subscribers) and not self.used

    @property
    def problem(self) -> str | None:
        """The problem of the queue as text, or None.

        It has no subscriber, all subscribers are drained while messages wait, or it never had a
        message while another queue has messages of a misspelt name.
        """
        if self._all_drained:
            return "every live subscriber is drained"
        hint = "" if self.nearest is None else f"; did you mean {self.nearest!r}?"
        if self.lacks_subscriber:
            return f"no live subscriber{hint}"
        return f"it has never had a message{hint}" if self.is_unused and hint else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCounts:
    """The jobs of a pull consumer by state, each counted up to 1 000."""

    queue: str
    queued: Count
    """Jobs that may be taken now."""
    delayed: Count
    """Jobs that may be taken later."""
    in_flight: Count
    delivered: Count | None
    """Jobs in the archive, as long as they are kept there; None if there is no archive."""
    dead: Count | None
    oldest_due_age: float
    """Seconds since the oldest queued job became due; 0 without one."""


def find_similar_name(name: str, candidates: Iterable[str]) -> str | None:
    """Return the name that is most similar to `name`, or None."""
    return next(iter(find_similar_names(name, candidates, 1)), None)


def find_similar_names(name: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """Return up to `limit` names that are similar to `name`, the most similar first."""
    return get_close_matches(
        name, [candidate for candidate in candidates if candidate != name], limit, MIN_SIMILARITY
    )


def format_name_hint(names: Sequence[str]) -> str:
    """Format the question whether a name of `names` was intended; empty without names."""
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""

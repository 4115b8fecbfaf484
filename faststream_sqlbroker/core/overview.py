"""What operators see of a queue, and of dead letters, grouped by what they have in common.

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
    """Messages that ended as FAILED with errors of one type from the same place in the code.

    Those without an error are grouped by their reason.
    """

    fingerprint: str | None
    """Give it as `fingerprint` to `messages`, `redrive` or `replay`; None: they have no error, or
    ended before the fingerprint was kept."""
    reasons: Mapping[str | None, int]
    """How many have each reason; the most frequent first."""
    queues: Mapping[str, int]
    """How many are of each queue; the most frequent first."""
    first_at: datetime
    last_at: datetime
    last_hour: int
    """How many were archived in the last hour."""
    newest_id: int
    """One of those that were archived last."""
    error: str | None = None
    """The last error of that one."""

    @property
    def count(self) -> int:
        """How many messages."""
        return sum(self.queues.values())


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The groups that were found, the largest first."""

    groups: tuple[DeadLetterGroup, ...]
    scanned_until: datetime | None = None
    """After 20 000 messages that were looked at, the time of the last one: older ones are not
    counted. None: all that match were."""

    @property
    def count(self) -> int:
        """How many messages were counted."""
        return sum(group.count for group in self.groups)


ALIKE = 0.75
"""How alike two names are, of 1.0, so that one may be a slip of the other: "ordres" and "orders"
are 0.83."""

How = Literal["exact", "about", "at least"]


@dataclass(frozen=True, slots=True)
class Count:
    """A number of messages, counted or estimated; `str()` says which."""

    value: int
    how: How = "exact"
    """"about": the database's estimate, which may be wrong by a factor. "at least": it was counted,
    and the count ended there."""

    @property
    def exact(self) -> bool:
        """Whether it is neither an estimate nor a limit."""
        return self.how == "exact"

    def __str__(self) -> str:
        """The number, with "about" before an estimate and "at least" before a limit."""
        return f"{self.value}" if self.exact else f"{self.how} {self.value}"

    def __add__(self, other: "Count") -> "Count":
        """The sum, exact if both are."""
        how = other.how if self.exact or other.how == "about" else self.how
        return Count(self.value + other.value, how)

    def share(self, part: int, of: int) -> int:
        """How many of these there are if `part` of every `of` is."""
        return round(self.value * part / of)


LATE_STANDING = 600.0
"""Seconds that claims may be late to look at what stands by, from the planned time of the look on,
before that is a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOverview:
    """One queue at one moment. Messages are counted up to 1 000, and estimated beyond."""

    queue: str
    ready: Count
    """Due messages that wait for a subscriber."""
    delayed: Count
    """Messages that are not due yet, for their first attempt or another one."""
    in_flight: Count
    """Leased messages: they run, or wait in a process for a worker."""
    retrying: Count
    """Those of `ready`, `delayed` and `in_flight` that had an attempt, which failed."""
    oldest_due_age: float
    """Seconds since the oldest ready message became due; 0 without one."""
    in_per_minute: float
    """Messages created in the last minute that are, or ended, in this queue."""
    out_per_minute: float | None
    """Messages of this queue that ended in the last minute; None: there is no archive, and its
    subscribers do not tell."""
    live_subscribers: int
    paused: PausedQueue | None
    used: bool
    """Whether a message of the queue is live or archived."""
    standing: Count = Count(0)
    """Messages that stand by for a newer one of their key, which is delivered in their place
    (`Debounce`, `KeepLast`). They are neither ready nor delayed."""
    standing_overdue: float = 0.0
    """Seconds for which claims have not looked at what stands by, though it was time to; 0 if they
    have."""
    pulled: bool = False
    """Whether its messages are taken over HTTP, by a pull consumer or with a token of the queue, so
    that it needs no subscriber."""
    failed_per_minute: float = 0.0
    """Messages of this queue that were archived as FAILED in the last minute."""
    suspects: Count = Count(0)
    """Those of `ready` and `in_flight` that have lost their lease twice or more, without an
    outcome: their process may have been killed, or its event loop blocked."""
    drained_subscribers: int = 0
    """How many of the live subscribers an operator has drained."""
    nearest: str | None = None
    """The name of another queue that is nearly the same, and may be meant by those that publish to
    this one without a subscriber, or that subscribe to this one without a message."""

    @property
    def waiting(self) -> int:
        """Ready and delayed messages together."""
        return self.ready.value + self.delayed.value

    @property
    def _all_drained(self) -> bool:
        """Whether messages are due, and every live subscriber is drained."""
        drained = self.drained_subscribers
        return bool(self.ready.value and drained and drained == self.live_subscribers)

    @property
    def has_messages(self) -> bool:
        """Whether it has messages that have not ended."""
        return any(c.value for c in (self.ready, self.delayed, self.in_flight, self.standing))

    @property
    def late_standing(self) -> str | None:
        """What is wrong with the messages that stand by, as text; or None."""
        if self.standing_overdue < LATE_STANDING:
            return None
        seconds = f"{self.standing_overdue:.0f} s"
        return f"{self.standing} messages stand by, and no claim has looked at them for {seconds}"

    @property
    def lacks_subscriber(self) -> bool:
        """Whether it has messages, which only a subscriber can take, and no live one."""
        return self.used and self.has_messages and not (self.live_subscribers or self.pulled)

    @property
    def is_unused(self) -> bool:
        """Whether it has live subscribers and never had a message.

        That is no problem by itself: it may be new, or forward what it gets.
        """
        return bool(self.live_subscribers) and not self.used

    @property
    def problem(self) -> str | None:
        """What is wrong, as text: it has no subscriber, all are drained while messages wait, or it
        never had a message where another queue has those of a misspelt name; or None.
        """
        if self._all_drained:
            return "every live subscriber is drained"
        meant = "" if self.nearest is None else f"; is {self.nearest!r} meant?"
        if self.lacks_subscriber:
            return f"no live subscriber{meant}"
        return f"it never had a message{meant}" if self.is_unused and meant else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCounts:
    """The jobs of one pull consumer by their states. Each is counted up to 1 000."""

    queue: str
    queued: Count
    """Jobs that may be taken now."""
    delayed: Count
    """Jobs that may be taken later."""
    in_flight: Count
    delivered: Count | None
    """Of the archive, so only as long as that keeps them; None: there is no archive."""
    dead: Count | None
    oldest_due_age: float
    """Seconds since the oldest queued job became due; 0 without one."""


def nearest_name(name: str, others: Iterable[str]) -> str | None:
    """That of `others` which is most like `name`; None if none is alike."""
    return next(iter(nearest_names(name, others, 1)), None)


def nearest_names(name: str, others: Iterable[str], most: int = 3) -> list[str]:
    """Return those of `others` that are like `name`, the most alike first."""
    return get_close_matches(name, [other for other in others if other != name], most, ALIKE)


def meant_text(names: Sequence[str]) -> str:
    """Ask whether one of `names` is meant; return an empty text without names."""
    return f"; is {' or '.join(map(repr, names))} meant?" if names else ""

"""Dead letters, grouped by what they have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


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

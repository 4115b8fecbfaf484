"""The activities of a process on the tables, and the rights that its database user lacks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class Activity(Enum):
    """Something a process does, with the rights that this needs; the value is the purpose."""

    PUBLISH = "to publish"
    MIRROR = "to publish with a lookup value"
    COUNT = "to enforce max_depth"
    CONSUME = "to claim messages and to write their outcomes"
    TAKE = "to pop and reserve"
    REQUEST = "to receive replies to its requests"
    ARCHIVE = "to archive finished messages"
    STATE = "for heartbeats, pauses, order, policies and starts"
    SCHEDULE = "for schedules"
    LOCK = "for locks"
    OPERATE = "for operators' commands"
    INSPECT = "to show headers and bodies"
    REPAIR = "to cancel, move and change messages"
    REDRIVE = "to redrive and replay archived messages"
    PRUNE = "to remove old messages from the archive"
    RELEASE = "to release a worker's messages"


Activities = frozenset[Activity]


@dataclass(frozen=True, slots=True)
class MissingRight:
    """A missing right or table."""

    subject: str
    """The right and its table, or the table."""
    fix: str
    """The SQL statement that fixes the problem."""
    activities: Activities
    """Activities that are impossible without the right."""
    is_table: bool = False
    """True if the table itself is missing, not a right."""
    every_publish: bool = False
    """True if no message at all can be published without the right."""

    def __str__(self) -> str:
        """Return a line with the missing right, the activities that need the right, and the fix."""
        purpose = " and ".join(sorted(activity.value for activity in self.activities))
        return f"{self.subject}, {purpose}: {self.fix}"


@dataclass(frozen=True, slots=True)
class Access:
    """The rights that a database user lacks."""

    user: str
    """Name of the user in a sentence."""
    missing: Sequence[MissingRight] = ()

    @property
    def missing_grants(self) -> list[MissingRight]:
        """The rights that an administrator must grant."""
        return [lack for lack in self.missing if not lack.is_table]

    def restrict_to(self, activities: Activities) -> "Access":
        """Return the result restricted to the needs of `activities`."""
        return Access(self.user, [lack for lack in self.missing if lack.activities & activities])

    @property
    def impossible_activities(self) -> Activities:
        """The activities that are impossible."""
        return frozenset[Activity]().union(*(lack.activities for lack in self.missing))

    def describe(self, missing: Iterable[MissingRight] | None = None) -> str:
        """List all missing rights, or the rights `missing`, a line for each right."""
        lines = "".join(f"\n  - {lack}" for lack in (self.missing if missing is None else missing))
        return f"{self.user} lacks rights or tables that this process needs:{lines}"

"""What a process does to the tables, and what its database user lacks for it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class Activity(Enum):
    """Something a process does, and with it the rights that it needs; the value says what for."""

    PUBLISH = "to publish"
    MIRROR = "to publish with a lookup value"
    COUNT = "to keep to max_depth"
    CONSUME = "to claim messages and to write their outcomes"
    TAKE = "to pop and reserve"
    REQUEST = "to take the replies to its requests"
    ARCHIVE = "to keep finished messages"
    STATE = "for signs of life, pauses, order, policies and starts"
    SCHEDULE = "for schedules"
    LOCK = "for locks"
    OPERATE = "for operators' commands"
    INSPECT = "to show headers and bodies"
    REPAIR = "to cancel, move and change messages"
    REDRIVE = "to bring archived messages back, and to replay them"
    PRUNE = "to remove old messages from the archive"
    RELEASE = "to give back a worker's messages"


Activities = frozenset[Activity]


@dataclass(frozen=True, slots=True)
class Lack:
    """One thing that is missing."""

    what: str
    """The right and its table, or the table."""
    cure: str
    """The statement that mends it."""
    activities: Activities
    """What cannot be done without it."""
    is_table: bool = False
    """Whether the table itself is missing, not a right."""
    every_publish: bool = False
    """Whether no message at all can be published without it."""

    def __str__(self) -> str:
        """One line: what is missing, what needs it, and the cure."""
        purpose = " and ".join(sorted(activity.value for activity in self.activities))
        return f"{self.what}, {purpose}: {self.cure}"


@dataclass(frozen=True, slots=True)
class Access:
    """Which of the rights asked about a database user lacks."""

    who: str
    """What to call the user in a sentence."""
    lacks: Sequence[Lack] = ()

    @property
    def denied(self) -> list[Lack]:
        """What an administrator must grant."""
        return [lack for lack in self.lacks if not lack.is_table]

    def of(self, activities: Activities) -> "Access":
        """Only what `activities` need."""
        return Access(self.who, [lack for lack in self.lacks if lack.activities & activities])

    @property
    def stopped(self) -> Activities:
        """What cannot be done."""
        return frozenset[Activity]().union(*(lack.activities for lack in self.lacks))

    def describe(self, lacks: Iterable[Lack] | None = None) -> str:
        """All that is missing, or these, in lines."""
        lines = "".join(f"\n  - {lack}" for lack in (self.lacks if lacks is None else lacks))
        return f"{self.who} lacks what this process needs:{lines}"

"""What `broker.admin.verify` finds: rows that contradict each other, or that cannot be."""

from collections.abc import Mapping
from dataclasses import dataclass

IN_BOTH = "in_both_tables"
TWICE = "archived_twice"
UNKNOWN_STATE = "unknown_state"
NO_LEASE = "processing_without_lease"
LEASE_LEFT = "lease_left_behind"
NO_OWNER = "lease_without_owner"
NO_ATTEMPT = "retry_without_attempt"
IN_FUTURE = "ended_in_future"
JOB_RESTS = "job_without_due_time"
DIFFERS = "window_differs"
BROUGHT_BACK = "window_brought_back"

MEANINGS: Mapping[str, str] = {
    IN_BOTH: "the message is live and in the archive at once",
    TWICE: "the archive has the message more than once",
    UNKNOWN_STATE: "no message of this table has that state",
    NO_LEASE: "it is PROCESSING, but has no lease, so nothing gives it back",
    LEASE_LEFT: "it has a lease, but is not PROCESSING",
    NO_OWNER: "its lease is over, neither its holder nor a transaction keeps it, and nothing has "
    "given it back",
    NO_ATTEMPT: "it is RETRYABLE, but had no attempt",
    IN_FUTURE: "it ended at a time that is not over, or at none",
    JOB_RESTS: "the job is running, but has no time for its next batch",
    DIFFERS: "the archive has other rows of the window than the export has recorded",
}
"""What each kind of damage means; docs/howto/operating.md says how to mend it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One row, or one window of an export, that is not as it must be. `str()` is for people."""

    kind: str
    """One of the kinds that docs/howto/operating.md lists."""
    message_id: int | None = None
    queue: str | None = None
    name: str | None = None
    """Of what is no message: the job's id, or the lake and the window."""
    found: str | None = None
    """What the row has, such as its state."""

    def __str__(self) -> str:
        """One line."""
        if self.message_id is None:
            who = f"{self.name}"
        else:
            who = f"message {self.message_id} of queue {self.queue!r}"
        found = "" if self.found is None else f" ({self.found})"
        return f"{self.kind}: {who}: {MEANINGS[self.kind]}{found}"


NOTES: Mapping[str, str] = {
    BROUGHT_BACK: "messages of the window were brought back to their queues, so the archive has "
    "fewer rows of it than the lake",
}
"""What each kind of note means: nothing is wrong, and nothing is to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What is no damage, but may surprise who compares. `str()` is for people."""

    kind: str
    """One of the kinds that docs/howto/operating.md lists."""
    name: str
    """The lake and the window."""
    found: str
    """What the window has."""

    def __str__(self) -> str:
        """One line."""
        return f"{self.kind}: {self.name}: {NOTES[self.kind]} ({self.found})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was looked at, and what is wrong there."""

    rows: int
    """Rows that were looked at: live and archived ones, jobs, and those of windows."""
    counts: Mapping[str, int]
    """How many of each kind of damage were found."""
    damages: tuple[Damage, ...]
    """The first of them, up to `limit`."""
    after: str | None
    """Give it as `after` to go on; None: all was looked at."""
    notes: tuple[Note, ...] = ()
    """What is no damage, up to `limit`."""

    @property
    def complete(self) -> bool:
        """Whether it came to the end of the tables."""
        return self.after is None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with what was looked at."""
        return not self.counts

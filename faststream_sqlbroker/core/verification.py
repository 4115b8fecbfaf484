"""Results of `broker.admin.verify`: rows that contradict each other, or that are impossible."""

from collections.abc import Mapping
from dataclasses import dataclass

IN_BOTH = "in_both_tables"
ARCHIVED_TWICE = "archived_twice"
UNKNOWN_STATE = "unknown_state"
NO_LEASE = "processing_without_lease"
LEFT_LEASE = "lease_left_behind"
NO_OWNER = "lease_without_owner"
NO_ATTEMPT = "retry_without_attempt"
IN_FUTURE = "ended_in_future"
JOB_WITHOUT_DUE_TIME = "job_without_due_time"
DIFFERS = "window_differs"
BROUGHT_BACK = "window_brought_back"

MEANINGS: Mapping[str, str] = {
    IN_BOTH: "the message is both live and in the archive",
    ARCHIVED_TWICE: "the archive has the message more than once",
    UNKNOWN_STATE: "the state is not valid in this table",
    NO_LEASE: "it is PROCESSING but has no lease, so it is never released",
    LEFT_LEASE: "it has a lease but is not PROCESSING",
    NO_OWNER: "its lease has expired, no holder or transaction keeps it, and it was not released",
    NO_ATTEMPT: "it is RETRYABLE but had no attempt",
    IN_FUTURE: "its end time is in the future, or missing",
    JOB_WITHOUT_DUE_TIME: "the job is running but has no time for its next batch",
    DIFFERS: "the archive's rows of the window differ from those that the export recorded",
}
"""The meanings of the kinds of damage; docs/howto/operating.md describes the repairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damaged row, or a damaged window of an export. `str()` is for people."""

    kind: str
    """A kind listed in docs/howto/operating.md."""
    message_id: int | None = None
    queue: str | None = None
    name: str | None = None
    """Name of something other than a message: the job's id, or the lake and the window."""
    found: str | None = None
    """The value found in the row, such as its state."""

    def __str__(self) -> str:
        """Return a single line for people."""
        if self.message_id is None:
            subject = f"{self.name}"
        else:
            subject = f"message {self.message_id} of queue {self.queue!r}"
        details = "" if self.found is None else f" ({self.found})"
        return f"{self.kind}: {subject}: {MEANINGS[self.kind]}{details}"


NOTES: Mapping[str, str] = {
    BROUGHT_BACK: "messages of the window were returned to their queues, so the archive has "
    "fewer rows of the window than the lake",
}
"""The meanings of the kinds of notes: nothing is wrong, and nothing has to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A harmless difference that may surprise when data is compared. `str()` is for people."""

    kind: str
    """A kind listed in docs/howto/operating.md."""
    name: str
    """The lake and the window."""
    found: str
    """The rows found in the window."""

    def __str__(self) -> str:
        """Return a single line for people."""
        return f"{self.kind}: {self.name}: {NOTES[self.kind]} ({self.found})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of a verification."""

    rows: int
    """Number of checked rows: live and archived ones, jobs, and those of windows."""
    counts: Mapping[str, int]
    """Number of damages by kind."""
    damages: tuple[Damage, ...]
    """The first damages, up to `limit`."""
    after: str | None
    """Pass this as `after` to continue; None if everything was checked."""
    notes: tuple[Note, ...] = ()
    """Notes, up to `limit`."""

    @property
    def complete(self) -> bool:
        """True if the end of the tables was reached."""
        return self.after is None

    @property
    def ok(self) -> bool:
        """True if no damage was found."""
        return not self.counts

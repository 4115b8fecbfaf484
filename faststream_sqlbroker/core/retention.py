"""Options and results of the removal of finished messages."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from faststream_sqlbroker.core.checks import validate_integer
from faststream_sqlbroker.core.loaded_windows import validate_lake
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

NO_ARCHIVE = "there is no archive to prune (message_archive_table_name=None)"
PRUNE_LOCK = "sqlbroker.retention"
"""Key of the lock of the process that removes old messages. The row of the lock shows the
retention."""
MIN_AGE = 1.0
"""Minimum age in seconds. A row must be committed, and every clock of a flush read, before its age
is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The time that finished messages stay in the archive: `SqlBroker(retention=Retention(...))`.

    Without a limit messages are kept for ever. Times count from the end of a message, by the
    database's clock.

    Args:
        completed: Age at which a COMPLETED message is removed: seconds, a timedelta or text like
            "30d" or "1d12h"; one second or more.
        failed: The same for FAILED messages, the dead letters.
        discarded: The same for DISCARDED messages.
        max_rows: Maximum number of rows, 1 or more; beyond it the oldest rows are removed,
            whatever their state.
        unless_loaded_by: Name of a lake. Then a message is removed only after an export with
            `record_as=` this name has verified it in the lake. Complete windows of the export (days
            or hours) are removed, and each is compared first: if the archive has other rows in it
            than were recorded, all of them stay, until an export has checked it again.
    """

    completed: Duration | None = None
    failed: Duration | None = None
    discarded: Duration | None = None
    max_rows: int | None = None
    unless_loaded_by: str | None = None

    def __post_init__(self) -> None:
        """Validate all values.

        Raises:
            SetupError: no limit is given, or a value is not allowed.
        """
        if not self.ages and self.max_rows is None:
            raise SetupError(
                "Retention() removes nothing: give completed=, failed=, discarded= or max_rows=, "
                "or omit retention"
            )
        if self.max_rows is not None:
            validate_integer("max_rows of Retention", self.max_rows, other=", or None")
        validate_lake("unless_loaded_by of Retention", self.unless_loaded_by)

    @property
    def ages(self) -> dict[MessageState, float]:
        """Seconds after which messages of a state are removed."""
        ages = {
            MessageState.COMPLETED: self.completed,
            MessageState.FAILED: self.failed,
            MessageState.DISCARDED: self.discarded,
        }
        return {
            state: parse_age(state.name.lower(), age)
            for state, age in ages.items()
            if age is not None
        }

    @property
    def as_json(self) -> dict[str, Any]:
        """The options as JSON values: ages in seconds."""
        ages = {state.name.lower(): seconds for state, seconds in self.ages.items()}
        lake = self.unless_loaded_by
        return {**ages, "max_rows": self.max_rows, "unless_loaded_by": lake}


def validate_retention(value: object) -> Retention | None:
    """Check and return the broker's option `retention`.

    Raises:
        SetupError: the value is not a Retention.
    """
    if value is not None and not isinstance(value, Retention):
        raise SetupError(
            'retention must be a Retention, such as Retention(completed="30d"), or None, got '
            f"{value!r}"
        )
    return value


def parse_age(name: str, age: Duration) -> float:
    """Return an age in seconds.

    Raises:
        SetupError: the age is invalid; the message begins with `name`.
    """
    seconds = parse_duration(age, name=name)
    if seconds < MIN_AGE:
        raise SetupError(f"{name} must be {MIN_AGE:.0f} second or more, got {age!r}")
    return seconds


@dataclass(slots=True)
class Pruned:
    """The rows removed from the archive, or counted by a dry run."""

    completed: int = 0
    failed: int = 0
    discarded: int = 0
    differing: list[str] = field(default_factory=list)
    """Windows of the lake in which the archive has other rows than were recorded: none of their
    rows is removed. Each window is reported once, by the pass that finds it."""

    partitions: list[str] = field(default_factory=list)
    """Partitions of the archive that were dropped; their rows are not counted."""

    @property
    def rows(self) -> int:
        """The total number of rows."""
        return self.completed + self.failed + self.discarded

    def add(self, state: MessageState, rows: int) -> None:
        """Add `rows` to the count of `state`."""
        name = state.name.lower()
        setattr(self, name, getattr(self, name) + rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSize:
    """The size and growth of the archive."""

    size: int
    """Bytes including indexes, as estimated by the server; with SQLite, the size of the file."""
    bytes_per_day: float
    """Bytes of the messages that were archived in the last 24 hours."""
    free: int | None
    """Free bytes for the archive; None if the server does not report them."""
    grows_for: timedelta | None
    """Time for which the archive grows until as much is removed as is added. None if nothing is
    known to remove rows (no broker runs with `retention=`, and there is no prune in the audit of
    the last days), or if `is_behind`."""
    is_whole: bool
    """True if its first messages are still there, except for those of a few days, or if
    `is_behind`."""
    is_behind: bool = False
    """True if the archive has COMPLETED messages that retention should have removed two days ago:
    it fails, waits for the export to a lake, or has only begun."""


@dataclass(frozen=True, slots=True)
class PrunePosition:
    """A position in the archive, in the order of (archived_at, id)."""

    at: datetime
    id: int


@dataclass(frozen=True, slots=True)
class PruneStep:
    """The result of a single transaction of a prune."""

    rows: int
    last: PrunePosition | None
    """The last row found; None if no rows remain."""

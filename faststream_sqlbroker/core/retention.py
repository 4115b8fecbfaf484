"""How long finished messages are kept."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.loaded_windows import checked_lake
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

NO_ARCHIVE = "there is no archive to remove from (message_archive_table_name=None)"
PRUNE_LOCK = "sqlbroker.retention"
"""The key of the lock of the process that removes old messages. Its row tells the retention."""
SHORTEST_AGE = 1.0
"""Seconds. A row must be committed, and every clock of a flush read, before its age is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long finished messages stay in the archive: `SqlBroker(retention=Retention(...))`.

    What is not given is kept for ever. Times count from the end of a message, by the database's
    clock.

    Args:
        completed: Age at which a COMPLETED message is removed: seconds, a timedelta or text like
            "30d" or "1d12h"; one second or more.
        failed: The same for FAILED messages, the dead letters.
        discarded: The same for DISCARDED messages.
        max_rows: Of more rows than that the oldest are removed, whatever their state; 1 or more.
        unless_loaded_by: Name of a lake. Then a message is removed only after an export with
            `record_as=` this name has verified it in the lake. Whole windows of the export (days
            or hours) are removed, and each is compared first: if the archive has other rows in it
            than were recorded, all of them stay, until an export has looked at it again.
    """

    completed: Duration | None = None
    failed: Duration | None = None
    discarded: Duration | None = None
    max_rows: int | None = None
    unless_loaded_by: str | None = None

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            SetupError: nothing is given, or a value is not allowed.
        """
        if not self.ages and self.max_rows is None:
            raise SetupError(
                "Retention() removes nothing: give completed=, failed=, discarded= or max_rows=, "
                "or leave retention out"
            )
        if self.max_rows is not None:
            whole_number("max_rows of Retention", self.max_rows, other=", or None")
        checked_lake("unless_loaded_by of Retention", self.unless_loaded_by)

    @property
    def ages(self) -> dict[MessageState, float]:
        """Seconds after which messages of a state are removed."""
        given = {
            MessageState.COMPLETED: self.completed,
            MessageState.FAILED: self.failed,
            MessageState.DISCARDED: self.discarded,
        }
        return {
            state: age_seconds(state.name.lower(), age)
            for state, age in given.items()
            if age is not None
        }

    @property
    def as_json(self) -> dict[str, Any]:
        """What was given, as JSON has it: ages in seconds."""
        ages = {state.name.lower(): seconds for state, seconds in self.ages.items()}
        lake = self.unless_loaded_by
        return {**ages, "max_rows": self.max_rows, "unless_loaded_by": lake}


def checked_retention(given: object) -> Retention | None:
    """`given`, an option of the broker.

    Raises:
        SetupError: it is no Retention.
    """
    if given is not None and not isinstance(given, Retention):
        raise SetupError(
            'retention must be a Retention, such as Retention(completed="30d"), or None, got '
            f"{given!r}"
        )
    return given


def age_seconds(name: str, age: Duration) -> float:
    """An age in seconds.

    Raises:
        SetupError: it is no valid age; the message begins with `name`.
    """
    seconds = parse_duration(age, name=name)
    if seconds < SHORTEST_AGE:
        raise SetupError(f"{name} must be {SHORTEST_AGE:.0f} second or more, got {age!r}")
    return seconds


@dataclass(slots=True)
class Pruned:
    """What was removed from the archive, or, of a dry run, would be."""

    completed: int = 0
    failed: int = 0
    discarded: int = 0
    differing: list[str] = field(default_factory=list)
    """Windows of the lake in which the archive has other rows than were recorded: nothing of them
    is removed. Each is told once, by the pass that finds it."""

    partitions: list[str] = field(default_factory=list)
    """Partitions of the archive that were dropped; their rows are in no count."""

    @property
    def rows(self) -> int:
        """All of them."""
        return self.completed + self.failed + self.discarded

    def add(self, state: MessageState, rows: int) -> None:
        """`rows` more of `state`."""
        name = state.name.lower()
        setattr(self, name, getattr(self, name) + rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSize:
    """How large the archive is, and how fast it grows."""

    size: int
    """Bytes with its indexes, as the server estimates them; of SQLite, those of the file."""
    bytes_per_day: float
    """What the messages take that were archived in the last 24 hours."""
    free: int | None
    """Bytes that are free for it; None: the server does not tell."""
    grows_for: timedelta | None
    """For how long it grows before as much is removed as comes; None: nothing is known to remove
    from it, as no broker runs with `retention=`, and no prune is in the audit of the last days; or
    `is_behind`."""
    is_whole: bool
    """Whether its first messages are still there, but for those of a few days; or `is_behind`."""
    is_behind: bool = False
    """Whether it has COMPLETED messages that retention should have removed two days ago: it fails,
    waits for the export to a lake, or has only begun."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the archive, in the order of (archived_at, id)."""

    at: datetime
    id: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one transaction has removed."""

    rows: int
    last: Place | None
    """The last row that it has found; None: there is none any more."""

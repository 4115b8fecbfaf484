"""Bulk actions of operators: each is a job that visits each matching message once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple

from faststream_sqlbroker.core.orders import format_command
from faststream_sqlbroker.core.states import ARCHIVED_STATES, CLAIMABLE_STATES, MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds

JobState = Literal["planned", "running", "stopped", "failed", "ended"]
Position = Sequence[Any]
"""Position of the last visited row: its id, or its archiving time and id."""

CANCEL = "cancel"
RETRY = "retry_now"
MOVE = "move"
REDRIVE = "redrive"
REPLAY = "replay"
UNDO = "undo"
MAX_UNMATCHED_NOTES = 5
"""Maximum number of requested ids for which a job notes why it does not take the message."""
MAX_FAILURES = 20
"""Maximum number of errors stored with a job; further failures are only counted."""
MIN_EQUAL_FAILURES = 20
"""Messages that must be refused with the same error before the job fails, for smaller batches, if
the job has so many."""
MIN_FAILURES = 2
"""A single refused message says nothing about the others."""
ARCHIVE_ACTIONS = frozenset({REDRIVE, REPLAY})
"""Actions on messages of the archive; all other actions change live messages."""
BULK_ACTIONS = frozenset({CANCEL, RETRY, MOVE, UNDO}) | ARCHIVE_ACTIONS


class Failure(NamedTuple):
    """A message that a job could not change."""

    message_id: int
    error: str
    """Error message of the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An operator's action: a bulk action, or a single action that has ended immediately."""

    id: str = ""
    """Ids sort by time; empty for a dry run."""
    action: str
    by: str
    filters: Filters | None = None
    """Filter of the messages; None for an action that names the messages it changes."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the action, such as the queue to move to."""
    rate: float | None = None
    """Maximum messages a second; None for no limit."""
    limit: int | None = None
    """Maximum number of messages to visit, the oldest first; None for all that match."""
    state: JobState = "planned"
    expected: int = 0
    """Exact number of messages that matched at the dry run."""
    queues: Mapping[str, int] = field(default_factory=dict)
    """The expected messages by queue."""
    done: int = 0
    skipped: int = 0
    """Messages that have changed since the dry run: leased, ended, or no longer matching. Messages
    that the job did not meet are counted at its end."""
    failed: int = 0
    """Messages that the database refused to change, for example because of its own constraint or
    trigger; the job continued after them."""
    failures: Sequence[Failure] = ()
    """The first 20 failures."""
    created_at: datetime | None = None
    ended_at: datetime | None = None
    undone_by: str | None = None
    """Id of the job that undoes this job."""
    note: str | None = None
    """Reason why the job can do less than requested."""
    error: str | None = None
    """With the state "failed": the error that has met a complete batch of messages; when resumed,
    the job continues with the first of these. While running: the error that delays the next try."""
    bound: Position | None = None
    """The last row that existed at the dry run, or the last row within the limit."""
    cursor: Position | None = None
    """The last visited row."""
    streak: Mapping[str, Any] | None = field(default=None, repr=False)
    """Kind of the error with which consecutive messages were refused, and the counts and position
    of the job before the first of these messages."""

    @property
    def remaining(self) -> int:
        """Number of messages that are not visited yet, as far as known."""
        return 0 if self.state == "ended" else max(0, self.expected - self.visited)

    @property
    def visited(self) -> int:
        """Number of messages that were met, changed or not."""
        return self.done + self.skipped + self.failed

    @property
    def is_bulk(self) -> bool:
        """True for a job that works through a filter, False for a single action."""
        return self.filters is not None or self.action == UNDO

    def note_unmatched(
        self,
        states: Mapping[int, MessageState],
        missing: Sequence[int],
        replayed: Collection[int],
    ) -> str:
        """Return a note with the reasons why the job does not take the messages `missing`.

        An operator has requested them by id, and sees the note with the result of the dry run.

        Args:
            states: States of the existing messages.
            missing: Requested ids that the job does not take.
            replayed: Ids of those that a replay of this name has published.
        """
        required_state = None if self.filters is None else self.filters.state
        accepted_states = ARCHIVED_STATES if self.action in ARCHIVE_ACTIONS else CLAIMABLE_STATES
        texts = []
        for message_id in missing[:MAX_UNMATCHED_NOTES]:
            state = states.get(message_id)
            is_right = (
                state in accepted_states if required_state is None else state is required_state
            )
            reason = (
                "it does not match the other filters"
                if is_right
                else format_command(message_id, state)
            )
            if message_id in replayed:
                reason = f"replay {self.arguments['name']} has already published it"
            texts.append(f"message {message_id}: {reason}")
        if len(missing) > MAX_UNMATCHED_NOTES:
            texts.append(f"and {len(missing) - MAX_UNMATCHED_NOTES} more")
        return "; ".join(texts)

    @property
    def can_be_undone(self) -> bool:
        """True for an ended or stopped bulk action that is neither an undo nor undone."""
        is_change = self.filters is not None and self.action in BULK_ACTIONS
        return is_change and self.undone_by is None and self.state != "running"

    def advance(self, cursor: Position | None, *, done: int, skipped: int) -> "Job":
        """Return the job after another batch; with `cursor` None the job has ended.

        `cursor` is the last visited row, from which the next batch continues. Messages that matched
        at the dry run but were never met, because they ended or moved, then count as skipped.
        """
        job = replace(self, cursor=cursor, done=self.done + done, skipped=self.skipped + skipped)
        if cursor is not None:
            return job
        unvisited = max(0, job.expected - job.visited)
        return replace(job, cursor=self.cursor, skipped=job.skipped + unvisited, state="ended")

    def failed_at(
        self, cursor: Position | None, failure: Failure, kind: str, batch_size: int
    ) -> "Job":
        """Return the job after the database has refused a message with an error of this kind.

        A refused message is counted, and the job goes on. A streak is a series of refusals with the
        same kind of error and no success in between. When it is as long as a batch, the cause is
        not a single message: the job fails, and its position and counts are those before the
        streak, so that a resumed job tries these messages again.
        """
        # Start a new streak after another kind of error, or after a success, which has raised
        # `done`.
        streak = self.streak
        if streak is None or (streak["kind"], streak["done"]) != (kind, self.done):
            counts = {"done": self.done, "skipped": self.skipped, "failed": self.failed}
            streak = {"kind": kind, **counts, "cursor": self.cursor}
        # Processes take turns, so the streak and all counts must be read from the job's row.
        unvisited = self.expected - streak["done"] - streak["skipped"] - streak["failed"]
        needed = max(
            min(batch_size, unvisited), min(MIN_EQUAL_FAILURES, self.expected), MIN_FAILURES
        )
        if self.failed + 1 - streak["failed"] >= needed:
            restored = replace(
                self, skipped=streak["skipped"], failed=streak["failed"], cursor=streak["cursor"]
            )
            failures = self.failures[: restored.failed]
            return replace(
                restored, failures=failures, streak=None, state="failed", error=failure.error
            )
        failures = (*self.failures, failure)[:MAX_FAILURES]
        counted = replace(self, failed=self.failed + 1, failures=failures, streak=streak)
        return counted.advance(cursor, done=0, skipped=0)

    def __str__(self) -> str:
        """Return a single line for people."""
        label = f"{self.action} {self.id}".strip()
        counts = f"{self.done} of {self.expected} done, {self.skipped} skipped"
        if self.failed:
            counts += f", {self.failed} failed: {self.failures[0].error}"
        counts += f"; {self.note}" if self.note else ""
        return f"{label}: {self.state}, {counts}" + (f"; {self.error}" if self.error else "")


def dump_job(job: Job) -> dict[str, Any]:
    """Convert a job to JSON for storage.

    The id and the creation time have columns of their own.
    """
    info: dict[str, Any] = to_json(job)
    del info["id"]
    del info["created_at"]
    # An older version does not know these fields, and can still read every job without them.
    if job.limit is None:
        del info["limit"]
    if job.filters is not None and not job.filters.ids:
        del info["filters"]["ids"]
    return info


def parse_job(job_id: str, created_at: datetime, info: Mapping[str, Any]) -> Job:
    """Read a job written by `dump_job`; values missing in older versions get defaults."""
    of_archive = info["action"] in ARCHIVE_ACTIONS
    filters = info["filters"]
    ended_at = info["ended_at"]
    streak = info.get("streak")
    values = {
        "failures": tuple(Failure(*failure) for failure in info.get("failures", ())),
        "filters": None if filters is None else _parse_filters(filters),
        "ended_at": None if ended_at is None else from_microseconds(ended_at),
        "bound": _parse_position(info["bound"], of_archive),
        "cursor": _parse_position(info["cursor"], of_archive),
        "streak": streak and {**streak, "cursor": _parse_position(streak["cursor"], of_archive)},
    }
    return Job(**{**info, **values}, id=job_id, created_at=created_at)


def to_json(value: Any) -> Any:
    """Convert a value to JSON: times become microseconds since 1970, states become names."""
    if isinstance(value, datetime):
        return to_microseconds(value)
    if isinstance(value, MessageState):
        return value.name
    if isinstance(value, Job | Filters):
        return {
            attribute.name: to_json(getattr(value, attribute.name)) for attribute in fields(value)
        }
    if isinstance(value, Mapping):
        return {name: to_json(item) for name, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, tuple | list) else value


def _parse_position(values: Sequence[Any] | None, of_archive: bool) -> Position | None:
    """Convert a stored position: a row's id, preceded by the archiving time in the archive.

    A position is that of the last visited row. JSON stores the time as microseconds.
    """
    if values is None or not of_archive:
        return values
    archived_at, *remaining = values
    return [from_microseconds(archived_at), *remaining]


def _parse_filters(info: Mapping[str, Any]) -> Filters:
    """Read the filters of a stored job; jobs of older versions have no `ids`."""
    state = info["state"]
    times = {
        name: None if info[name] is None else from_microseconds(info[name])
        for name in ("since", "until")
    }
    values = {**info, **times, "ids": tuple(info.get("ids", ()))}
    return Filters(**{**values, "state": None if state is None else MessageState[state]})


def get_error_kind(error: BaseException) -> str:
    """Return the type and the code of the driver's error.

    A bulk job fails if a whole batch is refused for one cause. Errors of one kind count as one
    cause, although their texts differ, for example by an id.
    """
    # The driver's error is inside of SQLAlchemy's, which is the cause of the broker's.
    driver_error: BaseException = error.__cause__ or error
    driver_error = getattr(driver_error, "orig", None) or driver_error
    code = getattr(driver_error, "sqlstate", None) or getattr(
        driver_error, "sqlite_errorcode", None
    )
    if code is None and driver_error.args and isinstance(driver_error.args[0], int):
        code = driver_error.args[0]
    return f"{type(driver_error).__name__} {code}"

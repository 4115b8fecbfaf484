"""Bulk actions of operators: each is a job that visits each matching message once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple

from faststream_sqlbroker.core.orders import command_for
from faststream_sqlbroker.core.states import ARCHIVED_STATES, CLAIMABLE_STATES, MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds

JobState = Literal["planned", "running", "stopped", "failed", "ended"]
Position = Sequence[Any]
"""The last row that a job has visited: its id, or when it was archived and its id."""

CANCEL = "cancel"
RETRY = "retry_now"
MOVE = "move"
REDRIVE = "redrive"
REPLAY = "replay"
UNDO = "undo"
MAX_NOTED = 5
"""Messages with the ids that were given, of which a job says why it does not take them."""
MOST_FAILURES = 20
"""Errors that are kept of a job; further failures are only counted."""
LEAST_ALIKE = 20
"""Messages that must be refused alike, for batches that are smaller, if the job has so many."""
FEWEST_ALIKE = 2
"""One message that is refused says nothing of the others."""
OF_ARCHIVE = frozenset({REDRIVE, REPLAY})
"""The actions on messages of the archive; the other ones change live messages."""
BULK = frozenset({CANCEL, RETRY, MOVE, UNDO}) | OF_ARCHIVE


class Failure(NamedTuple):
    """A message that a job could not change."""

    message_id: int
    error: str
    """What the database said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An operator's action: one on many messages, or a single one that has ended at once."""

    id: str = ""
    """Sorts by time; empty for a dry run."""
    action: str
    by: str
    filters: Filters | None = None
    """Which messages; None for an action that names what it changes."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the action, such as the queue to move to."""
    rate: float | None = None
    """Most messages a second; None: as fast as it goes."""
    limit: int | None = None
    """Most messages to visit, the oldest first; None: all that match."""
    state: JobState = "planned"
    expected: int = 0
    """Messages that matched at the dry run, counted exactly."""
    queues: Mapping[str, int] = field(default_factory=dict)
    """The same by queue."""
    done: int = 0
    skipped: int = 0
    """Messages that have changed since the dry run: leased, ended, or not matching any more. Those
    that the job did not meet are counted at its end."""
    failed: int = 0
    """Messages that the database refused to change, by a constraint or a trigger of its own, for
    example; the job went on behind them."""
    failures: Sequence[Failure] = ()
    """The first 20 of them."""
    created_at: datetime | None = None
    ended_at: datetime | None = None
    undone_by: str | None = None
    """The job that undoes this one."""
    note: str | None = None
    """Why it can do less than it was asked to."""
    error: str | None = None
    """With the state "failed": the error that has met a whole batch of messages; the job goes on
    from the first of them when it is resumed. While it is running: the error for which it rests."""
    bound: Position | None = None
    """The last row that was there at the dry run, or the last that it counted for a limit."""
    cursor: Position | None = None
    """The last row that was visited."""
    streak: Mapping[str, Any] | None = field(default=None, repr=False)
    """The kind of error with which messages are refused one behind the other, and the counts and
    the position of the job in front of the first of them."""

    @property
    def left(self) -> int:
        """Count the messages that are not visited yet, as far as is known."""
        return 0 if self.state == "ended" else max(0, self.expected - self.visited)

    @property
    def visited(self) -> int:
        """Count the messages that were met, changed or not."""
        return self.done + self.skipped + self.failed

    @property
    def is_bulk(self) -> bool:
        """Tell a job that works through a filter from a single action."""
        return self.filters is not None or self.action == UNDO

    def note_unmatched(
        self,
        states: Mapping[int, MessageState],
        missing: Sequence[int],
        replayed: Collection[int],
    ) -> str:
        """Say why the job does not take the messages `missing`, whose ids were given.

        Args:
            states: Of those that there are.
            missing: Ids.
            replayed: Those of them that a replay of this name has published.
        """
        wanted = None if self.filters is None else self.filters.state
        taken = ARCHIVED_STATES if self.action in OF_ARCHIVE else CLAIMABLE_STATES
        texts = []
        for each in missing[:MAX_NOTED]:
            state = states.get(each)
            is_right = state in taken if wanted is None else state is wanted
            why = "it does not match the other filters" if is_right else command_for(each, state)
            if each in replayed:
                why = f"it was replayed for {self.arguments['name']} before"
            texts.append(f"message {each}: {why}")
        if len(missing) > MAX_NOTED:
            texts.append(f"and {len(missing) - MAX_NOTED} more")
        return "; ".join(texts)

    @property
    def can_be_undone(self) -> bool:
        """Tell a bulk action that has ended or is stopped, and is neither an undo nor undone."""
        is_change = self.filters is not None and self.action in BULK
        return is_change and self.undone_by is None and self.state != "running"

    def moved(self, cursor: Position | None, *, done: int, skipped: int) -> "Job":
        """Count one more batch; after the last one, with `cursor` None, the job has ended."""
        moved = replace(self, cursor=cursor, done=self.done + done, skipped=self.skipped + skipped)
        if cursor is not None:
            return moved
        unmet = max(0, moved.expected - moved.visited)
        return replace(moved, cursor=self.cursor, skipped=moved.skipped + unmet, state="ended")

    def failed_at(
        self, cursor: Position | None, failure: Failure, kind: str, batch_size: int
    ) -> "Job":
        """Count a message that the database has refused with an error of this kind, as `moved`.

        If it has refused a whole batch alike, the error is the job's: it fails, and is in front of
        the first of these messages again.
        """
        s = self.streak
        if s is None or (s["kind"], s["done"]) != (kind, self.done):
            counts = {"done": self.done, "skipped": self.skipped, "failed": self.failed}
            s = {"kind": kind, **counts, "cursor": self.cursor}
        # Processes take turns, so the streak and all counts are those of the job's row.
        unvisited = self.expected - s["done"] - s["skipped"] - s["failed"]
        needed = max(min(batch_size, unvisited), min(LEAST_ALIKE, self.expected), FEWEST_ALIKE)
        if self.failed + 1 - s["failed"] >= needed:
            before = replace(self, skipped=s["skipped"], failed=s["failed"], cursor=s["cursor"])
            kept = self.failures[: before.failed]
            return replace(before, failures=kept, streak=None, state="failed", error=failure.error)
        kept = (*self.failures, failure)[:MOST_FAILURES]
        counted = replace(self, failed=self.failed + 1, failures=kept, streak=s)
        return counted.moved(cursor, done=0, skipped=0)

    def __str__(self) -> str:
        """One line for people."""
        what = f"{self.action} {self.id}".strip()
        counts = f"{self.done} of {self.expected} done, {self.skipped} skipped"
        if self.failed:
            counts += f", {self.failed} failed: {self.failures[0].error}"
        counts += f"; {self.note}" if self.note else ""
        return f"{what}: {self.state}, {counts}" + (f"; {self.error}" if self.error else "")


def job_info(job: Job) -> dict[str, Any]:
    """Dump `job` for its row, as JSON."""
    info: dict[str, Any] = plain(job)
    del info["id"]
    del info["created_at"]
    # A process of a version that does not know them reads every job without them.
    if job.limit is None:
        del info["limit"]
    if job.filters is not None and not job.filters.ids:
        del info["filters"]["ids"]
    return info


def job_of(job_id: str, created_at: datetime, info: Mapping[str, Any]) -> Job:
    """Read the job that `job_info` was made of."""
    of_archive = info["action"] in OF_ARCHIVE
    filters = info["filters"]
    ended_at = info["ended_at"]
    streak = info.get("streak")
    read = {
        "failures": tuple(Failure(*each) for each in info.get("failures", ())),
        "filters": None if filters is None else _filters_of(filters),
        "ended_at": None if ended_at is None else from_microseconds(ended_at),
        "bound": _position(info["bound"], of_archive),
        "cursor": _position(info["cursor"], of_archive),
        "streak": streak and {**streak, "cursor": _position(streak["cursor"], of_archive)},
    }
    return Job(**{**info, **read}, id=job_id, created_at=created_at)


def plain(value: Any) -> Any:
    """Turn a value into JSON: moments are microseconds since 1970, states are names."""
    if isinstance(value, datetime):
        return to_microseconds(value)
    if isinstance(value, MessageState):
        return value.name
    if isinstance(value, Job | Filters):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def _position(values: Sequence[Any] | None, of_archive: bool) -> Position | None:
    if values is None or not of_archive:
        return values
    at, *rest = values
    return [from_microseconds(at), *rest]


def _filters_of(info: Mapping[str, Any]) -> Filters:
    state = info["state"]
    moments = {
        name: None if info[name] is None else from_microseconds(info[name])
        for name in ("since", "until")
    }
    values = {**info, **moments, "ids": tuple(info.get("ids", ()))}
    return Filters(**{**values, "state": None if state is None else MessageState[state]})


def kind_of(error: BaseException) -> str:
    """Return the type and the code of the driver's error."""
    found: BaseException = error.__cause__ or error
    found = getattr(found, "orig", None) or found
    code = getattr(found, "sqlstate", None) or getattr(found, "sqlite_errorcode", None)
    if code is None and found.args and isinstance(found.args[0], int):
        code = found.args[0]
    return f"{type(found).__name__} {code}"

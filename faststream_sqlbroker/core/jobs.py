"""Bulk actions of operators: each is a job that visits each matching message once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple

from faststream_sqlbroker.core.states import MessageState
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
    """The last row that was there at the dry run."""
    cursor: Position | None = None
    """The last row that was visited."""

    @property
    def left(self) -> int:
        """How many messages are not visited yet, as far as is known."""
        return 0 if self.state == "ended" else max(0, self.expected - self.visited)

    @property
    def visited(self) -> int:
        """How many messages were met, whatever came of it."""
        return self.done + self.skipped + self.failed

    @property
    def is_bulk(self) -> bool:
        """Whether it works through a filter."""
        return self.filters is not None or self.action == UNDO

    def moved(self, cursor: Position | None, *, done: int, skipped: int) -> "Job":
        """After one more batch; `cursor` None: nothing is left, so it has ended."""
        moved = replace(self, cursor=cursor, done=self.done + done, skipped=self.skipped + skipped)
        if cursor is not None:
            return moved
        unmet = max(0, moved.expected - moved.visited)
        return replace(moved, cursor=self.cursor, skipped=moved.skipped + unmet, state="ended")

    def failed_at(self, cursor: Position | None, failure: Failure) -> "Job":
        """As `moved`, behind a message that the database has refused."""
        kept = (*self.failures, failure)[:MOST_FAILURES]
        counted = replace(self, failed=self.failed + 1, failures=kept)
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
    """What is stored of `job`, as JSON."""
    return {
        "action": job.action,
        "by": job.by,
        "filters": None if job.filters is None else _filters_info(job.filters),
        "arguments": dict(job.arguments),
        "rate": job.rate,
        "state": job.state,
        "expected": job.expected,
        "queues": dict(job.queues),
        "done": job.done,
        "skipped": job.skipped,
        "failed": job.failed,
        "failures": [list(each) for each in job.failures],
        "ended_at": None if job.ended_at is None else to_microseconds(job.ended_at),
        "undone_by": job.undone_by,
        "note": job.note,
        "error": job.error,
        "bound": None if job.bound is None else plain(job.bound),
        "cursor": None if job.cursor is None else plain(job.cursor),
    }


def job_of(job_id: str, created_at: datetime, info: Mapping[str, Any]) -> Job:
    """The job that `job_info` was made of."""
    fields = dict(info)
    filters = fields.pop("filters")
    ended_at = fields.pop("ended_at")
    failures = tuple(Failure(*each) for each in fields.pop("failures", ()))
    of_archive = fields["action"] in OF_ARCHIVE
    return Job(
        bound=_position(fields.pop("bound"), of_archive),
        cursor=_position(fields.pop("cursor"), of_archive),
        **fields,
        failures=failures,
        id=job_id,
        created_at=created_at,
        filters=None if filters is None else _filters_of(filters),
        ended_at=None if ended_at is None else from_microseconds(ended_at),
    )


def plain(values: Sequence[Any]) -> list[Any]:
    """The values as JSON has them: moments in microseconds since 1970."""
    return [to_microseconds(v) if isinstance(v, datetime) else v for v in values]


def _position(values: Sequence[Any] | None, of_archive: bool) -> Position | None:
    if values is None or not of_archive:
        return values
    at, *rest = values
    return [from_microseconds(at), *rest]


def _filters_info(filters: Filters) -> dict[str, Any]:
    return {
        "archived": filters.archived,
        "queue": filters.queue,
        "state": None if filters.state is None else filters.state.name,
        "key": filters.key,
        "error": filters.error,
        "reason": filters.reason,
        "fingerprint": filters.fingerprint,
        "headers": dict(filters.headers),
        **dict(zip(("since", "until"), plain([filters.since, filters.until]), strict=True)),
    }


def _filters_of(info: Mapping[str, Any]) -> Filters:
    fields = dict(info)
    for name in ("since", "until"):
        if fields[name] is not None:
            fields[name] = from_microseconds(fields[name])
    if fields["state"] is not None:
        fields["state"] = MessageState[fields["state"]]
    return Filters(**fields)


# An error that meets every message is told from one that a few messages cause.


@dataclass(slots=True)
class RefusedAlike:
    """Messages of one job, one behind the other, that the database refuses with the same error."""

    before: Job
    """The job as it was in front of the first of them."""
    kind: str
    """Which error, without what it says of a row."""
    needed: int
    """So many make it an error of the whole job."""

    def is_whole(self, job: Job) -> bool:
        """Whether it is one by now; `job` is in front of the last message that was refused."""
        # Other processes take turns, and count what they were refused in the same row. If one of
        # them has done some, the error does not meet all.
        refused = job.failed + 1 - self.before.failed
        return job.done == self.before.done and FEWEST_ALIKE <= self.needed <= refused

    def failed(self, job: Job, error: str) -> Job:
        """`job`, to be tried again from the first of these messages on, when it is resumed."""
        b = self.before
        counted = replace(job, done=b.done, skipped=b.skipped, failed=b.failed, failures=b.failures)
        return replace(counted, cursor=b.cursor, state="failed", error=error)


def refused_batch(job: Job, ids: Sequence[int], error: BaseException) -> RefusedAlike:
    """The first batch of them."""
    return RefusedAlike(job, kind_of(error), max(len(ids), min(LEAST_ALIKE, job.expected)))


def kind_of(error: BaseException) -> str:
    """The code that the driver's error has; its type if it has none."""
    found: BaseException = error.__cause__ or error
    found = getattr(found, "orig", None) or found
    code = getattr(found, "sqlstate", None) or getattr(found, "sqlite_errorcode", None)
    if code is None and found.args and isinstance(found.args[0], int):
        code = found.args[0]
    return f"{type(found).__name__} {code}"

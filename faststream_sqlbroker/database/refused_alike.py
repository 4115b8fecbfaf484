"""Tells an error that meets every message from one that a few messages cause."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from faststream_sqlbroker.core.jobs import Job

LEAST = 20
"""Messages that must be refused alike, for batches that are smaller, if the job has so many."""
FEWEST = 2
"""One message that is refused says nothing of the others."""


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
        return job.done == self.before.done and FEWEST <= self.needed <= refused

    def failed(self, job: Job, error: str) -> Job:
        """`job`, to be tried again from the first of these messages on, when it is resumed."""
        b = self.before
        counted = replace(job, done=b.done, skipped=b.skipped, failed=b.failed, failures=b.failures)
        return replace(counted, cursor=b.cursor, state="failed", error=error)


def refused_batch(job: Job, ids: Sequence[int], error: BaseException) -> RefusedAlike:
    """The first batch of them."""
    return RefusedAlike(job, kind_of(error), max(len(ids), min(LEAST, job.expected)))


def kind_of(error: BaseException) -> str:
    """The code that the driver's error has; its type if it has none."""
    found: BaseException = error.__cause__ or error
    found = getattr(found, "orig", None) or found
    code = getattr(found, "sqlstate", None) or getattr(found, "sqlite_errorcode", None)
    if code is None and found.args and isinstance(found.args[0], int):
        code = found.args[0]
    return f"{type(found).__name__} {code}"

"""What pull consumers ask for most often, each in one statement that commits by itself.

Each does what `database.pull` does in a transaction of several statements, or nothing; then that
transaction finds out why, or waits for a lock.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core import channels
from faststream_sqlbroker.core.channels import (
    JobsPage,
    JobState,
    PullJob,
    page_cursor,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.channels import place_of_consumer
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.postgresql.answers import read_claimed
from faststream_sqlbroker.database.query import Query


class QuickJobs:
    """Statements for jobs of pull consumers."""

    def __init__(self, dialect: Operations) -> None:
        self._sql = dialect.sql

    def first(self, queue: str, limit: int, *, gone: bool) -> Query[JobsPage]:
        """The first page of the jobs that are due, with up to `limit` jobs; with `gone`, also those
        that have expired long ago.
        """

        def read(rows: Iterable[Sequence[Any]]) -> JobsPage:
            found = list(rows)
            overdue = bool(found[0][6])
            rows_of_jobs = [row for row in found if row[0] is not None]
            page = [row for row in rows_of_jobs[:limit] if row[5] is not None]
            following = None
            if len(page) < len(rows_of_jobs):
                last, priority, due = page[-1][:3]
                following = page_cursor(priority, due, last)
            expired = [row[0] for row in rows_of_jobs if row[7]]
            jobs = [_job(row) for row in page if not row[7]]
            return JobsPage(jobs, following, overdue, expired)

        most = {"limit": limit + 1, "bytes": channels.PAGE_BYTES}
        binds = {"queue": queue, **most, "gone": int(gone), "one": 1}
        return Query(self._sql["first_jobs"], binds, read)

    def take(
        self, queue: str, job_id: int, lease: float, token: UUID
    ) -> Query[ClaimedMessage | None]:
        """Lease the job for `lease` seconds. None: it is not queued, due and free, the queue is
        paused, or no pull consumer's.
        """

        def read(rows: Iterable[Sequence[Any]]) -> ClaimedMessage | None:
            found = read_claimed(rows, token)
            return found[0] if found else None

        scope, key = place_of_consumer(*queue.split("/", 1))
        of_consumer = {"queue": queue, "channel": scope, "consumer": key}
        binds = {**of_consumer, "job": job_id, "lease": lease, "token": token, "one": 1}
        return Query(self._sql["take_job"], binds, read)

    def deliver(self, queue: str, job_id: int, token: UUID | None) -> Query[Settlement | None]:
        """End the job as done, under the lease `token` if the consumer says which. None: it is not
        in flight, its time is over, or it has another lease.
        """

        def read(rows: Iterable[Sequence[Any]]) -> Settlement | None:
            ends = [
                Settlement(found, held, MessageState.COMPLETED, ended_after=age)
                for found, held, age in rows
            ]
            return ends[0] if ends else None

        binds = {"queue": queue, "job": job_id, "token": token, "one": 1}
        return Query(self._sql["deliver_job"], binds, read)


def _job(row: Sequence[Any]) -> PullJob:
    return PullJob(
        id=row[0],
        state=JobState.QUEUED,
        priority=row[1],
        deliveries=row[3],
        headers=load_headers(row[4]),
        payload=load_payload(row[5]),
    )

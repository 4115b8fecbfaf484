"""The most frequent requests of pull consumers, each in a single statement in autocommit.

Each does what `database.pull` does in a transaction of several statements, or nothing; then that
transaction finds the reason, or waits for a lock.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core import channels
from faststream_sqlbroker.core.channels import (
    JobsPage,
    PullJob,
    PullJobState,
    build_page_cursor,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.channel_rows import get_consumer_key
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.postgresql.results import read_claimed
from faststream_sqlbroker.database.query import Query


class SingleStatementJobs:
    """Single statements for jobs of pull consumers."""

    def __init__(self, dialect: DialectOperations) -> None:
        self._sql = dialect.sql

    def build_first_page(self, queue: str, limit: int, *, include_expired: bool) -> Query[JobsPage]:
        """Build the read of the first page of due jobs, with up to `limit` jobs.

        With `include_expired`, the page includes jobs that expired long ago.
        """

        def read_rows(rows: Iterable[Sequence[Any]]) -> JobsPage:
            """Build the page; a row without a body is beyond the page's limit of bytes.

            `overdue`, which each row repeats, says that leases have expired. An expired job is
            listed apart, for the caller to end.
            """
            result = list(rows)
            overdue = bool(result[0][6])
            job_rows = [row for row in result if row[0] is not None]
            page = [row for row in job_rows[:limit] if row[5] is not None]
            cursor = None
            if len(page) < len(job_rows):
                last_id, priority, due = page[-1][:3]
                cursor = build_page_cursor(priority, due, last_id)
            expired = [row[0] for row in job_rows if row[7]]
            jobs = [_to_pull_job(row) for row in page if not row[7]]
            return JobsPage(jobs, cursor, overdue, expired)

        limits = {"limit": limit + 1, "bytes": channels.PAGE_BYTES}
        binds = {"queue": queue, **limits, "gone": int(include_expired), "one": 1}
        return Query(self._sql["first_jobs"], binds, read_rows)

    def build_claim(
        self, queue: str, job_id: int, lease: float, token: UUID
    ) -> Query[ClaimedMessage | None]:
        """Build a lease of the job for `lease` seconds.

        The result is None if the job is not queued, due and free, or if the queue is paused or is
        not that of a pull consumer.
        """

        def read_rows(rows: Iterable[Sequence[Any]]) -> ClaimedMessage | None:
            messages = read_claimed(rows, token)
            return messages[0] if messages else None

        scope, key = get_consumer_key(*queue.split("/", 1))
        of_consumer = {"queue": queue, "channel": scope, "consumer": key}
        # `one` makes the server plan the statement anew each time.
        binds = {**of_consumer, "job": job_id, "lease": lease, "token": token, "one": 1}
        return Query(self._sql["take_job"], binds, read_rows)

    def build_deliver(
        self, queue: str, job_id: int, token: UUID | None
    ) -> Query[Settlement | None]:
        """Build the successful end of the job, under the lease `token` if not None.

        The result is None if the job is not in flight, its time is over, or it has another lease.
        """

        def read_rows(rows: Iterable[Sequence[Any]]) -> Settlement | None:
            ends = [
                Settlement(found_id, held_token, MessageState.COMPLETED, ended_after=lease_age)
                for found_id, held_token, lease_age in rows
            ]
            return ends[0] if ends else None

        # `one` makes the server plan the statement anew each time.
        binds = {"queue": queue, "job": job_id, "token": token, "one": 1}
        return Query(self._sql["deliver_job"], binds, read_rows)


def _to_pull_job(row: Sequence[Any]) -> PullJob:
    """Convert a row of `first_jobs`: a job that waits for a consumer."""
    return PullJob(
        id=row[0],
        state=PullJobState.QUEUED,
        priority=row[1],
        deliveries=row[3],
        headers=load_headers(row[4]),
        payload=load_payload(row[5]),
    )

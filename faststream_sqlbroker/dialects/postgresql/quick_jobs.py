"""What pull consumers ask for most often, each in one statement that commits by itself.

Each does what `dialects.pull_jobs` does in a transaction of several statements, or nothing; then
that transaction finds out why, or waits for a lock.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, Float, Integer, String, Uuid, bindparam

from faststream_sqlbroker.core.channels import JobState, PullJob
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.dialects import pull_pages
from faststream_sqlbroker.dialects.channels import place_of
from faststream_sqlbroker.dialects.claimed_rows import load_payload
from faststream_sqlbroker.dialects.operations import Operations
from faststream_sqlbroker.dialects.postgresql.answers import read_claimed
from faststream_sqlbroker.dialects.postgresql.sql import ANEW_GUARD, KEEP_ACKED, LEASED
from faststream_sqlbroker.dialects.postgresql.statements import kept_columns
from faststream_sqlbroker.dialects.pull_pages import JobsPage
from faststream_sqlbroker.dialects.query import Query

_CLAIMABLE = "m.state IN ('PENDING', 'RETRYABLE')"
_LIVES = "coalesce(m.expires_at > statement_timestamp(), true)"
_LONG_AGO = f"statement_timestamp() - interval '{pull_pages.LONG_AGO} seconds'"
_OPEN = """NOT EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = 'paused' AND s.key = :queue
      AND (s.expires_at IS NULL OR s.expires_at > statement_timestamp()))"""
_FIRST = f"""
WITH RECURSIVE p(priority) AS (
  SELECT (SELECT m.priority FROM {{message}} m
    WHERE m.queue = :queue AND {_CLAIMABLE}
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  WHERE {ANEW_GUARD} AND {_OPEN}
  UNION ALL
  SELECT (SELECT m.priority FROM {{message}} m
    WHERE m.queue = :queue AND m.priority < p.priority AND {_CLAIMABLE}
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
), d AS MATERIALIZED (
  SELECT x.* FROM p CROSS JOIN LATERAL (
    SELECT m.id, m.priority, m.next_attempt_at, m.deliveries_count, m.headers, m.payload,
      NOT {_LIVES} AS gone
    FROM {{message}} m
    WHERE m.queue = :queue AND m.priority = p.priority AND {_CLAIMABLE}
    AND m.next_attempt_at <= statement_timestamp()
    AND ({_LIVES} OR :gone = 1 AND m.expires_at <= {_LONG_AGO})
    ORDER BY m.next_attempt_at, m.id LIMIT :limit) x
  LIMIT :limit
), s AS (
  SELECT d.*, sum(octet_length(d.payload)) OVER place AS size, row_number() OVER place AS number
  FROM d WINDOW place AS (ORDER BY d.priority DESC, d.next_attempt_at, d.id)
)
SELECT s.id, s.priority, s.next_attempt_at, s.deliveries_count, s.headers::text,
  CASE WHEN s.number = 1 OR s.size <= :bytes THEN s.payload END,
  coalesce((SELECT m.lease_expires_at <= statement_timestamp() FROM {{message}} m
    WHERE m.queue = :queue AND m.state = 'PROCESSING'
    ORDER BY m.lease_expires_at LIMIT 1), false), s.gone
FROM (SELECT 1) AS at_least_one_row LEFT JOIN s ON true
ORDER BY s.number
"""
"""Priorities are walked lazily until `limit` jobs are found. No page reads bodies that it does not
show: of a large body only its length is known before."""
_PULLED = """EXISTS (SELECT 1 FROM {policy_state} s
    WHERE s.scope = :channel AND s.key = :consumer AND s.info ->> 'type' = 'pull')"""
# Trap: without fresh statistics the planner takes another index than that of ids, and reads all
# rows of a deep queue. No index serves a CASE.
_TAKE = f"""
UPDATE {{message}} m
SET {LEASED}
WHERE m.id = :job AND {ANEW_GUARD} AND CASE WHEN m.queue = :queue AND {_CLAIMABLE}
    AND m.next_attempt_at <= statement_timestamp()
    AND {_LIVES}
    AND {_OPEN}
    AND {_PULLED}
    THEN true ELSE false END
RETURNING {{columns}}
"""
_DELIVER = (
    """
WITH d AS (
  DELETE FROM {message} m
  WHERE m.id = :job AND {guard} AND CASE WHEN m.queue = :queue AND m.state = 'PROCESSING'
    AND m.lease_expires_at > statement_timestamp()
    AND m.lease_token = coalesce(:token, m.lease_token) THEN true ELSE false END
  RETURNING {of_message}, m.lease_token, greatest(m.acquired_at, statement_timestamp()) AS ended_at
), """
    + KEEP_ACKED
    + "SELECT d.id, d.lease_token, extract(epoch FROM d.ended_at - d.acquired_at)::float8 FROM d\n"
)


class QuickJobs:
    """Statements for jobs of pull consumers."""

    def __init__(self, dialect: Operations, claimed_columns: str) -> None:
        """Add them to `dialect`; `claimed_columns` are those of a claim."""
        self._sql = dialect.sql
        of_queue = bindparam("queue", type_=String)
        anew = bindparam("one", type_=Integer)
        sizes = bindparam("limit", type_=Integer), bindparam("bytes", type_=BigInteger)
        gone = bindparam("gone", type_=Integer)
        dialect.add_statement("first_jobs", _FIRST, of_queue, *sizes, gone, anew)
        one = of_queue, bindparam("job", type_=BigInteger), bindparam("token", type_=Uuid())
        lease = bindparam("lease", type_=Float(53))
        claiming = {"columns": claimed_columns}
        consumer = [bindparam(name, type_=String) for name in ("channel", "consumer")]
        dialect.add_statement("take_job", _TAKE, *one, *consumer, lease, anew, **claiming)
        ending = {**kept_columns(dialect.names), "guard": ANEW_GUARD}
        dialect.add_statement("deliver_job", _DELIVER, *one, anew, **ending)

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
                following = pull_pages.cursor(priority, due, last)
            expired = [row[0] for row in rows_of_jobs if row[7]]
            jobs = [_job(row) for row in page if not row[7]]
            return JobsPage(jobs, following, overdue, expired)

        most = {"limit": limit + 1, "bytes": pull_pages.PAGE_BYTES}
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

        scope, key = place_of(queue)
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

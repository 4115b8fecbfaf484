"""Operations on all messages that match a filter, and the audit."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

from faststream_sqlbroker.admin.filters import (
    check_limit,
    clean_optional_text,
    get_operator_name,
    parse_filters,
    validate_filter_text,
)
from faststream_sqlbroker.admin.operations import AdminOperations
from faststream_sqlbroker.core.bulk_jobs import (
    ARCHIVE_ACTIONS,
    BULK_ACTIONS,
    CANCEL,
    MOVE,
    REDRIVE,
    REPLAY,
    RETRY,
    UNDO,
    Job,
)
from faststream_sqlbroker.core.checks import (
    check_bool,
    is_number,
    validate_integer,
    validate_name,
    validate_queue,
)
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import format_value, is_storable
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.database.bulk.store import get_activities
from faststream_sqlbroker.exceptions import RightsError, SetupError

MAX_POLL_INTERVAL = 1.0
"""Maximum seconds between two polls of a job that another process may be running."""
MIN_POLL_INTERVAL = 0.05
"""Minimum seconds between two polls, while another process has locked the job."""
MIN_RATE = 1e-5
"""Minimum rate in messages a second: about one a day."""
MAX_RATE = 1e9
"""Maximum rate in messages a second; no database is as fast."""
REDRIVABLE_STATES = frozenset({MessageState.FAILED.name, MessageState.DISCARDED.name})
"""States of messages that can be redriven."""


class MessageFilters(TypedDict, total=False):
    """Filters of messages; all given filters must match."""

    ids: Sequence[int | str]
    """Only messages with these ids, 1 to 1 000, each as for `cancel`. The job's `note` says why it
    skips some of them."""
    queue: str
    """The full name, with the prefix of its router."""
    key: str
    """The complete key."""
    error: str
    """A part of the last error."""
    headers: Mapping[str, str]
    """Headers whose value is this text."""
    since: Duration | datetime
    """Created (archived, in the archive) at this time or later, or how long ago."""
    until: Duration | datetime
    """Created (archived) before this time."""


class ArchivedMessageFilters(MessageFilters, total=False):
    """Filters of archived messages; all given filters must match."""

    reason: str
    """The complete reason why the message ended."""
    fingerprint: str
    """Fingerprint of the error, as `dead_letters` shows it."""


class BulkOptions(TypedDict, total=False):
    """Options of a bulk action."""

    rate: float | None
    """Maximum messages a second; default None: as fast as possible."""
    limit: int | None
    """Maximum messages of the job, the oldest first: by id, in the archive by archiving time. The
    job ends when it has visited so many, and never passes the last message counted by the dry run;
    default None: all matching messages.
    """
    dry_run: bool
    """Only count; the default."""
    wait: bool
    """Return when the job has ended or was stopped, which is the default; else when it is stored.

    """
    by: str | None
    """Operator's name, as text; default user and host."""


BULK_DEFAULTS: Any = {"rate": None, "limit": None, "dry_run": True, "wait": True, "by": None}
"""Defaults of `BulkOptions`."""


class LiveBulkOptions(MessageFilters, BulkOptions, total=False):
    """Options of a bulk action on waiting messages."""


class ArchivedBulkOptions(ArchivedMessageFilters, BulkOptions, total=False):
    """Options of a bulk action on archived messages."""


class JobOperations(AdminOperations):
    """Bulk actions: each is a job, which visits each message once.

    Without `dry_run=False` a bulk action only counts, exactly, and returns a job in the state
    "planned"; `run_job` runs the job, up to the last message at the time of the dry run. Messages
    that are published or archived later are not visited. A message that was running then, or was in
    another queue, is visited if it waits and matches when the job reaches it, so more messages may
    be changed than were counted.

    A batch of messages, the job's position and its counts are one transaction. So a job survives
    its process: another process continues it, within about a minute, if it has a subscriber and the
    rights. Messages that are leased, locked or no longer match are not changed, and counted as
    skipped. A message that the database refuses to change, for example because of your own
    constraint, is counted as failed, with its error in `failures`, and the job continues.

    Options: `rate`, `limit`, `dry_run`, `wait`, `by`. Filters: `ids`; `queue`, `key`, `error`,
    `headers`, `since` and `until` as for `messages`, and for archived messages `reason` and
    `fingerprint`.
    """

    async def bulk_cancel(
        self, *, reason: str | None = None, **options: Unpack[LiveBulkOptions]
    ) -> Job:
        """End all waiting messages that match, as `cancel` does.

        Args:
            reason: Written to `last_error` of each message.
            options: `BulkOptions`, and the filter; without a filter all waiting messages.

        Raises:
            SetupError: an argument is not valid.
        """
        cleaned_reason = clean_optional_text("reason", reason)
        message = f"cancelled by {get_operator_name(options.get('by'))}" + (
            f": {cleaned_reason}" if cleaned_reason else ""
        )
        return await self._run_bulk(CANCEL, {"text": message}, options)

    async def bulk_retry(self, **options: Unpack[LiveBulkOptions]) -> Job:
        """Make all waiting messages that match due now, as `retry_now` does.

        Messages that stand by under `Debounce` or `KeepLast` are skipped.

        Args:
            options: `BulkOptions`, and the filter; without a filter all waiting messages.

        Raises:
            SetupError: an argument is not valid.
        """
        return await self._run_bulk(RETRY, {}, options)

    async def bulk_move(self, to: str, **options: Unpack[LiveBulkOptions]) -> Job:
        """Move all waiting messages that match to the queue `to`, as `move` does.

        Args:
            to: Full name of the target queue.
            options: `BulkOptions`, and the filter; without a filter all waiting messages.

        Raises:
            SetupError: an argument is not valid.
        """
        return await self._run_bulk(MOVE, {"to": validate_queue(to)}, options)

    async def redrive(
        self,
        *,
        state: MessageState | str = MessageState.FAILED,
        to: str | None = None,
        **options: Unpack[ArchivedBulkOptions],
    ) -> Job:
        """Move archived messages back to their queues, under their ids and due now.

        Attempts and deliveries restart at 0, and `publish_count` is one higher. `dedup_id` and the
        expiry are removed. The row leaves the archive in the same transaction. With policy `Once`
        a key whose handler has failed stays claimed, so that such a message fails again.

        Args:
            state: FAILED or DISCARDED.
            to: Another queue for all messages.
            options: `BulkOptions`, and the filter.

        Raises:
            SetupError: an argument is not valid, or there is no archive.
        """
        arguments = {} if to is None else {"to": validate_queue(to)}
        if getattr(state, "name", str(state).upper()) not in REDRIVABLE_STATES:
            raise SetupError(
                f"redrive needs the state FAILED or DISCARDED, got state={format_value(state)}: "
                "use replay to publish COMPLETED messages again, under new ids"
            )
        return await self._run_bulk(
            REDRIVE, arguments, {**options, "state": state, "archived": True}
        )

    async def replay(
        self,
        name: str,
        *,
        state: MessageState | str | None = None,
        to: str | None = None,
        **options: Unpack[ArchivedBulkOptions],
    ) -> Job:
        """Publish archived messages again as new messages, each once for `name`.

        `origin_id` and the header `replay-of` are the row's id, the header `replay-job` is the
        name, and `publish_count` is one higher. Key, priority, body and other headers are the
        row's. The row stays. The marks are the same as of `faststream_sqlbroker.spark.replay`, for
        30 days: whichever of both is used, a row is published once for a name.

        Args:
            name: Name of the replay, 1 to 255 characters.
            state: COMPLETED, FAILED or DISCARDED; None for all of them.
            to: Another queue for all messages.
            options: `BulkOptions`, and the filter.

        Raises:
            SetupError: an argument is not valid, or there is no archive.
        """
        validate_name(name, "the name of a replay")
        arguments = {"name": name} | ({} if to is None else {"to": validate_queue(to)})
        return await self._run_bulk(
            REPLAY, arguments, {**options, "state": state, "archived": True}
        )

    async def run_job(self, job: Job, *, wait: bool = True) -> Job:
        """Run a planned job, up to the last message at the time of the dry run.

        Args:
            job: The result of a dry run.
            wait: Return when the job has ended or was stopped; else when it is stored.

        Raises:
            SetupError: `job` is not planned.
            RightsError: this process lacks the rights, and `wait` is set.
        """
        if job.state != "planned":
            raise SetupError(f"job must be the result of a dry run, got {job}")
        if wait:
            await self._check_rights(job.action)
        started_job = await self._writable_store.jobs.start(job, self._hooks.channel)
        return await self.wait_for_job(started_job.id) if wait else started_job

    async def undo(self, job_id: str, *, wait: bool = True, by: str | None = None) -> Job:
        """Undo a job's changes to messages that have not changed since.

        A message has not changed if it still waits in the queue where the job has put it, with the
        same due time, priority and key, and was not delivered. Other messages are skipped.
        Cancelled messages wait again, redriven messages are in the archive again, with the current
        time as `archived_at` (the header `archived-before` keeps the first), and copies of a replay
        are deleted. A `dedup_id` that the job has removed stays removed. A job can be undone for
        30 days after it.

        Args:
            job_id: Id of a job that has ended or is stopped; the job cannot be resumed then.
            wait: Return when the undo has ended or was stopped; else when it is stored.
            by: Operator's name, as text; default user and host.

        Returns:
            The undo, which is a job, too.

        Raises:
            SetupError: there is no such job, or it cannot be undone.
            RightsError: this process lacks the rights, and `wait` is set.
        """
        if wait:
            await self._check_rights(UNDO)
        undo_job = await self._writable_store.jobs.start_undo(
            _validate_job_id(job_id), get_operator_name(by), self._hooks.channel
        )
        if undo_job is None:
            job = await self._require_job(job_id)
            raise SetupError(
                f"cannot undo {job}: it must be a bulk action that has ended or is stopped, and "
                "neither an undo nor already undone"
            )
        return await self.wait_for_job(undo_job.id) if wait else undo_job

    async def wait_for_job(
        self, job_id: str, *, progress: Callable[[Job], object] = lambda _job: None
    ) -> Job:
        """Work on a job until the job has ended or is stopped; other processes may take part.

        Args:
            job_id: Id of the job.
            progress: Called with the current job after each batch.

        Raises:
            SetupError: there is no such job.
        """
        await self._require_job(job_id)
        while True:
            step = await self._writable_store.jobs.run_step(job_id)
            # Wake this process's fetch loops: the batch may have made messages of these queues due.
            # A needless wake-up costs one poll.
            if step.job is not None:
                self._hooks.on_due(_get_due_queues(step.job))
                progress(step.job)
            # None: the job has ended or is stopped. Else wait for its rate, or for another process.
            if step.pause is None:
                return await self._require_job(job_id)
            await asyncio.sleep(min(MAX_POLL_INTERVAL, max(step.pause, MIN_POLL_INTERVAL)))

    async def stop_job(self, job_id: str, *, by: str | None = None) -> Job:
        """Stop a job after the running batch, until `resume_job`; completed batches stay.

        Args:
            job_id: Id of the job.
            by: Operator's name for the `audit`; default user and host.

        Raises:
            SetupError: there is no such job, or `by` is not text.
        """
        job = await self._writable_store.jobs.stop(_validate_job_id(job_id), get_operator_name(by))
        return job if job is not None else await self._require_job(job_id)

    async def resume_job(self, job_id: str, *, wait: bool = True, by: str | None = None) -> Job:
        """Resume a job that was stopped or has failed, after the last completed message.

        Args:
            job_id: Id of the job.
            wait: Return when the job has ended or was stopped; else when it may continue.
            by: Operator's name for the `audit`; default user and host.

        Raises:
            SetupError: there is no such job, or `by` is not text.
        """
        await self._writable_store.jobs.resume(_validate_job_id(job_id), get_operator_name(by))
        return await self.wait_for_job(job_id) if wait else await self._require_job(job_id)

    async def job(self, job_id: str) -> Job | None:
        """Return a job; None if there is none with that id, or the job is older than a year.

        Raises:
            SetupError: `job_id` is not text.
        """
        return await self._store.jobs.find(_validate_job_id(job_id))

    async def audit(
        self, *, bulk: bool = False, limit: int = 100, before: str | None = None
    ) -> list[Job]:
        """List the actions of operators, the newest first: who, when, how many messages, which
        filter.

        Actions are kept for a year, in rows of `message_policy_state` with the scope "job".

        Args:
            bulk: Only jobs of bulk actions, of the newest 1 000 actions.
            limit: Maximum number of actions; 1 or more.
            before: Only actions before the one with this id.

        Raises:
            ValueError: `limit` is less than 1.
        """
        check_limit(limit)
        validate_filter_text("before", before)
        jobs = await self._store.jobs.list_jobs(before, max(limit, 1_000) if bulk else limit)
        return [job for job in jobs if not bulk or (job.action in BULK_ACTIONS and job.is_bulk)][
            :limit
        ]

    async def _run_bulk(
        self, action: str, arguments: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Job:
        """Plan a job for the matching messages, and run the job unless `dry_run` is set.

        All bulk actions end here. Planning counts the messages and notes the last one, up to which
        the job then runs.

        Args:
            action: Name of the action.
            arguments: Arguments of the action, such as the target queue; stored with the job.
            options: `BulkOptions` and the filters.
        """
        filter_options = dict(options)
        settings = {
            name: filter_options.pop(name, default) for name, default in BULK_DEFAULTS.items()
        }
        check_bool("dry_run", settings["dry_run"])
        filters = parse_filters(has_archive=self._store.messages.has_archive, **filter_options)
        if filters.archived and action not in ARCHIVE_ACTIONS:
            raise SetupError(
                f"{action} changes only waiting messages, got {_format_filters(filter_options)}: "
                "use redrive or replay for archived messages"
            )
        rate = _validate_rate(settings["rate"])
        limit = None if settings["limit"] is None else validate_integer("limit", settings["limit"])
        by = get_operator_name(settings["by"])
        job = Job(
            action=action, by=by, filters=filters, arguments=arguments, rate=rate, limit=limit
        )
        await self._check_ids(filter_options.get("ids") or ())
        planned_job = await self._writable_store.jobs.plan(job)
        if settings["dry_run"]:
            return planned_job
        return await self.run_job(planned_job, wait=settings["wait"])

    async def _check_rights(self, action: str) -> None:
        """Check this process's rights for an action, before the job is stored.

        Without this check the caller would get an error, and another process would still run the
        stored job.
        """
        access = await self._store.access.find_missing_rights(get_activities(action))
        if access.missing:
            raise RightsError(access.describe())

    async def _require_job(self, job_id: str) -> Job:
        """Return the job with this id, or raise SetupError if there is none."""
        job = await self._store.jobs.find(_validate_job_id(job_id))
        if job is None:
            raise SetupError(
                f"job {format_value(job_id)} does not exist: broker.admin.audit() lists the jobs"
            )
        return job


def _get_due_queues(job: Job) -> list[str]:
    """Return the queues in which the job may have made messages due.

    With an argument `to` the job moves all its messages to that queue; otherwise each message is in
    its own queue.
    """
    to = job.arguments.get("to")
    return list(job.queues) if to is None else [str(to)]


def _format_filters(filter_options: Mapping[str, Any]) -> str:
    """Format the filters by which a job selects archived messages, for an error.

    Other filters apply to live messages, too.
    """
    return ", ".join(
        f"{name}={filter_options[name]!r}"
        for name in ("state", "archived")
        if name in filter_options
    )


def _validate_job_id(value: str) -> str:
    """Return a text that may be the id of a job; other values never reach the database."""
    if not isinstance(value, str) or not is_storable(value):
        raise SetupError(f"job_id must be the id of a job, as text, got {format_value(value)}")
    return value


def _validate_rate(rate: float | None) -> float | None:
    """Return the rate in messages a second; None has no limit."""
    if rate is None:
        return None
    if not is_number(rate) or not MIN_RATE <= rate <= MAX_RATE:
        raise SetupError(
            f"rate must be a number of messages a second, from {MIN_RATE} to {MAX_RATE:.0f}, got "
            f"{format_value(rate)}"
        )
    return float(rate)

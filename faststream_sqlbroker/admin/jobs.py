"""Actions on all messages that match a filter, and the audit."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

from faststream_sqlbroker.admin.arguments import (
    check_limit,
    filter_text,
    filters_of,
    operator_name,
    text_or_none,
)
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.checks import checked_name, checked_queue, flag, whole_number
from faststream_sqlbroker.core.jobs import (
    BULK,
    CANCEL,
    MOVE,
    OF_ARCHIVE,
    REDRIVE,
    REPLAY,
    RETRY,
    UNDO,
    Job,
)
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import short, storable
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.database.bulk.store import activities_of
from faststream_sqlbroker.exceptions import RightsError, SetupError

LONGEST_LOOK = 1.0
"""Most seconds between two looks at a job that another process may be at."""
SHORTEST_LOOK = 0.05
"""Seconds: what another process has locked is not asked for again and again."""
SLOWEST = 1e-5
"""Messages a second: about one a day."""
FASTEST = 1e9
"""Messages a second; no database is as fast."""
REDRIVEN = frozenset({MessageState.FAILED.name, MessageState.DISCARDED.name})
"""The states whose messages may come back."""


class Which(TypedDict, total=False):
    """Filters of messages; all that are given must match."""

    ids: Sequence[int | str]
    """Those with these ids, 1 to 1 000. The job's `note` says why it does not take some of them."""
    queue: str
    """The full name, with the prefix of its router."""
    key: str
    """The whole key."""
    error: str
    """A part of the last error."""
    headers: Mapping[str, str]
    """Headers whose value is this text."""
    since: Duration | datetime
    """Created (archived, in the archive) at this time or later, or how long ago."""
    until: Duration | datetime
    """Created (archived) before this time."""


class Ended(Which, total=False):
    """Filters of archived messages; all that are given must match."""

    reason: str
    """Why it ended; the whole reason."""
    fingerprint: str
    """That of its error, as `dead_letters` shows it."""


class BulkOptions(TypedDict, total=False):
    """Options of a bulk action."""

    rate: float | None
    """Most messages a second; default None: as fast as it goes."""
    limit: int | None
    """Most messages of the job, the oldest first: by id, in the archive by when they were archived.
    The job ends when it has visited so many, none behind the last that the dry run has counted;
    default None: all that match."""
    dry_run: bool
    """Only count; the default."""
    wait: bool
    """Return when the job has ended or was stopped, which is the default; else when it is
    stored."""
    by: str | None
    """Who does it, as text; default user and host."""


DEFAULTS: Any = {"rate": None, "limit": None, "dry_run": True, "wait": True, "by": None}
"""Of `BulkOptions`."""


class OfWaiting(Which, BulkOptions, total=False):
    """Options of a bulk action on messages that wait."""


class OfEnded(Ended, BulkOptions, total=False):
    """Options of a bulk action on archived messages."""


class Jobs(Operations):
    """Bulk actions: each is a job, which visits each message once.

    Without `dry_run=False` each of them only counts, exactly, and returns a job in the state
    "planned"; `run_job` runs it, up to the last message that there was then. A message that is
    published later, or is archived later, is not met. One that ran then, or was in another queue,
    and waits and matches when the job comes to it, is: so more may be done than was expected.

    A batch of messages, the job's position and its counts are one transaction. So a job survives
    its process: another one goes on with it, within about a minute, if it has a subscriber and the
    rights. What is leased, locked or does not match any more is left, and counted as skipped. A
    message that the database refuses to change, by a constraint of its own, for example, is counted
    as failed, with its error in `failures`, and the job goes on.

    Options: `rate`, `limit`, `dry_run`, `wait`, `by`. Filters: `ids`; `queue`, `key`, `error`,
    `headers`, `since` and `until` as for `messages`, and for archived messages `reason` and
    `fingerprint`.
    """

    async def bulk_cancel(self, *, reason: str | None = None, **options: Unpack[OfWaiting]) -> Job:
        """End the messages that wait and match, as `cancel` does.

        Args:
            reason: Written to `last_error` of each.
            options: `BulkOptions`, and the filter; without one all messages that wait.

        Raises:
            SetupError: an argument is not valid.
        """
        why = text_or_none("reason", reason)
        text = f"cancelled by {operator_name(options.get('by'))}" + (f": {why}" if why else "")
        return await self._bulk(CANCEL, {"text": text}, options)

    async def bulk_retry(self, **options: Unpack[OfWaiting]) -> Job:
        """Make the messages that wait and match due now, as `retry_now` does. What stands by under
        `Debounce` or `KeepLast` is skipped.

        Args:
            options: `BulkOptions`, and the filter; without one all messages that wait.

        Raises:
            SetupError: an argument is not valid.
        """
        return await self._bulk(RETRY, {}, options)

    async def bulk_move(self, to: str, **options: Unpack[OfWaiting]) -> Job:
        """Move the messages that wait and match to the queue `to`, as `move` does.

        Args:
            to: Its full name.
            options: `BulkOptions`, and the filter; without one all messages that wait.

        Raises:
            SetupError: an argument is not valid.
        """
        return await self._bulk(MOVE, {"to": checked_queue(to)}, options)

    async def redrive(
        self,
        *,
        state: MessageState | str = MessageState.FAILED,
        to: str | None = None,
        **options: Unpack[OfEnded],
    ) -> Job:
        """Bring archived messages back to their queues: under their ids, due now.

        Attempts and deliveries are counted anew, and `publish_count` is one higher. `dedup_id` and
        the expiry are gone. The row leaves the archive in the same transaction. With policy `Once`
        a key whose handler has failed stays claimed, so that such a message fails again.

        Args:
            state: FAILED or DISCARDED.
            to: Another queue for all of them.
            options: `BulkOptions`, and the filter.

        Raises:
            SetupError: an argument is not valid, or there is no archive.
        """
        arguments = {} if to is None else {"to": checked_queue(to)}
        if getattr(state, "name", str(state).upper()) not in REDRIVEN:
            raise SetupError(
                f"redrive takes messages that are FAILED or DISCARDED, got state={short(state)}: "
                "replay publishes what was COMPLETED again, under a new id"
            )
        return await self._bulk(REDRIVE, arguments, {**options, "state": state, "archived": True})

    async def replay(
        self,
        name: str,
        *,
        state: MessageState | str | None = None,
        to: str | None = None,
        **options: Unpack[OfEnded],
    ) -> Job:
        """Publish archived messages again as new ones, each once for `name`.

        `origin_id` and the header `replay-of` are the row's id, the header `replay-job` is the
        name, and `publish_count` is one higher. Key, priority, body and other headers are the
        row's. The row stays. The marks are those of `faststream_sqlbroker.spark.replay`, for 30
        days: whichever of both is used, a row is published once for a name.

        Args:
            name: The name of the replay, 1 to 255 characters.
            state: COMPLETED, FAILED or DISCARDED; None: all of them.
            to: Another queue for all of them.
            options: `BulkOptions`, and the filter.

        Raises:
            SetupError: an argument is not valid, or there is no archive.
        """
        checked_name(name, "the name of a replay")
        arguments = {"name": name} | ({} if to is None else {"to": checked_queue(to)})
        return await self._bulk(REPLAY, arguments, {**options, "state": state, "archived": True})

    async def run_job(self, job: Job, *, wait: bool = True) -> Job:
        """Run what a dry run has planned, up to the last message that was there then.

        Args:
            job: As a dry run returned it.
            wait: Return when the job has ended or was stopped; else when it is stored.

        Raises:
            SetupError: `job` is not planned.
            RightsError: this process may not do it, and it is not left to others.
        """
        if job.state != "planned":
            raise SetupError(f"only the job of a dry run can be run, got {job}")
        if wait:
            await self._check_rights(job.action)
        begun = await self._changing.jobs.begin(job, self._channel)
        return await self.wait_for_job(begun.id) if wait else begun

    async def undo(self, job_id: str, *, wait: bool = True, by: str | None = None) -> Job:
        """Take back what a job has done to messages that nothing has touched since.

        A message counts as untouched while it waits where the job has left it, with the same due
        time, priority and key, and was not delivered. Others are skipped. What was cancelled waits
        again, what was redriven is in the archive again, with an `archived_at` of now (the header
        `archived-before` keeps the first), and copies of a replay are deleted. A `dedup_id` that
        the job has dropped stays dropped. It works for 30 days after the job.

        Args:
            job_id: That of a job that has ended or is stopped; it does not go on then.
            wait: Return when the undo has ended or was stopped; else when it is stored.
            by: Who does it, as text; default user and host.

        Returns:
            The job that undoes it.

        Raises:
            SetupError: there is no such job, or it cannot be undone.
            RightsError: this process may not do it, and it is not left to others.
        """
        if wait:
            await self._check_rights(UNDO)
        begun = await self._changing.jobs.begin_undo(
            _job_id(job_id), operator_name(by), self._channel
        )
        if begun is None:
            known = await self._known(job_id)
            raise SetupError(
                f"the job cannot be undone, got {known}: it must be a bulk action that has ended "
                "or is stopped, and neither an undo nor undone"
            )
        return await self.wait_for_job(begun.id) if wait else begun

    async def wait_for_job(
        self, job_id: str, *, progress: Callable[[Job], object] = lambda _job: None
    ) -> Job:
        """Work on a job until the job has ended or is stopped; other processes may take part.

        Args:
            job_id: Its id.
            progress: Called with the job as it is after each batch.

        Raises:
            SetupError: there is no such job.
        """
        await self._known(job_id)
        while True:
            step = await self._changing.jobs.step(job_id)
            # What is due now is in these queues; a hint too many costs one look.
            if step.job is not None:
                self._woken(_woken_by(step.job))
                progress(step.job)
            if step.pause is None:
                return await self._known(job_id)
            await asyncio.sleep(min(LONGEST_LOOK, max(step.pause, SHORTEST_LOOK)))

    async def stop_job(self, job_id: str, *, by: str | None = None) -> Job:
        """Let a job rest behind its running batch, until `resume_job`; what is done stays done.

        Args:
            job_id: Its id.
            by: Who does it, as text, for the `audit`; default user and host.

        Raises:
            SetupError: there is no such job, or `by` is not text.
        """
        found = await self._changing.jobs.stop(_job_id(job_id), operator_name(by))
        return found if found is not None else await self._known(job_id)

    async def resume_job(self, job_id: str, *, wait: bool = True, by: str | None = None) -> Job:
        """Let a job that was stopped or has failed go on behind the last message done.

        Args:
            job_id: Its id.
            wait: Return when the job has ended or was stopped; else when it may go on.
            by: Who does it, as text, for the `audit`; default user and host.

        Raises:
            SetupError: there is no such job, or `by` is not text.
        """
        await self._changing.jobs.resume(_job_id(job_id), operator_name(by))
        return await self.wait_for_job(job_id) if wait else await self._known(job_id)

    async def job(self, job_id: str) -> Job | None:
        """Read a job; None: there is none of that id, or the job is older than a year.

        Raises:
            SetupError: `job_id` is no text.
        """
        return await self._store.jobs.find(_job_id(job_id))

    async def audit(
        self, *, bulk: bool = False, limit: int = 100, before: str | None = None
    ) -> list[Job]:
        """What operators did, the newest first: who, when, on how many, with which filter.

        It is kept for a year. Rows of `message_policy_state` hold it, with the scope "job".

        Args:
            bulk: Only jobs of bulk actions, of the newest 1 000 actions.
            limit: Most actions to return; 1 or more.
            before: Only actions before the one with this id.

        Raises:
            ValueError: `limit` is less than 1.
        """
        check_limit(limit)
        filter_text("before", before)
        found = await self._store.jobs.listed(before, max(limit, 1_000) if bulk else limit)
        return [job for job in found if not bulk or (job.action in BULK and job.is_bulk)][:limit]

    async def _bulk(
        self, action: str, arguments: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Job:
        which = dict(options)
        how = {name: which.pop(name, default) for name, default in DEFAULTS.items()}
        flag("dry_run", how["dry_run"])
        filters = filters_of(has_archive=self._store.messages.has_archive, **which)
        if filters.archived and action not in OF_ARCHIVE:
            raise SetupError(
                f"{action} changes messages that wait, not archived ones, got {_given(which)}: "
                "redrive and replay take those"
            )
        rate = _rate(how["rate"])
        limit = None if how["limit"] is None else whole_number("limit", how["limit"])
        by = operator_name(how["by"])
        job = Job(
            action=action, by=by, filters=filters, arguments=arguments, rate=rate, limit=limit
        )
        planned = await self._changing.jobs.plan(job)
        return planned if how["dry_run"] else await self.run_job(planned, wait=how["wait"])

    async def _check_rights(self, action: str) -> None:
        """Refuse what would fail here before storing the job: other processes would go on."""
        access = await self._store.access.find_lacks(activities_of(action))
        if access.lacks:
            raise RightsError(access.describe())

    async def _known(self, job_id: str) -> Job:
        found = await self._store.jobs.find(_job_id(job_id))
        if found is None:
            raise SetupError(f"there is no job {short(job_id)}: broker.admin.audit() lists them")
        return found


def _woken_by(job: Job) -> list[str]:
    """The queues that may have a message which is due now."""
    to = job.arguments.get("to")
    return list(job.queues) if to is None else [str(to)]


def _given(which: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={which[name]!r}" for name in ("state", "archived") if name in which)


def _job_id(value: str) -> str:
    if not isinstance(value, str) or not storable(value):
        raise SetupError(f"job_id must be the id of a job, as text, got {short(value)}")
    return value


def _rate(rate: float | None) -> float | None:
    if rate is None:
        return None
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not number or not SLOWEST <= rate <= FASTEST:
        raise SetupError(
            f"rate must be a number of messages a second, from {SLOWEST} to {FASTEST:.0f}, got "
            f"{short(rate)}"
        )
    return float(rate)

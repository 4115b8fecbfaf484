"""Operations on queues: overviews, policies and pauses."""

from dataclasses import replace
from datetime import datetime

from faststream_sqlbroker.admin.filters import (
    check_limit,
    clean_optional_text,
    get_operator_name,
    validate_datetime,
)
from faststream_sqlbroker.admin.operations import AdminOperations
from faststream_sqlbroker.core.checks import validate_name
from faststream_sqlbroker.core.overview import QueueOverview, find_similar_name, find_similar_names
from faststream_sqlbroker.core.policy_waits import PoliciedQueue
from faststream_sqlbroker.core.status import PausedQueue
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

MAX_QUEUE_PAUSE = 100 * 365 * 86_400.0
"""Seconds; the end of the pause then fits the timestamps of every database."""


class QueueOperations(AdminOperations):
    """Overviews of queues, their policies, and their pauses."""

    async def queues(self, queue: str | None = None) -> list[QueueOverview]:
        """List the queues with contents, consumers and growth, sorted by name.

        The list has the queues with a message, a live subscriber or a pause: at most 500, without
        reply queues. Counts are exact up to 1 000 messages of a kind, then an estimate that is
        marked as such; SQLite counts up to 500 000. No statement reads many more rows than that, so
        the call is cheap at any time. The queues are read one after the other, not in one snapshot.

        The rates are those of the last minute. Incoming messages are counted among the 10 000
        newest messages and the 10 000 that ended last. Outgoing messages are the sum of the live
        subscribers' heartbeats, so the count needs no archive and is up to one `presence_interval`
        old. A process that has just started counts as running for at least 5 seconds. A process
        that has died counts until its registration ends, for up to four intervals. Without a live
        subscriber, or if one has a `presence_interval` of more than a minute, or polls only when
        notified, the 10 000 messages that were archived last are counted instead. Messages that the
        application claims itself (`pop`, `reserve`, HTTP) are counted only there.

        A queue with messages and no live subscriber has a `problem`, unless clients claim its
        messages over HTTP; `nearest` is then the name that may have been intended. A queue with a
        live subscriber that never had a message has a `problem` if a queue with a similar name has
        messages and no subscriber.

        Args:
            queue: Only this queue, even if it is empty.

        Raises:
            SetupError: `queue` is not a valid name.
        """
        if queue is not None:
            validate_name(queue)
        overviews = await self._store.overviews.read_overviews(queue)
        if not any(overview.lacks_subscriber or overview.is_unused for overview in overviews):
            return overviews
        if queue is not None:
            return [replace(overviews[0], nearest=await self._find_nearest(overviews[0]))]
        # A queue that is only paused may have a misspelt name.
        names = [
            overview.queue for overview in overviews if overview.used or overview.live_subscribers
        ]
        unattended = [overview.queue for overview in overviews if overview.lacks_subscriber]
        nearest_names = {name: find_similar_name(name, names) for name in unattended}
        nearest_names |= {
            overview.queue: find_similar_name(overview.queue, unattended)
            for overview in overviews
            if overview.is_unused
        }
        return [
            replace(overview, nearest=nearest_names.get(overview.queue)) for overview in overviews
        ]

    async def _find_nearest(self, queue: QueueOverview) -> str | None:
        """Return the name of a similar queue, if messages or a subscriber may have the wrong name.

        Called for a queue without a subscriber, or with a subscriber and without messages. None if
        no name is similar, or the similar queue needs no subscriber.
        """
        similar = next(iter(await self.similar_queues(queue.queue)), None)
        if similar is None or queue.lacks_subscriber:
            return similar
        # A queue that only waits for its first message is misspelt only if the other queue lacks a
        # subscriber.
        [other] = await self._store.overviews.read_overviews(similar)
        return similar if other.lacks_subscriber else None

    async def similar_queues(self, queue: str) -> list[str]:
        """List up to three queues with names similar to `queue`, the most similar first.

        They have a live message or a live subscriber; a queue that is only paused may have a
        misspelt name.

        Raises:
            SetupError: `queue` is not a valid name.
        """
        names = await self._store.overviews.find_names(validate_name(queue), paused=False)
        return find_similar_names(queue, names)

    async def policies(
        self, queue: str | None = None, *, after: str | None = None, limit: int = 100
    ) -> list[PoliciedQueue]:
        """Count for each queue how many messages wait for which policies, and until when.

        The list has the queues whose live subscribers have policies or `ordered=True`, by name.
        Each message is checked as in `explain`, in one snapshot. For each queue 1 000 due messages
        and 1 000 later messages are read, in the order of claims; beyond that `capped` means that a
        count is a minimum.

        Args:
            queue: Only this queue.
            after: Only queues whose names are greater: the last name of the previous page.
            limit: Maximum number of queues; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        check_limit(limit)
        return await self._store.explanations.list_policied_queues(queue, after, limit)

    async def pause(
        self,
        queue: str,
        *,
        reason: str | None = None,
        until: Duration | datetime | None = None,
        by: str | None = None,
    ) -> None:
        """Stop all claims from `queue`, in all processes and across restarts.

        The pause ends with `resume` or at `until`. When this returns, this process claims no more
        from the queue. Other processes stop within their `presence_interval`, on PostgreSQL mostly
        at once. Running handlers continue, and their outcomes are written. Claimed messages that
        wait for a worker are released; no delivery is counted. Publishing continues. Pausing a
        paused queue changes its reason, end and author, but not the start of the pause.

        Args:
            queue: Full name of the queue, with the prefix of its router.
            reason: Shown by `paused` and `explain`; cut to 1 000 bytes.
            until: A duration from now (seconds, a timedelta or text like "1.5h") or an aware
                datetime, by the database's clock; None: until `resume`.
            by: Operator's name, as text; default user and host.

        Raises:
            SetupError: `queue` is not a valid name, `until` is past or has no time zone, or
                `reason` or `by` is not text.
        """
        info = {
            "by": get_operator_name(by),
            "reason": clean_optional_text("reason", reason),
        }
        async with self._hooks.pause_semaphore:
            paused = await self._writable_store.live_subscribers.pause(
                validate_name(queue), _parse_until(until), info, self._hooks.channel
            )
            if paused is None:
                raise SetupError(
                    f"until must be after the database's time, got {until}: end a pause with resume"
                )
            self._hooks.on_paused(paused)

    async def resume(self, queue: str, *, by: str | None = None) -> bool:
        """End the pause of `queue`; processes notice this as soon as a pause.

        A subscriber that was paused by its own `pause` stays paused.

        Args:
            queue: Full name of the queue, with the prefix of its router.
            by: Operator's name for the `audit`; default user and host.

        Returns:
            True if the queue was paused.

        Raises:
            SetupError: `queue` is not a valid name, or `by` is not text.
        """
        async with self._hooks.pause_semaphore:
            was_paused, paused = await self._writable_store.live_subscribers.resume(
                validate_name(queue), self._hooks.channel, get_operator_name(by)
            )
            self._hooks.on_paused(paused)
        return was_paused

    async def paused(self) -> list[PausedQueue]:
        """List the queues that are paused now, sorted by name."""
        return await self._store.live_subscribers.list_paused()


def _parse_until(value: Duration | datetime | None) -> datetime | float | None:
    """Parse the end of a pause: a time, seconds from now, or None for no end."""
    if isinstance(value, datetime):
        return validate_datetime("until", value)
    if value is None:
        return None
    seconds = parse_duration(value, name="until")
    if not 0 < seconds <= MAX_QUEUE_PAUSE:
        raise SetupError(
            "until must be a datetime, or a duration above 0 and at most 100 years, "
            f"got {format_value(value)}"
        )
    return seconds

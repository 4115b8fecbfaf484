"""Queues: what is in them, what waits for their policies, and their pauses."""

from dataclasses import replace
from datetime import datetime

from faststream_sqlbroker.admin.arguments import (
    check_limit,
    near,
    operator_name,
    text_or_none,
)
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.checks import checked_name
from faststream_sqlbroker.core.overview import QueueOverview, nearest_name, nearest_names
from faststream_sqlbroker.core.policy_waits import PoliciedQueue
from faststream_sqlbroker.core.status import PausedQueue
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

LONGEST_QUEUE_PAUSE = 100 * 365 * 86_400.0
"""Seconds; the end of the pause then fits the timestamps of every database."""


class Queues(Operations):
    """Overviews of queues, their policies, and their pauses."""

    async def queues(self, queue: str | None = None) -> list[QueueOverview]:
        """What each queue has, who takes from it, and how fast it grows; sorted by name.

        Listed are the queues with a message, a live subscriber or a pause: at most 500, without
        those of replies. Counts are exact up to 1 000 messages of a kind, then an estimate that
        says it is one; SQLite counts up to 500 000. No statement reads many more rows than that,
        so it is cheap at any time. The queues are read one after the other, not in one snapshot.

        The rates are those of the last minute. What came in is counted in the 10 000 newest
        messages and the 10 000 that ended last. What went out is the sum of what the live
        subscribers tell with their signs of life, so it needs no archive and is up to one
        `presence_interval` old. A process that has just started counts as one that has run for
        5 seconds at least. One that has died counts until its registration ends, for up to
        four intervals. Without a live subscriber, or if one has a `presence_interval` of more than
        a minute, or looks only when it is told, the 10 000 messages that were archived last are
        counted instead. What the application takes itself (`pop`, `reserve`, HTTP) is counted only
        there.

        A queue with messages and no live subscriber has a `problem`, unless its messages are taken
        over HTTP; `nearest` is then the name that may have been meant. So has one with a live
        subscriber that never had a message, if a queue of nearly the same name lacks a subscriber.

        Args:
            queue: Only this queue, also if it has nothing.

        Raises:
            SetupError: `queue` is not a valid name.
        """
        if queue is not None:
            checked_name(queue)
        overviews = await self._store.overviews.read(queue)
        if not any(each.lacks_subscriber or each.is_unused for each in overviews):
            return overviews
        if queue is not None:
            return [replace(overviews[0], nearest=await self._nearest(overviews[0]))]
        # A pause alone may be one of a misspelt name.
        names = [each.queue for each in overviews if each.used or each.live_subscribers]
        lonely = [each.queue for each in overviews if each.lacks_subscriber]
        meant = {name: nearest_name(name, names) for name in lonely}
        meant |= {
            each.queue: nearest_name(each.queue, lonely) for each in overviews if each.is_unused
        }
        return [replace(each, nearest=meant.get(each.queue)) for each in overviews]

    async def _nearest(self, queue: QueueOverview) -> str | None:
        """Return the name of another queue that may be meant by that of `queue`."""
        near = next(iter(await self.similar_queues(queue.queue)), None)
        if near is None or queue.lacks_subscriber:
            return near
        # A queue that only waits for its first message is misspelt only if that one has none.
        [other] = await self._store.overviews.read(near)
        return near if other.lacks_subscriber else None

    async def similar_queues(self, queue: str) -> list[str]:
        """Name up to three queues that may be meant by `queue`, the most alike first.

        They have a live message or a live subscriber; a pause alone may be one of a misspelt name.

        Raises:
            SetupError: `queue` is not a valid name.
        """
        names = await self._store.overviews.names(checked_name(queue), paused=False)
        return nearest_names(queue, names)

    async def policies(
        self, queue: str | None = None, *, after: str | None = None, limit: int = 100
    ) -> list[PoliciedQueue]:
        """How many messages of each queue wait for which of its policies, and until when.

        Listed are the queues whose live subscribers have policies or `ordered=True`, by name. It
        asks of each message what `explain` says of it, in one snapshot. Of a queue 1 000 due
        messages and 1 000 later ones are read, in the order of claims; beyond that `capped` says
        that a count is a least one.

        Args:
            queue: Only this queue.
            after: Only queues whose names are greater: the last name of the page before.
            limit: Most queues to return; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        check_limit(limit)
        return await self._store.explanations.policied_queues(queue, after, limit)

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
        paused queue changes its reason, end and author, but not since when it is paused.

        Args:
            queue: Its full name, with the prefix of its router.
            reason: Shown by `paused` and `explain`; cut to 1 000 bytes.
            until: A duration from now (seconds, a timedelta or text like "1.5h") or an aware
                datetime, by the database's clock; None: until `resume`.
            by: Who pauses, as text; default user and host.

        Raises:
            SetupError: `queue` is not a valid name, `until` is over or has no time zone, or
                `reason` or `by` is not text.
        """
        info = {
            "by": operator_name(by),
            "reason": text_or_none("reason", reason),
        }
        async with self._turn:
            paused = await self._changing.live_subscribers.pause(
                checked_name(queue), _until(until), info, self._channel
            )
            if paused is None:
                raise SetupError(
                    f"until must be ahead of the database's clock, got {until}: resume ends a pause"
                )
            self._heard(paused)

    async def resume(self, queue: str, *, by: str | None = None) -> bool:
        """End the pause of `queue`; processes claim again as soon as they would learn of a pause.

        A subscriber that was paused by its own `pause` stays paused.

        Args:
            queue: Its full name, with the prefix of its router.
            by: Who resumes, as text, for the `audit`; default user and host.

        Returns:
            Whether the queue was paused.

        Raises:
            SetupError: `queue` is not a valid name, or `by` is not text.
        """
        async with self._turn:
            was, paused = await self._changing.live_subscribers.resume(
                checked_name(queue), self._channel, operator_name(by)
            )
            self._heard(paused)
        return was

    async def paused(self) -> list[PausedQueue]:
        """The queues that are paused now, sorted by name."""
        return await self._store.live_subscribers.paused()


def _until(value: Duration | datetime | None) -> datetime | float | None:
    if isinstance(value, datetime):
        return near("until", value)
    if value is None:
        return None
    seconds = parse_duration(value, name="until")
    if not 0 < seconds <= LONGEST_QUEUE_PAUSE:
        raise SetupError(
            "until must be a duration above 0 and of at most 100 years, or a datetime, "
            f"got {short(value)}"
        )
    return seconds

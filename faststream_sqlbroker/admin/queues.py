"""What is in the queues."""

from dataclasses import replace

from faststream_sqlbroker.admin.arguments import queue_name
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.overview import QueueOverview, nearest_name


class Queues(Operations):
    """Overviews of queues."""

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

        A queue with messages and no live subscriber, unless it is a pull consumer's, and one with
        a live subscriber that never had a message, have a `problem`; `nearest` is then the name
        that may have been meant.

        Args:
            queue: Only this queue, also if it has nothing.

        Raises:
            SetupError: `queue` is not a valid name.
        """
        if queue is not None:
            queue_name(queue)
        found = await self._store.overviews.read(queue)
        if all(each.problem is None for each in found):
            return found
        names = [each.queue for each in found]
        if queue is not None:
            # The name that was meant is one of the others.
            names = await self._store.overviews.names(queue)
        return [
            each if each.problem is None else replace(each, nearest=nearest_name(each.queue, names))
            for each in found
        ]

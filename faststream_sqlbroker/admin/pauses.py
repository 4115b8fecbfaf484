"""Pause and resume queues."""

from datetime import datetime

from faststream_sqlbroker.admin.arguments import near, operator_name, queue_name, text_or_none
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.status import PausedQueue
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

LONGEST_QUEUE_PAUSE = 100 * 365 * 86_400.0
"""Seconds; the end of the pause then fits the timestamps of every database."""


class Pauses(Operations):
    """Pauses of queues."""

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
            by: Who pauses, as text; default the host and the process id.

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
                queue_name(queue), _until(until), info, self._channel
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
            by: Who resumes, as text, for the `audit`; default the host and the process id.

        Returns:
            Whether the queue was paused.

        Raises:
            SetupError: `queue` is not a valid name, or `by` is not text.
        """
        async with self._turn:
            was, paused = await self._changing.live_subscribers.resume(
                queue_name(queue), self._channel, operator_name(by)
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

"""What has failed for good, by what it has in common."""

from datetime import datetime

from faststream_sqlbroker.admin.filters import filters_of
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.dead_letters import DeadLetters
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError

MOST_GROUPS = 1_000
"""Groups of one answer."""


class DeadLetterGroups(Operations):
    """Groups of dead letters."""

    async def dead_letters(
        self,
        *,
        queue: str | None = None,
        key: str | None = None,
        error: str | None = None,
        reason: str | None = None,
        fingerprint: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        limit: int = 50,
    ) -> DeadLetters:
        """The FAILED messages of the archive, grouped by their errors; the largest group first.

        Errors of one type from the same place in the code are one group, whatever their texts say:
        the place is the function of the last three stack frames. Messages without an error are
        grouped by their reason. It looks at 20 000 messages at most, the last archived first, and
        then says until when.

        Dead letters that were moved to a queue (`dead_letter_queue=`) are live messages there:
        `messages` lists them.

        Args:
            queue: Only of this queue.
            key: Only of this key.
            error: A part of the last error.
            reason: The whole reason.
            fingerprint: Only this group.
            since: Archived at this time or later: an aware datetime, or how long ago.
            until: Archived before this time.
            limit: Most groups; 1 to 1 000.

        Raises:
            SetupError: an argument is not valid, or there is no archive.
        """
        if not 1 <= limit <= MOST_GROUPS:
            raise SetupError(f"limit must be 1 to {MOST_GROUPS}, got {limit!r}")
        filters = filters_of(
            has_archive=self._store.messages.has_archive,
            state=MessageState.FAILED,
            queue=queue,
            key=key,
            error=error,
            reason=reason,
            fingerprint=fingerprint,
            since=since,
            until=until,
        )
        return await self._store.messages.dead_letters(filters, limit)

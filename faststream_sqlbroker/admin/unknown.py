"""Messages whose outcome is not known."""

from faststream_sqlbroker.admin.arguments import check_limit, operator_name
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.rows import UnknownOutcome


class Unknown(Operations):
    """Unknown outcomes of AckPolicy.ACK_FIRST."""

    async def unknown(self, queue: str | None = None, *, limit: int = 100) -> list[UnknownOutcome]:
        """Messages whose handler may or may not have run, or may not have finished; oldest first.

        `AckPolicy.ACK_FIRST` removes a message before its handler starts. The message is listed
        here in three cases: its process sent no heartbeat for `release_stuck_timeout` afterwards;
        the answer to the COMMIT of the removal was lost although it was committed; or its handler
        was cancelled or abandoned at the end of `graceful_timeout`. The message itself is in the
        archive.

        Args:
            queue: List only messages of this queue.
            limit: Most messages to return; 1 or more.

        Raises:
            ValueError: `limit` is less than 1.
        """
        check_limit(limit)
        return await self._store.starts.unknown(queue, limit)

    async def forget_unknown(self, *message_ids: int, by: str | None = None) -> int:
        """Remove messages from the list of `unknown`, once their outcome was found out.

        Args:
            message_ids: Those of the messages.
            by: Who does it, as text, for the `audit`; default the host and the process id.

        Returns:
            How many of them were on the list.

        Raises:
            SetupError: `by` is not text.
        """
        return await self._changing.starts.forget(message_ids, operator_name(by))

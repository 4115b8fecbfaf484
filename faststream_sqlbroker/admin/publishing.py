"""Publish as an operator."""

from typing import Any

from faststream_sqlbroker.admin.arguments import destination, operator_name
from faststream_sqlbroker.admin.operations import Operations


class Publishing(Operations):
    """`publish`."""

    async def publish(
        self,
        message: Any = None,
        queue: str = "",
        *,
        by: str | None = None,
        **options: Any,
    ) -> int | None:
        """Publish one message as `broker.publish` does; the `audit` names who did.

        The message and its entry in the audit are committed together when this returns. The entry
        has the queue and the message's id, not its body.

        Args:
            message: The body: bytes and str unchanged, anything else as JSON.
            queue: Full name of the queue.
            by: Who publishes, as text; default the host and the process id.
            options: As of `broker.publish`, without those of a transaction.

        Returns:
            The message's id; None if the queue has a message with the same dedup_id already, or if
            a middleware drops it: nothing was written then.

        Raises:
            SetupError: `queue` is not the name of a queue, or `by` is not text.
            PublishError: a value cannot be stored, or there is no such option; nothing was written.
            QueueFullError: the queue is full, and no room came within the timeout of its
                `max_depth`, whatever that does with other publishes.
        """
        who = operator_name(by)
        self._refuse_in_handler()
        return await self._publish(message, destination(queue), who, options)

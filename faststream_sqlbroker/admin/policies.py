"""What waits for which policy."""

from faststream_sqlbroker.admin.arguments import check_limit
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.policy_waits import PoliciedQueue


class Policies(Operations):
    """The policies of whole queues."""

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

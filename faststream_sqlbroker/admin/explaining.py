"""Why a message waits."""

from faststream_sqlbroker.admin.arguments import message_number
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.status import Explanation


class Explaining(Operations):
    """Explanations of single messages."""

    async def explain(self, message_id: int | str) -> Explanation:
        """Explain why a message is not running, or how it ended.

        It reads one snapshot and counts at most 1 000 messages, so it is cheap at any time and from
        any process. The answer holds for the moment of the snapshot. docs/howto/operating.md lists
        the codes.

        Args:
            message_id: As `publish` returns it; or as text, as in a handler's `message.message_id`.

        Raises:
            SetupError: `message_id` is not a whole number of 64 bits.
        """
        number = message_number(message_id)
        return (await self._store.explanations.explain(number)).at_place(self._pipelines)

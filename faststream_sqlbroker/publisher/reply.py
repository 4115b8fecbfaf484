"""A handler's answer to the queue that its message asked for."""

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from faststream.response import PublishCommand
from typing_extensions import override

from faststream_sqlbroker.adapter.endpoints import FakePublisher
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.flow.tasks.requests import REPLY_ID, REPLY_WITHIN, SHORTEST_EXPIRY
from faststream_sqlbroker.response import SqlBrokerPublishCommand

if TYPE_CHECKING:
    from faststream.message import StreamMessage

    from faststream_sqlbroker.adapter.messages import ProducerProto
    from faststream_sqlbroker.adapter.values import PublisherMiddleware


class ReplyPublisher(FakePublisher):
    """Sends a handler's answer to the queue that its message asked for.

    The reply to a request names the request, and expires when no caller waits for it any more.
    """

    def __init__(
        self, producer: "ProducerProto[Any]", message: "StreamMessage[Any]", clock: Clock
    ) -> None:
        """Send to `message.reply_to`."""
        super().__init__(producer=producer)
        self.queue = message.reply_to
        self._reply_id = message.headers.get(REPLY_ID)
        self._expires_in = None if self._reply_id is None else _time_left(message, clock)

    @override
    async def _publish(
        self, cmd: PublishCommand, *, _extra_middlewares: "Iterable[PublisherMiddleware]"
    ) -> Any:
        """Send the answer, unless it is a reply that comes too late."""
        if self._expires_in is not None and self._expires_in < SHORTEST_EXPIRY:
            return None
        return await super()._publish(cmd, _extra_middlewares=_extra_middlewares)

    @override
    def patch_command(self, cmd: PublishCommand) -> SqlBrokerPublishCommand:
        """The command of the answer, addressed to `queue`."""
        real = SqlBrokerPublishCommand.from_cmd(super().patch_command(cmd))
        real.destination = self.queue
        real.stacked = True
        if self._reply_id is not None:
            real.headers = {**(real.headers or {}), REPLY_ID: self._reply_id}
        if self._expires_in is not None:
            real.options["expires_in"] = self._expires_in
        return real


def _time_left(message: "StreamMessage[Any]", clock: Clock) -> float | None:
    """Seconds for which the caller of a request still waits; None: it does not say.

    Both times are the database's; this process only measures how long the handler took.
    """
    within = message.headers.get(REPLY_WITHIN)
    if not isinstance(within, int | float) or isinstance(within, bool):
        return None
    raw = message.raw_message
    row = raw[0] if isinstance(raw, tuple) and raw else raw
    if not isinstance(row, ClaimedMessage):
        return float(within)
    before: timedelta = row.acquired_at - row.created_at
    handled = clock.monotonic() - row.claimed_monotonic
    return within - before.total_seconds() - handled

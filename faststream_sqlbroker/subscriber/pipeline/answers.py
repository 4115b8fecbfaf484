"""Publishes what a handler returns: to the queue that its message names, and by its publishers."""

from collections.abc import Callable, Iterable
from typing import Any

from faststream.response import ensure_response

Scopes = Callable[[], Iterable[Any]]
"""Gives the middlewares' `publish_scope`s, for one publish."""


def no_scopes() -> tuple[()]:
    """Those of a subscriber without middlewares."""
    return ()


class Answers:
    """Publishes the answers of one handler."""

    __slots__ = ("_no_reply", "_subscriber", "publishers")

    def __init__(self, subscriber: Any, handler: Any) -> None:
        self._subscriber = subscriber
        self._no_reply = subscriber._no_reply
        self.publishers: list[Any] = handler._publishers
        """FastStream's own list: a publisher may be stacked later."""

    async def publish(self, message: Any, result: Any, scopes: Scopes = no_scopes) -> None:
        """Publish `result`, the answer to `message`, as FastStream does."""
        response = ensure_response(result)
        if not response.correlation_id:
            response.correlation_id = message.correlation_id
        replying: Iterable[Any] = ()
        if message.reply_to and not self._no_reply:
            replying = self._subscriber._make_response_publisher(message)
        for publisher in (*replying, *self.publishers):
            await publisher._publish(response.as_publish_command(), _extra_middlewares=scopes())

"""Handlers whose answers go to another broker, through a stacked publisher of that broker."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from faststream import BaseMiddleware
from typing_extensions import override

from faststream_sqlbroker.core.routing import ROUTING_HEADERS
from faststream_sqlbroker.flow.tasks.requests import REPLY_ID, REPLY_WITHIN
from faststream_sqlbroker.parser import CONTENT_TYPE, CORRELATION_ID, REPLY_TO
from faststream_sqlbroker.publisher.usecase import QueuePublisher
from faststream_sqlbroker.response import SqlBrokerPublishCommand

if TYPE_CHECKING:
    from faststream.response import PublishCommand

MESSAGE_HEADERS = {CONTENT_TYPE, CORRELATION_ID, REPLY_TO, REPLY_ID, REPLY_WITHIN, *ROUTING_HEADERS}
"""Headers of the message itself, which its answer does not inherit."""


class ForwardHeaders:
    """Creates middlewares that copy the headers of a message to the answers."""

    def __init__(self, names: Sequence[str] | None) -> None:
        """Copy the headers `names`; None copies all."""
        self._names = None if names is None else frozenset(names)

    def __call__(self, msg: Any, **options: Any) -> "_ForwardHeadersMiddleware":
        """Return the middleware of a message, or of a batch, whose first message counts.

        Headers that describe the message itself, such as its content type, are not copied.
        """
        row = msg[0] if isinstance(msg, tuple) else msg
        headers = {} if row is None else row.headers
        names = set(headers) if self._names is None else self._names
        return _ForwardHeadersMiddleware(
            msg,
            {n: v for n, v in headers.items() if n in names and n not in MESSAGE_HEADERS},
            **options,
        )


class _ForwardHeadersMiddleware(BaseMiddleware):
    def __init__(self, msg: Any, headers: Mapping[str, Any], **options: Any) -> None:
        super().__init__(msg, **options)
        self._headers = headers

    @override
    async def publish_scope(
        self, call_next: "Callable[[Any], Awaitable[Any]]", cmd: "PublishCommand"
    ) -> Any:
        """Add the headers that the answer does not set itself."""
        headers = dict(self._headers)
        if not isinstance(cmd, SqlBrokerPublishCommand):
            # Other brokers support only text in headers.
            headers = {n: v if isinstance(v, str) else json.dumps(v) for n, v in headers.items()}
        cmd.add_headers(headers, override=False)
        return await call_next(cmd)


def find_relays(handlers: Iterable[Any]) -> dict[str, bool]:
    """Return stacked publishers of other brokers by name, with True if a publisher looks ready.

    A handler with such a publisher relays its answers to that broker. Without a connection there,
    its messages would fail.
    """
    foreign_publishers = (
        publisher
        for handler in handlers
        for publisher in handler._publishers  # noqa: SLF001 - FastStream's
        if not isinstance(publisher, QueuePublisher)
    )
    return {
        _format_name(publisher): not _is_unconnected(publisher) for publisher in foreign_publishers
    }


def _is_unconnected(publisher: Any) -> bool:
    """Return True if the publisher's broker has no connection yet, as far as can be seen.

    Other brokers have no common attribute for this, so FastStream's private attributes are read.
    """
    config = publisher._outer_config  # noqa: SLF001 - as above
    # FastStream's brokers pass themselves to their handlers.
    broker = config.extra_context.get("broker")
    if broker is None:
        return not config.producer
    # A test broker replaces `_connect`, and opens no connection for some brokers.
    return broker._connection is None and "_connect" not in vars(broker)  # noqa: SLF001 - as above


def _format_name(publisher: Any) -> str:
    """Return the channel and the broker of a publisher, for log lines and health."""
    broker_name = type(publisher).__module__.split(".")[1]
    return (
        f"{next(iter(publisher.schema()), type(publisher).__name__)!r} of faststream.{broker_name}"
    )

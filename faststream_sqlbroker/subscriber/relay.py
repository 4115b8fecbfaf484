"""Handlers whose answers go to another broker, by stacking that broker's publisher."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from faststream import BaseMiddleware
from typing_extensions import override

from faststream_sqlbroker.core.routing import OWN_HEADERS
from faststream_sqlbroker.flow.tasks.requests import REPLY_ID, REPLY_WITHIN
from faststream_sqlbroker.parser import CONTENT_TYPE, CORRELATION_ID, REPLY_TO
from faststream_sqlbroker.publisher.usecase import QueuePublisher
from faststream_sqlbroker.response import SqlBrokerPublishCommand

if TYPE_CHECKING:
    from faststream.response import PublishCommand

OWN = {CONTENT_TYPE, CORRELATION_ID, REPLY_TO, REPLY_ID, REPLY_WITHIN, *OWN_HEADERS}
"""Headers of the message itself; its answer has others."""


class ForwardHeaders:
    """Makes a middleware for each message that hands its headers on to its answers."""

    def __init__(self, names: Sequence[str] | None) -> None:
        """`names` are the headers to hand on; None is all of them."""
        self._names = None if names is None else frozenset(names)

    def __call__(self, msg: Any, **options: Any) -> "_Forward":
        """The middleware of one message, or of one batch, whose first message counts."""
        row = msg[0] if isinstance(msg, tuple) else msg
        headers = {} if row is None else row.headers
        wanted = set(headers) if self._names is None else self._names
        return _Forward(
            msg, {n: v for n, v in headers.items() if n in wanted and n not in OWN}, **options
        )


class _Forward(BaseMiddleware):
    def __init__(self, msg: Any, headers: Mapping[str, Any], **options: Any) -> None:
        super().__init__(msg, **options)
        self._headers = headers

    @override
    async def publish_scope(
        self, call_next: "Callable[[Any], Awaitable[Any]]", cmd: "PublishCommand"
    ) -> Any:
        """Add the headers that the answer does not bring itself."""
        headers = dict(self._headers)
        if not isinstance(cmd, SqlBrokerPublishCommand):
            # Other brokers carry text only.
            headers = {n: v if isinstance(v, str) else json.dumps(v) for n, v in headers.items()}
        cmd.add_headers(headers, override=False)
        return await call_next(cmd)


def relays(handlers: Iterable[Any]) -> dict[str, bool]:
    """The stacked publishers of other brokers, by name, and whether each can publish, as far as can
    be seen.
    """
    others = (
        publisher
        for handler in handlers
        for publisher in handler._publishers  # noqa: SLF001 - FastStream's
        if not isinstance(publisher, QueuePublisher)
    )
    return {_name(publisher): not _unstarted(publisher) for publisher in others}


def _unstarted(publisher: Any) -> bool:
    config = publisher._outer_config  # noqa: SLF001 - as above
    # FastStream's brokers hand themselves to their handlers.
    broker = config.extra_context.get("broker")
    if broker is None:
        return not config.producer
    # A test broker replaces `_connect`, and for some brokers makes no connection.
    return broker._connection is None and "_connect" not in vars(broker)  # noqa: SLF001 - as above


def _name(publisher: Any) -> str:
    kind = type(publisher).__module__.split(".")[1]
    return f"{next(iter(publisher.schema()), type(publisher).__name__)!r} of faststream.{kind}"

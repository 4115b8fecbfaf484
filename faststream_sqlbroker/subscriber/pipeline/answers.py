"""Publish the result of a handler: to the reply queue of the message, and by its publishers."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from faststream.response import Response, ensure_response

from faststream_sqlbroker.publisher.producer import SqlBrokerProducer, is_plain
from faststream_sqlbroker.publisher.usecase import QueuePublisher
from faststream_sqlbroker.subscriber.pipeline.fingerprints import find_unknown
from faststream_sqlbroker.subscriber.pipeline.replaced import PUBLISHING

Scopes = Callable[[], Iterable[Any]]
"""Returns the `publish_scope` of each middleware, for one publish."""

_PUBLISH_ANSWER = QueuePublisher._publish


async def _call_publish(publish: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
    return await publish(cmd)


def get_default_scopes() -> tuple[Any, ...]:
    """Return the scopes of a subscriber without middlewares.

    A scope is the `publish_scope` of a middleware, through which a publish passes.
    """
    # FastStream has its own two middlewares here, which pass everything on. Without any scope, a
    # publisher would use those of its own router.
    return (_call_publish,)


class AnswerPublisher:
    """Publishes the answers of a handler."""

    __slots__ = ("_is_known", "_subscriber", "publishers")

    def __init__(self, subscriber: Any, handler: Any) -> None:
        self._subscriber = subscriber
        self._is_known = not find_unknown(PUBLISHING)
        self.publishers: list[Any] = handler._publishers
        """FastStream's own list, because a publisher may be stacked later."""

    def is_needed(self, message: Any, result: Any) -> bool:
        """Return True if `publish` has anything to do, which is checked for each message first."""
        return bool(message.reply_to or self.publishers) or isinstance(result, Response)

    async def publish(self, message: Any, result: Any, scopes: Scopes = get_default_scopes) -> None:
        """Publish `result`, the answer to `message`, as FastStream does.

        The answer goes to the reply queue of the message and to each stacked publisher. An answer
        without headers and middlewares is plain: only its row is created, without a command.
        """
        response = ensure_response(result)
        if not response.correlation_id:
            response.correlation_id = message.correlation_id
        reply_publishers: Iterable[Any] = ()
        if message.reply_to and not self._subscriber._no_reply:
            reply_publishers = self._subscriber._make_response_publisher(message)
        # The scopes of middlewares need a command, which a plain answer avoids.
        is_plain = self._is_known and scopes is get_default_scopes and _is_body_alone(response)
        for publisher in (*reply_publishers, *self.publishers):
            producer = _find_plain_producer(publisher) if is_plain else None
            if producer is not None:
                await _publish_plain(producer, publisher, message, response)
            else:
                cmd = response.as_publish_command()
                await publisher._publish(cmd, _extra_middlewares=scopes())


def _is_body_alone(response: Response) -> bool:
    return response.__class__ is Response and not response.headers


def _find_plain_producer(publisher: Any) -> SqlBrokerProducer | None:
    """Return the producer if the publisher's answer needs nothing but a row, or None.

    With middlewares, a custom codec, a test or another broker, FastStream publishes the answer.
    """
    if not _is_own_publisher(publisher):
        return None
    outer = publisher._outer_config
    producer = outer.producer
    if outer.broker_middlewares or outer.broker_codec is not None or not is_plain(producer):
        return None
    plain_producer: SqlBrokerProducer = producer
    return plain_producer


def _is_own_publisher(publisher: Any) -> bool:
    """Return True if neither a test nor the application has changed how `publisher` publishes.

    Only then may its answers be written without FastStream's methods.
    """
    return (
        publisher.__class__ is QueuePublisher
        and not publisher.is_test
        and not publisher.config.batch
        and QueuePublisher._publish is _PUBLISH_ANSWER
        and "_publish" not in publisher.__dict__
    )


async def _publish_plain(
    producer: SqlBrokerProducer, publisher: QueuePublisher, message: Any, response: Response
) -> None:
    """Publish like `publisher._publish`: the row joins the ack of `message` if possible.

    One transaction then writes the answer and acks the message. A batch acks all of its rows.
    """
    raw = message.raw_message
    await producer.publish_answer(
        response.body,
        publisher.queue,
        headers=publisher.headers,
        correlation_id=response.correlation_id,
        reply_to=publisher.config.reply_to,
        delivery=raw if isinstance(raw, tuple) else (raw,),
    )

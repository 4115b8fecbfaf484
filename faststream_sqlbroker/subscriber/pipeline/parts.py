"""The way of a message through one subscriber, without middlewares of the user or with them."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from faststream import AckPolicy

from faststream_sqlbroker.adapter.pipeline import EmptyLoggerObject
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.subscriber.pipeline.acknowledging import Acknowledging
from faststream_sqlbroker.subscriber.pipeline.answers import Answers
from faststream_sqlbroker.subscriber.pipeline.arguments import Call
from faststream_sqlbroker.subscriber.pipeline.bodies import Parse, ack_quickly
from faststream_sqlbroker.subscriber.pipeline.context import Scopes
from faststream_sqlbroker.subscriber.running_calls import RunningCalls


@dataclass(frozen=True, slots=True)
class Parts:
    """Found once, when the subscriber starts."""

    lock: RunningCalls
    """Counts the calls that run; a stop waits for them."""
    state: Any
    """FastStream's logger."""
    context: Any
    """FastStream's context."""
    scopes: Scopes
    parse: Parse
    """Makes the message of a row."""
    parse_any: Callable[[Any], Awaitable[Any]]
    """Makes the message of a row, or of a batch."""
    decoder: Any
    log_context: Callable[[Any], dict[str, str]]
    """The columns of the log for a message."""
    call: Call
    answers: Answers
    acknowledging: Acknowledging
    policy: AckPolicy


class Plain:
    """Runs the handler on one row at a time."""

    __slots__ = (
        *("_acks", "_answers", "_call", "_decoder", "_acknowledging", "_lock"),
        *("_log_context", "_parse", "_scopes", "_state"),
    )

    def __init__(self, parts: Parts) -> None:
        # Attributes of its own: a message reads each of them.
        self._lock = parts.lock
        self._state = parts.state
        self._scopes = parts.scopes
        self._parse = parts.parse
        self._decoder = parts.decoder
        self._log_context = parts.log_context
        self._call = parts.call
        self._answers = parts.answers
        self._acknowledging = parts.acknowledging
        self._acks = parts.policy not in (AckPolicy.MANUAL, AckPolicy.ACK_FIRST)

    async def process(self, row: ClaimedMessage) -> None:
        """Make the message, call the handler, publish its answer, ack.

        Errors are raised as by FastStream's `process_message`.
        """
        state = self._state
        scopes = self._scopes
        # Nearly always nothing is logged, and the message acked in the end.
        is_quick = self._acks and state.logger.__class__ is EmptyLoggerObject
        message: Any = None
        # Nothing of a message is reset that could not be made.
        of_message = None
        self._lock.acquire()
        tokens = scopes.enter(state.logger.logger)
        try:
            message = self._parse(row)
            message.set_decoder(self._decoder)
            known = self._log_context(message)
            of_message = scopes.enter_message(known, message)
            if not is_quick:
                await self._acknowledging.begin(message, known)
            result = await self._call(message)
            if self._answers.wanted(message, result):
                await self._answers.publish(message, result)
        except BaseException as error:
            # A cancellation, too, ends as FastStream's middlewares say.
            if not await self._acknowledging.leave(row, message, error):
                raise
        else:
            if not is_quick or not ack_quickly(message):
                await self._acknowledging.leave_handled(row, message)
        finally:
            scopes.leave(tokens, of_message)
            self._lock.release()


class Wrapped:
    """Runs the handler inside of middlewares, which are entered and left as by FastStream."""

    __slots__ = ("_middlewares", "_parts")

    def __init__(self, parts: Parts, middlewares: Sequence[Any]) -> None:
        self._parts = parts
        self._middlewares = middlewares

    async def process(self, row: Any) -> None:
        """As `Plain.process`."""
        parts = self._parts
        parts.lock.acquire()
        tokens = parts.scopes.enter(parts.state.logger.logger)
        delivery = _Delivery(parts, row)
        try:
            async with AsyncExitStack() as stack:
                # Entered first and left last: what it acks are the user's middlewares' errors, too.
                stack.push_async_exit(delivery.leave)
                entered: list[Any] = []
                for make in self._middlewares:
                    middleware = make(row, context=parts.context)
                    entered.append(middleware)
                    await stack.enter_async_context(middleware)
                # The scope of the middleware that was entered last is the innermost.
                entered.reverse()
                await delivery.handle(entered)
        finally:
            parts.scopes.leave(tokens, delivery.message_tokens)
            parts.lock.release()


class _Delivery:
    """One message on its way; what was done of it, for the end."""

    __slots__ = ("_message", "_parts", "_row", "message_tokens")

    def __init__(self, parts: Parts, row: Any) -> None:
        self._parts = parts
        self._row = row
        self._message: Any = None
        self.message_tokens: Any = None

    async def handle(self, entered: Sequence[Any]) -> None:
        """Make the message and call the handler through `entered`, the innermost first."""
        parts = self._parts
        message = await parts.parse_any(self._row)
        message.set_decoder(parts.decoder)
        known = parts.log_context(message)
        self.message_tokens = parts.scopes.enter_message(known, message)
        self._message = message
        await parts.acknowledging.begin(message, known)
        through: Callable[[Any], Awaitable[Any]] = parts.call
        for middleware in entered:
            through = partial(middleware.consume_scope, through)
        result = await through(message)
        if parts.answers.wanted(message, result):
            await parts.answers.publish(message, result, lambda: _publish_scopes(entered))

    async def leave(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> bool:
        """What FastStream's two middlewares do, inside of which the user's are."""
        acknowledging = self._parts.acknowledging
        message = self._message
        if error is not None or message is None:
            return await acknowledging.leave(self._row, message, error)
        await acknowledging.leave_handled(self._row, message)
        return False


def _publish_scopes(entered: Sequence[Any]) -> Iterable[Any]:
    return (middleware.publish_scope for middleware in entered)

"""Run messages of a subscriber, without middlewares of the user or with them."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from faststream import AckPolicy

from faststream_sqlbroker.adapter.pipeline import EmptyLoggerObject
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.subscriber.pipeline.acknowledging import Acknowledger
from faststream_sqlbroker.subscriber.pipeline.answers import AnswerPublisher
from faststream_sqlbroker.subscriber.pipeline.arguments import HandlerCall
from faststream_sqlbroker.subscriber.pipeline.bodies import Parse, ack_quickly
from faststream_sqlbroker.subscriber.pipeline.context import Scopes
from faststream_sqlbroker.subscriber.running_calls import RunningCalls


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a pipeline, determined once when the subscriber starts."""

    lock: RunningCalls
    """Counts the running calls; a stop waits for them."""
    state: Any
    """FastStream's logger."""
    context: Any
    """FastStream's context."""
    scopes: Scopes
    parse: Parse
    """Creates the message of a row."""
    parse_any: Callable[[Any], Awaitable[Any]]
    """Creates the message of a row or of a batch."""
    decoder: Any
    log_context: Callable[[Any], dict[str, str]]
    """Returns the log columns of a message."""
    call: HandlerCall
    answers: AnswerPublisher
    acknowledging: Acknowledger
    policy: AckPolicy


class Plain:
    """Runs the handler on single rows, for subscribers without middlewares."""

    __slots__ = (
        *("_acks", "_answers", "_call", "_decoder", "_acknowledging", "_lock"),
        *("_log_context", "_parse", "_scopes", "_state"),
    )

    def __init__(self, parts: Parts) -> None:
        # Copied to attributes, because every message reads each of them.
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
        """Create the message, call the handler, publish the answer, and ack.

        Does the work of FastStream's `process_message`, in the same order, and raises the same
        errors. Scopes are FastStream's context around a message. They are left after an error only:
        the worker throws the context of a handled message away.
        """
        state = self._state
        scopes = self._scopes
        # Nearly always nothing is logged, and the message is acked in the end.
        is_quick = self._acks and state.logger.__class__ is EmptyLoggerObject
        message: Any = None
        # Stays None if the message cannot be created, so that nothing is reset.
        message_tokens = None
        is_handled = False
        self._lock.acquire()
        tokens = scopes.enter(state.logger.logger)
        try:
            message = self._parse(row)
            message.set_decoder(self._decoder)
            log_context = self._log_context(message)
            message_tokens = scopes.enter_message(log_context, message)
            if not is_quick:
                await self._acknowledging.start_message(message, log_context)
            result = await self._call(message)
            if self._answers.is_needed(message, result):
                await self._answers.publish(message, result)
        except BaseException as error:
            # FastStream's middlewares also decide how a cancellation ends.
            if not await self._acknowledging.finish(row, message, error):
                raise
        else:
            if not is_quick or not ack_quickly(message):
                await self._acknowledging.finish_handled(row, message)
            is_handled = True
        finally:
            if not is_handled:
                scopes.leave(tokens, message_tokens)
            self._lock.release()


class Wrapped:
    """Runs the handler on rows or batches inside of middlewares, in FastStream's order."""

    __slots__ = ("_middlewares", "_parts")

    def __init__(self, parts: Parts, middlewares: Sequence[Any]) -> None:
        self._parts = parts
        self._middlewares = middlewares

    async def process(self, row: Any) -> None:
        """Run the handler on a row or a batch, like `Plain.process`.

        A middleware gets the row before the message exists.
        """
        parts = self._parts
        parts.lock.acquire()
        tokens = parts.scopes.enter(parts.state.logger.logger)
        delivery = _MiddlewareRun(parts, row)
        try:
            async with AsyncExitStack() as stack:
                # Entered first and left last, so that it also acknowledges errors of the user's
                # middlewares.
                stack.push_async_exit(delivery.leave)
                entered: list[Any] = []
                for make in self._middlewares:
                    middleware = make(row, context=parts.context)
                    entered.append(middleware)
                    await stack.enter_async_context(middleware)
                # The last entered middleware has the innermost scope.
                entered.reverse()
                await delivery.handle(entered)
        finally:
            parts.scopes.leave(tokens, delivery.message_tokens)
            parts.lock.release()


class _MiddlewareRun:
    """The state of a message while the user's middlewares run."""

    __slots__ = ("_message", "_parts", "_row", "message_tokens")

    def __init__(self, parts: Parts, row: Any) -> None:
        self._parts = parts
        self._row = row
        self._message: Any = None
        self.message_tokens: Any = None

    async def handle(self, entered: Sequence[Any]) -> None:
        """Create the message and call the handler through `entered`, the innermost first.

        `entered` are the middlewares whose contexts were entered for this message.
        """
        parts = self._parts
        message = await parts.parse_any(self._row)
        message.set_decoder(parts.decoder)
        log_context = parts.log_context(message)
        self.message_tokens = parts.scopes.enter_message(log_context, message)
        self._message = message
        await parts.acknowledging.start_message(message, log_context)
        call_next: Callable[[Any], Awaitable[Any]] = parts.call
        for middleware in entered:
            call_next = partial(middleware.consume_scope, call_next)
        result = await call_next(message)
        if parts.answers.is_needed(message, result):
            await parts.answers.publish(message, result, lambda: _iter_publish_scopes(entered))

    async def leave(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> bool:
        """Finish the message, like FastStream's two middlewares outside of the user's.

        They acknowledge and log. Return True if the error was handled. Called like `__aexit__`.
        """
        acknowledging = self._parts.acknowledging
        message = self._message
        if error is not None or message is None:
            return await acknowledging.finish(self._row, message, error)
        await acknowledging.finish_handled(self._row, message)
        return False


def _iter_publish_scopes(entered: Sequence[Any]) -> Iterable[Any]:
    return (middleware.publish_scope for middleware in entered)

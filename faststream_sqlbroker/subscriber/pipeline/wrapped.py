"""The way of a message, or of a batch, through the middlewares of the user."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any

from faststream_sqlbroker.subscriber.pipeline.parts import Parts


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
            parts.scopes.leave(tokens, delivery.of_message)
            parts.lock.release()


class _Delivery:
    """One message on its way; what was done of it, for the end."""

    __slots__ = ("_message", "_parts", "_row", "of_message")

    def __init__(self, parts: Parts, row: Any) -> None:
        self._parts = parts
        self._row = row
        self._message: Any = None
        self.of_message: Any = None

    async def handle(self, entered: Sequence[Any]) -> None:
        """Make the message and call the handler through `entered`, the innermost first."""
        parts = self._parts
        message = await parts.parse_any(self._row)
        message.set_decoder(parts.decoder)
        known = parts.log_context(message)
        self.of_message = parts.scopes.enter_message(known, message)
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

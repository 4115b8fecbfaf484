"""The work of FastStream's two own middlewares, which acknowledge and log.

A message that is handled and acked needs neither of them; for all other messages FastStream's own
objects do the work.
"""

import logging
from types import TracebackType
from typing import Any

from faststream import AckPolicy, BaseMiddleware
from faststream.exceptions import SkipMessage
from faststream.middlewares import AcknowledgementMiddleware
from faststream.middlewares.logging import CriticalLogMiddleware
from typing_extensions import override

from faststream_sqlbroker.adapter.pipeline import EmptyLoggerObject
from faststream_sqlbroker.control_exceptions import record_skip
from faststream_sqlbroker.subscriber.pipeline.bodies import ack_quickly

_Info = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


class Acknowledger:
    """Acknowledges and logs the messages of a subscriber."""

    __slots__ = ("_acks", "_acks_first", "_context", "_make_ack", "_make_log", "_state")

    def __init__(self, state: Any, context: Any, policy: AckPolicy, parser: Any) -> None:
        """Create an acknowledger; `parser` creates a message from a row that has none yet."""
        self._state = state
        self._context = context
        self._make_log = CriticalLogMiddleware(state)
        self._acks_first = policy is AckPolicy.ACK_FIRST
        self._acks = policy not in (AckPolicy.MANUAL, AckPolicy.ACK_FIRST)
        self._make_ack = None
        if policy is not AckPolicy.MANUAL:
            self._make_ack = AcknowledgementMiddleware(
                logger=state, ack_policy=policy, fallback_parser=parser
            )

    async def start_message(self, message: Any, log_context: dict[str, str]) -> None:
        """Log the message; under ACK_FIRST, ack first."""
        if self._acks_first:
            await self.ack(message)
        if self.is_logging:
            self._state.log("Received", extra=log_context)

    async def ack(self, message: Any) -> None:
        """Ack `message`; log an error as FastStream does."""
        try:
            await message.ack()
        except Exception as error:  # noqa: BLE001 - as FastStream's
            self._state.log(repr(error), logging.CRITICAL, exc_info=error)

    async def finish(self, row: Any, message: Any, error: BaseException | None) -> bool:
        """Finish the message after an error, or without a message.

        Logs, then acknowledges, as FastStream's two middlewares do on their exit. `error` is the
        exception being handled.

        Args:
            row: The row, or the rows of a batch.
            message: FastStream's message; None if it was not created.
            error: The error raised by the handler, a middleware or FastStream.

        Returns:
            True if the error was handled.
        """
        log: Any = self._make_log(row, context=self._context)
        if message is not None:
            log.source_type = message.source_type
        if isinstance(error, SkipMessage):
            record_skip(row)
        failure: BaseException | None = None
        try:
            await log.__aexit__(*_get_exc_info(error))
        except BaseException as log_error:  # noqa: BLE001 - raised again unless handled
            failure = log_error
        # Not inside of `except`, because the outcome must name the error being handled here.
        return await self._acknowledge(row, message, error, failure)

    async def finish_handled(self, row: Any, message: Any) -> None:
        """Finish a message whose handler and answers succeeded: log and ack it.

        Failures of the log are handled like failures of the handler, as in FastStream.
        """
        failure: BaseException | None = None
        if self.is_logging:
            try:
                self._state.log("Processed", extra=self._context.get_local("log_context", {}))
            except BaseException as log_error:  # noqa: BLE001 - as above
                failure = log_error
        if failure is not None:
            await self._acknowledge(row, message, None, failure)
        elif self._acks and not ack_quickly(message):
            await self.ack(message)

    @property
    def is_logging(self) -> bool:
        """True if log lines are written anywhere."""
        return self._state.logger.__class__ is not EmptyLoggerObject

    async def _acknowledge(
        self, row: Any, message: Any, error: BaseException | None, failure: BaseException | None
    ) -> bool:
        """Acknowledge by the ack policy after an error; return True if the error was handled.

        FastStream's middleware does the work. `failure` was raised while logging and takes
        precedence over `error`, the handler's.
        """
        if self._make_ack is not None:
            ack: Any = self._make_ack(row, context=self._context)
            ack.message = message
            if await ack.__aexit__(*_get_exc_info(failure or error)):
                return True
        if failure is not None:
            raise failure
        return False


def _get_exc_info(error: BaseException | None) -> _Info:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


class SkipMiddleware(BaseMiddleware):
    """Acks messages after SkipMessage, for which FastStream's pipeline sets no outcome."""

    @override
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool:
        """Record that the message was skipped, if so, and let any error pass."""
        if isinstance(exc_val, SkipMessage):
            record_skip(self.msg)
        return False

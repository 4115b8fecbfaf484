"""What FastStream's own two middlewares do, which acknowledge and log.

A message that is handled and acked needs neither; for all others FastStream's own objects do it.
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


class Acknowledging:
    """Does the work of the two middlewares for the messages of one subscriber."""

    __slots__ = ("_acks", "_acks_first", "_context", "_make_ack", "_make_log", "_state")

    def __init__(self, state: Any, context: Any, policy: AckPolicy, parser: Any) -> None:
        """`parser` makes a message of a row that no message was made of."""
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

    async def begin(self, message: Any, log_context: dict[str, str]) -> None:
        """Ack what is acked first, and log."""
        if self._acks_first:
            await self.ack(message)
        if self.talks:
            self._state.log("Received", extra=log_context)

    async def ack(self, message: Any) -> None:
        """Ack `message`; FastStream logs what that raises."""
        try:
            await message.ack()
        except Exception as error:  # noqa: BLE001 - as FastStream's
            self._state.log(repr(error), logging.CRITICAL, exc_info=error)

    async def leave(self, row: Any, message: Any, error: BaseException | None) -> bool:
        """End the message with `error`, which is being handled, or without.

        Args:
            row: The row, or the rows of a batch.
            message: FastStream's; None if it was not made.
            error: What its handler, a middleware or FastStream has raised.

        Returns:
            Whether the error is dealt with.
        """
        log: Any = self._make_log(row, context=self._context)
        if message is not None:
            log.source_type = message.source_type
        if isinstance(error, SkipMessage):
            record_skip(row)
        failure: BaseException | None = None
        try:
            await log.__aexit__(*_info(error))
        except BaseException as another:  # noqa: BLE001 - raised again, unless it is dealt with
            failure = another
        # Not inside of `except`: the outcome names the error that is being handled here.
        return await self._acknowledge(row, message, error, failure)

    async def leave_handled(self, row: Any, message: Any) -> None:
        """End the message, whose handler and answers went well."""
        failure: BaseException | None = None
        if self.talks:
            try:
                self._state.log("Processed", extra=self._context.get_local("log_context", {}))
            except BaseException as another:  # noqa: BLE001 - as above
                failure = another
        if failure is not None:
            await self._acknowledge(row, message, None, failure)
        elif self._acks and not ack_quickly(message):
            await self.ack(message)

    @property
    def talks(self) -> bool:
        """Whether log lines go anywhere."""
        return self._state.logger.__class__ is not EmptyLoggerObject

    async def _acknowledge(
        self, row: Any, message: Any, error: BaseException | None, failure: BaseException | None
    ) -> bool:
        """Acknowledge as `failure` asks for, which the log has raised, or else `error`."""
        if self._make_ack is not None:
            ack: Any = self._make_ack(row, context=self._context)
            ack.message = message
            if await ack.__aexit__(*_info(failure or error)):
                return True
        if failure is not None:
            raise failure
        return False


def _info(error: BaseException | None) -> _Info:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


class SkipsMessages(BaseMiddleware):
    """Acks messages by SkipMessage, which FastStream's pipeline leaves without an outcome."""

    @override
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool:
        """Let any error pass."""
        if isinstance(exc_val, SkipMessage):
            record_skip(self.msg)
        return False

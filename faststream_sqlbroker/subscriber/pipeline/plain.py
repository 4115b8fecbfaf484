"""The way of a message through a subscriber without middlewares."""

from typing import Any

from faststream import AckPolicy

from faststream_sqlbroker.adapter.pipeline import EmptyLoggerObject
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.subscriber.pipeline.bodies import ack_quickly
from faststream_sqlbroker.subscriber.pipeline.parts import Parts


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

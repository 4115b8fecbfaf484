"""Batches of which a message keeps the handler from starting: it goes alone, the others go without
it.

A message that fails alone fails as with a subscriber without batch=True, by the same middlewares
and the same AckPolicy. Nothing is handed out again once the handler has started.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from fast_depends.exceptions import ValidationError as FastDependsValidationError
from faststream import BaseMiddleware
from pydantic import ValidationError
from typing_extensions import override

from faststream_sqlbroker.batch_start import (
    BatchStart,
    current_batch_start,
    is_marking_start,
    record_fault,
)
from faststream_sqlbroker.core.outcome import Again
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.subscriber.invalid_body import is_fastapis

if TYPE_CHECKING:
    from faststream.message import StreamMessage

    from faststream_sqlbroker.adapter.endpoints import CallsCollection
    from faststream_sqlbroker.flow.deliver.delivery import Handle


class Batches:
    """Hands the batches of one subscriber out again, in parts; and makes the middleware that finds
    out why.
    """

    def __init__(self, calls: "CallsCollection[Any]", log: Callable[..., None]) -> None:
        self._calls = calls
        self._log = log

    def __call__(self, msg: Any, **options: Any) -> BaseMiddleware:
        """The innermost middleware of one call."""
        return _NotesRefusals(msg, fields=self._fields, **options)

    def _fields(self) -> set[str]:
        """Names by which the handlers take the batch: that of the only parameter that FastStream
        fills from it.
        """
        parameters: list[list[Any]] = [
            getattr(call.dependant, "flat_params", []) for call in self._calls
        ]
        return {only[0].field_name for only in parameters if len(only) == 1}

    def noting(self, parser: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """`parser`, whose errors are a message's fault."""

        async def parse(rows: Any) -> Any:
            try:
                return await parser(rows)
            except Exception as error:
                record_fault(error)
                raise

        return parse

    def handing_out(self, consume: "Handle") -> "Handle":
        """`consume`, after which the messages of a batch that did not start have the outcome Again.

        `consume` runs FastStream's pipeline, and raises none of its errors.
        """

        async def consume_batch(rows: tuple[ClaimedMessage, ...]) -> None:
            start = BatchStart()
            token = current_batch_start.set(start)
            try:
                await consume(rows)
            finally:
                current_batch_start.reset(token)
            if start.error is not None and not start.started and len(rows) > 1 and self._marked:
                self._hand_out_again(rows, start)

        return consume_batch

    @property
    def _marked(self) -> bool:
        """Whether the start would have been noticed: another broker's subscriber may have set the
        handler up anew.
        """
        return all(
            is_marking_start(call.handler._original_call)  # noqa: SLF001 - the only way
            for call in self._calls
        )

    def _hand_out_again(self, rows: Sequence[ClaimedMessage], start: BatchStart) -> None:
        """The culprits one by one, after the others; both halves if they are unknown."""
        for place, row in enumerate(rows):
            if start.culprits:
                row.outcome = Again(1 + place if place in start.culprits else 0)
            else:
                row.outcome = Again(int(place >= len(rows) // 2))
        who = [rows[place].id for place in sorted(start.culprits)] or "one or more of them"
        self._log(
            logging.WARNING,
            f"the handler of {len(rows)} messages, from {rows[0].id} on, has not started because "
            f"of {who}, and gets them again in parts: {type(start.error).__name__}",
            message_id=rows[0].id,
        )


class _NotesRefusals(BaseMiddleware):
    """Notes the errors of the handler's validation, before any inner middleware can change them."""

    def __init__(self, msg: Any, *, fields: Callable[[], set[str]], **options: Any) -> None:
        super().__init__(msg, **options)
        self._fields = fields

    @override
    async def consume_scope(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: "StreamMessage[Any]"
    ) -> Any:
        try:
            return await call_next(msg)
        except Exception as error:
            start = current_batch_start.get()
            if start is not None and not start.started and start.error is not error:
                await self._note_refusal(error, msg)
            raise

    async def _note_refusal(self, error: Exception, message: "StreamMessage[Any]") -> None:
        refusal = error.original_error if isinstance(error, FastDependsValidationError) else error
        if isinstance(refusal, ValidationError):
            await self._note_places(error, refusal, message)
        elif refusal is not error or _is_msgspecs(error) or is_fastapis(error):
            record_fault(error)

    async def _note_places(
        self, error: Exception, refusal: ValidationError, message: "StreamMessage[Any]"
    ) -> None:
        """Note the messages that Pydantic names, unless it is not the batch that it refuses."""
        places = [each["loc"] for each in refusal.errors(include_url=False, include_input=False)]
        fields = self._fields()
        if not all(place and place[0] in fields for place in places):
            return  # another parameter's, or a dependency's: whatever the batch is
        batch = await message.decode()
        aligned = isinstance(batch, Sequence) and len(batch) == len(message.raw_message)
        record_fault(error, _named(places) if aligned else ())


def _named(places: Sequence[tuple[int | str, ...]]) -> set[int]:
    """The positions in the batch that `places` name; none, unless each of them names one."""
    positions = {place[1] for place in places if len(place) > 1 and isinstance(place[1], int)}
    return positions if all(place[1:2] and place[1] in positions for place in places) else set()


def _is_msgspecs(error: Exception) -> bool:
    return type(error).__name__ == "ValidationError" and type(error).__module__ == "msgspec"

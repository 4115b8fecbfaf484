"""Split batches in which a message prevents the handler from starting.

That message is delivered alone, and the others without it. A message that fails alone fails as with
a subscriber without batch=True, through the same middlewares and the same AckPolicy. Nothing is
redelivered once the handler has started.
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
from faststream_sqlbroker.subscriber.invalid_body import is_fastapi_error

if TYPE_CHECKING:
    from faststream.message import StreamMessage

    from faststream_sqlbroker.adapter.endpoints import CallsCollection
    from faststream_sqlbroker.flow.deliver.delivery import Handle


class Batches:
    """Redelivers a batch in parts if the handler could not start.

    One undecodable or invalid body prevents the start for the whole batch. The object is also the
    factory of a middleware that records which messages caused this.
    """

    def __init__(self, calls: "CallsCollection[Any]", log: Callable[..., None]) -> None:
        self._calls = calls
        self._log = log

    def __call__(self, msg: Any, **options: Any) -> BaseMiddleware:
        """Create the innermost middleware of a call."""
        return _RefusalRecorder(msg, fields=self._get_fields, **options)

    def _get_fields(self) -> set[str]:
        """Return the parameter names through which handlers receive the batch.

        A validation error of such a parameter was caused by a message. FastStream fills a handler's
        only parameter from the batch; with several parameters none receives it.
        """
        parameters: list[list[Any]] = [
            getattr(call.dependant, "flat_params", []) for call in self._calls
        ]
        return {params[0].field_name for params in parameters if len(params) == 1}

    def wrap_parser(
        self, parser: Callable[[Any], Awaitable[Any]]
    ) -> Callable[[Any], Awaitable[Any]]:
        """Wrap a custom `parser` so that its error counts as caused by a message of the batch.

        The batch is then delivered again in parts.
        """

        async def parse(rows: Any) -> Any:
            try:
                return await parser(rows)
            except Exception as error:
                record_fault(error)
                raise

        return parse

    def wrap_handler(self, consume: "Handle") -> "Handle":
        """Wrap `consume` so that a batch whose handler did not start is redelivered in parts.

        `consume` runs FastStream's pipeline and raises none of its errors. A single message is
        settled by its error as usual.
        """

        async def consume_batch(rows: tuple[ClaimedMessage, ...]) -> None:
            """Deliver `rows`, and have them redelivered in parts if the handler did not start."""
            start = BatchStart()
            token = current_batch_start.set(start)
            try:
                await consume(rows)
            finally:
                # A single message is not split: its error settles it as usual.
                current_batch_start.reset(token)
            if (
                start.error is not None
                and not start.started
                and len(rows) > 1
                and self._can_detect_start
            ):
                self._split_batch(rows, start)

        return consume_batch

    @property
    def _can_detect_start(self) -> bool:
        """True if `wrap_to_mark_start` still wraps all handlers, and so records their start.

        Another broker's subscriber may have wrapped a handler again. Splitting the batch then could
        redeliver messages that the handler has already processed.
        """
        return all(
            is_marking_start(call.handler._original_call)  # noqa: SLF001 - the only way
            for call in self._calls
        )

    def _split_batch(self, rows: Sequence[ClaimedMessage], start: BatchStart) -> None:
        """Give each message the outcome `Again`, which redelivers it in one of several parts.

        `Again(n)` puts a message into part n. Culprits, the messages known to have caused the
        error, are redelivered alone, after the other messages in part 0. Without a known culprit
        the batch is split into halves.
        """
        for position, row in enumerate(rows):
            if start.culprits:
                row.outcome = Again(1 + position if position in start.culprits else 0)
            else:
                row.outcome = Again(int(position >= len(rows) // 2))
        culprits = [
            rows[position].id for position in sorted(start.culprits)
        ] or "one or more messages"
        self._log(
            logging.WARNING,
            f"the handler did not start on the {len(rows)} messages from {rows[0].id} on "
            f"({type(start.error).__name__} in {culprits}): they are delivered again in parts",
            message_id=rows[0].id,
        )


class _RefusalRecorder(BaseMiddleware):
    """Records the errors of the handler's validation before an inner middleware can change them."""

    def __init__(self, msg: Any, *, fields: Callable[[], set[str]], **options: Any) -> None:
        super().__init__(msg, **options)
        self._fields = fields

    @override
    async def consume_scope(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: "StreamMessage[Any]"
    ) -> Any:
        """Record an error that was raised before the handler started.

        The parser and the decoder have recorded their errors already.
        """
        try:
            return await call_next(msg)
        except Exception as error:
            start = current_batch_start.get()
            if start is not None and not start.started and start.error is not error:
                await self._record_refusal(error, msg)
            raise

    async def _record_refusal(self, error: Exception, message: "StreamMessage[Any]") -> None:
        """Record `error` if it means that the batch does not fit the handler's annotation.

        FastDepends, msgspec and FastAPI report this in different ways. Any other error is not the
        fault of a message.
        """
        refusal = error.original_error if isinstance(error, FastDependsValidationError) else error
        if isinstance(refusal, ValidationError):
            await self._record_positions(error, refusal, message)
        elif refusal is not error or _is_msgspec_error(error) or is_fastapi_error(error):
            record_fault(error)

    async def _record_positions(
        self, error: Exception, refusal: ValidationError, message: "StreamMessage[Any]"
    ) -> None:
        """Record the messages that Pydantic's errors name as culprits, if the batch was refused.

        An error of another parameter or of a dependency is not recorded: redelivery in parts would
        not help.
        """
        locations = [
            detail["loc"] for detail in refusal.errors(include_url=False, include_input=False)
        ]
        fields = self._fields()
        if not all(location and location[0] in fields for location in locations):
            return  # an error of another parameter or a dependency, whatever the batch
        batch = await message.decode()
        # Positions are only known if the decoder returned one body for each message.
        aligned = isinstance(batch, Sequence) and len(batch) == len(message.raw_message)
        record_fault(error, _find_positions(locations) if aligned else ())


def _find_positions(locations: Sequence[tuple[int | str, ...]]) -> set[int]:
    """Return the positions in the batch that `locations` name.

    `locations` are Pydantic's locations of errors. If one of them names no position, the culprits
    are unknown and the result is empty.
    """
    positions = {
        location[1] for location in locations if len(location) > 1 and isinstance(location[1], int)
    }
    return (
        positions
        if all(location[1:2] and location[1] in positions for location in locations)
        else set()
    )


def _is_msgspec_error(error: Exception) -> bool:
    return type(error).__name__ == "ValidationError" and type(error).__module__ == "msgspec"

"""Bodies that the handler cannot accept: they cannot be decoded, or do not fit its parameters.

The cause of an error is determined from the traceback: only calls of FastStream, and none of the
application, lie between the pipeline and the error. This costs nothing while there is no error, and
the same error raised by a handler, a dependency or a middleware is attributed to that code.
"""

from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

from fast_depends.exceptions import ValidationError as FastDependsValidationError
from fast_depends.library.serializer import Serializer
from faststream.message import StreamMessage
from pydantic import ValidationError

from faststream_sqlbroker.core.outcome import Nack, Outcome, Reject
from faststream_sqlbroker.core.reasons import INVALID_BODY
from faststream_sqlbroker.core.rows import ClaimedMessage

_LIBRARIES = frozenset({"fast_depends", "faststream", "faststream_sqlbroker"})
_CALL = "decode_wrapper"
"""FastStream's function that decodes the body and calls the handler."""

_COMPILED_CALL = "call_compiled"
"""The equivalent function of the compiled pipeline."""

_FASTAPI_RAISES = "raise_fastapi_validation_error"
"""The function in which FastStream's FastAPI integration raises validation errors of FastAPI."""
_BODY_LOCATIONS = frozenset({"body", "path", "query"})


def settle_invalid(raw: Any, error: Exception, *, retry: bool) -> None:
    """Reject the message of `raw` if the body caused `error`, unless otherwise settled.

    Called after each error of FastStream's pipeline. A retry would fail again on the same body.

    Args:
        raw: A row, or a tuple of rows; a batch of several is redelivered in parts instead.
        error: The error raised by FastStream's pipeline.
        retry: Retry the message, as after any other error.
    """
    rows = raw if isinstance(raw, tuple) else (raw,)
    if len(rows) != 1 or not isinstance(rows[0], ClaimedMessage):
        return
    row = rows[0]
    if _is_settled_by(error, row.outcome, retry=retry) and is_body_refused(error, raw):
        row.replace_outcome(Nack(error=error) if retry else Reject(INVALID_BODY, error))


def _is_settled_by(error: Exception, outcome: Outcome | None, *, retry: bool) -> bool:
    """Return True if only the ack policy settled the message, because of `error`.

    An outcome that the handler or a middleware chose is kept. With `retry`, a nack is already the
    wanted outcome.
    """
    match outcome:
        case Nack(delay=None):
            return outcome.error is error and not retry
        case Reject(reason=None):
            return outcome.error is error
        case _:
            return outcome is None  # AckPolicy.MANUAL: the handler did not run


def is_body_refused(error: Exception, raw: Any) -> bool:
    """Return True if `error` means that the body is undecodable or does not fit the parameters.

    Only a ValueError, msgspec's errors and too deep nesting have this meaning. A decoder that
    cannot reach a server raises other errors. The traceback shows where the error was raised: the
    same error of the handler's own code does not count.
    """
    if is_fastapi_error(error):
        return True
    if not (isinstance(error, ValueError | RecursionError) or _is_msgspec_error(error)):
        return False
    # Walk from the pipeline inwards: decoding, the call of the handler, and the first frame inside
    # that call.
    is_inside_call = False
    is_call = False
    for frame, _ in walk_tb(error.__traceback__):
        if _is_decoding(frame, raw):
            return True
        if is_inside_call and (parameters := _get_validated_parameters(frame)) is not None:
            return _is_body_error(error, parameters)
        if is_inside_call and _get_library(frame) not in _LIBRARIES:
            return False
        is_call = frame.f_code.co_name == _CALL and _get_library(frame) == "faststream"
        is_inside_call |= is_call or _is_compiled_call(frame)
    # Raised by the call itself: the body should fill several parameters, but is a single value.
    return is_call


def is_faststream_call(call: Any) -> bool:
    """Return True if `call` is FastStream's own function, not a replacement by another tool.

    Only FastStream's own function may be replaced by the compiled pipeline.
    """
    code = getattr(call, "__code__", None)
    module = str(getattr(call, "__globals__", {}).get("__name__"))
    return code is not None and code.co_name == _CALL and module.startswith("faststream.")


def _is_compiled_call(frame: FrameType) -> bool:
    """Return True if the frame is the compiled pipeline's call of the handler."""
    return frame.f_code.co_name == _COMPILED_CALL and _get_library(frame) == "faststream_sqlbroker"


def _is_decoding(frame: FrameType, raw: Any) -> bool:
    """Return True if `frame` decodes the body of `raw`; a handler may decode another message."""
    message = frame.f_locals.get("self")
    return (
        frame.f_code.co_name == "decode"
        and isinstance(message, StreamMessage)
        and message.raw_message is raw
    )


def raise_invalid(error: Exception, parameters: Serializer) -> NoReturn:  # noqa: ARG001 - see _get_validated_parameters
    """Raise `error` of the compiled pipeline, because values do not fit `parameters`.

    `_get_validated_parameters` recognizes this frame in the traceback, and reads the argument from
    it.
    """
    raise error


def _get_validated_parameters(frame: FrameType) -> Serializer | None:
    """Return the handler's parameters if `frame` validates parameters; otherwise None.

    A frame is a call in the traceback of an error. FastDepends validates in `Serializer.__call__`;
    the compiled pipeline raises such errors in `raise_invalid`.
    """
    if frame.f_code is raise_invalid.__code__:
        parameters: Serializer = frame.f_locals["parameters"]
        return parameters
    owner = frame.f_locals.get("self")
    is_call = frame.f_code.co_name == "__call__" and isinstance(owner, Serializer)
    return owner if is_call else None


def _get_library(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _is_body_error(error: Exception, parameters: Serializer) -> bool:
    """Return True if the invalid value came from the body, not from the context or a dependency.

    `parameters` are those of the handler or of a dependency.
    """
    refusal = error.original_error if isinstance(error, FastDependsValidationError) else error
    if not isinstance(refusal, ValidationError):
        return refusal is not error or _is_msgspec_error(refusal)
    locations = (detail["loc"] for detail in refusal.errors(include_url=False, include_input=False))
    fields = [parameters.options.get(str(location[0])) for location in locations if location]
    # Only parameters of the context and dependencies have a source.
    return all(parameter is None or parameter.source is None for parameter in fields)


def is_fastapi_error(error: Exception) -> bool:
    """Return True if FastAPI reports that the body does not fit the handler's parameters.

    FastAPI treats the body as a request: errors are located in the query, the path or the body. The
    same error raised by the handler itself is attributed to the handler.
    """
    if type(error).__module__ != "fastapi.exceptions" or not hasattr(error, "errors"):
        return False
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    is_raised_by_fastapi = bool(frames) and frames[-1].f_code.co_name == _FASTAPI_RAISES
    return is_raised_by_fastapi and all(
        detail["loc"][:1][0] in _BODY_LOCATIONS for detail in error.errors()
    )


def _is_msgspec_error(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "msgspec"

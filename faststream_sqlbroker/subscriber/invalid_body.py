"""Bodies that the handler cannot take: they cannot be decoded, or do not fit its parameters.

What an error is, is read from where it was raised: FastStream's calls lie between, and none of the
application's. So it costs nothing while there is no error, and the same error raised by a handler,
a dependency or a middleware is theirs.
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
"""FastStream's function that decodes the body and calls the handler with it."""

_COMPILED_CALL = "call_compiled"
"""Ours that does the same in the compiled pipeline."""

_FASTAPI_REFUSES = "raise_fastapi_validation_error"
"""The function in which FastStream's integrations of FastAPI raise what FastAPI has found."""
_FROM_BODY = frozenset({"body", "path", "query"})


def settle_invalid(raw: Any, error: Exception, *, retry: bool) -> None:
    """Reject the message of `raw` if its body is at fault for `error`, unless it is settled
    otherwise.

    Args:
        raw: A row, or a tuple of them; a batch of several is handed out again in parts instead.
        error: What FastStream's pipeline has raised.
        retry: Whether it is to be tried again, as after any error.
    """
    rows = raw if isinstance(raw, tuple) else (raw,)
    if len(rows) != 1 or not isinstance(rows[0], ClaimedMessage):
        return
    row = rows[0]
    if _is_settled_by(error, row.outcome, retry=retry) and is_body_refused(error, raw):
        row.settle_anew(Nack(error=error) if retry else Reject(INVALID_BODY, error))


def _is_settled_by(error: Exception, outcome: Outcome | None, *, retry: bool) -> bool:
    """Whether `outcome` is what the ack policy makes of `error`, which nothing else has decided."""
    match outcome:
        case Nack(delay=None):
            return outcome.error is error and not retry
        case Reject(reason=None):
            return outcome.error is error
        case _:
            return outcome is None  # AckPolicy.MANUAL: its handler could not say anything


def is_body_refused(error: Exception, raw: Any) -> bool:
    """Whether `error` says that the body of `raw` cannot be decoded, or does not fit the handler's
    parameters.

    Only a ValueError, msgspec's errors and too deep nesting say so: a decoder that cannot reach a
    server is none.
    """
    if is_fastapis(error):
        return True
    if not (isinstance(error, ValueError | RecursionError) or _is_msgspecs(error)):
        return False
    # From the pipeline inwards: decoding, the call of the handler, and what that calls first.
    calling = False
    is_call = False
    for frame, _ in walk_tb(error.__traceback__):
        if _decodes(frame, raw):
            return True
        if calling and (parameters := _validates(frame)) is not None:
            return _is_of_body(error, parameters)
        if calling and _library(frame) not in _LIBRARIES:
            return False
        is_call = frame.f_code.co_name == _CALL and _library(frame) == "faststream"
        calling |= is_call or _is_compiled_call(frame)
    # Raised by the call itself: a body that is to fill several parameters, and holds one value.
    return is_call


def is_faststreams_call(call: Any) -> bool:
    """Whether `call` is FastStream's function, and not one that a tool has put in its place."""
    code = getattr(call, "__code__", None)
    module = str(getattr(call, "__globals__", {}).get("__name__"))
    return code is not None and code.co_name == _CALL and module.startswith("faststream.")


def _is_compiled_call(frame: FrameType) -> bool:
    return frame.f_code.co_name == _COMPILED_CALL and _library(frame) == "faststream_sqlbroker"


def _decodes(frame: FrameType, raw: Any) -> bool:
    """Whether `frame` decodes the body of `raw`; a handler may decode another message's."""
    message = frame.f_locals.get("self")
    return (
        frame.f_code.co_name == "decode"
        and isinstance(message, StreamMessage)
        and message.raw_message is raw
    )


def refuse(error: Exception, parameters: Serializer) -> NoReturn:  # noqa: ARG001 - see _validates
    """Raise `error` of the compiled pipeline: values do not fit `parameters`."""
    raise error


def _validates(frame: FrameType) -> Serializer | None:
    """The handler's parameters, if `frame` fits values to them."""
    if frame.f_code is refuse.__code__:
        refused: Serializer = frame.f_locals["parameters"]
        return refused
    owner = frame.f_locals.get("self")
    is_call = frame.f_code.co_name == "__call__" and isinstance(owner, Serializer)
    return owner if is_call else None


def _library(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _is_of_body(error: Exception, parameters: Serializer) -> bool:
    """Whether what does not fit is filled from the body, rather than from the context or a
    dependency.
    """
    refusal = error.original_error if isinstance(error, FastDependsValidationError) else error
    if not isinstance(refusal, ValidationError):
        return refusal is not error or _is_msgspecs(refusal)
    places = (each["loc"] for each in refusal.errors(include_url=False, include_input=False))
    found = [parameters.options.get(str(place[0])) for place in places if place]
    return all(parameter is None or parameter.source is None for parameter in found)


def is_fastapis(error: Exception) -> bool:
    """Whether FastAPI says that the body does not fit the handler's parameters.

    It takes a body for a request: what it finds wrong is in the query, the path or the body. The
    same error from the handler itself is the handler's.
    """
    if type(error).__module__ != "fastapi.exceptions" or not hasattr(error, "errors"):
        return False
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    own = bool(frames) and frames[-1].f_code.co_name == _FASTAPI_REFUSES
    return own and all(each["loc"][:1][0] in _FROM_BODY for each in error.errors())


def _is_msgspecs(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "msgspec"

"""Error responses, and request bodies within their limits."""

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from faststream_sqlbroker.core.text import format_value

FORM = "application/x-www-form-urlencoded"
MAX_FORM_FIELDS = 20
"""Fields of a form; no operation has more."""


class Problem(Exception):  # noqa: N818 - it is an answer, not a failure of the program
    """A refused request.

    Attributes:
        status: Status code of the response.
        text: Message for the caller; it must not contain a secret.
        headers: Additional headers of the response.
    """

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})

    def to_response(self) -> Response:
        """Return the problem as a JSON response."""
        return JSONResponse({"error": self.text}, self.status, self.headers)


class StoredJsonResponse(JSONResponse):
    """A response of stored values, which need not be valid JSON or UTF-8.

    Another program may have stored NaN or half of a surrogate pair. Without the conversion, one
    such message would make the response fail, and hide all other messages in it.
    """

    def render(self, content: Any) -> bytes:
        """Return the bytes of the response."""
        try:
            return super().render(content)
        except (ValueError, RecursionError):
            return super().render(to_valid_json(content))


def encode_body(payload: bytes, *, as_bytes: bool = False) -> tuple[str, bool]:
    """Return a body as text, and True if the text is base64.

    Base64 is used for bytes that are not UTF-8, and always with `as_bytes`.
    """
    if not as_bytes:
        with suppress(UnicodeDecodeError):
            return payload.decode(), False
    return base64.b64encode(payload).decode(), True


def to_valid_json(value: Any) -> Any:
    """Replace NaN and infinity by text, and halves of surrogate pairs by question marks.

    Raises:
        ValueError, RecursionError: the value cannot be written as JSON.
    """
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
    return json.loads(text, parse_constant=str)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of a request body."""

    max_bytes: int
    """Maximum size in bytes."""
    timeout: float
    """Seconds for the complete body, so that a slow client cannot hold a connection."""


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """Read the complete body.

    Raises:
        Problem: the body is too large (413), takes too long (408), or the client has gone (400).
    """
    content_length = request.headers.get("content-length", "0")
    # Not all digits are parsed, because Python refuses very long numbers.
    if (
        not content_length.isascii()
        or not content_length.isdecimal()
        or int(content_length[:20]) > limits.max_bytes
    ):
        raise _create_too_large_problem(f"Content-Length {format_value(content_length)}", limits)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.timeout):
            async for part in request.stream():
                size += len(part)
                if size > limits.max_bytes:
                    raise _create_too_large_problem(f"{size} bytes or more", limits)
                parts.append(part)
    except TimeoutError:
        text = (
            f"the body must arrive within {limits.timeout:g} s, got only {size} bytes: "
            "send less, or send it faster"
        )
        raise Problem(408, text, {"Connection": "close"}) from None
    except ClientDisconnect:
        raise Problem(400, "the client has disconnected") from None
    return b"".join(parts)


def _create_too_large_problem(received: str, limits: BodyLimits) -> Problem:
    """Return the problem, which closes the connection: the rest of the body is not read.

    On a connection that stays open, that rest would be taken for the next request.
    """
    text = (
        f"the body must have at most {limits.max_bytes} bytes (max_body), got {received}: "
        "send less at a time"
    )
    return Problem(413, text, {"Connection": "close"})


_KINDS = {
    dict: "a JSON object",
    list: "a JSON array",
    str: "a JSON string",
    bool: "a JSON boolean",
    type(None): "JSON null",
}


def describe_kind(value: object) -> str:
    """Name the JSON type of a value, without repeating the value."""
    return _KINDS.get(type(value), "a JSON number")


async def read_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """Read the body as a JSON object; a missing body is an empty object.

    Raises:
        Problem: `read_body` failed, or the body is no JSON object (400).
    """
    body = await read_body(request, limits)
    requirement = "the body must be a JSON object"
    try:
        # It refuses halves of surrogate pairs, and values nested too deeply to be written.
        value = from_json(body or b"{}")
    except ValueError as error:
        # The error has the position of the mistake, and no part of the body.
        raise Problem(400, f"{requirement}, but is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise Problem(400, f"{requirement}, got {describe_kind(value)}")
    return value


async def read_form(request: Request, limits: BodyLimits) -> dict[str, str]:
    """Read the fields of a form body; a missing body has no fields.

    Raises:
        Problem: `read_body` failed, the body is of another type (415), or a field occurs twice
            (400).
    """
    body = await read_body(request, limits)
    if not body:
        return {}
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != FORM:
        received = format_value(media_type) if media_type else "no Content-Type"
        raise Problem(415, f"the body must be a form of the type {FORM}, got {received}")
    try:
        pairs = parse_qsl(
            body.decode(),
            keep_blank_values=True,
            strict_parsing=True,
            max_num_fields=MAX_FORM_FIELDS,
        )
    except ValueError:
        text = (
            f"the body must be a form of up to {MAX_FORM_FIELDS} fields such as rotate=true, "
            f"joined by &, in UTF-8; got {len(body)} bytes in another form"
        )
        raise Problem(400, text) from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        duplicate = next(name for name, times in Counter(n for n, _ in pairs).items() if times > 1)
        raise Problem(
            400, f"a field may occur once, got {format_value(duplicate)} twice: remove one"
        )
    return fields

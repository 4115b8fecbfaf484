"""Answers of errors, and bodies of requests within their limits."""

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

from faststream_sqlbroker.core.text import short

FORM = "application/x-www-form-urlencoded"
MOST_FIELDS = 20
"""Fields of a form; no request has more."""


class Problem(Exception):  # noqa: N818 - it is an answer, not a failure of the program
    """A request that is refused.

    Attributes:
        status: The code of the answer.
        text: What is wrong, for its caller: it must hold no secret.
        headers: More headers of the answer.
    """

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})

    def response(self) -> Response:
        """As JSON."""
        return JSONResponse({"error": self.text}, self.status, self.headers)


class StoredJson(JSONResponse):
    """Tells what is stored, as far as JSON of UTF-8 can: another program may have stored NaN, or
    half of a surrogate pair. An answer that failed would hide all other messages with it.
    """

    def render(self, content: Any) -> bytes:
        """The bytes of the answer."""
        try:
            return super().render(content)
        except (ValueError, RecursionError):
            return super().render(tellable(content))


def told_body(payload: bytes, *, as_bytes: bool = False) -> tuple[str, bool]:
    """The text of a body, and whether it is base64: if it is no text, or with `as_bytes`."""
    if not as_bytes:
        with suppress(UnicodeDecodeError):
            return payload.decode(), False
    return base64.b64encode(payload).decode(), True


def tellable(value: Any) -> Any:
    """`value` with texts in place of NaN and infinity, and ? for halves of surrogate pairs.

    Raises:
        ValueError, RecursionError: it is nothing that JSON has.
    """
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
    return json.loads(text, parse_constant=str)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a request may send."""

    most: int
    """Bytes."""
    timeout: float
    """Seconds for the whole body: a slow client holds a connection no longer."""


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """The whole body.

    Raises:
        Problem: it is too large (413), takes too long (408), or its client has gone (400).
    """
    told = request.headers.get("content-length", "0")
    if not told.isascii() or not told.isdecimal() or int(told[:20]) > limits.most:
        raise _too_large(f"Content-Length {short(told)}", limits)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.timeout):
            async for part in request.stream():
                size += len(part)
                if size > limits.most:
                    raise _too_large(f"{size} bytes or more", limits)
                parts.append(part)
    except TimeoutError:
        text = (
            f"{size} bytes of the body came in {limits.timeout:g} s, and it must be whole by then: "
            "send less, or faster"
        )
        raise Problem(408, text, {"Connection": "close"}) from None
    except ClientDisconnect:
        raise Problem(400, "the client has gone") from None
    return b"".join(parts)


def _too_large(given: str, limits: BodyLimits) -> Problem:
    text = f"a body has at most {limits.most} bytes (max_body), got {given}: send less at a time"
    return Problem(413, text, {"Connection": "close"})


_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
}


def kind_of(value: object) -> str:
    """What a value of JSON is: a body itself is not repeated."""
    return f"{_KINDS.get(type(value), 'a number')} of JSON"


async def read_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """The body, a JSON object; an empty one for no body, as its fields may all have defaults.

    Raises:
        Problem: as `read_body`; or it is something else (400).
    """
    body = await read_body(request, limits)
    wanted = "the body must be a JSON object"
    try:
        # It refuses halves of surrogate pairs, and what is nested deeper than we could write it.
        found = from_json(body or b"{}")
    except ValueError as error:
        # Its text has the place of the mistake, and nothing of the body.
        raise Problem(400, f"{wanted}, and is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Problem(400, f"{wanted}, got {kind_of(found)}")
    return found


async def read_form(request: Request, limits: BodyLimits) -> dict[str, str]:
    """The fields of a body of the type application/x-www-form-urlencoded; none for no body.

    Raises:
        Problem: as `read_body`; or it is something else (415), or a field is there twice (400).
    """
    body = await read_body(request, limits)
    if not body:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != FORM:
        given = short(kind) if kind else "no Content-Type"
        raise Problem(415, f"the body must be a form of the type {FORM}, got {given}")
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, strict_parsing=True, max_num_fields=MOST_FIELDS
        )
    except ValueError:
        text = (
            f"the body must be a form of up to {MOST_FIELDS} fields such as rotate=true, joined by "
            f"&, in UTF-8; got {len(body)} bytes that are none"
        )
        raise Problem(400, text) from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = next(name for name, times in Counter(n for n, _ in pairs).items() if times > 1)
        raise Problem(400, f"a field may be there once, got {short(twice)} twice: leave one out")
    return fields

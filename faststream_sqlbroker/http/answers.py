"""Answers of errors, and bodies of requests within their limits."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

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
    too_large = Problem(413, f"a body has at most {limits.most} bytes", {"Connection": "close"})
    told = request.headers.get("content-length", "0")
    if not told.isascii() or not told.isdecimal() or int(told[:20]) > limits.most:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.timeout):
            async for part in request.stream():
                size += len(part)
                if size > limits.most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        text = f"the body took longer than {limits.timeout:g} s"
        raise Problem(408, text, {"Connection": "close"}) from None
    except ClientDisconnect:
        raise Problem(400, "the client has gone") from None
    return b"".join(parts)


async def read_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """The body, a JSON object.

    Raises:
        Problem: as `read_body`; or it is something else (400).
    """
    body = await read_body(request, limits)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Problem(400, "the body must be JSON") from None
    if not isinstance(found, dict):
        raise Problem(400, "the body must be a JSON object")
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
    if kind != "application/x-www-form-urlencoded":
        raise Problem(415, "the body must be of the type application/x-www-form-urlencoded")
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, strict_parsing=True, max_num_fields=MOST_FIELDS
        )
    except ValueError:
        raise Problem(400, "the body must be a form of few fields") from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise Problem(400, "a field may be there once")
    return fields

"""What the clients share: their connections, and what answers of the server become."""

from types import TracebackType
from typing import Self

import httpx

from faststream_sqlbroker.exceptions import HttpError

TIMEOUT = 30.0
"""Seconds for one request, besides the time that the server is asked to wait."""


class HttpUser:
    """Holds a client of httpx; closes it at the end of `async with`, if it has made it."""

    def __init__(self, http: httpx.AsyncClient | None) -> None:
        """Use `http`, which its caller closes; None makes one."""
        self._own = http is None
        self._http = httpx.AsyncClient(timeout=TIMEOUT) if http is None else http

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """Close what it has made."""
        if self._own:
            await self._http.aclose()


def refused(answer: httpx.Response) -> HttpError:
    """The error of an answer that says no."""
    try:
        told = str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        told = "the answer has no text"
    return HttpError(answer.status_code, told)

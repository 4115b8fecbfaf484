"""What the clients share: their connections, and what answers of the server become."""

from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import httpx

from faststream_sqlbroker.exceptions import HttpError, LeaseLostError

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

    async def request(
        self, method: str, url: str, *, lost: str | None = None, **options: Any
    ) -> httpx.Response:
        """The answer to a request with `options` of httpx; `lost` tells what a 409 means.

        Raises:
            LeaseLostError: the answer is 409, and there is a text for it.
            HttpError: the server refused.
            httpx.HTTPError: it could not be reached, or took too long.
        """
        answer = await self._http.request(method, url, **options)
        if answer.status_code == HTTPStatus.CONFLICT and lost is not None:
            raise LeaseLostError(lost)
        if not answer.is_success:
            try:
                told = str(answer.json()["error"])
            except (ValueError, KeyError, TypeError):
                told = "the answer has no text"
            raise HttpError(answer.status_code, told)
        return answer


class HeldOverHttp:
    """What a client holds until it says what became of it, which ends a context manager, too."""

    def __init__(self) -> None:
        self._ended = False

    async def _finish(self) -> None:
        """It is done."""
        raise NotImplementedError

    async def _fail(self, error: Exception) -> None:
        """It could not be done; unless this does something, it comes back after its lease."""

    async def __aenter__(self) -> Self:
        """Return it."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """End it, unless that is done; after a cancellation leave it as it is."""
        if self._ended:
            return
        if exc_val is None:
            await self._finish()
        # After a cancellation another client gets it when the lease is over.
        elif isinstance(exc_val, Exception) and not isinstance(exc_val, LeaseLostError):
            await self._fail(exc_val)

"""Common parts of the clients: connections, error responses and leases."""

from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import httpx

from faststream_sqlbroker.exceptions import HttpError, LeaseLostError

TIMEOUT = 30.0
"""Seconds for one request, in addition to the time that the server is asked to wait."""


class HttpClient:
    """Base of the clients: owns or borrows an httpx client."""

    def __init__(self, http: httpx.AsyncClient | None) -> None:
        """Use `http`, which the caller closes; by default create and close a client."""
        self._owns_http = http is None
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
        """Close the httpx client if this object created the client."""
        if self._owns_http:
            await self._http.aclose()

    async def request(
        self, method: str, url: str, *, lost: str | None = None, **options: Any
    ) -> httpx.Response:
        """Send a request with `options` of httpx; `lost` is the error message of a 409.

        Raises:
            LeaseLostError: the server answered 409, and `lost` is set.
            HttpError: the server refused.
            httpx.HTTPError: the server could not be reached, or took too long.
        """
        response = await self._http.request(method, url, **options)
        if response.status_code == HTTPStatus.CONFLICT and lost is not None:
            raise LeaseLostError(lost)
        if not response.is_success:
            try:
                message = str(response.json()["error"])
            except (ValueError, KeyError, TypeError):
                message = "the response has no error text"
            raise HttpError(response.status_code, message)
        return response


class LeasedItem:
    """A leased message or job that the end of `async with` settles."""

    def __init__(self) -> None:
        self._is_settled = False

    async def _complete(self) -> None:
        """Settle the message as done."""
        raise NotImplementedError

    async def _fail(self, error: Exception) -> None:
        """Report a failure; by default the message becomes due again when the lease expires."""

    async def __aenter__(self) -> Self:
        """Return this object."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """Settle the message if that is still open; after a cancellation keep the lease.

        A cancelled task must end at once, so nothing is sent. A lost lease is left as it is:
        another client may have the message.
        """
        if self._is_settled:
            return
        if exc_val is None:
            await self._complete()
        # After a cancellation another client gets it when the lease expires.
        elif isinstance(exc_val, Exception) and not isinstance(exc_val, LeaseLostError):
            await self._fail(exc_val)

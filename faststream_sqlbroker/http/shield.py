"""What all answers have in common, whatever they are: headers for browsers, errors as JSON."""

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from faststream_sqlbroker.core.text import short, visible
from faststream_sqlbroker.exceptions import (
    PublishError,
    QueueFullError,
    SetupError,
    SqlBrokerError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.local import check_local
from faststream_sqlbroker.http.mounting import App, Receive, Scope, Send

HEADERS = {
    # No inline script and no inline style, nothing of another host, no frames.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # With no-referrer a browser would send a form of this site with "Origin: null".
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    # Bodies and names must not stay in a cache on the way.
    "cache-control": "no-store",
}
"""Of each answer, errors too."""


class Shield:
    """Wraps the application; `local_only` refuses what does not come from this machine."""

    def __init__(self, app: App, *, local_only: bool) -> None:
        self._app = app
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, and add the headers to its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Scope) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        if self._local_only:
            try:
                # Probes and metrics, too: all of them would be read by another site's page.
                check_local(HTTPConnection(scope))
            except Problem as problem:
                await problem.response()(scope, receive, sending)
                return
        await self._app(scope, receive, sending)


async def problem(_request: Request, error: Exception) -> Response:
    """The answer to a `Problem`."""
    assert isinstance(error, Problem)  # noqa: S101 - it is registered for nothing else
    return error.response()


async def unknown_path(request: Request, error: Exception) -> Response:
    """The answer to a path or method that does not exist."""
    return unknown_problem(request, error).response()


def unknown_problem(request: Request, error: Exception) -> Problem:
    """What is said of a path or method that does not exist."""
    assert isinstance(error, HTTPException)  # noqa: S101 - as above
    root = request.scope.get("root_path", "")
    headers = dict(error.headers or {})
    path = short(request.scope["path"])
    text = f"{error.detail}: {path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        paths = dict.fromkeys(getattr(route, "path", "") for route in request.app.routes)
        there = f"there are {', '.join(paths)}"
        if DOCUMENT in paths:
            there = (
                f"{root}{DOCUMENT} lists what there is. Channels and queues are there if the "
                "server was told to serve them"
            )
        text = f"there is no path {path} here: {there}"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = headers.get("Allow", "another method")
        # FastAPI has a route of its own for HEAD, which is not named.
        if allowed == "GET":
            allowed = headers["Allow"] = "GET, HEAD"
        text = f"{path} takes {allowed}, got the method {short(request.method)}"
    return Problem(error.status_code, text, headers)


def problem_of(error: Exception) -> Problem:
    """An error of this package: what its caller did wrong is told, no more."""
    if isinstance(error, QueueFullError):
        return Problem(429, str(error), {"Retry-After": "1"})
    if isinstance(error, SetupError | PublishError):
        return Problem(400, str(error))
    if isinstance(error, UnknownOutcomeError):
        return Problem(503, "the answer of the database was lost: what was asked for may be done")
    if isinstance(error, TransientStoreError):
        text = "the database cannot be reached, or is busy: try again"
        return Problem(503, text, {"Retry-After": "1"})
    # The text may tell of tables and rights.
    return Problem(500, "the database refused: see the server's log")


async def broker_error(_request: Request, error: Exception) -> Response:
    """The answer to an error of this package."""
    return problem_of(error).response()


def handlers(log: Callable[..., None]) -> dict[Any, Any]:
    """`HANDLERS` of an application whose `log` is told what a caller is not."""

    async def told(request: Request, error: Exception) -> Response:
        return told_problem(log, request, error).response()

    return {**HANDLERS, SqlBrokerError: told}


def told_problem(log: Callable[..., None], request: Request, error: Exception) -> Problem:
    """`problem_of` an error; the log gets what its caller is not told."""
    found = problem_of(error)
    if found.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        path = visible(request.scope["path"][:LONGEST_PATH])
        log(logging.WARNING, f"HTTP: {request.method} {path}: {error}")
    return found


async def failure(_request: Request, _error: Exception) -> Response:
    """The answer to a defect; the server logs its traceback."""
    return JSONResponse({"error": "an error of the server: see its log"}, 500)


HANDLERS = {
    Problem: problem,
    HTTPException: unknown_path,
    SqlBrokerError: broker_error,
    Exception: failure,
}
"""By the class of what was raised."""
DOCUMENT = "/openapi.json"
"""The path of the list of all requests; probes alone have none."""
LONGEST_PATH = 200
"""Characters of a path in the log."""

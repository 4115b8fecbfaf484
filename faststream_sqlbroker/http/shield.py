"""Common parts of all responses: security headers, and errors as JSON."""

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from faststream_sqlbroker.core.text import format_value, replace_invisible
from faststream_sqlbroker.exceptions import (
    PublishError,
    QueueFullError,
    SetupError,
    SqlBrokerError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.http.local import check_local
from faststream_sqlbroker.http.mounting import App, Receive, Scope, Send
from faststream_sqlbroker.http.responses import Problem

SECURITY_HEADERS = {
    # No inline scripts or styles, nothing from another host, no frames.
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
    # Bodies and names must not stay in a cache.
    "cache-control": "no-store",
}
"""Headers of every response, including errors."""


class SecurityMiddleware:
    """Adds security headers; `local_only` refuses requests from other machines."""

    def __init__(self, app: App, *, local_only: bool) -> None:
        self._app = app
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and add the headers to the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Scope) -> None:
            """Add the security headers to the start of the response."""
            if message["type"] == "http.response.start":
                headers = [
                    (name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()
                ]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        if self._local_only:
            try:
                # This includes probes and metrics, which another site's page could read otherwise.
                check_local(HTTPConnection(scope))
            except Problem as problem:
                await problem.to_response()(scope, receive, send_with_headers)
                return
        await self._app(scope, receive, send_with_headers)


async def handle_problem(_request: Request, error: Exception) -> Response:
    """Return the response of a `Problem`."""
    assert isinstance(error, Problem)  # noqa: S101 - it is registered for nothing else
    return error.to_response()


async def handle_unknown_path(request: Request, error: Exception) -> Response:
    """Return the response to an unknown path or method."""
    return create_path_problem(request, error).to_response()


def create_path_problem(request: Request, error: Exception) -> Problem:
    """Return the problem of an unknown path or method.

    Starlette's own answer would be text without a hint.
    """
    assert isinstance(error, HTTPException)  # noqa: S101 - as above
    root = request.scope.get("root_path", "")
    headers = dict(error.headers or {})
    path = format_value(request.scope["path"])
    text = f"{error.detail}: {path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        paths = dict.fromkeys(getattr(route, "path", "") for route in request.app.routes)
        hint = f"use {', '.join(paths)}"
        if DOCUMENT_PATH in paths:
            hint = (
                f"{root}{DOCUMENT_PATH} lists the paths. Channels and queues must be enabled on "
                "the server"
            )
        text = f"path {path} does not exist here: {hint}"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = headers.get("Allow", "another method")
        # HEAD has a separate route, which the header does not list.
        if allowed == "GET":
            allowed = headers["Allow"] = "GET, HEAD"
        text = f"{path} accepts {allowed}, got the method {format_value(request.method)}"
    return Problem(error.status_code, text, headers)


def to_problem(error: Exception) -> Problem:
    """Convert an error of this package, revealing only the caller's own mistakes.

    A problem is an answer with a status and a text as JSON.
    """
    if isinstance(error, QueueFullError):
        return Problem(429, str(error), {"Retry-After": "1"})
    if isinstance(error, SetupError | PublishError):
        return Problem(400, str(error))
    if isinstance(error, UnknownOutcomeError):
        return Problem(503, "the database's response was lost: the request may have taken effect")
    if isinstance(error, TransientStoreError):
        text = "the database is unreachable or busy: try again"
        return Problem(503, text, {"Retry-After": "1"})
    # The message may reveal tables and rights.
    return Problem(500, "the database refused the request: see the server's log")


async def handle_broker_error(_request: Request, error: Exception) -> Response:
    """Return the response to an error of this package."""
    return to_problem(error).to_response()


def create_handlers(log: Callable[..., None]) -> dict[Any, Any]:
    """Return `HANDLERS` for an application that logs what callers must not see."""

    async def handle_logged(request: Request, error: Exception) -> Response:
        return log_problem(log, request, error).to_response()

    return {**HANDLERS, SqlBrokerError: handle_logged}


def log_problem(log: Callable[..., None], request: Request, error: Exception) -> Problem:
    """Convert an error to a problem, and log the details of a server error.

    The caller must not see them: they may name tables, hosts and rights.
    """
    problem = to_problem(error)
    if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        path = replace_invisible(request.scope["path"][:MAX_LOGGED_PATH])
        log(logging.WARNING, f"HTTP: {request.method} {path} failed: {error}")
    return problem


async def handle_failure(_request: Request, _error: Exception) -> Response:
    """Return the response to a defect; the server logs the traceback."""
    return JSONResponse({"error": "internal server error: see the server's log"}, 500)


HANDLERS = {
    Problem: handle_problem,
    HTTPException: handle_unknown_path,
    SqlBrokerError: handle_broker_error,
    Exception: handle_failure,
}
"""Handlers by exception class."""
DOCUMENT_PATH = "/openapi.json"
"""Path of the OpenAPI document; an application of probes alone has none."""
MAX_LOGGED_PATH = 200
"""Characters of a path in the log."""

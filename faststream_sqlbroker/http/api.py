"""The JSON API on FastAPI: access, request bodies, and the OpenAPI document."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema
from pydantic.alias_generators import to_camel
from starlette.requests import Request
from starlette.responses import Response

from faststream_sqlbroker.http.channel_models import ChannelError
from faststream_sqlbroker.http.mistakes import create_problem
from faststream_sqlbroker.http.responses import FORM, BodyLimits, read_form, read_object
from faststream_sqlbroker.http.users import User

USER = "user"
_USER = "sqlbroker.user"
"""Key of the user in the scope of a request; a surrounding application may use `state` itself."""
_SECURITY_SCHEMES = {
    USER: {"type": "http", "scheme": "basic", "description": "Or the application's own users."},
    "channelToken": {"type": "apiKey", "in": "header", "name": "X-Broker-Channel-Token"},
    "consumerToken": {"type": "apiKey", "in": "header", "name": "X-Broker-Consumer-Token"},
    "queueToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "A publish or consume token of the queue.",
    },
}
_ERROR_DESCRIPTIONS = {
    400: "The request is not valid",
    401: "Not authenticated",
    403: "Not permitted, or sent from another site or machine",
    404: "Not found",
    408: "The body did not arrive in time",
    409: "The lease is lost, or the state does not allow the request",
    413: "The body is too large",
    415: "The content type of the body is not supported",
    429: "Too many failed authentications from this address, or the queue is full",
    500: "The server or its database failed",
    503: "The database is unreachable or its response was lost, or the server is busy",
}
# A reference, because building a model for each of hundreds of responses is slow.
_FAILURE_CONTENT = {"application/json": {"schema": {"$ref": "#/components/schemas/ChannelError"}}}
BODY_ERRORS = (400, 408, 413)
"""Error statuses of reading any body."""
FORM_ERRORS = (*BODY_ERRORS, 415)
"""Error statuses of reading a form."""
OPTIONAL_BODY = {"required": False}
"""Description of a form whose fields are all optional."""
MAX_ID = 2**63 - 1
"""Largest id of a message."""


def parse_whole_number(value: object) -> int:
    """Parse decimal digits; Pydantic itself would also accept 1.0 and 1_0.

    An error's text follows "must" in the response.
    """
    # Older versions of FastAPI validate defaults as well.
    text = str(value)
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal():
        raise ValueError("be a whole number")
    if len(digits) > len(str(MAX_ID)):
        raise ValueError(f"be a whole number of up to {len(str(MAX_ID))} digits")
    return int(text)


def _parse_row_id(text: str) -> int:
    """Return the id of a message or job in a path; only the canonical decimal form is valid.

    Other forms of the same number, such as 007, would be aliases of one message.

    Raises:
        ValueError: the text is not an id; the caller responds with 404.
    """
    if text.isascii() and text.isdecimal() and str(int(text[:20])) == text:
        number = int(text)
        if number <= MAX_ID:
            return number
    raise ValueError


async def _get_user(request: Request) -> Any:
    return request.scope[_USER]


Caller = Annotated[User, Depends(_get_user)]
"""The authenticated user."""
MessageId = Annotated[
    int, Field(ge=0), BeforeValidator(_parse_row_id), Path(description="The message's id")
]
JobId = Annotated[
    int,
    BeforeValidator(_parse_row_id),
    WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,19}$"}),
    Path(description="The job's id"),
]


@dataclass(frozen=True, slots=True)
class AccessRule:
    """Authenticates and authorises the requests of an operation."""

    schemes: tuple[str, ...]
    """Security schemes that a request needs together; empty if no authentication is needed."""
    authenticate: Callable[[Request], Awaitable[User | None]]
    """Returns the user, or None for other callers; raises `Problem` to refuse the request."""

    @property
    def error_statuses(self) -> tuple[int, ...]:
        """Error statuses that any request may receive."""
        # Any request may receive 403: without authentication, only this machine is allowed.
        if not self.schemes:
            return (403, 500)
        statuses = (401, 403, 429, 500, 503)
        # 400: a proxy's header with the user's name occurs twice.
        return (400, *statuses) if USER in self.schemes else statuses


async def _allow_all(_request: Request) -> None:
    return None


PUBLIC = AccessRule((), _allow_all)


def _describe_responses(
    responses: Mapping[int, type[BaseModel] | str | None],
    errors: Iterable[int],
    headers: Mapping[str, str],
) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's description of the responses by status, for the OpenAPI document."""
    descriptions: dict[int | str, dict[str, Any]] = {
        status: {"description": _ERROR_DESCRIPTIONS[status], "content": _FAILURE_CONTENT}
        for status in errors
    }
    header_schemas = {
        name: {"schema": {"type": "string"}, "description": text} for name, text in headers.items()
    }
    for status, response in responses.items():
        descriptions[status] = {"headers": header_schemas} if header_schemas else {}
        if isinstance(response, str):
            descriptions[status]["content"] = {response: {"schema": {}}}
        elif response is not None:
            descriptions[status]["model"] = response
    return descriptions


class _ParsedRequest(Request):
    """A request that hands an already parsed body to FastAPI.

    `OperationRoute` has read the body within the limits, and may have parsed a form. Without the
    Content-Type FastAPI takes the body as JSON, and calls `json`.
    """

    def __init__(self, request: Request, content: Mapping[str, Any]) -> None:
        headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._content = content

    async def body(self) -> bytes:
        """Return a placeholder: FastAPI only checks that the body is not empty."""
        return b"{}"

    async def json(self) -> Any:
        """Return the parsed body."""
        return self._content


class OperationRoute(APIRoute):
    """A route that authenticates first, then reads the body within limits.

    FastAPI itself would read a body of any size before authentication.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        access_rule: AccessRule,
        limits: BodyLimits,
        **options: Any,
    ) -> None:
        self._access_rule = access_rule
        self._limits = limits
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Return FastAPI's handler, wrapped in authentication and body limits.

        FastAPI calls this once, when the route is created. The wrapper authenticates first, so that
        only known callers can make the server read a body. It parses the body itself, within the
        limits.
        """
        # A body without a Content-Type is JSON.
        self.strict_content_type = False
        handle_parsed = super().get_route_handler()
        field = None if self.body_field is None else self.body_field.field_info
        read = read_form if getattr(field, "media_type", None) == FORM else read_object
        model: Any = None if field is None else field.annotation

        async def handle(request: Request) -> Response:
            """Authenticate the request, read the body, and pass both to FastAPI."""
            request.scope[_USER] = await self._access_rule.authenticate(request)
            if field is not None:
                request = _ParsedRequest(request, await read(request, self._limits))
            try:
                return await handle_parsed(request)
            except RequestValidationError as error:
                errors = error.errors()
            # Raised outside of the block: the error contains the values, and would be logged.
            raise create_problem(errors, model)

        return handle


class Api(FastAPI):
    """The FastAPI application of all operations."""

    def __init__(self, limits: BodyLimits, **options: Any) -> None:
        # A redirect would go to an arbitrary Host, and FastAPI's pages load from other hosts.
        super().__init__(
            title="sqlbroker",
            version="1",
            description="A message broker in a relational database, over HTTP.",
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            separate_input_output_schemas=False,
            # The application and the broker have their own telemetry.
            telemetry={"tracing": False, "metrics": False, "logs": False},
            **options,
        )
        self._limits = limits

    def add(
        self,
        route: str,
        endpoint: Callable[..., Any],
        access_rule: AccessRule,
        responses: Mapping[int, type[BaseModel] | str | None],
        *errors: int,
        part: str | None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Add an operation.

        Args:
            route: Method and path, such as "GET /health/live".
            endpoint: Handles the request; its name and docstring are in the document.
            access_rule: Decides who may send the request.
            responses: Model or content type by status, the usual status first; None for no body.
            errors: Error statuses in addition to those of `access_rule`.
            part: Tag in the document; None for a page, which is not in the document.
            body: Description of a body that FastAPI does not read, or describes wrongly.
            headers: Descriptions of the response headers by name.
        """
        method, path = route.split()
        descriptions = _describe_responses(
            responses, (*access_rule.error_statuses, *errors), headers or {}
        )
        requirement: dict[str, list[str]] = {name: [] for name in access_rule.schemes}
        extra: dict[str, Any] = {"security": [requirement] if requirement else []}
        if body is not None:
            extra["requestBody"] = body
        # HEAD is handled like GET, and is not in the document.
        for served_method in (method, "HEAD") if method == "GET" else (method,):
            operation = OperationRoute(
                path,
                endpoint,
                access_rule,
                self._limits,
                methods=[served_method],
                include_in_schema=part is not None and served_method == method,
                operation_id=to_camel(endpoint.__name__),
                tags=[str(part)],
                status_code=next(iter(responses)),
                response_class=Response,
                responses=descriptions if served_method == method else None,
                openapi_extra=extra,
            )
            self.router.routes.append(operation)

    def get_document(self, root: str = "") -> dict[str, Any]:
        """Return the OpenAPI document of the application mounted at `root`.

        FastAPI builds it once; then parts that do not apply here are corrected.
        """
        if self.openapi_schema is None:
            schema = self.openapi()
            for path in schema["paths"].values():
                for operation in path.values():
                    # FastAPI documents 422 for validation errors, but we return 400.
                    operation["responses"].pop("422", None)
            schemas = schema["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas["ChannelError"] = ChannelError.model_json_schema()
            schema["components"]["securitySchemes"] = _SECURITY_SCHEMES
        return {**self.openapi(), "servers": [{"url": root or "/"}]}

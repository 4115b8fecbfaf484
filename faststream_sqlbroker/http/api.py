"""The JSON API on FastAPI: who may send a request, what it may hold, what it may be answered."""

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

from faststream_sqlbroker.http.answers import FORM, BodyLimits, read_form, read_object
from faststream_sqlbroker.http.channel_models import Failure
from faststream_sqlbroker.http.mistakes import mistakes
from faststream_sqlbroker.http.users import User

USER = "user"
_USER = "sqlbroker.user"
"""Where the scope of a request has its user: the application around us may have one in `state`."""
_SCHEMES = {
    USER: {"type": "http", "scheme": "basic", "description": "Or what the application knows."},
    "channelToken": {"type": "apiKey", "in": "header", "name": "X-Broker-Channel-Token"},
    "consumerToken": {"type": "apiKey", "in": "header", "name": "X-Broker-Consumer-Token"},
    "queueToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token of the queue for publish or consume.",
    },
}
_PROBLEMS = {
    400: "The request is not valid",
    401: "Not authenticated",
    403: "Not allowed, or not from here",
    404: "There is no such thing",
    408: "The body took too long",
    409: "The lease is another's, or the state does not allow it",
    413: "The body is too large",
    415: "The body is of another type",
    429: "Too many failures from this address, or the queue is full",
    500: "The server or its database has failed",
    503: "The database cannot be reached, or its answer was lost",
}
# By name: a model at each of hundreds of answers would take long to build.
_FAILURE = {"application/json": {"schema": {"$ref": "#/components/schemas/Failure"}}}
BODY = (400, 408, 413)
"""What reading a body may end in, whatever it should hold."""
FORM_BODY = (*BODY, 415)
"""As `BODY`, of a form."""
OPTIONAL = {"required": False}
"""Of a form whose fields may all be missing."""
LARGEST_ID = 2**63 - 1
"""Of a message."""


def whole(given: object) -> int:
    """A whole number in decimal digits; Pydantic's own would be 1.0 and 1_0, too."""
    # Older versions of FastAPI check defaults, too.
    text = str(given)
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal():
        raise ValueError("be a whole number")
    if len(digits) > len(str(LARGEST_ID)):
        raise ValueError(f"be a whole number of up to {len(str(LARGEST_ID))} digits")
    return int(text)


def _row_id(text: str) -> int:
    # Other forms of the same number would be other names of one message.
    if text.isascii() and text.isdecimal() and str(int(text[:20])) == text:
        number = int(text)
        if number <= LARGEST_ID:
            return number
    raise ValueError


async def _entered(request: Request) -> Any:
    return request.scope[_USER]


Caller = Annotated[User, Depends(_entered)]
"""The user who was let in."""
MessageId = Annotated[
    int, Field(ge=0), BeforeValidator(_row_id), Path(description="The message's id")
]
JobId = Annotated[
    int,
    BeforeValidator(_row_id),
    WithJsonSchema({"type": "string", "pattern": "^[0-9]{1,19}$"}),
    Path(description="The job's id"),
]


@dataclass(frozen=True, slots=True)
class Door:
    """Lets in who may send a request."""

    schemes: tuple[str, ...]
    """Of the document: a request needs all of them; none: all may send it."""
    enter: Callable[[Request], Awaitable[User | None]]
    """The user, if it is one with a role; raises `Problem`."""

    @property
    def problems(self) -> tuple[int, ...]:
        """What any request may be answered."""
        # 403 of all: without authentication, only this machine may ask.
        if not self.schemes:
            return (403, 500)
        always = (401, 403, 429, 500, 503)
        # 400: the header of a proxy that names the user is there twice.
        return (400, *always) if USER in self.schemes else always


async def _all(_request: Request) -> None:
    return None


OPEN = Door((), _all)


def _responses(
    answers: Mapping[int, type[BaseModel] | str | None],
    problems: Iterable[int],
    headers: Mapping[str, str],
) -> dict[int | str, dict[str, Any]]:
    """What FastAPI describes of the answers by status."""
    shown: dict[int | str, dict[str, Any]] = {
        status: {"description": _PROBLEMS[status], "content": _FAILURE} for status in problems
    }
    told = {
        name: {"schema": {"type": "string"}, "description": text} for name, text in headers.items()
    }
    for status, answer in answers.items():
        shown[status] = {"headers": told} if told else {}
        if isinstance(answer, str):
            shown[status]["content"] = {answer: {"schema": {}}}
        elif answer is not None:
            shown[status]["model"] = answer
    return shown


class _Whole(Request):
    """A request whose body was read: JSON for FastAPI, whatever its Content-Type says."""

    def __init__(self, request: Request, content: Mapping[str, Any]) -> None:
        headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._content = content

    async def body(self) -> bytes:
        """FastAPI asks only whether there is one."""
        return b"{}"

    async def json(self) -> Any:
        """What was read."""
        return self._content


class Operation(APIRoute):
    """One request. FastAPI alone would read a body before it knows whose it is, without limits."""

    def __init__(
        self, path: str, endpoint: Callable[..., Any], door: Door, limits: BodyLimits, **told: Any
    ) -> None:
        self._door = door
        self._limits = limits
        super().__init__(path, endpoint, **told)

    def get_route_handler(self) -> Callable[[Request], Any]:
        """FastAPI's, behind the door."""
        # What has no type is JSON.
        self.strict_content_type = False
        answer = super().get_route_handler()
        field = None if self.body_field is None else self.body_field.field_info
        read = read_form if getattr(field, "media_type", None) == FORM else read_object
        model: Any = None if field is None else field.annotation

        async def answer_whom_we_know(request: Request) -> Response:
            request.scope[_USER] = await self._door.enter(request)
            if field is not None:
                request = _Whole(request, await read(request, self._limits))
            try:
                return await answer(request)
            except RequestValidationError as error:
                errors = error.errors()
            # Behind the block: the error's own text has what was given, and would be in a log.
            raise mistakes(errors, model)

        return answer_whom_we_know


class Api(FastAPI):
    """The application, to which the requests of each part are added."""

    def __init__(self, limits: BodyLimits, **options: Any) -> None:
        # A redirect would lead to whatever Host says; the pages of FastAPI load of other hosts.
        super().__init__(
            title="sqlbroker",
            version="1",
            description="A message broker in a relational database, over HTTP.",
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            separate_input_output_schemas=False,
            # Of its own, next to those of the application and of the broker.
            telemetry={"tracing": False, "metrics": False, "logs": False},
            **options,
        )
        self._limits = limits

    def add(
        self,
        request: str,
        endpoint: Callable[..., Any],
        door: Door,
        answers: Mapping[int, type[BaseModel] | str | None],
        *problems: int,
        part: str | None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Serve `request`, a method and a path.

        Args:
            request: As "GET /health/live".
            endpoint: Answers it; its name and docstring describe it.
            door: Who may send it.
            answers: What it is answered by status, first what is usual; text is the content type
                of what has no model, None: there is no body.
            problems: Other statuses, besides those of the door.
            part: What it belongs to; None: it is a page, and not in the document.
            body: What the document says of a body that FastAPI does not read, or says wrongly.
            headers: Of the answers: what each tells.
        """
        method, path = request.split()
        shown = _responses(answers, (*door.problems, *problems), headers or {})
        needed: dict[str, list[str]] = {name: [] for name in door.schemes}
        extra: dict[str, Any] = {"security": [needed] if needed else []}
        if body is not None:
            extra["requestBody"] = body
        # HEAD is answered as GET, and stands not in the document.
        for each in (method, "HEAD") if method == "GET" else (method,):
            operation = Operation(
                path,
                endpoint,
                door,
                self._limits,
                methods=[each],
                include_in_schema=part is not None and each == method,
                operation_id=to_camel(endpoint.__name__),
                tags=[str(part)],
                status_code=next(iter(answers)),
                response_class=Response,
                responses=shown if each == method else None,
                openapi_extra=extra,
            )
            self.router.routes.append(operation)

    def document(self, root: str = "") -> dict[str, Any]:
        """The OpenAPI document of the application, mounted at `root`."""
        if self.openapi_schema is None:
            shown = self.openapi()
            for path in shown["paths"].values():
                for operation in path.values():
                    # FastAPI's answer to mistakes, in place of which we answer 400.
                    operation["responses"].pop("422", None)
            schemas = shown["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas["Failure"] = Failure.model_json_schema()
            shown["components"]["securitySchemes"] = _SCHEMES
        return {**self.openapi(), "servers": [{"url": root or "/"}]}

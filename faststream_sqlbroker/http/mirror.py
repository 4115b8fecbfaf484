"""Messages with a lookup value over HTTP: how many, their records, and their info."""

import base64
import re
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.core.mirror import MirroredMessage
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.http.answers import BodyLimits, Problem, StoredJson, read_object
from faststream_sqlbroker.http.users import Role, User

MOST = 100
"""Records of one answer."""
FILTERS = ("Lookup", "Info")
FIELDS = {"Lookup", "Info", "Name"}
OF_BODIES = ("Payload", "Properties", "DestinationTopic")
"""What records have of bodies and headers."""
OF_INFOS = ("Info",)
_NAME = re.compile("[0-9]{1,19}")
"""A message's id as text."""
T = TypeVar("T")


class MirrorRoutes:
    """`/v1/count` for viewers, `/v1/mirror` for operators."""

    def __init__(
        self,
        admin: Callable[[], Admin],
        limits: BodyLimits,
        guard: Callable[..., Any],
        hidden: Collection[str] = (),
    ) -> None:
        """`guard` lets those in who have a role; the fields `hidden` of records are null."""
        self._admin = admin
        self._hidden = hidden
        self._limits = limits
        self._guard = guard

    def routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/v1/count", self._guard(Role.VIEWER, self._count), methods=["GET"]),
            Route("/v1/mirror", self._guard(Role.OPERATOR, self._find), methods=["GET"]),
            Route("/v1/mirror", self._guard(Role.OPERATOR, self._set_info), methods=["PATCH"]),
        ]

    async def _count(self, request: Request, _user: User) -> Response:
        """The bare number."""
        lookup, info = _filters(request)
        return JSONResponse(await _checked(self._admin().count_mirrored(lookup=lookup, info=info)))

    async def _find(self, request: Request, _user: User) -> Response:
        lookup, info = _filters(request)
        found = await _checked(self._admin().mirrored(lookup=lookup, info=info, limit=MOST))
        return StoredJson({"Result": [record(each, self._hidden) for each in found]})

    async def _set_info(self, request: Request, user: User) -> Response:
        """Set the info of all messages with a lookup value, or of one; of how many."""
        given = await read_object(request, self._limits, ("Lookup", "Info", "Name"))
        if not {"Lookup", "Info"} <= given.keys() <= FIELDS:
            names = short(", ".join(sorted(given)))
            raise Problem(400, f"the body has Lookup and Info, and may have Name, got {names}")
        name = given.get("Name")
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            text = f"Name must be that of a record, as GET /v1/mirror shows it, got {short(name)}"
            raise Problem(400, text)
        one = None if name is None else int(name)
        changed = await _checked(
            self._admin().set_info(given["Lookup"], given["Info"], id=one, by=user.name)
        )
        return JSONResponse({"Changed": changed})


def record(message: MirroredMessage, hidden: Collection[str] = ()) -> dict[str, Any]:
    """Its record as JSON values: the body is base64, times are of ISO 8601."""
    return {
        name: None if name in hidden else _value(value) for name, value in message.record.items()
    }


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, datetime) else value


def _filters(request: Request) -> tuple[str | None, str | None]:
    """Lookup and Info of the query; an empty one is none."""
    query = request.query_params
    if unknown := set(query) - set(FILTERS):
        raise Problem(400, f"the query may have Lookup and Info, got {min(unknown)[:80]!r}")
    if len(query.multi_items()) > len(query):
        raise Problem(400, "Lookup and Info may be there once each: leave one out")
    return query.get("Lookup") or None, query.get("Info") or None


async def _checked(asked: Awaitable[T]) -> T:
    """What `asked` gives; what it refuses is the caller's mistake."""
    try:
        return await asked
    except ValueError as error:
        raise Problem(400, str(error)) from None

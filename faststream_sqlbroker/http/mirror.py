"""Messages with a lookup value over HTTP: how many, their records, and their info."""

import base64
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from typing import Annotated, Any, TypeVar

from fastapi import Query
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.core.mirror import MirroredMessage
from faststream_sqlbroker.http import channel_models as models
from faststream_sqlbroker.http.answers import Problem, StoredJson
from faststream_sqlbroker.http.api import BODY, Api, Caller, Door
from faststream_sqlbroker.http.users import Role

MOST = 100
"""Records of one answer."""
FILTERS = ("Lookup", "Info")
OF_BODIES = ("Payload", "Properties", "DestinationTopic")
"""What records have of bodies and headers."""
OF_INFOS = ("Info",)
# No path has a part for them: each may be missing.
Lookup = Annotated[
    str | SkipJsonSchema[None],
    Query(alias="Lookup", description="The lookup value; each filter may be missing"),
]
Info = Annotated[str | SkipJsonSchema[None], Query(alias="Info", description="The info")]
T = TypeVar("T")


class MirrorRoutes:
    """`/v1/count` for viewers, `/v1/mirror` for operators."""

    def __init__(self, admin: Callable[[], Admin], hidden: Collection[str] = ()) -> None:
        """The fields `hidden` of records are null."""
        self._admin = admin
        self._hidden = hidden

    def add_to(self, api: Api, door: Callable[[Role], Door]) -> None:
        """Serve all of them; `door` lets those in who have a role."""
        viewers = door(Role.VIEWER)
        operators = door(Role.OPERATOR)
        changed = {200: models.InfoChanged}
        api.add("GET /v1/count", self.count, viewers, {200: models.Count}, part="mirror")
        api.add("GET /v1/mirror", self.mirrored, operators, {200: models.Mirrored}, part="mirror")
        api.add("PATCH /v1/mirror", self.set_info, operators, changed, *BODY, part="mirror")

    async def count(self, request: Request, lookup: Lookup = None, info: Info = None) -> Response:
        """How many live messages have this lookup value and info."""
        _check_filters(request)
        count = self._admin().count_mirrored(lookup=lookup or None, info=info or None)
        return JSONResponse(await _checked(count))

    async def mirrored(
        self, request: Request, lookup: Lookup = None, info: Info = None
    ) -> Response:
        """Their records; what show_bodies and redact hide is null."""
        _check_filters(request)
        look = self._admin().mirrored(lookup=lookup or None, info=info or None, limit=MOST)
        found = await _checked(look)
        return StoredJson({"Result": [record(each, self._hidden) for each in found]})

    async def set_info(self, change: models.InfoChange, user: Caller) -> Response:
        """Set the info of all messages with a lookup value, or of one; of how many."""
        one = None if change.Name is None else int(change.Name)
        changed = await _checked(
            self._admin().set_info(change.Lookup, change.Info, id=one, by=user.name)
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


def _check_filters(request: Request) -> None:
    query = request.query_params
    if unknown := set(query) - set(FILTERS):
        raise Problem(400, f"the query may have Lookup and Info, got {min(unknown)[:80]!r}")
    if len(query.multi_items()) > len(query):
        raise Problem(400, "Lookup and Info may be there once each: leave one out")


async def _checked(asked: Awaitable[T]) -> T:
    """What `asked` gives; what it refuses is the caller's mistake."""
    try:
        return await asked
    except ValueError as error:
        raise Problem(400, str(error)) from None

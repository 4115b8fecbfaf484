"""Messages with a lookup value over HTTP: their count, records and info."""

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
from faststream_sqlbroker.http.api import BODY_ERRORS, AccessRule, Api, Caller
from faststream_sqlbroker.http.responses import Problem, StoredJsonResponse
from faststream_sqlbroker.http.users import Role

MAX_RECORDS = 100
"""Records per response."""
FILTERS = ("Lookup", "Info")
BODY_FIELDS = ("Payload", "Properties", "DestinationTopic")
"""Fields of records that come from bodies and headers."""
INFO_FIELDS = ("Info",)
# They are query parameters, so each may be missing.
Lookup = Annotated[
    str | SkipJsonSchema[None],
    Query(alias="Lookup", description="The lookup value; optional, like Info"),
]
Info = Annotated[str | SkipJsonSchema[None], Query(alias="Info", description="The info")]
T = TypeVar("T")


class MirrorRoutes:
    """Serves `/v1/count` to viewers, and `/v1/mirror` to operators."""

    def __init__(self, admin: Callable[[], Admin], hidden: Collection[str] = ()) -> None:
        """Return records with null in the fields `hidden`."""
        self._admin = admin
        self._hidden = hidden

    def add_to(self, api: Api, create_access_rule: Callable[[Role], AccessRule]) -> None:
        """Add all routes; `create_access_rule` returns the rule of a role."""
        viewers = create_access_rule(Role.VIEWER)
        operators = create_access_rule(Role.OPERATOR)
        responses = {200: models.InfoChanged}
        api.add("GET /v1/count", self.count, viewers, {200: models.MessageCount}, part="mirror")
        api.add("GET /v1/mirror", self.mirrored, operators, {200: models.Mirrored}, part="mirror")
        api.add(
            "PATCH /v1/mirror", self.set_info, operators, responses, *BODY_ERRORS, part="mirror"
        )

    async def count(self, request: Request, lookup: Lookup = None, info: Info = None) -> Response:
        """Count the live messages with this lookup value and info."""
        _check_filters(request)
        count = self._admin().count_mirrored(lookup=lookup or None, info=info or None)
        return JSONResponse(await _run_query(count))

    async def mirrored(
        self, request: Request, lookup: Lookup = None, info: Info = None
    ) -> Response:
        """List records by lookup value and info; show_bodies and redact make fields null."""
        _check_filters(request)
        query = self._admin().mirrored(lookup=lookup or None, info=info or None, limit=MAX_RECORDS)
        messages = await _run_query(query)
        return StoredJsonResponse(
            {"Result": [to_record(message, self._hidden) for message in messages]}
        )

    async def set_info(self, change: models.InfoChange, user: Caller) -> Response:
        """Set the info of all messages with a lookup value, or of one; return their number."""
        message_id = None if change.Name is None else int(change.Name)
        count = await _run_query(
            self._admin().set_info(change.Lookup, change.Info, id=message_id, by=user.name)
        )
        return JSONResponse({"Changed": count})


def to_record(message: MirroredMessage, hidden: Collection[str] = ()) -> dict[str, Any]:
    """Convert a message to JSON values, with a base64 body and ISO 8601 times."""
    return {
        name: None if name in hidden else _to_json_value(value)
        for name, value in message.record.items()
    }


def _to_json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, datetime) else value


def _check_filters(request: Request) -> None:
    """Refuse unknown and repeated query parameters.

    A misspelt filter would otherwise be ignored, and the request would match too many messages.

    Raises:
        Problem: a parameter is unknown or repeated (400).
    """
    query = request.query_params
    if unknown := set(query) - set(FILTERS):
        raise Problem(400, f"the query may only have Lookup and Info, got {min(unknown)[:80]!r}")
    if len(query.multi_items()) > len(query):
        raise Problem(400, "Lookup and Info may occur once each: remove the duplicate")


async def _run_query(query: Awaitable[T]) -> T:
    """Return the result of `query`; an invalid argument is the caller's error.

    `admin` raises ValueError for it, which would be a server error otherwise.
    """
    try:
        return await query
    except ValueError as error:
        raise Problem(400, str(error)) from None

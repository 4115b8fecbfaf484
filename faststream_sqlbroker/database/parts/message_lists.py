"""Lists of messages for operators: pages by the last row's position, in the order of an index."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.core.stored import Filters, NotACursorError
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.message_walks import (
    SCANNED,
    Part,
    Position,
    Walk,
    walks_of,
)

HIDDEN_COLUMNS = ("payload", "headers")
_SHOWN = (
    "id",
    "queue",
    "state",
    "priority",
    "key",
    "dedup_id",
    "attempts_count",
    "deliveries_count",
    "publish_count",
    "origin_id",
    "created_at",
    "next_attempt_at",
    "expires_at",
    "first_attempt_at",
    "last_attempt_at",
    "acquired_at",
    "last_error",
)
LIVE_COLUMNS = (*_SHOWN, "lease_expires_at", "lease_token")
ARCHIVED_COLUMNS = (*_SHOWN, "archived_at", "reason", "related_id", "error_fingerprint")


@dataclass(slots=True)
class Page:
    """Rows, and where to go on."""

    rows: list[Any]
    after: str | None = None
    scanned: Any = None
    """The last row that was looked at, if the page ended there."""


def read_page(
    connection: Connection,
    dialect: Operations,
    filters: Filters,
    limit: int,
    after: str | None,
    *,
    hidden: bool,
) -> Page:
    """Up to `limit` rows that match `filters`; with `hidden`, also headers and bodies.

    Raises:
        NotACursorError: `after` is not a cursor of such a list.
    """
    names = _columns(filters, hidden=hidden)
    name, position = (None, None) if after is None else _load(after)
    page = Page([])
    budget = SCANNED
    walks = _from(list(walks_of(connection, dialect, filters)), name)
    for walk in walks:
        at = position if walk.name == name else None
        # With no room left, one more row still tells whether there is another page.
        room = limit - len(page.rows)
        part = Part(connection, dialect, walk, at, filters)
        found, end = part.read(names, room, budget)
        page.rows += found[:room]
        if found[:room]:
            after = _dump(walk, [getattr(found[:room][-1], str(c.key)) for c in walk.order])
        if len(found) > room:
            page.after = after
            return page
        if end is not None:
            # Not the last match: what lies between it and the end has been looked at.
            page.after = _dump(walk, end)
            page.scanned = part.time_of(end)
            return page
        if walk is not walks[-1]:
            budget -= part.looked_at()
    return page


def _columns(filters: Filters, *, hidden: bool) -> Sequence[str]:
    shown = ARCHIVED_COLUMNS if filters.archived else LIVE_COLUMNS
    return (*shown, *HIDDEN_COLUMNS) if hidden else shown


def _from(walks: list[Walk], name: str | None) -> list[Walk]:
    """The walks from the one called `name` on; if it is gone, those that come after it."""
    if name is None:
        return walks
    for at, walk in enumerate(walks):
        if walk.name == name:
            return walks[at:]
    if not name.startswith("ready "):
        raise NotACursorError(name)
    try:
        priority = int(name.removeprefix("ready "))
    except ValueError as error:
        raise NotACursorError(name) from error
    return [w for w in walks if w.name.startswith("ready ") and int(w.name[6:]) < priority]


# Cursors: the walk and the position of the last row.


def _dump(walk: Walk, position: Position) -> str:
    values = [to_microseconds(v) if isinstance(v, datetime) else v for v in position]
    return base64.urlsafe_b64encode(json.dumps([walk.name, *values]).encode()).decode()


def _load(cursor: str) -> tuple[str, Position]:
    try:
        name, *values = json.loads(base64.urlsafe_b64decode(cursor.encode()))
        *moments, message_id = [int(value) for value in values]
        return str(name), [*map(from_microseconds, moments), message_id]
    except (TypeError, ValueError, OverflowError) as error:
        raise NotACursorError(cursor) from error

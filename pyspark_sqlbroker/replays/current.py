"""Which rows of a lake are no longer the last word on their message.

A lake keeps the row of a dead letter that was redriven after the export. Whether the message went
on since is known from the live table, which has it again, or from a newer row of the archive.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Table, func, select

from faststream_sqlbroker.core.times import to_microseconds

LOOKED_UP = 500
"""Rows whose ids one statement names."""

Row = dict[str, Any]
Find = Callable[[Sequence[int]], dict[int, int | None]]


def last_known(
    connection: Connection, message: Table, archive: Table | None, ids: Sequence[int]
) -> dict[int, int | None]:
    """What the database has of these messages now.

    Returns:
        By id: None for a message of the live table, else archived_at of its newest row in the
        archive, in microseconds since 1970. Ids that the database does not have are missing.
    """
    found: dict[int, int | None] = {}
    if archive is not None:
        c = archive.c
        newest = select(c.id, func.max(c.archived_at)).where(c.id.in_(ids)).group_by(c.id)
        found.update((int(id_), to_microseconds(at)) for id_, at in connection.execute(newest))
    live = select(message.c.id).where(message.c.id.in_(ids))
    found.update((int(id_), None) for id_ in connection.execute(live).scalars())
    return found


def current_rows(
    rows: Iterable[Row], find: Find, on_redriven: Callable[[Row], None]
) -> Iterator[Row]:
    """The newest rows, where they are still the last of their message.

    Args:
        rows: Sorted by id, the newest of an id first; each with archived_us.
        find: What the database has of some ids, as `last_known` returns it.
        on_redriven: Is called for each message that is left out, once.
    """
    given = iter(rows)
    judged: int | None = None
    while chunk := list(islice(given, LOOKED_UP)):
        known = find([row["id"] for row in chunk if row["id"] is not None])
        for row in chunk:
            id_ = row["id"]
            if id_ is not None and id_ == judged:
                continue  # an older row of a message whose newest was judged
            judged = id_
            if id_ not in known or _is_last(row, known[id_]):
                yield row
            else:
                on_redriven(row)


def _is_last(row: Row, known: int | None) -> bool:
    at = row["archived_us"]
    return known is not None and at is not None and known <= at

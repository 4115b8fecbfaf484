"""Dead letters of the archive, counted by what they have in common."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, select

from faststream_sqlbroker.core.dead_letters import DeadLetterGroup, DeadLetters
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.message_walks import (
    SCANNED,
    Part,
    archive_walk,
    shown_columns,
)

Likeness = tuple[str | None, str | None]
"""The fingerprint; or, without one, the reason."""


_COUNTED = ("id", "queue", "reason", "error_fingerprint", "archived_at")


@dataclass(slots=True)
class _Group:
    """What was found of a group so far; the newest messages come first."""

    newest_id: int
    first_at: datetime
    last_at: datetime
    reasons: dict[str | None, int] = field(default_factory=dict)
    queues: dict[str, int] = field(default_factory=dict)

    def add(self, row: Any) -> None:
        """Some messages of one reason and queue."""
        self.first_at = min(self.first_at, row.first_at)
        if row.last_at > self.last_at:
            self.last_at = row.last_at
            self.newest_id = row.newest_id
        self.reasons[row.reason] = self.reasons.get(row.reason, 0) + row.found
        self.queues[row.queue] = self.queues.get(row.queue, 0) + row.found


def dead_letters(
    connection: Connection, dialect: Operations, filters: Filters, limit: int
) -> DeadLetters:
    """The `limit` largest groups of FAILED messages that match `filters`.

    At most `SCANNED` messages are looked at, the last archived first.
    """
    groups: dict[Likeness, _Group] = {}
    part = Part(connection, dialect, archive_walk(dialect, filters), None, filters)
    end = None
    for rows, at in part.steps(SCANNED):
        end = at
        for row in _counted(connection, dialect, rows):
            fingerprint = row.error_fingerprint
            likeness = (fingerprint, None if fingerprint else row.reason)
            found = groups.get(likeness)
            if found is None:
                found = groups[likeness] = _Group(row.newest_id, row.first_at, row.last_at)
            found.add(row)
    # Few groups: as many as there are kinds of errors among the messages looked at.
    largest = sorted(groups.items(), key=lambda each: -sum(each[1].queues.values()))[:limit]
    errors = _errors(connection, dialect, [group.newest_id for _, group in largest])
    return DeadLetters(
        tuple(
            DeadLetterGroup(
                fingerprint=fingerprint,
                reasons=_by_count(group.reasons),
                queues=_by_count(group.queues),
                first_at=group.first_at,
                last_at=group.last_at,
                newest_id=group.newest_id,
                error=errors.get(group.newest_id),
            )
            for (fingerprint, _), group in largest
        ),
        None if end is None else part.time_of(end),
    )


def _counted(connection: Connection, dialect: Operations, rows: Any) -> Iterator[Any]:
    """The messages of a stretch by fingerprint, reason and queue."""
    table = dialect.tables.archive
    assert table is not None  # noqa: S101 - the store has looked
    s = rows(*shown_columns(table, _COUNTED, dialect.name)).subquery().c
    likeness = (s.error_fingerprint, s.reason, s.queue)
    counting = select(
        *likeness,
        func.count().label("found"),
        func.min(s.archived_at).label("first_at"),
        func.max(s.archived_at).label("last_at"),
        # Ids rise with the time of publishing, not of the end; it is as good an example.
        func.max(s.id).label("newest_id"),
    )
    yield from connection.execute(counting.group_by(*likeness))


def _errors(connection: Connection, dialect: Operations, ids: list[int]) -> dict[int, str | None]:
    if not ids:
        return {}
    c = dialect.tables.archive.c  # type: ignore[union-attr]
    rows = connection.execute(select(c.id, c.last_error).where(c.id.in_(ids)))
    return {row.id: row.last_error for row in rows}


def _by_count(found: dict[Any, int]) -> dict[Any, int]:
    return dict(sorted(found.items(), key=lambda each: -each[1]))

"""Looks through all tables for rows that cannot be."""

import base64
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.stored import NotACursorError
from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.core.verification import Damage, Note, Verification
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import verification as look
from faststream_sqlbroker.database.parts.verification import BETWEEN

PARTS = ("live", "archive", "jobs", "windows")
"""What is looked through, in this order; a cursor begins with one of them."""
POSITIONS: Mapping[str, Sequence[Sequence[Any]]] = {
    "live": [(int,)],
    "archive": [(int, int)],
    "jobs": [(str,)],
    "windows": [(str, str), (str, str, int, (int, NoneType), (int, NoneType), int, str)],
}
"""The types of a position's values, by part."""
LARGEST = 2**63 - 1
"""What the databases can compare with a number."""
Look = Callable[[Connection], look.Stretch]


class Verifier:
    """Reads stretch by stretch; each is one transaction, and nothing is written.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect

    async def verify(
        self,
        after: str | None,
        *,
        rows: int,
        seconds: float,
        lease_over: float,
        limit: int,
    ) -> Verification:
        """Look at `rows` rows at least, unless there are no more, or `seconds` are over.

        Raises:
            NotACursorError: `after` is not what `verify` returned.
        """
        clock = Clock()
        until = clock.monotonic() + seconds
        part, position = (PARTS[0], None) if after is None else _load(after)
        looked_at = 0
        counts: Counter[str] = Counter()
        damages: list[Damage] = []
        notes: list[Note] = []
        while True:
            stretch = await self._database.run(
                self._look(part, position, lease_over), Activity.OPERATE, write=False
            )
            looked_at += stretch.rows
            counts.update(each.kind for each in stretch.damages)
            damages += stretch.damages[: limit - len(damages)]
            notes += stretch.notes[: limit - len(notes)]
            part, position = _next(part, stretch.after)
            # A stretch was read in any case, so a caller that goes on with `after` gets to the end.
            if part == "" or looked_at >= rows or clock.monotonic() >= until:
                cursor = None if part == "" else _dump(part, position)
                return Verification(
                    rows=looked_at,
                    counts=dict(counts),
                    damages=tuple(damages),
                    after=cursor,
                    notes=tuple(notes),
                )

    def _look(self, part: str, position: Sequence[Any] | None, lease_over: float) -> Look:
        dialect = self._dialect
        if part == "live":
            return lambda c: look.live(c, dialect, position, lease_over)
        if part == "archive":
            return lambda c: look.archived(c, dialect, position)
        if part == "jobs":
            return lambda c: look.jobs(c, dialect.tables.policy_state, position)
        return lambda c: look.windows(c, dialect, position)


def _next(part: str, after: Sequence[Any] | None) -> tuple[str, Sequence[Any] | None]:
    """Where it goes on; "": nowhere."""
    if after is not None:
        return part, after
    at = PARTS.index(part) + 1
    return (PARTS[at] if at < len(PARTS) else ""), None


def _dump(part: str, position: Sequence[Any] | None) -> str:
    values = [part, None if position is None else list(position)]
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode()


def _load(cursor: str) -> tuple[str, Sequence[Any] | None]:
    try:
        part, position = json.loads(base64.urlsafe_b64decode(cursor.encode()))
        known = part in PARTS and (
            position is None or (isinstance(position, list) and _fits(part, position))
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise NotACursorError(cursor) from error
    if not known:
        raise NotACursorError(cursor)
    return part, position


def _fits(part: str, position: list[Any]) -> bool:
    """Whether the position is one of that part."""
    kinds = next((each for each in POSITIONS[part] if len(each) == len(position)), None)
    if kinds is None or not all(map(isinstance, position, kinds)):
        return False
    whole = [each for each in position if isinstance(each, int)]
    if any(abs(each) > LARGEST for each in whole):
        return False
    if part == "archive":
        from_microseconds(position[0])  # raises if it is no moment
    if part == "windows" and len(position) > BETWEEN:
        return _fits_window(position[3:])
    return True


def _fits_window(place: Sequence[Any]) -> bool:
    """Whether it is a place in a window: the last row's moment and id, rows, and the sum of ids."""
    at, last_id, _, ids = place
    int(ids)  # raises if it is no number
    if at is not None:
        from_microseconds(at)
    return (at is None) == (last_id is None)

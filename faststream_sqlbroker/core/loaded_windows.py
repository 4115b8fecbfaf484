"""What the database knows of the windows that an export to a lake has verified.

After a window is in the lake, the export records in the policy state how many rows of it the
database had, and the sum of their ids. Retention compares before it removes, and lowers the record
in the same transaction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.exceptions import SetupError

LOADED = "lake:"
"""Scope of the records: this and the lake's name. The key is the window's name; `due_at` is the
window's end while rows of it are left."""
DIFFERS = "lake_differs:"
"""Scope of records whose rows are no longer those of the database: this and the lake's name. They
are not pruned until an export has recorded them anew."""


@dataclass(frozen=True, slots=True)
class RowSum:
    """Rows, and the sum of their ids: equal sums mean equal rows."""

    rows: int = 0
    ids: int = 0

    def __add__(self, other: "RowSum") -> "RowSum":
        """Of both sets, which have no row in common."""
        return RowSum(self.rows + other.rows, self.ids + other.ids)

    def __sub__(self, other: "RowSum") -> "RowSum":
        """Without `other`, a part of it."""
        return RowSum(self.rows - other.rows, self.ids - other.ids)

    def __str__(self) -> str:
        """For the log."""
        return f"{self.rows} rows with the sum of ids {self.ids}"


@dataclass(frozen=True, slots=True)
class LoadedWindow:
    """The record of one window: [start, end) of `archived_at`."""

    name: str
    start: datetime
    end: datetime
    left: RowSum
    """What the database still has of the rows that the lake has loaded."""
    lake_id: str
    """Random; tells the lake from others that are given its name."""
    version: int = 0
    """Rises with each change of the record."""
    back: RowSum = RowSum()
    """What left the archive for its queue since the record was written; `left` is without it."""

    def info(self) -> dict[str, Any]:
        """As it is stored; the sum is text, as it may exceed what JSON keeps exactly."""
        back = {"back_rows": self.back.rows, "back_ids": str(self.back.ids)}
        return {
            "lake": self.lake_id,
            "start": to_microseconds(self.start),
            "end": to_microseconds(self.end),
            "rows": self.left.rows,
            "ids": str(self.left.ids),
            **back,
        }


def window_of(name: str, info: Mapping[str, Any], version: int) -> LoadedWindow:
    """Read what `LoadedWindow.info` has written."""
    return LoadedWindow(
        name,
        from_microseconds(info["start"]),
        from_microseconds(info["end"]),
        RowSum(info["rows"], int(info["ids"])),
        info["lake"],
        version,
        RowSum(info.get("back_rows", 0), int(info.get("back_ids", 0))),
    )


def checked_lake(option: str, name: object) -> str | None:
    """`name`, given as `option`.

    Raises:
        SetupError: it cannot be the name of a lake.
    """
    if name is None:
        return None
    if problem := name_problem(name):
        raise SetupError(f"{option} must be the name of a lake, got {name!r}: {problem}")
    return str(name)

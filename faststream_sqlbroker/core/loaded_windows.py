"""The database's records of the windows that an export to a lake has verified.

After loading a window into the lake, the export records in the policy state the number of the
window's rows in the database and the sum of their ids. Retention compares these before it
removes rows, and lowers the record in the same transaction.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from faststream_sqlbroker.core.checks import find_name_error
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.exceptions import SetupError

LOADED_SCOPE = "lake:"
"""Scope prefix of the records, followed by the lake's name. The key is the window's name; `due_at`
is the window's end while rows of the window remain."""
DIFFERING_SCOPE = "lake_differs:"
"""Scope prefix of records whose rows no longer match those of the database, followed by the lake's
name. Such windows are not pruned until an export has recorded them again."""


@dataclass(frozen=True, slots=True)
class RowSum:
    """A number of rows and the sum of their ids; equal sums mean equal rows."""

    rows: int = 0
    ids: int = 0

    def __add__(self, other: "RowSum") -> "RowSum":
        """Return the sum of two disjoint sets."""
        return RowSum(self.rows + other.rows, self.ids + other.ids)

    def __sub__(self, other: "RowSum") -> "RowSum":
        """Return the sum without the subset `other`."""
        return RowSum(self.rows - other.rows, self.ids - other.ids)

    def __str__(self) -> str:
        """Format the sum for the log."""
        return f"{self.rows} rows with the sum of ids {self.ids}"


@dataclass(frozen=True, slots=True)
class LoadedWindow:
    """The record of a window: [start, end) of `archived_at`."""

    name: str
    start: datetime
    end: datetime
    remaining: RowSum
    """The loaded rows that are still in the database."""
    lake_id: str
    """Random id that distinguishes lakes of the same name."""
    version: int = 0
    """Number of changes of the record."""
    returned: RowSum = RowSum()
    """Rows that have left the archive for their queue since the record was written; not part of
    `remaining`."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON.

        The sums of ids are text, because they may exceed the exact integers of JSON.
        """
        returned = {"back_rows": self.returned.rows, "back_ids": str(self.returned.ids)}
        return {
            "lake": self.lake_id,
            "start": to_microseconds(self.start),
            "end": to_microseconds(self.end),
            "rows": self.remaining.rows,
            "ids": str(self.remaining.ids),
            **returned,
        }


def parse_window(name: str, info: Mapping[str, Any], version: int) -> LoadedWindow:
    """Read a record written by `LoadedWindow.to_json`.

    Records of older versions have no rows that were returned to their queue.
    """
    return LoadedWindow(
        name,
        from_microseconds(info["start"]),
        from_microseconds(info["end"]),
        RowSum(info["rows"], int(info["ids"])),
        info["lake"],
        version,
        RowSum(info.get("back_rows", 0), int(info.get("back_ids", 0))),
    )


def validate_lake(option: str, name: object) -> str | None:
    """Check and return the value of `option`: None, or the name of a lake.

    Raises:
        SetupError: the name is invalid.
    """
    if name is None:
        return None
    if error := find_name_error(name):
        raise SetupError(f"{option} must be the name of a lake, got {name!r}: {error}")
    return str(name)

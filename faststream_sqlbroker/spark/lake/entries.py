"""The record of one window in the state of an export."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.spark.lake.row_checksums import NOTHING, RowChecksums, from_json
from faststream_sqlbroker.spark.lake.windows import parse_window


@dataclass(frozen=True)
class Entry:
    """The record of one window.

    Attributes:
        lake: RowChecksums of what is in the folder.
        source: Counts of what the database had when it was exported; less than `lake` where the
            lake keeps rows that the database has lost.
        files: How many Parquet files.
        bytes: Of the files.
    """

    lake: RowChecksums
    source: RowChecksums
    files: int = 0
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON; empty for a window without rows, as there may be many."""
        if not self.lake.rows and not self.source.rows:
            return {}
        sums = {"lake": self.lake.to_json(), "source": self.source.to_json()}
        return {**sums, "files": self.files, "bytes": self.bytes}


def entry_from_json(values: Mapping[str, Any]) -> Entry:
    """Read what `Entry.to_json` has written."""
    if not values:
        return Entry(NOTHING, NOTHING.counts)
    sums = from_json(values["lake"]), from_json(values["source"])
    return Entry(*sums, int(values["files"]), int(values["bytes"]))


def entries_of(state: Mapping[str, Any], path: str) -> dict[str, Entry]:
    """The records of all windows, from the state of an export at `path`.

    Raises:
        SetupError: any part of the state is missing, or is something else.
    """
    try:
        size = state["source"]["window"]
        entries = {name: entry_from_json(values) for name, values in state["windows"].items()}
        if (pending := state["pending"]) is not None:
            _check_pending(pending, size)
        for name in entries:
            parse_window(name, size)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"{path} is a damaged state of an export ({error!r}): restore it from a copy"
        raise SetupError(msg) from error
    return entries


def _check_pending(pending: Mapping[str, Any], size: str) -> None:
    parse_window(pending["window"], size)
    entry_from_json(pending["entry"])
    for name in ("folder", "aside"):
        if not isinstance(pending[name], str):
            raise TypeError(name)

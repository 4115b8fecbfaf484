"""What the state of an export knows of one window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faststream_sqlbroker.spark.figures import NOTHING, Figures, from_json


@dataclass(frozen=True)
class Entry:
    """What the state knows of a window.

    Attributes:
        lake: Figures of what is in the folder.
        source: Counts of what the database had when it was exported; less than `lake` where the lake keeps
            rows that the database has lost.
        files: How many Parquet files.
        bytes: Of the files.
    """

    lake: Figures
    source: Figures
    files: int = 0
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """For the state; nothing for a window without rows, of which there may be many."""
        if not self.lake.rows and not self.source.rows:
            return {}
        sums = {"lake": self.lake.to_json(), "source": self.source.to_json()}
        return {**sums, "files": self.files, "bytes": self.bytes}


def entry_from_json(values: Mapping[str, Any]) -> Entry:
    """What `Entry.to_json` made."""
    if not values:
        return Entry(NOTHING, NOTHING.counts)
    sums = from_json(values["lake"]), from_json(values["source"])
    return Entry(*sums, int(values["files"]), int(values["bytes"]))

"""The state of a lake: records of its windows, covered spans of time, SHA-256 of its files.

Each commit of ours writes a file with the complete state next to the log. So no old commit is
needed, and clean-up of the log may remove them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.lake.row_checksums import RowChecksums, parse_checksums
from pyspark_sqlbroker.lake.windows import Span, merge_spans, parse_window

FORMAT = 1
"""Version of the layout of states; other versions are refused."""


@dataclass(frozen=True)
class Entry:
    """The record of a window.

    Attributes:
        lake: Checksums of its rows in the lake.
        source: Counts of the database's rows at the export; fewer than `lake` where the lake keeps
            rows that the database has lost.
    """

    lake: RowChecksums
    source: RowChecksums


@dataclass(frozen=True)
class LakeState:
    """Windows, spans and files of a version of a lake.

    Attributes:
        entries: Records, by name, of windows that have rows in the lake or in the database.
        covered: Exported spans, including windows without rows; in order, and none touches another.
        digests: SHA-256 by path, of files that our commits have added, and of files of other
            programs whose rows were compared.
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)
    covered: tuple[Span, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def watermark(self) -> datetime | None:
        """End of the first exported span, in which the lake has no gap; None without spans."""
        return self.covered[0][1] if self.covered else None

    def merge(self, change: "LakeState") -> "LakeState":
        """Return the state after a commit with this change, whose records replace older records.

        A change is a state that has only what the commit adds: records, spans and SHA-256.
        """
        return LakeState(
            {**self.entries, **change.entries},
            tuple(merge_spans([*self.covered, *change.covered])),
            {**self.digests, **change.digests},
        )

    def pack(self) -> bytes:
        """Render the state as JSON; `parse_state` reads it.

        Each commit writes the complete state to a new file, so that no older file is needed.
        """
        content = {
            "format": FORMAT,
            "windows": {
                name: {"lake": entry.lake.to_json(), "source": entry.source.to_json()}
                for name, entry in sorted(self.entries.items())
            },
            "covered": [[start.isoformat(), end.isoformat()] for start, end in self.covered],
            "files": dict(self.digests),
        }
        return json.dumps(content).encode()


def parse_state(packed: bytes, size: str, path: str) -> LakeState:
    """Parse a state that `LakeState.pack` has written.

    `size` is the length of the lake's windows, "day" or "hour"; `path` is named in errors.

    Raises:
        SetupError: it is damaged, or of another version.
    """
    try:
        content = json.loads(packed)
        if content["format"] != FORMAT:
            raise SetupError(
                f"{path} has format {content['format']!r}, but this version reads only format "
                f"{FORMAT}: use the version that wrote it"
            )
        entries = dict[str, Entry]()
        for name, entry in content["windows"].items():
            parse_window(name, size)  # raises ValueError for a name that is no window
            entries[name] = Entry(parse_checksums(entry["lake"]), parse_checksums(entry["source"]))
        spans = merge_spans(_parse_span(pair) for pair in content["covered"])
        return LakeState(entries, tuple(spans), dict(content["files"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SetupError(
            f"the state {path} of an export is damaged ({error!r}): restore it from a copy, or "
            "remove it and run sqlbroker archive repair to record the windows that the database "
            "still has"
        ) from error


def _parse_span(pair: Any) -> Span:
    start, end = pair
    return datetime.fromisoformat(start), datetime.fromisoformat(end)

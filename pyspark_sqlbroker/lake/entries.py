"""The state of a lake: records of its windows, covered spans of time, SHA-256 of its files.

Each commit of ours comes with a file of the whole state next to the log. So no old commit is
needed, and clean-up of the log may remove them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.lake.row_checksums import RowChecksums, from_json
from pyspark_sqlbroker.lake.windows import Span, merge_spans, parse_window

FORMAT = 1
"""Version of the layout of states; one of another version is refused."""


@dataclass(frozen=True)
class Entry:
    """The record of one window.

    Attributes:
        lake: Of its rows in the lake.
        source: Counts of what the database had when it was exported; less than `lake` where the
            lake keeps rows that the database has lost.
    """

    lake: RowChecksums
    source: RowChecksums


@dataclass(frozen=True)
class State:
    """Windows, spans and files of one version of a lake.

    Attributes:
        entries: Records of windows that have rows, in the lake or in the database, by name.
        covered: Spans that are in the lake, windows without rows too; in order, and they do not
            touch each other.
        digests: SHA-256 by path of the files that commits of ours have added, and of those of other
            programs whose rows were compared.
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)
    covered: tuple[Span, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def watermark(self) -> datetime | None:
        """The end of the first span; None if there is none."""
        return self.covered[0][1] if self.covered else None

    def merge(self, change: "State") -> "State":
        """The state with the windows, spans and files of a commit."""
        return State(
            {**self.entries, **change.entries},
            tuple(merge_spans([*self.covered, *change.covered])),
            {**self.digests, **change.digests},
        )

    def pack(self) -> bytes:
        """Write it as JSON."""
        content = {
            "format": FORMAT,
            "windows": {
                name: {"lake": one.lake.to_json(), "source": one.source.to_json()}
                for name, one in sorted(self.entries.items())
            },
            "covered": [[start.isoformat(), end.isoformat()] for start, end in self.covered],
            "files": dict(self.digests),
        }
        return json.dumps(content).encode()


def unpack(packed: bytes, size: str, path: str) -> State:
    """Read what `State.pack` has written.

    Raises:
        SetupError: it is damaged, or of another version.
    """
    try:
        content = json.loads(packed)
        if content["format"] != FORMAT:
            raise SetupError(
                f"{path} is of format {content['format']!r}, this version knows "
                f"{FORMAT}: use the version that wrote it"
            )
        entries = dict[str, Entry]()
        for name, one in content["windows"].items():
            parse_window(name, size)
            entries[name] = Entry(from_json(one["lake"]), from_json(one["source"]))
        spans = merge_spans(_span(one) for one in content["covered"])
        return State(entries, tuple(spans), dict(content["files"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SetupError(
            f"the state {path} of an export is damaged ({error!r}): restore it from a copy; or "
            "remove it, and sqlbroker archive repair records each window that the database still "
            "has"
        ) from error


def _span(pair: Any) -> Span:
    start, end = pair
    return datetime.fromisoformat(start), datetime.fromisoformat(end)

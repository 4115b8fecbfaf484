"""What the commits of a lake say: figures of windows, covered spans of time, SHA-256 of files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.lake.row_checksums import RowChecksums, from_json
from pyspark_sqlbroker.lake.windows import Span, merge_spans, parse_window

FORMAT = 1
"""Version of the notes' layout; a note of another version is refused."""


@dataclass(frozen=True)
class Entry:
    """The record of one window.

    Attributes:
        lake: Figures of its rows in the lake.
        source: Counts of what the database had when it was exported; less than `lake` where the
            lake keeps rows that the database has lost.
    """

    lake: RowChecksums
    source: RowChecksums


@dataclass(frozen=True)
class Note:
    """What one commit says.

    Attributes:
        action: "export", "compact", "repair" or "erase".
        windows: Records of the windows that it changes, by name.
        covered: Spans of time that are in the lake with it, windows without rows too.
        digests: SHA-256 of each file that it adds, by path.
    """

    action: str
    windows: Mapping[str, Entry] = field(default_factory=dict)
    covered: tuple[Span, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "format": FORMAT,
            "action": self.action,
            "windows": {
                name: {"lake": one.lake.to_json(), "source": one.source.to_json()}
                for name, one in sorted(self.windows.items())
            },
            "covered": [[start.isoformat(), end.isoformat()] for start, end in self.covered],
            "files": dict(self.digests),
        }


@dataclass
class State:
    """All notes together.

    Attributes:
        entries: Records of windows that have rows, in the lake or in the database, by name.
        covered: Spans in order, that do not touch each other.
        digests: SHA-256 of every file that was ever added, by path.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    covered: list[Span] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def watermark(self) -> datetime | None:
        """The end of the first span; None if there is none."""
        return self.covered[0][1] if self.covered else None


def state_of(notes: Iterable[Mapping[str, Any]], size: str, path: str) -> State:
    """Put the notes together, from the oldest to the newest.

    Raises:
        SetupError: a note is damaged, or of another version.
    """
    state = State()
    spans = list[Span]()
    try:
        for note in notes:
            if note["format"] != FORMAT:
                raise SetupError(
                    f"the log of {path} has notes of format {note['format']!r}, this version knows "
                    f"{FORMAT}: use the version that wrote them"
                )
            for name, one in note["windows"].items():
                parse_window(name, size)
                state.entries[name] = Entry(from_json(one["lake"]), from_json(one["source"]))
            spans += [_span(one) for one in note["covered"]]
            state.digests |= note["files"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"the log of {path} has a damaged note of an export ({error!r}): restore its log"
        raise SetupError(msg) from error
    state.covered = merge_spans(spans)
    return state


def _span(pair: Any) -> Span:
    start, end = pair
    return datetime.fromisoformat(start), datetime.fromisoformat(end)

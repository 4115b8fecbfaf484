"""What others have done to a lake since it was written, as far as an export looks for it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyspark_sqlbroker.lake.delta import LOG, DataFile
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.row_checksums import NOTHING, compute_windows
from pyspark_sqlbroker.lake.windows import ExportWindow


@dataclass(frozen=True)
class Changes:
    """What differs from what exports have committed.

    Attributes:
        files: Altered, missing, or written by another program, with what differs; `LOG` if the
            table has other rows than the log's notes say.
        windows: Names of the windows that are concerned.
        unreadable: Altered files, if the notes lack windows: these may have rows in them.
    """

    files: Mapping[str, str]
    windows: frozenset[str]
    unreadable: tuple[DataFile, ...] = ()

    def concern(self, window: ExportWindow) -> bool:
        """Whether a window may have rows in the lake that are not those that are recorded."""
        return window.name in self.windows or any(
            one.may_hold(window.start, window.end) for one in self.unreadable
        )


def find_changes(lake: Lake, checked_bytes: int) -> Changes:
    """Compare the table with the log's notes; rows are counted only where the log shows a change.

    Args:
        lake: As it is loaded.
        checked_bytes: See `Lake.altered`.
    """
    altered = lake.altered(checked_bytes)
    files = lake.unrecorded_of(lake.files) | altered
    windows = {one.name for one in lake.windows_of(files)}
    if files.keys() == altered.keys() and _all_recorded(lake):
        return Changes(files, frozenset(windows))
    # Other programs add and remove files, and clean-up of the log loses notes with their records.
    good = [one for one in lake.files if one.path not in altered]
    differing = [one for one in _differing(lake, good) if one not in windows]
    if differing:
        others = f" and of {len(differing) - 1} more windows" if differing[1:] else ""
        files[LOG] = f"the table has other rows of {differing[0]}{others} than its log says"
    unreadable = tuple(one for one in lake.files if one.path in altered)
    return Changes(files, frozenset({*windows, *differing}), unreadable)


def _all_recorded(lake: Lake) -> bool:
    """Whether the log's files have as many rows as its notes say."""
    recorded = sum(lake.figures_of(one).rows for one in lake.windows())
    return sum(one.rows for one in lake.files) == recorded


def _differing(lake: Lake, files: Iterable[DataFile]) -> list[str]:
    """Names of windows of which these files have other rows than the notes say."""
    found = compute_windows(lake.read_files(files), lake.size, checksums=False)
    windows = sorted({*lake.windows(), *found})
    return [
        one.name for one in windows if not found.get(one, NOTHING).matches(lake.figures_of(one))
    ]

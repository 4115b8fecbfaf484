"""Compare the files of a lake with its log: what differs, by file and by window.

`verify_export` and repairs read all rows. An export looks for what others have done since, and
reads rows only where the log shows a change.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from pyspark.sql import SparkSession

from pyspark_sqlbroker.lake.delta import LOG, DataFile
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.row_checksums import NOTHING, RowChecksums, compute_windows
from pyspark_sqlbroker.lake.windows import ExportWindow
from pyspark_sqlbroker.moments import Moment, parse_moment


@dataclass(frozen=True)
class VerifyResult:
    """What a lake holds, compared with what its commits say.

    Attributes:
        path: Where it is.
        files: How many were read.
        windows: How many were compared.
        rows: In the files that are as they were committed.
        damaged: Files that were altered or are missing, or in which another program has written
            rows without `id` or `archived_at`, by path, with what differs.
        unrecorded: Files without a SHA-256 in the log, as other programs write them.
        differing: Windows whose rows in the good files are not what the log says, with both
            figures.
    """

    path: str
    files: int
    windows: int
    rows: int
    damaged: Mapping[str, str]
    unrecorded: tuple[str, ...]
    differing: Mapping[str, str]

    @property
    def intact(self) -> bool:
        """Whether nothing differs."""
        return not (self.damaged or self.unrecorded or self.differing)


@dataclass(frozen=True)
class Findings:
    """The same, with what a repair needs.

    Attributes:
        files: Those that were looked at.
        damaged: Altered or missing, with what differs.
        unrecorded: Without a SHA-256 in the log.
        found: Figures of each window in the files that are not damaged.
        differing: Windows whose figures are not those of the log.
    """

    files: list[DataFile]
    damaged: Mapping[str, str]
    unrecorded: tuple[str, ...]
    found: Mapping[ExportWindow, RowChecksums] = field(default_factory=dict)
    differing: tuple[ExportWindow, ...] = ()

    @property
    def good(self) -> list[DataFile]:
        """The files that are not damaged."""
        return [one for one in self.files if one.path not in self.damaged]


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


def verify_export(
    spark: SparkSession,
    path: str,
    *,
    since: Moment | None = None,
    until: Moment | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> VerifyResult:
    """Read the files of a lake again and compare them with its log.

    Every file is compared by size and SHA-256, and the figures of every window are computed anew
    from the files that are as they were committed. No database is asked.

    Args:
        spark: A session; not Spark Connect. No driver is needed.
        path: Of the lake.
        since: Only windows that begin at or after this moment, and files that may have their rows.
        until: Only windows that have ended by this moment.
        storage_options: See `export_archive`.

    Raises:
        SetupError: nothing was exported to this path.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path, storage_options)
    lake.need_source()
    first = parse_moment("since", since)
    end = parse_moment("until", until)
    findings = examine(lake, first, end)
    differing = {
        one.name: f"the log says {lake.figures_of(one)}; the files have "
        f"{findings.found.get(one, NOTHING)}"
        for one in findings.differing
    }
    compared = {*_windows(lake, first, end), *findings.found}
    rows = sum(one.rows for one in findings.found.values())
    return VerifyResult(
        lake.folders.root,
        len(findings.files),
        len(compared),
        rows,
        findings.damaged,
        findings.unrecorded,
        differing,
    )


def examine(lake: Lake, first: datetime | None = None, end: datetime | None = None) -> Findings:
    """Compare files and windows of a span of time; None is no bound."""
    windows = _windows(lake, first, end)
    files = lake.files
    if first is not None or end is not None:
        files = [
            one for one in files if any(one.may_hold(each.start, each.end) for each in windows)
        ]
    damaged = lake.altered_of(files)
    unrecorded = tuple(lake.unrecorded_of(files))
    # No window has these rows, so no figures would show them.
    strange = [one for one in files if one.path in unrecorded and one.path not in damaged]
    damaged |= lake.nameless_of(strange)
    good = [one for one in files if one.path not in damaged]
    computed = compute_windows(lake.read_files(good), lake.size, checksums=True)
    found = {one: figures for one, figures in computed.items() if _between(one, first, end)}
    differing = [
        one
        for one in sorted({*windows, *found})
        if not found.get(one, NOTHING).matches(lake.figures_of(one))
    ]
    return Findings(files, damaged, unrecorded, found, tuple(differing))


def _windows(lake: Lake, first: datetime | None, end: datetime | None) -> list[ExportWindow]:
    return [one for one in lake.windows() if _between(one, first, end)]


def _between(window: ExportWindow, first: datetime | None, end: datetime | None) -> bool:
    return (first is None or window.start >= first) and (end is None or window.end <= end)


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

"""Windows of an export: days or hours of UTC, each a folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from faststream_sqlbroker.core.times import EPOCH
from faststream_sqlbroker.spark.load.selection import Selection

LENGTHS = {"day": timedelta(days=1), "hour": timedelta(hours=1)}
_FORMATS = {"day": "%Y-%m-%d", "hour": "%Y-%m-%dT%H"}


@dataclass(frozen=True, order=True)
class ExportWindow:
    """One window: [start, end) of `archived_at`.

    Attributes:
        start: In UTC.
        size: "day" or "hour".
    """

    start: datetime
    size: str

    @property
    def end(self) -> datetime:
        """The first moment that does not belong to it."""
        return self.start + LENGTHS[self.size]

    @property
    def name(self) -> str:
        """Such as 2026-03-01 or 2026-03-01T05."""
        return f"{self.start:{_FORMATS[self.size]}}"

    @property
    def folder(self) -> str:
        """Its place below the path of the export."""
        day = f"date={self.start:%Y-%m-%d}"
        return day if self.size == "day" else f"{day}/hour={self.start:%H}"


def parse_window(name: str, size: str) -> ExportWindow:
    """The window of a name."""
    return ExportWindow(datetime.strptime(name, _FORMATS[size]).replace(tzinfo=timezone.utc), size)


def floor(moment: datetime, size: str) -> datetime:
    """The start of the window that `moment` lies in."""
    return moment - (moment - EPOCH) % LENGTHS[size]


def windows_between(since: datetime, until: datetime, size: str) -> Iterator[ExportWindow]:
    """Whole windows: from the one with `since` to the last that ends at or before `until`."""
    window = ExportWindow(floor(since, size), size)
    while window.end <= until:
        yield window
        window = ExportWindow(window.end, size)


def plan_windows(
    recorded: Sequence[ExportWindow],
    size: str,
    selection: Selection,
    oldest: datetime | None,
    horizon: datetime,
    recheck: float,
) -> list[ExportWindow]:
    """Which windows an export looks at, in order.

    Args:
        recorded: Those that the lake has, in order.
        size: "day" or "hour".
        selection: Its since is the start of the window to begin with, its until is what the user
            asked for.
        oldest: Of the archive's rows of the selection's time; None if there are none.
        horizon: Later rows may still come.
        recheck: Seconds before the horizon in which recorded windows are looked at again.
    """
    end = horizon if selection.until is None else min(horizon, selection.until)
    again = {
        one for one in recorded if one.end <= end and one.end > horizon - timedelta(seconds=recheck)
    }
    begin = _begin(recorded, selection.since, oldest)
    between = set() if begin is None else set(windows_between(begin, end, size))
    if selection.since is None:
        between -= set(recorded)
    return sorted(between | again)


def _begin(
    recorded: Sequence[ExportWindow], since: datetime | None, oldest: datetime | None
) -> datetime | None:
    """The first moment that an export looks at; None if there is nothing."""
    if since is None and recorded:
        return first_gap(recorded)
    # Before the first row, and the first window of the lake, there are only empty windows.
    known = [one.start for one in recorded] + ([] if oldest is None else [oldest])
    return min((one for one in known if since is None or one >= since), default=None)


def first_gap(recorded: Sequence[ExportWindow]) -> datetime | None:
    """The end of the windows that follow each other from the first; None without windows."""
    end = None
    for window in recorded:
        if end is not None and window.start != end:
            break
        end = window.end
    return end

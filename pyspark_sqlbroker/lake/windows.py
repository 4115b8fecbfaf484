"""Windows of an export: days or hours of UTC, and spans of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from faststream_sqlbroker.core.times import EPOCH
from pyspark_sqlbroker.load.selection import Selection

LENGTHS = {"day": timedelta(days=1), "hour": timedelta(hours=1)}
_FORMATS = {"day": "%Y-%m-%d", "hour": "%Y-%m-%dT%H"}
_LETTERS = {"day": len("2026-03-01"), "hour": len("2026-03-01T05")}


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
        return self.start.isoformat()[: _LETTERS[self.size]]

    @property
    def advice(self) -> str:
        """How to export it again: without since= it may be older than what an export looks at."""
        return f"export again with --since {self.name[: _LETTERS['day']]}"


def parse_window(name: str, size: str) -> ExportWindow:
    """The window of a name."""
    return ExportWindow(datetime.strptime(name, _FORMATS[size]).replace(tzinfo=timezone.utc), size)


def floor(moment: datetime, size: str) -> datetime:
    """The start of the window that `moment` lies in."""
    return moment - (moment - EPOCH) % LENGTHS[size]


Span = tuple[datetime, datetime]
"""[start, end) of `archived_at`, both at the edges of windows."""


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans in order that do not touch each other."""
    merged = list[Span]()
    for start, end in sorted(one for one in spans if one[0] < one[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def cut_spans(spans: Iterable[Span], start: datetime | None, end: datetime | None) -> list[Span]:
    """What of the spans lies between two moments; None is no bound."""
    cut = list[Span]()
    for first, last in spans:
        low = first if start is None else max(first, start)
        high = last if end is None else min(last, end)
        if low < high:
            cut.append((low, high))
    return cut


def without_spans(span: Span, taken: Iterable[Span]) -> list[Span]:
    """What is left of a span without those, which are in order and do not touch each other."""
    left = list[Span]()
    start, end = span
    for first, last in taken:
        if first >= end or last <= start:
            continue
        left.append((start, first))
        start = max(start, last)
    return merge_spans([*left, (start, end)])


def plan_spans(
    covered: Sequence[Span],
    size: str,
    selection: Selection,
    oldest: datetime | None,
    horizon: datetime,
    recheck: float,
) -> list[Span]:
    """Which spans of time an export looks at, in order; windows in them without rows cost nothing.

    Args:
        covered: Those that the lake has, in order.
        size: "day" or "hour".
        selection: Its since is the start of the window to begin with, its until is what the user
            asked for.
        oldest: Of the archive's rows of the selection's time; None if there are none.
        horizon: Later rows may still come.
        recheck: Seconds before the horizon in which covered windows are looked at again.
    """
    end = horizon if selection.until is None else min(horizon, selection.until)
    end = floor(end, size)
    back = floor(horizon - timedelta(seconds=recheck), size)
    looked = [(max(start, back), min(stop, end)) for start, stop in covered] if recheck else []
    begin = _begin(covered, selection.since, oldest, size)
    if begin is not None and begin < end:
        taken = covered if selection.since is None else ()
        looked += without_spans((begin, end), taken)
    return merge_spans(looked)


def _begin(
    covered: Sequence[Span], since: datetime | None, oldest: datetime | None, size: str
) -> datetime | None:
    """The first moment that an export looks at; None if there is nothing."""
    if since is None and covered:
        return covered[0][1]
    # Before the first row, and the first window of the lake, there are only empty windows.
    known = [start for start, _ in covered] + ([] if oldest is None else [floor(oldest, size)])
    if since is not None:
        known = [max(start, since) for start, end in covered if end > since]
        known += [] if oldest is None else [floor(oldest, size)]
    return min(known, default=None)

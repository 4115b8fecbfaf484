"""Windows of an export: days or hours of UTC, and spans of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from faststream_sqlbroker.core.times import EPOCH
from pyspark_sqlbroker.load.selection import Selection

WINDOW_LENGTHS = {"day": timedelta(days=1), "hour": timedelta(hours=1)}
_FORMATS = {"day": "%Y-%m-%d", "hour": "%Y-%m-%dT%H"}
_NAME_LENGTHS = {"day": len("2026-03-01"), "hour": len("2026-03-01T05")}


@dataclass(frozen=True, order=True)
class ExportWindow:
    """One window: [start, end) of `archived_at`.

    Attributes:
        start: Its start, in UTC.
        size: "day" or "hour".
    """

    start: datetime
    size: str

    @property
    def end(self) -> datetime:
        """The first time after the window."""
        return self.start + WINDOW_LENGTHS[self.size]

    @property
    def name(self) -> str:
        """Name such as 2026-03-01 or 2026-03-01T05."""
        return self.start.isoformat()[: _NAME_LENGTHS[self.size]]

    @property
    def repair_hint(self) -> str:
        """Hint to export the window again.

        It gives since=, because the window may be older than those that an export checks.
        """
        return f"export again with --since {self.name[: _NAME_LENGTHS['day']]}"


def parse_window(name: str, size: str) -> ExportWindow:
    """Return the window with this name."""
    return ExportWindow(datetime.strptime(name, _FORMATS[size]).replace(tzinfo=timezone.utc), size)


def floor_to_window(time: datetime, size: str) -> datetime:
    """Return the start of the window that contains `time`: midnight of UTC, or the full hour."""
    return time - (time - EPOCH) % WINDOW_LENGTHS[size]


Span = tuple[datetime, datetime]
"""[start, end) of `archived_at`, both at the edges of windows."""


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that touch or overlap; return the result in order, without empty spans."""
    merged = list[Span]()
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def cut_spans(spans: Iterable[Span], start: datetime | None, end: datetime | None) -> list[Span]:
    """Cut the spans to the time between `start` and `end`; None is no bound.

    Spans outside of that time are left out.
    """
    cut = list[Span]()
    for first, last in spans:
        low = first if start is None else max(first, start)
        high = last if end is None else min(last, end)
        if low < high:
            cut.append((low, high))
    return cut


def subtract_spans(span: Span, removed: Iterable[Span]) -> list[Span]:
    """Return the parts of `span` outside of the `removed` spans.

    `removed` must be in order without overlaps, as `merge_spans` returns spans.
    """
    remaining = list[Span]()
    start, end = span
    for first, last in removed:
        if first >= end or last <= start:
            continue
        remaining.append((start, first))
        start = max(start, last)
    return merge_spans([*remaining, (start, end)])


def plan_spans(
    covered: Sequence[Span],
    size: str,
    selection: Selection,
    oldest: datetime | None,
    horizon: datetime,
    recheck: float,
) -> list[Span]:
    """Return the spans that an export checks, in order; windows without rows cost nothing.

    A window is a day or an hour of `archived_at`, a span is several windows in a row. These are
    spans that no export has covered, from the end of the first covered span on, and the covered
    spans of the `recheck` seconds before the horizon. With `selection.since` they are all spans
    from there on, covered or not.

    Args:
        covered: The exported spans, in order.
        size: "day" or "hour".
        selection: Its since is the start of the first window, its until is the user's.
        oldest: Time of the oldest row in the selection's time; None if there is none.
        horizon: Later rows may still come.
        recheck: Seconds before the horizon in which covered windows are checked again, for rows
            whose transactions were committed late.
    """
    end = horizon if selection.until is None else min(horizon, selection.until)
    end = floor_to_window(end, size)
    recheck_start = floor_to_window(horizon - timedelta(seconds=recheck), size)
    spans = (
        [(max(start, recheck_start), min(stop, end)) for start, stop in covered] if recheck else []
    )
    new_start = _find_start(covered, selection.since, oldest, size)
    if new_start is not None and new_start < end:
        # With since= the user wants exported windows to be checked, too.
        excluded = covered if selection.since is None else ()
        spans += subtract_spans((new_start, end), excluded)
    return merge_spans(spans)


def _find_start(
    covered: Sequence[Span], since: datetime | None, oldest: datetime | None, size: str
) -> datetime | None:
    """Return the start of the new windows that an export checks; None if there are none.

    Without `since` it is the end of the first exported span. With `since` it is `since`, or later
    if the first row or exported span is later: all windows before that are empty.
    """
    if since is None and covered:
        return covered[0][1]
    # All windows before the first row and before the first window of the lake are empty.
    candidates = [start for start, _ in covered] + (
        [] if oldest is None else [floor_to_window(oldest, size)]
    )
    if since is not None:
        candidates = [max(start, since) for start, end in covered if end > since]
        candidates += [] if oldest is None else [floor_to_window(oldest, size)]
    return min(candidates, default=None)

"""One run of an export: count the windows of some spans, and bring what the lake lacks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.exceptions import ConcurrentLoadError
from pyspark_sqlbroker.lake.changes import Changes
from pyspark_sqlbroker.lake.entries import Entry, Note
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.records import Records
from pyspark_sqlbroker.lake.row_checksums import NOTHING, RowChecksums, ask_windows
from pyspark_sqlbroker.lake.transfer import Batch, Job, lacking, transfer
from pyspark_sqlbroker.lake.windows import (
    ExportWindow,
    Span,
    cut_spans,
    merge_spans,
    without_spans,
)

PLANS = 20
"""How often a plan is made anew because another process has committed."""

logger = getLogger("faststream_sqlbroker.spark")


@dataclass(frozen=True)
class ExportedWindow:
    """The result of one window.

    Attributes:
        name: Such as 2026-03-01 or 2026-03-01T05, UTC.
        action: "exported"; "again" (rows had come since, and are in it now); "unchanged"; "left"
            (the database has fewer rows than the lake, which keeps them); "damaged" (a file of it
            was altered, or is another program's, so it is left as it is).
        rows: In the lake.
        number: 1 for the first window of this run.
        total: How many windows this run looks at.
    """

    name: str
    action: str
    rows: int
    number: int
    total: int


class Run:
    """The work of one call of `export_archive`; goes on where it was if it plans again.

    Attributes:
        job: Where from and where to.
        connection: To the database.
        records: Of the lake in the database; None if none are kept.
        done: What was done, by window.
    """

    def __init__(
        self,
        job: Job,
        connection: Connection,
        records: Records | None,
        rows_per_commit: int,
        changes: Changes,
        tell: Callable[[ExportedWindow], Any] | None,
    ) -> None:
        self.job = job
        self.connection = connection
        self.records = records
        self.done: dict[str, ExportedWindow] = {}
        self._rows_per_commit = rows_per_commit
        self._changes = changes
        self._tell = tell or (lambda _: None)
        self._total = 0
        if records is not None:
            records.hold(changes.windows)

    def is_whole(self, window: ExportWindow) -> bool:
        """Whether the lake has rows of a window, and none of its files was altered."""
        entry = self.job.lake.entry(window)
        return (
            entry is not None and bool(entry.lake.rows) and window.name not in self._changes.windows
        )

    def bring(self, spans: Sequence[Span]) -> None:
        """Export what the lake lacks of some spans.

        Raises:
            ConcurrentLoadError: another process has committed since the lake was loaded.
        """
        counts = self._count(spans)
        recorded = [one for one in self.job.lake.windows() if _inside(one, spans)]
        windows = sorted({*counts, *recorded})
        self._total = len({*self.done, *(one.name for one in windows)})
        strange = [one for one in windows if self._is_strange(one)]
        for one in strange:
            self._note(one, "damaged", Entry(NOTHING, NOTHING))
        taken = merge_spans((one.start, one.end) for one in strange)
        # A batch is read as one span, so what lies between two spans must not be within it.
        for span in spans:
            for part in without_spans(span, taken):
                self._bring_part(part, [one for one in windows if _inside(one, [part])], counts)

    def _is_strange(self, window: ExportWindow) -> bool:
        """Whether a window without a record may have rows in the lake: its record may be lost."""
        return self.job.lake.entry(window) is None and self._changes.concern(window)

    def _bring_part(
        self,
        span: Span,
        windows: Sequence[ExportWindow],
        counts: Mapping[ExportWindow, RowChecksums],
    ) -> None:
        waiting = list[ExportWindow]()
        rows = 0
        reached = span[0]
        for window in windows:
            known = self.job.lake.entry(window) is not None
            if not known:
                waiting.append(window)
                rows += counts[window].rows
            # No known window may lie within a batch either.
            if waiting and (known or rows >= self._rows_per_commit):
                end = waiting[-1].end
                self._bring(waiting, rows, cut_spans([span], reached, end))
                reached = end
                waiting = []
                rows = 0
            if known:
                self._look_again(window, counts.get(window, NOTHING))
        self._bring(waiting, rows, cut_spans([span], reached, None))

    def _count(self, spans: Sequence[Span]) -> dict[ExportWindow, RowChecksums]:
        counts = dict[ExportWindow, RowChecksums]()
        for start, end in spans:
            selection = self.job.selection.between(start, end)
            counts |= ask_windows(
                self.job.database,
                self.connection,
                selection,
                self.job.lake.size,
                checksums=False,
            )
        return counts

    def _bring(self, windows: list[ExportWindow], rows: int, covered: Sequence[Span]) -> None:
        """Bring windows of which the lake has no row; the commit covers these spans."""
        lake = self.job.lake
        if not windows:
            if any(without_spans(one, lake.state.covered) for one in covered):
                lake.commit(Note("export", covered=tuple(covered)))
            return
        late = {one for one in windows if lake.covers(one)}
        for one in sorted(late):
            _warn_late(one, rows if len(windows) == 1 else None)
        batch = Batch(tuple(windows), rows, False, tuple(covered))
        entries = transfer(self.job, self.connection, batch)
        for one in sorted(entries):
            self._note(one, "again" if one in late else "exported", entries[one])

    def _look_again(self, window: ExportWindow, counts: RowChecksums) -> None:
        """A window that the lake has: bring the rows that came late."""
        lake = self.job.lake
        entry = lake.entry(window)
        if entry is None:
            return
        if window.name in self._changes.windows:
            self._note(window, "damaged", entry)
            return
        if counts == entry.source:
            self._note(window, "unchanged", entry)
            return
        late = lacking(self.job, self.connection, window) if counts.rows else 0
        if not late:
            self._note(window, "left", Entry(entry.lake, counts))
            return
        _warn_late(window, late)
        batch = Batch((window,), counts.rows, True)
        self._note(window, "again", transfer(self.job, self.connection, batch)[window])

    def _note(self, window: ExportWindow, action: str, entry: Entry) -> None:
        if self.records is not None and self.is_whole(window):
            self.records.write(window, entry.source)
        known = self.done.get(window.name)
        if known is not None and action in ("unchanged", "left"):
            return  # this run has exported it before it planned again
        number = len(self.done) + (known is None)
        found = ExportedWindow(
            window.name, action, entry.lake.rows, number, max(self._total, number)
        )
        self.done[window.name] = found
        self._tell(found)


def plan_again(lake: Lake, work: Callable[[], None]) -> None:
    """Do `work`, and do it again on the lake as it is then while others commit in between.

    Raises:
        ConcurrentLoadError: others have, each time.
    """
    for left in reversed(range(PLANS)):
        try:
            work()
        except ConcurrentLoadError as error:
            if not left:
                raise
            logger.info("%s", error)
            lake.load()
        else:
            return


def _inside(window: ExportWindow, spans: Sequence[Span]) -> bool:
    return any(start <= window.start and window.end <= end for start, end in spans)


def _warn_late(window: ExportWindow, rows: int | None) -> None:
    logger.warning(
        "window %s: %s rows came after it was exported; it is exported again. A transaction was "
        "open for longer than safety_lag",
        window.name,
        "some" if rows is None else rows,
    )

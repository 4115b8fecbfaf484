"""Export damaged windows of a lake again, as long as the database has their rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pyspark.sql import SparkSession
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.times import to_microseconds
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import database_of
from pyspark_sqlbroker.lake.delta import DataFile
from pyspark_sqlbroker.lake.entries import Entry, State
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.row_checksums import (
    NOTHING,
    RowChecksums,
    compute_windows,
    count_windows,
    window_start,
)
from pyspark_sqlbroker.lake.transfer import Job, one_moment, only
from pyspark_sqlbroker.lake.verify import Findings, examine
from pyspark_sqlbroker.lake.windows import ExportWindow, Span
from pyspark_sqlbroker.load.read import scan
from pyspark_sqlbroker.store_errors import store_errors

_Figures = Mapping[ExportWindow, RowChecksums]


@dataclass(frozen=True)
class RepairResult:
    """What was repaired.

    Attributes:
        path: Where.
        windows: Rows of each window that is whole again, by name.
        left: Windows that stay damaged, with the reason.
        files: Files that were taken out of the table: damaged ones, and those of other programs.
    """

    path: str
    windows: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()


@store_errors(OSError)
def repair_export(
    spark: SparkSession,
    url: str | URL,
    path: str,
    *,
    source: str | None = None,
    options: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> RepairResult:
    """Export windows whose files are damaged again, as long as the database has their rows.

    A window is repaired only if its rows in the database and in the files that are whole have
    exactly the figures that its export has recorded. One commit takes damaged files out of the
    table and adds the rows anew; a damaged file stays in the table while one of its windows cannot
    be repaired. No row that the lake has lost is given up: a window that the database has no longer
    stays damaged, and `verify_export` names what is missing.

    Files of other programs count as damaged if a window in them is not as it was exported.

    Args:
        spark: A session with the JDBC driver; not Spark Connect.
        url: SQLAlchemy URL of the database.
        path: Of the lake.
        source: The name that the export was given for the database, see `export_archive`.
        options: More of Spark's JDBC options.
        storage_options: See `export_archive`.

    Raises:
        SetupError: nothing was exported to this path, or that of another database.
        ConcurrentLoadError: other processes have committed each time that this one wanted to.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path, storage_options)
    database = database_of(parse_address(url))
    selection = lake.select(database, source)
    repair = _RepairRun(Job(lake, database, url, selection, checksums=True, options=options))

    def repair_all() -> None:
        with database.connect() as connection:
            repair.run(connection)

    lake.plan_again(repair_all)
    return RepairResult(
        lake.folders.root,
        dict(sorted(repair.windows.items())),
        repair.left,
        tuple(repair.files),
    )


class _RepairRun:
    """The work of one call of `repair_export`; goes on where it was if it plans again.

    Attributes:
        windows: Rows of those that are whole again, by name.
        left: Why others stay damaged, by name.
        files: Those that were taken out.
    """

    def __init__(self, job: Job) -> None:
        self.windows: dict[str, int] = {}
        self.left: dict[str, str] = {}
        self.files: list[str] = []
        self._job = job
        self._lake = job.lake

    def run(self, connection: Connection) -> None:
        """Repair each span by a commit of its own."""
        findings = examine(self._lake)
        suspects = findings.suspects()
        self.left = {}
        for span in _spans(self._lake, findings, suspects):
            self._repair(connection, _DamagedSpan(self._lake, findings, suspects, span))

    def _repair(self, connection: Connection, part: "_DamagedSpan") -> None:
        """Export the rows again that only suspect files have, and take these out."""
        lake = self._lake
        counts, staged, added = self._export(connection, part)
        figures = {one: part.had_of(one) + added.get(one, NOTHING) for one in part.wanted}
        if problems := part.find_problems(figures):
            lake.discard(staged)
            self.left |= problems
            return
        entries = {
            one.name: Entry(figures[one], counts.get(one, NOTHING).counts) for one in part.lacking
        }
        same_rows = part.is_same(figures)
        covered = tuple((one.start, one.end) for one in part.lacking)
        lake.commit(State(entries, covered), staged, part.gone, same_rows=same_rows)
        self.windows |= {one.name: figures[one].rows for one in part.differing}
        self.files += [one.path for one in part.gone]

    def _export(
        self, connection: Connection, part: "_DamagedSpan"
    ) -> tuple[_Figures, list[DataFile], _Figures]:
        """Stage the database's rows of the windows that the good files do not have whole.

        Returns:
            Counts of all that the database has, the files, and the figures of their rows.
        """
        job = self._job
        lake = job.lake
        starts = [to_microseconds(one.start) for one in part.lacking]
        selection = job.selection.between(*part.span)
        with one_moment(job, connection) as (asked, snapshot):
            # Before the rows are read: one that comes in between is late, and not missed.
            counts = count_windows(job.database, asked, job.selection, [part.span], lake.size)
            there = scan(
                lake.session, job.database, asked, selection, "auto", snapshot, job.options
            )
            rows = only(there, part.good).where(window_start(lake.size).isin(starts))
            return counts, *lake.stage(rows)


class _DamagedSpan:
    """A span of time whose windows are repaired together.

    Attributes:
        span: No suspect file reaches beyond it.
        gone: Its suspect files.
        good: The rows of the other files.
        wanted: The figures that its windows are to have: the recorded ones, else those of all files
            that can be read.
        lacking: Windows that the good files do not have so, or that have no record, in order.
        differing: Those, and the ones that have rows too many.
    """

    def __init__(
        self, lake: Lake, findings: Findings, suspects: Iterable[DataFile], span: Span
    ) -> None:
        self.span = span
        self.gone = [one for one in suspects if one.may_hold(*span)]
        self.good = lake.read(*span, without=self.gone)
        self.wanted: _Figures = {
            one: findings.found[one] if lake.entry(one) is None else lake.figures_of(one)
            for one in sorted({*lake.windows(), *findings.found})
            if span[0] <= one.start < span[1]
        }
        self._lake = lake
        self._findings = findings
        self._had = compute_windows(self.good, lake.size, checksums=True)
        self.lacking = [
            one for one in self.wanted if lake.entry(one) is None or not self._has_whole(one)
        ]
        differing = {*self.lacking, *findings.differing}
        self.differing = [one for one in self.wanted if one in differing]

    def had_of(self, window: ExportWindow) -> RowChecksums:
        """The figures of a window in the good files."""
        return self._had.get(window, NOTHING)

    def _has_whole(self, window: ExportWindow) -> bool:
        """Whether the good files have all that was exported of a window."""
        return self.had_of(window).matches(self.wanted[window])

    def find_problems(self, figures: _Figures) -> dict[str, str]:
        """Why windows stay damaged, by name, if they have figures so."""
        broken = {
            one.name: f"the record says {self.wanted[one]}; the database and the files that are "
            f"whole have {figures[one]}"
            for one in self.lacking
            if not self._has_whole(one) and not figures[one].matches(self.wanted[one])
        }
        reason = "it shares a file with a window that cannot be repaired"
        if unknown := self._count_unknown():
            reason = f"the record does not say of which windows {unknown} rows of its files were"
        elif not broken:
            return {}
        windows = self.differing or [ExportWindow(self.span[0], self._lake.size)]
        return {one.name: broken.get(one.name, reason) for one in windows}

    def _count_unknown(self) -> int:
        """Count rows of altered files that may belong to unrecorded windows.

        A file whose SHA-256 is recorded had none. Of others it is known only how many rows they
        had beyond those that recorded windows lack.
        """
        altered = [one for one in self.gone if one.path in self._findings.altered]
        lacking = (
            self._lake.figures_of(one).rows - self._findings.found.get(one, NOTHING).rows
            for one in self.wanted
        )
        beyond = sum(one.rows for one in altered) - sum(max(0, rows) for rows in lacking)
        most = sum(one.rows for one in self._lake.foreign_of(altered))
        return min(most, max(0, beyond))

    def is_same(self, figures: _Figures) -> bool:
        """Whether streams may pass over the commit: it brings back the rows that they have seen."""
        altered = all(one.path in self._findings.altered for one in self.gone)
        return altered and all(figures[one].matches(self.wanted[one]) for one in self.lacking)


def _spans(lake: Lake, findings: Findings, suspects: Iterable[DataFile]) -> list[Span]:
    """The spans of differing windows and of suspect files; no such file reaches into two."""
    known = sorted({*lake.windows(), *findings.found})
    parts = [(one.start, one.end) for one in findings.differing]
    for one in suspects:
        if (span := lake.span_of(one)) is not None:
            parts.append(span)
        elif known:
            parts.append((known[0].start, known[-1].end))
    spans = list[Span]()
    for start, end in sorted(parts):
        if spans and start < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans

"""The ways to repair a lake: which files of other programs stay, and which are taken out.

Their rows were compared with nothing: such a file may hold the only copy of a row after a merge,
rows that the lake has already after an append, and other contents after an update.

A window lacks no row that was exported, where the database has more than that, if some of these
rows have the figures of the difference: the figures are sums. Which rows of many have them is hard
to find in general. Rows of one late transaction are neighbours by time or by id, and only
neighbours are looked for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from pyspark_sqlbroker.lake.delta import DataFile
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.row_checksums import (
    NOTHING,
    RowChecksums,
    compute_windows,
    window_start,
)
from pyspark_sqlbroker.lake.transfer import IDENTITY, only
from pyspark_sqlbroker.lake.verify import Findings
from pyspark_sqlbroker.lake.windows import ExportWindow, floor

_Held = Mapping[DataFile, Mapping[ExportWindow, RowChecksums]]

_Row = tuple[int, int]
"""`archived_at` in microseconds since 1970, and id."""


@dataclass(frozen=True)
class Way:
    """One way to repair.

    Attributes:
        findings: What differs if the files in `out` count as damaged.
        out: Files of other programs that go. Rows that only they have are added anew.
        lossy: Whether windows count as repaired with other figures than the log's.
    """

    findings: Findings
    out: tuple[DataFile, ...] = ()
    lossy: bool = False


def ways_of(lake: Lake, findings: Findings, *, accept_loss: bool) -> Iterator[Way]:
    """The ways to try, the cheapest first; one that loses rows comes last."""
    held = _held(lake, findings)
    if held or not accept_loss:
        yield Way(findings)
    # Without a record nothing says that the other files have the rows of a window.
    sure = [one for one, windows in held.items() if all(map(lake.entry, windows))]
    if sure:
        yield _without(lake, findings, held, sure)
    if sure[1:]:
        for one in sure:
            yield _without(lake, findings, held, [one])
    if accept_loss:
        yield replace(_without(lake, findings, held, held), lossy=True)


def _held(lake: Lake, findings: Findings) -> _Held:
    """Files of other programs with rows of a differing window, and figures of all their windows."""
    unrecorded = set(findings.unrecorded)
    held = dict[DataFile, Mapping[ExportWindow, RowChecksums]]()
    for file in findings.good:
        if file.path in unrecorded:
            windows = compute_windows(lake.read_files([file]), lake.size, checksums=True)
            if windows.keys() & set(findings.differing):
                held[file] = windows
    return held


def _without(lake: Lake, findings: Findings, held: _Held, out: Iterable[DataFile]) -> Way:
    gone = tuple(out)
    found = dict(findings.found)
    for file in gone:
        for window, figures in held[file].items():
            found[window] = found[window] - figures
    windows = {*findings.differing, *(one for file in gone for one in held[file])}
    again = [
        one
        for one in sorted(windows)
        if lake.entry(one) is None or not found.get(one, NOTHING).matches(lake.figures_of(one))
    ]
    damaged = {**findings.damaged, **{one.path: "another program's" for one in gone}}
    return Way(replace(findings, damaged=damaged, found=found, differing=tuple(again)), gone)


def rows_of_out(lake: Lake, way: Way, *others: DataFrame) -> DataFrame:
    """The rows of the files in `way.out` that are not among `others`, each identity once."""
    rows = lake.read_files(way.out)
    for other in others:
        rows = only(rows, other)
    # These rows are read twice: of rows with one identity the same must come each time.
    rest = F.struct(*(one for one in rows.columns if one not in IDENTITY))
    once = rows.groupBy(*IDENTITY).agg(F.min(rest).alias("rest"))
    return once.select(*IDENTITY, "rest.*").select(*rows.columns)


def that_fit(
    lake: Lake,
    there: Mapping[ExportWindow, RowChecksums],
    more: Mapping[ExportWindow, RowChecksums],
) -> set[ExportWindow]:
    """The windows of `more` that then have no more rows than an export has recorded."""
    return {
        one
        for one, figures in more.items()
        if lake.entry(one) is None
        or there.get(one, NOTHING).rows + figures.rows <= lake.figures_of(one).rows
    }


def find_late(
    rows: DataFrame, size: str, more: Mapping[ExportWindow, RowChecksums]
) -> set[ExportWindow]:
    """The windows in which some neighbours among `rows` have exactly the figures of `more`.

    Args:
        rows: Those that are added. One job reads times and ids, 200 bytes a row in the driver,
            and one more the contents of what was found.
        size: "day" or "hour".
        more: What each window would have beyond its record; only windows with more rows count.
    """
    wanted = {one: figures for one, figures in more.items() if figures.rows > 0}
    if not wanted:
        return set()
    starts = [to_microseconds(one.start) for one in wanted]
    there = rows.where(window_start(size).isin(starts))
    condition = F.lit(False)
    for window, pairs in _by_window(there, size).items():
        run = _neighbours(pairs, wanted[window])
        if run is not None:
            condition |= _is_among(window, size, run)
    # Sums of ids and times may agree by chance; those of contents do not.
    figures = compute_windows(there.where(condition), size, checksums=True)
    return {one for one, sums in figures.items() if sums.matches(wanted[one])}


def _by_window(rows: DataFrame, size: str) -> dict[ExportWindow, list[_Row]]:
    found = dict[ExportWindow, list[_Row]]()
    for moment, number in rows.select(F.unix_micros("archived_at"), "id").toLocalIterator():
        window = ExportWindow(floor(from_microseconds(moment), size), size)
        found.setdefault(window, []).append((moment, number))
    return found


def _neighbours(pairs: Iterable[_Row], figures: RowChecksums) -> Sequence[_Row] | None:
    """So many rows with these sums of ids and times that follow each other; None if there are
    none.
    """
    by_time = sorted(pairs)
    by_id = sorted(by_time, key=lambda one: one[1])
    return _run(by_time, figures) or _run(by_id, figures)


def _run(ordered: Sequence[_Row], figures: RowChecksums) -> Sequence[_Row] | None:
    times = list(accumulate((one[0] for one in ordered), initial=0))
    ids = list(accumulate((one[1] for one in ordered), initial=0))
    for first in range(len(ordered) - figures.rows + 1):
        last = first + figures.rows
        sums = ids[last] - ids[first], times[last] - times[first]
        if sums == (figures.ids, figures.times):
            return ordered[first:last]
    return None


def _is_among(window: ExportWindow, size: str, run: Sequence[_Row]) -> Column:
    """Whether a row is one of a window's run, which is one by time or by id."""
    row = _struct(F.unix_micros("archived_at"), F.col("id"))
    first, last = (_struct(*map(F.lit, one)) for one in (min(run), max(run)))
    by_time = (row >= first) & (row <= last)
    ids = [number for _, number in run]
    by_id = F.col("id").between(min(ids), max(ids))
    return (window_start(size) == F.lit(to_microseconds(window.start))) & by_time & by_id


def _struct(moment: Column, number: Column) -> Column:
    return F.struct(moment.cast("long").alias("time"), number.cast("long").alias("id"))

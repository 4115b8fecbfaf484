"""Find rows that came to a window after its export, among those that the database has of it.

A window lacks no row that was exported, where the database has more than that, if some of these
rows have the figures of the difference: the figures are sums. Which rows of many have them is hard
to find in general. Rows of one late transaction are neighbours by time or by id, and only
neighbours are looked for.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from pyspark_sqlbroker.lake.row_checksums import RowChecksums, compute_windows, window_start
from pyspark_sqlbroker.lake.windows import ExportWindow, floor

_Row = tuple[int, int]
"""`archived_at` in microseconds since 1970, and id."""


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

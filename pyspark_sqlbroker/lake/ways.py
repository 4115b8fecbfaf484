"""The ways to repair a lake: which files of other programs stay, and which are taken out.

Their rows were compared with nothing: such a file may hold the only copy of a row after a merge,
rows that the lake has already after an append, and other contents after an update.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pyspark_sqlbroker.lake.delta import DataFile
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.row_checksums import NOTHING, RowChecksums, compute_windows
from pyspark_sqlbroker.lake.transfer import IDENTITY, only
from pyspark_sqlbroker.lake.verify import Findings
from pyspark_sqlbroker.lake.windows import ExportWindow

_Held = Mapping[DataFile, Mapping[ExportWindow, RowChecksums]]


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

"""Read damaged windows of a lake again from the database, as long as it has their rows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.exceptions import ExportMismatchError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import database_of
from pyspark_sqlbroker.lake.delta import DataFile
from pyspark_sqlbroker.lake.entries import Entry, Note
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.row_checksums import (
    NOTHING,
    RowChecksums,
    ask_windows,
    compute_windows,
    window_start,
)
from pyspark_sqlbroker.lake.transfer import Job, one_moment, only
from pyspark_sqlbroker.lake.verify import Findings, examine
from pyspark_sqlbroker.lake.ways import Way, find_late, rows_of_out, that_fit, ways_of
from pyspark_sqlbroker.lake.windows import ExportWindow
from pyspark_sqlbroker.load.read import Snapshot, scan

_UNPROVEN = (
    "another program has written a file of it, and its export compared counts only "
    '(verify="counts"): restore the table to the version before that, or accept the file as it is '
    "with --accept-loss"
)


@dataclass(frozen=True)
class RepairResult:
    """What was repaired.

    Attributes:
        path: Where.
        windows: Rows of each window that is whole again, by name.
        left: Windows that stay damaged, with the reason.
        files: Files that were taken out of the table: damaged ones, and those of other programs.
        recorded: Files whose SHA-256 is in the log now: it was not, and their windows agree.
    """

    path: str
    windows: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    recorded: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """Windows to repair, files that go, rows to add, and figures: of what is added, and of both."""

    windows: set[ExportWindow]
    gone: list[DataFile]
    rows: DataFrame
    added: Mapping[ExportWindow, RowChecksums]
    unions: Mapping[ExportWindow, RowChecksums]


def repair_export(
    spark: SparkSession,
    url: str | URL,
    path: str,
    *,
    source: str | None = None,
    accept_loss: bool = False,
    options: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> RepairResult:
    """Read windows whose files are damaged again, from the database and from the other files.

    A window is repaired only if its figures are then exactly what its export has recorded, or if
    the database has rows beyond that which follow each other by time or by id, as those of one late
    transaction do: the others then have the recorded figures, and the late rows come too. One
    commit takes the damaged files out of the table and adds the rows anew; a damaged file stays in
    the table while one of its windows cannot be repaired. Files of other programs, which have no
    SHA-256 in the log, are given one if all windows agree with the log, which needs figures of
    contents: a file with windows exported by `verify="counts"` is left. If windows in them do not,
    they are taken out where the database and the other files have what the log says; files with
    rows of a window without a record stay.

    Args:
        spark: A session with the JDBC driver; not Spark Connect.
        url: SQLAlchemy URL of the database.
        path: Of the lake.
        source: The name that the export was given for the database, see `export_archive`.
        accept_loss: Repair windows also if rows are lost for ever: they then hold what the database
            and the other files have, and their figures are recorded anew. Rows of other programs'
            files count once each, and not in a window that would have more than was recorded. Files
            with windows that were exported by `verify="counts"` are recorded as they are.
        options: More of Spark's JDBC options.
        storage_options: See `export_archive`.

    Raises:
        SetupError: nothing was exported to this path, or that of another database.
        ExportMismatchError: rows changed while they were read; nothing was changed.
        ConcurrentLoadError: other processes have committed each time that this one wanted to.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path, storage_options)
    database = database_of(parse_address(url))
    selection = lake.select(database, source)
    job = Job(lake, database, url, selection, checksums=True, options=options)
    result = RepairResult(lake.folders.root)
    more = True

    def step() -> None:
        nonlocal result, more
        with database.connect() as connection:
            result, more = _step(job, connection, result, accept_loss=accept_loss)

    while more:
        lake.plan_again(step)
    return result


def _step(
    job: Job, connection: Connection, done: RepairResult, *, accept_loss: bool
) -> tuple[RepairResult, bool]:
    """One commit, by the first way that repairs something; returns whether to go on."""
    lake = job.lake
    findings = examine(lake)
    if not findings.differing and not findings.damaged:
        unproven = {} if accept_loss else _unproven(lake, findings.unrecorded)
        return _record(lake, findings, unproven, done), False
    left = dict[str, str]()
    for way in ways_of(lake, findings, accept_loss=accept_loss):
        plan = _attempt(job, connection, way)
        left = left or _left(lake, way, plan)
        if plan.windows or plan.gone:
            files = (*done.files, *(one.path for one in plan.gone))
            windows = {**done.windows, **_repaired(findings, way, plan)}
            # Files of other programs need another look: they may be recorded now.
            return replace(done, windows=windows, files=files, left=left), bool(
                left or findings.unrecorded
            )
    return replace(done, left=left), False


def _unproven(lake: Lake, paths: Collection[str]) -> dict[str, list[ExportWindow]]:
    """Files with windows of which the log has no figures of contents: an update would not show."""
    found = dict[str, list[ExportWindow]]()
    for path in paths:
        counted = [one for one in lake.windows_of([path]) if lake.figures_of(one).columns is None]
        if counted:
            found[path] = counted
    return found


def _record(
    lake: Lake,
    findings: Findings,
    unproven: Mapping[str, list[ExportWindow]],
    done: RepairResult,
) -> RepairResult:
    """Commit the SHA-256 of other programs' files whose windows agree with the log."""
    proven = tuple(one for one in findings.unrecorded if one not in unproven)
    if proven:
        lake.record(proven)
    stay = sorted({one.name for windows in unproven.values() for one in windows})
    return replace(done, left=dict.fromkeys(stay, _UNPROVEN), recorded=proven)


def _attempt(job: Job, connection: Connection, way: Way) -> _Plan:
    """Plan one way, and commit what it repairs."""
    with one_moment(job, connection) as (asked, snapshot):
        plan = _plan(job.lake, way, *_fresh(job, asked, snapshot, way))
        if plan.windows or plan.gone:
            _commit(job.lake, way, plan, _counts(job, asked, way.findings))
    return plan


def _left(lake: Lake, way: Way, plan: _Plan) -> dict[str, str]:
    return {
        one.name: _reason(lake.figures_of(one), plan.unions[one])
        for one in way.findings.differing
        if one not in plan.windows
    }


def _repaired(findings: Findings, way: Way, plan: _Plan) -> dict[str, int]:
    """Rows of the windows that were added anew, or are whole without the files that went."""
    staying = [one for one in way.out if one not in plan.gone]
    whole = [
        one
        for one in findings.differing
        if one not in way.findings.differing
        and not any(each.may_hold(one.start, one.end) for each in staying)
    ]
    rows = {one: way.findings.found.get(one, NOTHING).rows for one in whole}
    rows |= {one: plan.unions[one].rows for one in plan.windows}
    return {one.name: rows[one] for one in sorted(rows)}


def _plan(lake: Lake, way: Way, rows: DataFrame, out: DataFrame) -> _Plan:
    """What the way repairs with these rows, and with those of the files that go."""
    findings = way.findings
    added = compute_windows(rows, lake.size, checksums=True)
    unions = {
        one: findings.found.get(one, NOTHING) + added.get(one, NOTHING)
        for one in findings.differing
    }
    late = _late(lake, way, rows, unions)
    if way.out:
        more = compute_windows(out, lake.size, checksums=True)
        fit = that_fit(lake, unions, more)
        rows = rows.unionByName(_of(out, lake.size, fit))
        added |= {one: added.get(one, NOTHING) + more[one] for one in fit}
        unions |= {one: unions[one] + more[one] for one in fit}
    agree = {one for one in unions if way.lossy or unions[one].matches(lake.figures_of(one))} | late
    windows, gone = _repairable(findings, agree)
    return _Plan(windows, gone, rows, added, unions)


def _late(
    lake: Lake, way: Way, rows: DataFrame, unions: Mapping[ExportWindow, RowChecksums]
) -> set[ExportWindow]:
    """Windows that lack nothing, and that the database has late rows of."""
    if way.lossy:
        return set()
    more = {one: sums - lake.figures_of(one) for one, sums in unions.items() if lake.entry(one)}
    return find_late(rows, lake.size, more)


def _reason(recorded: RowChecksums, there: RowChecksums) -> str:
    """Why a window stays damaged."""
    if there.matches(recorded):
        return "it shares a file with a window that cannot be repaired"
    return f"the log has {recorded}; the database and the other files have {there}"


def _fresh(
    job: Job, connection: Connection, snapshot: Snapshot | None, way: Way
) -> tuple[DataFrame, DataFrame]:
    """The rows of the differing windows that the good files lack: of the database, and those that
    only the files have that go.
    """
    lake = job.lake
    windows = way.findings.differing
    if not windows:
        return lake.read_files(()), lake.read_files(())
    start = windows[0].start
    end = windows[-1].end
    selection = job.selection.between(start, end)
    there = scan(lake.session, job.database, connection, selection, "auto", snapshot, job.options)
    good = lake.read_files(one for one in way.findings.good if one.may_hold(start, end))
    rows = _of(only(there, good), lake.size, windows)
    return rows, _of(rows_of_out(lake, way, good, there), lake.size, windows)


def _of(frame: DataFrame, size: str, windows: Collection[ExportWindow]) -> DataFrame:
    """The rows of some windows."""
    starts = [to_microseconds(one.start) for one in windows]
    return frame.where(window_start(size).isin(starts) if starts else F.lit(False))


def _counts(
    job: Job, connection: Connection, findings: Findings
) -> Mapping[ExportWindow, RowChecksums]:
    if not findings.differing:
        return {}
    selection = job.selection.between(findings.differing[0].start, findings.differing[-1].end)
    return ask_windows(job.database, connection, selection, job.lake.size, checksums=False)


def _repairable(
    findings: Findings, agree: set[ExportWindow]
) -> tuple[set[ExportWindow], list[DataFile]]:
    """The windows that can be repaired, and the damaged files that go with them.

    A file may go only if each of its windows is repaired, and a window may be added only if each
    damaged file that can have rows of it goes.
    """
    windows = set(agree)
    gone = [one for one in findings.files if one.path in findings.damaged]
    while True:
        broken = [one for one in findings.differing if one not in windows]
        staying = [
            one for one in gone if any(one.may_hold(each.start, each.end) for each in broken)
        ]
        gone = [one for one in gone if one not in staying]
        stuck = {
            one for one in windows if any(each.may_hold(one.start, one.end) for each in staying)
        }
        if not stuck:
            return windows, gone
        windows -= stuck


def _commit(lake: Lake, way: Way, plan: _Plan, full: Mapping[ExportWindow, RowChecksums]) -> None:
    # Spark reads the database a second time here: rows that changed in between must show.
    staged, found = lake.stage(_of(plan.rows, lake.size, plan.windows), checksums=True)
    for one in sorted(plan.windows):
        if found.get(one, NOTHING) != plan.added.get(one, NOTHING):
            lake.discard(staged)
            raise ExportMismatchError(
                one.name, str(plan.added.get(one)), str(found.get(one)), "Run the repair again"
            )
    entries = {
        one.name: Entry(plan.unions[one], full.get(one, NOTHING).counts) for one in plan.windows
    }
    agree = all(plan.unions[one].matches(lake.figures_of(one)) for one in plan.windows)
    same = agree and not (way.lossy or way.out)
    lake.commit(Note("repair", entries), staged, plan.gone, same_rows=same)

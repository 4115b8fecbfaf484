"""Read damaged windows of a lake again from the database, as long as it has their rows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.exceptions import ConcurrentLoadError, ExportMismatchError
from faststream_sqlbroker.spark.address import parse_address
from faststream_sqlbroker.spark.databases import database_of
from faststream_sqlbroker.spark.lake.delta import DataFile
from faststream_sqlbroker.spark.lake.entries import Entry, Note
from faststream_sqlbroker.spark.lake.lake import Lake
from faststream_sqlbroker.spark.lake.prune import selection_of
from faststream_sqlbroker.spark.lake.row_checksums import (
    NOTHING,
    RowChecksums,
    ask_windows,
    compute_windows,
    window_start,
)
from faststream_sqlbroker.spark.lake.run import plan_again
from faststream_sqlbroker.spark.lake.transfer import Job, one_moment, only
from faststream_sqlbroker.spark.lake.verify import Findings, examine
from faststream_sqlbroker.spark.lake.windows import ExportWindow
from faststream_sqlbroker.spark.load.read import scan
from faststream_sqlbroker.spark.load.snapshot import Snapshot


@dataclass(frozen=True)
class RepairResult:
    """What was repaired.

    Attributes:
        path: Where.
        windows: Rows of each window that is whole again, by name.
        left: Windows that stay damaged, with the reason.
        files: Damaged files that were taken out of the table.
        recorded: Files whose SHA-256 is in the log now: it was not, and their windows agree.
    """

    path: str
    windows: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    recorded: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """Windows to repair, damaged files that go, and figures: of what is added, and of both."""

    windows: set[ExportWindow]
    gone: list[DataFile]
    added: Mapping[ExportWindow, RowChecksums]
    unions: Mapping[ExportWindow, RowChecksums]
    lossy: bool


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

    A window is repaired only if its figures are then exactly what its export has recorded. One
    commit takes the damaged files out of the table and adds the rows anew; a damaged file stays in
    the table while one of its windows cannot be repaired. Files without a SHA-256 in the log are
    given one if all windows agree with the log.

    Args:
        spark: A session with the JDBC driver; not Spark Connect.
        url: SQLAlchemy URL of the database.
        path: Of the lake.
        source: The name that the export was given for the database, see `export_archive`.
        accept_loss: Repair windows also if rows are lost for ever: they then hold what the database
            and the other files have, and their figures are recorded anew.
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
    selection = selection_of(lake, database, None, None, source)
    job = Job(lake, database, url, selection, checksums=True, options=options)
    result = RepairResult(lake.folders.root)

    def repair() -> None:
        nonlocal result
        with database.connect() as connection:
            result = _repair(job, connection, accept_loss=accept_loss)

    plan_again(lake, repair)
    return result


def _repair(job: Job, connection: Connection, *, accept_loss: bool) -> RepairResult:
    lake = job.lake
    findings = examine(lake)
    root = lake.folders.root
    if not findings.differing and not findings.damaged:
        if findings.unrecorded:
            lake.record(findings.unrecorded)
        return RepairResult(root, recorded=findings.unrecorded)
    before = {one: lake.figures_of(one) for one in findings.differing}
    with one_moment(job, connection) as (asked, snapshot):
        fresh = _fresh(job, asked, snapshot, findings)
        plan = _plan(findings, before, fresh, lake.size, accept_loss=accept_loss)
        if plan.windows or plan.gone:
            _commit(lake, fresh, plan, _counts(job, asked, findings))
    left = {
        one.name: _reason(old, plan.unions[one])
        for one, old in before.items()
        if one not in plan.windows
    }
    repaired = {one.name: plan.unions[one].rows for one in sorted(plan.windows)}
    return RepairResult(root, repaired, left, tuple(one.path for one in plan.gone))


def _plan(
    findings: Findings,
    before: Mapping[ExportWindow, RowChecksums],
    fresh: DataFrame,
    size: str,
    *,
    accept_loss: bool,
) -> _Plan:
    added = compute_windows(fresh, size, checksums=True)
    unions = {one: findings.found.get(one, NOTHING) + added.get(one, NOTHING) for one in before}
    agree = {one for one in unions if accept_loss or unions[one].matches(before[one])}
    windows, gone = _repairable(findings, agree)
    return _Plan(windows, gone, added, unions, accept_loss)


def _reason(recorded: RowChecksums, there: RowChecksums) -> str:
    """Why a window stays damaged."""
    if there.matches(recorded):
        return "it shares a file with a window that cannot be repaired"
    return f"the log has {recorded}; the database and the other files have {there}"


def _fresh(
    job: Job, connection: Connection, snapshot: Snapshot | None, findings: Findings
) -> DataFrame:
    """The rows of the differing windows that the database has and the good files lack."""
    lake = job.lake
    if not findings.differing:
        return lake.read_files(())
    start = findings.differing[0].start
    end = findings.differing[-1].end
    selection = job.selection.between(start, end)
    there = scan(lake.session, job.database, connection, selection, "auto", snapshot, job.options)
    good = [one for one in findings.good if one.may_hold(start, end)]
    return _of(only(there, lake.read_files(good)), lake.size, findings.differing)


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


def _commit(
    lake: Lake, fresh: DataFrame, plan: _Plan, full: Mapping[ExportWindow, RowChecksums]
) -> None:
    # Spark reads the database a second time here: rows that changed in between must show.
    staged, found = lake.stage(_of(fresh, lake.size, plan.windows), checksums=True)
    for one in sorted(plan.windows):
        if found.get(one, NOTHING) != plan.added.get(one, NOTHING):
            lake.discard(staged)
            raise ExportMismatchError(
                one.name, str(plan.added.get(one)), str(found.get(one)), "Run the repair again"
            )
    entries = {
        one.name: Entry(plan.unions[one], full.get(one, NOTHING).counts) for one in plan.windows
    }
    try:
        lake.commit(Note("repair", entries), staged, plan.gone, same_rows=not plan.lossy)
    except ConcurrentLoadError:
        lake.load()
        lake.discard(staged)
        raise

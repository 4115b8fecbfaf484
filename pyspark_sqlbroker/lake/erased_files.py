"""Remove rows from the files of a lake: files that have them are written again without them.

Rows are chosen by their ids, in joins: a predicate would stand in the log of the table, and a
literal in Spark's plans.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from faststream_sqlbroker.exceptions import ConcurrentLoadError, ExportMismatchError, SetupError
from pyspark_sqlbroker.lake.delta import DataFile
from pyspark_sqlbroker.lake.entries import Entry, Note
from pyspark_sqlbroker.lake.lake import FILE_NAME, Lake
from pyspark_sqlbroker.lake.row_checksums import NOTHING, RowChecksums, compute_windows
from pyspark_sqlbroker.lake.windows import ExportWindow


@dataclass(frozen=True)
class ErasedFiles:
    """What one commit has removed.

    Attributes:
        rows: How many.
        moment: Of the file system's clock, just before the commit: what was staged earlier belongs
            to plans that cannot be committed any more.
    """

    rows: int
    moment: int


def ids_of_keys(lake: Lake, keys: Collection[str]) -> frozenset[int]:
    """Ids of the lake's rows that have one of the keys."""
    if not keys or not lake.files:
        return frozenset()
    wanted = F.broadcast(_column(lake, keys, "wanted string"))
    rows = lake.read_files(lake.files).select("id", "key", "policy_key")
    same = (rows["key"] == wanted["wanted"]) | (rows["policy_key"] == wanted["wanted"])
    found = rows.join(wanted, same, "left_semi").select("id").distinct()
    return frozenset(row[0] for row in found.collect())


def count_rows(lake: Lake, ids: Collection[int]) -> int:
    """How many rows of the lake have these ids."""
    if not lake.files:
        return 0
    return _of_ids(lake, lake.read_files(lake.files).select("id"), ids, "left_semi").count()


def need_whole(lake: Lake) -> None:
    """Check that no file of the lake was altered.

    Raises:
        SetupError: one was; the figures of what is left could not be trusted.
    """
    if problems := lake.altered_of(lake.files):
        name, problem = next(iter(problems.items()))
        raise SetupError(
            f"{lake.folders.path(name)}: {problem}; nothing was erased: run sqlbroker archive "
            "repair first"
        )


def erase_rows(
    lake: Lake, ids: Collection[int], archived: Mapping[ExportWindow, RowChecksums]
) -> ErasedFiles:
    """Commit the lake without the rows of these ids.

    A commit is made even if there are none, so that no export that has read such a row before can
    bring it.

    Args:
        lake: As it was loaded.
        ids: Of messages.
        archived: Counts of what was removed from the database, by window.

    Raises:
        ConcurrentLoadError: another process has committed since; nothing was changed.
        ExportMismatchError: what is left is not what was there without what goes.
        SetupError: a file was altered.
    """
    need_whole(lake)
    files = _files_of(lake, ids)
    rows = lake.read_files(files)
    whole = compute_windows(rows, lake.size, checksums=True)
    gone = compute_windows(_of_ids(lake, rows, ids, "left_semi"), lake.size, checksums=True)
    staged = list[DataFile]()
    found = dict[ExportWindow, RowChecksums]()
    if files:
        left = _of_ids(lake, rows, ids, "left_anti")
        staged, found = lake.stage(left.coalesce(len(files)), checksums=True)
    try:
        _compare(whole, gone, found)
        entries = _entries(lake, gone, archived)
        # Taken before the commit: a file that is staged later may be part of the next one.
        moment = lake.folders.now()
        lake.commit(Note("erase", entries), staged, files)
    except ExportMismatchError:
        lake.discard(staged)
        raise
    except ConcurrentLoadError:
        lake.load()
        lake.discard(staged)
        raise
    return ErasedFiles(sum(one.rows for one in gone.values()), moment)


def _of_ids(lake: Lake, rows: DataFrame, ids: Iterable[int], how: str) -> DataFrame:
    return rows.join(F.broadcast(_column(lake, sorted(ids), "id long")), "id", how)


def _column(lake: Lake, values: Iterable[Any], schema: str) -> DataFrame:
    active = SparkSession.getActiveSession()
    made = lake.session.createDataFrame([(one,) for one in values], schema)
    if active is not None:
        # Trap: the lake's session is the active one now. This is the public way to put back the
        # caller's.
        active.createDataFrame([], schema)
    return made


def _files_of(lake: Lake, ids: Collection[int]) -> list[DataFile]:
    """The files that have rows of these ids."""
    if not lake.files or not ids:
        return []
    hits = _of_ids(lake, lake.read_named(lake.files), ids, "left_semi")
    names = {row[0] for row in hits.select(FILE_NAME).distinct().collect()}
    return [one for one in lake.files if one.path.rpartition("/")[2] in names]


def _compare(
    whole: Mapping[ExportWindow, RowChecksums],
    gone: Mapping[ExportWindow, RowChecksums],
    found: Mapping[ExportWindow, RowChecksums],
) -> None:
    for window in sorted({*whole, *found}):
        left = found.get(window, NOTHING) + gone.get(window, NOTHING)
        if left != whole[window]:
            raise ExportMismatchError(
                window.name, str(whole[window]), str(left), "Nothing was erased: run it again"
            )


def _entries(
    lake: Lake,
    gone: Mapping[ExportWindow, RowChecksums],
    archived: Mapping[ExportWindow, RowChecksums],
) -> dict[str, Entry]:
    """The records of the windows anew.

    What was removed is taken off. Fresh counts of the database would hide rows that have come late
    and are not in the lake.
    """
    entries = dict[str, Entry]()
    for window in sorted({*gone, *archived}):
        if (entry := lake.entry(window)) is not None:
            counts = archived.get(window, NOTHING).counts
            entries[window.name] = Entry(
                entry.lake - gone.get(window, NOTHING), entry.source - counts
            )
    return entries

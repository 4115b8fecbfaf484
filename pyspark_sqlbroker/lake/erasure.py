"""Erase the messages of a person: from the live table, the archive and a lake.

Files of the lake that have such rows are written again without them. Rows are chosen by their ids,
in joins: a predicate would stand in the log of the table, and a literal in Spark's plans.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.times import Duration, seconds_or_zero
from faststream_sqlbroker.exceptions import ExportMismatchError, SetupError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import Tables, build_tables
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import database_of
from pyspark_sqlbroker.lake.delta import LOG, DataFile
from pyspark_sqlbroker.lake.entries import Entry, State
from pyspark_sqlbroker.lake.erased_rows import (
    Audit,
    Found,
    Wanted,
    find_rows,
    lower_records,
    remove_rows,
)
from pyspark_sqlbroker.lake.files import undo_on_error
from pyspark_sqlbroker.lake.lake import FILE_NAME, Lake
from pyspark_sqlbroker.lake.row_checksums import NOTHING, RowChecksums, compute_windows
from pyspark_sqlbroker.lake.verify import find_changes
from pyspark_sqlbroker.lake.windows import ExportWindow
from pyspark_sqlbroker.store_errors import store_errors


@dataclass(frozen=True)
class EraseResult:
    """What was erased, or would be.

    Attributes:
        dry_run: Whether nothing was removed.
        live: Rows of the live table.
        archived: Rows of the archive.
        lake: Rows of the lake.
        leased: Ids of messages that a subscriber has leased: they stay, so run it again with these
            ids when they have ended.
        files: How many files were removed from the lake's folders.
        audit: Id of the audit record; empty in a dry run.
    """

    dry_run: bool
    live: int
    archived: int
    lake: int
    leased: tuple[int, ...]
    files: int = 0
    audit: str = ""

    @property
    def rows(self) -> int:
        """In all places."""
        return self.live + self.archived + self.lake


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


@store_errors(OSError)
def erase_messages(
    spark: SparkSession | None,
    url: str | URL,
    path: str | None = None,
    *,
    ids: Iterable[int] = (),
    keys: Iterable[str] = (),
    dry_run: bool = True,
    keep: Duration = 0,
    by: str = "",
    message_table: str = "message",
    table: str = "message_archive",
    schema: str | None = None,
    source: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> EraseResult:
    """Erase messages by their ids and keys, wherever they are; by default only count them.

    A key means every message whose `key` or `policy_key` it is; what the lake or the archive has
    under the ids of those goes, too. With each message go the copies that replays have made of it
    (`origin_id`), and their copies; but not the one that it is a copy of. A message that a
    subscriber has leased stays, and is named.
    The lake's files that have such rows are written again without them, compared, and committed;
    the figures of its windows are recorded anew, and so are the records for retention. Then files
    that are no longer part of the table are removed, and with them its earlier versions. If it
    dies, run it again.

    The database keeps an audit record (`sqlbroker audit`) with counts, without ids and keys. The
    lake's log keeps the least and greatest id of each file until it is cleaned up. State of
    policies that holds a key stays until it expires, as do backups and the database's own log.

    Args:
        spark: A session; needed with `path`; not Spark Connect. No driver is needed.
        url: SQLAlchemy URL of the database, of a user who may delete.
        path: Of the lake; None: there is none.
        ids: Of messages.
        keys: Of messages.
        dry_run: Count only.
        keep: How long the lake's replaced files stay, in whole hours. 0: readers that have begun
            fail. With more, the rows can be read in earlier versions until a later erasure or a
            vacuum of the table removes the files.
        by: Who asked for it, for the audit.
        message_table: The live table.
        table: The archive; with `path` it must be that of the export.
        schema: Of both.
        source: The name that the export was given for the database, see `export_archive`.
        storage_options: See `export_archive`.

    Raises:
        SetupError: neither ids nor keys, an export of something else, or an altered file of the
            lake: `repair_export` first.
        ConcurrentLoadError: other processes have committed each time that this one wanted to. The
            database's rows are gone; run it again.
        StoreError: the database refuses, or does not answer.
        NotSupportedError: Spark Connect.
    """
    given = _given(ids, keys)
    hours = int(seconds_or_zero("keep", keep) // 3600)
    lake = _lake(spark, path, storage_options)
    database = database_of(parse_address(url))
    config = SqlBrokerSchemaConfig(
        message_table_name=message_table, message_archive_table_name=table, schema=schema
    )
    tables = build_tables(config, dialect_name=database.kind)
    with database.connect() as connection:
        for one in tables.ours:
            database.need_table(connection, one.name, one.schema)
        if lake is not None:
            lake.select(database, source, table, schema)
            need_whole(lake)
        wanted, found = _complete(connection, tables, lake, given)
        there = 0 if lake is None else count_rows(lake, wanted.ids)
        if dry_run:
            leased = tuple(sorted(found.leased))
            return EraseResult(True, len(found.waiting), len(found.archived), there, leased)
        # Before the first row goes: an erasure that dies is in the audit as one that runs.
        audit = Audit(database, connection, tables.policy_state, by)
        audit.begin(len(found.waiting) + len(found.archived) + there, path)
        return _erase(connection, tables, lake, hours, wanted, audit)


def _given(ids: Iterable[int], keys: Iterable[str]) -> Wanted:
    given = Wanted(frozenset(whole_number("ids", number) for number in ids), frozenset(keys))
    if not given.ids and not given.keys:
        raise SetupError("give ids= or keys= of the messages to erase")
    if any(not isinstance(one, str) or not one for one in given.keys):
        raise SetupError("keys= takes texts that are not empty")
    return given


def _lake(
    spark: SparkSession | None, path: str | None, storage: Mapping[str, str] | None
) -> Lake | None:
    if path is None:
        return None
    if spark is None:
        raise SetupError("with path= give spark=: the lake's files are written again by it")
    lake = Lake(spark, path, storage)
    lake.need_source()
    return lake


def _complete(
    connection: Connection, tables: Tables, lake: Lake | None, given: Wanted
) -> tuple[Wanted, Found]:
    """The same with the ids of all rows that have one of the keys, and of their copies, in any
    place.
    """

    def copies_of(ids: frozenset[int]) -> frozenset[int]:
        return find_rows(connection, tables, Wanted(origins=ids)).ids | _copied(lake, ids)

    by_key = find_rows(connection, tables, Wanted(keys=given.keys)).ids | _keyed(lake, given.keys)
    wanted = Wanted(_with_copies(given.ids | by_key, copies_of), given.keys)
    return wanted, find_rows(connection, tables, wanted)


def _with_copies(
    ids: frozenset[int], copies_of: Callable[[frozenset[int]], frozenset[int]]
) -> frozenset[int]:
    """The ids with those of the messages' copies, and of their copies."""
    more = ids
    while more:
        more = copies_of(more) - ids
        ids |= more
    return ids


def _erase(
    connection: Connection,
    tables: Tables,
    lake: Lake | None,
    hours: int,
    wanted: Wanted,
    audit: Audit,
) -> EraseResult:
    # The database first: an export that plans after the lake's commit finds no row to bring.
    live, found = remove_rows(connection, tables, wanted)
    rows = 0
    files = set[str]()
    if lake is not None:
        removed = found.by_window(lake.size)
        erased = _erase_from(lake, Wanted(wanted.ids | found.ids, wanted.keys), removed)
        rows = erased.rows
        # Retention that compares before this finds a window that differs, and leaves it.
        lower_records(connection, tables.policy_state, lake.id, removed)
        lake.plan_again(lambda: files.update(lake.purge(erased.moment, hours)))
    counts = {"live": live, "archived": len(found.archived), "in_lake": rows}
    audit.end(counts, len(found.leased))
    leased = tuple(sorted(found.leased))
    return EraseResult(False, live, len(found.archived), rows, leased, len(files), audit.id)


def _erase_from(
    lake: Lake, wanted: Wanted, archived: Mapping[ExportWindow, RowChecksums]
) -> ErasedFiles:
    done = list[ErasedFiles]()

    def erase() -> None:
        # Looked for anew in each plan: an export may have brought rows since the last one.
        ids = wanted.ids | _keyed(lake, wanted.keys)
        ids = _with_copies(ids, lambda more: _copied(lake, more))
        done.append(erase_rows(lake, ids, archived))

    lake.plan_again(erase)
    return done[-1]


def need_whole(lake: Lake) -> None:
    """Check that no file of the lake was altered, or written by another program with other rows.

    Raises:
        SetupError: one was; the figures of what is left could not be trusted.
    """
    for name, problem in find_changes(lake, math.inf).files.items():
        if name != LOG:
            raise SetupError(
                f"{lake.folders.path(name)}: {problem}; nothing was erased: run sqlbroker archive "
                "repair first; if that leaves the file, put it back from a copy, or take it out of "
                "the table (docs/howto/lake.md)"
            )


def _keyed(lake: Lake | None, keys: Collection[str]) -> frozenset[int]:
    """Ids of the lake's rows that have one of the keys."""
    return _ids_by(lake, ("key", "policy_key"), keys, "string")


def _copied(lake: Lake | None, ids: Collection[int]) -> frozenset[int]:
    """Ids of the lake's rows that are copies of these messages."""
    return _ids_by(lake, ("origin_id",), ids, "long")


def _ids_by(
    lake: Lake | None, columns: Sequence[str], values: Collection[Any], kind: str
) -> frozenset[int]:
    """Ids of the lake's rows that have one of the values in one of the columns."""
    if lake is None or not values or not lake.files:
        return frozenset()
    wanted = F.broadcast(_column(lake, values, f"wanted {kind}"))
    rows = lake.read_files(lake.files).select("id", *columns)
    same = reduce(or_, (rows[name] == wanted["wanted"] for name in columns))
    found = rows.join(wanted, same, "left_semi").select("id").distinct()
    return frozenset(row[0] for row in found.collect())


def count_rows(lake: Lake, ids: Collection[int]) -> int:
    """How many rows of the lake have these ids."""
    if not lake.files:
        return 0
    return _of_ids(lake, lake.read_files(lake.files).select("id"), ids, "left_semi").count()


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
        staged, found = lake.stage(left.coalesce(len(files)))
    with undo_on_error(lake.discard, staged):
        _compare(whole, gone, found)
        entries = _entries(lake, gone, archived)
        # Taken before the commit: a file that is staged later may be part of the next one.
        moment = lake.folders.now()
    lake.commit(State(entries), staged, files)
    return ErasedFiles(sum(one.rows for one in gone.values()), moment)


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

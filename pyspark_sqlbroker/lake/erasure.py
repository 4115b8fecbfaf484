"""Erase the messages of a person: from the live table, the archive and a lake.

Files of the lake that have such rows are rewritten without them. Rows are selected by their ids, in
joins: a predicate would appear in the log of the table, and a literal in Spark's plans.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.correlation import parse_message_id
from faststream_sqlbroker.core.times import Duration, from_microseconds, parse_non_negative
from faststream_sqlbroker.exceptions import ExportMismatchError, SetupError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import Tables, build_tables
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.lake.delta import LOG, DataFile
from pyspark_sqlbroker.lake.entries import Entry, LakeState
from pyspark_sqlbroker.lake.erased_rows import (
    ErasureAudit,
    MatchedRows,
    MessageFilter,
    delete_messages,
    find_others,
    find_rows,
    subtract_from_records,
)
from pyspark_sqlbroker.lake.files import undo_on_error
from pyspark_sqlbroker.lake.lake import FILE_NAME, Lake
from pyspark_sqlbroker.lake.row_checksums import NO_ROWS, RowChecksums, compute_window_checksums
from pyspark_sqlbroker.lake.verify import find_changes
from pyspark_sqlbroker.lake.windows import ExportWindow
from pyspark_sqlbroker.store_errors import convert_store_errors


@dataclass(frozen=True)
class EraseResult:
    """The result of an erasure.

    Attributes:
        dry_run: True if nothing was removed.
        live: Number of rows of the live table.
        archived: Number of rows of the archive.
        lake: Number of rows of the lake.
        leased: Ids of messages that a subscriber has leased. They stay, so run the erasure again
            with these ids after the messages have ended.
        files: Number of files that were removed from the lake's folders.
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
        """Total number of rows."""
        return self.live + self.archived + self.lake


@dataclass(frozen=True)
class ErasedFiles:
    """The result of a commit.

    Attributes:
        rows: Number of removed rows.
        timestamp: Time of the file system's clock just before the commit, in milliseconds since
            1970: files staged earlier belong to plans that cannot be committed any more.
    """

    rows: int
    timestamp: int


@convert_store_errors(OSError)
def erase_messages(
    spark: SparkSession | None,
    url: str | URL,
    path: str | None = None,
    *,
    ids: Iterable[int | str] = (),
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
    """Erase messages by ids and keys, everywhere; by default only count.

    A key selects every message whose `key` or `policy_key` it is; rows of the lake or the archive
    with the ids of these messages are erased, too. The copies that replays have made of an erased
    message (`origin_id`), and their copies, are erased with it; the message that it is a copy of is
    not. A message that a subscriber has leased stays, and is named. The lake's files that have such
    rows are rewritten without them, compared, and committed; the checksums of their windows are
    recorded again, and so are the records for retention. Then files that are no longer part of the
    table are removed, and with them its earlier versions. If the erasure dies, run it again.

    The database keeps an audit record (`sqlbroker audit`) with counts, without ids and keys. The
    lake's log keeps the minimum and maximum id of each file until the log is cleaned up. State of
    policies that holds a key stays until it expires, as do backups and the database's own log.

    Args:
        spark: A session; required with `path`; not Spark Connect. No driver is needed.
        url: SQLAlchemy URL of the database, of a user who may delete.
        path: Root of the lake; None if there is no lake.
        ids: Ids of messages: numbers, or the texts of `message.message_id`. A number stands for
            every message of that id. There are several only if the database has lost commits that
            the lake has, and has given their ids again.
        keys: Keys of messages.
        dry_run: Count only.
        keep: How long the lake's replaced files stay, in whole hours. With 0, running readers fail.
            With more, the rows can be read in earlier versions until a later erasure or a vacuum of
            the table removes the files.
        by: Who requested the erasure, for the audit.
        message_table: The live table.
        table: The archive; with `path` it must be that of the export.
        schema: Schema of both tables.
        source: The name that the export was given for the database, see `export_archive`.
        storage_options: See `export_archive`.

    Raises:
        SetupError: neither ids nor keys, an id of several messages that was not given as a number,
            an export of something else, or an altered file of the lake: `repair_export` first.
        ConcurrentLoadError: other processes committed during each try. The database's rows are
            removed; run it again.
        StoreError: the database refuses, or does not answer.
        NotSupportedError: Spark Connect.
    """
    times = dict(map(parse_message_id, ids))
    requested = _parse_filter(times, keys)
    hours = int(parse_non_negative("keep", keep) // 3600)
    lake = _open_lake(spark, path, storage_options)
    database = get_database(parse_address(url))
    config = SqlBrokerSchemaConfig(
        message_table_name=message_table, message_archive_table_name=table, schema=schema
    )
    tables = build_tables(config, dialect_name=database.kind)
    with database.connect() as connection:
        for required_table in tables.broker_tables:
            database.require_table(connection, required_table.name, required_table.schema)
        if lake is not None:
            lake.select(database, source, table, schema)
            check_intact(lake)
        selected, matched = _expand_filter(connection, tables, lake, requested)
        _check_distinct(connection, tables, lake, selected.ids, times)
        lake_rows = 0 if lake is None else count_lake_rows(lake, selected.ids)
        if dry_run:
            leased = tuple(sorted(matched.leased))
            return EraseResult(True, len(matched.waiting), len(matched.archived), lake_rows, leased)
        # Before the first row is removed, so that an erasure that dies is in the audit as running.
        audit = ErasureAudit(database, connection, tables.policy_state, by)
        audit.start(len(matched.waiting) + len(matched.archived) + lake_rows, path)
        return _erase(connection, tables, lake, hours, selected, audit)


def _parse_filter(ids: Iterable[int], keys: Iterable[str]) -> MessageFilter:
    """Check ids and keys, and return a filter; an id or a key is required."""
    message_filter = MessageFilter(frozenset(ids), frozenset(keys))
    if not message_filter.ids and not message_filter.keys:
        raise SetupError("give ids= or keys= of the messages to erase")
    if any(not isinstance(key, str) or not key for key in message_filter.keys):
        raise SetupError("keys= must be non-empty strings")
    return message_filter


def _open_lake(
    spark: SparkSession | None, path: str | None, storage: Mapping[str, str] | None
) -> Lake | None:
    """Load the lake below `path`; None without a path, to erase from the database only."""
    if path is None:
        return None
    if spark is None:
        raise SetupError("path= needs spark=, which rewrites the files of the lake")
    lake = Lake(spark, path, storage)
    lake.require_source()
    return lake


def _expand_filter(
    connection: Connection, tables: Tables, lake: Lake | None, requested: MessageFilter
) -> tuple[MessageFilter, MatchedRows]:
    """Find the ids of all messages to erase, in the live table, the archive and the lake.

    They are the requested ids, the ids of all rows with a requested key, and all copies made by
    replays, which have the body of the original. Return the complete filter, and the database's
    rows that match.
    """

    def find_copies(ids: frozenset[int]) -> frozenset[int]:
        """Return the ids of the messages' copies, in the database and the lake."""
        return find_rows(connection, tables, MessageFilter(origins=ids)).ids | _find_copies(
            lake, ids
        )

    by_key = find_rows(
        connection, tables, MessageFilter(keys=requested.keys)
    ).ids | _find_ids_by_key(lake, requested.keys)
    selected = MessageFilter(_add_copies(requested.ids | by_key, find_copies), requested.keys)
    return selected, find_rows(connection, tables, selected)


def _check_distinct(
    connection: Connection,
    tables: Tables,
    lake: Lake | None,
    ids: frozenset[int],
    times: Mapping[int, datetime | None],
) -> None:
    """Refuse ids of several messages, except ids requested as numbers.

    A database that loses commits gives their ids again, and the lake keeps rows that were exported
    before. Rows are erased by their ids, so the other message's rows would go, too.

    Args:
        connection: The database's.
        tables: Its tables.
        lake: The lake, if any.
        ids: All ids to erase.
        times: Requested ids, with the time of the publish if it was given.
    """
    found = {id_: {time} for id_, time in times.items() if time is not None}
    if lake is not None and lake.files:
        rows = lake.read_files(lake.files).select("id", F.unix_micros("created_at"))
        for id_, published_at in _join_ids(lake, rows, ids, "left_semi").distinct().collect():
            found.setdefault(id_, set()).add(from_microseconds(published_at))
    shared = {id_ for id_, found_times in found.items() if len(found_times) > 1}
    shared |= find_others(connection, tables, {id_: min(found[id_]) for id_ in found})
    if shared := {id_ for id_ in shared if id_ not in times or times[id_] is not None}:
        raise SetupError(
            f"several messages have the same id: {sorted(shared)[:10]}; the database has lost "
            "commits and given their ids again (docs/howto/lake.md); nothing was erased: to erase "
            "all messages of an id, give it in ids= as a number"
        )


def _add_copies(
    ids: frozenset[int], find_copies: Callable[[frozenset[int]], frozenset[int]]
) -> frozenset[int]:
    """Add the ids of the messages' copies, and of copies of copies.

    A replay publishes an archived message again as a new message, whose origin is the old id.
    """
    new_ids = ids
    while new_ids:
        new_ids = find_copies(new_ids) - ids
        ids |= new_ids
    return ids


def _erase(
    connection: Connection,
    tables: Tables,
    lake: Lake | None,
    hours: int,
    selected: MessageFilter,
    audit: ErasureAudit,
) -> EraseResult:
    """Remove the selected rows from the database, then from the lake, and finish the audit record.

    The order matters twice: see the comments on races. With `hours` 0 the lake's replaced files are
    removed at once; otherwise they stay until a later erasure or a vacuum removes them.
    """
    # Race: the database first, so that an export that plans after the lake's commit finds no row to
    # add.
    live, matched = delete_messages(connection, tables, selected)
    rows = 0
    files = set[str]()
    if lake is not None:
        removed = matched.count_by_window(lake.size)
        erased = _erase_from_lake(
            lake, MessageFilter(selected.ids | matched.ids, selected.keys), removed
        )
        rows = erased.rows
        # Race: retention that compares before this finds a window that differs, and leaves it.
        subtract_from_records(connection, tables.policy_state, lake.id, removed)
        lake.retry_on_conflict(lambda: files.update(lake.purge(erased.timestamp, hours)))
    counts = {"live": live, "archived": len(matched.archived), "in_lake": rows}
    audit.finish(counts, len(matched.leased))
    leased = tuple(sorted(matched.leased))
    return EraseResult(False, live, len(matched.archived), rows, leased, len(files), audit.id)


def _erase_from_lake(
    lake: Lake, selected: MessageFilter, archived: Mapping[ExportWindow, RowChecksums]
) -> ErasedFiles:
    """Rewrite the lake without the selected messages, again after each commit of another process.

    `archived` counts the rows that were removed from the database, by window.
    """
    results = list[ErasedFiles]()

    def erase() -> None:
        """Find the ids in the loaded lake, and commit the lake without their rows."""
        # Search again in each try: an export may have added rows since the last one.
        ids = selected.ids | _find_ids_by_key(lake, selected.keys)
        ids = _add_copies(ids, lambda new_ids: _find_copies(lake, new_ids))
        results.append(erase_rows(lake, ids, archived))

    lake.retry_on_conflict(erase)
    return results[-1]


def check_intact(lake: Lake) -> None:
    """Check that no file of the lake was altered, or written by another program with other rows.

    Called before an erasure, which records new checksums of the rows that stay: these would make an
    altered file look intact. A difference that only the log shows names no file: it is passed over.

    Raises:
        SetupError: a file was; the checksums of the remaining rows could not be trusted.
    """
    for name, issue in find_changes(lake, math.inf).files.items():
        if name != LOG:
            raise SetupError(
                f"{lake.folders.get_full_path(name)}: {issue}; nothing was erased: run sqlbroker "
                "archive repair first; if the file stays damaged, restore it from a copy, or "
                "remove it from the table (docs/howto/lake.md)"
            )


def _find_ids_by_key(lake: Lake | None, keys: Collection[str]) -> frozenset[int]:
    """Return the ids of the lake's rows that have any of the keys."""
    return _find_ids(lake, ("key", "policy_key"), keys, "string")


def _find_copies(lake: Lake | None, ids: Collection[int]) -> frozenset[int]:
    """Return the ids of the lake's rows that are copies of the given messages."""
    return _find_ids(lake, ("origin_id",), ids, "long")


def _find_ids(
    lake: Lake | None, columns: Sequence[str], values: Collection[Any], type_name: str
) -> frozenset[int]:
    """Return the ids of the lake's rows that have any of the values in any of the columns.

    The values are joined as a frame: as literals they would appear in Spark's plans and logs.
    """
    if lake is None or not values or not lake.files:
        return frozenset()
    values_frame = F.broadcast(_create_column(lake, values, f"wanted {type_name}"))
    rows = lake.read_files(lake.files).select("id", *columns)
    condition = reduce(or_, (rows[name] == values_frame["wanted"] for name in columns))
    matching_ids = rows.join(values_frame, condition, "left_semi").select("id").distinct()
    return frozenset(row[0] for row in matching_ids.collect())


def count_lake_rows(lake: Lake, ids: Collection[int]) -> int:
    """Count the lake's rows with the given ids.

    A message has a row for each time that it was archived, such as after a retry.
    """
    if not lake.files:
        return 0
    return _join_ids(lake, lake.read_files(lake.files).select("id"), ids, "left_semi").count()


def erase_rows(
    lake: Lake, ids: Collection[int], archived: Mapping[ExportWindow, RowChecksums]
) -> ErasedFiles:
    """Commit the lake without the rows of the given ids.

    A commit is made even without such rows, so that no export that has read such a row before can
    add it.

    Args:
        lake: The loaded lake.
        ids: Ids of messages.
        archived: Counts of the rows removed from the database, by window.

    Raises:
        ConcurrentLoadError: another process has committed since; nothing was changed.
        ExportMismatchError: the checksums of the remaining and the removed rows do not add up.
        SetupError: a file was altered.
    """
    check_intact(lake)
    files = _find_files(lake, ids)
    rows = lake.read_files(files)
    total = compute_window_checksums(rows, lake.size, checksums=True)
    removed = compute_window_checksums(
        _join_ids(lake, rows, ids, "left_semi"), lake.size, checksums=True
    )
    staged = list[DataFile]()
    staged_checksums = dict[ExportWindow, RowChecksums]()
    if files:
        remaining = _join_ids(lake, rows, ids, "left_anti")
        # At most as many files as before.
        staged, staged_checksums = lake.stage(remaining.coalesce(len(files)))
    with undo_on_error(lake.discard, staged):
        _compare_checksums(total, removed, staged_checksums)
        entries = _build_entries(lake, removed, archived)
        # Race: read the time before the commit. A file that is staged later may be part of the next
        # commit.
        timestamp = lake.folders.get_time()
    lake.commit(LakeState(entries), staged, files)
    return ErasedFiles(sum(row_checksums.rows for row_checksums in removed.values()), timestamp)


def _find_files(lake: Lake, ids: Collection[int]) -> list[DataFile]:
    """Return the files that have rows of the given ids, and so must be rewritten."""
    if not lake.files or not ids:
        return []
    matches = _join_ids(lake, lake.read_with_file_names(lake.files), ids, "left_semi")
    names = {row[0] for row in matches.select(FILE_NAME).distinct().collect()}
    return [file for file in lake.files if file.path.rpartition("/")[2] in names]


def _compare_checksums(
    total: Mapping[ExportWindow, RowChecksums],
    removed: Mapping[ExportWindow, RowChecksums],
    remaining: Mapping[ExportWindow, RowChecksums],
) -> None:
    """Check that remaining and removed rows of each window add up to the former rows.

    A difference means that rows were lost or changed while the files were rewritten, so nothing is
    committed.
    """
    for window in sorted({*total, *remaining}):
        actual = remaining.get(window, NO_ROWS) + removed.get(window, NO_ROWS)
        if actual != total[window]:
            raise ExportMismatchError(
                window.name,
                str(total[window]),
                str(actual),
                "Nothing was erased: run the erasure again",
            )


def _build_entries(
    lake: Lake,
    removed: Mapping[ExportWindow, RowChecksums],
    archived: Mapping[ExportWindow, RowChecksums],
) -> dict[str, Entry]:
    """Return the records of the windows without the removed rows.

    A record has checksums of a window's rows in the lake, and counts of its rows in the database.
    The recorded counts are lowered, not counted again: new counts of the database would hide rows
    that have come late and are not in the lake.
    """
    entries = dict[str, Entry]()
    for window in sorted({*removed, *archived}):
        if (entry := lake.get_entry(window)) is not None:
            counts = archived.get(window, NO_ROWS).counts
            entries[window.name] = Entry(
                entry.lake - removed.get(window, NO_ROWS), entry.source - counts
            )
    return entries


def _join_ids(lake: Lake, rows: DataFrame, ids: Iterable[int], join_type: str) -> DataFrame:
    """Join rows with ids: "left_semi" keeps rows of these ids, "left_anti" the others.

    A filter would put the ids, which identify a person's messages, into Spark's plans and logs.
    """
    return rows.join(F.broadcast(_create_column(lake, sorted(ids), "id long")), "id", join_type)


def _create_column(lake: Lake, values: Iterable[Any], schema: str) -> DataFrame:
    """Create a frame of one column in the lake's session, and keep the caller's session active.

    Ids and keys are joined as such a frame, never written as literals into a query.
    """
    caller_session = SparkSession.getActiveSession()
    frame = lake.session.createDataFrame([(value,) for value in values], schema)
    if caller_session is not None:
        # Trap: createDataFrame has made the lake's session the active one. This is the public way
        # to restore the caller's.
        caller_session.createDataFrame([], schema)
    return frame

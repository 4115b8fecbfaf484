"""Erase the messages of a person: from the live table, the archive and a lake."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.times import Duration, seconds_or_zero
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import Tables, build_tables
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import ArchiveDatabase, database_of
from pyspark_sqlbroker.lake.erased_files import (
    ErasedFiles,
    count_rows,
    erase_rows,
    ids_of_keys,
    need_whole,
)
from pyspark_sqlbroker.lake.erased_rows import (
    Audit,
    Found,
    Wanted,
    find_rows,
    lower_records,
    remove_rows,
    wanted_of,
)
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.prune import selection_of
from pyspark_sqlbroker.lake.run import plan_again


@dataclass(frozen=True)
class EraseResult:
    """What was erased, or would be.

    Attributes:
        dry_run: Whether nothing was removed.
        live: Rows of the live table.
        archived: Rows of the archive.
        lake: Rows of the lake.
        leased: Ids of messages that a subscriber has leased: they stay, so run it again when they
            have ended.
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
    under the ids of those goes, too. A message that a subscriber has leased stays, and is named.
    The lake's files that have such rows are written again without them, compared, and committed;
    the figures of its windows are recorded anew, and so are the records for retention. Then files
    that are no longer part of the table are removed, and with them its earlier versions. If it
    dies, run it again.

    The database keeps an audit record (`sqlbroker audit`) with counts, without ids and keys. The
    lake's log keeps the least and greatest id of each file that it ever had. State of policies
    that holds a key stays until it expires, as do backups and the database's own log.

    Args:
        spark: A session; needed with `path`; not Spark Connect. No driver is needed.
        url: SQLAlchemy URL of the database, of a user who may delete.
        path: Of the lake; None: there is none.
        ids: Of messages.
        keys: Of messages.
        dry_run: Count only.
        keep: How long the lake's replaced files stay, in whole hours. 0: readers that have begun
            fail. With more, the rows can be read in earlier versions until a later erasure or
            compaction removes the files.
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
            selection_of(lake, database, table, schema, source)
            need_whole(lake)
        wanted, found = _complete(connection, tables, lake, given)
        there = 0 if lake is None else count_rows(lake, wanted.ids)
        if dry_run:
            leased = tuple(sorted(found.leased))
            return EraseResult(True, len(found.waiting), len(found.archived), there, leased)
        # Before the first row goes: an erasure that dies is in the audit as one that runs.
        audit = Audit(database, connection, tables.policy_state, by)
        audit.begin(len(found.waiting) + len(found.archived) + there, path)
        return _Erasure(database, connection, tables, lake, hours).run(wanted, audit)


@dataclass
class _Erasure:
    database: ArchiveDatabase
    connection: Connection
    tables: Tables
    lake: Lake | None
    hours: int

    def run(self, wanted: Wanted, audit: Audit) -> EraseResult:
        # The database first: an export that plans after the lake's commit finds no row to bring.
        live, found = remove_rows(self.connection, self.tables, wanted)
        rows = 0
        files = 0
        if self.lake is not None:
            ids = wanted.ids | found.ids
            erased = self._from_lake(self.lake, Wanted(ids, wanted.keys), found)
            rows = erased.rows
            removed = found.by_window(self.lake.size)
            # Retention that compares before this finds a window that differs, and leaves it.
            lower_records(self.connection, self.tables.policy_state, self.lake.id, removed)
            files = self._purge(self.lake, erased)
        counts = {"live": live, "archived": len(found.archived), "in_lake": rows}
        audit.end(counts, len(found.leased))
        leased = tuple(sorted(found.leased))
        return EraseResult(False, live, len(found.archived), rows, leased, files, audit.id)

    def _from_lake(self, lake: Lake, wanted: Wanted, found: Found) -> ErasedFiles:
        done = list[ErasedFiles]()

        def erase() -> None:
            # Looked for anew in each plan: an export may have brought rows since the last one.
            ids = wanted.ids | ids_of_keys(lake, wanted.keys)
            done.append(erase_rows(lake, ids, found.by_window(lake.size)))

        plan_again(lake, erase)
        return done[-1]

    def _purge(self, lake: Lake, erased: ErasedFiles) -> int:
        gone = set[str]()
        plan_again(lake, lambda: gone.update(lake.purge(erased.moment, self.hours)))
        return len(gone)


def _given(ids: Iterable[int], keys: Iterable[str]) -> Wanted:
    given = wanted_of([whole_number("ids", one) for one in ids], list(keys))
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
    """The same with the ids of all rows that have one of the keys, in any place."""
    by_key = find_rows(connection, tables, Wanted(keys=given.keys)).ids
    in_lake = frozenset[int]() if lake is None else ids_of_keys(lake, given.keys)
    wanted = Wanted(given.ids | by_key | in_lake, given.keys)
    return wanted, find_rows(connection, tables, wanted)

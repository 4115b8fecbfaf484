"""Record in the database which windows are in the lake, for retention without Spark.

A record is written after its window was committed to the lake. An export that dies before that
leaves no record, so nothing of the window is removed; the next export writes the record.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from sqlalchemy import URL, Connection, Table, insert, null, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from faststream_sqlbroker.core.loaded_windows import (
    DIFFERING_SCOPE,
    LOADED_SCOPE,
    LoadedWindow,
    RowSum,
    parse_window,
)
from faststream_sqlbroker.exceptions import SetupError, StoreError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.schema.types import clock
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import ArchiveDatabase, get_database
from pyspark_sqlbroker.lake.row_checksums import RowChecksums
from pyspark_sqlbroker.lake.windows import ExportWindow


class WindowRecords:
    """The records of a lake in the policy state of a database."""

    def __init__(
        self,
        database: ArchiveDatabase,
        connection: Connection,
        table: Table,
        lake: str,
        lake_id: str,
    ) -> None:
        """Read the existing records.

        A record is a row of the policy state, where retention reads which windows are in the lake.
        Its scope has the lake's name: one scope for valid records, one for windows that differ.

        Raises:
            SetupError: the records are another lake's, or the table does not exist.
        """
        self._database = database
        self._connection = connection
        self._table = table
        self._lake = lake
        self._lake_id = lake_id
        database.require_table(connection, table.name, table.schema)
        self._records: dict[str, LoadedWindow] = {}
        self._changed_names: set[str] = set()
        c = table.c
        scopes = (LOADED_SCOPE + lake, DIFFERING_SCOPE + lake)
        statement = select(c.scope, c.key, c.info, c.counter).where(c.scope.in_(scopes))
        for scope, *row in connection.execute(statement):
            record = self._records[row[0]] = parse_window(*row)
            if scope == DIFFERING_SCOPE + lake:
                self._changed_names.add(record.name)
            self._check_lake(record)

    def _check_lake(self, record: LoadedWindow) -> None:
        """Refuse to overwrite the records of another lake with the same name.

        Retention would remove rows that only one of both lakes has. Each lake has a random id.
        """
        if record.lake_id != self._lake_id:
            raise SetupError(
                f"record_as={self._lake!r} is the name of another lake, which recorded window "
                f"{record.name}: give this lake another name; or, if the other lake no longer "
                f"exists, DELETE FROM {self._table.fullname} WHERE scope IN "
                f"('{LOADED_SCOPE}{self._lake}', '{DIFFERING_SCOPE}{self._lake}')"
            )

    def find_unrecorded(self, windows: list[ExportWindow]) -> set[ExportWindow]:
        """Return the windows without a record, or with a record that was found to differ.

        A record lets retention remove a window's rows. It is marked as differing if retention found
        other rows in the database, or if an export found the window's files damaged (`hold`). An
        export checks these windows again, however old they are.
        """
        return {
            window
            for window in windows
            if window.name not in self._records or window.name in self._changed_names
        }

    def hold(self, names: Iterable[str]) -> None:
        """Stop retention from removing rows of some windows until new records are written.

        Their records move to the scope of differing windows, which retention ignores. Used for
        windows whose files are damaged, as the database may have the only good copy of their rows.
        """
        c = self._table.c
        for name in names:
            conditions = (c.scope == LOADED_SCOPE + self._lake, c.key == name)
            # Race: the counter rises, so that an export that has read the record before cannot
            # overwrite it.
            values: dict[str, Any] = {
                "scope": DIFFERING_SCOPE + self._lake,
                "due_at": null(),
                "counter": c.counter + 1,
            }
            result = self._connection.execute(
                update(self._table).where(*conditions).values(**values)
            )
            record = self._records.get(name)
            if result.rowcount and record is not None:
                self._records[name] = replace(record, version=record.version + 1)
                self._changed_names.add(name)

    def write(self, window: ExportWindow, source: RowChecksums) -> None:
        """Record the database's rows of a window that is in the lake.

        Retention may then remove these rows; without rows there is no due time, so it skips them. A
        record that has changed since it was read is left as it is: rows were removed, and the next
        export counts again.
        """
        rows = RowSum(source.rows, source.ids)
        record = self._records.get(window.name)
        if (
            record is not None
            and record.remaining == rows
            and window.name not in self._changed_names
        ):
            return
        version = 0 if record is None else record.version + 1
        new = LoadedWindow(window.name, window.start, window.end, rows, self._lake_id, version)
        values: dict[str, Any] = {
            "scope": LOADED_SCOPE + self._lake,
            "created_at": clock(),
            "due_at": new.end if rows.rows else null(),
            "info": new.to_json(),
            "counter": version,
        }
        try:
            self._save(new, record, values)
        except IntegrityError:
            return  # Race: another export of this lake has recorded the window first.
        except DBAPIError as error:
            msg = (
                f"window {window.name} is in the lake, but cannot be recorded in "
                f"{self._table.fullname}: {error.orig}; set primary= if url= is a standby, and "
                "export again"
            )
            raise StoreError(msg) from None
        self._records[new.name] = new
        self._changed_names.discard(new.name)

    def _save(
        self, new: LoadedWindow, previous: LoadedWindow | None, values: dict[str, Any]
    ) -> None:
        """Insert a record, or replace the record that was read unless its counter has changed.

        Race: retention lowers the counts of a record while rows are removed, and raises its
        counter. The late update then matches no row.
        """
        if previous is None:
            self._connection.execute(insert(self._table).values(key=new.name, **values))
            return
        c = self._table.c
        scopes = (LOADED_SCOPE + self._lake, DIFFERING_SCOPE + self._lake)
        conditions = (c.scope.in_(scopes), c.key == new.name, c.counter == previous.version)
        self._connection.execute(update(self._table).where(*conditions).values(**values))


@contextmanager
def open_records(
    lake: str,
    lake_id: str,
    url: str | URL,
    message_table: str,
    schema: str | None,
) -> Iterator[WindowRecords]:
    """Open the records of `lake` on a separate connection, in autocommit.

    A record tells retention how many rows of a window are in the lake. Records are written to the
    primary, while the export may read a standby.
    """
    config = SqlBrokerSchemaConfig(
        message_table_name=message_table, message_archive_table_name=None, schema=schema
    )
    database = get_database(parse_address(url))
    table = build_tables(config, dialect_name=database.kind).policy_state
    engine = database.address.create_engine()
    connection = engine.connect()
    try:
        database.configure_session(connection)
        yield WindowRecords(database, connection, table, lake, lake_id)
    finally:
        # The server may have closed it.
        with suppress(DBAPIError):
            connection.close()

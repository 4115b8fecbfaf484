"""Tells the database which windows are in the lake, for retention without Spark.

A record is written after its window is in its place in the lake. An export that dies before that
leaves no record, so nothing of the window is removed; the next export writes it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from sqlalchemy import URL, Connection, Table, insert, null, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from faststream_sqlbroker.core.loaded_windows import (
    DIFFERS,
    LOADED,
    LoadedWindow,
    RowSum,
    window_of,
)
from faststream_sqlbroker.exceptions import SetupError, StoreError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.schema.types import clock
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import ArchiveDatabase, database_of
from pyspark_sqlbroker.lake.row_checksums import RowChecksums
from pyspark_sqlbroker.lake.windows import ExportWindow


class Records:
    """The records of one lake in the policy state of one database."""

    def __init__(
        self,
        database: ArchiveDatabase,
        connection: Connection,
        table: Table,
        lake: str,
        lake_id: str,
    ) -> None:
        """Read those that there are.

        Raises:
            SetupError: they are another lake's, or there is no such table.
        """
        self._database = database
        self._connection = connection
        self._table = table
        self._lake = lake
        self._lake_id = lake_id
        database.need_table(connection, table.name, table.schema)
        self._known: dict[str, LoadedWindow] = {}
        self._differing: set[str] = set()
        c = table.c
        scopes = (LOADED + lake, DIFFERS + lake)
        statement = select(c.scope, c.key, c.info, c.counter).where(c.scope.in_(scopes))
        for scope, *row in connection.execute(statement):
            found = self._known[row[0]] = window_of(*row)
            if scope == DIFFERS + lake:
                self._differing.add(found.name)
            self._refuse_other(found)

    def _refuse_other(self, found: LoadedWindow) -> None:
        if found.lake_id != self._lake_id:
            raise SetupError(
                f"record_as={self._lake!r} is the name of another lake, which has recorded window "
                f"{found.name}: give this lake another name; or, if the other is gone, DELETE FROM "
                f"{self._table.fullname} WHERE scope IN ('{LOADED}{self._lake}', "
                f"'{DIFFERS}{self._lake}')"
            )

    def lacking(self, windows: list[ExportWindow]) -> set[ExportWindow]:
        """Those of the lake's windows that have no record, or one that differs."""
        return {
            one for one in windows if one.name not in self._known or one.name in self._differing
        }

    def hold(self, names: Iterable[str]) -> None:
        """Let retention remove nothing of these windows until they are recorded anew."""
        c = self._table.c
        for name in names:
            same = (c.scope == LOADED + self._lake, c.key == name)
            # The counter rises, so that an export that has read the record before leaves it held.
            values: dict[str, Any] = {
                "scope": DIFFERS + self._lake,
                "due_at": null(),
                "counter": c.counter + 1,
            }
            held = self._connection.execute(update(self._table).where(*same).values(**values))
            known = self._known.get(name)
            if held.rowcount and known is not None:
                self._known[name] = replace(known, version=known.version + 1)
                self._differing.add(name)

    def write(self, window: ExportWindow, source: RowChecksums) -> None:
        """Record what the database has of a window that is in the lake.

        If the record has changed since it was read, it is left as it is: rows were removed, and
        the next export counts anew.
        """
        rows = RowSum(source.rows, source.ids)
        known = self._known.get(window.name)
        if known is not None and known.left == rows and window.name not in self._differing:
            return
        version = 0 if known is None else known.version + 1
        new = LoadedWindow(window.name, window.start, window.end, rows, self._lake_id, version)
        values: dict[str, Any] = {
            "scope": LOADED + self._lake,
            "created_at": clock(),
            "due_at": new.end if rows.rows else null(),
            "info": new.info(),
            "counter": version,
        }
        try:
            self._save(new, known, values)
        except IntegrityError:
            return  # Another export of this lake has recorded it first.
        except DBAPIError as error:
            msg = (
                f"window {window.name} is in the lake, and cannot be recorded in "
                f"{self._table.fullname}: {error.orig}; give primary= if url= is a standby, and "
                "export again"
            )
            raise StoreError(msg) from None
        self._known[new.name] = new
        self._differing.discard(new.name)

    def _save(self, new: LoadedWindow, known: LoadedWindow | None, values: dict[str, Any]) -> None:
        if known is None:
            self._connection.execute(insert(self._table).values(key=new.name, **values))
            return
        c = self._table.c
        scopes = (LOADED + self._lake, DIFFERS + self._lake)
        same = (c.scope.in_(scopes), c.key == new.name, c.counter == known.version)
        self._connection.execute(update(self._table).where(*same).values(**values))


@contextmanager
def open_records(
    lake: str,
    lake_id: str,
    url: str | URL,
    message_table: str,
    schema: str | None,
) -> Iterator[Records]:
    """The records of `lake` on a connection of their own, in autocommit."""
    config = SqlBrokerSchemaConfig(
        message_table_name=message_table, message_archive_table_name=None, schema=schema
    )
    database = database_of(parse_address(url))
    table = build_tables(config, dialect_name=database.kind).policy_state
    engine = database.address.engine()
    connection = engine.connect()
    try:
        database.set_up(connection)
        yield Records(database, connection, table, lake, lake_id)
    finally:
        # The server may have closed it.
        with suppress(DBAPIError):
            connection.close()

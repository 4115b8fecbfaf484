"""SQLite for readers."""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Insert, Table
from sqlalchemy.dialects import sqlite

from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.schema.types import SQLITE_CLOCK
from pyspark_sqlbroker.databases.base import ArchiveDatabase, Size
from pyspark_sqlbroker.load.columns import Field


class _Sum:
    """A sum of any size, as text."""

    def __init__(self) -> None:
        self.total = 0

    def step(self, value: int | None) -> None:
        self.total += value or 0

    def finalize(self) -> str:
        return str(self.total)


class _DigestSum(_Sum):
    """The sum of the first 60 bits of MD5s."""

    def step(self, value: Any) -> None:
        self.total += int(hashlib.md5(value or b"", usedforsecurity=False).hexdigest()[:15], 16)


class SQLite(ArchiveDatabase):
    """SQLite; times are whole microseconds."""

    kind = "sqlite"
    jdbc_driver = "org.sqlite.JDBC"
    native_timestamps = False
    one_writer = True

    def begin(self, connection: Connection) -> None:
        """Take the write lock at once: upgrading a read lock fails if another writer is active."""
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def text(self, value: str) -> str:
        """Only the quote is special."""
        return "'" + value.replace("'", "''") + "'"

    def moment(self, value: datetime) -> str:
        """As the columns are."""
        return str(to_microseconds(value))

    def microseconds(self, expression: str) -> str:
        """The column holds microseconds already."""
        return expression

    def column(self, field: Field) -> str:
        """Headers as text: a bare number that another program wrote is stored as a number."""
        name = self.quote(field.name)
        return (
            f"CAST({name} AS TEXT) AS {name}" if field.name == "headers" else super().column(field)
        )

    def value(self, field: Field) -> str:
        """Texts by their bytes: SQLite does not check that they are UTF-8."""
        value = super().value(field)
        return f"CAST({value} AS BLOB)" if field.type == "string" else value

    def range_of(self, column: str) -> str:
        """Times are bare already."""
        return column

    def clock(self) -> str:
        """In milliseconds, as the broker's."""
        return SQLITE_CLOCK

    def prepare(self, connection: Connection) -> None:
        """SQLite has no MD5, and its sums end at 63 bits."""
        raw: Any = connection.connection.driver_connection
        raw.create_aggregate("sqlbroker_sum", 1, _Sum)
        raw.create_aggregate("sqlbroker_md5", 1, _DigestSum)

    def insert_new(self, table: Table) -> Insert:
        """ON CONFLICT DO NOTHING."""
        return sqlite.insert(table).on_conflict_do_nothing()

    def exact_sum(self, expression: str) -> str:
        """By Python."""
        return f"coalesce(sqlbroker_sum({expression}), '0')"

    def length(self, column: str) -> str:
        """Of a BLOB they are bytes, and known without reading it; of a text they are characters."""
        text = f"length(CAST({column} AS BLOB))"
        return f"CASE typeof({column}) WHEN 'blob' THEN length({column}) ELSE {text} END"

    def digest_sum(self, expression: str, *, text: bool) -> str:  # noqa: ARG002 - all texts are UTF-8
        """By Python."""
        return f"coalesce(sqlbroker_md5(CAST({expression} AS BLOB)), '0')"

    def joined(self, expressions: Sequence[str]) -> str:
        """|| makes texts of numbers."""
        return " || '|' || ".join(f"coalesce('=' || {one}, '~')" for one in expressions)

    def size(self, connection: Connection, name: str, schema: str | None) -> Size:
        """Of the whole file; rows by the distance of the ids."""
        pages = int(self.scalar(connection, "PRAGMA page_count") or 0)
        bytes_ = int(self.scalar(connection, "PRAGMA page_size") or 0) * pages
        statement = f"SELECT coalesce(max(id) - min(id) + 1, 0) FROM {self.table(name, schema)}"
        return Size(int(self.scalar(connection, statement)), bytes_)

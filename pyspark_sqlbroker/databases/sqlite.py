"""SQLite for readers."""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Insert, Table
from sqlalchemy.dialects import sqlite

from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.schema.types import SQLITE_CLOCK
from pyspark_sqlbroker.databases.base import ArchiveDatabase, TableSize
from pyspark_sqlbroker.load.columns import Field


class _ExactSum:
    """A sum of any size, as text."""

    def __init__(self) -> None:
        self.total = 0

    def step(self, value: int | None) -> None:
        self.total += value or 0

    def finalize(self) -> str:
        return str(self.total)


class _Md5Sum(_ExactSum):
    """The sum of the first 60 bits of MD5s."""

    def step(self, value: Any) -> None:
        self.total += int(hashlib.md5(value or b"", usedforsecurity=False).hexdigest()[:15], 16)


class SQLite(ArchiveDatabase):
    """SQLite; times are whole microseconds."""

    kind = "sqlite"
    jdbc_driver = "org.sqlite.JDBC"
    native_timestamps = False
    has_single_writer = True

    def begin(self, connection: Connection) -> None:
        """Take the write lock at once: upgrading a read lock fails if another writer is active."""
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def format_text(self, value: str) -> str:
        """Escape the quote, which is the only special character."""
        return "'" + value.replace("'", "''") + "'"

    def format_time(self, value: datetime) -> str:
        """Format as microseconds, like the columns."""
        return str(to_microseconds(value))

    def build_microseconds(self, expression: str) -> str:
        """Return the column itself, which holds microseconds."""
        return expression

    def build_jdbc_column(self, field: Field) -> str:
        """Select headers as text: SQLite stores a bare number of another program as a number."""
        name = self.quote(field.name)
        return (
            f"CAST({name} AS TEXT) AS {name}"
            if field.name == "headers"
            else super().build_jdbc_column(field)
        )

    def build_value(self, field: Field) -> str:
        """Select texts as bytes: SQLite does not check for UTF-8."""
        value = super().build_value(field)
        return f"CAST({value} AS BLOB)" if field.type == "string" else value

    def get_range_column(self, column: str) -> str:
        """Return the column itself, as times are stored as microseconds."""
        return column

    def build_clock(self) -> str:
        """Return the clock in milliseconds, like the broker."""
        return SQLITE_CLOCK

    def register_functions(self, connection: Connection) -> None:
        """Register sums: SQLite has no MD5, and native sums end at 63 bits."""
        raw: Any = connection.connection.driver_connection
        raw.create_aggregate("sqlbroker_sum", 1, _ExactSum)
        raw.create_aggregate("sqlbroker_md5", 1, _Md5Sum)

    def build_insert_if_absent(self, table: Table) -> Insert:
        """Use ON CONFLICT DO NOTHING."""
        return sqlite.insert(table).on_conflict_do_nothing()

    def build_exact_sum(self, expression: str) -> str:
        """Sum by Python."""
        return f"coalesce(sqlbroker_sum({expression}), '0')"

    def build_length(self, column: str) -> str:
        """Count bytes: known without reading for a BLOB; of a text length() counts characters."""
        text = f"length(CAST({column} AS BLOB))"
        return f"CASE typeof({column}) WHEN 'blob' THEN length({column}) ELSE {text} END"

    def build_digest_sum(self, expression: str, *, text: bool) -> str:  # noqa: ARG002 - all texts are UTF-8
        """Sum by Python."""
        return f"coalesce(sqlbroker_md5(CAST({expression} AS BLOB)), '0')"

    def build_joined_text(self, expressions: Sequence[str]) -> str:
        """Join by ||, which converts numbers to text."""
        return " || '|' || ".join(
            f"coalesce('=' || {expression}, '~')" for expression in expressions
        )

    def estimate_size(self, connection: Connection, name: str, schema: str | None) -> TableSize:
        """Return the size of the complete file; rows are estimated by the distance of the ids.

        SQLite keeps no sizes of tables. Both numbers are at least the table's own.
        """
        pages = int(self.fetch_scalar(connection, "PRAGMA page_count") or 0)
        bytes_ = int(self.fetch_scalar(connection, "PRAGMA page_size") or 0) * pages
        statement = (
            f"SELECT coalesce(max(id) - min(id) + 1, 0) FROM {self.quote_table(name, schema)}"
        )
        return TableSize(int(self.fetch_scalar(connection, statement)), bytes_)

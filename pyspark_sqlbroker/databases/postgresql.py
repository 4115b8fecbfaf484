"""PostgreSQL for readers."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from sqlalchemy import Connection, Insert, Table, func, select
from sqlalchemy.dialects import postgresql

from pyspark_sqlbroker.databases.base import (
    BLOCKS,
    LONGEST_WAIT,
    ArchiveDatabase,
    Size,
    TableRange,
    even_cuts,
    ranges,
)
from pyspark_sqlbroker.load.columns import Field
from pyspark_sqlbroker.moments import utc_text


class PostgreSQL(ArchiveDatabase):
    """PostgreSQL 14 and newer."""

    kind = "postgresql"
    jdbc_driver = "org.postgresql.Driver"
    native_timestamps = True
    shares_snapshots = True

    def set_up(self, connection: Connection) -> None:
        """Time to wait, and times as texts that mean the same wherever they are read."""
        connection.exec_driver_sql(
            f"SELECT set_config('idle_session_timeout', '{LONGEST_WAIT}s', false), "
            "set_config('DateStyle', 'ISO', false), set_config('TimeZone', 'UTC', false)"
        )

    def begin(self, connection: Connection) -> None:
        """Whatever the server's default level is."""
        connection.exec_driver_sql("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")

    def text(self, value: str) -> str:
        """An escape string: it reads the same whatever standard_conforming_strings says."""
        return "E'" + value.replace("\\", "\\\\").replace("'", "''") + "'"

    def moment(self, value: datetime) -> str:
        """With its offset: the connection's time zone cannot move it."""
        return f"timestamptz '{utc_text(value)}+00'"

    def microseconds(self, expression: str) -> str:
        """By numeric, which is exact; infinity is what JDBC makes of it."""
        ends = "WHEN 'infinity' THEN 253402300799999000 WHEN '-infinity' THEN -62135424000000000"
        exact = f"(extract(epoch FROM {expression}) * 1000000)::bigint"
        return f"CASE {expression} {ends} ELSE {exact} END"

    def column(self, field: Field) -> str:
        """JSON as text: LIKE and = on it could not be pushed down otherwise."""
        name = self.quote(field.name)
        return f"{name}::text AS {name}" if field.name == "headers" else super().column(field)

    def value(self, field: Field) -> str:
        """JSON as text."""
        value = super().value(field)
        return f"{value}::text" if field.name == "headers" else value

    def hidden(self, column: str) -> dict[str, str]:
        """The row's place, for ranges of blocks."""
        return {BLOCKS: "ctid"} if column == BLOCKS else super().hidden(column)

    def clock(self) -> str:
        """Not the transaction's start."""
        return self.microseconds("clock_timestamp()")

    def insert_new(self, table: Table) -> Insert:
        """ON CONFLICT DO NOTHING."""
        return postgresql.insert(table).on_conflict_do_nothing()

    def wake(self, connection: Connection, channel: str, queues: Iterable[str]) -> None:
        """A notification for each queue."""
        for queue in sorted(queues):
            connection.execute(select(func.pg_notify(channel, queue)))

    def exact_sum(self, expression: str) -> str:
        """PostgreSQL sums bigints by 128 bits."""
        return f"coalesce(sum(({expression})::bigint), 0)::text"

    def length(self, column: str) -> str:
        """As stored, uncompressed."""
        return f"octet_length({column})"

    def digest_sum(self, expression: str, *, text: bool) -> str:
        """Of UTF-8 whatever the database's encoding."""
        bytes_ = f"convert_to({expression}, 'UTF8')" if text else expression
        return self.exact_sum(f"('x' || substr(md5({bytes_}), 1, 15))::bit(60)::bigint")

    def joined(self, expressions: Sequence[str]) -> str:
        """By casts to text."""
        texts = (f"coalesce('=' || ({one})::text, '~')" for one in expressions)
        return f"concat_ws('|', {', '.join(texts)})"

    def size(self, connection: Connection, name: str, schema: str | None) -> Size:
        """Of the table and its partitions."""
        rows, bytes_ = connection.exec_driver_sql(
            "SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint, "
            "coalesce(sum(pg_table_size(c.oid)), 0)::bigint "
            f"FROM pg_class c WHERE c.oid = {self._regclass(name, schema)} "
            f"OR c.oid IN (SELECT relid FROM pg_partition_tree({self._regclass(name, schema)}))"
        ).one()
        return Size(rows, bytes_)

    def _cut(self, connection: Connection, rows: TableRange, number: int) -> list[str]:
        """Ranges of blocks, or of ids if the table is partitioned; of values by the histogram, if
        there is one.
        """
        if rows.column == BLOCKS:
            kind, blocks = connection.exec_driver_sql(
                "SELECT relkind::text, "
                "pg_relation_size(oid) / current_setting('block_size')::bigint "
                f"FROM pg_class WHERE oid = {self._regclass(rows.name, rows.schema)}"
            ).one()
            if kind == "r":
                places = [f"'({cut},0)'::tid" for cut in even_cuts(0, int(blocks), number)]
                return ranges(self.quote(BLOCKS), places)
            rows = replace(rows, column="id")
        cuts = self._histogram(connection, rows, number)
        return self._between(rows, cuts) if cuts else super()._cut(connection, rows, number)

    def _histogram(self, connection: Connection, rows: TableRange, number: int) -> list[int]:
        """Cuts of about equal depth from ANALYZE's histogram; none if it has too little inside of
        `where`.
        """
        cast = "bigint" if rows.column == "id" else "timestamptz"
        name = self.quote(rows.column)
        value = name if rows.column == "id" else self.microseconds(name)
        found = connection.exec_driver_sql(
            f"SELECT {value} FROM (SELECT unnest(histogram_bounds::text::{cast}[]) AS {name} "
            "FROM pg_stats s "
            f"JOIN pg_class c ON c.oid = {self._regclass(rows.name, rows.schema)} "
            "JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = s.schemaname "
            f"WHERE s.tablename = c.relname AND s.attname = {self.text(rows.column)} "
            f"AND s.inherited = (c.relkind = 'p')) b WHERE {rows.where or 'true'} ORDER BY b.{name}"
        ).scalars()
        bounds = [int(bound) for bound in found]
        if len(bounds) <= number:
            return []
        return list(dict.fromkeys(bounds[cut] for cut in even_cuts(0, len(bounds) - 1, number)))

    def _regclass(self, name: str, schema: str | None) -> str:
        return f"to_regclass({self.text(self.table(name, schema))})"

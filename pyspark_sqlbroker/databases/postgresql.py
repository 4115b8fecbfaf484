"""PostgreSQL for readers."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from sqlalchemy import Connection, Insert, Table, func, select
from sqlalchemy.dialects import postgresql

from pyspark_sqlbroker.databases.base import (
    BLOCKS,
    MAX_IDLE_SECONDS,
    ArchiveDatabase,
    TableRange,
    TableSize,
    build_ranges,
    compute_even_cuts,
)
from pyspark_sqlbroker.load.columns import Field
from pyspark_sqlbroker.moments import format_utc


class PostgreSQL(ArchiveDatabase):
    """PostgreSQL 14 and newer."""

    kind = "postgresql"
    jdbc_driver = "org.postgresql.Driver"
    native_timestamps = True
    shares_snapshots = True

    def configure_session(self, connection: Connection) -> None:
        """Set the idle timeout, and formats of times with the same meaning for every reader."""
        connection.exec_driver_sql(
            f"SELECT set_config('idle_session_timeout', '{MAX_IDLE_SECONDS}s', false), "
            "set_config('DateStyle', 'ISO', false), set_config('TimeZone', 'UTC', false)"
        )

    def begin(self, connection: Connection) -> None:
        """Set the isolation level, whatever the server's default is."""
        connection.exec_driver_sql("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")

    def format_text(self, value: str) -> str:
        """Format as an escape string, which does not depend on standard_conforming_strings."""
        return "E'" + value.replace("\\", "\\\\").replace("'", "''") + "'"

    def format_time(self, value: datetime) -> str:
        """Format with the offset, so that the connection's time zone has no effect."""
        return f"timestamptz '{format_utc(value)}+00'"

    def build_microseconds(self, expression: str) -> str:
        """Compute by numeric, which is exact; infinity becomes the same value as by JDBC."""
        infinities = (
            "WHEN 'infinity' THEN 253402300799999000 WHEN '-infinity' THEN -62135424000000000"
        )
        exact = f"(extract(epoch FROM {expression}) * 1000000)::bigint"
        return f"CASE {expression} {infinities} ELSE {exact} END"

    def build_jdbc_column(self, field: Field) -> str:
        """Select JSON as text: otherwise LIKE and = could not be pushed down."""
        name = self.quote(field.name)
        return (
            f"{name}::text AS {name}"
            if field.name == "headers"
            else super().build_jdbc_column(field)
        )

    def build_value(self, field: Field) -> str:
        """Select JSON as text."""
        value = super().build_value(field)
        return f"{value}::text" if field.name == "headers" else value

    def build_source_column(self, field: Field) -> str:
        """Return infinity as the times that JDBC returns: ADBC would overflow to the far past."""
        name = self.quote(field.name)
        if field.type != "timestamp":
            return name
        return (
            f"CASE {name} WHEN 'infinity' THEN timestamptz '9999-12-31 23:59:59.999+00' "
            f"WHEN '-infinity' THEN timestamptz '0001-01-03 00:00+00' ELSE {name} END"
        )

    def get_hidden_columns(self, column: str) -> dict[str, str]:
        """Add the row's position, for ranges of blocks."""
        return {BLOCKS: "ctid"} if column == BLOCKS else super().get_hidden_columns(column)

    def build_clock(self) -> str:
        """Return the current time, not the transaction's start."""
        return self.build_microseconds("clock_timestamp()")

    def build_insert_if_absent(self, table: Table) -> Insert:
        """Use ON CONFLICT DO NOTHING."""
        return postgresql.insert(table).on_conflict_do_nothing()

    def notify(self, connection: Connection, channel: str, queues: Iterable[str]) -> None:
        """Send a notification for each queue."""
        for queue in sorted(queues):
            connection.execute(select(func.pg_notify(channel, queue)))

    def build_exact_sum(self, expression: str) -> str:
        """Sum bigints; PostgreSQL uses 128 bits."""
        return f"coalesce(sum(({expression})::bigint), 0)::text"

    def build_length(self, column: str) -> str:
        """Return the length as stored, uncompressed."""
        return f"octet_length({column})"

    def build_digest_sum(self, expression: str, *, text: bool) -> str:
        """Hash UTF-8, whatever the database's encoding."""
        bytes_ = f"convert_to({expression}, 'UTF8')" if text else expression
        return self.build_exact_sum(f"('x' || substr(md5({bytes_}), 1, 15))::bit(60)::bigint")

    def build_joined_text(self, expressions: Sequence[str]) -> str:
        """Join by casts to text."""
        texts = (f"coalesce('=' || ({expression})::text, '~')" for expression in expressions)
        return f"concat_ws('|', {', '.join(texts)})"

    def estimate_size(self, connection: Connection, name: str, schema: str | None) -> TableSize:
        """Return the size of the table with all partitions.

        Statistics of a partitioned table are kept for each partition; -1 means never analyzed.
        """
        rows, bytes_ = connection.exec_driver_sql(
            "SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint, "
            "coalesce(sum(pg_table_size(c.oid)), 0)::bigint "
            f"FROM pg_class c WHERE c.oid = {self._build_regclass(name, schema)} "
            "OR c.oid IN (SELECT relid FROM "
            f"pg_partition_tree({self._build_regclass(name, schema)}))"
        ).one()
        return TableSize(rows, bytes_)

    def _cut_range(self, connection: Connection, rows: TableRange, number: int) -> list[str]:
        """Return ranges of blocks, or of ids if the table is partitioned.

        A row's block is its position on disk, so ranges of blocks need no index. A partitioned
        table has no blocks of its own. Ranges of values are cut by ANALYZE's histogram, if any.
        """
        if rows.column == BLOCKS:
            kind, blocks = connection.exec_driver_sql(
                "SELECT relkind::text, "
                "pg_relation_size(oid) / current_setting('block_size')::bigint "
                f"FROM pg_class WHERE oid = {self._build_regclass(rows.name, rows.schema)}"
            ).one()
            if kind == "r":
                positions = [
                    f"'({cut},0)'::tid" for cut in compute_even_cuts(0, int(blocks), number)
                ]
                return build_ranges(self.quote(BLOCKS), positions)
            rows = replace(rows, column="id")
        cuts = self._read_histogram_cuts(connection, rows, number)
        return (
            self._build_ranges(rows, cuts) if cuts else super()._cut_range(connection, rows, number)
        )

    def _read_histogram_cuts(
        self, connection: Connection, rows: TableRange, number: int
    ) -> list[int]:
        """Return cuts of about equal row counts from ANALYZE's histogram.

        The histogram's bounds have equally many rows between them. The result is empty if it has
        too few values that match `where`; then the caller probes the table.
        """
        cast = "bigint" if rows.column == "id" else "timestamptz"
        name = self.quote(rows.column)
        value = name if rows.column == "id" else self.build_microseconds(name)
        values = connection.exec_driver_sql(
            f"SELECT {value} FROM (SELECT unnest(histogram_bounds::text::{cast}[]) AS {name} "
            "FROM pg_stats s "
            f"JOIN pg_class c ON c.oid = {self._build_regclass(rows.name, rows.schema)} "
            "JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = s.schemaname "
            f"WHERE s.tablename = c.relname AND s.attname = {self.format_text(rows.column)} "
            f"AND s.inherited = (c.relkind = 'p')) b WHERE {rows.where or 'true'} ORDER BY b.{name}"
        ).scalars()
        bounds = [int(bound) for bound in values]
        if len(bounds) <= number:
            return []
        return list(
            dict.fromkeys(bounds[cut] for cut in compute_even_cuts(0, len(bounds) - 1, number))
        )

    def _build_regclass(self, name: str, schema: str | None) -> str:
        """Return SQL for the table's OID; NULL if there is no such table."""
        return f"to_regclass({self.format_text(self.quote_table(name, schema))})"

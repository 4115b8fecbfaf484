"""Checksums over rows, computed alike by databases and Spark: equal sums mean equal rows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from operator import add, sub
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from sqlalchemy import Connection

from faststream_sqlbroker.core.times import MAX_TIMESTAMP, MIN_TIMESTAMP, TICK, from_microseconds
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.lake.windows import WINDOW_LENGTHS, ExportWindow, Span
from pyspark_sqlbroker.load.columns import ARCHIVE_FIELDS, Field
from pyspark_sqlbroker.load.selection import Selection

_DIGITS = "decimal(38,0)"


@dataclass(frozen=True)
class RowChecksums:
    """Sums over rows; the checksums of two sets without a common row can be added.

    Attributes:
        rows: Number of rows.
        ids: Sum of their ids.
        times: Sum of `archived_at` as microseconds since 1970.
        payload_bytes: Total size of the payloads; this and the next two are None for counts only.
        payloads: Sum of the first 60 bits of the MD5 of each payload.
        columns: The same sum of all other columns, joined to one text a row.
    """

    rows: int = 0
    ids: int = 0
    times: int = 0
    payload_bytes: int | None = None
    payloads: int | None = None
    columns: int | None = None

    def __add__(self, other: "RowChecksums") -> "RowChecksums":
        """Return the checksums of both sets of rows; a sum missing in either is None."""
        return self._combine(other, add)

    def __sub__(self, other: "RowChecksums") -> "RowChecksums":
        """Return the checksums without `other`, a subset; a sum missing in either is None."""
        return self._combine(other, sub)

    def _combine(
        self, other: "RowChecksums", calculate: Callable[[int, int], int]
    ) -> "RowChecksums":
        """Apply `calculate` to each pair of sums; a sum missing in either is None.

        Counts lack the sums of contents, which the database would have to read every byte for.
        """
        pairs = zip(astuple(self), astuple(other), strict=True)
        sums: list[Any] = [None if None in pair else calculate(*pair) for pair in pairs]
        return RowChecksums(*sums)

    @property
    def counts(self) -> "RowChecksums":
        """The checksums that are cheap for a database: counts and sums of ids and times."""
        return RowChecksums(self.rows, self.ids, self.times)

    def matches(self, other: "RowChecksums") -> bool:
        """Return True if all sums that both have are equal.

        A plain `==` would find counts different from full checksums of the same rows.
        """
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(
            first == second for first, second in pairs if first is not None and second is not None
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON; sums are text, because many JSON readers round large numbers."""
        return {
            name: value if name == "rows" else str(value)
            for name, value in asdict(self).items()
            if value is not None
        }

    def __str__(self) -> str:
        """Return the existing sums as text, for error messages."""
        return ", ".join(
            f"{name}={value}" for name, value in asdict(self).items() if value is not None
        )


NO_ROWS = RowChecksums(0, 0, 0, 0, 0, 0)
"""The checksums of no rows."""


def parse_checksums(values: Mapping[str, Any]) -> RowChecksums:
    """Parse the result of `RowChecksums.to_json`."""
    return RowChecksums(**{name: int(value) for name, value in values.items()})


def query_window_checksums(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    size: str,
    *,
    checksums: bool,
) -> dict[ExportWindow, RowChecksums]:
    """Query the checksums of each window with rows, by a single statement.

    Args:
        database: The database's dialect.
        connection: The connection to query; its snapshot, if it holds one, is used.
        selection: The rows.
        size: Length of a window, "day" or "hour".
        checksums: True for all sums, which reads every byte; False for the counts, which an index
            serves.
    """
    database.register_functions(connection)
    sums = build_checksum_expressions(database, checksums=checksums)
    columns = ", ".join([build_start_expression(database, size), *sums])
    rows = connection.exec_driver_sql(
        f"SELECT {columns} {selection.build_from_clause(database)} GROUP BY 1"
    )
    return _group_by_window(rows, size)


def build_start_expression(database: ArchiveDatabase, size: str) -> str:
    """Return SQL for the start of a row's window as microseconds since 1970.

    A row is in the window that contains its `archived_at`.
    """
    length = WINDOW_LENGTHS[size] // TICK  # in microseconds
    time = f"({database.build_microseconds(database.quote('archived_at'))})"
    # In SQL the remainder of a time before 1970 is negative, so add a length and divide again.
    return f"{time} - ({time} % {length} + {length}) % {length}"


def _group_by_window(rows: Iterable[Any], size: str) -> dict[ExportWindow, RowChecksums]:
    """Return the queried checksums by window; times outside of the years 1 to 9999 are omitted.

    A row has the start of a window in microseconds, then the sums in the order of `RowChecksums`.
    Python has no times outside of these years.
    """
    return {
        ExportWindow(from_microseconds(int(first)), size): RowChecksums(*map(int, values))
        for first, *values in rows
        if MIN_TIMESTAMP <= int(first) <= MAX_TIMESTAMP
    }


def count_windows(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    spans: Iterable[Span],
    size: str,
) -> dict[ExportWindow, RowChecksums]:
    """Count the rows of each window with rows, by a statement for each span.

    Only cheap sums are computed: counts, and sums of ids and times, which an index can serve.
    """
    counts = dict[ExportWindow, RowChecksums]()
    for span in spans:
        rows = selection.between(*span)
        counts |= query_window_checksums(database, connection, rows, size, checksums=False)
    return counts


def build_checksum_expressions(database: ArchiveDatabase, *, checksums: bool) -> list[str]:
    """Return the aggregates in SQL, in the order of `RowChecksums`.

    `build_checksum_columns` computes the same numbers in Spark. Without `checksums` only number,
    ids and times are summed, which an index can serve.
    """
    name = database.quote
    sums = [name("id"), database.build_microseconds(name("archived_at"))]
    aggregates = ["count(*)", *(database.build_exact_sum(value) for value in sums)]
    if checksums:
        payload = name("payload")
        joined = database.build_joined_text(
            [_build_source_value(database, field) for field in _get_other_fields()]
        )
        aggregates += [
            database.build_exact_sum(database.build_length(payload)),
            database.build_digest_sum(payload, text=False),
            database.build_digest_sum(joined, text=True),
        ]
    return aggregates


def compute_window_checksums(
    frame: DataFrame, size: str, *, checksums: bool
) -> dict[ExportWindow, RowChecksums]:
    """Compute the checksums of each window with rows in a DataFrame of `ARCHIVE_SCHEMA`, by one
    action.

    Rows without a time are in no window. With `checksums` the contents are read, too; otherwise
    rows are only counted, and their ids and times summed.
    """
    # Other programs may write rows without a time.
    timed = frame.where(F.col("archived_at").isNotNull())
    grouped = timed.groupBy(build_window_start(size).alias("w"))
    return _group_by_window(
        grouped.agg(*build_checksum_columns(checksums=checksums)).collect(), size
    )


def build_window_start(size: str) -> Column:
    """Return the start of a row's window as microseconds since 1970."""
    time = F.unix_micros("archived_at")
    return time - F.pmod(time, F.lit(WINDOW_LENGTHS[size] // TICK))


def build_checksum_columns(*, checksums: bool) -> list[Column]:
    """Return the aggregates in Spark, in the order of `RowChecksums`.

    `build_checksum_expressions` lets the database compute the same numbers.
    """
    aggregates = [F.count(F.lit(1)), _sum(F.col("id")), _sum(F.unix_micros("archived_at"))]
    if checksums:
        joined = F.concat_ws("|", *(_build_spark_value(field) for field in _get_other_fields()))
        payload = F.col("payload")
        aggregates += [
            _sum(F.octet_length(payload)),
            _digest_sum(payload),
            _digest_sum(joined.cast("binary")),
        ]
    return aggregates


def _get_other_fields() -> list[Field]:
    """Return the columns that the checksum of columns joins: all but the payload."""
    return [field for field in ARCHIVE_FIELDS if field.name != "payload"]


def _build_source_value(database: ArchiveDatabase, field: Field) -> str:
    """Return SQL for a column's value as used in the checksum of columns.

    Databases print times differently, so times are numbers there.
    """
    name = database.quote(field.name)
    return database.build_microseconds(name) if field.type == "timestamp" else name


def _build_spark_value(field: Field) -> Column:
    """Return a column's value as text, as rendered by `build_joined_text` of the databases.

    NULL and an empty text must differ: NULL becomes ~, other values follow an =.
    """
    column = F.col(field.name)
    value = F.unix_micros(column) if field.type == "timestamp" else column
    return F.coalesce(F.concat(F.lit("="), value.cast("string")), F.lit("~"))


def _sum(column: Column) -> Column:
    """Return an exact sum: a bigint would overflow."""
    return F.coalesce(F.sum(column.cast("decimal(20,0)")).cast(_DIGITS), F.lit(0).cast(_DIGITS))


def _digest_sum(column: Column) -> Column:
    """Return the sum of the first 60 bits of each MD5, as computed by the databases.

    A sum does not depend on the order of rows, so both sides can compare without sorting.
    """
    return _sum(F.conv(F.substring(F.md5(column), 1, 15), 16, 10))

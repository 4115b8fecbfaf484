"""Checksums over rows that a database and Spark compute alike: equal checksums mean equal rows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from operator import add, sub
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from sqlalchemy import Connection

from faststream_sqlbroker.core.times import FIRST_MOMENT, LAST_MOMENT, TICK, from_microseconds
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.lake.windows import LENGTHS, ExportWindow, Span
from pyspark_sqlbroker.load.columns import ARCHIVE_FIELDS, Field
from pyspark_sqlbroker.load.selection import Selection

_DIGITS = "decimal(38,0)"


@dataclass(frozen=True)
class RowChecksums:
    """Sums over rows; the figures of two sets without a common row can be added.

    Attributes:
        rows: How many.
        ids: Sum of their ids.
        times: Sum of `archived_at` as microseconds since 1970.
        payload_bytes: Of all payloads; None if only counts were asked for, as the next two.
        payloads: Sum of the first 60 bits of the MD5 of each payload.
        columns: The same of all other columns, joined to one text a row.
    """

    rows: int = 0
    ids: int = 0
    times: int = 0
    payload_bytes: int | None = None
    payloads: int | None = None
    columns: int | None = None

    def __add__(self, other: "RowChecksums") -> "RowChecksums":
        """Of both sets of rows; a sum that one of them lacks is None."""
        return self._combine(other, add)

    def __sub__(self, other: "RowChecksums") -> "RowChecksums":
        """Without `other`, a part of it; a sum that one of them lacks is None."""
        return self._combine(other, sub)

    def _combine(
        self, other: "RowChecksums", calculate: Callable[[int, int], int]
    ) -> "RowChecksums":
        pairs = zip(astuple(self), astuple(other), strict=True)
        sums: list[Any] = [None if None in pair else calculate(*pair) for pair in pairs]
        return RowChecksums(*sums)

    @property
    def counts(self) -> "RowChecksums":
        """The figures that a database gives cheaply: counts and sums of ids and times."""
        return RowChecksums(self.rows, self.ids, self.times)

    def matches(self, other: "RowChecksums") -> bool:
        """Whether all figures that both have are equal."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(one == two for one, two in pairs if one is not None and two is not None)

    def to_json(self) -> dict[str, Any]:
        """As JSON; sums are text, as they exceed the numbers that JSON readers keep exactly."""
        return {
            name: value if name == "rows" else str(value)
            for name, value in asdict(self).items()
            if value is not None
        }

    def __str__(self) -> str:
        return ", ".join(
            f"{name}={value}" for name, value in asdict(self).items() if value is not None
        )


NOTHING = RowChecksums(0, 0, 0, 0, 0, 0)
"""The figures of no rows."""


def from_json(values: Mapping[str, Any]) -> RowChecksums:
    """Read what `RowChecksums.to_json` has written."""
    return RowChecksums(**{name: int(value) for name, value in values.items()})


def ask_figures(
    database: ArchiveDatabase, connection: Connection, selection: Selection, *, checksums: bool
) -> RowChecksums:
    """The figures of the archive's selected rows, by one statement of the database.

    Args:
        database: Its words.
        connection: Whose snapshot, if it holds one, is asked.
        selection: Which rows.
        checksums: All figures, which reads every byte; False gives the counts, which an index
            serves.
    """
    database.prepare(connection)
    asked = ", ".join(asked_figures(database, checksums=checksums))
    row = connection.exec_driver_sql(f"SELECT {asked} {selection.from_clause(database)}").one()
    return RowChecksums(*(int(value) for value in row))


def ask_windows(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    size: str,
    *,
    checksums: bool,
) -> dict[ExportWindow, RowChecksums]:
    """The same for each window that has rows, by one statement for all of them."""
    database.prepare(connection)
    figures = asked_figures(database, checksums=checksums)
    asked = ", ".join([start_expression(database, size), *figures])
    rows = connection.exec_driver_sql(
        f"SELECT {asked} {selection.from_clause(database)} GROUP BY 1"
    )
    return _by_window(rows, size)


def start_expression(database: ArchiveDatabase, size: str) -> str:
    """SQL for the start of a row's window as microseconds since 1970."""
    length = LENGTHS[size] // TICK
    moment = f"({database.microseconds(database.quote('archived_at'))})"
    return f"{moment} - ({moment} % {length} + {length}) % {length}"


def _by_window(rows: Iterable[Any], size: str) -> dict[ExportWindow, RowChecksums]:
    """Figures by window; of times outside of the years 1 to 9999 there is none."""
    return {
        ExportWindow(from_microseconds(int(first)), size): RowChecksums(*map(int, values))
        for first, *values in rows
        if FIRST_MOMENT <= int(first) <= LAST_MOMENT
    }


def count_windows(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    spans: Iterable[Span],
    size: str,
) -> dict[ExportWindow, RowChecksums]:
    """The counts of each window of these spans that has rows, by one statement for each span."""
    counts = dict[ExportWindow, RowChecksums]()
    for span in spans:
        rows = selection.between(*span)
        counts |= ask_windows(database, connection, rows, size, checksums=False)
    return counts


def asked_figures(database: ArchiveDatabase, *, checksums: bool) -> list[str]:
    """What SQL aggregates, in the order of `RowChecksums`."""
    name = database.quote
    sums = [name("id"), database.microseconds(name("archived_at"))]
    asked = ["count(*)", *(database.exact_sum(one) for one in sums)]
    if checksums:
        payload = name("payload")
        joined = database.joined([_source(database, field) for field in _others()])
        asked += [
            database.exact_sum(database.length(payload)),
            database.digest_sum(payload, text=False),
            database.digest_sum(joined, text=True),
        ]
    return asked


def compute_windows(
    frame: DataFrame, size: str, *, checksums: bool
) -> dict[ExportWindow, RowChecksums]:
    """The same of a DataFrame of `ARCHIVE_SCHEMA`, for each window that has rows, by one action.

    Rows without a time are in no window.
    """
    timed = frame.where(F.col("archived_at").isNotNull())  # other programs may write others
    grouped = timed.groupBy(window_start(size).alias("w"))
    return _by_window(grouped.agg(*figure_columns(checksums=checksums)).collect(), size)


def window_start(size: str) -> Column:
    """The start of a row's window as microseconds since 1970."""
    moment = F.unix_micros("archived_at")
    return moment - F.pmod(moment, F.lit(LENGTHS[size] // TICK))


def figure_columns(*, checksums: bool) -> list[Column]:
    """What Spark aggregates, in the order of `RowChecksums`."""
    asked = [F.count(F.lit(1)), _sum(F.col("id")), _sum(F.unix_micros("archived_at"))]
    if checksums:
        joined = F.concat_ws("|", *(_spark(field) for field in _others()))
        payload = F.col("payload")
        asked += [
            _sum(F.octet_length(payload)),
            _digest_sum(payload),
            _digest_sum(joined.cast("binary")),
        ]
    return asked


def _others() -> list[Field]:
    return [field for field in ARCHIVE_FIELDS if field.name != "payload"]


def _source(database: ArchiveDatabase, field: Field) -> str:
    """A column's value as the checksum of columns takes it."""
    name = database.quote(field.name)
    return database.microseconds(name) if field.type == "timestamp" else name


def _spark(field: Field) -> Column:
    column = F.col(field.name)
    value = F.unix_micros(column) if field.type == "timestamp" else column
    return F.coalesce(F.concat(F.lit("="), value.cast("string")), F.lit("~"))


def _sum(column: Column) -> Column:
    return F.coalesce(F.sum(column.cast("decimal(20,0)")).cast(_DIGITS), F.lit(0).cast(_DIGITS))


def _digest_sum(column: Column) -> Column:
    return _sum(F.conv(F.substring(F.md5(column), 1, 15), 16, 10))

"""Rows in the order in which they were archived, a page at a time; no statement outlasts a page."""

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.load.selection import Selection
from pyspark_sqlbroker.moments import TimeInput, parse_time

BATCH_BYTES = 8 << 20
"""A batch ends with the row that reaches this size."""


@dataclass(frozen=True, order=True)
class ArchivePosition:
    """A position between two rows of the archive.

    Attributes:
        time: Rows archived before this time are before the position.
        id: So are rows of the same time up to this id; 0 means no row of that time.
    """

    time: datetime
    id: int = 0

    def __str__(self) -> str:
        """Return the text that `parse_position` reads."""
        time = self.time.isoformat(timespec="microseconds")
        return f"{time}/{self.id}" if self.id else time

    def build_later_condition(self, database: ArchiveDatabase, time_column: str) -> str:
        """Return the condition on the rows after the position.

        The redundant bound on the time alone lets the database use an index.
        """
        bound = database.format_time(self.time)
        if not self.id:
            return f"{time_column} >= {bound}"
        return (
            f"{time_column} >= {bound} AND ({time_column} > {bound} OR {database.quote('id')} "
            f"> {self.id})"
        )

    def build_earlier_condition(self, database: ArchiveDatabase, time_column: str) -> str:
        """Return the condition on the rows before the position, as SQL.

        The redundant bound on the time alone lets the database use an index.
        """
        bound = database.format_time(self.time)
        return (
            f"{time_column} <= {bound} AND ({time_column} < {bound} OR {database.quote('id')} "
            f"<= {self.id})"
        )


def parse_position(name: str, value: TimeInput | None) -> ArchivePosition | None:
    """Parse the text of a position, or a time; None stays None.

    The text of a position is a time, or a time and an id after a slash. A reader returns it as its
    watermark, from which a later reader continues.

    Raises:
        SetupError: the value is neither.
    """
    text, slash, number = value.partition("/") if isinstance(value, str) else (value, "", "")
    if slash and not (number.isascii() and number.isdecimal()):
        raise SetupError(
            f"{name} must be the watermark of a reader, a datetime with a time zone, a date, or "
            f"either as ISO 8601 text, got {value!r}"
        )
    time = parse_time(name, text)
    return None if time is None else ArchivePosition(time, int(number or 0))


@dataclass(frozen=True)
class ArchivePage:
    """Some rows of the archive.

    Attributes:
        rows: Values of the selection's fields; times as microseconds.
        end: The position after the last row.
        is_last: True if no row of the selection comes after.
    """

    rows: list[Any]
    end: ArchivePosition
    is_last: bool


def read_page(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    start: ArchivePosition | None,
    limit: int,
) -> ArchivePage | None:
    """Read the first selected rows after `start`; None if there are none.

    A page has at most `limit` rows, and few bytes more than `BATCH_BYTES` and one row. Two
    statements read it, and rows that are deleted between them are left out.

    Args:
        database: The database to read from.
        connection: A connection to it.
        selection: Its since is in year 1 or later, its until a time that the horizon has passed.
        start: None starts before the oldest row.
        limit: Maximum number of rows. The length of each row is read, for which MySQL and MariaDB
            read long bodies completely.
    """
    connection = connection.execution_options(no_parameters=True)
    time = database.quote(selection.time_column)
    values = [database.build_value(field) for field in selection.fields]
    source = selection.build_from_clause(database)
    if start is not None:
        source += f" AND {start.build_later_condition(database, time)}"
    order = f"ORDER BY {time}, {database.quote('id')}"
    sizes = [
        f"COALESCE({database.build_length(value)}, 0)"
        for field, value in zip(selection.fields, values, strict=True)
        if field.type in ("string", "binary")
    ]
    # Read the lengths first, separately: drivers fetch all rows of a statement at once.
    lengths = connection.exec_driver_sql(
        f"SELECT {database.build_microseconds(time)}, {database.quote('id')}, {' + '.join(sizes)} "
        f"{source} {order} LIMIT {limit}"
    ).all()
    if not lengths:
        return None
    size = 0
    count = 0
    for *_, length in lengths:
        count += 1
        size += int(length) + 8 * len(values)
        if size >= BATCH_BYTES:
            break
    last_time, last_id, _ = lengths[count - 1]
    # SQLite's column takes fractions, too. Round up, as a position before its own row would never
    # get past that row.
    end = ArchivePosition(from_microseconds(math.ceil(last_time)), int(last_id))
    rows = connection.exec_driver_sql(
        f"SELECT {', '.join(values)} {source} AND {end.build_earlier_condition(database, time)} "
        f"{order}"
    ).all()
    return ArchivePage(list(rows), end, is_last=count == len(lengths) < limit)

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
from pyspark_sqlbroker.moments import Moment, parse_moment

BATCH_BYTES = 8 << 20
"""A batch ends with the row that reaches this."""


@dataclass(frozen=True, order=True)
class Position:
    """Between two rows of the archive.

    Attributes:
        moment: Rows that were archived before it lie behind.
        id: So do those of the same moment up to this id; 0 is none of them.
    """

    moment: datetime
    id: int = 0

    def __str__(self) -> str:
        """The text that `parse_position` reads."""
        moment = self.moment.isoformat(timespec="microseconds")
        return f"{moment}/{self.id}" if self.id else moment

    def select_later_rows(self, database: ArchiveDatabase, time: str) -> str:
        """Give the condition on the rows that lie ahead; an index on the time serves it."""
        moment = database.moment(self.moment)
        if not self.id:
            return f"{time} >= {moment}"
        return f"{time} >= {moment} AND ({time} > {moment} OR {database.quote('id')} > {self.id})"

    def select_earlier_rows(self, database: ArchiveDatabase, time: str) -> str:
        """Give the condition on the other rows."""
        moment = database.moment(self.moment)
        return f"{time} <= {moment} AND ({time} < {moment} OR {database.quote('id')} <= {self.id})"


def parse_position(name: str, value: Moment | None) -> Position | None:
    """The position that a text, or a moment, names.

    Raises:
        SetupError: it is neither.
    """
    text, slash, number = value.partition("/") if isinstance(value, str) else (value, "", "")
    if slash and not (number.isascii() and number.isdecimal()):
        raise SetupError(
            f"{name} {value!r} is no watermark: give the text that a reader had, a datetime with a "
            "time zone, a date, or either as ISO 8601 text"
        )
    moment = parse_moment(name, text)
    return None if moment is None else Position(moment, int(number or 0))


@dataclass(frozen=True)
class Page:
    """Some rows.

    Attributes:
        rows: With the values of the selection's fields; times as microseconds.
        end: Behind the last of them.
        is_last: No row of the selection lies ahead.
    """

    rows: list[Any]
    end: Position
    is_last: bool


def read_page(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    start: Position | None,
    most: int,
) -> Page | None:
    """Read the selected rows that come first after `start`; None if there are none.

    It has `most` rows at most, and few bytes more than `BATCH_BYTES` and one row. Two statements
    read it, and rows that are deleted between them are left out.

    Args:
        database: Of the rows.
        connection: To it.
        selection: From `FIRST` or later `until` a moment that the horizon has passed.
        start: None is before the oldest.
        most: Rows. The length of each is read, for which MySQL and MariaDB read long bodies whole.
    """
    connection = connection.execution_options(no_parameters=True)
    time = database.quote(selection.time_column)
    values = [database.value(field) for field in selection.fields]
    source = selection.from_clause(database)
    if start is not None:
        source += f" AND {start.select_later_rows(database, time)}"
    order = f"ORDER BY {time}, {database.quote('id')}"
    sizes = [
        f"COALESCE({database.length(value)}, 0)"
        for field, value in zip(selection.fields, values, strict=True)
        if field.type in ("string", "binary")
    ]
    # The lengths come first, by themselves: drivers fetch all rows of a statement at once.
    lengths = connection.exec_driver_sql(
        f"SELECT {database.microseconds(time)}, {database.quote('id')}, {' + '.join(sizes)} "
        f"{source} {order} LIMIT {most}"
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
    moment, number, _ = lengths[count - 1]
    # SQLite's column takes fractions, too; a position before its own row would never get past it.
    end = Position(from_microseconds(math.ceil(moment)), int(number))
    rows = connection.exec_driver_sql(
        f"SELECT {', '.join(values)} {source} AND {end.select_earlier_rows(database, time)} {order}"
    ).all()
    return Page(list(rows), end, is_last=count == len(lengths) < most)

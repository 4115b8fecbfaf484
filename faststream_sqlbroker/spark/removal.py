"""Rows of the archive removed in small transactions, each row by its id."""

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from faststream_sqlbroker.core.moments import from_microseconds, to_microseconds
from faststream_sqlbroker.spark.databases import Database
from faststream_sqlbroker.spark.figures import Figures
from faststream_sqlbroker.spark.selection import Selection

CHUNK = 5_000
"""Rows a transaction: milliseconds each, so nobody waits for them."""


@dataclass(frozen=True)
class Rows:
    """Which rows there were at one moment, in the order of `archived_at`; 16 bytes each.

    Attributes:
        ids: Their ids.
        times: Their `archived_at` as microseconds since 1970.
    """

    ids: "array[int]"
    times: "array[int]"

    @property
    def figures(self) -> Figures:
        """Their counts."""
        return Figures(len(self.ids), sum(self.ids), sum(self.times))

    def between(self, start: datetime, end: datetime) -> "Rows":
        """Those of a time."""
        first = bisect_left(self.times, to_microseconds(start))
        last = bisect_left(self.times, to_microseconds(end))
        return Rows(self.ids[first:last], self.times[first:last])


def list_rows(
    database: Database, connection: Connection, selection: Selection, limit: int | None = None
) -> Rows:
    """The selected rows, or the oldest of them."""
    where = selection.where(database)
    id_, time = database.quote("id"), database.quote("archived_at")
    found = connection.exec_driver_sql(
        f"SELECT {id_}, {database.microseconds(time)} FROM {selection.name(database)}"
        f"{f' WHERE {where}' if where else ''} ORDER BY {time}, {id_}"
        f"{'' if limit is None else f' LIMIT {limit}'}"
    )
    rows = Rows(array("q"), array("q"))
    for number, moment in found:
        rows.ids.append(number)
        rows.times.append(moment)
    return rows


def delete_rows(database: Database, connection: Connection, selection: Selection, rows: Rows) -> int:
    """Remove exactly `rows`; what has come since stays. Returns how many were still there."""
    gone = 0
    time = database.quote("archived_at")
    for first in range(0, len(rows.ids), CHUNK):
        ids, times = rows.ids[first : first + CHUNK], rows.times[first : first + CHUNK]
        low, high = (database.moment(from_microseconds(moment)) for moment in (times[0], times[-1]))
        deleted = connection.exec_driver_sql(
            f"DELETE FROM {selection.name(database)} WHERE {time} >= {low} AND {time} <= {high} "
            f"AND {database.quote('id')} IN ({', '.join(map(str, ids))})"
        )
        gone += deleted.rowcount
    return gone

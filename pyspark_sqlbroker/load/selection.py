"""Which rows of which table to read: conditions shared by JDBC, checks and the data source.

A state on disk belongs to such rows of one database: one of other rows is refused.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.core.states import ARCHIVED_STATES, LIVE_STATES, MessageState
from faststream_sqlbroker.core.times import TICK, from_microseconds
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.config import check_name
from pyspark_sqlbroker.address import Address
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.databases.base import BLOCKS, TableRange
from pyspark_sqlbroker.load.columns import ARCHIVE_FIELDS, MESSAGE_FIELDS, Field
from pyspark_sqlbroker.moments import FIRST, Moment, parse_moment


@dataclass(frozen=True)
class Selection:
    """Rows of a table.

    Attributes:
        table: Its name.
        schema: Its schema; None is the connection's.
        fields: Its columns.
        time_column: What since and until are about.
        since: First moment of `time_column`; None is the oldest.
        until: First moment that does not belong; None has no end.
        queues: Only these; None is all.
        states: Only these; None is all.
        conditions: SQL that holds for all of them, too.
    """

    table: str
    schema: str | None
    fields: tuple[Field, ...]
    time_column: str
    since: datetime | None = None
    until: datetime | None = None
    queues: tuple[str, ...] | None = None
    states: tuple[str, ...] | None = None
    conditions: tuple[str, ...] = ()

    def between(self, since: datetime | None, until: datetime | None) -> "Selection":
        """The same rows of other times."""
        return replace(self, since=since, until=until)

    def name(self, database: ArchiveDatabase) -> str:
        """The table's quoted name."""
        return database.table(self.table, self.schema)

    def times(self, database: ArchiveDatabase) -> str:
        """The condition on the time as SQL; "" for any."""
        time = database.quote(self.time_column)
        conditions = []
        if self.since is not None:
            conditions.append(f"{time} >= {database.moment(self.since)}")
        if self.until is not None:
            conditions.append(f"{time} < {database.moment(self.until)}")
        return " AND ".join(conditions)

    def where(self, database: ArchiveDatabase) -> str:
        """The whole condition as SQL; "" for every row."""
        conditions = [times] if (times := self.times(database)) else []
        for name, values in (("queue", self.queues), ("state", self.states)):
            if values is not None:
                conditions.append(database.among(name, values) if values else "1=0")
        conditions += [f"({condition})" for condition in self.conditions]
        return " AND ".join(conditions)

    def from_clause(self, database: ArchiveDatabase) -> str:
        """FROM, and WHERE if there is a condition."""
        condition = self.where(database)
        return f"FROM {self.name(database)}{f' WHERE {condition}' if condition else ''}"

    def subquery(self, database: ArchiveDatabase, names: Collection[str], column: str) -> str:
        """The rows with the columns of these names, and with what conditions on `column` need, as
        `cut_by` takes it.
        """
        listed = [database.column(field) for field in self.fields if field.name in names]
        listed += [
            f"{value} AS {database.quote(name)}" for name, value in database.hidden(column).items()
        ]
        return f"(SELECT {', '.join(listed)} {self.from_clause(database)}) q"

    def range_column(self, *, in_snapshot: bool = False) -> str:
        """Choose what to cut the rows by, so that each message is in one range only.

        Its id stays while others move it (by an update, or a redrive and its undo); its place in
        the table does not, and its time may become one of a later range while the window is open.

        Args:
            in_snapshot: Whether all ranges are read from one snapshot, in which nothing moves.
        """
        is_closed = in_snapshot or self.until is not None
        if is_closed and self.since is not None and self.time_column == "archived_at":
            return "archived_at"
        return BLOCKS if in_snapshot else "id"

    def cut_by(self, database: ArchiveDatabase, column: str) -> TableRange:
        """The rows, to be cut into ranges of "id" or "archived_at", or of `BLOCKS`."""
        where = self.times(database) if column == "archived_at" else ""
        return TableRange(self.table, self.schema, column, where)

    def closed(self, database: ArchiveDatabase, connection: Connection) -> "Selection":
        """The rows that are older than now, by the database's clock."""
        end = database.now(connection) + TICK
        return self.between(self.since, end if self.until is None else min(end, self.until))


@dataclass(frozen=True)
class Layout:
    """One of the broker's tables as readers see it.

    Attributes:
        table: Its usual name.
        fields: Its columns.
        time_column: What since and until are about.
        states: What its rows can be in.
    """

    table: str
    fields: tuple[Field, ...]
    time_column: str
    states: frozenset[MessageState]


ARCHIVE = Layout("message_archive", ARCHIVE_FIELDS, "archived_at", ARCHIVED_STATES)
MESSAGES = Layout("message", MESSAGE_FIELDS, "created_at", LIVE_STATES)


def select_rows(
    layout: Layout,
    table: str | None = None,
    schema: str | None = None,
    *,
    since: Moment | None = None,
    until: Moment | None = None,
    queues: Iterable[str] | None = None,
    states: Iterable[str | MessageState] | None = None,
) -> Selection:
    """Rows of a table of this layout; `table` is its name if it is not the usual one.

    Raises:
        SetupError: a name, moment, queue or state that cannot be.
    """
    table = layout.table if table is None else table
    check_name("table", table)
    if schema is not None:
        check_name("schema", schema)
    first = parse_moment("since", since)
    end = parse_moment("until", until)
    if first is not None and end is not None and end < first:
        raise SetupError(
            f"until ({end.isoformat()}) is before since ({first.isoformat()}): swap them"
        )
    named = _names(queues), _states(states, layout.states)
    return Selection(table, schema, layout.fields, layout.time_column, first, end, *named)


def find_oldest(
    database: ArchiveDatabase, connection: Connection, selection: Selection
) -> datetime | None:
    """The time of the oldest selected row of a year from 1 on; None if there is none."""
    known = selection.between(selection.since or FIRST, selection.until)
    # An index knows the least time; it would not know the least result of a function.
    oldest = database.microseconds(f"min({database.quote(selection.time_column)})")
    found = database.scalar(connection, f"SELECT {oldest} {known.from_clause(database)}")
    return None if found is None else from_microseconds(int(found))


def _names(queues: Iterable[str] | None) -> tuple[str, ...] | None:
    if queues is None:
        return None
    named = (queues,) if isinstance(queues, str) else tuple(queues)
    for queue in named:
        if not isinstance(queue, str):
            raise SetupError(f"queues holds {queue!r}: names of queues are texts")
    return named


def _states(
    states: Iterable[str | MessageState] | None, allowed: frozenset[MessageState]
) -> tuple[str, ...] | None:
    if states is None:
        return None
    known = {state.name: state for state in MessageState if state in allowed}
    found = []
    for state in (states,) if isinstance(states, str) else tuple(states):
        name = state.name if isinstance(state, MessageState) else str(state).upper()
        if name not in known:
            raise SetupError(f"states holds {state!r}: this table has {', '.join(known)}")
        found.append(name)
    return tuple(found)


def describe_source(address: Address, selection: Selection, name: str | None) -> dict[str, Any]:
    """Which rows of which table, without user and password.

    Args:
        address: Of the database.
        selection: Its times do not count.
        name: In place of host, port and database.
    """
    url = address.python_url
    place = address.database
    if address.kind != "sqlite":
        place = f"{url.host}:{url.port}/{place}"
    return {
        "kind": address.kind,
        "database": name or place,
        "schema": selection.schema,
        "table": selection.table,
        "queues": None if selection.queues is None else sorted(set(selection.queues)),
        "states": None if selection.states is None else sorted(set(selection.states)),
    }


def refuse_other_rows(
    what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], advice: str
) -> None:
    """Check that what is on disk is of the rows that are asked for.

    Args:
        what: Is on disk, with its path.
        theirs: The source that it has recorded.
        ours: The source that is asked for.
        advice: What to do where they differ.

    Raises:
        SetupError: they differ.
    """
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise SetupError(
                f"{what} of other rows: its {key} is {theirs.get(key)!r} and here it is {value!r}; "
                f"{advice} (and source= where one database has several addresses)"
            )

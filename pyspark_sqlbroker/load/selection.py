"""The selected rows of a table: conditions shared by JDBC, checks and the data source.

A state on disk belongs to the selected rows of one database; a state of other rows is refused.
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
from pyspark_sqlbroker.moments import MIN_TIME, TimeInput, parse_time


@dataclass(frozen=True)
class Selection:
    """Selected rows of a table.

    Attributes:
        table: Its name.
        schema: Its schema; None is the connection's.
        fields: Its columns.
        time_column: The column that `since` and `until` apply to.
        since: First time of `time_column`; None is the oldest.
        until: First time that does not belong; None has no end.
        queues: Only these; None is all.
        states: Only these; None is all.
        conditions: More SQL conditions on the rows.
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
        """Return the same rows of other times."""
        return replace(self, since=since, until=until)

    def get_table_name(self, database: ArchiveDatabase) -> str:
        """Return the quoted name of the table."""
        return database.quote_table(self.table, self.schema)

    def build_time_condition(self, database: ArchiveDatabase) -> str:
        """Return the condition on the time as SQL; "" for any."""
        time = database.quote(self.time_column)
        conditions = []
        if self.since is not None:
            conditions.append(f"{time} >= {database.format_time(self.since)}")
        if self.until is not None:
            conditions.append(f"{time} < {database.format_time(self.until)}")
        return " AND ".join(conditions)

    def build_condition(self, database: ArchiveDatabase) -> str:
        """Return the complete condition as SQL; "" for every row."""
        conditions = [times] if (times := self.build_time_condition(database)) else []
        for name, values in (("queue", self.queues), ("state", self.states)):
            if values is not None:
                # An empty list selects no row, and SQL has no empty IN.
                conditions.append(database.build_in_condition(name, values) if values else "1=0")
        conditions += [f"({condition})" for condition in self.conditions]
        return " AND ".join(conditions)

    def build_from_clause(self, database: ArchiveDatabase) -> str:
        """Return FROM, and WHERE if there is a condition."""
        condition = self.build_condition(database)
        return f"FROM {self.get_table_name(database)}{f' WHERE {condition}' if condition else ''}"

    def build_subquery(self, database: ArchiveDatabase, names: Collection[str], column: str) -> str:
        """Return the selected rows as SQL, with the named columns and the columns that ranges need.

        Tasks read such a subquery, each with a range of `column` as its condition. A range may need
        a hidden column, such as the unconverted time, which an index serves.
        """
        columns = [
            database.build_jdbc_column(field) for field in self.fields if field.name in names
        ]
        columns += [
            f"{value} AS {database.quote(name)}"
            for name, value in database.get_hidden_columns(column).items()
        ]
        return f"(SELECT {', '.join(columns)} {self.build_from_clause(database)}) q"

    def choose_range_column(self, *, in_snapshot: bool = False) -> str:
        """Choose the column to cut the rows by, so that each message is in one range exactly.

        Ranges are read at different times, by different tasks. The id of a row stays while others
        move the row (by an update, or a redrive and its undo). Its position in the table does not,
        and its time may move to a later range while the window is open.

        Args:
            in_snapshot: True if all ranges are read from one snapshot, in which no row moves.
        """
        is_closed = in_snapshot or self.until is not None
        if is_closed and self.since is not None and self.time_column == "archived_at":
            return "archived_at"
        return BLOCKS if in_snapshot else "id"

    def build_table_range(self, database: ArchiveDatabase, column: str) -> TableRange:
        """Return the rows, to be cut into ranges of "id" or "archived_at", or of `BLOCKS`.

        Each range becomes a task of Spark. For the cuts the selected times count only if the ranges
        are of times; the subquery applies them always.
        """
        where = self.build_time_condition(database) if column == "archived_at" else ""
        return TableRange(self.table, self.schema, column, where)

    def end_now(self, database: ArchiveDatabase, connection: Connection) -> "Selection":
        """Return the rows that are older than now, by the database's clock.

        A later action on the same DataFrame then reads no newer rows.
        """
        end = database.get_time(connection) + TICK
        return self.between(self.since, end if self.until is None else min(end, self.until))


@dataclass(frozen=True)
class Layout:
    """A table of the broker, as seen by readers.

    Attributes:
        table: Its usual name.
        fields: Its columns.
        time_column: The column that `since` and `until` apply to.
        states: The states of its rows.
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
    since: TimeInput | None = None,
    until: TimeInput | None = None,
    queues: Iterable[str] | None = None,
    states: Iterable[str | MessageState] | None = None,
) -> Selection:
    """Select rows of a table of this layout, called `table` or the usual name.

    A layout is that of the archive or of the live table. Nothing is queried: the selection holds
    checked conditions, from which each reader builds its SQL.

    Raises:
        SetupError: a name, time, queue or state is invalid.
    """
    table = layout.table if table is None else table
    check_name("table", table)
    if schema is not None:
        check_name("schema", schema)
    first = parse_time("since", since)
    end = parse_time("until", until)
    if first is not None and end is not None and end < first:
        raise SetupError(
            f"until ({end.isoformat()}) is before since ({first.isoformat()}): swap them"
        )
    filters = _parse_queues(queues), _parse_states(states, layout.states)
    return Selection(table, schema, layout.fields, layout.time_column, first, end, *filters)


def find_oldest(
    database: ArchiveDatabase, connection: Connection, selection: Selection
) -> datetime | None:
    """Return the time of the oldest selected row from year 1 on; None if there is none.

    Python has no earlier times, while databases accept them.
    """
    dated = selection.between(selection.since or MIN_TIME, selection.until)
    # An index provides the minimum of the column, but not of a function's results.
    oldest = database.build_microseconds(f"min({database.quote(selection.time_column)})")
    oldest_microseconds = database.fetch_scalar(
        connection, f"SELECT {oldest} {dated.build_from_clause(database)}"
    )
    return None if oldest_microseconds is None else from_microseconds(int(oldest_microseconds))


def _parse_queues(queues: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the queues as a tuple, from any iterable or a single name; None selects all."""
    if queues is None:
        return None
    names = (queues,) if isinstance(queues, str) else tuple(queues)
    for queue in names:
        if not isinstance(queue, str):
            raise SetupError(f"queues must contain only strings, got {queue!r}")
    return names


def _parse_states(
    states: Iterable[str | MessageState] | None, allowed: frozenset[MessageState]
) -> tuple[str, ...] | None:
    """Return the names of the states, given in any case of letters; None selects all."""
    if states is None:
        return None
    allowed_names = {state.name: state for state in MessageState if state in allowed}
    names = []
    for state in (states,) if isinstance(states, str) else tuple(states):
        name = state.name if isinstance(state, MessageState) else str(state).upper()
        if name not in allowed_names:
            raise SetupError(f"states must contain only {', '.join(allowed_names)}, got {state!r}")
        names.append(name)
    return tuple(names)


def describe_source(address: Address, selection: Selection, name: str | None) -> dict[str, Any]:
    """Describe the selected rows of a table, without user and password.

    A state on disk keeps the description, and `check_same_source` refuses a state of other rows.

    Args:
        address: Address of the database.
        selection: Its times do not matter.
        name: Replaces host, port and database, where the database has several addresses.
    """
    url = address.python_url
    location = address.database
    if address.kind != "sqlite":
        location = f"{url.host}:{url.port}/{location}"
    return {
        "kind": address.kind,
        "database": name or location,
        "schema": selection.schema,
        "table": selection.table,
        "queues": None if selection.queues is None else sorted(set(selection.queues)),
        "states": None if selection.states is None else sorted(set(selection.states)),
    }


def check_same_source(
    subject: str, recorded: Mapping[str, Any], requested: Mapping[str, Any], hint: str
) -> None:
    """Check that a state on disk belongs to the requested rows.

    Args:
        subject: Description of the state, with its path.
        recorded: The source recorded in the state.
        requested: The requested source.
        hint: What the user should do if the sources differ.

    Raises:
        SetupError: the sources differ.
    """
    for key, value in requested.items():
        if recorded.get(key) != value:
            raise SetupError(
                f"{subject} of other rows: its {key} is {recorded.get(key)!r}, but {value!r} was "
                f"requested; {hint} (set source= if the database has several addresses)"
            )

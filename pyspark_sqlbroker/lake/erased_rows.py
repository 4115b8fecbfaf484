"""Remove the rows of some messages from the live table and the archive, and leave an audit."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Table, delete, insert, null, or_, select, update
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.jobs import Job, job_info
from faststream_sqlbroker.core.loaded_windows import LOADED, RowSum, window_of
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.schema.tables import Tables
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.lake.row_checksums import RowChecksums
from pyspark_sqlbroker.lake.windows import ExportWindow, floor

CHUNK = 500
"""Ids or keys in one statement."""

_AUDIT = "job"
"""Scope of operators' actions in the policy state: what `sqlbroker audit` lists."""
_AUDIT_KEPT = timedelta(days=365)
"""As long as every other action."""


@dataclass(frozen=True)
class Wanted:
    """Which messages are meant.

    Attributes:
        ids: Of messages.
        keys: Of messages, or what policies work on in place of a key.
        origins: Ids of messages of which replays have made copies: the copies are meant.
    """

    ids: frozenset[int] = frozenset()
    keys: frozenset[str] = frozenset()
    origins: frozenset[int] = frozenset()

    def conditions(self, table: Table) -> Iterator[Any]:
        """Conditions of which one holds for each row that is meant, of bounded length."""
        for ids in _chunks(sorted(self.ids)):
            yield table.c.id.in_(ids)
        for keys in _chunks(sorted(self.keys)):
            yield or_(table.c.key.in_(keys), table.c.policy_key.in_(keys))
        for origins in _chunks(sorted(self.origins)):
            yield table.c.origin_id.in_(origins)


@dataclass
class Found:
    """Rows of the database.

    Attributes:
        waiting: Ids of live messages without a lease.
        leased: Ids of those that are leased.
        archived: Id and `archived_at` of each row of the archive.
    """

    waiting: set[int] = field(default_factory=set)
    leased: set[int] = field(default_factory=set)
    archived: set[tuple[int, datetime]] = field(default_factory=set)

    @property
    def ids(self) -> frozenset[int]:
        """Of all of them."""
        return frozenset(self.waiting | self.leased | {one for one, _ in self.archived})

    def by_window(self, size: str) -> dict[ExportWindow, RowChecksums]:
        """Counts of the archive's rows in each window."""
        figures = dict[ExportWindow, RowChecksums]()
        for number, moment in self.archived:
            window = ExportWindow(floor(moment, size), size)
            one = RowChecksums(1, number, to_microseconds(moment))
            figures[window] = figures.get(window, RowChecksums()) + one
        return figures


def find_rows(connection: Connection, tables: Tables, wanted: Wanted) -> Found:
    """Look for the rows that are meant."""
    found = Found()
    live = tables.message
    with _without_values():
        for condition in wanted.conditions(live):
            for number, state in connection.execute(
                select(live.c.id, live.c.state).where(condition)
            ):
                leased = state == MessageState.PROCESSING.name
                (found.leased if leased else found.waiting).add(number)
        if (archive := tables.archive) is not None:
            columns = archive.c.id, archive.c.archived_at
            for condition in wanted.conditions(archive):
                rows = connection.execute(select(*columns).where(condition))
                found.archived |= {(number, moment) for number, moment in rows}
    return found


def remove_rows(connection: Connection, tables: Tables, wanted: Wanted) -> tuple[int, Found]:
    """Remove live rows that are not leased, then rows of the archive.

    A message that ends in between goes from the archive; one that is claimed in between stays. What
    a replay copies until the last of them is gone goes, too.

    Returns:
        How many live rows were removed, and what was found of the archive and is leased.
    """
    live = tables.message
    waiting = 0
    removed = set[tuple[int, datetime]]()
    while True:
        with _without_values():
            for condition in wanted.conditions(live):
                # The state is looked at again under the row's lock.
                rest = live.c.state != MessageState.PROCESSING.name
                waiting += connection.execute(delete(live).where(condition, rest)).rowcount
            # After the live rows: a message that ended in between is in the archive now.
            found = find_rows(connection, tables, wanted)
            if (archive := tables.archive) is not None:
                for pairs in _chunks(sorted(found.archived)):
                    ids = [number for number, _ in pairs]
                    times = [moment for _, moment in pairs]
                    # Of a partitioned archive only the partitions of these times are visited.
                    between = archive.c.archived_at.between(min(times), max(times))
                    connection.execute(delete(archive).where(archive.c.id.in_(ids), between))
        removed |= found.archived
        known = wanted.ids | found.ids
        copies = find_rows(connection, tables, Wanted(origins=known)).ids
        if copies <= known:
            return waiting, replace(found, archived=removed)
        wanted = replace(wanted, ids=known | copies)


def lower_records(
    connection: Connection, table: Table, lake_id: str, removed: Mapping[ExportWindow, RowChecksums]
) -> None:
    """Take removed rows off the lake's records of windows, so that retention finds them equal.

    A record that has changed since it was read, or differs, is left: the next export makes it anew.
    """
    by_name = {window.name: RowSum(one.rows, one.ids) for window, one in removed.items()}
    c = table.c
    for names in _chunks(sorted(by_name)):
        after = LOADED[:-1] + chr(ord(LOADED[-1]) + 1)
        asked = select(c.scope, c.key, c.info, c.counter).where(
            c.scope >= LOADED, c.scope < after, c.key.in_(names)
        )
        for scope, *row in connection.execute(asked).all():
            known = window_of(*row)
            if known.lake_id != lake_id:
                continue
            left = known.left - by_name[known.name]
            lowered = replace(known, left=left, version=known.version + 1)
            values: dict[str, Any] = {"info": lowered.info(), "counter": lowered.version}
            if not left.rows:
                values["due_at"] = null()
            same = (c.scope == scope, c.key == known.name, c.counter == known.version)
            connection.execute(update(table).where(*same).values(**values))


class Audit:
    """The record of one erasure, for `sqlbroker audit`; it holds no id and no key."""

    def __init__(
        self, database: ArchiveDatabase, connection: Connection, table: Table, by: str
    ) -> None:
        """Nothing is written before `begin`."""
        self._database = database
        self._connection = connection
        self._table = table
        self._job = Job(action="erase", by=by, state="running")
        self.id = ""

    def begin(self, expected: int, path: str | None) -> None:
        """Write it before the first row is removed; it stays "running" if the process dies."""
        now = self._database.now(self._connection)
        self.id = f"{now:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(2)}"
        arguments = {} if path is None else {"lake": path}
        self._job = replace(self._job, expected=expected, arguments=arguments)
        values = {"created_at": now, "expires_at": now + _AUDIT_KEPT, "due_at": null()}
        self._connection.execute(
            insert(self._table).values(
                scope=_AUDIT, key=self.id, info=job_info(self._job), **values
            )
        )

    def end(self, counts: Mapping[str, int], leased: int) -> None:
        """Note what was removed."""
        arguments = {**self._job.arguments, **counts}
        done = sum(counts.values())
        now = self._database.now(self._connection)
        ended = replace(
            self._job, state="ended", done=done, skipped=leased, arguments=arguments, ended_at=now
        )
        c = self._table.c
        self._connection.execute(
            update(self._table)
            .where(c.scope == _AUDIT, c.key == self.id)
            .values(info=job_info(ended))
        )


def _chunks(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(values), CHUNK):
        yield values[first : first + CHUNK]


@contextmanager
def _without_values() -> Iterator[None]:
    """Errors of the database without the keys that the statement had."""
    try:
        yield
    except DBAPIError as error:
        raise StoreError(f"the database answered: {error.orig}") from None

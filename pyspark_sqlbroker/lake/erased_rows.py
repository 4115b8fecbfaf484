"""Remove rows of messages from the live table and the archive, and write an audit record."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, insert, null, or_, select, update
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.bulk_jobs import Job, dump_job
from faststream_sqlbroker.core.loaded_windows import LOADED_SCOPE, RowSum, parse_window
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.schema.tables import Tables
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.lake.row_checksums import RowChecksums
from pyspark_sqlbroker.lake.windows import ExportWindow, floor_to_window

CHUNK_SIZE = 500
"""Number of ids or keys in one statement."""

_AUDIT_SCOPE = "job"
"""Scope of operators' actions in the policy state: what `sqlbroker audit` lists."""
_AUDIT_RETENTION = timedelta(days=365)
"""Retention of audit records, the same as of every other action."""


@dataclass(frozen=True)
class MessageFilter:
    """Selects messages by id, key or origin.

    Attributes:
        ids: Ids of messages.
        keys: Keys of messages, or the keys that policies use in their place.
        origins: Ids of messages whose copies, made by replays, are selected.
    """

    ids: frozenset[int] = frozenset()
    keys: frozenset[str] = frozenset()
    origins: frozenset[int] = frozenset()

    def iter_conditions(self, table: Table) -> Iterator[Any]:
        """Yield conditions of bounded length; each selected row matches a condition.

        A policy key is the key that policies use in place of the message's own.
        """
        for ids in _split(sorted(self.ids)):
            yield table.c.id.in_(ids)
        for keys in _split(sorted(self.keys)):
            yield or_(table.c.key.in_(keys), table.c.policy_key.in_(keys))
        for origins in _split(sorted(self.origins)):
            yield table.c.origin_id.in_(origins)


@dataclass
class MatchedRows:
    """Matching rows of the database.

    Attributes:
        waiting: Ids of live messages without a lease.
        leased: Ids of leased messages.
        archived: Id and `archived_at` of each row of the archive.
    """

    waiting: set[int] = field(default_factory=set)
    leased: set[int] = field(default_factory=set)
    archived: set[tuple[int, datetime]] = field(default_factory=set)

    @property
    def ids(self) -> frozenset[int]:
        """All ids."""
        return frozenset(self.waiting | self.leased | {id_ for id_, _ in self.archived})

    def count_by_window(self, size: str) -> dict[ExportWindow, RowChecksums]:
        """Count the archive's rows in each window, to lower the lake's records.

        Otherwise the next export would find fewer rows than recorded and search for the difference.
        """
        checksums = dict[ExportWindow, RowChecksums]()
        for id_, archived_at in self.archived:
            window = ExportWindow(floor_to_window(archived_at, size), size)
            row_checksums = RowChecksums(1, id_, to_microseconds(archived_at))
            checksums[window] = checksums.get(window, RowChecksums()) + row_checksums
        return checksums


def find_rows(connection: Connection, tables: Tables, message_filter: MessageFilter) -> MatchedRows:
    """Find the rows that match the filter, in the live table and in the archive.

    Leased messages are listed separately, because a subscriber handles them and they must stay.
    """
    matched = MatchedRows()
    live = tables.message
    with _hide_values():
        for condition in message_filter.iter_conditions(live):
            for id_, state in connection.execute(select(live.c.id, live.c.state).where(condition)):
                is_leased = state == MessageState.PROCESSING.name
                (matched.leased if is_leased else matched.waiting).add(id_)
        if (archive := tables.archive) is not None:
            columns = archive.c.id, archive.c.archived_at
            for condition in message_filter.iter_conditions(archive):
                rows = connection.execute(select(*columns).where(condition))
                matched.archived |= {(id_, archived_at) for id_, archived_at in rows}
    return matched


def find_others(connection: Connection, tables: Tables, times: Mapping[int, datetime]) -> set[int]:
    """Return the ids whose messages in the tables were not published at the time in `times`."""
    others = set[int]()
    with _hide_values():
        for c in (table.c for table in (tables.message, tables.archive) if table is not None):
            for pairs in _split(sorted(times.items())):
                conditions = [and_(c.id == id_, c.created_at != time) for id_, time in pairs]
                others |= set(connection.execute(select(c.id).where(or_(*conditions))).scalars())
    return others


def delete_messages(
    connection: Connection, tables: Tables, message_filter: MessageFilter
) -> tuple[int, MatchedRows]:
    """Remove live rows that are not leased, then rows of the archive.

    A message that ends in between is removed from the archive; a message that is claimed in between
    stays. Copies that a replay makes until the last row is removed are removed, too.

    Returns:
        Number of removed live rows, and the rows that were removed from the archive or are leased.
    """
    live = tables.message
    live_count = 0
    removed = set[tuple[int, datetime]]()
    while True:
        with _hide_values():
            for condition in message_filter.iter_conditions(live):
                # Race: the state is checked again under the row's lock.
                is_unleased = live.c.state != MessageState.PROCESSING.name
                live_count += connection.execute(
                    delete(live).where(condition, is_unleased)
                ).rowcount
            # Race: after the live rows, because a message that ended in between is in the archive
            # now.
            matched = find_rows(connection, tables, message_filter)
            if (archive := tables.archive) is not None:
                for pairs in _split(sorted(matched.archived)):
                    ids = [id_ for id_, _ in pairs]
                    times = [archived_at for _, archived_at in pairs]
                    # In a partitioned archive only the partitions of these times are visited.
                    between = archive.c.archived_at.between(min(times), max(times))
                    connection.execute(delete(archive).where(archive.c.id.in_(ids), between))
        removed |= matched.archived
        known_ids = message_filter.ids | matched.ids
        # Until no new copy appears: a replay may publish copies of rows that are removed here.
        copies = find_rows(connection, tables, MessageFilter(origins=known_ids)).ids
        if copies <= known_ids:
            return live_count, replace(matched, archived=removed)
        message_filter = replace(message_filter, ids=known_ids | copies)


def subtract_from_records(
    connection: Connection, table: Table, lake_id: str, removed: Mapping[ExportWindow, RowChecksums]
) -> None:
    """Subtract removed rows from the lake's records of windows in the database.

    A record tells retention how many rows of a window the lake has; without this, retention would
    find a difference and keep the window. A record that differs, or has changed since it was read,
    is not touched; the next export writes it again.
    """
    by_name = {
        window.name: RowSum(removed_rows.rows, removed_rows.ids)
        for window, removed_rows in removed.items()
    }
    c = table.c
    for names in _split(sorted(by_name)):
        # Scopes of all lakes begin with LOADED_SCOPE: a range of the index, up to the next prefix.
        upper_bound = LOADED_SCOPE[:-1] + chr(ord(LOADED_SCOPE[-1]) + 1)
        query = select(c.scope, c.key, c.info, c.counter).where(
            c.scope >= LOADED_SCOPE, c.scope < upper_bound, c.key.in_(names)
        )
        for scope, *row in connection.execute(query).all():
            record = parse_window(*row)
            if record.lake_id != lake_id:
                continue
            remaining = record.remaining - by_name[record.name]
            new_record = replace(record, remaining=remaining, version=record.version + 1)
            values: dict[str, Any] = {"info": new_record.to_json(), "counter": new_record.version}
            if not remaining.rows:
                values["due_at"] = null()
            conditions = (c.scope == scope, c.key == record.name, c.counter == record.version)
            connection.execute(update(table).where(*conditions).values(**values))


class ErasureAudit:
    """The audit record of an erasure, for `sqlbroker audit`; contains no id and no key."""

    def __init__(
        self, database: ArchiveDatabase, connection: Connection, table: Table, by: str
    ) -> None:
        """Prepare the record, which `start` writes; `by` names who requested the erasure."""
        self._database = database
        self._connection = connection
        self._table = table
        self._job = Job(action="erase", by=by, state="running")
        self.id = ""

    def start(self, expected: int, path: str | None) -> None:
        """Write the record before rows are removed, "running" until `finish`.

        An erasure that dies stays in the audit as running. `expected` counts the rows to remove.
        """
        now = self._database.get_time(self._connection)
        self.id = f"{now:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(2)}"
        arguments = {} if path is None else {"lake": path}
        self._job = replace(self._job, expected=expected, arguments=arguments)
        values = {"created_at": now, "expires_at": now + _AUDIT_RETENTION, "due_at": null()}
        self._connection.execute(
            insert(self._table).values(
                scope=_AUDIT_SCOPE, key=self.id, info=dump_job(self._job), **values
            )
        )

    def finish(self, counts: Mapping[str, int], leased: int) -> None:
        """Record that the erasure has ended, with the counts of removed rows.

        `leased` counts the messages that stayed because a subscriber has leased them.
        """
        arguments = {**self._job.arguments, **counts}
        done = sum(counts.values())
        now = self._database.get_time(self._connection)
        finished_job = replace(
            self._job, state="ended", done=done, skipped=leased, arguments=arguments, ended_at=now
        )
        c = self._table.c
        self._connection.execute(
            update(self._table)
            .where(c.scope == _AUDIT_SCOPE, c.key == self.id)
            .values(info=dump_job(finished_job))
        )


def _split(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield `values` in parts of at most `CHUNK_SIZE`, to bound the length of a statement."""
    for first in range(0, len(values), CHUNK_SIZE):
        yield values[first : first + CHUNK_SIZE]


@contextmanager
def _hide_values() -> Iterator[None]:
    """Convert the database's errors to StoreError without the statement.

    Its values are personal data; `from None` keeps them out of the traceback, too.
    """
    try:
        yield
    except DBAPIError as error:
        raise StoreError(f"the database answered: {error.orig}") from None

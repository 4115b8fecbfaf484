"""Scan all tables for invalid rows, batch by batch in the order of a key.

Each batch is a single statement that returns only invalid rows. So a message that moves from one
table to the other is seen in one of them, and the time of a batch does not depend on the number of
invalid rows.
"""

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from hashlib import sha256
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    case,
    func,
    literal_column,
    or_,
    select,
)

from faststream_sqlbroker.core import verification as kinds
from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.bulk_jobs import parse_job
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.loaded_windows import (
    DIFFERING_SCOPE,
    LOADED_SCOPE,
    RowSum,
    parse_window,
)
from faststream_sqlbroker.core.retention import PrunePosition
from faststream_sqlbroker.core.states import ARCHIVED_STATES, LIVE_STATES, MessageState
from faststream_sqlbroker.core.status import HOLDER_BYTES
from faststream_sqlbroker.core.stored import Filters, InvalidCursorError
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.core.verification import Damage, Note, Verification
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.audit import JOB
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.parts.message_walks import STEP_SIZE, IndexRange, RangeReader
from faststream_sqlbroker.database.parts.row_locks import find_locked
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.database.parts.window_rows import read_page
from faststream_sqlbroker.schema.types import later

PARTS = ("live", "archive", "jobs", "windows")
"""The parts that are scanned, in this order; a cursor begins with the name of a part."""
CHECKSUM = 8
"""Bytes of the checksum at a cursor's beginning: a cursor that was cut or changed is refused."""
CLOCK_STEP = 60_000_000
"""Microseconds that a time may lie ahead: the database's clock may have been set back a little."""
JOBS = 500
"""Rows of jobs that one statement reads; each has its filter and counts."""
WINDOW_KEY_LENGTH = 2
"""Values of a position between two windows: the scope and the key of the last window."""
Position = Sequence[Any]
"""The position from which a part continues, in JSON's types."""


@dataclass(frozen=True, slots=True)
class ScanBatch:
    """The results of a single statement."""

    damages: Sequence[Damage]
    rows: int
    after: Position | None
    """The position from which the part continues, None at its end."""
    notes: Sequence[Note] = ()


class Verifier(StoreSubject):
    """A read-only scan for invalid rows; each batch is a single transaction.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    async def verify(
        self, after: str | None, *, rows: int, seconds: float, lease_over: float, limit: int
    ) -> Verification:
        """Check the next rows of all tables, at least `rows` unless `seconds` have elapsed.

        Continues from the cursor `after`. Damages are counted, and up to `limit` are returned.

        Raises:
            InvalidCursorError: `after` is not a cursor that `verify` returned.
        """
        clock = Clock()
        until = clock.monotonic() + seconds
        part, position = (PARTS[0], None) if after is None else _load_cursor(after)
        row_count = 0
        counts: Counter[str] = Counter()
        damages: list[Damage] = []
        notes: list[Note] = []
        while True:
            scan = partial(self._scan_batch, part=part, position=position, lease_over=lease_over)
            batch = await self._database.run(scan, Activity.OPERATE, write=False)
            row_count += batch.rows
            counts.update(damage.kind for damage in batch.damages)
            damages += batch.damages[: limit - len(damages)]
            notes += batch.notes[: limit - len(notes)]
            part, position = _find_next(part, batch.after)
            # At least one batch is read per call, so a caller that continues with `after` reaches
            # the end.
            if part == "" or row_count >= rows or clock.monotonic() >= until:
                cursor = None if part == "" else _dump_cursor(part, position)
                return Verification(
                    rows=row_count,
                    counts=dict(counts),
                    damages=tuple(damages),
                    after=cursor,
                    notes=tuple(notes),
                )

    def _scan_batch(
        self, connection: Connection, *, part: str, position: Position | None, lease_over: float
    ) -> ScanBatch:
        """Scan the next batch of `part`: live messages, archive, jobs or windows of exports."""
        if part == "live":
            return _check_live(connection, self._dialect, position, lease_over)
        if part == "archive":
            return _check_archive(connection, self._dialect, position)
        if part == "jobs":
            return _check_jobs(connection, self._dialect.tables.policy_state, position)
        return _check_windows(connection, self._dialect, position)


def _check_live(
    connection: Connection, dialect: DialectOperations, after: Position | None, lease_over: float
) -> ScanBatch:
    """Check the next batch of live messages, by id: states, leases, attempts, duplicates.

    A lease is ownerless if it expired `lease_over` seconds ago and no live subscriber holds it:
    some process should have released it by then.
    """
    table = dialect.tables.message
    c = table.c
    is_processing = c.state == MessageState.PROCESSING.name
    expired_before = later(literal_column(str(-round(lease_over * 1_000_000))))
    conditions = {
        kinds.UNKNOWN_STATE: c.state.not_in(sorted(state.name for state in LIVE_STATES)),
        kinds.NO_LEASE: and_(
            is_processing, or_(c.lease_token.is_(None), c.lease_expires_at.is_(None))
        ),
        kinds.LEFT_LEASE: and_(
            ~is_processing, or_(c.lease_token.is_not(None), c.lease_expires_at.is_not(None))
        ),
        kinds.NO_OWNER: and_(
            is_processing, c.lease_token.is_not(None), c.lease_expires_at < expired_before
        ),
        kinds.NO_ATTEMPT: and_(c.state == MessageState.RETRYABLE.name, c.attempts_count < 1),
    }
    archive = dialect.tables.archive
    if archive is not None:
        conditions[kinds.IN_BOTH] = select(archive.c.id).where(archive.c.id == c.id).exists()
    index_range = IndexRange("all", table, None, (), (c.id,))
    batch = _scan_range(connection, dialect, index_range, after, conditions)
    expired_ids = [
        d.message_id for d in batch.damages if d.kind == kinds.NO_OWNER and d.message_id is not None
    ]
    if not expired_ids:
        return batch
    ownerless = _find_ownerless(connection, dialect, expired_ids, conditions[kinds.NO_OWNER])
    damages = [d for d in batch.damages if d.kind != kinds.NO_OWNER or d.message_id in ownerless]
    return replace(batch, damages=damages)


def _find_ownerless(
    connection: Connection, dialect: DialectOperations, ids: Sequence[int], condition: Any
) -> set[int]:
    """Return the messages that meet `condition` and that no live holder and no transaction keeps.

    The index conditions cannot see the holders. A handler's transaction keeps its message for as
    long as it runs, though others see the lease end: its lock lets neither a renewal nor a release
    pass.
    """
    c = dialect.tables.message.c
    holders: dict[int, str] = {}
    for part in iter_chunks(list(ids)):
        rows = connection.execute(select(c.id, c.lease_token).where(c.id.in_(part), condition))
        # Each subscriber draws its lease tokens with a prefix of its own, the holder.
        holders.update((row.id, row.lease_token.bytes[:HOLDER_BYTES].hex()) for row in rows)
    subscribers = read_subscribers(connection, dialect.tables.policy_state)
    live_holders = {subscriber.worker.rpartition(":")[2] for subscriber in subscribers}
    ownerless = {message_id for message_id, holder in holders.items() if holder not in live_holders}
    return ownerless - (find_locked(connection, dialect, sorted(ownerless)) or set())


def _check_archive(
    connection: Connection, dialect: DialectOperations, after: Position | None
) -> ScanBatch:
    """Check the next batch of archived messages, by end time: states, times, duplicates.

    `after` is the position (time and id) where the batch before ended.
    """
    table = dialect.tables.archive
    if table is None:
        return ScanBatch((), 0, None)
    c = table.c
    conditions: dict[str, ColumnElement[bool]] = {
        kinds.UNKNOWN_STATE: c.state.not_in(sorted(state.name for state in ARCHIVED_STATES)),
        kinds.IN_FUTURE: c.archived_at > later(literal_column(str(CLOCK_STEP))),
    }
    if dialect.tables.config.archive_partitions is not None and dialect.name == "postgresql":
        # The primary key of a partitioned archive includes the time, so an id may occur twice.
        other = table.alias()
        is_duplicate = and_(other.c.id == c.id, other.c.archived_at != c.archived_at)
        conditions[kinds.ARCHIVED_TWICE] = select(other.c.id).where(is_duplicate).exists()
    position = None if after is None else [from_microseconds(after[0]), after[1]]
    index_range = IndexRange("archive", table, "archived_index", (), (c.archived_at, c.id))
    return _scan_range(connection, dialect, index_range, position, conditions)


def _scan_range(
    connection: Connection,
    dialect: DialectOperations,
    index_range: IndexRange,
    position: Position | None,
    conditions: Mapping[str, ColumnElement[bool]],
) -> ScanBatch:
    """Read the rows of the next step of a range that meet any of `conditions`; report each match.

    A step is a fixed number of rows in the order of an index. `conditions` are by kind of damage.
    Valid rows are not sent to the client.
    """
    part = RangeReader(dialect, index_range, position, Filters(), [or_(*conditions.values())])
    # Read the first batch only: the next batch needs a transaction of its own.
    rows, end = next(part.iter_steps(connection, STEP_SIZE))
    c = index_range.table.c
    flags = [case((condition, 1), else_=0).label(kind) for kind, condition in conditions.items()]
    invalid_rows = connection.execute(rows(c.id, c.queue, c.state, *flags)).all()
    damages = [
        Damage(kind=kind, message_id=row.id, queue=row.queue, found=row.state)
        for row in invalid_rows
        for kind in conditions
        if getattr(row, kind)
    ]
    next_position = None if end is None else [_to_json_value(value) for value in end]
    return ScanBatch(
        damages, STEP_SIZE if end is not None else part.count_scanned(connection), next_position
    )


def _to_json_value(value: Any) -> Any:
    return to_microseconds(value) if isinstance(value, datetime) else value


def _check_jobs(connection: Connection, table: Table, after: Position | None) -> ScanBatch:
    """Report running jobs of operators without a time for their next batch, by id.

    A job changes many messages batch by batch. No process would ever continue them.
    """
    c = table.c
    last_key = "" if after is None else str(after[0])
    statement = select(c.key, c.created_at, c.info).where(
        c.scope == JOB, c.due_at.is_(None), c.key > last_key
    )
    rows = connection.execute(statement.order_by(c.key).limit(JOBS)).all()
    running = [job for job in (parse_job(*row) for row in rows) if job.state == "running"]
    damages = [
        Damage(kind=kinds.JOB_WITHOUT_DUE_TIME, name=job.id, found=str(job)) for job in running
    ]
    return ScanBatch(damages, len(rows), [rows[-1].key] if len(rows) == JOBS else None)


# Windows of exports: a position is the scope and the name of a window; within a window, also the
# version of its record, the last row, and the number of rows and the sum of ids so far.


def _check_windows(
    connection: Connection, dialect: DialectOperations, after: Position | None
) -> ScanBatch:
    """Check the next step of the records of exports: select a window, or compare a page.

    A record says which rows of a window (a day or an hour of `archived_at`) an export has loaded
    into a lake. Windows that a prune has found to differ are reported as they are.
    """
    if after is not None and len(after) > WINDOW_KEY_LENGTH:
        return _compare_window(connection, dialect, after)
    c = dialect.tables.policy_state.c
    statement = select(c.scope, c.key, c.info, c.counter, c.due_at)
    statement = statement.where(
        or_(_match_prefix(c.scope, LOADED_SCOPE), _match_prefix(c.scope, DIFFERING_SCOPE))
    )
    if after is not None:
        scope, key = after
        is_after = or_(c.scope > scope, and_(c.scope == scope, c.key > key))
        # The first condition is implied, but a range that the primary key serves.
        statement = statement.where(c.scope >= scope, is_after)
    row = connection.execute(statement.order_by(c.scope, c.key).limit(1)).first()
    if row is None:
        return ScanBatch((), 0, None)
    position = [row.scope, row.key]
    if row.scope.startswith(DIFFERING_SCOPE):
        lake = row.scope.removeprefix(DIFFERING_SCOPE)
        reason = "found by an earlier prune"
        return ScanBatch([_build_damage(lake, row.key, reason)], 1, position)
    if row.due_at is None:
        # All rows of the window have been removed.
        return ScanBatch((), 1, position)
    # Continue inside the window: version, last row (time and id), and the sums so far.
    return ScanBatch((), 1, [*position, row.counter, None, None, 0, "0"])


def _match_prefix(scope: Any, prefix: str) -> Any:
    """Match scopes with this prefix; names of lakes follow the colon."""
    # Compare with the next character, so that the primary key is used.
    return and_(scope >= prefix, scope < prefix[:-1] + chr(ord(prefix[-1]) + 1))


def _compare_window(
    connection: Connection, dialect: DialectOperations, after: Position
) -> ScanBatch:
    """Compare a page of a window with the record; at the last page, report a difference.

    The position carries the sums of the pages before, so that each page is a transaction of its
    own.
    """
    scope, key, version, archived_at, last_id, rows, ids = after
    c = dialect.tables.policy_state.c
    statement = select(c.key, c.info, c.counter).where(c.scope == scope, c.key == key)
    row = connection.execute(statement).first()
    if row is None or row.counter != version:
        # A prune or an export has just compared the window, and has written its result.
        return ScanBatch((), 1, [scope, key])
    window = parse_window(*row)
    last_row = (
        None if archived_at is None else PrunePosition(from_microseconds(archived_at), last_id)
    )
    page = read_page(connection, dialect, window, last_row)
    total = RowSum(rows, int(ids)) + page.rows
    if page.last is not None:
        next_position = [to_microseconds(page.last.at), page.last.id, total.rows, str(total.ids)]
        return ScanBatch((), page.rows.rows, [scope, key, version, *next_position])
    lake = scope.removeprefix(LOADED_SCOPE)
    damages: list[Damage] = []
    notes: list[Note] = []
    if total != window.remaining and _is_unchanged(connection, dialect, after):
        damages = [_build_damage(lake, key, f"{total}, not {window.remaining}")]
    elif window.returned.rows:
        reason = f"{window.returned.rows} brought back, {total.rows} left"
        notes = [Note(kind=kinds.BROUGHT_BACK, name=_format_window_name(lake, key), found=reason)]
    return ScanBatch(damages, page.rows.rows, [scope, key], notes)


def _is_unchanged(connection: Connection, dialect: DialectOperations, after: Position) -> bool:
    """Return True if the record is still the version that the rows were compared with.

    A prune or an export may have changed it, and the rows, between two pages; then the difference
    means nothing.
    """
    scope, key, version = after[:3]
    c = dialect.tables.policy_state.c
    current_version = select(func.max(c.counter)).where(c.scope == scope, c.key == key)
    return bool(connection.execute(current_version).scalar() == version)


def _build_damage(lake: str, window: str, reason: str) -> Damage:
    return Damage(kind=kinds.DIFFERS, name=_format_window_name(lake, window), found=reason)


def _format_window_name(lake: str, window: str) -> str:
    return f"window {window} of lake {lake!r}"


# Cursors: a part, and the position in the part.


def _find_next(part: str, after: Position | None) -> tuple[str, Position | None]:
    """Return the part and position to continue from; the part is empty at the end.

    The parts are scanned one after the other; a part whose `after` is None has ended.
    """
    if after is not None:
        return part, after
    index = PARTS.index(part) + 1
    return (PARTS[index] if index < len(PARTS) else ""), None


def _dump_cursor(part: str, position: Position | None) -> str:
    """Return the cursor of a position in a part, as base64 with a checksum."""
    content = json.dumps([part, None if position is None else list(position)]).encode()
    return base64.urlsafe_b64encode(_compute_checksum(content) + content).decode()


def _load_cursor(cursor: str) -> tuple[str, Position | None]:
    """Parse a cursor of `_dump_cursor`, which comes back from a client.

    Raises:
        InvalidCursorError: the cursor was changed, or is not from `verify`.
    """
    try:
        data = base64.urlsafe_b64decode(cursor.encode())
    except ValueError as error:
        raise InvalidCursorError(cursor) from error
    content = data[CHECKSUM:]
    # With a valid checksum, the content is what `_dump_cursor` wrote.
    if data[:CHECKSUM] != _compute_checksum(content):
        raise InvalidCursorError(cursor)
    part, position = json.loads(content)
    return part, position


def _compute_checksum(content: bytes) -> bytes:
    return sha256(content).digest()[:CHECKSUM]

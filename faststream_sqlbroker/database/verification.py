"""Looks through all tables for rows that cannot be, stretch by stretch in the order of a key.

Each stretch is one statement that only returns what is wrong. So a message on its way from one
table to the other is seen in one of them, and a stretch is as long however much is wrong.
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
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.jobs import job_of
from faststream_sqlbroker.core.loaded_windows import DIFFERS, LOADED, RowSum, window_of
from faststream_sqlbroker.core.retention import Place
from faststream_sqlbroker.core.states import ARCHIVED_STATES, LIVE_STATES, MessageState
from faststream_sqlbroker.core.status import HOLDER_BYTES
from faststream_sqlbroker.core.stored import Filters, NotACursorError
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.core.verification import Damage, Note, Verification
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.audit import JOB
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.parts.loaded_windows import read_page
from faststream_sqlbroker.database.parts.message_walks import STEP, Part, Walk
from faststream_sqlbroker.database.parts.row_locks import locked_by_others
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import later

PARTS = ("live", "archive", "jobs", "windows")
"""What is looked through, in this order; a cursor begins with one of them."""
CHECKSUM = 8
"""Bytes of a cursor's beginning: a cursor that was cut or changed is refused."""
CLOCK_STEP = 60_000_000
"""Microseconds that a time may lie ahead: the database's clock may have been set back a little."""
JOBS = 500
"""Rows of jobs that one statement reads; each has its filter and counts."""
BETWEEN = 2
"""Values of a position between two windows: the scope and the key of the last one."""
Position = Sequence[Any]
"""Where a part goes on, as JSON has it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one statement has found."""

    damages: Sequence[Damage]
    rows: int
    after: Position | None
    """Where the part goes on; None: it has ended."""
    notes: Sequence[Note] = ()


class Verifier:
    """Reads stretch by stretch; each is one transaction, and nothing is written.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect

    async def verify(
        self,
        after: str | None,
        *,
        rows: int,
        seconds: float,
        lease_over: float,
        limit: int,
    ) -> Verification:
        """Look at `rows` rows at least, unless there are no more, or `seconds` are over.

        Raises:
            NotACursorError: `after` is not what `verify` returned.
        """
        clock = Clock()
        until = clock.monotonic() + seconds
        part, position = (PARTS[0], None) if after is None else _load(after)
        looked_at = 0
        counts: Counter[str] = Counter()
        damages: list[Damage] = []
        notes: list[Note] = []
        while True:
            look = partial(self._look, part=part, position=position, lease_over=lease_over)
            stretch = await self._database.run(look, Activity.OPERATE, write=False)
            looked_at += stretch.rows
            counts.update(damage.kind for damage in stretch.damages)
            damages += stretch.damages[: limit - len(damages)]
            notes += stretch.notes[: limit - len(notes)]
            part, position = _next(part, stretch.after)
            # A stretch was read in any case, so a caller that goes on with `after` gets to the end.
            if part == "" or looked_at >= rows or clock.monotonic() >= until:
                cursor = None if part == "" else _dump(part, position)
                return Verification(
                    rows=looked_at,
                    counts=dict(counts),
                    damages=tuple(damages),
                    after=cursor,
                    notes=tuple(notes),
                )

    def _look(
        self, connection: Connection, *, part: str, position: Position | None, lease_over: float
    ) -> Stretch:
        """The part's next stretch."""
        if part == "live":
            return _check_live(connection, self._dialect, position, lease_over)
        if part == "archive":
            return _check_archive(connection, self._dialect, position)
        if part == "jobs":
            return _check_jobs(connection, self._dialect.tables.policy_state, position)
        return _check_windows(connection, self._dialect, position)


def _check_live(
    connection: Connection, dialect: Operations, after: Position | None, lease_over: float
) -> Stretch:
    """Live messages, by id. A lease that has been over for `lease_over` seconds has no owner if its
    holder does not live.
    """
    table = dialect.tables.message
    c = table.c
    leased = c.state == MessageState.PROCESSING.name
    over = later(literal_column(str(-round(lease_over * 1_000_000))))
    wrong = {
        kinds.UNKNOWN_STATE: c.state.not_in(sorted(state.name for state in LIVE_STATES)),
        kinds.NO_LEASE: and_(leased, or_(c.lease_token.is_(None), c.lease_expires_at.is_(None))),
        kinds.LEASE_LEFT: and_(
            ~leased, or_(c.lease_token.is_not(None), c.lease_expires_at.is_not(None))
        ),
        kinds.NO_OWNER: and_(leased, c.lease_token.is_not(None), c.lease_expires_at < over),
        kinds.NO_ATTEMPT: and_(c.state == MessageState.RETRYABLE.name, c.attempts_count < 1),
    }
    archive = dialect.tables.archive
    if archive is not None:
        wrong[kinds.IN_BOTH] = select(archive.c.id).where(archive.c.id == c.id).exists()
    walk = Walk("all", table, None, (), (c.id,))
    stretch = _stretch(connection, dialect, walk, after, wrong)
    over_ids = [
        d.message_id
        for d in stretch.damages
        if d.kind == kinds.NO_OWNER and d.message_id is not None
    ]
    if not over_ids:
        return stretch
    left = _without_holder(connection, dialect, over_ids, wrong[kinds.NO_OWNER])
    damages = [d for d in stretch.damages if d.kind != kinds.NO_OWNER or d.message_id in left]
    return replace(stretch, damages=damages)


def _without_holder(
    connection: Connection, dialect: Operations, ids: Sequence[int], condition: Any
) -> set[int]:
    """Those of the messages that meet `condition`, and that neither a holder that lives nor a
    transaction keeps.

    A handler's transaction keeps its message for as long as it runs, though others see the lease
    end: its lock lets neither a renewal nor a release pass.
    """
    c = dialect.tables.message.c
    holders: dict[int, str] = {}
    for part in chunks(list(ids)):
        rows = connection.execute(select(c.id, c.lease_token).where(c.id.in_(part), condition))
        holders.update((row.id, row.lease_token.bytes[:HOLDER_BYTES].hex()) for row in rows)
    alive = read_subscribers(connection, dialect.tables.policy_state)
    living = {each.worker.rpartition(":")[2] for each in alive}
    left = {message_id for message_id, holder in holders.items() if holder not in living}
    return left - (locked_by_others(connection, dialect, sorted(left)) or set())


def _check_archive(connection: Connection, dialect: Operations, after: Position | None) -> Stretch:
    """Archived messages, by when they ended."""
    table = dialect.tables.archive
    if table is None:
        return Stretch((), 0, None)
    c = table.c
    wrong: dict[str, ColumnElement[bool]] = {
        kinds.UNKNOWN_STATE: c.state.not_in(sorted(state.name for state in ARCHIVED_STATES)),
        kinds.IN_FUTURE: c.archived_at > later(literal_column(str(CLOCK_STEP))),
    }
    if dialect.tables.config.archive_partitions is not None and dialect.name == "postgresql":
        # The key of partitions has the time, too, so it does not keep an id from coming again.
        other = table.alias()
        again = and_(other.c.id == c.id, other.c.archived_at != c.archived_at)
        wrong[kinds.TWICE] = select(other.c.id).where(again).exists()
    at = None if after is None else [from_microseconds(after[0]), after[1]]
    walk = Walk("archive", table, "archived_index", (), (c.archived_at, c.id))
    return _stretch(connection, dialect, walk, at, wrong)


def _stretch(
    connection: Connection,
    dialect: Operations,
    walk: Walk,
    at: Position | None,
    wrong: Mapping[str, ColumnElement[bool]],
) -> Stretch:
    part = Part(dialect, walk, at, Filters(), [or_(*wrong.values())])
    # The first stretch only: the next one is of another transaction.
    rows, end = next(part.steps(connection, STEP))
    c = walk.table.c
    flags = [case((condition, 1), else_=0).label(kind) for kind, condition in wrong.items()]
    found = connection.execute(rows(c.id, c.queue, c.state, *flags)).all()
    damages = [
        Damage(kind=kind, message_id=row.id, queue=row.queue, found=row.state)
        for row in found
        for kind in wrong
        if getattr(row, kind)
    ]
    after = None if end is None else [_plain(value) for value in end]
    return Stretch(damages, STEP if end is not None else part.looked_at(connection), after)


def _plain(value: Any) -> Any:
    return to_microseconds(value) if isinstance(value, datetime) else value


def _check_jobs(connection: Connection, table: Table, after: Position | None) -> Stretch:
    """Jobs of operators without a time for their next batch, by id."""
    c = table.c
    behind = "" if after is None else str(after[0])
    statement = select(c.key, c.created_at, c.info).where(
        c.scope == JOB, c.due_at.is_(None), c.key > behind
    )
    rows = connection.execute(statement.order_by(c.key).limit(JOBS)).all()
    running = [job for job in (job_of(*row) for row in rows) if job.state == "running"]
    damages = [Damage(kind=kinds.JOB_RESTS, name=job.id, found=str(job)) for job in running]
    return Stretch(damages, len(rows), [rows[-1].key] if len(rows) == JOBS else None)


# Windows of exports: a position is the scope and the name of a window; within one, also the
# version of its record, the last row, and the rows and the sum of ids up to there.


def _check_windows(connection: Connection, dialect: Operations, after: Position | None) -> Stretch:
    """A page of the window that was begun, or the next window; those that differ were noted."""
    if after is not None and len(after) > BETWEEN:
        return _compare(connection, dialect, after)
    c = dialect.tables.policy_state.c
    statement = select(c.scope, c.key, c.info, c.counter, c.due_at)
    statement = statement.where(or_(_of(c.scope, LOADED), _of(c.scope, DIFFERS)))
    if after is not None:
        scope, key = after
        further = or_(c.scope > scope, and_(c.scope == scope, c.key > key))
        statement = statement.where(c.scope >= scope, further)
    row = connection.execute(statement.order_by(c.scope, c.key).limit(1)).first()
    if row is None:
        return Stretch((), 0, None)
    position = [row.scope, row.key]
    if row.scope.startswith(DIFFERS):
        lake = row.scope.removeprefix(DIFFERS)
        text = "found before by a prune"
        return Stretch([_differs(lake, row.key, text)], 1, position)
    if row.due_at is None:
        # Nothing of it is left.
        return Stretch((), 1, position)
    return Stretch((), 1, [*position, row.counter, None, None, 0, "0"])


def _of(scope: Any, prefix: str) -> Any:
    """Scopes of one kind; names of lakes follow the colon."""
    # The next character, so that the primary key serves.
    return and_(scope >= prefix, scope < prefix[:-1] + chr(ord(prefix[-1]) + 1))


def _compare(connection: Connection, dialect: Operations, after: Position) -> Stretch:
    scope, key, version, at, last_id, rows, ids = after
    c = dialect.tables.policy_state.c
    one = select(c.key, c.info, c.counter).where(c.scope == scope, c.key == key)
    row = connection.execute(one).first()
    if row is None or row.counter != version:
        # A prune or an export has just compared it, and has written what it found.
        return Stretch((), 1, [scope, key])
    window = window_of(*row)
    place = None if at is None else Place(from_microseconds(at), last_id)
    page = read_page(connection, dialect, window, place)
    found = RowSum(rows, int(ids)) + page.rows
    if page.last is not None:
        ahead = [to_microseconds(page.last.at), page.last.id, found.rows, str(found.ids)]
        return Stretch((), page.rows.rows, [scope, key, version, *ahead])
    lake = scope.removeprefix(LOADED)
    damages: list[Damage] = []
    notes: list[Note] = []
    if found != window.left and _is_same(connection, dialect, after):
        damages = [_differs(lake, key, f"{found}, not {window.left}")]
    elif window.back.rows:
        text = f"{window.back.rows} brought back, {found.rows} left"
        notes = [Note(kind=kinds.BROUGHT_BACK, name=_window_name(lake, key), found=text)]
    return Stretch(damages, page.rows.rows, [scope, key], notes)


def _is_same(connection: Connection, dialect: Operations, after: Position) -> bool:
    """Whether the record is still the one that the rows were compared with."""
    scope, key, version = after[:3]
    c = dialect.tables.policy_state.c
    now = select(func.max(c.counter)).where(c.scope == scope, c.key == key)
    return bool(connection.execute(now).scalar() == version)


def _differs(lake: str, window: str, text: str) -> Damage:
    return Damage(kind=kinds.DIFFERS, name=_window_name(lake, window), found=text)


def _window_name(lake: str, window: str) -> str:
    return f"window {window} of lake {lake!r}"


# Cursors: a part, and the position in it.


def _next(part: str, after: Position | None) -> tuple[str, Position | None]:
    """Where it goes on; "": nowhere."""
    if after is not None:
        return part, after
    at = PARTS.index(part) + 1
    return (PARTS[at] if at < len(PARTS) else ""), None


def _dump(part: str, position: Position | None) -> str:
    text = json.dumps([part, None if position is None else list(position)]).encode()
    return base64.urlsafe_b64encode(_checksum(text) + text).decode()


def _load(cursor: str) -> tuple[str, Position | None]:
    try:
        given = base64.urlsafe_b64decode(cursor.encode())
    except ValueError as error:
        raise NotACursorError(cursor) from error
    text = given[CHECKSUM:]
    # So what follows is as `_dump` wrote it.
    if given[:CHECKSUM] != _checksum(text):
        raise NotACursorError(cursor)
    part, position = json.loads(text)
    return part, position


def _checksum(text: bytes) -> bytes:
    return sha256(text).digest()[:CHECKSUM]

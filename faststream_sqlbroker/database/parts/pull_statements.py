"""Statements for jobs of pull consumers, each built once for all requests."""

from typing import Any

from sqlalchemy import (
    Integer,
    Select,
    Table,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    or_,
    select,
    text,
)

from faststream_sqlbroker.database.constants import LONG_AGO
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.live_subscribers import is_lasting, pause_of
from faststream_sqlbroker.database.parts.message_walks import Walk, row_by_row, shown_columns
from faststream_sqlbroker.schema.types import MYSQL, clock, later

_CLAIMABLE = "state IN ('PENDING', 'RETRYABLE')"
_COLUMNS = ("id", "priority", "deliveries_count", "headers", "payload")


def holding(dialect: Operations, *, is_live: bool) -> Select[Any]:
    """Locks the row of `job` in `queue`, live or archived."""

    def build() -> Select[Any]:
        table = _table(dialect, is_live=is_live)
        c = table.c
        columns: list[Any] = [c.id, c.queue, c.state, c.deliveries_count, c.attempts_count]
        if is_live:
            columns += [c.acquired_at, clock().label("now"), c.lease_token, *_times(table)]
        return select(*columns).where(*_one(table)).with_for_update()

    return dialect.built(f"hold_{_kind(is_live=is_live)}_job", build)


def showing(dialect: Operations, *, is_live: bool) -> Select[Any]:
    """Reads the `job` of `queue`, live or archived."""

    def build() -> Select[Any]:
        table = _table(dialect, is_live=is_live)
        columns = shown_columns(table, (*_COLUMNS, "state"), dialect.name)
        if is_live:
            columns += shown_columns(table, ("lease_expires_at",), dialect.name)
            columns += _times(table)
        return select(*columns).where(*_one(table))

    return dialect.built(f"{_kind(is_live=is_live)}_job", build)


def due(dialect: Operations) -> Select[Any]:
    """Positions and sizes of up to `limit` jobs of `due_walk` that live; if the bind `gone` is 1,
    also of those that have expired long ago, and which are such.
    """

    def build() -> Select[Any]:
        walk = due_walk(dialect)
        c = walk.table.c
        names = ("priority", "next_attempt_at", "id")
        size = func.length(c.payload).label("size")
        gone = case((_lives(walk.table), 0), else_=1).label("gone")
        columns = [*shown_columns(walk.table, names, dialect.name), size, gone]
        with_gone = bindparam("gone", type_=Integer) == 1
        listed = or_(_lives(walk.table), and_(with_gone, _is_gone(walk.table)))
        jobs = walk.select(dialect, columns).where(listed)
        return jobs.limit(bindparam("limit", type_=Integer))

    return dialect.built("due_jobs", build)


def due_walk(dialect: Operations) -> Walk:
    """Jobs of `queue` and `priority` whose time has come."""

    def build() -> Walk:
        table = dialect.tables.message
        c = table.c
        claimable = text("claimable = 1" if dialect.name in MYSQL else _CLAIMABLE)
        pair = (c.queue == bindparam("queue"), c.priority == bindparam("priority"))
        where = (claimable, *pair, c.next_attempt_at <= clock())
        return Walk("ready", table, "ready_index", where, (c.next_attempt_at, c.id))

    return dialect.built("walk_of_due_jobs", build)


def expired(dialect: Operations) -> Select[Any]:
    """Locks those of the jobs `ids` in `queue` that wait, and have expired long ago."""

    def build() -> Select[Any]:
        table = dialect.tables.message
        c = table.c
        waiting = row_by_row([c.queue == bindparam("queue"), text(_CLAIMABLE), _is_gone(table)])
        of_ids = c.id.in_(bindparam("ids", expanding=True))
        return select(c.id).where(of_ids, *waiting).with_for_update(skip_locked=True)

    return dialect.built("expired_jobs", build)


def bodies(dialect: Operations) -> Select[Any]:
    """Reads those of the jobs `ids` that are not in flight."""

    def build() -> Select[Any]:
        table = dialect.tables.message
        of_ids = table.c.id.in_(bindparam("ids", expanding=True))
        columns = shown_columns(table, _COLUMNS, dialect.name)
        return select(*columns).where(of_ids, *row_by_row([text(_CLAIMABLE)]))

    return dialect.built("bodies_of_jobs", build)


def pause(dialect: Operations) -> Select[Any]:
    """The row that tells that `queue` is paused, if it is."""

    def build() -> Select[Any]:
        table = dialect.tables.policy_state
        of_queue = pause_of(table, bindparam("queue"))
        return select(table.c.key).where(of_queue, is_lasting(table))

    return dialect.built("pause_of_jobs", build)


def _table(dialect: Operations, *, is_live: bool) -> Table:
    table = dialect.tables.message if is_live else dialect.tables.archive
    assert table is not None  # noqa: S101 - without an archive there are no channels
    return table


def _kind(*, is_live: bool) -> str:
    return "live" if is_live else "archived"


def _one(table: Table) -> tuple[Any, Any]:
    return table.c.id == bindparam("job"), table.c.queue == bindparam("queue")


def _times(table: Table) -> list[Any]:
    """Whether the lease is `over`, and whether a queued job `is_due`."""
    over = case((table.c.lease_expires_at <= clock(), 1), else_=0)
    is_due = case((and_(table.c.next_attempt_at <= clock(), _lives(table)), 1), else_=0)
    return [over.label("over"), is_due.label("is_due")]


def _lives(table: Table) -> Any:
    return func.coalesce(table.c.expires_at > clock(), True)


def _is_gone(table: Table) -> Any:
    ago: Any = literal_column(str(-LONG_AGO * 1_000_000))
    return table.c.expires_at <= later(ago)

"""The small table of what outlives a message's row, by (scope, key); the same on every database."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    delete,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite

from faststream_sqlbroker.core.rows import ClaimedMessage, UnknownOutcome
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import MYSQL, clock, later

ORDERED = "ordered"
SCOPE = "scope"
"""The key is the name of a budget that several queues share; the row is locked while some of it is
granted."""
ACK_FIRST = "ack_first:"
"""The scope is this and the queue; the key is the message's id."""
ONCE = "once:"
"""The scope is this and the queue; the key is the message's, its id is in `info`."""

Started = tuple[str, int]
"""Queue and id of a message whose handler has been started."""


def lock_order(
    connection: Connection, table: Table, queues: Sequence[str], scope: str = ORDERED
) -> set[str]:
    """Lock the rows of those of `queues` that no other transaction has locked; returns those.

    The locks last until the transaction ends. The first claim of a queue inserts its row; claims
    that run at the same time wait for that insert.
    """
    ours = table.c.scope == scope

    def find(names: Sequence[str], *, lock: bool) -> set[str]:
        found = set[str]()
        for part in chunks(names):
            these = select(table.c.key).where(ours, table.c.key.in_(part))
            found.update(
                connection.execute(
                    these.with_for_update(skip_locked=True) if lock else these
                ).scalars()
            )
        return found

    locked = find(queues, lock=True)
    if len(locked) == len(queues):
        return locked
    known = find(queues, lock=False)
    missing = [queue for queue in queues if queue not in known]
    if not missing:
        return locked
    # A race: another claim may have inserted the row since it was looked for. Then the upsert
    # writes the value that is there.
    same = {"scope": scope}
    upsert(connection, table, [{**same, "key": queue} for queue in missing], replaced=("scope",))
    return locked | find(missing, lock=True)


def note_started(
    connection: Connection,
    table: Table,
    rows: Sequence[ClaimedMessage],
    holder: UUID,
    lease: float,
    worker: str,
) -> None:
    """Note that `holder` is about to start the handlers of `rows`, which are removed in the same
    transaction.
    """
    binds = [
        {
            "scope": ACK_FIRST + row.queue,
            "key": str(row.id),
            "lease_token": holder,
            "lease": round(lease * 1_000_000),
            "info": {"key": row.key, "worker": worker},
        }
        for row in rows
    ]
    # A mark may be there from before an operator brought the message back.
    values = {"created_at": clock(), "lease_expires_at": later(bindparam("lease"))}
    upsert(connection, table, binds, replaced=(*values, "lease_token", "info"), **values)


def upsert(
    connection: Connection,
    table: Table,
    binds: Sequence[Any],
    *,
    replaced: Sequence[str],
    **values: Any,
) -> None:
    """Insert rows of `binds` and `values`; of those that are there, write `replaced` anew."""
    statement: Any
    if connection.dialect.name in MYSQL:
        statement = mysql.insert(table).values(values)
        statement = statement.on_duplicate_key_update({c: statement.inserted[c] for c in replaced})
    else:
        statement = (
            (sqlite if connection.dialect.name == "sqlite" else postgresql)
            .insert(table)
            .values(values)
        )
        new = {c: statement.excluded[c] for c in replaced}
        statement = statement.on_conflict_do_update(index_elements=["scope", "key"], set_=new)
    connection.execute(statement, binds)


def insert_new(connection: Connection, table: Table, binds: Sequence[Any]) -> None:
    """Insert rows, and leave those that are there as they are; another transaction that inserts the
    same is waited for.
    """
    statement: Any
    if connection.dialect.name in MYSQL:
        # An upsert that changes nothing: IGNORE would hide other errors, too.
        statement = mysql.insert(table).on_duplicate_key_update(scope=table.c.scope)
    else:
        kind = sqlite if connection.dialect.name == "sqlite" else postgresql
        statement = kind.insert(table).on_conflict_do_nothing()
    connection.execute(statement, binds)


def renew_started(
    connection: Connection, table: Table, started: Sequence[Started], holder: UUID, lease: float
) -> None:
    """Lengthen what `holder` has noted as started to `lease` seconds from now."""
    until = later(bindparam("until"))
    statement = (
        update(table)
        .where(_one(table), table.c.lease_token == holder)
        .values(lease_expires_at=until)
    )
    lease_in = round(lease * 1_000_000)
    connection.execute(statement, [{**binds, "until": lease_in} for binds in _binds(started)])


def note_ended(
    connection: Connection, table: Table, started: Sequence[Started], holder: UUID
) -> None:
    """Remove what `holder` has noted as started."""
    connection.execute(
        delete(table).where(_one(table), table.c.lease_token == holder), _binds(started)
    )


def unknown(
    connection: Connection, table: Table, queue: str | None, limit: int
) -> list[UnknownOutcome]:
    """Up to `limit` starts whose holder has not been heard of for its lease, or that came back; the
    oldest first.
    """
    columns = table.c.scope, table.c.key, table.c.info, table.c.created_at
    statement = select(*columns).where(_overdue(table, queue))
    rows = connection.execute(statement.order_by(table.c.created_at, table.c.key).limit(limit))
    found = [_unknown(*row) for row in rows]
    return sorted(found, key=lambda outcome: (outcome.started_at, outcome.message_id))


def _overdue(table: Table, queue: str | None = None) -> ColumnElement[bool]:
    scope = table.c.scope
    these = [
        scope.startswith(prefix, autoescape=True) if queue is None else scope == prefix + queue
        for prefix in (ACK_FIRST, ONCE)
    ]
    return and_(or_(*these), table.c.lease_expires_at <= clock())


def _unknown(scope: str, key: str, info: Any, started_at: datetime) -> UnknownOutcome:
    if scope.startswith(ONCE):
        return UnknownOutcome(
            info["message"], scope.removeprefix(ONCE), key, started_at, info["worker"]
        )
    return UnknownOutcome(
        int(key), scope.removeprefix(ACK_FIRST), info["key"], started_at, info["worker"]
    )


def forget_unknown(connection: Connection, table: Table, ids: Sequence[int]) -> int:
    """Take `ids` off the list of `unknown`; how many were on it. A key that is handled once stays
    claimed.
    """
    columns = table.c.scope, table.c.key, table.c.info, table.c.created_at
    rows = connection.execute(select(*columns).where(_overdue(table))).all()
    wanted = set(ids)
    found = [row for row in rows if _unknown(*row).message_id in wanted]
    one = and_(_one(table), table.c.lease_expires_at <= clock())
    removed = [
        {"of_scope": r.scope, "of_key": r.key} for r in found if r.scope.startswith(ACK_FIRST)
    ]
    if removed:
        connection.execute(delete(table).where(one), removed)
    unmarked = [{"of_scope": r.scope, "of_key": r.key} for r in found if r.scope.startswith(ONCE)]
    if unmarked:
        connection.execute(update(table).where(one).values(lease_expires_at=None), unmarked)
    return len(found)


def has_expired(connection: Connection, table: Table) -> bool:
    """Whether `forget_expired` would find any row; only reads."""
    over = select(table.c.key).where(table.c.expires_at <= clock()).limit(1)
    return connection.execute(over).first() is not None


def forget_expired(
    connection: Connection,
    table: Table,
    limit: int,
    forgotten: Callable[[Sequence[Any]], Sequence[Any]] = lambda rows: rows,
) -> int:
    """Look at up to `limit` rows that may be forgotten by now, and remove those that `forgotten`
    returns; at how many it has looked.
    """
    over = table.c.expires_at <= clock()
    columns = table.c.scope, table.c.key, table.c.counter, table.c.created_at
    rows = connection.execute(select(*columns).where(over).limit(limit)).all()
    if removed := forgotten(rows):
        binds = [{"of_scope": row.scope, "of_key": row.key} for row in removed]
        connection.execute(delete(table).where(_one(table), over), binds)
    return len(rows)


def _one(table: Table) -> ColumnElement[bool]:
    # One key at a time: for a list of keys MariaDB would scan a small table, and wait for rows that
    # another transaction has locked.
    return and_(table.c.scope == bindparam("of_scope"), table.c.key == bindparam("of_key"))


def _binds(started: Sequence[Started]) -> list[dict[str, Any]]:
    return [
        {"of_scope": ACK_FIRST + queue, "of_key": str(message_id)} for queue, message_id in started
    ]

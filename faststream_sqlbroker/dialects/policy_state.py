"""The small table of what outlives a message's row, by (scope, key); the same on every database."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Table, and_, bindparam, delete, func, select, true, update
from sqlalchemy.dialects import mysql, postgresql

from faststream_sqlbroker.core.rows import ClaimedMessage, UnknownOutcome
from faststream_sqlbroker.dialects.chunks import chunks
from faststream_sqlbroker.schema.types import MYSQL, clock, later

ORDERED = "ordered"
ACK_FIRST = "ack_first:"
"""The scope is this and the queue; the key is the message's id."""


def lock_order(connection: Connection, table: Table, queues: Sequence[str], time_limit: float) -> None:
    """Keep other ordered claims of `queues` waiting until the transaction ends.

    On PostgreSQL the server ends it after `time_limit` idle seconds: a process that is stopped in the middle of
    a claim would keep everybody waiting. The others have no such limit for one transaction.
    """
    columns: list[Any] = [table.c.key]
    if connection.dialect.name == "postgresql":
        limit = f"{max(1, round(time_limit * 1000))}ms"
        columns.append(func.set_config("idle_in_transaction_session_timeout", limit, true()))
    rows = select(*columns).where(table.c.scope == ORDERED, table.c.key.in_(queues))
    rows = rows.order_by(table.c.key).with_for_update()
    if len(connection.execute(rows).all()) == len(queues):
        return
    binds = [{"scope": ORDERED, "key": queue} for queue in queues]
    if connection.dialect.name in MYSQL:
        connection.execute(mysql.insert(table).prefix_with("IGNORE"), binds)
    else:
        connection.execute(postgresql.insert(table).on_conflict_do_nothing(), binds)
    connection.execute(rows).all()


def note_started(
    connection: Connection,
    table: Table,
    rows: Sequence[ClaimedMessage],
    holder: UUID,
    lease: float,
    worker: str,
) -> None:
    """Note that `holder` is about to start the handlers of `rows`, which are removed in the same transaction."""
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
    replaced = ("created_at", "lease_token", "lease_expires_at", "info")
    values = {"created_at": clock(), "lease_expires_at": later(bindparam("lease"))}
    statement: Any
    if connection.dialect.name in MYSQL:
        statement = mysql.insert(table).values(values)
        statement = statement.on_duplicate_key_update({c: statement.inserted[c] for c in replaced})
    else:
        statement = postgresql.insert(table).values(values)
        new = {c: statement.excluded[c] for c in replaced}
        statement = statement.on_conflict_do_update(index_elements=["scope", "key"], set_=new)
    connection.execute(statement, binds)


def renew_started(
    connection: Connection, table: Table, ids: Mapping[str, Sequence[int]], holder: UUID, lease: float
) -> None:
    """Lengthen what `holder` has noted as started to `lease` seconds from now; `ids` by queue."""
    for condition in _marks(table, ids):
        statement = update(table).where(condition, table.c.lease_token == holder)
        connection.execute(
            statement.values(lease_expires_at=later(bindparam("lease", round(lease * 1_000_000))))
        )


def note_ended(connection: Connection, table: Table, ids: Mapping[str, Sequence[int]], holder: UUID) -> None:
    """Remove what `holder` has noted as started; `ids` by queue."""
    for condition in _marks(table, ids):
        connection.execute(delete(table).where(condition, table.c.lease_token == holder))


def unknown(connection: Connection, table: Table, queue: str | None, limit: int) -> list[UnknownOutcome]:
    """Up to `limit` starts whose holder has not been heard of for its lease, the oldest first."""
    scope = table.c.scope
    of = scope.startswith(ACK_FIRST, autoescape=True) if queue is None else scope == ACK_FIRST + queue
    statement = select(scope, table.c.key, table.c.info, table.c.created_at)
    statement = statement.where(of, table.c.lease_expires_at < clock())
    rows = connection.execute(statement.order_by(table.c.created_at, table.c.key).limit(limit))
    return [
        UnknownOutcome(
            int(r.key), r.scope.removeprefix(ACK_FIRST), r.info["key"], r.created_at, r.info["worker"]
        )
        for r in rows
    ]


def forget_unknown(connection: Connection, table: Table, ids: Sequence[int]) -> int:
    """Take `ids` off the list of `unknown`; how many were on it."""
    count = 0
    for part in chunks(ids):
        listed = table.c.scope.startswith(ACK_FIRST, autoescape=True), table.c.lease_expires_at < clock()
        statement = delete(table).where(table.c.key.in_([str(i) for i in part]), *listed)
        count += connection.execute(statement).rowcount
    return count


def _marks(table: Table, ids: Mapping[str, Sequence[int]]) -> Iterator[ColumnElement[bool]]:
    for queue, all_ids in ids.items():
        for part in chunks(all_ids):
            yield and_(table.c.scope == ACK_FIRST + queue, table.c.key.in_([str(i) for i in part]))

"""Locks by key: rows of the policy state. They are never removed, because their counter is the
fence: it must not start again.

The statements are the same on every database. A lock is free if it has no token, or if its lease
has run out by the database's clock. Taking it writes a new token and raises the counter. Every
later write names the token.
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Table,
    and_,
    case,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite

from faststream_sqlbroker.core.status import HeldLock
from faststream_sqlbroker.schema.types import MYSQL, clock, later

LOCK = "lock"
"""The scope of all locks."""


def acquire(
    connection: Connection, table: Table, key: str, token: UUID, lease: float, worker: str
) -> int | None:
    """Take the lock `key` for `lease` seconds if it is free; returns its fence, or None.

    A repeated call with the holder's token extends the lease and returns the same fence. So it
    can be repeated when the answer to its COMMIT was lost.
    """
    values = {
        "lease_token": token,
        "lease_expires_at": _from_now(lease),
        "created_at": clock(),
        "info": {"worker": worker},
    }
    new = {"scope": LOCK, "key": key, "counter": 1, **values}
    if connection.dialect.name in MYSQL:
        return _acquire_in_steps(connection, table, key, token, values, new)
    insert: Any = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(table)
    taken = insert.values(new).on_conflict_do_update(
        index_elements=["scope", "key"],
        set_={"counter": _next(table, token), **values},
        where=_free(table, token),
    )
    fence: int | None = connection.execute(taken.returning(table.c.counter)).scalar_one_or_none()
    return fence


def _acquire_in_steps(
    connection: Connection,
    table: Table,
    key: str,
    token: UUID,
    values: dict[str, Any],
    new: dict[str, Any],
) -> int | None:
    c = table.c
    ours = select(table.c.counter).where(_of(table, key), table.c.lease_token == token)
    # MySQL assigns from left to right and reads new values: the counter must be set while
    # lease_token still is the old one.
    taken = update(table).where(_of(table, key), _free(table, token))
    connection.execute(
        taken.ordered_values(
            (c.counter, _next(table, token)), *((c[name], v) for name, v in values.items())
        )
    )
    fence: int | None = connection.execute(ours).scalar_one_or_none()
    if fence is None and connection.execute(select(c.key).where(_of(table, key))).first() is None:
        # A race: another process may insert the row first. Then this statement changes nothing,
        # and the token read below is not ours.
        connection.execute(mysql.insert(table).values(new).on_duplicate_key_update(scope=c.scope))
        fence = connection.execute(ours).scalar_one_or_none()
    return fence


def extend(connection: Connection, table: Table, key: str, token: UUID, lease: float) -> bool:
    """Extend the lease of `token` to `lease` seconds from now.

    False if another token has taken the lock since. A lease that ran out, but was not taken, is
    extended: nothing happened under the lock that its holder could miss.
    """
    held = update(table).where(_of(table, key), table.c.lease_token == token)
    return _wrote(connection, held.values(lease_expires_at=_from_now(lease)))


def release(connection: Connection, table: Table, key: str, token: UUID) -> bool:
    """Give the lock back; false if `token` no longer holds it."""
    held = update(table).where(_of(table, key), table.c.lease_token == token)
    return _wrote(connection, held.values(lease_token=None, lease_expires_at=None))


def force(connection: Connection, table: Table, key: str) -> bool:
    """Take the lock from its holder; returns whether it was held.

    The counter is raised, so that the holder's fence is no longer the newest.
    """
    held = update(table).where(_of(table, key), table.c.lease_token.is_not(None))
    return _wrote(
        connection,
        held.values(lease_token=None, lease_expires_at=None, counter=table.c.counter + 1),
    )


def held(connection: Connection, table: Table, limit: int) -> Sequence[HeldLock]:
    """Up to `limit` locks that are held, by key."""
    c = table.c
    statement = select(c.key, c.counter, c.created_at, c.lease_expires_at, c.info)
    statement = statement.where(
        c.scope == LOCK, c.lease_token.is_not(None), c.lease_expires_at > clock()
    )
    rows = connection.execute(statement.order_by(c.key).limit(limit))
    return [
        HeldLock(r.key, r.counter, r.created_at, r.lease_expires_at, r.info["worker"]) for r in rows
    ]


def _of(table: Table, key: str) -> ColumnElement[bool]:
    return and_(table.c.scope == LOCK, table.c.key == key)


def _free(table: Table, token: UUID) -> ColumnElement[bool]:
    c = table.c
    return or_(c.lease_token.is_(None), c.lease_expires_at <= clock(), c.lease_token == token)


def _next(table: Table, token: UUID) -> ColumnElement[int]:
    c = table.c
    return case((c.lease_token == token, c.counter), else_=c.counter + 1)


def _from_now(seconds: float) -> Any:
    return later(literal(round(seconds * 1_000_000), BigInteger))


def _wrote(connection: Connection, statement: Any) -> bool:
    return bool(connection.execute(statement).rowcount)

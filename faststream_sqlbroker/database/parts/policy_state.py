"""The small table of what outlives a message's row, by (scope, key); the same on every database."""

import os
import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    delete,
    literal,
    select,
)

from faststream_sqlbroker.core.correlation import is_database_id, new_database_id
from faststream_sqlbroker.core.rows import ClaimedMessage
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
DATABASE = "database"
"""The scope of one row, with the random bits that tell this database's messages from another's."""
DATABASE_KEY = "id"
"""Its key; the bits are in `info`, also as "id"."""


def process_name() -> str:
    """Host and process id of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


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
    statement = insert_into(table, connection.dialect.name).values(values)
    if connection.dialect.name in MYSQL:
        statement = statement.on_duplicate_key_update({c: statement.inserted[c] for c in replaced})
    else:
        new = {c: statement.excluded[c] for c in replaced}
        statement = statement.on_conflict_do_update(index_elements=["scope", "key"], set_=new)
    connection.execute(statement, binds)


def insert_new(connection: Connection, table: Table, binds: Sequence[Any]) -> None:
    """Insert rows, and leave those that are there as they are; another transaction that inserts the
    same is waited for.
    """
    statement = insert_into(table, connection.dialect.name)
    if connection.dialect.name in MYSQL:
        # An upsert that changes nothing: IGNORE would hide other errors, too.
        statement = statement.on_duplicate_key_update(scope=table.c.scope)
    else:
        statement = statement.on_conflict_do_nothing()
    connection.execute(statement, binds)


def insert_into(table: Table, dialect_name: str) -> Any:
    """The database's own INSERT, which can leave rows that are there, or write them anew."""
    # Its module takes 50 ms to import: only that of the database in use is.
    name = "mysql" if dialect_name in MYSQL else dialect_name
    return import_module(f"sqlalchemy.dialects.{name}").insert(table)


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
        connection.execute(delete(table).where(at_key(table), over), binds)
    return len(rows)


def at_key(table: Table) -> ColumnElement[bool]:
    """The condition of the row at the binds `of_scope` and `of_key`."""
    # One key at a time: for a list of keys MariaDB would scan a small table, and wait for rows that
    # another transaction has locked.
    return and_(table.c.scope == bindparam("of_scope"), table.c.key == bindparam("of_key"))


def from_now(seconds: float) -> Any:
    """The time in so many `seconds` by the database's clock, such as the end of a lease."""
    return later(literal(round(seconds * 1_000_000), BigInteger))


def read_database_id(connection: Connection, table: Table) -> str | None:
    """The bits; None if none were drawn yet, or another program has changed them."""
    return _read_id(connection, table, lock=False)


def make_database_id(connection: Connection, table: Table) -> str | None:
    """The bits, which are drawn now if there are none; None as `read_database_id`."""
    if (found := _read_id(connection, table, lock=False)) is not None:
        return found
    # A race: another process may have drawn them since. Then its row stays.
    drawn = {"scope": DATABASE, "key": DATABASE_KEY, "info": {"id": new_database_id()}}
    upsert(connection, table, [drawn], replaced=("scope",))
    return _read_id(connection, table, lock=True)


def _read_id(connection: Connection, table: Table, *, lock: bool) -> str | None:
    row = select(table.c.info).where(table.c.scope == DATABASE, table.c.key == DATABASE_KEY)
    info = connection.execute(row.with_for_update() if lock else row).scalar()
    value = info.get("id") if isinstance(info, dict) else None
    return value if is_database_id(value) else None

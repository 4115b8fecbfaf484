"""Replies to requests: messages in a queue that one process has for itself.

Only that process reads the queue, so a reply needs no lease: it is read, handed over, and deleted
by its id. Nothing of it is archived.

The process notes its queue in the policy state, with a time until which it is used. The heartbeat
of any process removes expired replies from all noted queues, and everything from a queue whose time
is over: its process has ended, or has made no request since.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Table, bindparam, delete, select

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.constants import MAX_REPLIES
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.policy_state import upsert
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.schema.types import clock, later

SCOPE = "replies"
"""Scope of the queues of replies in the policy state; the key is the queue."""
_CLEANED = 100
"""Queues that one heartbeat looks after at most, so that it stays short."""
_NO_TOKEN = UUID(int=0)


def reading(dialect: Dialect, queue: str) -> Query[list[ClaimedMessage]]:
    """The replies in `queue`, which stay there; they have no lease."""

    def read(rows: Iterable[Sequence[Any]]) -> list[ClaimedMessage]:
        return dialect.claimed(rows, _NO_TOKEN)

    return Query(dialect.sql["replies"], {"queue": queue}, read)


def note_queue(connection: Connection, table: Table, queue: str, seconds: float) -> None:
    """Note that `queue` is used for `seconds` from now at least."""
    binds = {"scope": SCOPE, "key": queue, "used": round(seconds * 1_000_000)}
    ends = {"expires_at": later(bindparam("used"))}
    upsert(connection, table, [binds], replaced=["expires_at"], created_at=clock(), **ends)


def clear_queue(dialect: Dialect, connection: Connection, queue: str) -> None:
    """Remove all replies from `queue`."""
    _remove_left(dialect, connection, queue, everything=True)


def forget_queue(connection: Connection, table: Table, queue: str) -> None:
    """Forget that `queue` is used."""
    connection.execute(delete(table).where(table.c.scope == SCOPE, table.c.key == queue))


def clean(dialect: Dialect, connection: Connection) -> None:
    """Remove expired replies from the noted queues, and queues that are no longer used."""
    table = dialect.tables.policy_state
    is_over = (table.c.expires_at < clock()).label("is_over")
    noted = select(table.c.key, is_over).where(table.c.scope == SCOPE)
    queues = connection.execute(noted.order_by(table.c.expires_at).limit(_CLEANED)).all()
    for queue, over in queues:
        _remove_left(dialect, connection, queue, everything=bool(over))
        if over:
            # Its process may have noted it again since.
            one = (table.c.scope == SCOPE, table.c.key == queue, table.c.expires_at < clock())
            connection.execute(delete(table).where(*one))


def _remove_left(dialect: Dialect, connection: Connection, queue: str, *, everything: bool) -> None:
    binds = {"queue": queue, "everything": int(everything)}
    while ids := connection.execute(dialect.sql["left_replies"], binds).scalars().all():
        dialect.removing(sorted(ids))(connection)
        if len(ids) < MAX_REPLIES:
            return

"""Remaining messages in reply queues, and their removal.

A process notes its queue in the policy state, with a time until which it is used. The heartbeat
of any process removes expired replies from all noted queues, and everything from a queue whose
time is over: its process has ended, or has made no request since.
"""

from sqlalchemy import Connection, delete, select

from faststream_sqlbroker.database.constants import MAX_REPLIES
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.schema.types import clock

SCOPE = "replies"
"""Scope of the reply queues in the policy state; the key is the queue."""
MAX_CLEANED = 100
"""Maximum queues that one heartbeat cleans, so that it stays short."""


def remove_unused(dialect: Dialect, connection: Connection) -> None:
    """Remove expired replies from the noted queues, and queues that are no longer used.

    A process notes its reply queue in the policy state, with a time until which it is used. If that
    has passed, the process has ended, or has made no request since: the queue is emptied.
    """
    table = dialect.tables.policy_state
    is_over = (table.c.expires_at < clock()).label("is_over")
    statement = select(table.c.key, is_over).where(table.c.scope == SCOPE)
    queues = connection.execute(statement.order_by(table.c.expires_at).limit(MAX_CLEANED)).all()
    for queue, is_unused in queues:
        remove_replies(dialect, connection, queue, everything=bool(is_unused))
        if is_unused:
            # The process may have noted the queue again in the meantime.
            condition = (table.c.scope == SCOPE, table.c.key == queue, table.c.expires_at < clock())
            connection.execute(delete(table).where(*condition))


def remove_replies(
    dialect: Dialect, connection: Connection, queue: str, *, everything: bool
) -> None:
    """Remove expired replies from `queue`, or all with `everything`; nothing is archived.

    Their callers wait no more. Removes a batch at a time, until a batch is not full.
    """
    binds = {"queue": queue, "everything": int(everything)}
    while ids := connection.execute(dialect.sql["left_replies"], binds).scalars().all():
        dialect.build_remove(sorted(ids))(connection)
        if len(ids) < MAX_REPLIES:
            return

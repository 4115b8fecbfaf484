"""How many messages of a queue are due, counted up to a limit.

Each range is one of an index, and is left as soon as the limit is reached.
"""

from sqlalchemy import Connection

from faststream_sqlbroker.database.operations import Operations


def due_messages(connection: Connection, dialect: Operations, queue: str, most: int) -> int:
    """How many messages of `queue` are due and not leased; `most` if there are more."""
    found = 0
    for pair in dialect.ready_pairs(connection, [queue]):
        if pair.due_in > 0 or found >= most:
            continue
        binds = {"queue": queue, "priority": pair.priority, "most": most - found}
        found += int(connection.execute(dialect.sql["count_due"], binds).scalar_one())
    return found

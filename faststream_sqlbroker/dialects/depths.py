"""How many messages of a queue are due, and how many are leased, counted up to a limit.

Each range is one of an index, and is left as soon as the limit is reached.
"""

from sqlalchemy import Connection

from faststream_sqlbroker.core.states import CLAIMABLE_STATES, MessageState
from faststream_sqlbroker.dialects.operations import Operations
from faststream_sqlbroker.schema.types import MYSQL

_COUNT = (
    "SELECT count(*) FROM (SELECT 1 FROM {message}{hint}\n"
    "WHERE {of} ORDER BY next_attempt_at LIMIT :most) AS found"
)
# In the order of the index: else PostgreSQL may read the table from its begin.


def add_depths(dialect: Operations, now: str) -> None:
    """Add the statement to `dialect`; `now` is its clock."""
    states = ", ".join(f"'{s.name}'" for s in MessageState if s in CLAIMABLE_STATES)
    # Written out, not bound: partial indexes serve only conditions that name their own.
    claimable = f"state IN ({states})"
    hint = ""
    if dialect.name in MYSQL:
        claimable = "claimable = 1"
        hint = " FORCE INDEX ({ready_index})".format(**dialect.names)
    of = f"{claimable} AND queue = :queue AND priority = :priority AND next_attempt_at <= {now}"
    dialect.add_statement("count_due", _COUNT, hint=hint, of=of)


def due_messages(connection: Connection, dialect: Operations, queue: str, most: int) -> int:
    """How many messages of `queue` are due and not leased; `most` if there are more."""
    found = 0
    for pair in dialect.ready_pairs(connection, [queue]):
        if pair.due_in > 0 or found >= most:
            continue
        binds = {"queue": queue, "priority": pair.priority, "most": most - found}
        found += int(connection.execute(dialect.sql["count_due"], binds).scalar_one())
    return found

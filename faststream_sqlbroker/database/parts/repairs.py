"""New columns of messages that an operator moves or makes due."""

from datetime import datetime
from typing import Any

from sqlalchemy import literal_column

from faststream_sqlbroker.core.policies.flags import KEPT
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.schema.types import clock, later

MOVED: dict[str, Any] = {
    "state": MessageState.PENDING.name,
    "attempts_count": 0,
    "deliveries_count": 0,
    "first_attempt_at": None,
    "last_attempt_at": None,
    "dedup_id": None,
    "policy_marks": 0,
    # A person has looked at it: the count of the broker's own moves begins anew.
    "hops": 0,
    "next_attempt_at": clock(),
}
"""The columns of a message that an operator moves, but its queue."""


def due_at(dialect: Operations, at: datetime | float) -> dict[str, Any]:
    """What makes a message due at a moment, or in so many seconds: columns and their new values. It
    keeps no slot of a Throttle.

    Not for one that stands by: elsewhere, the message that is delivered in its place would not find
    it, and it would come after that one.
    """
    marks = dialect.tables.message.c.policy_marks.op("&")(KEPT)
    return {"next_attempt_at": moment(at), "policy_marks": marks}


def moment(at: datetime | float) -> Any:
    """A moment, or that in so many seconds, by the database's clock."""
    if isinstance(at, datetime):
        return at
    return later(literal_column(str(round(at * 1_000_000))))

"""How far long handlers have come: a row of the policy state for each message that says so."""

from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Table, bindparam, select

from faststream_sqlbroker.core.stored import Progress
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.policy_state import upsert
from faststream_sqlbroker.schema.types import clock, later

PROGRESS = "progress"
"""The scope; the key is the message's id, the token that of the delivery that says so."""
KEPT = 86_400.0
"""Seconds that a row is kept after it was written; the last one outlives its handler."""


def note(
    connection: Connection, dialect: Operations, message_id: int, token: UUID, info: dict[str, Any]
) -> bool:
    """Write how far the delivery has come, if it still has its lease; whether it has."""
    # A worker that has lost its lease must not hide what the next one says.
    if not dialect.still_held(connection, [(message_id, token)]):
        return False
    binds = {"scope": PROGRESS, "key": str(message_id), "lease_token": token, "info": info}
    binds["kept"] = round(KEPT * 1_000_000)
    times = {"created_at": clock(), "expires_at": later(bindparam("kept"))}
    replaced = (*times, "lease_token", "info")
    upsert(connection, dialect.tables.policy_state, [binds], replaced=replaced, **times)
    return True


def read(connection: Connection, dialect: Operations, message_id: int) -> Progress | None:
    """What the delivery that has the lease now says of itself."""
    message = dialect.tables.message.c
    token = connection.execute(select(message.lease_token).where(message.id == message_id)).scalar()
    if token is None:
        return None
    table: Table = dialect.tables.policy_state
    said = select(table.c.info, table.c.created_at).where(
        table.c.scope == PROGRESS,
        table.c.key == str(message_id),
        # Of an earlier delivery of the message: it says nothing of this one.
        table.c.lease_token == token,
    )
    row = connection.execute(said).first()
    if row is None:
        return None
    return Progress(float(row.info["fraction"]), row.info["text"], row.created_at)

"""Keys of policy Once: claimed before the handler starts, and kept for a time. A crash does not
give them back.

Scope "once:<queue>", key the message's. The token names the delivery that claimed it, so that a
claim whose COMMIT was not answered can be repeated.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from uuid import UUID

from sqlalchemy import Connection, Table, and_, bindparam, delete, literal, null, select, update

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.dialects.policy_state import ONCE, upsert
from faststream_sqlbroker.schema.types import clock, later

Lock = Callable[..., set[int]]
KEPT = 86_400.0
"""Seconds that a claim is kept after its ttl: longer than a crashed message takes to come back."""


class Verdict(Enum):
    """What happens to a message whose handler would start now."""

    START = "its key is claimed for it"
    LOST = "its lease is gone"
    DUPLICATE = "another message has claimed its key"
    UNKNOWN = "it has claimed its key before, and it is not known how far its handler got"


def claim_keys(
    connection: Connection,
    table: Table,
    lock: Lock,
    rows: Sequence[ClaimedMessage],
    ttl: float,
    worker: str,
) -> dict[int, tuple[Verdict, int | None]]:
    """Claim the keys of `rows` for `ttl` seconds.

    Returns:
        By id the verdict on each row, and the message that has its key.
    """
    held = lock(connection, [(row.id, row.lease_token) for row in rows])
    verdicts: dict[int, tuple[Verdict, int | None]] = {
        row.id: (Verdict.LOST, None) for row in rows if row.id not in held
    }
    # In the order of keys: two transactions that claim the same keys lock them in the same order,
    # so they cannot deadlock.
    for row in sorted(
        (r for r in rows if r.id in held), key=lambda r: (r.queue, r.key or "", r.id)
    ):
        verdicts[row.id] = _claim_key(connection, table, row, ttl, worker)
    return verdicts


def _claim_key(
    connection: Connection, table: Table, row: ClaimedMessage, ttl: float, worker: str
) -> tuple[Verdict, int | None]:
    one = and_(table.c.scope == ONCE + row.queue, table.c.key == row.key)
    info = {"message": row.id, "worker": worker, "ttl": ttl}
    values = {
        "created_at": clock(),
        "lease_token": literal(_delivery(row), table.c.lease_token.type),
        "lease_expires_at": null(),
        "expires_at": later(bindparam("kept")),
        "info": literal(info, table.c.info.type),
    }
    binds = {"kept": round((ttl + KEPT) * 1_000_000)}
    # Inserts the row, or locks the existing one, so that what is read below stays true.
    new = {"scope": ONCE + row.queue, "key": row.key}
    upsert(connection, table, [{**new, **binds}], replaced=("scope",), **values)
    known = select(table.c.lease_token, table.c.info, table.c.created_at, clock()).where(one)
    token, info, since, now = connection.execute(known).one()
    if token == _delivery(row):
        return Verdict.START, row.id
    other = info["message"]
    over = since + timedelta(seconds=info["ttl"]) <= now
    if other == row.id and (not over or row.deliveries_count - 1 > row.attempts_count):
        # lease_expires_at puts the row on the list of unknown outcomes. The token is removed,
        # because the earlier delivery may still be running, only slowly. If it gave its claim back
        # now, the message would leave that list, and another message of its key would run.
        connection.execute(
            update(table).where(one).values(lease_expires_at=clock(), lease_token=null())
        )
        return Verdict.UNKNOWN, row.id
    if not over:
        return Verdict.DUPLICATE, other
    connection.execute(update(table).where(one).values(values), binds)
    return Verdict.START, row.id


def _delivery(row: ClaimedMessage) -> UUID:
    """A token of this delivery alone; all rows of one claim share their lease token."""
    return UUID(int=row.lease_token.int ^ row.id)


def give_back_keys(connection: Connection, table: Table, rows: Sequence[ClaimedMessage]) -> None:
    """Remove the claims of these deliveries; claims of others stay."""
    for row in sorted(rows, key=lambda r: (r.queue, r.key or "")):
        one = table.c.scope == ONCE + row.queue, table.c.key == row.key
        connection.execute(delete(table).where(*one, table.c.lease_token == _delivery(row)))

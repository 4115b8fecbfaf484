"""Keys that are handled at most once: claimed before the handler starts, kept for a time, never
given back by a crash.

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
"""Seconds that a claim is known after its ttl: by then a message that crashed has come back."""


class Verdict(Enum):
    """What is to become of a message before its handler starts."""

    START = "its key is claimed for it"
    LOST = "its lease is gone"
    DUPLICATE = "another message has claimed its key"
    UNKNOWN = "it has claimed its key before, and nobody knows how far its handler came"


def claim_keys(
    connection: Connection,
    table: Table,
    lock: Lock,
    rows: Sequence[ClaimedMessage],
    ttl: float,
    worker: str,
) -> dict[int, tuple[Verdict, int | None]]:
    """Claim the keys of `rows` for `ttl` seconds; what is to become of each, and which message has
    its key.
    """
    held = lock(connection, [(row.id, row.lease_token) for row in rows])
    verdicts: dict[int, tuple[Verdict, int | None]] = {
        row.id: (Verdict.LOST, None) for row in rows if row.id not in held
    }
    # One after the other by key: two claims of the same keys meet in the same order.
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
    # Makes the row, or locks the one that is there.
    new = {"scope": ONCE + row.queue, "key": row.key}
    upsert(connection, table, [{**new, **binds}], replaced=("scope",), **values)
    known = select(table.c.lease_token, table.c.info, table.c.created_at, clock()).where(one)
    token, info, since, now = connection.execute(known).one()
    if token == _delivery(row):
        return Verdict.START, row.id
    other = info["message"]
    over = since + timedelta(seconds=info["ttl"]) <= now
    if other == row.id and (not over or row.deliveries_count - 1 > row.attempts_count):
        # A mark for who lists unknown outcomes. The claim is no delivery's any more: were a slow
        # one to give it back now, the message would go from that list, and another of its key would
        # run.
        connection.execute(
            update(table).where(one).values(lease_expires_at=clock(), lease_token=null())
        )
        return Verdict.UNKNOWN, row.id
    if not over:
        return Verdict.DUPLICATE, other
    connection.execute(update(table).where(one).values(values), binds)
    return Verdict.START, row.id


def _delivery(row: ClaimedMessage) -> UUID:
    """A token of this delivery alone; that of its lease is shared by all of its claim."""
    return UUID(int=row.lease_token.int ^ row.id)


def give_back_keys(connection: Connection, table: Table, rows: Sequence[ClaimedMessage]) -> None:
    """Forget the claims of these deliveries."""
    for row in sorted(rows, key=lambda r: (r.queue, r.key or "")):
        one = table.c.scope == ONCE + row.queue, table.c.key == row.key
        connection.execute(delete(table).where(*one, table.c.lease_token == _delivery(row)))

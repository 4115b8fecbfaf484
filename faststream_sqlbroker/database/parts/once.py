"""Keys of policy Once: claimed before the handler starts, and kept for a time. A crash does not
give them back.

Scope "once:<queue>", key the message's. The token names the delivery that claimed it, so that a
claim whose COMMIT was not answered can be repeated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from itertools import groupby
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    delete,
    null,
    select,
    update,
)

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.parts.policy_state import ONCE, upsert
from faststream_sqlbroker.database.parts.sizes import chunks
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
    ours = sorted(
        (r for r in rows if r.id in held), key=lambda r: (r.queue, r.policy_key or "", r.id)
    )
    if not ours:
        return verdicts
    _insert(connection, table, ours, ttl, worker)
    claims = _read(connection, table, ours)
    unknown: list[ClaimedMessage] = []
    taken: list[ClaimedMessage] = []
    for row in ours:
        claim = claims[row.queue, row.policy_key]
        verdicts[row.id] = verdict = claim.judge(row)
        if verdict[0] is Verdict.UNKNOWN:
            unknown.append(row)
            claim.token = None
        elif verdict[0] is Verdict.START and claim.token != delivery_token(row):
            taken.append(row)
            claim.take(row)
    _mark_unknown(connection, table, unknown)
    _take_over(connection, table, taken, ttl, worker)
    return verdicts


@dataclass(slots=True)
class _Claim:
    """What is stored of one key."""

    token: UUID | None
    message: int
    over: bool
    """Whether its time to live is over."""

    def judge(self, row: ClaimedMessage) -> tuple[Verdict, int | None]:
        """The verdict on a message of the key, and the message that has the key."""
        if self.token == delivery_token(row):
            return Verdict.START, row.id
        again = row.deliveries_count > 1
        if self.message == row.id and (not self.over or again):
            return Verdict.UNKNOWN, row.id
        if not self.over:
            return Verdict.DUPLICATE, self.message
        return Verdict.START, row.id

    def take(self, row: ClaimedMessage) -> None:
        """`row` has the key from now on."""
        self.token = delivery_token(row)
        self.message = row.id
        self.over = False


def _insert(
    connection: Connection, table: Table, rows: Sequence[ClaimedMessage], ttl: float, worker: str
) -> None:
    """Insert the claims, or lock those that are there: what is read afterwards stays true."""
    binds = [
        {
            "scope": ONCE + row.queue,
            "key": row.policy_key,
            "lease_token": delivery_token(row),
            "info": claim_info(row, ttl, worker),
            "kept": _kept(ttl),
        }
        for row in rows
    ]
    values = {
        "created_at": clock(),
        "lease_expires_at": null(),
        "expires_at": later(bindparam("kept")),
    }
    upsert(connection, table, binds, replaced=("scope",), **values)


def _read(
    connection: Connection, table: Table, rows: Sequence[ClaimedMessage]
) -> dict[tuple[str, str | None], _Claim]:
    c = table.c
    found: dict[tuple[str, str | None], _Claim] = {}
    for queue, of_queue in groupby(rows, key=lambda row: row.queue):
        keys = list(dict.fromkeys(row.policy_key for row in of_queue))
        stored: dict[str, _Claim] = {}
        for part in chunks(keys):
            known = select(c.key, c.lease_token, c.info, c.created_at, clock())
            for key, token, info, since, now in connection.execute(
                known.where(c.scope == ONCE + queue, c.key.in_(part))
            ):
                over = since + timedelta(seconds=info["ttl"]) <= now
                stored[key] = _Claim(token, info["message"], over)
        for key in keys:
            # MySQL takes keys that differ in spaces at their end for one key.
            same = key if key in stored else next(k for k in stored if k.rstrip() == _bare(key))
            found[queue, key] = stored[same or ""]
    return found


def _bare(key: str | None) -> str:
    return (key or "").rstrip()


def _mark_unknown(connection: Connection, table: Table, rows: Sequence[ClaimedMessage]) -> None:
    """Put the claims of `rows` on the list of unknown outcomes, by `lease_expires_at`.

    The token is removed, because the earlier delivery may still be running, only slowly. If it gave
    its claim back now, the message would leave that list, and another message of its key would run.
    """
    if rows:
        statement = update(table).where(_one(table))
        statement = statement.values(lease_expires_at=clock(), lease_token=null())
        connection.execute(statement, [_place(row) for row in rows])


def _take_over(
    connection: Connection, table: Table, rows: Sequence[ClaimedMessage], ttl: float, worker: str
) -> None:
    if not rows:
        return
    values = {
        "created_at": clock(),
        "lease_token": bindparam("token", type_=table.c.lease_token.type),
        "lease_expires_at": null(),
        "expires_at": later(bindparam("kept")),
        "info": bindparam("claim", type_=table.c.info.type),
    }
    binds = [
        {
            **_place(row),
            "token": delivery_token(row),
            "claim": claim_info(row, ttl, worker),
            "kept": _kept(ttl),
        }
        for row in rows
    ]
    connection.execute(update(table).where(_one(table)).values(values), binds)


def _one(table: Table) -> ColumnElement[bool]:
    return and_(table.c.scope == bindparam("of_scope"), table.c.key == bindparam("of_key"))


def _place(row: ClaimedMessage) -> dict[str, Any]:
    return {"of_scope": ONCE + row.queue, "of_key": row.policy_key}


def _kept(ttl: float) -> int:
    return round((ttl + KEPT) * 1_000_000)


def claim_info(row: ClaimedMessage, ttl: float, worker: str) -> dict[str, Any]:
    """What is stored with a key that `row` has claimed."""
    return {"message": row.id, "worker": worker, "ttl": ttl}


def delivery_token(row: ClaimedMessage) -> UUID:
    """A token of this delivery alone; all rows of one claim share their lease token."""
    return UUID(int=row.lease_token.int ^ row.id)


def give_back_keys(
    connection: Connection, table: Table, lock: Lock, rows: Sequence[ClaimedMessage]
) -> None:
    """Remove the claims of these deliveries; claims of others stay."""
    # A claim whose COMMIT was not answered may still be under way, and has locked its messages.
    lock(connection, [(row.id, row.lease_token) for row in rows])
    statement = delete(table).where(_one(table), table.c.lease_token == bindparam("token"))
    ours = sorted(rows, key=lambda row: (row.queue, row.policy_key or ""))
    if ours:
        binds = [{**_place(row), "token": delivery_token(row)} for row in ours]
        connection.execute(statement, binds)

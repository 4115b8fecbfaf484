"""Keys of the policy Once: claimed before the handler starts, and stored for a time.

A crash does not release them. The scope is "once:<queue>", the key is the message's. The token
names the delivery that claimed the key, so that a claim whose COMMIT was not answered can be
repeated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from itertools import groupby
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Table, bindparam, delete, null, select, update

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.parts.policy_state import ONCE, match_key, upsert
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.schema.types import clock, later

Lock = Callable[..., set[int]]
RETENTION = 86_400.0
"""Seconds for which a claim is stored after its ttl: longer than a crashed message takes to come
back.
"""


class OnceStatus(Enum):
    """The status of a message whose handler would start now."""

    START = "it has claimed its key"
    LOST = "its lease is lost"
    DUPLICATE = "another message has claimed its key"
    UNKNOWN = "an earlier delivery claimed its key, and the outcome of its handler is unknown"


def claim_keys(
    connection: Connection,
    table: Table,
    lock: Lock,
    rows: Sequence[ClaimedMessage],
    ttl: float,
    worker: str,
) -> dict[int, tuple[OnceStatus, int | None]]:
    """Claim the keys of `rows` for `ttl` seconds before their handlers start.

    The messages are locked first: a message whose lease is lost must not claim its key. Repeating
    the call with the same leases changes nothing, as each claim names its delivery.

    Returns:
        By id, the status of each row and the message that has its key.
    """
    locked = lock(connection, [(row.id, row.lease_token) for row in rows])
    results: dict[int, tuple[OnceStatus, int | None]] = {
        row.id: (OnceStatus.LOST, None) for row in rows if row.id not in locked
    }
    # In the order of keys: two transactions that claim the same keys lock them in the same order,
    # so they cannot deadlock.
    locked_rows = sorted(
        (row for row in rows if row.id in locked),
        key=lambda row: (row.queue, row.once_key or "", row.id),
    )
    if not locked_rows:
        return results
    _insert(connection, table, locked_rows, ttl, worker)
    claims = _load_claims(connection, table, locked_rows)
    unknown: list[ClaimedMessage] = []
    takeovers: list[ClaimedMessage] = []
    for row in locked_rows:
        claim = claims[row.queue, row.once_key]
        results[row.id] = result = claim.get_status(row)
        if result[0] is OnceStatus.UNKNOWN:
            unknown.append(row)
            claim.token = None
        elif result[0] is OnceStatus.START and claim.token != get_delivery_token(row):
            takeovers.append(row)
            claim.set_owner(row)
    _mark_unknown(connection, table, unknown)
    _update_claims(connection, table, takeovers, ttl, worker)
    return results


@dataclass(slots=True)
class _StoredClaim:
    """The stored claim of a key."""

    token: UUID | None
    message: int
    is_expired: bool
    """True if its time to live is over."""

    def get_status(self, row: ClaimedMessage) -> tuple[OnceStatus, int | None]:
        """Return the status of a message of the key, and the message that has the key.

        If an earlier delivery of the message claimed the key, its handler may have run: the outcome
        is unknown, and the handler does not start again.
        """
        if self.token == get_delivery_token(row):
            return OnceStatus.START, row.id
        is_redelivery = row.deliveries_count > 1
        if self.message == row.id and (not self.is_expired or is_redelivery):
            return OnceStatus.UNKNOWN, row.id
        if not self.is_expired:
            return OnceStatus.DUPLICATE, self.message
        return OnceStatus.START, row.id

    def set_owner(self, row: ClaimedMessage) -> None:
        """Give the key to `row`."""
        self.token = get_delivery_token(row)
        self.message = row.id
        self.is_expired = False


def _insert(
    connection: Connection, table: Table, rows: Sequence[ClaimedMessage], ttl: float, worker: str
) -> None:
    """Insert the claims, or lock existing claims: values read afterwards stay true.

    An existing claim of another message or delivery keeps its values: the upsert replaces the scope
    only, by the same value.
    """
    binds = [
        {
            "scope": ONCE + row.queue,
            "key": row.once_key,
            "lease_token": get_delivery_token(row),
            "info": build_claim_info(row, ttl, worker),
            "kept": _get_retention(ttl),
        }
        for row in rows
    ]
    values = {
        "created_at": clock(),
        "lease_expires_at": null(),
        "expires_at": later(bindparam("kept")),
    }
    upsert(connection, table, binds, replaced=("scope",), **values)


def _load_claims(
    connection: Connection, table: Table, rows: Sequence[ClaimedMessage]
) -> dict[tuple[str, str | None], _StoredClaim]:
    """Return the stored claims by queue and key, after `_insert` has claimed all keys.

    A claim names one of these rows, or the message that had claimed the key before.
    """
    c = table.c
    claims: dict[tuple[str, str | None], _StoredClaim] = {}
    for queue, queue_rows in groupby(rows, key=lambda row: row.queue):
        keys = list(dict.fromkeys(row.once_key for row in queue_rows))
        stored: dict[str, _StoredClaim] = {}
        for part in iter_chunks(keys):
            statement = select(c.key, c.lease_token, c.info, c.created_at, clock())
            for key, token, info, since, now in connection.execute(
                statement.where(c.scope == ONCE + queue, c.key.in_(part))
            ):
                is_expired = since + timedelta(seconds=info["ttl"]) <= now
                stored[key] = _StoredClaim(token, info["message"], is_expired)
        for key in keys:
            # MySQL treats keys as equal that differ only in trailing spaces.
            stored_key = (
                key
                if key in stored
                else next(
                    candidate for candidate in stored if candidate.rstrip() == (key or "").rstrip()
                )
            )
            claims[queue, key] = stored[stored_key or ""]
    return claims


def _mark_unknown(connection: Connection, table: Table, rows: Sequence[ClaimedMessage]) -> None:
    """Put the claims of `rows` on the list of unknown outcomes, by `lease_expires_at`.

    The token is removed because the earlier delivery may still be running slowly. If it released
    its claim now, the message would leave that list, and another message of its key would run.
    """
    if rows:
        statement = update(table).where(match_key(table))
        statement = statement.values(lease_expires_at=clock(), lease_token=null())
        connection.execute(statement, [_get_key_binds(row) for row in rows])


def _update_claims(
    connection: Connection, table: Table, rows: Sequence[ClaimedMessage], ttl: float, worker: str
) -> None:
    """Give the keys of expired claims to `rows`, for `ttl` seconds from now.

    `claim_keys` has locked these claims, so no other message can take them.
    """
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
            **_get_key_binds(row),
            "token": get_delivery_token(row),
            "claim": build_claim_info(row, ttl, worker),
            "kept": _get_retention(ttl),
        }
        for row in rows
    ]
    connection.execute(update(table).where(match_key(table)).values(values), binds)


def _get_key_binds(row: ClaimedMessage) -> dict[str, Any]:
    return {"of_scope": ONCE + row.queue, "of_key": row.once_key}


def _get_retention(ttl: float) -> int:
    return round((ttl + RETENTION) * 1_000_000)


def build_claim_info(row: ClaimedMessage, ttl: float, worker: str) -> dict[str, Any]:
    """Return the information stored with a key that `row` has claimed."""
    return {"message": row.id, "worker": worker, "ttl": ttl}


def get_delivery_token(row: ClaimedMessage) -> UUID:
    """Return a token for this delivery only.

    All rows of a claim share the same lease token, but each claims its own key.
    """
    return UUID(int=row.lease_token.int ^ row.id)


def release_keys(
    connection: Connection, table: Table, lock: Lock, rows: Sequence[ClaimedMessage]
) -> None:
    """Remove the claims of the deliveries of `rows`; claims of other deliveries stay.

    Called when the messages will be tried again: their next deliveries must find the keys free.
    """
    # A claim whose COMMIT was not answered may still be running, and has locked its messages.
    lock(connection, [(row.id, row.lease_token) for row in rows])
    statement = delete(table).where(match_key(table), table.c.lease_token == bindparam("token"))
    sorted_rows = sorted(rows, key=lambda row: (row.queue, row.once_key or ""))
    if sorted_rows:
        binds = [{**_get_key_binds(row), "token": get_delivery_token(row)} for row in sorted_rows]
        connection.execute(statement, binds)

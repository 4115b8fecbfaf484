"""Requests to cancel messages that are leased: rows of the policy state.

The statements are the same on every database.

A request names one lease by its token. Its holder reads it and ends the handler. If the lease ends
before that, who releases expired leases discards the message instead.
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Table, and_, bindparam, delete, select

from faststream_sqlbroker.core.orders import CancelRequest
from faststream_sqlbroker.core.reasons import CANCELLED
from faststream_sqlbroker.core.rows import Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.policy_state import upsert
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import clock, later

CANCEL = "cancel"
"""Scope of the requests; the key is the message's id."""
_KEPT = 7 * 86_400 * 1_000_000
"""Microseconds: a lease that is renewed for longer ends by its handler only."""


def ask(connection: Connection, table: Table, request: CancelRequest) -> None:
    """Store the request, in place of one for an earlier lease of the message."""
    info = {"token": request.lease_token.hex, "text": request.text}
    binds = {
        "scope": CANCEL,
        "key": str(request.message_id),
        "lease_token": request.lease_token,
        "info": info,
        "kept": _KEPT,
    }
    values = {"created_at": clock(), "expires_at": later(bindparam("kept"))}
    upsert(connection, table, [binds], replaced=(*values, "lease_token", "info"), **values)


def requests(connection: Connection, table: Table) -> tuple[CancelRequest, ...]:
    """The requests, also those whose leases are over: those are removed within a minute or two."""
    # Without a limit: what it left out would not be honoured while the others are open.
    c = table.c
    found = connection.execute(select(c.key, c.info).where(c.scope == CANCEL))
    return tuple(request_of(row.key, row.info) for row in found)


def of_leases(
    connection: Connection, table: Table, leases: Sequence[tuple[int, UUID]]
) -> dict[int, CancelRequest]:
    """The requests for these leases, by message."""
    tokens = dict(leases)
    found: dict[int, CancelRequest] = {}
    c = table.c
    for keys in chunks([str(message_id) for message_id in sorted(tokens)]):
        asked = select(c.key, c.info).where(c.scope == CANCEL, c.key.in_(keys))
        for row in connection.execute(asked):
            request = request_of(row.key, row.info)
            if request.lease_token == tokens[request.message_id]:
                found[request.message_id] = request
    return found


def request_of(key: str, info: Any) -> CancelRequest:
    """The request that is stored so."""
    return CancelRequest(int(key), UUID(info["token"]), info["text"])


def end_expired(
    connection: Connection,
    dialect: Operations,
    queues: Sequence[str],
    requested: Sequence[CancelRequest],
    *,
    archive: bool,
) -> int:
    """Discard the messages of `queues` whose lease has run out, if that lease is one of those
    `requested` to be cancelled; how many.

    Rows that another transaction has locked are left out.
    """
    asked = {each.message_id: each for each in requested}
    if not asked:
        return 0
    c = dialect.tables.message.c
    wanted = set(queues)
    expired: list[CancelRequest] = []
    for ids in chunks(sorted(asked)):
        # Read without locks: the lock below asks for the same tokens.
        leased = select(c.id, c.queue, c.lease_token).where(
            c.id.in_(ids), c.lease_expires_at < clock()
        )
        expired += [
            asked[row.id]
            for row in connection.execute(leased)
            if row.queue in wanted and row.lease_token == asked[row.id].lease_token
        ]
    held = dialect.lock(
        connection, [(each.message_id, each.lease_token) for each in expired], skip_locked=True
    )
    ended = [discarded(each, archive=archive) for each in expired if each.message_id in held]
    return len(dialect.settle(connection, ended).settled) if ended else 0


def discarded(request: CancelRequest, *, archive: bool) -> Settlement:
    """What is written for the message once its lease is over."""
    return Settlement(
        request.message_id,
        request.lease_token,
        MessageState.DISCARDED,
        archive=archive,
        attempted=False,
        reason=CANCELLED,
        error=request.text,
    )


def clean(connection: Connection, dialect: Operations, asked: Sequence[CancelRequest]) -> None:
    """Remove those requests whose leases are over."""
    if not asked:
        return
    table = dialect.tables.policy_state
    leases = [(each.message_id, each.lease_token) for each in asked]
    held = dialect.still_held(connection, leases)
    over = [
        {"of_key": str(each.message_id), "of_token": each.lease_token}
        for each in asked
        if each.message_id not in held
    ]
    if over:
        one = and_(
            table.c.scope == CANCEL,
            table.c.key == bindparam("of_key"),
            table.c.lease_token == bindparam("of_token"),
        )
        connection.execute(delete(table).where(one), over)

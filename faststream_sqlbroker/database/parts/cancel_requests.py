"""Requests to cancel leased messages, stored in the policy state.

The statements are the same on every database.

A request names one lease by its token. The lease holder reads the request and ends the handler.
If the lease ends before that, the process that releases expired leases discards the message.
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Table, and_, bindparam, delete, select

from faststream_sqlbroker.core.orders import CancelRequest
from faststream_sqlbroker.core.reasons import CANCELLED
from faststream_sqlbroker.core.rows import Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.policy_state import upsert
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.schema.types import clock, later

CANCEL = "cancel"
"""Scope of the requests; the key is the message's id."""
_REQUEST_RETENTION = 7 * 86_400 * 1_000_000
"""Microseconds for which a request is stored. A lease renewed for longer ends only with its
handler.
"""


def save_request(connection: Connection, table: Table, request: CancelRequest) -> None:
    """Store the request to cancel a leased message.

    Its worker reads the request and ends the handler. A request names one lease: it replaces a
    request for an earlier lease of the message.
    """
    info = {"token": request.lease_token.hex, "text": request.text}
    binds = {
        "scope": CANCEL,
        "key": str(request.message_id),
        "lease_token": request.lease_token,
        "info": info,
        "kept": _REQUEST_RETENTION,
    }
    values = {"created_at": clock(), "expires_at": later(bindparam("kept"))}
    upsert(connection, table, [binds], replaced=(*values, "lease_token", "info"), **values)


def list_requests(connection: Connection, table: Table) -> tuple[CancelRequest, ...]:
    """Return all requests, including obsolete requests (removed within a minute or two)."""
    # No limit: requests beyond it would be ignored while the others are open.
    c = table.c
    rows = connection.execute(select(c.key, c.info).where(c.scope == CANCEL))
    return tuple(parse_request(row.key, row.info) for row in rows)


def find_requests(
    connection: Connection, table: Table, leases: Sequence[tuple[int, UUID]]
) -> dict[int, CancelRequest]:
    """Return the requests to cancel `leases`, by message.

    A request for an earlier lease of a message does not count.
    """
    tokens = dict(leases)
    requests: dict[int, CancelRequest] = {}
    c = table.c
    for keys in iter_chunks([str(message_id) for message_id in sorted(tokens)]):
        statement = select(c.key, c.info).where(c.scope == CANCEL, c.key.in_(keys))
        for row in connection.execute(statement):
            request = parse_request(row.key, row.info)
            if request.lease_token == tokens[request.message_id]:
                requests[request.message_id] = request
    return requests


def parse_request(key: str, info: Any) -> CancelRequest:
    """Return the request stored in a row."""
    return CancelRequest(int(key), UUID(info["token"]), info["text"])


def discard_expired(
    connection: Connection,
    dialect: DialectOperations,
    queues: Sequence[str],
    requested: Sequence[CancelRequest],
    *,
    archive: bool,
) -> int:
    """Discard messages of `queues` whose expired lease is in `requested`; return their number.

    Called before expired leases are released: a message that an operator has cancelled must not be
    delivered again. Rows locked by another transaction are skipped.
    """
    requests = {request.message_id: request for request in requested}
    if not requests:
        return 0
    c = dialect.tables.message.c
    queue_names = set(queues)
    expired_requests: list[CancelRequest] = []
    for ids in iter_chunks(sorted(requests)):
        # Read without locks: the lock below checks the same tokens.
        query = select(c.id, c.queue, c.lease_token).where(
            c.id.in_(ids), c.lease_expires_at < clock()
        )
        expired_requests += [
            requests[row.id]
            for row in connection.execute(query)
            if row.queue in queue_names and row.lease_token == requests[row.id].lease_token
        ]
    locked_ids = dialect.lock(
        connection,
        [(request.message_id, request.lease_token) for request in expired_requests],
        skip_locked=True,
    )
    settlements = [
        create_settlement(request, archive=archive)
        for request in expired_requests
        if request.message_id in locked_ids
    ]
    return len(dialect.settle(connection, settlements).settled_ids) if settlements else 0


def create_settlement(request: CancelRequest, *, archive: bool) -> Settlement:
    """Return the settlement of a cancelled message whose lease is over.

    Its handler is gone, so the message is discarded with the operator's reason, and no attempt is
    counted.
    """
    return Settlement(
        request.message_id,
        request.lease_token,
        MessageState.DISCARDED,
        archive=archive,
        attempted=False,
        reason=CANCELLED,
        error=request.text,
    )


def remove_obsolete(
    connection: Connection, dialect: DialectOperations, requests: Sequence[CancelRequest]
) -> None:
    """Remove the `requests` whose leases are over.

    The heartbeat calls this: the handler has ended, or the message was discarded or released.
    """
    if not requests:
        return
    table = dialect.tables.policy_state
    leases = [(request.message_id, request.lease_token) for request in requests]
    held_ids = dialect.find_held(connection, leases)
    binds = [
        {"of_key": str(request.message_id), "of_token": request.lease_token}
        for request in requests
        if request.message_id not in held_ids
    ]
    if binds:
        condition = and_(
            table.c.scope == CANCEL,
            table.c.key == bindparam("of_key"),
            table.c.lease_token == bindparam("of_token"),
        )
        connection.execute(delete(table).where(condition), binds)

"""Leases of one subscriber, given back by an operator; the same on every database."""

from collections.abc import Iterable
from typing import TYPE_CHECKING
from uuid import UUID

from sqlalchemy import Connection, bindparam, case, null, select, update

from faststream_sqlbroker.core.policies.flags import KEPT
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import HOLDER_BYTES
from faststream_sqlbroker.database.parts import cancels
from faststream_sqlbroker.database.parts.sizes import chunks

if TYPE_CHECKING:
    from faststream_sqlbroker.database.dialect import Dialect


def release(
    connection: Connection, dialect: "Dialect", holder: bytes, queues: Iterable[str], limit: int
) -> int:
    """Give back up to `limit` rows of `queues` whose lease tokens begin with `holder`.

    Returns how many. The delivery is charged, as for an expired lease. What an operator has asked
    to cancel is discarded instead. Rows that a handler's transaction has locked are skipped.
    """
    table = dialect.tables.message
    rest = 16 - HOLDER_BYTES
    first = UUID(bytes=holder + b"\0" * rest)
    last = UUID(bytes=holder + b"\xff" * rest)
    # Read without locks, so that no lease of another subscriber is waited for. What changes before
    # the lock below is noticed there: it asks for the same tokens.
    find = (
        select(table.c.id, table.c.lease_token)
        .where(
            table.c.state == MessageState.PROCESSING.name,
            table.c.lease_expires_at.is_not(None),
            table.c.lease_token.between(first, last),
        )
        .limit(limit)
    )
    find = dialect.use_index(find, table, "leased_index")
    found: list[tuple[int, UUID]] = []
    for names in chunks(list(queues)):
        rows = connection.execute(find.where(table.c.queue.in_(names)))
        found += [(row.id, row.lease_token) for row in rows]
    locked = dialect.lock(connection, found[:limit], skip_locked=True)
    asked = cancels.of_leases(
        connection, dialect.tables.policy_state, [each for each in found if each[0] in locked]
    )
    ended = [cancels.discarded(each, archive=dialect.has_archive) for each in asked.values()]
    if ended:
        dialect.settle(connection, ended)
    free = locked - asked.keys()
    if free:
        given_back = {
            "state": case(
                (table.c.attempts_count > 0, MessageState.RETRYABLE.name),
                else_=MessageState.PENDING.name,
            ),
            "acquired_at": null(),
            "lease_token": null(),
            "lease_expires_at": null(),
            "policy_marks": table.c.policy_marks.bitwise_and(KEPT),
        }
        # One by one, by the primary key. For a list of keys MariaDB may scan the table, and would
        # wait for rows that another transaction has locked.
        one = update(table).where(table.c.id == bindparam("message_id")).values(given_back)
        connection.execute(one, [{"message_id": each} for each in sorted(free)])
    return len(locked)

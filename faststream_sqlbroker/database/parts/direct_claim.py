"""Direct claims: the application takes single messages, and may replace their bodies.

The statements are the same on every database.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, select, update

from faststream_sqlbroker.core.rows import ClaimedMessage, ReadyPair, Settlement, SettleResult
from faststream_sqlbroker.core.text import load_text
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.cancels import end_expired, requests
from faststream_sqlbroker.database.parts.claimed_rows import CLAIMED_COLUMNS, load_payload
from faststream_sqlbroker.database.parts.message_walks import shown_columns

MOST_REFUSED = 100
"""Messages that one transaction may settle before it finds one to take; bounds its length."""
RELEASED = 100
"""Expired leases that one transaction gives back; bounds its length."""

Judge = Callable[[ClaimedMessage], tuple[Settlement | None, bool]]
"""What to write of a row that was just leased (None: nothing), and whether it is the one to take.
"""


@dataclass(slots=True)
class DirectClaim:
    """The result of one transaction."""

    rows: list[ClaimedMessage] = field(default_factory=list)
    refused: list[ClaimedMessage] = field(default_factory=list)
    """Those settled because they must not be taken."""
    again: float | None = None
    """Without rows: seconds until the next one is due; 0: try again at once; None: not known."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A new body, and with another content type new headers."""

    payload: bytes
    headers: dict[str, Any] | None = None


def take(
    dialect: Dialect,
    connection: Connection,
    queues: Sequence[str],
    lease: float,
    token: UUID,
    judge: Judge,
    *,
    release: bool,
    archive: bool = True,
    limit: int = 1,
) -> DirectClaim:
    """Lease the first due messages of `queues` that `judge` accepts, for `lease` seconds: up to
    `limit`, perhaps fewer than there are.

    Expired leases are given back if nothing else is due, and with `release` before the claim:
    there may be no subscriber to do it. Those that were to be cancelled are discarded instead,
    archived if `archive`. Queues that are paused for the whole fleet are skipped.
    """

    def give_back() -> int:
        asked = requests(connection, dialect.tables.policy_state)
        # What ends while they are looked at is left: it may be one of them.
        before = dialect.now(connection) if asked else None
        ended = end_expired(connection, dialect, queues, asked, archive=archive)
        return ended + dialect.release_stuck(connection, queues, RELEASED, before)

    if release:
        give_back()
    pairs = dialect.ready_pairs(connection, queues, only_open=True)
    taken = DirectClaim()
    while len(taken.refused) < MOST_REFUSED:
        rows = _claim(dialect, connection, pairs, limit, lease, token)
        if not rows and not release and give_back():
            pairs = dialect.ready_pairs(connection, queues, only_open=True)
            rows = _claim(dialect, connection, pairs, limit, lease, token)
        if not rows:
            taken.again = min((pair.due_in for pair in pairs if pair.due_in > 0), default=None)
            return taken
        _judge_all(dialect, connection, rows, judge, taken)
        # Fewer than asked for are enough: another claim would cost more than the next request.
        if taken.rows:
            return taken
    taken.again = 0.0
    return taken


def _claim(
    dialect: Dialect,
    connection: Connection,
    pairs: Sequence[ReadyPair],
    limit: int,
    lease: float,
    token: UUID,
) -> Sequence[ClaimedMessage]:
    due = [pair for pair in pairs if pair.due_in <= 0]
    return dialect.claim(connection, due, limit, lease, token) if due else []


def _judge_all(
    dialect: Dialect,
    connection: Connection,
    rows: Sequence[ClaimedMessage],
    judge: Judge,
    taken: DirectClaim,
) -> None:
    """Write what `judge` says of rows that were just leased, and note them in `taken`."""
    settlements: list[Settlement] = []
    for row in rows:
        settlement, wanted = judge(row)
        if settlement is not None:
            settlements.append(settlement)
        (taken.rows if wanted else taken.refused).append(row)
    if settlements:
        dialect.settle(connection, settlements)


def hold(
    dialect: Dialect, connection: Connection, queue: str, message_id: int, token: UUID
) -> ClaimedMessage | None:
    """Lock a message that is leased with `token` and read it; None: the lease is another's."""
    table = dialect.tables.message
    c = table.c
    columns = shown_columns(table, CLAIMED_COLUMNS, dialect.name)
    held = (c.id == message_id, c.queue == queue, c.lease_token == token)
    row = connection.execute(select(*columns).where(*held).with_for_update()).first()
    return None if row is None else _held(row, token)


def _held(row: Any, token: UUID) -> ClaimedMessage:
    return ClaimedMessage(
        id=row.id,
        queue=row.queue,
        payload=load_payload(row.payload),
        stored_headers=row.headers,
        priority=row.priority,
        key=load_text(row.key),
        attempts_count=int(row.attempts_count),
        deliveries_count=int(row.deliveries_count),
        publish_count=int(row.publish_count),
        created=row.created_at,
        due=row.next_attempt_at,
        expires_at=row.expires_at,
        first_attempt_at=row.first_attempt_at,
        last_attempt_at=row.last_attempt_at,
        acquired=row.acquired_at,
        lease_token=token,
        hops=int(row.hops),
    )


def extend(
    dialect: Dialect,
    connection: Connection,
    queue: str,
    message_id: int,
    token: UUID,
    lease: float,
) -> datetime | None:
    """Let the lease end `lease` seconds from now, never sooner than it does; its end. None: the
    lease is another's.
    """
    c = dialect.tables.message.c
    ends = select(c.lease_expires_at).where(
        c.id == message_id, c.queue == queue, c.lease_token == token
    )
    # Locked first: a release at the same time would else come between the two statements.
    locked = connection.execute(ends.with_for_update()).first()
    if locked is None or not dialect.renew(connection, [(message_id, token)], lease):
        return None
    found: datetime = connection.execute(ends).scalar_one()
    return found


def settle_replaced(
    dialect: Dialect, connection: Connection, settlement: Settlement, replaced: Replaced
) -> SettleResult:
    """Write the row's new body and `settlement`, if its lease is still held.

    The body is written first, so an archived row has the new one.
    """
    dialect.size_limit(connection).check_parts(replaced.payload)
    table = dialect.tables.message
    held = update(table).where(
        table.c.id == settlement.id, table.c.lease_token == settlement.lease_token
    )
    values: dict[str, Any] = {"payload": replaced.payload}
    if replaced.headers is not None:
        values["headers"] = replaced.headers or None
    if not connection.execute(held.values(values)).rowcount:
        return SettleResult(lost={settlement.id})
    return dialect.settle(connection, [settlement])

"""Direct claims: the application takes one message, and may replace its body.

The statements are the same on every database.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, update

from faststream_sqlbroker.core.rows import ClaimedMessage, ReadyPair, Settlement, SettleResult
from faststream_sqlbroker.dialects.base import Dialect

MOST_REFUSED = 100
"""Messages that one transaction may settle on its way to one that can be taken."""
RELEASED = 100
"""Expired leases that one transaction gives back."""

Judge = Callable[[ClaimedMessage], tuple[Settlement | None, bool]]
"""What to write of a row that was just leased (None: nothing), and whether it is the one to take.
"""


@dataclass(slots=True)
class DirectClaim:
    """What one transaction has found."""

    row: ClaimedMessage | None
    refused: list[ClaimedMessage] = field(default_factory=list)
    """Those settled because they must not be taken."""
    again: float | None = None
    """Without a row: seconds until the next one is due; 0: look on now; None: nothing is known."""


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
) -> DirectClaim:
    """Lease the first due message of `queues` that `judge` lets through, for `lease` seconds.

    Expired leases are given back where nothing else is due, and with `release` before: no
    subscriber may be there to do it. Queues that are paused for the whole fleet are passed over.
    """
    if release:
        dialect.release_stuck(connection, queues, RELEASED)
    pairs = dialect.ready_pairs(connection, queues, only_open=True)
    taken = DirectClaim(None)
    for _ in range(MOST_REFUSED):
        rows = _claim_one(dialect, connection, pairs, lease, token)
        if not rows and not release and dialect.release_stuck(connection, queues, RELEASED):
            pairs = dialect.ready_pairs(connection, queues, only_open=True)
            rows = _claim_one(dialect, connection, pairs, lease, token)
        if not rows:
            taken.again = min((pair.due_in for pair in pairs if pair.due_in > 0), default=None)
            return taken
        settlement, wanted = judge(rows[0])
        if settlement is not None:
            dialect.settle(connection, [settlement])
        if wanted:
            taken.row = rows[0]
            return taken
        taken.refused.append(rows[0])
    taken.again = 0.0
    return taken


def _claim_one(
    dialect: Dialect, connection: Connection, pairs: Sequence[ReadyPair], lease: float, token: UUID
) -> Sequence[ClaimedMessage]:
    due = [pair for pair in pairs if pair.due_in <= 0]
    return dialect.claim(connection, due, 1, lease, token) if due else []


def settle_replaced(
    dialect: Dialect, connection: Connection, settlement: Settlement, replaced: Replaced
) -> SettleResult:
    """Give the row its new body and write `settlement`, if its lease is still held; rows that leave
    take it along.
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

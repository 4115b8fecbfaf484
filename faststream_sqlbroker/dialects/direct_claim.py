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
from faststream_sqlbroker.dialects.cancels import end_expired

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

    row: ClaimedMessage | None
    refused: list[ClaimedMessage] = field(default_factory=list)
    """Those settled because they must not be taken."""
    again: float | None = None
    """Without a row: seconds until the next one is due; 0: try again at once; None: not known."""


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
) -> DirectClaim:
    """Lease the first due message of `queues` that `judge` accepts, for `lease` seconds.

    Expired leases are given back if nothing else is due, and with `release` before the claim:
    there may be no subscriber to do it. Those that were to be cancelled are discarded instead,
    archived if `archive`. Queues that are paused for the whole fleet are skipped.
    """

    def give_back() -> int:
        ended = end_expired(connection, dialect, queues, archive=archive)
        return ended + dialect.release_stuck(connection, queues, RELEASED)

    if release:
        give_back()
    pairs = dialect.ready_pairs(connection, queues, only_open=True)
    taken = DirectClaim(None)
    for _ in range(MOST_REFUSED):
        rows = _claim_one(dialect, connection, pairs, lease, token)
        if not rows and not release and give_back():
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

"""Claims of single messages by application code, which may replace their bodies.

Each operation is one transaction. The statements are the same on every database.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, select, update

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.rows import (
    ClaimedMessage,
    ClaimRequest,
    ReadyPair,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.core.settle import get_required_activities
from faststream_sqlbroker.core.text import load_text
from faststream_sqlbroker.database.engine import Database, StoreSubject
from faststream_sqlbroker.database.parts.cancel_requests import (
    discard_expired,
    find_requests,
    list_requests,
)
from faststream_sqlbroker.database.parts.claimed_rows import CLAIMED_COLUMNS, load_payload
from faststream_sqlbroker.database.parts.message_walks import get_readable_columns
from faststream_sqlbroker.database.parts.policy_state import read_database_id
from faststream_sqlbroker.schema.types import clock

ID_READ_INTERVAL = 10.0
"""Seconds between two reads of the database's part of correlation ids, which the first subscriber
of the fleet creates.
"""
MAX_REFUSED = 100
"""Maximum messages that one transaction settles before it accepts one; bounds its length."""
MAX_RELEASED = 100
"""Maximum expired leases that one transaction releases; bounds its length."""

Judge = Callable[[ClaimedMessage], tuple[Settlement | None, bool]]
"""Returns the settlement of a row that was just leased, if any, and True to accept the row."""


@dataclass(slots=True)
class DirectClaim:
    """The result of a transaction that claims directly."""

    rows: list[ClaimedMessage] = field(default_factory=list)
    refused: list[ClaimedMessage] = field(default_factory=list)
    """Messages settled because they must not be claimed."""
    settlements: list[Settlement] = field(default_factory=list)
    """Settlements of refused messages and of removed rows."""
    retry_in: float | None = None
    """Without rows: seconds until the next message is due; 0 to retry at once; None if not known.
    """


@dataclass(frozen=True, slots=True)
class Replacement:
    """A new body, and with another content type new headers."""

    payload: bytes
    headers: dict[str, Any] | None = None


class DirectClaims(StoreSubject):
    """Claims and settles single messages, without a subscriber.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self,
        database: Database,
        correlation_ids: CorrelationIds,
    ) -> None:
        """`claim` completes `correlation_ids`."""
        super().__init__(database)
        self._correlation_ids = correlation_ids
        self._next_id_read = float("-inf")
        """Time of the next read of the database id (monotonic seconds)."""

    async def claim(
        self,
        queues: Sequence[str],
        lease: float,
        token: UUID,
        judge: Judge,
        *,
        release: bool,
        archive: bool = True,
        limit: int = 1,
    ) -> DirectClaim:
        """Lease up to `limit` of the first due messages of `queues` that `judge` accepts.

        Queues are searched in their order; paused queues are skipped. Fewer messages may be leased
        than are due.

        `judge` decides about each leased message; a settlement that it returns is written in the
        same transaction. It may be called twice for a row, if the database makes the broker repeat
        the transaction. Expired leases of `queues` are released if nothing is due, and always with
        `release`: there may be no subscriber to do it. Messages with a cancel request are discarded
        instead, and archived if `archive`.
        """
        ids = self._correlation_ids
        # Correlation ids are made from an id of the database, which the first subscriber stores.
        now = self._database.clock.monotonic()
        reads_id = ids.database_id is None and now >= self._next_id_read
        database_id: str | None = None
        result = DirectClaim()

        def claim(connection: Connection) -> None:
            nonlocal database_id, result
            result = DirectClaim()
            if reads_id:
                database_id = read_database_id(connection, self._table)
            release_expired = partial(self._release_expired, connection, queues, archive=archive)
            if release:
                release_expired()
            lease_due = partial(self._lease_due, connection, limit, lease, token)
            release_if_empty = None if release else release_expired
            self._claim_accepted(connection, queues, lease_due, judge, release_if_empty, result)

        await self._database.run(
            claim,
            activity_source=lambda: get_required_activities(result.settlements) | {Activity.TAKE},
            replan=True,
        )
        if reads_id:
            ids.database_id = database_id or ids.database_id
            self._next_id_read = now + ID_READ_INTERVAL
        return result

    def _claim_accepted(
        self,
        connection: Connection,
        queues: Sequence[str],
        lease_due: Callable[[Sequence[ReadyPair]], Sequence[ClaimedMessage]],
        judge: Judge,
        release_expired: Callable[[], int] | None,
        result: DirectClaim,
    ) -> None:
        """Lease due messages and let `judge` decide, until a message is accepted or none is due.

        `judge` refuses messages that must not be delivered, for example expired ones, with a
        settlement. If nothing is due, `release_expired` is called once: no subscriber may be there
        to release expired leases. After `MAX_REFUSED` refusals the caller retries in another
        transaction.
        """
        pairs = self._dialect.find_ready_pairs(connection, queues, only_open=True)
        while len(result.refused) < MAX_REFUSED:
            rows = lease_due(pairs)
            if not rows and release_expired is not None and release_expired():
                pairs = self._dialect.find_ready_pairs(connection, queues, only_open=True)
                rows = lease_due(pairs)
            if not rows:
                result.retry_in = min(
                    (pair.due_in for pair in pairs if pair.due_in > 0), default=None
                )
                return
            self._apply_judge(connection, rows, judge, result)
            # Fewer messages than requested are enough: another claim would cost more than the next
            # request.
            if result.rows:
                return
        result.retry_in = 0.0

    def _release_expired(
        self, connection: Connection, queues: Sequence[str], *, archive: bool
    ) -> int:
        """Release the expired leases of `queues`, or discard messages with a cancel request.

        The holder of a lease answers a cancel request, but the holder of an expired lease has
        probably died.

        Returns:
            The number of ended leases.
        """
        cancel_requests = list_requests(connection, self._table)
        # Leases that end after this time are left: they may have a new request.
        before = self._dialect.now(connection) if cancel_requests else None
        expired_rows = discard_expired(
            connection, self._dialect, queues, cancel_requests, archive=archive
        )
        return expired_rows + self._dialect.release_stuck(connection, queues, MAX_RELEASED, before)

    def _lease_due(
        self,
        connection: Connection,
        limit: int,
        lease: float,
        token: UUID,
        pairs: Sequence[ReadyPair],
    ) -> Sequence[ClaimedMessage]:
        """Lease up to `limit` messages of the due pairs among `pairs`.

        A pair is a queue and a priority with waiting messages; `due_in` is the time until the first
        is due.
        """
        due = [pair for pair in pairs if pair.due_in <= 0]
        request = ClaimRequest(due, limit, lease, token)
        return self._dialect.build_claim(request)(connection) if due else []

    def _apply_judge(
        self,
        connection: Connection,
        rows: Sequence[ClaimedMessage],
        judge: Judge,
        result: DirectClaim,
    ) -> None:
        """Let `judge` decide about the leased `rows`, write the settlements, extend `result`.

        `judge` refuses messages that must not be delivered, for example expired messages, with a
        settlement. An accepted message may have a settlement, too: it is removed at once.
        """
        settlements: list[Settlement] = []
        for row in rows:
            settlement, accepted = judge(row)
            if settlement is not None:
                settlements.append(settlement)
            (result.rows if accepted else result.refused).append(row)
        if settlements:
            result.settlements += settlements
            self._dialect.settle(connection, settlements)

    async def settle(self, settlement: Settlement, replacement: Replacement | None) -> SettleResult:
        """Write `settlement`, and a new body if given, if the lease is still held.

        In the result, `lost_ids` has the message's id if the lease was lost: it was released,
        another delivery has it, or the message has ended.
        """
        run = partial(
            self._database.run,
            activity_source=partial(get_required_activities, [settlement]),
            replan=True,
        )
        if replacement is None:
            return await run(self._dialect.build_settle_one(settlement))
        return await run(lambda c: self._settle_replacement(c, settlement, replacement))

    def _settle_replacement(
        self, connection: Connection, settlement: Settlement, replacement: Replacement
    ) -> SettleResult:
        """Write the row's new body and `settlement`, if the lease is still held.

        The body is written first, because settling copies the row into the archive.
        """
        self._dialect.get_size_limit(connection).check_parts(replacement.payload)
        table = self._dialect.tables.message
        statement = update(table).where(
            table.c.id == settlement.id, table.c.lease_token == settlement.lease_token
        )
        values: dict[str, Any] = {"payload": replacement.payload}
        if replacement.headers is not None:
            values["headers"] = replacement.headers or None
        if not connection.execute(statement.values(values)).rowcount:
            return SettleResult(lost_ids={settlement.id})
        return self._dialect.settle(connection, [settlement])

    async def settle_held(
        self,
        queue: str,
        message_id: int,
        token: UUID,
        decide: Callable[[ClaimedMessage, float], Settlement],
        replace: Callable[[ClaimedMessage], Replacement] | None = None,
    ) -> Settlement | None:
        """Lock the message leased with `token`, and write the settlement by `decide`.

        For clients that name a lease but do not have its message. `decide` gets the message and the
        seconds since its claim. It may be called twice, if the database makes the broker repeat the
        transaction, or if an operator has cancelled the message. `replace` returns a new body.
        Returns None, with nothing written, if the lease was lost.
        """
        settlements: list[Settlement] = []

        def lock_and_settle(connection: Connection) -> Settlement | None:
            settlements.clear()
            row = self._lock(connection, queue, message_id, token)
            if row is None:
                return None
            lease_age = (self._dialect.now(connection) - row.acquired_at).total_seconds()
            settlement = decide(row, max(0.0, lease_age))
            if not settlement.is_final:
                # A message that an operator has cancelled never returns to its queue.
                cancel_requests = find_requests(connection, self._table, [(message_id, token)])
                if message_id in cancel_requests:
                    row.cancelled = cancel_requests[message_id].text
                    settlement = decide(row, max(0.0, lease_age))
            settlements.append(settlement)
            if replace is None:
                result = self._dialect.settle(connection, [settlement])
            else:
                result = self._settle_replacement(connection, settlement, replace(row))
            return settlement if result.settled_ids else None

        extra_activities = {Activity.TAKE, Activity.ARCHIVE}
        return await self._database.run(
            lock_and_settle,
            activity_source=lambda: frozenset(
                get_required_activities(settlements) | extra_activities
            ),
            replan=True,
        )

    def _lock(
        self, connection: Connection, queue: str, message_id: int, token: UUID
    ) -> ClaimedMessage | None:
        """Lock and read the message leased with `token`; None if the lease was lost."""
        table = self._dialect.tables.message
        c = table.c
        columns = get_readable_columns(table, CLAIMED_COLUMNS, self._dialect.name)
        conditions = (c.id == message_id, c.queue == queue, c.lease_token == token)
        row = connection.execute(select(*columns).where(*conditions).with_for_update()).first()
        return None if row is None else _to_claimed(row, token)

    async def extend_held(
        self, queue: str, message_id: int, token: UUID, lease: float, *, in_time: bool = False
    ) -> datetime | None:
        """Extend a lease to `lease` seconds from now, never shortening the lease; return the end.

        The end is by the database's clock. Returns None if the lease was lost, or with `in_time` if
        the lease has ended.
        """
        c = self._dialect.tables.message.c
        conditions = [c.id == message_id, c.queue == queue, c.lease_token == token]
        statement = select(c.lease_expires_at).where(
            *conditions, *([c.lease_expires_at > clock()] if in_time else [])
        )

        def extend(connection: Connection) -> datetime | None:
            # Lock first: otherwise a release could run between the two statements.
            locked = connection.execute(statement.with_for_update()).first()
            if locked is None or not self._dialect.renew(connection, [(message_id, token)], lease):
                return None
            end: datetime = connection.execute(statement).scalar_one()
            return end

        return await self._database.run(extend, Activity.TAKE, replan=True)


def _to_claimed(row: Any, token: UUID) -> ClaimedMessage:
    """Convert a row of the message table, leased with `token`, to a claimed message."""
    create: Any = ClaimedMessage  # of as many values as there are columns
    counts = map(int, row[6:9])
    body = load_payload(row.payload)
    message: ClaimedMessage = create(
        *row[:2], body, *row[3:5], load_text(row.key), *counts, *row[9:15], token, int(row.hops)
    )
    return message

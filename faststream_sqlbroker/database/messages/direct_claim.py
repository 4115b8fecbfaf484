"""Claims of single messages by application code, which may replace their bodies; each operation is
one transaction. The statements are the same on every database.
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
from faststream_sqlbroker.core.rows import ClaimedMessage, ReadyPair, Settlement, SettleResult
from faststream_sqlbroker.core.settle import needed_to_write
from faststream_sqlbroker.core.text import load_text
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts.cancels import end_expired, of_leases, requests
from faststream_sqlbroker.database.parts.claimed_rows import CLAIMED_COLUMNS, load_payload
from faststream_sqlbroker.database.parts.message_walks import shown_columns
from faststream_sqlbroker.database.parts.policy_state import read_database_id
from faststream_sqlbroker.schema.types import clock

LOOK_INTERVAL = 10.0
"""Seconds between two looks for the database's part of correlation ids; the first subscriber of the
fleet draws it."""
MAX_REFUSED = 100
"""Messages that one transaction may settle before it finds one to take; bounds its length."""
MAX_RELEASED = 100
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
    written: list[Settlement] = field(default_factory=list)
    """What was written of them, and of the rows that were removed."""
    again: float | None = None
    """Without rows: seconds until the next one is due; 0: try again at once; None: not known."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A new body, and with another content type new headers."""

    payload: bytes
    headers: dict[str, Any] | None = None


class DirectClaims:
    """Claims and settles single messages, without a subscriber.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self,
        database: Database,
        correlation_ids: CorrelationIds,
    ) -> None:
        """`take` completes `correlation_ids`."""
        self._database = database
        self._correlation_ids = correlation_ids
        self._look_at = float("-inf")
        """When to look again for what they are made of (monotonic seconds)."""
        self._dialect = database.dialect
        self._state = database.tables.policy_state

    async def take(
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
        """Lease the first due messages of `queues`, in their order, that `judge` accepts: up to
        `limit`, perhaps fewer than there are. Queues that are paused for the whole fleet are
        skipped.

        A settlement that `judge` returns is written in the same transaction. `judge` may be called
        twice for a row, if the database makes the broker repeat the transaction. Expired leases of
        `queues` are released if nothing is due, and always with `release`: there may be no
        subscriber to do it. What of them was to be cancelled is discarded instead, and archived if
        `archive`.
        """
        ids = self._correlation_ids
        now = self._database.clock.monotonic()
        looks = ids.database_id is None and now >= self._look_at
        database_id: str | None = None
        taken = DirectClaim()

        def claim(connection: Connection) -> None:
            nonlocal database_id, taken
            taken = DirectClaim()
            if looks:
                database_id = read_database_id(connection, self._state)
            give_back = partial(self._give_back, connection, queues, archive=archive)
            if release:
                give_back()
            lease_due = partial(self._lease_due, connection, limit, lease, token)
            again = None if release else give_back
            self._claim_accepted(connection, queues, lease_due, judge, again, taken)

        await self._database.run(
            claim, doing=lambda: needed_to_write(taken.written) | {Activity.TAKE}, planned_anew=True
        )
        if looks:
            ids.database_id = database_id or ids.database_id
            self._look_at = now + LOOK_INTERVAL
        return taken

    def _claim_accepted(
        self,
        connection: Connection,
        queues: Sequence[str],
        lease_due: Callable[[Sequence[ReadyPair]], Sequence[ClaimedMessage]],
        judge: Judge,
        give_back: Callable[[], int] | None,
        taken: DirectClaim,
    ) -> None:
        """Lease and judge, until a message is accepted; `give_back` is called if nothing is due."""
        pairs = self._dialect.ready_pairs(connection, queues, only_open=True)
        while len(taken.refused) < MAX_REFUSED:
            rows = lease_due(pairs)
            if not rows and give_back is not None and give_back():
                pairs = self._dialect.ready_pairs(connection, queues, only_open=True)
                rows = lease_due(pairs)
            if not rows:
                taken.again = min((pair.due_in for pair in pairs if pair.due_in > 0), default=None)
                return
            self._judge_all(connection, rows, judge, taken)
            # Fewer than asked for are enough: another claim would cost more than the next request.
            if taken.rows:
                return
        taken.again = 0.0

    def _give_back(self, connection: Connection, queues: Sequence[str], *, archive: bool) -> int:
        """End the expired leases of `queues`; how many."""
        asked = requests(connection, self._state)
        # What ends while they are looked at is left: it may be one of them.
        before = self._dialect.now(connection) if asked else None
        ended = end_expired(connection, self._dialect, queues, asked, archive=archive)
        return ended + self._dialect.release_stuck(connection, queues, MAX_RELEASED, before)

    def _lease_due(
        self,
        connection: Connection,
        limit: int,
        lease: float,
        token: UUID,
        pairs: Sequence[ReadyPair],
    ) -> Sequence[ClaimedMessage]:
        due = [pair for pair in pairs if pair.due_in <= 0]
        return self._dialect.claiming(due, limit, lease, token)(connection) if due else []

    def _judge_all(
        self,
        connection: Connection,
        rows: Sequence[ClaimedMessage],
        judge: Judge,
        taken: DirectClaim,
    ) -> None:
        """Write what `judge` says of rows that were just leased, and note them in `taken`."""
        settlements: list[Settlement] = []
        for row in rows:
            settlement, accepted = judge(row)
            if settlement is not None:
                settlements.append(settlement)
            (taken.rows if accepted else taken.refused).append(row)
        if settlements:
            taken.written += settlements
            self._dialect.settle(connection, settlements)

    async def settle(self, settlement: Settlement, replaced: Replaced | None) -> SettleResult:
        """Write `settlement`, and a new body if given, if its lease is still held."""
        run = partial(
            self._database.run, doing=partial(needed_to_write, [settlement]), planned_anew=True
        )
        if replaced is None:
            return await run(self._dialect.settling_one(settlement))
        return await run(lambda c: self._settle_replaced(c, settlement, replaced))

    def _settle_replaced(
        self, connection: Connection, settlement: Settlement, replaced: Replaced
    ) -> SettleResult:
        """Write the row's new body and `settlement`, if its lease is still held.

        The body is written first, so an archived row has the new one.
        """
        self._dialect.size_limit(connection).check_parts(replaced.payload)
        table = self._dialect.tables.message
        leased = update(table).where(
            table.c.id == settlement.id, table.c.lease_token == settlement.lease_token
        )
        values: dict[str, Any] = {"payload": replaced.payload}
        if replaced.headers is not None:
            values["headers"] = replaced.headers or None
        if not connection.execute(leased.values(values)).rowcount:
            return SettleResult(lost={settlement.id})
        return self._dialect.settle(connection, [settlement])

    async def settle_held(
        self,
        queue: str,
        message_id: int,
        token: UUID,
        decide: Callable[[ClaimedMessage, float], Settlement],
        replace: Callable[[ClaimedMessage], Replaced] | None = None,
    ) -> Settlement | None:
        """Write what `decide` makes of a message that is leased with `token`; None: the lease is
        another's, and nothing is written.

        `decide` gets the message and the seconds since its claim; it may be called twice, if the
        database makes the broker repeat the transaction. `replace` gives a new body.
        """
        written: list[Settlement] = []

        def lock_and_settle(connection: Connection) -> Settlement | None:
            written.clear()
            row = self._lock(connection, queue, message_id, token)
            if row is None:
                return None
            age = (self._dialect.now(connection) - row.acquired_at).total_seconds()
            settlement = decide(row, max(0.0, age))
            if not settlement.leaves:
                # Nothing brings a message back which an operator has cancelled.
                asked = of_leases(connection, self._state, [(message_id, token)])
                if message_id in asked:
                    row.cancelled = asked[message_id].text
                    settlement = decide(row, max(0.0, age))
            written.append(settlement)
            if replace is None:
                result = self._dialect.settle(connection, [settlement])
            else:
                result = self._settle_replaced(connection, settlement, replace(row))
            return settlement if result.settled else None

        doing = {Activity.TAKE, Activity.ARCHIVE}
        return await self._database.run(
            lock_and_settle,
            doing=lambda: frozenset(needed_to_write(written) | doing),
            planned_anew=True,
        )

    def _lock(
        self, connection: Connection, queue: str, message_id: int, token: UUID
    ) -> ClaimedMessage | None:
        """Lock a message that is leased with `token` and read it; None: the lease is another's."""
        table = self._dialect.tables.message
        c = table.c
        columns = shown_columns(table, CLAIMED_COLUMNS, self._dialect.name)
        leased = (c.id == message_id, c.queue == queue, c.lease_token == token)
        row = connection.execute(select(*columns).where(*leased).with_for_update()).first()
        return None if row is None else _claimed_message(row, token)

    async def extend_held(
        self, queue: str, message_id: int, token: UUID, lease: float, *, in_time: bool = False
    ) -> datetime | None:
        """Let a lease end `lease` seconds from now, never sooner than it does; its end, by the
        database's clock. None: the lease is another's, or with `in_time` it has ended.
        """
        c = self._dialect.tables.message.c
        held = [c.id == message_id, c.queue == queue, c.lease_token == token]
        ends = select(c.lease_expires_at).where(
            *held, *([c.lease_expires_at > clock()] if in_time else [])
        )

        def extend(connection: Connection) -> datetime | None:
            # Locked first: a release at the same time would else come between the two statements.
            locked = connection.execute(ends.with_for_update()).first()
            if locked is None or not self._dialect.renew(connection, [(message_id, token)], lease):
                return None
            end: datetime = connection.execute(ends).scalar_one()
            return end

        return await self._database.run(extend, Activity.TAKE, planned_anew=True)


def _claimed_message(row: Any, token: UUID) -> ClaimedMessage:
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

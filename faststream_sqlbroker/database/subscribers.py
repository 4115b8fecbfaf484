"""State that all processes share: live subscribers and paused queues."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, and_, bindparam, case, delete, null, select, update

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.orders import OperatorRequests
from faststream_sqlbroker.core.policies.flags import PERSISTENT_MASK
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import (
    HOLDER_BYTES,
    LiveSubscriber,
    PausedQueue,
)
from faststream_sqlbroker.database.engine import Database, StoreSubject
from faststream_sqlbroker.database.parts import cancel_requests, live_subscribers, replies
from faststream_sqlbroker.database.parts.audit import record_action
from faststream_sqlbroker.database.parts.live_subscribers import (
    PAUSED,
    SUBSCRIBER,
    Descriptions,
    match_active,
    match_pause,
)
from faststream_sqlbroker.database.parts.policy_state import get_or_create_database_id, upsert
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.schema.types import clock, later

MAX_CLEANED = 100
"""Maximum rows of a scope that a heartbeat removes, so that heartbeats stay short."""


class LiveSubscribers(StoreSubject):
    """Live subscribers and paused queues; each operation is a single transaction.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self,
        database: Database,
        correlation_ids: CorrelationIds,
    ) -> None:
        """Use the tables of `database`; a heartbeat completes `correlation_ids`."""
        super().__init__(database)
        self._correlation_ids = correlation_ids

    async def write_heartbeat(
        self, descriptions: Descriptions, changed: set[str], lease: float, *, clean: bool
    ) -> OperatorRequests:
        """Write a heartbeat of this process's subscribers; return the requests of operators.

        Requests are pauses, drains and cancels. The first heartbeat also reads the database's part
        of correlation ids.

        Args:
            descriptions: The subscribers of this process, by name.
            changed: Names of the subscribers whose description has changed since the last
                heartbeat.
            lease: Seconds for which they count as alive.
            clean: Also remove some rows that are no longer needed.
        """
        ids = self._correlation_ids

        def announce(connection: Connection) -> tuple[OperatorRequests, str | None]:
            live_subscribers.renew_registrations(
                connection, self._table, descriptions, changed, lease
            )
            if clean:
                self._remove_expired(connection)
                replies.remove_unused(self._dialect, connection)
            database_id = ids.database_id or get_or_create_database_id(connection, self._table)
            orders = live_subscribers.load_orders(connection, self._table, sorted(descriptions))
            if clean:
                cancel_requests.remove_obsolete(connection, self._dialect, orders.cancels)
            return orders, database_id

        orders, ids.database_id = await self._database.run(announce, Activity.STATE)
        return orders

    def _remove_expired(self, connection: Connection) -> None:
        """Remove some expired pauses, and some subscribers that ended long ago.

        Called by a heartbeat now and then. Neither has any effect any more.
        """
        table = self._table
        is_expired = table.c.expires_at < clock()
        for scope in (PAUSED, SUBSCRIBER):
            old = select(table.c.key).where(table.c.scope == scope, is_expired).limit(MAX_CLEANED)
            if keys := connection.execute(old).scalars().all():
                # Use one statement per row, by the primary key. For a list of keys MariaDB may scan
                # the table, and would wait for rows that another transaction has locked.
                condition = and_(
                    table.c.scope == scope, table.c.key == bindparam("name"), is_expired
                )
                connection.execute(delete(table).where(condition), [{"name": key} for key in keys])

    async def list_live(self) -> list[LiveSubscriber]:
        """List the live subscribers, latest heartbeat first, with the rights of a subscriber."""
        return await self._database.run(
            lambda c: live_subscribers.read_subscribers(c, self._table),
            Activity.STATE,
            write=False,
        )

    async def remove(self, names: Sequence[str]) -> None:
        """Remove the registrations of ended subscribers.

        Otherwise other processes would count them as live until their leases expire.
        """
        table = self._table

        def remove(connection: Connection) -> None:
            condition = and_(table.c.scope == SUBSCRIBER, table.c.key == bindparam("name"))
            connection.execute(delete(table).where(condition), [{"name": name} for name in names])

        await self._database.run(remove, Activity.STATE)

    async def pause(
        self, queue: str, until: datetime | float | None, info: Mapping[str, Any], channel: str
    ) -> frozenset[str] | None:
        """Pause `queue` until a time, for some seconds, or (None) until resumed.

        If the queue is paused already, the pause gets the new end and the new reason. `channel` is
        notified.

        Returns:
            The names of the queues that are paused then. None, without a change, if `until` is in
            the past.
        """
        table = self._table
        binds: dict[str, Any] = {"scope": PAUSED, "key": queue, "info": dict(info)}
        expires_at: Any = null() if until is None else until
        if isinstance(until, int | float):
            expires_at = later(bindparam("until_in"))
            binds["until_in"] = round(until * 1_000_000)

        def pause(connection: Connection) -> frozenset[str] | None:
            if isinstance(until, datetime) and until <= self._dialect.now(connection):
                return None
            # An expired pause may not have been removed yet; an upsert would keep its start time.
            is_expired = table.c.expires_at < clock()
            connection.execute(delete(table).where(match_pause(table, queue), is_expired))
            upsert(
                connection,
                table,
                [binds],
                replaced=("expires_at", "info"),
                created_at=clock(),
                expires_at=expires_at,
            )
            end = until.isoformat() if isinstance(until, datetime) else until
            details = {"queue": queue, "reason": info.get("reason"), "until": end}
            record_action(connection, self._dialect, "pause", str(info.get("by", "")), details)
            return self._notify(connection, channel)

        return await self._database.run(pause, Activity.OPERATE)

    async def resume(self, queue: str, channel: str, by: str = "") -> tuple[bool, frozenset[str]]:
        """Resume `queue`, and notify `channel`; return True after a pause, and the paused queues.

        The caller applies the latter to the subscribers of its own process at once.
        """
        table = self._table
        condition = match_pause(table, queue)

        def resume(connection: Connection) -> tuple[bool, frozenset[str]]:
            # Lock the row: if two operators resume at once, only one of them ends the pause.
            active_pause = (
                select(table.c.key).where(condition, match_active(table)).with_for_update()
            )
            was_paused = connection.execute(active_pause).first() is not None
            connection.execute(delete(table).where(condition))
            if was_paused:
                record_action(connection, self._dialect, "resume", by, {"queue": queue})
            return was_paused, self._notify(connection, channel)

        return await self._database.run(resume, Activity.OPERATE)

    async def drain(
        self, names: Sequence[str], worker: str, channel: str, by: str, *, drained: bool
    ) -> tuple[set[str], frozenset[str]]:
        """Drain the live subscribers `names`, selected as `worker`, or end their drain.

        A drained subscriber finishes its messages and claims no more.

        Returns:
            The names that changed, and the queues that are paused.
        """
        action = "drain" if drained else "undrain"
        # In the row of a subscriber, `counter` is 1 while it is drained.
        c = self._table.c

        def drain(connection: Connection) -> tuple[set[str], frozenset[str]]:
            changed = set[str]()
            # Use one statement per row, in a fixed order, because heartbeats lock the same rows.
            for name in sorted(names):
                conditions = (c.scope == SUBSCRIBER, c.key == name, c.lease_expires_at > clock())
                statement = update(self._table).where(*conditions, c.counter == int(not drained))
                if connection.execute(statement.values(counter=int(drained))).rowcount:
                    changed.add(name)
            if changed:
                details = {"worker": worker}
                record_action(connection, self._dialect, action, by, details, done=len(changed))
            return changed, self._notify(connection, channel)

        return await self._database.run(drain, Activity.OPERATE)

    async def list_drained(self, limit: int) -> list[str]:
        """List the names of the first `limit` live subscribers that are drained.

        A drained subscriber claims no more messages; its `counter` is 1.
        """
        c = self._table.c
        statement = select(c.key).where(c.scope == SUBSCRIBER, c.counter > 0)
        statement = statement.where(c.lease_expires_at > clock()).order_by(c.key).limit(limit)

        def read_rows(connection: Connection) -> list[str]:
            return list(connection.execute(statement).scalars())

        return await self._database.run(read_rows, Activity.OPERATE, write=False)

    def _notify(self, connection: Connection, channel: str) -> frozenset[str]:
        """Notify listeners on `channel`; return the names of the queues that are paused now.

        The caller applies these to the subscribers of its own process at once.
        """
        if self._dialect.can_listen:
            live_subscribers.notify_state_changed(connection, channel)
        table = self._table
        statement = select(table.c.key).where(table.c.scope == PAUSED, match_active(table))
        return frozenset(connection.execute(statement).scalars())

    async def list_paused(self) -> list[PausedQueue]:
        """List the queues that are paused now, sorted by name."""
        statement = live_subscribers.select_pauses(self._table)

        def read_rows(connection: Connection) -> list[PausedQueue]:
            return [live_subscribers.read_pause(row) for row in connection.execute(statement)]

        return await self._database.run(read_rows, Activity.OPERATE, write=False)

    async def list_subscribers(self) -> list[LiveSubscriber]:
        """List the live subscribers, latest heartbeat first, with the rights of an operator."""
        return await self._database.run(
            lambda c: live_subscribers.read_subscribers(c, self._table),
            Activity.OPERATE,
            write=False,
        )

    async def find_subscriber(self, name: str) -> tuple[LiveSubscriber, bool] | None:
        """Find the subscriber of this name; the second value is True for a live subscriber.

        None if the name is unknown.
        """
        c = self._table.c
        lives = (c.lease_expires_at > clock()).label("lives")
        statement = live_subscribers.select_registrations(self._table, lives).where(c.key == name)

        def read_row(connection: Connection) -> tuple[LiveSubscriber, bool] | None:
            row = connection.execute(statement).first()
            if row is None:
                return None
            return live_subscribers.read_subscriber(row), bool(row.lives)

        return await self._database.run(read_row, Activity.OPERATE, write=False)

    async def release(self, subscriber: LiveSubscriber, limit: int, by: str = "") -> int:
        """Release up to `limit` messages leased by `subscriber`, for an operator; return the count.

        For a worker that hangs or has vanished. The delivery is charged (stays counted), as for an
        expired lease. Messages with a cancel request are discarded instead. Rows that a handler's
        transaction has locked are skipped. A call that has released some adds an audit entry.
        """

        def release(connection: Connection) -> int:
            leases = self._find_leases(connection, subscriber, limit)
            locked = self._dialect.lock(connection, leases, skip_locked=True)
            self._release_rows(
                connection, locked - self._discard_cancelled(connection, leases, locked)
            )
            if locked:
                details = {"worker": subscriber.worker}
                record_action(connection, self._dialect, "release", by, details, done=len(locked))
            return len(locked)

        return await self._database.run(release, Activity.OPERATE, Activity.RELEASE)

    def _find_leases(
        self, connection: Connection, subscriber: LiveSubscriber, limit: int
    ) -> list[tuple[int, UUID]]:
        """Find up to `limit` messages that `subscriber` has leased, by their lease tokens.

        Each subscriber draws its tokens with a prefix of its own (`HOLDER_BYTES`), which its name
        ends with. So its messages are a range of tokens.
        """
        holder = bytes.fromhex(subscriber.worker.rsplit(":", 1)[-1])
        suffix_bytes = 16 - HOLDER_BYTES
        first = UUID(bytes=holder + b"\0" * suffix_bytes)
        last = UUID(bytes=holder + b"\xff" * suffix_bytes)
        table = self._database.tables.message
        # Read without locks, so as not to wait for other subscribers' leases. A change before the
        # rows are locked is noticed then, because the lock checks the same tokens.
        statement = (
            select(table.c.id, table.c.lease_token)
            .where(
                table.c.state == MessageState.PROCESSING.name,
                table.c.lease_expires_at.is_not(None),
                table.c.lease_token.between(first, last),
            )
            .limit(limit)
        )
        statement = self._dialect.add_index_hint(statement, table, "leased_index")
        leases: list[tuple[int, UUID]] = []
        for names in iter_chunks(list(subscriber.queues)):
            rows = connection.execute(statement.where(table.c.queue.in_(names)))
            leases += [(row.id, row.lease_token) for row in rows]
        return leases[:limit]

    def _discard_cancelled(
        self, connection: Connection, leases: Sequence[tuple[int, UUID]], locked: set[int]
    ) -> set[int]:
        """Discard the `locked` messages of `leases` with a cancel request; return their ids.

        Their holder cannot answer the request after the release.
        """
        requests = cancel_requests.find_requests(
            connection, self._table, [lease for lease in leases if lease[0] in locked]
        )
        has_archive = self._dialect.has_archive
        settlements = [
            cancel_requests.create_settlement(request, archive=has_archive)
            for request in requests.values()
        ]
        if settlements:
            self._dialect.settle(connection, settlements)
        return set(requests)

    def _release_rows(self, connection: Connection, message_ids: set[int]) -> None:
        """Return the locked messages to their queues, with the delivery counted as a lost lease."""
        if not message_ids:
            return
        table = self._database.tables.message
        values = {
            "state": case(
                (table.c.attempts_count > 0, MessageState.RETRYABLE.name),
                else_=MessageState.PENDING.name,
            ),
            "acquired_at": null(),
            "lease_token": null(),
            "lease_expires_at": null(),
            "policy_marks": table.c.policy_marks.bitwise_and(PERSISTENT_MASK),
        }
        # Use one statement per row, by the primary key. For a list of keys MariaDB may scan the
        # table, and would wait for rows that another transaction has locked.
        statement = update(table).where(table.c.id == bindparam("message_id")).values(values)
        connection.execute(statement, [{"message_id": number} for number in sorted(message_ids)])

"""State that all processes share: live subscribers and paused queues; and `explain`."""

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.orders import Orders
from faststream_sqlbroker.core.policy_waits import PoliciedQueue
from faststream_sqlbroker.core.status import Explanation, LiveSubscriber, PausedQueue
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.explain.message import explain
from faststream_sqlbroker.database.explain.queue_policies import policied_queues
from faststream_sqlbroker.database.parts import cancels, replies, worker_leases
from faststream_sqlbroker.database.parts import live_subscribers as rows
from faststream_sqlbroker.database.parts.audit import note_action
from faststream_sqlbroker.database.parts.database_id import make_database_id


def process_name() -> str:
    """Host and process id of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


class LiveSubscribers:
    """Reads and writes that state; each operation is one transaction.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self,
        database: Database,
        correlation_ids: CorrelationIds,
    ) -> None:
        """A heartbeat completes `correlation_ids`."""
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state
        self._correlation_ids = correlation_ids

    async def announce(
        self, known: rows.Known, changed: set[str], lease: float, *, clean: bool
    ) -> Orders:
        """Write a heartbeat of the subscribers `known`; what operators have asked.

        The first one reads what correlation ids are made of, too.

        Args:
            known: The subscribers of this process, by name.
            changed: The names of those whose description changed since the last heartbeat.
            lease: Seconds for which they count as alive.
            clean: Remove some rows that are no longer needed, too.
        """
        ids = self._correlation_ids

        def work(connection: Connection) -> tuple[Orders, str | None]:
            rows.announce(connection, self._table, known, changed, lease)
            if clean:
                rows.clean(connection, self._table)
                replies.clean(self._dialect, connection)
            database_id = ids.database_id or make_database_id(connection, self._table)
            orders = rows.orders(connection, self._table, sorted(known))
            if clean:
                cancels.clean(connection, self._dialect, orders.cancels)
            return orders, database_id

        orders, ids.database_id = await self._database.run(work, Activity.STATE)
        return orders

    async def living(self) -> list[LiveSubscriber]:
        """The live subscribers, the latest heartbeat first; needs the rights of a subscriber."""
        return await self._database.run(
            lambda c: rows.read_subscribers(c, self._table), Activity.STATE, write=False
        )

    async def leave(self, names: Sequence[str]) -> None:
        """Record that these subscribers have ended."""
        await self._database.run(lambda c: rows.leave(c, self._table, names), Activity.STATE)

    async def pause(
        self, queue: str, until: datetime | float | None, info: Mapping[str, Any], channel: str
    ) -> frozenset[str] | None:
        """Pause `queue` and notify `channel`; the names of the queues that are paused then. None,
        and nothing is done: `until` is over.
        """

        def work(connection: Connection) -> frozenset[str] | None:
            if isinstance(until, datetime) and until <= self._dialect.now(connection):
                return None
            rows.pause(connection, self._table, queue, until, info)
            end = until.isoformat() if isinstance(until, datetime) else until
            given = {"queue": queue, "reason": info.get("reason"), "until": end}
            note_action(connection, self._dialect, "pause", str(info.get("by", "")), given)
            return self._told(connection, channel)

        return await self._database.run(work, Activity.OPERATE)

    async def resume(self, queue: str, channel: str, by: str = "") -> tuple[bool, frozenset[str]]:
        """End the pause of `queue`; whether there was one, and the queues still paused."""

        def work(connection: Connection) -> tuple[bool, frozenset[str]]:
            was = rows.resume(connection, self._table, queue)
            if was:
                note_action(connection, self._dialect, "resume", by, {"queue": queue})
            return was, self._told(connection, channel)

        return await self._database.run(work, Activity.OPERATE)

    async def drain(
        self, names: Sequence[str], worker: str, channel: str, by: str, *, drained: bool
    ) -> tuple[set[str], frozenset[str]]:
        """Drain the live subscribers `names`, or end that, as `worker` means them; those that
        changed, and the queues that are paused.
        """
        action = "drain" if drained else "undrain"

        def work(connection: Connection) -> tuple[set[str], frozenset[str]]:
            changed = rows.drain(connection, self._table, names, drained=drained)
            if changed:
                given = {"worker": worker}
                note_action(connection, self._dialect, action, by, given, done=len(changed))
            return changed, self._told(connection, channel)

        return await self._database.run(work, Activity.OPERATE)

    async def drained(self, limit: int) -> list[str]:
        """The names of the first `limit` live subscribers that are drained."""
        return await self._database.run(
            lambda c: rows.drained_names(c, self._table, limit), Activity.OPERATE, write=False
        )

    def _told(self, connection: Connection, channel: str) -> frozenset[str]:
        if self._dialect.can_listen:
            rows.notify_state_changed(connection, channel)
        return rows.paused_names(connection, self._table)

    async def paused(self) -> list[PausedQueue]:
        """The queues that are paused now, sorted by name."""
        return await self._database.run(
            lambda c: rows.paused(c, self._table), Activity.OPERATE, write=False
        )

    async def subscribers(self) -> list[LiveSubscriber]:
        """The live subscribers, the latest heartbeat first; needs the rights of an operator."""
        return await self._database.run(
            lambda c: rows.read_subscribers(c, self._table), Activity.OPERATE, write=False
        )

    async def subscriber(self, name: str) -> tuple[LiveSubscriber, bool] | None:
        """The subscriber of this name, and whether it is alive; None if it is not known."""
        return await self._database.run(
            lambda c: rows.read_subscriber(c, self._table, name), Activity.OPERATE, write=False
        )

    async def release(self, subscriber: LiveSubscriber, limit: int, by: str = "") -> int:
        """Release up to `limit` messages leased by `subscriber`; how many.

        Rows that a transaction has locked are left out. Each call that has released some is an
        entry of the audit.
        """
        holder = bytes.fromhex(subscriber.worker.rsplit(":", 1)[-1])
        queues = subscriber.queues

        def work(connection: Connection) -> int:
            count = worker_leases.release(connection, self._dialect, holder, queues, limit)
            if count:
                given = {"worker": subscriber.worker}
                note_action(connection, self._dialect, "release", by, given, done=count)
            return count

        return await self._database.run(work, Activity.OPERATE, Activity.RELEASE)

    async def explain(self, message_id: int) -> Explanation:
        """Why a message is not running, or how it ended."""
        return await self._database.run(
            lambda c: explain(c, self._dialect, message_id), Activity.OPERATE, write=False
        )

    async def policied_queues(
        self, queue: str | None, after: str | None, limit: int
    ) -> list[PoliciedQueue]:
        """How many messages wait for the policies of each queue."""
        return await self._database.run(
            lambda c: policied_queues(c, self._dialect, queue, after, limit),
            Activity.OPERATE,
            write=False,
        )

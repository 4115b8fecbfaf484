"""The broker's database operations, one method each; each is one transaction."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.rows import (
    ClaimedMessages,
    ClaimRequest,
    HeartbeatData,
    Leases,
    NewMessage,
    PollResult,
    Prefetch,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.core.settle import get_required_activities
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database import pool
from faststream_sqlbroker.database.connections import Checkouts, LoopSemaphore
from faststream_sqlbroker.database.dialects import Dialect, create_dialect
from faststream_sqlbroker.database.driver import DriverShortcut
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.errors import ErrorClasses
from faststream_sqlbroker.database.listen import listen_on_channel
from faststream_sqlbroker.database.messages.handler import HandlerTransaction, HandlerTransactions
from faststream_sqlbroker.database.messages.inserts import Inserts
from faststream_sqlbroker.database.parts import audit, cancel_requests, policy_state
from faststream_sqlbroker.database.parts.mirror_rows import renew_living
from faststream_sqlbroker.database.parts.ordered import Cursors
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.database.rehearsal import AccessChecks
from faststream_sqlbroker.database.server import DatabaseServer
from faststream_sqlbroker.database.subscribers import LiveSubscribers
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.schema.types import is_mariadb

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from faststream_sqlbroker.database.archive_growth import ArchiveGrowth
    from faststream_sqlbroker.database.bulk.store import JobStore
    from faststream_sqlbroker.database.dead_sessions import DeadSessionWatch
    from faststream_sqlbroker.database.depths import QueueDepths
    from faststream_sqlbroker.database.explain.explanations import Explanations
    from faststream_sqlbroker.database.locks import LockStore
    from faststream_sqlbroker.database.message_edits import MessageEdits
    from faststream_sqlbroker.database.messages.ack_first import AckFirstStarts
    from faststream_sqlbroker.database.messages.single_claim import DirectClaims
    from faststream_sqlbroker.database.mirror_store import MirrorStore
    from faststream_sqlbroker.database.overviews import QueueOverviews
    from faststream_sqlbroker.database.policies.policy_holds import PolicyHolds
    from faststream_sqlbroker.database.policies.store import PolicyStore
    from faststream_sqlbroker.database.pull import PullJobStore
    from faststream_sqlbroker.database.queue_states import QueueStates
    from faststream_sqlbroker.database.replies import ReplyStore
    from faststream_sqlbroker.database.retention import ArchivePartitions, ArchiveRetention
    from faststream_sqlbroker.database.schedules import ScheduleStore
    from faststream_sqlbroker.database.stored_messages import StoredMessages
    from faststream_sqlbroker.database.tokens import TokenStore
    from faststream_sqlbroker.database.verification import Verifier

T = TypeVar("T")


class _LazyAttribute:
    """A store attribute whose class is imported and instantiated on first access.

    A process pays only for the operations that it uses.
    """

    def __init__(self, path: str, *argument_names: str) -> None:
        self._path = path
        self._argument_names = argument_names

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, store: Any, owner: type | None = None) -> Any:
        """Import the class, create the instance, and store the instance in the attribute.

        Later accesses find the instance in the store's `__dict__` and no longer come here. Each
        class gets the database first, then the named attributes of the store.
        """
        if store is None:
            return self
        module, _, class_name = self._path.rpartition(".")
        arguments = [getattr(store, argument) for argument in ("_database", *self._argument_names)]
        value = getattr(import_module(f"{_PACKAGE}.{module}"), class_name)(*arguments)
        # Two threads may have created it at the same time; both must get the same object.
        return vars(store).setdefault(self._name, value)


def _load_lazily(path: str, *argument_names: str) -> Any:
    """Build an instance of the class at `path` from the database and attributes of the store."""
    return _LazyAttribute(path, *argument_names)


_PACKAGE = "faststream_sqlbroker.database"
"""The package that contains all of these classes."""


class Store:
    """The broker's operations on a database.

    Every operation is one transaction, except those in the caller's transaction. An operation takes
    at most `statement_timeout` seconds, including the wait for a connection. It occupies one of
    `max_connections` slots, by default half of the pool.

    Raises (from every operation):
        TransientStoreError: the database could not be reached or was busy; nothing was written.
        UnknownOutcomeError: the answer to the COMMIT was lost.
        StoreError: the database refused the statement.
    """

    depths: "QueueDepths" = _load_lazily("depths.QueueDepths")
    explanations: "Explanations" = _load_lazily("explain.explanations.Explanations")
    jobs: "JobStore" = _load_lazily("bulk.store.JobStore")
    locks: "LockStore" = _load_lazily("locks.LockStore")
    messages: "StoredMessages" = _load_lazily("stored_messages.StoredMessages")
    mirror: "MirrorStore" = _load_lazily("mirror_store.MirrorStore")
    overviews: "QueueOverviews" = _load_lazily("overviews.QueueOverviews")
    archive_growth: "ArchiveGrowth" = _load_lazily("archive_growth.ArchiveGrowth")
    partitions: "ArchivePartitions" = _load_lazily("retention.ArchivePartitions")
    policies: "PolicyStore" = _load_lazily("policies.store.PolicyStore")
    policy_holds: "PolicyHolds" = _load_lazily("policies.policy_holds.PolicyHolds")
    pull: "PullJobStore" = _load_lazily("pull.PullJobStore")
    queue_states: "QueueStates" = _load_lazily("queue_states.QueueStates")
    repairs: "MessageEdits" = _load_lazily("message_edits.MessageEdits")
    replies: "ReplyStore" = _load_lazily("replies.ReplyStore")
    retention: "ArchiveRetention" = _load_lazily("retention.ArchiveRetention", "partitions")
    schedules: "ScheduleStore" = _load_lazily("schedules.ScheduleStore")
    dead_sessions: "DeadSessionWatch" = _load_lazily("dead_sessions.DeadSessionWatch")
    ack_first_starts: "AckFirstStarts" = _load_lazily("messages.ack_first.AckFirstStarts")
    direct_claims: "DirectClaims" = _load_lazily(
        "messages.single_claim.DirectClaims", "correlation_ids"
    )
    tokens: "TokenStore" = _load_lazily("tokens.TokenStore")
    verifier: "Verifier" = _load_lazily("verification.Verifier")

    database_class: type[Database] = Database
    """The class that runs transactions; a test replaces it to count them."""

    def __init__(
        self,
        engine: AsyncEngine,
        tables: Tables,
        *,
        statement_timeout: float = 30.0,
        max_connections: int | None = None,
        pgbouncer: bool = False,
        listen_engine: AsyncEngine | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Check the engine, and prepare the statements; no connection is made.

        LISTEN uses `listen_engine` if it is set, otherwise `engine`. With `pgbouncer`, `engine`
        cannot LISTEN, because PgBouncer lends a server's session for one transaction only.
        """
        self.engine = engine
        self.tables = tables
        self.statement_timeout = statement_timeout
        self.dialect: Dialect = create_dialect(engine.dialect, tables)
        self.dialect.time_limit = statement_timeout
        pool.refuse_shared_connection(engine)
        self._engine = pool.ensure_transactional(engine, self.dialect.isolation_level)
        self.max_connections = max_connections or max(1, pool.get_size(engine) // 2)
        self._errors = ErrorClasses(self.dialect, statement_timeout)
        self._checkouts = Checkouts(self._engine, self._errors)
        self._shortcut = DriverShortcut(engine, self._errors, allowed=not pgbouncer)
        self._database = database = self.database_class(
            self._checkouts,
            statement_timeout,
            self._shortcut,
            LoopSemaphore(self.max_connections),
            clock=clock,
        )
        self.correlation_ids = CorrelationIds()
        """Correlation ids for messages without one, made from an id in the policy state."""
        self.server = DatabaseServer(database)
        self.access = AccessChecks(database)
        self.live_subscribers = LiveSubscribers(database, self.correlation_ids)
        self._inserts = Inserts(database)
        self.refuse_too_large = self._inserts.refuse_too_large
        self._listen_engine = listen_engine or (None if pgbouncer else engine)
        if listen_engine is not None:
            self._checkouts.watch(listen_engine)
        self.handler_slots = pool.count_handler_slots(
            engine,
            self.max_connections,
            listening=self._listens_on_pool,
            one_writer=self.dialect.one_writer,
        )
        self.handlers = HandlerTransactions(database, self.handler_slots)

    @property
    def dialect_name(self) -> str:
        """SQLAlchemy's name of the database: postgresql, mysql, mariadb or sqlite."""
        return self.dialect.name

    @property
    def database_name(self) -> str:
        """The name of the database, exact for mariadb and mysql after the first connection."""
        return "mariadb" if is_mariadb(self.engine.dialect) else self.dialect_name

    @property
    def driver(self) -> str:
        """SQLAlchemy's name of the driver."""
        return self.engine.dialect.driver

    @property
    def pool_use(self) -> tuple[int | None, int | None]:
        """Connections of the engine's pool in use, and the capacity; None where unknown."""
        return pool.count_in_use(self.engine), pool.get_capacity(self.engine)

    @property
    def shortage(self) -> str | None:
        """A warning if the pool has fewer connections than the broker may use, or None."""
        return pool.get_shortage(self.engine, self.max_connections, listening=self._listens_on_pool)

    def get_handler_shortage(self, handlers: int) -> str | None:
        """Return a warning if the pool has too few connections for transactions of `handlers`."""
        return pool.get_handler_shortage(self.engine, self.handler_slots, handlers)

    async def run_read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a read-only transaction and return the result.

        `work` may run several times, because a transaction that the database rolled back is
        repeated.
        """
        return await self._database.run(work, write=False)

    # -- publishing ----------------------------------------------------------------------------

    async def insert(self, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows` in a transaction of the broker; return their ids.

        The id is None where the queue has a message with the same dedup_id already.
        """
        return await self._inserts.insert(rows)

    def insert_in(
        self,
        connection: AsyncConnection | AsyncSession | HandlerTransaction,
        rows: Sequence[NewMessage],
    ) -> Awaitable[list[int | None]]:
        """Insert `rows` in the caller's transaction, without a begin, commit or flush.

        Raises:
            PublishError: the connection is closed or leads to another database, or its transaction
                has ended.
        """
        return self._inserts.insert_in(connection, rows)

    def insert_sync(
        self, connection: "Connection | Session", rows: Sequence[NewMessage]
    ) -> list[int | None]:
        """Insert `rows` in the caller's transaction from synchronous code.

        Raises:
            PublishError: as `insert_in`.
        """
        return self._inserts.insert_sync(connection, rows)

    # -- consuming -----------------------------------------------------------------------------

    async def find_ready_pairs(self, queues: Sequence[str]) -> ReadyPairs:
        """Find the (queue, priority) pairs of `queues` with claimable rows and their due times.

        A claimable row waits in its queue, due or not, and has no lease.
        """
        return await self._database.run(
            self.dialect.build_scan(queues), Activity.CONSUME, write=False
        )

    async def poll_all(
        self, queues: Sequence[str], leased: Sequence[str], sign: HeartbeatData | None = None
    ) -> PollResult:
        """Find the ready pairs of `queues`, and when the first lease in the queues `leased` ends.

        A ready pair is a (queue, priority) with claimable messages. Called regularly, and after
        wake-ups, once for all idle subscribers of the process; a busy subscriber polls by
        `find_ready_pairs`. Waiting HTTP requests use this, too. With `sign`, also write their
        heartbeat, by which other processes see that they are alive.
        """
        work = self.dialect.build_poll(queues, leased, sign)
        extra_activities = () if sign is None else (Activity.STATE,)
        # A single statement leaves no lock behind that a silent client could hold.
        locks = not isinstance(work, Query)
        return await self._database.run(
            work, Activity.CONSUME, *extra_activities, write=sign is not None, locks=locks
        )

    async def claim(
        self,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        *,
        suspect_rule: SuspectRule | None = None,
        prefetch: Prefetch | None = None,
    ) -> ClaimedMessages:
        """Lease up to `limit` due rows of `pairs` for `lease` seconds.

        `token` marks the rows as leased by this claim: a settlement must name it. The rows are
        ordered by pair, due time and id. With `prefetch`, only the first rows get `lease`; the
        others wait for a worker and get `prefetch.lease`. With `suspect_rule`, messages that may
        have killed their process (suspects) are skipped: they must run alone.
        """
        if not pairs or limit < 1:
            return ClaimedMessages()
        request = ClaimRequest(pairs, limit, lease, token, suspect_rule, prefetch)
        return await self._database.run(self.dialect.build_claim(request), Activity.CONSUME)

    async def claim_ordered(
        self,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        cursors: Cursors,
        *,
        suspect_rule: SuspectRule | None = None,
    ) -> tuple[ClaimedMessages, float | None, Cursors]:
        """Claim the first live message of each key, and only if no message of the key is leased.

        Keeps the order of each key (`ordered`). A scan reads a part of the queue, and continues
        from `cursors` at the next call.

        Returns:
            The rows; the seconds until the next scan (0: there are more rows to scan, None:
            unknown); and
            the cursors for that scan.
        """
        if not pairs or limit < 1:
            return ClaimedMessages(), None, cursors

        def claim(connection: Connection) -> tuple[ClaimedMessages, float | None, Cursors]:
            # Copy the cursors: the transaction may be repeated, and must start at the same cursors.
            next_cursors = cursors.copy()
            messages, pause = self.dialect.ordered.claim(
                connection, pairs, limit, lease, token, next_cursors, suspect_rule=suspect_rule
            )
            return messages, pause, next_cursors

        return await self._database.run(claim, Activity.CONSUME)

    async def claim_one(
        self,
        message_id: int,
        queues: Sequence[str],
        lease: float,
        token: UUID,
        *,
        ordered: bool = False,
    ) -> ClaimedMessages:
        """Lease a single row if due in any of `queues` and free.

        With `ordered`, the row must also be the first of its key.
        """
        if ordered:
            claim = self.dialect.ordered.claim_one
            return await self._database.run(
                lambda c: claim(c, message_id, queues, lease, token), Activity.CONSUME
            )
        return await self._database.run(
            lambda c: self.dialect.claim_ids(c, [message_id], queues, lease, token),
            Activity.CONSUME,
        )

    async def renew(self, leases: Leases, lease: float) -> set[int]:
        """Extend `leases` to `lease` seconds from now; return the ids still held.

        A lease that was lost (the row has another token, or is gone) is missing in the result. No
        lease is shortened. Waits for rows that another transaction has locked.
        """
        if not leases:
            return set()
        return await self._database.run(
            lambda c: self.dialect.renew(c, leases, lease), Activity.CONSUME
        )

    async def renew_free(self, leases: Leases, lease: float) -> tuple[set[int], set[int]]:
        """Extend `leases` as `renew` does, but skip rows that another transaction has locked.

        Returns:
            The ids that were extended, and the ids that are still held but locked.
        """
        if not leases:
            return set(), set()
        return await self._database.run(
            lambda c: self.dialect.renew_free(c, leases, lease), Activity.CONSUME
        )

    async def settle(
        self, settlements: Sequence[Settlement], *, skip_locked: bool = False
    ) -> SettleResult:
        """Write each settlement whose lease is still held, and publish the attached messages.

        With `skip_locked`, rows that another transaction has locked are in neither set of the
        result, and each wait for any other lock ends after a second.
        """
        if not settlements:
            return SettleResult()
        return await self._database.run(
            self.dialect.build_settle(settlements, skip_locked=skip_locked),
            activity_source=partial(get_required_activities, settlements),
            retry_lock_timeout=not skip_locked,
        )

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[HandlerTransaction]:
        """Open a transaction for a handler; at most `handler_slots` are open at a time.

        Raises:
            TransientStoreError: it could not be opened in time.
        """
        async with self.handlers.open() as transaction:
            yield transaction

    async def release_stuck(
        self, queues: Sequence[str], limit: int, before: datetime | None = None
    ) -> int:
        """Release up to `limit` rows of `queues` with a lease that expired before `before`.

        Without `before`, the lease must have expired by now. Their process has probably died.

        Returns:
            The number of released rows.
        """
        return await self._database.run(
            lambda c: self.dialect.release_stuck(c, queues, limit, before), Activity.CONSUME
        )

    async def end_cancelled(self, queues: Sequence[str], *, archive: bool) -> int:
        """Discard messages with a cancel request and an expired lease; return the count.

        Their holder, which would have answered the request, has probably died.
        """
        activities = {Activity.STATE, Activity.ARCHIVE} if archive else {Activity.STATE}

        def work(connection: Connection) -> int:
            requests = cancel_requests.list_requests(connection, self.dialect.tables.policy_state)
            return cancel_requests.discard_expired(
                connection, self.dialect, queues, requests, archive=archive
            )

        return await self._database.run(work, activity_source=lambda: frozenset(activities))

    async def get_seconds_to_next_job(self) -> float | None:
        """Return the seconds until the next batch of a bulk action is due, None without a batch.

        A bulk action changes many messages for an operator, batch by batch; any process with a
        subscriber runs them.
        """
        return await self._database.run(
            lambda c: audit.get_due_in(c, self.dialect), Activity.OPERATE, write=False
        )

    async def remove_expired_states(self, limit: int) -> int:
        """Check up to `limit` expired policy states, and remove each that is no longer needed.

        A policy state is a row that outlives its message, for example a claimed key. The record of
        a live message is renewed instead.

        Returns:
            The number of checked states.
        """
        table = self.tables.policy_state
        # Usually no state has expired, and a read-only transaction needs fewer statements.
        if not await self._database.run(
            lambda c: policy_state.has_expired(c, table),
            Activity.CONSUME,
            Activity.STATE,
            write=False,
        ):
            return 0

        def work(connection: Connection) -> int:
            keep_live = partial(renew_living, connection, self.dialect)
            return policy_state.remove_expired(connection, table, limit, keep_live)

        return await self._database.run(work, Activity.CONSUME, Activity.STATE)

    async def get_seconds_to_lease_end(self, queues: Sequence[str]) -> float | None:
        """Return the seconds until the first lease in `queues` ends, None if there is no lease.

        Then the lease may have to be released, because its process has died.
        """
        return await self._database.run(
            lambda c: self.dialect.get_seconds_to_lease_end(c, queues),
            Activity.CONSUME,
            write=False,
        )

    async def release_claim(self, queues: Sequence[str], token: UUID) -> int:
        """Release the rows of a claim whose answer was lost; return the count.

        Otherwise the rows would wait until their leases expire. No delivery is counted.
        """
        return await self._database.run(
            lambda c: self.dialect.release_claim(c, queues, token), Activity.CONSUME
        )

    # -- connections ---------------------------------------------------------------------------

    async def notify(self, channel: str, queues: Sequence[str]) -> None:
        """Send a wake-up for `queues` to other processes (PostgreSQL).

        A wake-up makes them poll sooner. None of them relies on this one: a subscriber that polls
        only when notified also gets the notifications of the table's triggers.
        """
        query = self.dialect.build_notify(channel, queues)  # type: ignore[attr-defined]
        await self._inserts.run(query)

    def count_answers(self) -> int:
        """Return how often the database has answered a transaction of the broker without error."""
        return self._checkouts.answer_count

    def refuse_other_loop(self) -> None:
        """Refuse work that was started in an event loop other than the broker's.

        Raises:
            SetupError: another event loop, which is still open, uses the broker.
        """
        self._checkouts.pools.refuse_other_loop()

    async def close(self) -> None:
        """Return the connection kept for publishing to the pool; the store stays usable."""
        await self._inserts.close()
        # Drop connections of an earlier, closed event loop: nothing can close them in this loop.
        self._checkouts.pools.acquire()

    @property
    def can_listen(self) -> bool:
        """True if wake-ups of other processes can be received.

        That needs PostgreSQL, asyncpg and more than one connection.
        """
        engine = self._listen_engine
        if engine is None or not self.dialect.can_listen or engine.dialect.driver != "asyncpg":
            return False
        return engine is not self.engine or pool.can_spare_one(engine)

    @property
    def _listens_on_pool(self) -> bool:
        return self.can_listen and self._listen_engine is self.engine

    @asynccontextmanager
    async def listen(
        self, channel: str, on_payload: Callable[[str], None], closed: asyncio.Event
    ) -> AsyncIterator[Callable[[bool], Awaitable[None]]]:
        """Call `on_payload` with the payload of each wake-up on `channel`.

        Yields a check of the connection, which queries the server only if its argument is true.
        `closed` is set when the connection is closed. One connection of the pool is in use until
        the block ends.

        Raises:
            TransientStoreError: the connection could not be made or is lost.
        """
        engine = self._listen_engine or self.engine
        async with listen_on_channel(
            self._checkouts, engine, self.statement_timeout, channel, on_payload, closed
        ) as check_alive:
            yield check_alive

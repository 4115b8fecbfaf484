"""The broker's operations on the database, one method each; each is one transaction."""

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
    Around,
    Claimed,
    Leases,
    NewMessage,
    Prefetch,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
    SignOfLife,
)
from faststream_sqlbroker.core.settle import needed_to_write
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.database import pool
from faststream_sqlbroker.database.access import AccessChecks
from faststream_sqlbroker.database.connections import Checkouts, LoopSemaphore
from faststream_sqlbroker.database.dialects import Dialect, dialect_for
from faststream_sqlbroker.database.driver import DriverShortcut
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.errors import ErrorClasses
from faststream_sqlbroker.database.listen import listening
from faststream_sqlbroker.database.messages.handler import HandlerTransaction, HandlerTransactions
from faststream_sqlbroker.database.messages.inserts import Inserts
from faststream_sqlbroker.database.parts import audit, cancels, policy_state
from faststream_sqlbroker.database.parts.mirror import keep_living
from faststream_sqlbroker.database.parts.ordered import Cursors
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.database.server import DatabaseServer
from faststream_sqlbroker.database.subscribers import LiveSubscribers
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.schema.types import is_mariadb

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from faststream_sqlbroker.database.archive_growth import ArchiveGrowth
    from faststream_sqlbroker.database.bulk.store import JobStore
    from faststream_sqlbroker.database.dead_sessions import DeadSessionWatch
    from faststream_sqlbroker.database.depths import Depths
    from faststream_sqlbroker.database.explain.explanations import Explanations
    from faststream_sqlbroker.database.locks import LockStore
    from faststream_sqlbroker.database.messages.ack_first import AckFirstStarts
    from faststream_sqlbroker.database.messages.direct_claim import DirectClaims
    from faststream_sqlbroker.database.mirror import MirrorStore
    from faststream_sqlbroker.database.overviews import QueueOverviews
    from faststream_sqlbroker.database.policies.policy_holds import PolicyHolds
    from faststream_sqlbroker.database.policies.store import PolicyStore
    from faststream_sqlbroker.database.pull import PullStore
    from faststream_sqlbroker.database.queue_states import QueueStates
    from faststream_sqlbroker.database.repairs import Repairs
    from faststream_sqlbroker.database.replies import ReplyStore
    from faststream_sqlbroker.database.retention import ArchivePartitions, ArchiveRetention
    from faststream_sqlbroker.database.schedules import Schedules
    from faststream_sqlbroker.database.stored_messages import StoredMessages
    from faststream_sqlbroker.database.tokens import TokenStore
    from faststream_sqlbroker.database.verification import Verifier

T = TypeVar("T")


class _Subject:
    """A subject of the store, which is imported and made when it is first asked for: a process pays
    for those that it uses.
    """

    def __init__(self, home: str, *arguments: str) -> None:
        self._home = home
        self._arguments = arguments

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, store: Any, owner: type | None = None) -> Any:
        if store is None:
            return self
        module, _, name = self._home.rpartition(".")
        arguments = [getattr(store, argument) for argument in ("_database", *self._arguments)]
        subject = getattr(import_module(f"{_PACKAGE}.{module}"), name)(*arguments)
        # Two threads may have made it at once: both get the same one.
        return vars(store).setdefault(self._name, subject)


def _subject(home: str, *arguments: str) -> Any:
    """The class at `home`, made of the database and of attributes of the store."""
    return _Subject(home, *arguments)


_PACKAGE = "faststream_sqlbroker.database"
"""That of all subjects."""


class Store:
    """The broker's operations on one database.

    Every operation is one transaction, except those in the caller's. It takes at most
    `statement_timeout` seconds, including the wait for a connection, and one of `max_connections`
    places, half of the pool by default.

    Raises (from every operation):
        TransientStoreError: the database could not be reached or was busy; nothing was written.
        UnknownOutcomeError: the answer to the COMMIT was lost.
        StoreError: the database refused the statement.
    """

    depths: "Depths" = _subject("depths.Depths")
    explanations: "Explanations" = _subject("explain.explanations.Explanations")
    jobs: "JobStore" = _subject("bulk.store.JobStore")
    locks: "LockStore" = _subject("locks.LockStore")
    messages: "StoredMessages" = _subject("stored_messages.StoredMessages")
    mirror: "MirrorStore" = _subject("mirror.MirrorStore")
    overviews: "QueueOverviews" = _subject("overviews.QueueOverviews")
    archive_growth: "ArchiveGrowth" = _subject("archive_growth.ArchiveGrowth")
    partitions: "ArchivePartitions" = _subject("retention.ArchivePartitions")
    policies: "PolicyStore" = _subject("policies.store.PolicyStore")
    policy_holds: "PolicyHolds" = _subject("policies.policy_holds.PolicyHolds")
    pull: "PullStore" = _subject("pull.PullStore")
    queue_states: "QueueStates" = _subject("queue_states.QueueStates")
    repairs: "Repairs" = _subject("repairs.Repairs")
    replies: "ReplyStore" = _subject("replies.ReplyStore")
    retention: "ArchiveRetention" = _subject("retention.ArchiveRetention", "partitions")
    schedules: "Schedules" = _subject("schedules.Schedules")
    silent: "DeadSessionWatch" = _subject("dead_sessions.DeadSessionWatch")
    starts: "AckFirstStarts" = _subject("messages.ack_first.AckFirstStarts")
    takes: "DirectClaims" = _subject("messages.direct_claim.DirectClaims", "correlation_ids")
    tokens: "TokenStore" = _subject("tokens.TokenStore")
    verifier: "Verifier" = _subject("verification.Verifier")

    database_class: type[Database] = Database
    """What runs its transactions; a test counts them."""

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
        """Prepare the statements; no connection is made.

        LISTEN uses `listen_engine` if given, else `engine`, but never PgBouncer.
        """
        self.engine = engine
        self.tables = tables
        self.statement_timeout = statement_timeout
        self.dialect: Dialect = dialect_for(engine.dialect, tables)
        self.dialect.time_limit = statement_timeout
        pool.refuse_shared(engine)
        self._engine = pool.transactional(engine, self.dialect.isolation_level)
        self.max_connections = max_connections or max(1, pool.size(engine) // 2)
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
        """Of messages without one; the policy state has what they are made of."""
        self.server = DatabaseServer(database)
        self.access = AccessChecks(database)
        self.live_subscribers = LiveSubscribers(database, self.correlation_ids)
        self._inserts = Inserts(database)
        self.refuse_too_large = self._inserts.refuse_too_large
        self._listen_engine = listen_engine or (None if pgbouncer else engine)
        if listen_engine is not None:
            self._checkouts.watch(listen_engine)
        self.handler_places = pool.handler_places(
            engine,
            self.max_connections,
            listening=self._listens_on_pool,
            one_writer=self.dialect.one_writer,
        )
        self.handlers = HandlerTransactions(database, self.handler_places)

    @property
    def dialect_name(self) -> str:
        """SQLAlchemy's name of the database: postgresql, mysql, mariadb or sqlite."""
        return self.dialect.name

    @property
    def database_name(self) -> str:
        """The same, but mariadb is told from mysql by its server, once a connection was made."""
        return "mariadb" if is_mariadb(self.engine.dialect) else self.dialect_name

    @property
    def driver(self) -> str:
        """SQLAlchemy's name of the driver."""
        return self.engine.dialect.driver

    @property
    def pool_use(self) -> tuple[int | None, int | None]:
        """Connections of the engine's pool in use, and the most it gives; None: it does not say."""
        return pool.in_use(self.engine), pool.capacity(self.engine)

    @property
    def shortage(self) -> str | None:
        """The warning if the pool has fewer connections than the broker may use; else None."""
        return pool.shortage(self.engine, self.max_connections, listening=self._listens_on_pool)

    def handler_shortage(self, handlers: int) -> str | None:
        """The warning if the pool has too few connections for `handlers` with a transaction."""
        return pool.handler_shortage(self.engine, self.handler_places, handlers)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` reads, in a transaction of its own; it may run several times."""
        return await self._database.run(work, write=False)

    # -- publishing ----------------------------------------------------------------------------

    async def insert(self, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows` in a transaction of the broker; the ids, None for a duplicate dedup_id."""
        return await self._inserts.insert(rows)

    def insert_in(
        self,
        connection: AsyncConnection | AsyncSession | HandlerTransaction,
        rows: Sequence[NewMessage],
    ) -> Awaitable[list[int | None]]:
        """Insert `rows` in the caller's transaction; this neither begins, commits nor flushes it.

        Raises:
            PublishError: the connection is closed or leads to another database, or its transaction
                has ended.
        """
        return self._inserts.insert_in(connection, rows)

    def insert_sync(
        self, connection: "Connection | Session", rows: Sequence[NewMessage]
    ) -> list[int | None]:
        """`insert_in` for synchronous code.

        Raises:
            PublishError: as `insert_in`.
        """
        return self._inserts.insert_sync(connection, rows)

    # -- consuming -----------------------------------------------------------------------------

    async def ready_pairs(self, queues: Sequence[str]) -> ReadyPairs:
        """The (queue, priority) pairs of `queues` with claimable rows, and when each is due."""
        return await self._database.run(self.dialect.scan(queues), Activity.CONSUME, write=False)

    async def look_around(
        self, queues: Sequence[str], leased: Sequence[str], sign: SignOfLife | None = None
    ) -> Around:
        """`ready_pairs`, and when the first lease in the queues `leased` ends; with `sign`, also a
        sign of life of this process's subscribers.
        """
        looking = self.dialect.looking_around(queues, leased, sign)
        state = () if sign is None else (Activity.STATE,)
        # A single statement leaves no lock behind that a silent client could hold.
        locks = not isinstance(looking, Query)
        return await self._database.run(
            looking, Activity.CONSUME, *state, write=sign is not None, locks=locks
        )

    async def claim(
        self,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        *,
        suspicion: Suspicion | None = None,
        prefetch: Prefetch | None = None,
    ) -> Claimed:
        """Lease up to `limit` due rows of `pairs` for `lease` seconds; ordered by pair, due, id.

        With `prefetch`, only its first rows get `lease`; the others get `prefetch.lease`. With
        `suspicion`, suspects are left out: they are to run alone.
        """
        if not pairs or limit < 1:
            return Claimed()
        claiming = self.dialect.claiming(
            pairs, limit, lease, token, suspicion=suspicion, prefetch=prefetch
        )
        return await self._database.run(claiming, Activity.CONSUME)

    async def claim_ordered(
        self,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        cursors: Cursors,
        *,
        suspicion: Suspicion | None = None,
    ) -> tuple[Claimed, float | None, Cursors]:
        """As `claim`, but of each key only its first live message, and only if none is leased.

        Returns:
            The rows; the seconds until the next scan (0: there are more rows to scan, None: not
            known); and the cursors for that scan.
        """
        if not pairs or limit < 1:
            return Claimed(), None, cursors

        def claim(connection: Connection) -> tuple[Claimed, float | None, Cursors]:
            # A copy: the transaction may be repeated, and must start at the same cursors.
            moved = cursors.copy()
            claimed, pause = self.dialect.ordered.claim(
                connection, pairs, limit, lease, token, moved, suspicion=suspicion
            )
            return claimed, pause, moved

        return await self._database.run(claim, Activity.CONSUME)

    async def claim_one(
        self,
        message_id: int,
        queues: Sequence[str],
        lease: float,
        token: UUID,
        *,
        ordered: bool = False,
    ) -> Claimed:
        """Lease this row, if it is due in one of `queues`, free, and, with `ordered`, the first."""
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
        """Extend `leases` to `lease` seconds from now, shorten none; the ids still held.

        Rows that another transaction has locked are waited for.
        """
        if not leases:
            return set()
        return await self._database.run(
            lambda c: self.dialect.renew(c, leases, lease), Activity.CONSUME
        )

    async def renew_free(self, leases: Leases, lease: float) -> tuple[set[int], set[int]]:
        """As `renew`, without a wait: the ids that were extended, and those that are still held,
        but locked by another transaction.
        """
        if not leases:
            return set(), set()
        return await self._database.run(
            lambda c: self.dialect.renew_free(c, leases, lease), Activity.CONSUME
        )

    async def settle(
        self, settlements: Sequence[Settlement], *, skip_locked: bool = False
    ) -> SettleResult:
        """Write `settlements` and the messages published with them; each only if its lease is held.

        With `skip_locked`, rows that another transaction has locked are in neither set of the
        result, and each wait for any other lock ends after a second.
        """
        if not settlements:
            return SettleResult()
        return await self._database.run(
            self.dialect.settling(settlements, skip_locked=skip_locked),
            doing=partial(needed_to_write, settlements),
            patient=not skip_locked,
        )

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[HandlerTransaction]:
        """A transaction for a handler; at most `handler_places` are open at a time.

        Raises:
            TransientStoreError: it could not be opened in time.
        """
        async with self.handlers.open() as transaction:
            yield transaction

    async def release_stuck(
        self, queues: Sequence[str], limit: int, before: datetime | None = None
    ) -> int:
        """Release up to `limit` rows of `queues` whose lease ended before that moment, None: by
        now; how many.
        """
        return await self._database.run(
            lambda c: self.dialect.release_stuck(c, queues, limit, before), Activity.CONSUME
        )

    async def end_cancelled(self, queues: Sequence[str], *, archive: bool) -> int:
        """Discard messages of `queues` whose lease was to be cancelled and is over; how many."""
        doing = {Activity.STATE, Activity.ARCHIVE} if archive else {Activity.STATE}

        def work(connection: Connection) -> int:
            asked = cancels.requests(connection, self.dialect.tables.policy_state)
            return cancels.end_expired(connection, self.dialect, queues, asked, archive=archive)

        return await self._database.run(work, doing=lambda: frozenset(doing))

    async def job_due_in(self) -> float | None:
        """Seconds until the next batch of a bulk action is due; None: none is left."""
        return await self._database.run(
            lambda c: audit.due_in(c, self.dialect), Activity.OPERATE, write=False
        )

    async def forget_expired(self, limit: int) -> int:
        """Look at up to `limit` states of policies that have expired, and remove those that nothing
        needs; at how many.
        """
        table = self.tables.policy_state
        # Mostly there are none, and a transaction that writes has statements of its own.
        if not await self._database.run(
            lambda c: policy_state.has_expired(c, table),
            Activity.CONSUME,
            Activity.STATE,
            write=False,
        ):
            return 0

        def work(connection: Connection) -> int:
            living = partial(keep_living, connection, self.dialect)
            return policy_state.forget_expired(connection, table, limit, living)

        return await self._database.run(work, Activity.CONSUME, Activity.STATE)

    async def lease_ends_in(self, queues: Sequence[str]) -> float | None:
        """Seconds until the first lease of any worker in `queues` ends; None without a lease."""
        return await self._database.run(
            lambda c: self.dialect.lease_ends_in(c, queues), Activity.CONSUME, write=False
        )

    async def release_claim(self, queues: Sequence[str], token: UUID) -> int:
        """Release the rows of a claim whose answer was lost; how many. No delivery is counted."""
        return await self._database.run(
            lambda c: self.dialect.release_claim(c, queues, token), Activity.CONSUME
        )

    # -- connections ---------------------------------------------------------------------------

    async def notify(self, channel: str, queues: Sequence[str]) -> None:
        """Send a wake-up for `queues` to other processes (PostgreSQL)."""
        query = self.dialect.notifying(channel, queues)  # type: ignore[attr-defined]
        await self._inserts.run(query)

    def refuse_other_loop(self) -> None:
        """Refuse what an event loop starts that the broker does not belong to.

        Raises:
            SetupError: another event loop, which is still open, uses the broker.
        """
        self._checkouts.pools.refuse_other_loop()

    async def close(self) -> None:
        """Return the connection kept for publishing; the store can still be used afterwards."""
        await self._inserts.close()
        self._checkouts.pools.enter()

    @property
    def can_listen(self) -> bool:
        """Whether wake-ups of other processes can be received.

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
        self, channel: str, heard: Callable[[str], None], gone: asyncio.Event
    ) -> AsyncIterator[Callable[[bool], Awaitable[None]]]:
        """Call `heard` with the payload of each wake-up on `channel`; yields a check of the
        connection, which asks the server only if its argument is true. `gone` is set when the
        connection is closed.

        It takes one connection of the pool until the block ends.

        Raises:
            TransientStoreError: the connection could not be made or is lost.
        """
        engine = self._listen_engine or self.engine
        async with listening(
            self._checkouts, engine, self.statement_timeout, channel, heard, gone
        ) as alive:
            yield alive

"""`broker.pop`, `broker.reserve` and `broker.lock`: single messages and locks for applications."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from faststream_sqlbroker.broker.publishing import SqlBrokerPublishing
from faststream_sqlbroker.core.checks import validate_name
from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.retry import (
    RetryStrategyProto,
    default_retry_strategy,
    get_max_attempts,
)
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules
from faststream_sqlbroker.core.times import Duration, parse_lease, parse_wait
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.shielded import ShieldedCalls
from faststream_sqlbroker.flow.tasks.direct_claim import DirectClaimer, DirectClaimRequest
from faststream_sqlbroker.flow.tasks.schedules import Scheduler
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.subscriber import option_checks

if TYPE_CHECKING:
    from faststream_sqlbroker.broker.reservation import ReceivedMessage, Reservation
    from faststream_sqlbroker.flow.tasks.locks import Lock, LockManager


class SqlBrokerLocking(SqlBrokerPublishing):
    """Locks by key, shared by all processes that use the tables."""

    _shielded: ShieldedCalls
    _log_of_loops: Any

    @cached_property
    def _locks(self) -> "LockManager":
        """The locks of this process, created on first use."""
        from faststream_sqlbroker.flow.tasks.locks import LockManager  # noqa: PLC0415

        return LockManager(self._store, self._shielded, self._log_of_loops, self._wakeups.clock)

    def lock(
        self, key: str, *, lease: Duration = "30s", wait: Duration | None = None
    ) -> "AbstractAsyncContextManager[Lock]":
        """Lock `key` while a block runs: `async with broker.lock("report") as lock:`.

        At most one holder in all processes has the lock at a time, while its lease runs by the
        database's clock. The lease is renewed after each third of its length while the block runs,
        and expires when the process dies. Each holder gets a `fence` greater than all earlier ones.
        The lock holds no transaction and no connection. It is not reentrant, and needs no started
        broker.

        A cancelled `lock` leaves the key unlocked. If the answer to its COMMIT is lost, the key may
        stay locked until the lease expires.

        Args:
            key: 1 to 255 characters. Its row stays in the table forever, so the set of keys should
                be limited.
            lease: Time that the key stays locked after its process died: seconds, a timedelta or
                text like "30s". Make it longer than any pause of the event loop.
            wait: Maximum wait for the current holder: None waits without limit, 0 tries once. A
                statement in progress at the end of this time is awaited.

        Raises:
            LockNotAcquiredError: another holder kept the lock for the whole waiting time.
            LockLostError: at the end of a block that may have run without the lock, unless the
                block itself raised.
            SetupError: an argument is not valid.
            NotSupportedError: on SQLite, in a handler with transactional=True.
            StoreError: the database refused the statement, or could not be reached at the first
                try; a later outage is waited out.
        """
        validate_name(key, "the key of a lock")
        return self._hold_lock(key, parse_lease(lease), parse_wait(wait))

    @asynccontextmanager
    async def _hold_lock(self, key: str, lease: float, wait: float | None) -> "AsyncIterator[Lock]":
        """Connect, then hold the lock while the block runs."""
        await self.connect()
        async with self._locks.hold(key, lease, wait) as lock:
            yield lock


POP_LEASE = 60.0
"""Seconds. Never expires, because the transaction that leases a popped message removes it."""
Auto = Literal["auto"]


class SqlBrokerReserving(SqlBrokerLocking):
    """Claims single messages outside of handlers; the queues may have subscribers, too.

    Policies, `ordered=True` and middlewares of subscribers do not apply. As with subscribers,
    expired messages are discarded and messages over a limit are rejected. A queue paused by
    `broker.admin.pause` counts as empty. Needs no started broker.
    """

    _direct_claimer: DirectClaimer
    _shielded: ShieldedCalls
    _scheduler: Scheduler

    def _build_application_services(
        self, store: Store, wakeups: Wakeups, log: Log, recorder: Recorder | None
    ) -> None:
        """Create the components that work without subscribers: direct claims and the scheduler.

        Called before FastStream's `__init__`, and again by a test that replaces the store.
        """
        store.dialect.warn = partial(log, logging.WARNING)
        # Calls whose writes must not be cut off if their caller is cancelled.
        self._shielded = ShieldedCalls()
        # The cached property holds the locks of the previous store.
        vars(self).pop("_locks", None)
        self._direct_claimer = DirectClaimer(store, wakeups, self._shielded, log, recorder)
        self._scheduler = Scheduler(store, wakeups, log)

    async def pop(
        self,
        queues: str | Sequence[str],
        *more_queues: str,
        wait: Duration | None = 0,
        max_deliveries: int | Auto | None = "auto",
    ) -> "ReceivedMessage | None":
        """Claim and remove the first due message, for delivery at most once.

        The transaction that claims the message also archives it as COMPLETED. If the call is
        cancelled, a message may be removed without being returned; it is then in the archive.

        Args:
            queues: A name or a list of names. Queues take turns; within a queue the highest
                priority comes first.
            more_queues: More names.
            wait: Maximum wait for a message: seconds, a timedelta or text like "10s"; 0 checks
                once, None waits without limit.
            max_deliveries: Number of lost leases after which a message is rejected. "auto" is 20,
                None is no limit.

        Returns:
            The message; None if none is due.

        Raises:
            UnknownOutcomeError: the answer to the COMMIT was lost. A message may have been removed;
                it is then in the archive.
            SetupError: an argument is not valid.
            StoreError: the database refused the statement or could not be reached; nothing was
                removed.
        """
        request = DirectClaimRequest(
            queues=option_checks.parse_queue_names(queues, more_queues),
            lease=POP_LEASE,
            rules=SettleRules(),
            max_deliveries=option_checks.parse_max_deliveries(max_deliveries, None),
            remove=True,
        )

        from faststream_sqlbroker.broker.reservation import ReceivedMessage  # noqa: PLC0415

        async def build_message(row: ClaimedMessage) -> ReceivedMessage:
            ids = self._direct_claimer.correlation_ids
            return ReceivedMessage(row, await self._make_body_reader(row), ids)

        timeout = parse_wait(wait)
        await self.connect()
        return await self._direct_claimer.claim(request, timeout, build_message)

    async def reserve(
        self,
        queues: str | Sequence[str],
        *more_queues: str,
        lease: Duration = "1m",
        wait: Duration | None = 0,
        retry_strategy: RetryStrategyProto | Auto | None = "auto",
        max_deliveries: int | Auto | None = "auto",
    ) -> "Reservation | None":
        """Lease the first due message, for delivery at least once.

        A message that is not settled before its lease ends is released by the next claim of a
        subscriber of the queue, or by the next `reserve` or `pop`. A cancelled call leases nothing.

        Args:
            queues: A name or a list of names. Queues take turns; within a queue the highest
                priority comes first.
            more_queues: More names.
            lease: Length of the lease by the database's clock: seconds, a timedelta or text like
                "1m".
            wait: Maximum wait for a message: 0 checks once, None waits without limit.
            retry_strategy: Decides when the message is due after `rollback()`, and how often it is
                tried. "auto" is the default of subscribers, None allows no further attempt.
            max_deliveries: Number of lost leases after which a message is rejected. "auto" is the
                strategy's attempts plus 3, or 20 without such a limit; None is no limit.

        Returns:
            The message; None if none is due.

        Raises:
            SetupError: an argument is not valid.
            StoreError: the database refused the statement or could not be reached. A message may be
                leased nevertheless; it is due again when the lease expires.
        """
        strategy = default_retry_strategy() if retry_strategy == "auto" else retry_strategy
        option_checks.check_retry_strategy(strategy)
        request = DirectClaimRequest(
            queues=option_checks.parse_queue_names(queues, more_queues),
            lease=parse_lease(lease),
            rules=SettleRules(retry_strategy=strategy),
            max_deliveries=option_checks.parse_max_deliveries(
                max_deliveries, get_max_attempts(strategy)
            ),
            remove=False,
        )

        from faststream_sqlbroker.broker.reservation import Reservation  # noqa: PLC0415

        async def build_reservation(row: ClaimedMessage) -> Reservation:
            return Reservation(
                row,
                await self._make_body_reader(row),
                wanted=request,
                direct_claimer=self._direct_claimer,
                producer=self.config.producer,  # type: ignore[arg-type] # a SqlBrokerProducer
            )

        timeout = parse_wait(wait)
        await self.connect()
        return await self._direct_claimer.claim(request, timeout, build_reservation)

    async def _make_body_reader(self, row: ClaimedMessage) -> Callable[[], Any]:
        """Return a function that returns the decoded body, or raises the error of the decoder.

        The message is claimed already. An error raised here would lose it, so the application gets
        the error when it reads the body.
        """
        producer: Any = self.config.producer
        try:
            body = await producer.decode(row)
        except Exception as error:  # noqa: BLE001 - the user's decoder may raise anything
            decode_error = error

            def raise_error() -> Any:
                raise decode_error

            return raise_error
        return lambda: body

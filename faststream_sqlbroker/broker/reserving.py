"""`broker.pop` and `broker.reserve`: messages for the application itself."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from faststream_sqlbroker.broker.locking import SqlBrokerLocking
from faststream_sqlbroker.broker.reservation import ReceivedMessage, Reservation
from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.retry import RetryStrategyProto, default_retry_strategy
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules
from faststream_sqlbroker.core.times import Duration, lease_seconds, wait_seconds
from faststream_sqlbroker.flow.direct_claim import DirectClaimer, DirectClaimRequest
from faststream_sqlbroker.flow.locks import Locks
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.schedules import Scheduler
from faststream_sqlbroker.flow.shielded import ShieldedCalls
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.store import Store
from faststream_sqlbroker.subscriber import checks

POP_LEASE = 60.0
"""Seconds; a popped message is removed in the transaction that leases it."""
MOST_DELIVERIES = 20
"""As for subscribers whose strategy sets no limit."""
MORE_DELIVERIES = 3
"""Deliveries that may be lost besides all attempts."""

Auto = Literal["auto"]


class SqlBrokerReserving(SqlBrokerLocking):
    """Single messages outside of handlers, beside subscribers of the same queues or without any.

    Policies, `ordered=True` and middlewares of subscribers do not apply; expired messages are
    discarded, and those over a limit rejected, as everywhere. A queue that `broker.admin.pause` has
    paused counts as empty. Needs no started broker.
    """

    _direct_claimer: DirectClaimer
    _shielded: ShieldedCalls
    _scheduler: Scheduler

    def _serve_application(self, store: Store, wakeups: Wakeups, log: Log) -> None:
        """Set up what serves the application's own calls."""
        store.dialect.warn = partial(log, logging.WARNING)
        self._shielded = ShieldedCalls()
        self._locks = Locks(store, self._shielded, log, wakeups.clock)
        self._direct_claimer = DirectClaimer(store, wakeups, self._shielded, log)
        self._scheduler = Scheduler(store, wakeups, log)

    async def pop(
        self,
        queues: str | Sequence[str],
        *more_queues: str,
        wait: Duration | None = 0,
        max_deliveries: int | Auto | None = "auto",
    ) -> ReceivedMessage | None:
        """Remove the first due message: at most once, as it is archived as COMPLETED in the
        transaction that takes it.

        Args:
            queues: A name or a list of names; of each the highest priority first, queues in turn.
            more_queues: More names.
            wait: How long to wait for a message: 0 looks once, None without limit.
            max_deliveries: A message that was delivered more often is rejected; "auto" is 20, None
                no limit.

        Returns:
            The message; None if none is due.

        Raises:
            UnknownOutcomeError: the answer to the COMMIT was lost: a message may have been removed
                unseen; it is in the archive then. The same holds for a call that is cancelled.
            SetupError: an argument that cannot be used.
            StoreError: the database refused or could not be reached; nothing was removed.
        """
        wanted = DirectClaimRequest(
            queues=_names(queues, more_queues),
            lease=POP_LEASE,
            rules=SettleRules(),
            most_deliveries=_most_deliveries(max_deliveries, None),
            remove=True,
        )

        async def read(row: ClaimedMessage) -> ReceivedMessage:
            return ReceivedMessage(row, await self._decoded(row))

        waited = wait_seconds(wait)
        await self.connect()
        return await self._direct_claimer.take(wanted, waited, read)

    async def reserve(
        self,
        queues: str | Sequence[str],
        *more_queues: str,
        lease: Duration = "1m",
        wait: Duration | None = 0,
        retry_strategy: RetryStrategyProto | Auto | None = "auto",
        max_deliveries: int | Auto | None = "auto",
    ) -> Reservation | None:
        """Lease the first due message: at least once, as it comes back if it is not settled before
        the lease ends.

        Whoever looks next gives it back then: a subscriber of the queue, or a `reserve` or `pop`. A
        cancelled call leases nothing.

        Args:
            queues: A name or a list of names; of each the highest priority first, queues in turn.
            more_queues: More names.
            lease: How long it is ours, by the database's clock.
            wait: How long to wait for a message: 0 looks once, None without limit.
            retry_strategy: When it is due after `rollback()`, and how often; "auto" is the
                subscribers' default, None allows no other attempt.
            max_deliveries: A message that was delivered more often is rejected; "auto" is 3 more
                than the strategy's attempts, or 20, None no limit.

        Returns:
            The message; None if none is due.

        Raises:
            SetupError: an argument that cannot be used.
            StoreError: the database refused or could not be reached; what may be leased all the
                same comes back.
        """
        strategy = default_retry_strategy() if retry_strategy == "auto" else retry_strategy
        checks.retry_strategy(strategy)
        rules, seconds = SettleRules(retry_strategy=strategy), lease_seconds(lease)
        wanted = DirectClaimRequest(
            queues=_names(queues, more_queues),
            lease=seconds,
            rules=rules,
            most_deliveries=_most_deliveries(max_deliveries, checks.most_attempts(strategy)),
            remove=False,
        )

        async def read(row: ClaimedMessage) -> Reservation:
            return Reservation(
                row,
                await self._decoded(row),
                direct_claimer=self._direct_claimer,
                producer=self.config.producer,  # type: ignore[arg-type] # ours
                rules=rules,
                lease=seconds,
            )

        waited = wait_seconds(wait)
        await self.connect()
        return await self._direct_claimer.take(wanted, waited, read)

    async def _decoded(self, row: ClaimedMessage) -> Callable[[], Any]:
        """The decoded body, or the error of decoding it, for whoever asks: the message is taken by
        then.
        """
        producer: Any = self.config.producer
        try:
            body = await producer.decode(row)
        except Exception as error:  # noqa: BLE001 - the user's decoder may raise anything
            caught = error

            def refuse() -> Any:
                raise caught

            return refuse
        return lambda: body


def _names(queues: str | Sequence[str], more: tuple[str, ...]) -> tuple[str, ...]:
    return checks.queue_names(
        [*([queues] if isinstance(queues, str) else queues), *more] if more else queues
    )


def _most_deliveries(given: int | Auto | None, attempts: int | None) -> float:
    if given == "auto":
        return MOST_DELIVERIES if attempts is None else attempts + MORE_DELIVERIES
    if given is None:
        return float("inf")
    whole_number("max_deliveries", given, other=', "auto", or None for no limit')
    return given

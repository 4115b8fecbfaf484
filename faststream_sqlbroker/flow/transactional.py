"""transactional=True: the handler's own SQL, its answers and its ack commit together or not at all.

The transaction begins by locking the handler's rows, fenced; the lock keeps the lease while the
session lives, as release and renewal skip locked rows. Only an ack (or a move) commits. Every other
outcome rolls back what the handler did and is written by the flush, like those of plain
subscribers. An ack that cannot be committed for a reason that passes is no fault of the handler's:
its message goes back without an attempt.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.outcome import Abandon, Ack, Discard, Nack, Reject, Release, Relocate
from faststream_sqlbroker.core.policies import Once
from faststream_sqlbroker.core.reasons import TRANSACTION_ENDED
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.exceptions import (
    StoreError,
    TransactionEndedError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.flow.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log, backoff, cancelled, is_told
from faststream_sqlbroker.flow.lost_leases import broken_text
from faststream_sqlbroker.flow.prefetch import prefetch_lease
from faststream_sqlbroker.flow.settings import ConsumerSettings
from faststream_sqlbroker.flow.shielded import SHIELDED_TIMEOUT, patiently
from faststream_sqlbroker.flow.solo_run import lost_leases

if TYPE_CHECKING:
    from faststream_sqlbroker.dialects.handler_locks import HandlerLock
    from faststream_sqlbroker.store import Store
    from faststream_sqlbroker.store.handler import HandlerTransaction

Rows = list[ClaimedMessage]

LOOK = 0.2
"""Seconds between two looks whether to stop, while the database does not say what became of a
transaction."""
CLOSING = 1.0
"""Seconds that the question gets to give its connection back, once its answer is no longer waited
for."""
FIRST_PAUSE = 4
"""The step of `backoff` after the first failed COMMIT: 0.8 s, then twice as long each time, as
deliveries are limited."""

current: ContextVar["HandlerTransaction | None"] = ContextVar("sqlbroker_transaction", default=None)
"""The transaction of the handler that runs."""


class TransactionalDeliveries:
    """Delivers rows inside a transaction, one delivery (or batch) at a time."""

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        settings: ConsumerSettings,
        log: Log,
        *,
        stopping: Callable[[], bool],
    ) -> None:
        """Share the `inflight` of the subscriber with `settings`; `stopping` tells whether it is to
        end.
        """
        self._store = store
        self._inflight = inflight
        self._log = log
        self._stopping = stopping
        self._clock = inflight.clock
        self._lease = settings.release_stuck_timeout
        self._once = any(isinstance(policy, Once) for policy in settings.policies)
        self._failures = 0

    async def deliver(
        self,
        rows: Rows,
        run: Callable[[Rows], Awaitable[None]],
        settlements: Callable[[Rows], list[Settlement]],
    ) -> Rows:
        """Run the handler on `rows` and commit; the rows whose outcome is left to the flush, never
        an ack.

        With them come those that were lost before the handler started, so that their keys are given
        back.

        Args:
            rows: One delivery, or a batch.
            run: Runs the handler; afterwards each row has its outcome.
            settlements: What the outcomes mean, with what is chained to them.
        """
        # Many branches, in one function: what an error means depends on how far the block has come.
        started = False
        renewed = min(row.renewed_monotonic for row in rows)
        lease = prefetch_lease(self._lease) if any(row.prefetched for row in rows) else self._lease
        unstarted: Rows = []
        left: Rows | None = None
        opened: HandlerTransaction | None = None
        try:
            async with self._store.transaction() as transaction:
                opened = transaction
                rows, unstarted = await self._lock(transaction, rows)
                started = True
                self._failures = 0
                token = current.set(transaction)
                try:
                    if rows:
                        await self._run(transaction, run, rows)
                finally:
                    current.reset(token)
                left = await self._commit(transaction, rows, settlements) if rows else []
        except BaseException as error:
            if not started and isinstance(error, Exception):
                return await self._not_started(rows, error)
            if started:
                await self._failed_late(error, opened, rows, left)
            elif isinstance(error, asyncio.CancelledError):
                _release(rows)
            raise
        if left and not transaction.proven:
            left = await self._ended(transaction.locked, left)
        self._tell_abandoned(left)
        if left and self._clock.monotonic() - renewed > lease / 3:
            await self._renew(left)
        await self._name_what_is_missing(transaction, left)
        return [*left, *unstarted]

    async def _failed_late(
        self,
        error: BaseException,
        transaction: "HandlerTransaction | None",
        rows: Rows,
        left: Rows | None,
    ) -> None:
        """`error` came after the handler's start; `left` is what the commit has left, if there was
        one.
        """
        if left is not None and len(left) < len(rows):
            # Committed, though its connection did not come back.
            self._inflight.drop([row for row in rows if row not in left])
        else:
            _abandon(rows)  # rolled back: the flush must not ack it
        none_committed = left is None or left == rows
        if none_committed and isinstance(error, Exception | asyncio.CancelledError):
            await self._cut_off(transaction, rows)

    async def _run(
        self, transaction: "HandlerTransaction", run: Callable[[Rows], Awaitable[None]], rows: Rows
    ) -> None:
        try:
            await run(rows)
        except asyncio.CancelledError as error:
            if cancelled():
                raise
            for row in rows:  # the handler's own, and its failure
                row.settle_as(Nack(error=error))
        for row in rows:
            if isinstance(row.outcome, Nack | Reject) and row.outcome.error is not None:
                transaction.note(row.outcome.error)

    async def _lock(self, transaction: "HandlerTransaction", rows: Rows) -> tuple[Rows, Rows]:
        """Those of `rows` whose lease is still held, and the others, which do not start."""
        held = await transaction.lock([(row.id, row.lease_token) for row in rows], self._lease)
        lost = [row for row in rows if row.id not in held]
        self._lost(lost)
        for row in lost:
            row.settle_anew(Release())
        return [row for row in rows if row.id in held], lost

    async def _renew(self, rows: Rows) -> None:
        """No renewal got past the lock, so the lease may have run out: hold it until the outcome is
        written.
        """
        asked = self._clock.monotonic()
        try:
            held = await self._store.renew([(row.id, row.lease_token) for row in rows], self._lease)
        except StoreError:
            return  # the flush finds out what is lost
        for row in rows:
            if row.id in held:
                row.renewed(asked, shorter=False)

    async def _not_started(self, rows: Rows, error: Exception) -> Rows:
        self._failures += 1
        pause = backoff(self._failures, self._clock)
        known = isinstance(error, StoreError)
        if not known or is_told(self._failures):
            self._log(
                logging.WARNING if known else logging.ERROR,
                f"no transaction for the handler of messages {[row.id for row in rows]}, which "
                f"are given back; again in {pause:.1f} s: {error if known else repr(error)}",
                exc_info=None if known else error,
                message_id=rows[0].id,
            )
        for row in rows:
            row.settle_anew(Release())
        await self._clock.sleep(pause)
        return rows

    async def _commit(
        self,
        transaction: "HandlerTransaction",
        rows: Rows,
        settlements: Callable[[Rows], list[Settlement]],
    ) -> Rows:
        # Many branches, in one function: each is one way in which a COMMIT can end.
        if not any(isinstance(row.outcome, Ack | Relocate) for row in rows):
            await transaction.prove()
            return rows
        if any(row.lease_lost for row in rows):
            return self._abandoned(rows)
        # Their keys are given back, or spent, before their outcomes are written (policy Once).
        later = [row for row in rows if self._once and row.key is not None and not _ends(row)]
        batch = settlements([row for row in rows if row not in later])
        try:
            with self._inflight.writing(batch) as writing:
                result = await transaction.commit(batch)
                if not result.lost:
                    self._inflight.answered(writing, result)
        except UnknownOutcomeError as error:
            self._unknown(rows, error)
            if isinstance(error.__cause__, asyncio.CancelledError):
                raise error.__cause__ from None
            return []
        except TransientStoreError as error:
            transaction.note(error)
            return (
                _failed(rows, error)
                if transaction.was_silent(error)
                else self._passing(rows, error)
            )
        except Exception as error:  # noqa: BLE001 - a constraint, checked at the session's flush
            return _failed(rows, error)
        self._lost([row for row in rows if row.id in result.lost])
        return self._abandoned(rows) if result.lost else later

    async def _cut_off(self, transaction: "HandlerTransaction | None", rows: Rows) -> None:
        """The handler was cut off: it may have committed the transaction before, unknown to us."""
        ours = [row for row in rows if not row.lease_lost]
        if ours and transaction is not None and not transaction.proven:
            await self._ended(transaction.locked, ours)

    async def _ended(self, lock: "HandlerLock", rows: Rows) -> Rows:
        """The transaction may have ended before the handler had: what that means is for the
        database to say.

        Cancelled or stopping, we ask for `SHIELDED_TIMEOUT` seconds more. Without an answer nothing
        may be written, neither that it is done nor that it is to be tried again: the leases run
        out. The rows whose outcome is known.
        """
        # Many branches: the question, our cancellation and the stop race, and each may be first.
        asking = asyncio.ensure_future(self._was_committed(lock, rows))
        # A cancellation is noticed by `cancelled` here, and raised at the end.
        while not (asking.done() or cancelled() or self._stopping()):
            await patiently(asking, LOOK)
        await patiently(asking, SHIELDED_TIMEOUT)
        if not asking.done():
            asking.cancel()
            await patiently(asking, CLOSING)
        if not asking.done() or asking.cancelled() or asking.exception() is not None:
            self._unsaid(rows)
            rows = []
        else:
            _settle_ended(rows, committed=asking.result())
        if cancelled():
            raise asyncio.CancelledError
        if asking.done() and not asking.cancelled():
            asking.result()  # an error that is none of the database's
        return rows

    async def _was_committed(self, lock: "HandlerLock", rows: Rows) -> bool:
        """Ask until the database says."""
        failures = 0
        while True:
            try:
                return await self._store.handlers.was_committed(lock)
            except StoreError as error:
                failures += 1
                pause = backoff(failures, self._clock)
                if failures == 1:  # what the answer means is told at the end
                    self._log(
                        logging.WARNING,
                        "it is unknown whether the ended transaction of messages "
                        f"{[row.id for row in rows]} was committed; it is asked for until the "
                        f"database answers: {error}",
                        message_id=rows[0].id,
                    )
                await self._clock.sleep(pause)

    def _unsaid(self, rows: Rows) -> None:
        for row in rows:
            row.settle_anew(Abandon())  # it may be done: policy Once keeps its key
        self._inflight.drop(rows)
        self._log(
            logging.WARNING,
            "the database does not say whether the ended transaction of messages "
            f"{[row.id for row in rows]} was committed; nothing is written of them, and they come "
            "back when their leases have run out",
            message_id=rows[0].id,
        )

    def _lost(self, rows: Rows) -> None:
        self._inflight.lose(rows, "transaction", "nothing that its handler did is committed")

    def _abandoned(self, rows: Rows) -> Rows:
        """A row of the batch has lost its lease, so that nothing was committed: the acked ones go
        back without an attempt.
        """
        lost = [row.id for row in rows if row.lease_lost]
        back = [
            row for row in rows if row.outcome is None or isinstance(row.outcome, Ack | Relocate)
        ]
        for row in back:
            row.settle_anew(Abandon())
        if others := [row.id for row in back if not row.lease_lost]:
            self._log(logging.WARNING, broken_text(others, lost), message_id=others[0])
        return rows

    def _passing(self, rows: Rows, error: TransientStoreError) -> Rows:
        """The handler has succeeded, and all of it is rolled back: it runs again, and no attempt is
        charged.

        Not under policy Once, by which the handler of a message with a key runs once, whatever
        becomes of its COMMIT.
        """
        if self._once and any(row.key is not None for row in rows):
            return _failed(rows, error)
        lost = max(0, *(lost_leases(row) for row in rows))
        pause = backoff(FIRST_PAUSE + lost, self._clock)
        for row in rows:
            if row.outcome is None or isinstance(row.outcome, Ack | Relocate):
                row.settle_anew(Abandon(pause, error))
        return rows

    async def _name_what_is_missing(self, transaction: "HandlerTransaction", rows: Rows) -> None:
        """Say in the errors of `rows` what was denied to the commit: another connection is asked,
        so not before the end of ours.
        """
        denied = transaction.denied
        if denied is None or not rows:
            return
        error = await transaction.explain(denied)
        for row in rows:
            if isinstance(row.outcome, Nack) and row.outcome.error is denied:
                row.settle_anew(replace(row.outcome, error=error))

    def _tell_abandoned(self, rows: Rows) -> None:
        back = [
            (row.id, row.outcome)
            for row in rows
            if isinstance(row.outcome, Abandon)
            and row.outcome.error is not None
            and not row.lease_lost
        ]
        if not back:
            return
        first, outcome = back[0]
        self._log(
            logging.WARNING,
            f"messages {[i for i, _ in back]} go back without an attempt: what their handler did "
            f"could not be committed and is rolled back; it runs again in {outcome.delay:.1f} s: "
            f"{outcome.error}",
            message_id=first,
        )

    def _unknown(self, rows: Rows, error: UnknownOutcomeError) -> None:
        """All or nothing was committed. Nothing more may be written: if nothing was, the lease runs
        out.
        """
        self._inflight.lose(rows, "transaction", str(error))


def _ends(row: ClaimedMessage) -> bool:
    """Whether its outcome is the last one of `row`."""
    return isinstance(row.outcome, Ack | Relocate | Reject | Discard)


def _release(rows: Rows) -> None:
    """The handler of `rows` has not started."""
    for row in rows:
        row.settle_as(Release())


def _abandon(rows: Rows) -> None:
    """What the handler of `rows` did is rolled back, and so are its acks."""
    for row in rows:
        if isinstance(row.outcome, Ack | Relocate):
            row.settle_anew(Abandon())


def _failed(rows: Rows, error: Exception) -> Rows:
    """What the handler did is rolled back, so its acks are void; the retry strategy decides."""
    for row in rows:
        if row.outcome is None or isinstance(row.outcome, Ack | Relocate):
            row.settle_anew(Nack(error=error))
    return rows


def _settle_ended(rows: Rows, *, committed: bool) -> None:
    """The transaction of `rows` has ended before the handler had, with a commit or a rollback."""
    for row in rows:
        if committed and not isinstance(row.outcome, Reject | Discard):
            row.settle_anew(Reject(TRANSACTION_ENDED, TransactionEndedError(_COMMITTED)))
        elif isinstance(row.outcome, Nack) and isinstance(row.outcome.error, TransactionEndedError):
            row.settle_anew(replace(row.outcome, error=TransactionEndedError(_ROLLED_BACK)))


_COMMITTED = (
    "the handler has ended the transaction that it was given: it was committed before the ack, by "
    "commit(), COMMIT or a statement that commits (DDL on MySQL and MariaDB). What the handler "
    "had done until then stays, so it is not tried again. Leave the transaction open: it is "
    "committed with the ack"
)
_ROLLED_BACK = (
    "the transaction that the handler was given has ended before its ack: it was rolled back, by "
    "rollback(), ROLLBACK or an error that undoes all of it, such as a deadlock on MySQL and "
    "MariaDB, which the handler has caught. Nothing of it is committed. Let such an error pass, "
    "and raise to roll back"
)

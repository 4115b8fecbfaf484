"""transactional=True: the handler's SQL, its published messages and its ack commit together.

The transaction begins by locking the handler's rows, fenced by the lease token. The lock keeps the
lease while the session lives, because release and renewal skip locked rows. Only an ack (or a move)
commits. Every other outcome rolls back what the handler did, and the flush writes it as for plain
subscribers. If an ack cannot be committed for a transient reason, the handler is not at fault and
its message is delivered again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.outcome import Abandon, Ack, Discard, Nack, Reject, Release, Relocate
from faststream_sqlbroker.core.policies import find_once
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.database.messages.handler import current_transaction
from faststream_sqlbroker.exceptions import (
    StoreError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.flow.deliver.ended_transactions import EndedTransactions
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_states import format_broken
from faststream_sqlbroker.flow.deliver.prefetch import get_prefetch_lease
from faststream_sqlbroker.flow.loop import Log, backoff, is_logged, is_task_cancelled
from faststream_sqlbroker.flow.settings import ConsumerSettings

if TYPE_CHECKING:
    from faststream_sqlbroker.database.messages.handler import HandlerTransaction
    from faststream_sqlbroker.database.store import Store

Rows = list[ClaimedMessage]

FIRST_PAUSE = 4
"""Failure count passed to `backoff` after the first failed COMMIT: 0.8 s, doubled each time. Failed
COMMITs count towards `max_deliveries` where attempts are limited.
"""


@dataclass(slots=True)
class _TransactionRun:
    """Progress of a handler's transaction."""

    rows: Rows
    """Rows to deliver; once they are locked, only those whose lease is still held."""
    lost_rows: Rows = field(default_factory=list)
    """Rows that do not start because their lease was lost before."""
    transaction: "HandlerTransaction | None" = None
    is_started: bool = False
    """True once the rows are locked: from then on the handler may have run."""
    unwritten_rows: Rows | None = None
    """Rows whose outcome the flush writes; None before the commit."""


class TransactionalDeliveries:
    """Delivers rows inside a transaction, a single delivery (or batch) at a time."""

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        settings: ConsumerSettings,
        log: Log,
        *,
        stopping: Callable[[], bool],
    ) -> None:
        """Share the subscriber's `inflight`; `stopping` returns True once the subscriber is to
        stop.
        """
        self._store = store
        self._inflight = inflight
        self._log = log
        self._ended_transactions = EndedTransactions(store, inflight, log, stopping)
        self._clock = inflight.clock
        self._lease = settings.release_stuck_timeout
        self._has_once_policy = find_once(settings.policies) is not None
        self._failures = 0

    async def deliver(
        self,
        rows: Rows,
        run: Callable[[Rows], Awaitable[None]],
        settlements: Callable[[Rows], list[Settlement]],
    ) -> Rows:
        """Run the handler on `rows` and commit.

        Args:
            rows: One delivery, or a batch.
            run: Runs the handler; afterwards each row has its outcome.
            settlements: Converts the outcomes to settlements, including messages published on ack.

        Returns:
            The rows whose outcome the flush must write, never an ack. They include rows that were
                lost before the handler started, so that their keys are released.
        """
        block = _TransactionRun(rows)
        renewal_time = self._get_renewal_time(rows)
        try:
            async with self._store.transaction() as transaction:
                block.transaction = transaction
                await self._lock(block, transaction)
                await self._run(block, transaction, run)
                block.unwritten_rows = await self._commit(transaction, block.rows, settlements)
        except BaseException as error:
            if not block.is_started and isinstance(error, Exception):
                return await self._release_not_started(rows, error)
            await self._handle_failure(block, error)
            raise
        unwritten_rows = block.unwritten_rows
        # Not proven: the handler may have ended its transaction by itself, even with a commit.
        if unwritten_rows and not transaction.proven:
            unwritten_rows = await self._ended_transactions.settle(
                transaction.locked, unwritten_rows
            )
        self._log_abandoned(unwritten_rows)
        if unwritten_rows and self._clock.monotonic() > renewal_time:
            await self._renew(unwritten_rows)
        await self._add_missing_rights(transaction, unwritten_rows)
        return [*unwritten_rows, *block.lost_rows]

    def _get_renewal_time(self, rows: Rows) -> float:
        """Return the time when a third of the lease of `rows` is over.

        After that time, an outcome that waits for the flush needs a renewal.
        """
        lease = (
            get_prefetch_lease(self._lease) if any(row.prefetched for row in rows) else self._lease
        )
        return min(row.renewed_monotonic for row in rows) + lease / 3

    async def _handle_failure(self, block: "_TransactionRun", error: BaseException) -> None:
        """Settle the rows of `block` after `error` ended the run, by how far the run got.

        Before the start nothing was done. After a COMMIT only the connection has failed. Otherwise
        the work is rolled back, unless the handler has committed it itself.
        """
        rows = block.rows
        unwritten_rows = block.unwritten_rows
        if not block.is_started:
            if isinstance(error, asyncio.CancelledError):
                for row in rows:
                    row.record_outcome(Release())
            return
        if unwritten_rows is not None and len(unwritten_rows) < len(rows):
            # Committed, although an error came when the connection was returned.
            self._inflight.drop([row for row in rows if row not in unwritten_rows])
        else:
            _abandon_committing(rows)  # rolled back: the flush must not write the acks
        none_committed = unwritten_rows is None or unwritten_rows == rows
        if none_committed and isinstance(error, Exception | asyncio.CancelledError):
            await self._resolve_cut_off(block.transaction, rows)

    async def _run(
        self,
        block: "_TransactionRun",
        transaction: "HandlerTransaction",
        run: Callable[[Rows], Awaitable[None]],
    ) -> None:
        """Run the handler on the locked rows, inside of `transaction`.

        Publishes in the handler then join the transaction. A handler that cancels its own task
        fails.
        """
        if not block.rows:
            return
        token = current_transaction.set(transaction)
        try:
            await run(block.rows)
        except asyncio.CancelledError as error:
            if is_task_cancelled():
                raise
            for row in block.rows:  # the handler cancelled itself, which is its failure
                row.record_outcome(Nack(error=error))
        finally:
            current_transaction.reset(token)
        for row in block.rows:
            if isinstance(row.outcome, Nack | Reject) and row.outcome.error is not None:
                # Evicts the connection from the pool if the error says that it is stale.
                transaction.handle_error(row.outcome.error)

    async def _lock(self, block: "_TransactionRun", transaction: "HandlerTransaction") -> None:
        """Lock the rows whose lease is still held; the other rows do not start.

        The lock keeps the lease while the handler runs, because renewals and releases skip locked
        rows.
        """
        rows = block.rows
        locked_ids = await transaction.lock(
            [(row.id, row.lease_token) for row in rows], self._lease
        )
        block.rows = [row for row in rows if row.id in locked_ids]
        block.lost_rows = [row for row in rows if row.id not in locked_ids]
        self._report_lost(block.lost_rows)
        for row in block.lost_rows:
            # This is not written, but lets policy Once release the key of the message.
            row.replace_outcome(Release())
        block.is_started = True
        self._failures = 0

    async def _renew(self, rows: Rows) -> None:
        """Renew the leases until the outcome is written: no renewal got past the lock."""
        started_at = self._clock.monotonic()
        try:
            renewed_ids = await self._store.renew(
                [(row.id, row.lease_token) for row in rows], self._lease
            )
        except StoreError:
            return  # the flush finds out which rows are lost
        for row in rows:
            if row.id in renewed_ids:
                row.record_renewal(started_at, shorter=False)

    async def _release_not_started(self, rows: Rows, error: Exception) -> Rows:
        """Release `rows` after a pause: the transaction could not begin or lock the rows."""
        self._failures += 1
        pause = backoff(self._failures, self._clock)
        is_store_error = isinstance(error, StoreError)
        if not is_store_error or is_logged(self._failures):
            self._log(
                logging.WARNING if is_store_error else logging.ERROR,
                f"could not begin a transaction for messages {[row.id for row in rows]}, which are "
                f"released; trying again in {pause:.1f} s: "
                f"{error if is_store_error else repr(error)}",
                exc_info=None if is_store_error else error,
                message_id=rows[0].id,
            )
        for row in rows:
            row.replace_outcome(Release())
        await self._inflight.outages.pause(pause)
        return rows

    async def _commit(
        self,
        transaction: "HandlerTransaction",
        rows: Rows,
        settlements: Callable[[Rows], list[Settlement]],
    ) -> Rows:
        """Commit if the handler acked; return the rows whose outcome the flush writes.

        Without an ack or a move, or if a row has lost its lease, everything is rolled back.
        """
        if not rows:
            return []
        # Tasks that the handler has left behind must not publish into the COMMIT.
        await transaction.stop_publishing()
        if not any(map(_is_committing, rows)):
            # A rollback undoes all, unless the handler has ended the transaction by itself.
            await transaction.prove()
            return rows
        if any(row.lease_lost for row in rows):
            return self._abandon_unit(rows)
        later_rows = list(filter(self._has_pending_key, rows))
        batch = settlements([row for row in rows if row not in later_rows])
        try:
            with self._inflight.track_writing(batch) as writing:
                result = await transaction.commit(batch)
                # With a lost lease nothing was committed.
                if not result.lost_ids:
                    self._inflight.apply_result(writing, result)
        except Exception as error:  # noqa: BLE001 - a constraint, checked at the session's flush
            return self._handle_failed_commit(transaction, rows, error)
        self._report_lost([row for row in rows if row.id in result.lost_ids])
        return self._abandon_unit(rows) if result.lost_ids else later_rows

    def _has_pending_key(self, row: ClaimedMessage) -> bool:
        """Return True if `row` has a key of policy Once and no final outcome.

        Such a key must be released, or its row rejected, before the outcome is written.
        """
        # An ack, a move, or an end without a retry.
        is_final = isinstance(row.outcome, Ack | Relocate | Reject | Discard)
        return self._has_once_policy and row.once_key is not None and not is_final

    def _handle_failed_commit(
        self, transaction: "HandlerTransaction", rows: Rows, error: Exception
    ) -> Rows:
        """Settle `rows` after a failed COMMIT; return the rows whose outcome the flush writes.

        Without an answer nothing may be written. A transient failure is not the handler's fault,
        and the message is delivered again. Any other error fails the attempt.
        """
        if isinstance(error, UnknownOutcomeError):
            # Either all or nothing was committed. If nothing was, the leases expire.
            self._inflight.lose(rows, "transaction", str(error))
            # The worker was cancelled while it waited for the answer.
            if isinstance(error.__cause__, asyncio.CancelledError):
                raise error.__cause__ from None
            return []
        if not isinstance(error, TransientStoreError):
            return _nack_committing(rows, error)
        transaction.handle_error(error)
        # The handler sent nothing for so long that the server ended its session. It may do that
        # every time, so it counts as an attempt.
        if transaction.was_silent(error):
            return _nack_committing(rows, error)
        return self._retry_later(rows, error)

    async def _resolve_cut_off(self, transaction: "HandlerTransaction | None", rows: Rows) -> None:
        """Find out whether the handler, which was cut off, committed the transaction before.

        Its rows are settled by the answer: after a commit, a retry would repeat the work.
        """
        held_rows = [row for row in rows if not row.lease_lost]
        if held_rows and transaction is not None and not transaction.proven:
            await self._ended_transactions.settle(transaction.locked, held_rows)

    def _report_lost(self, rows: Rows) -> None:
        self._inflight.lose(rows, "transaction", "its handler's work is not committed")

    def _abandon_unit(self, rows: Rows) -> Rows:
        """Abandon the acked rows of a batch that has lost a lease, so that nothing is committed.

        The handler's work belongs to all rows together, so the others are delivered again.
        """
        lost_ids = [row.id for row in rows if row.lease_lost]
        abandoned_rows = [row for row in rows if row.outcome is None or _is_committing(row)]
        for row in abandoned_rows:
            row.replace_outcome(Abandon())
        if held_ids := [row.id for row in abandoned_rows if not row.lease_lost]:
            self._log(logging.WARNING, format_broken(held_ids, lost_ids), message_id=held_ids[0])
        return rows

    def _retry_later(self, rows: Rows, error: TransientStoreError) -> Rows:
        """Run the handler of `rows` again: the work succeeded, but is rolled back.

        Not under policy Once, by which the handler of a message with a key runs once, whatever
        becomes of its COMMIT.
        """
        if self._has_once_policy and any(row.once_key is not None for row in rows):
            return _nack_committing(rows, error)
        deliveries = max(row.deliveries_count for row in rows)
        # Twice as long with each delivery.
        pause = backoff(FIRST_PAUSE + deliveries - 1, self._clock)
        for row in rows:
            if row.outcome is None or _is_committing(row):
                row.replace_outcome(Abandon(pause, error))
        return rows

    async def _add_missing_rights(self, transaction: "HandlerTransaction", rows: Rows) -> None:
        """Add the rights that the commit lacked to the errors of `rows`.

        The query uses another connection, so it must wait until the transaction's connection is
        back.
        """
        denied = transaction.denied
        if denied is None or not rows:
            return
        error = await transaction.explain(denied)
        for row in rows:
            if isinstance(row.outcome, Nack) and row.outcome.error is denied:
                row.replace_outcome(replace(row.outcome, error=error))

    def _log_abandoned(self, rows: Rows) -> None:
        """Log acked rows that are delivered again, because their COMMIT failed transiently."""
        abandoned = [
            (row.id, row.outcome)
            for row in rows
            if isinstance(row.outcome, Abandon)
            and row.outcome.error is not None
            and not row.lease_lost
        ]
        if not abandoned:
            return
        first_id, outcome = abandoned[0]
        self._log(
            logging.WARNING,
            f"the handler's work for messages {[i for i, _ in abandoned]} could not be committed "
            f"and is rolled back; they are delivered again in {outcome.delay:.1f} s: "
            f"{outcome.error}",
            message_id=first_id,
        )


def _is_committing(row: ClaimedMessage) -> bool:
    """Return True if the outcome of `row` commits the transaction: an ack or a move."""
    return isinstance(row.outcome, Ack | Relocate)


def _abandon_committing(rows: Rows) -> None:
    """Abandon the acked rows, because the work of their handler is rolled back."""
    for row in filter(_is_committing, rows):
        row.replace_outcome(Abandon())


def _nack_committing(rows: Rows, error: Exception) -> Rows:
    """Nack the acked rows, whose work is rolled back; the retry strategy decides what follows."""
    for row in rows:
        if row.outcome is None or _is_committing(row):
            row.replace_outcome(Nack(error=error))
    return rows

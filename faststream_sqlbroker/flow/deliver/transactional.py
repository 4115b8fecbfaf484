"""transactional=True: the handler's own SQL, its answers and its ack commit together or not at all.

The transaction begins by locking the handler's rows, fenced; the lock keeps the lease while the
session lives, as release and renewal skip locked rows. Only an ack (or a move) commits. Every other
outcome rolls back what the handler did and is written by the flush, like those of plain
subscribers. An ack that cannot be committed for a reason that passes is no fault of the handler's:
its message goes back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.outcome import Abandon, Ack, Discard, Nack, Reject, Release, Relocate
from faststream_sqlbroker.core.policies import Once
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.database.messages.handler import current
from faststream_sqlbroker.exceptions import (
    StoreError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.flow.deliver.ended_transactions import EndedTransactions
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_states import broken_text
from faststream_sqlbroker.flow.deliver.prefetch import prefetch_lease
from faststream_sqlbroker.flow.loop import Log, backoff, cancelled, is_told
from faststream_sqlbroker.flow.settings import ConsumerSettings

if TYPE_CHECKING:
    from faststream_sqlbroker.database.messages.handler import HandlerTransaction
    from faststream_sqlbroker.database.store import Store

Rows = list[ClaimedMessage]

FIRST_PAUSE = 4
"""The step of `backoff` after the first failed COMMIT: 0.8 s, then twice as long each time, as
failed COMMITs count towards `max_deliveries` where attempts are limited."""


@dataclass(slots=True)
class _Block:
    """How far one transaction of a handler has come."""

    rows: Rows
    """Those to deliver; once locked, those whose lease is still held."""
    lost: Rows = field(default_factory=list)
    """Those that do not start, as their lease was lost before."""
    transaction: "HandlerTransaction | None" = None
    started: bool = False
    """Whether the rows are locked: from here on the handler may have run."""
    left: Rows | None = None
    """Those whose outcome the flush writes; None before the commit."""


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
        self._ended = EndedTransactions(store, inflight, log, stopping)
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
            settlements: What the outcomes mean, with what is published on ack.
        """
        block = _Block(rows)
        renew_at = self._renew_at(rows)
        try:
            async with self._store.transaction() as transaction:
                block.transaction = transaction
                await self._lock(block, transaction)
                await self._run(block, transaction, run)
                block.left = await self._commit(transaction, block.rows, settlements)
        except BaseException as error:
            if not block.started and isinstance(error, Exception):
                return await self._not_started(rows, error)
            await self._broken_off(block, error)
            raise
        left = block.left
        if left and not transaction.proven:
            left = await self._ended.settle(transaction.locked, left)
        self._tell_abandoned(left)
        if left and self._clock.monotonic() > renew_at:
            await self._renew(left)
        await self._name_what_is_missing(transaction, left)
        return [*left, *block.lost]

    def _renew_at(self, rows: Rows) -> float:
        """When a third of the lease of `rows` is over: then an outcome that waits for the flush
        needs a renewal.
        """
        lease = prefetch_lease(self._lease) if any(row.prefetched for row in rows) else self._lease
        return min(row.renewed_monotonic for row in rows) + lease / 3

    async def _broken_off(self, block: "_Block", error: BaseException) -> None:
        """`error` ended the block: what it means depends on how far that has come."""
        rows = block.rows
        left = block.left
        if not block.started:
            if isinstance(error, asyncio.CancelledError):
                _release(rows)
            return
        if left is not None and len(left) < len(rows):
            # Committed, though its connection did not come back.
            self._inflight.drop([row for row in rows if row not in left])
        else:
            _abandon(rows)  # rolled back: the flush must not ack it
        none_committed = left is None or left == rows
        if none_committed and isinstance(error, Exception | asyncio.CancelledError):
            await self._cut_off(block.transaction, rows)

    async def _run(
        self,
        block: "_Block",
        transaction: "HandlerTransaction",
        run: Callable[[Rows], Awaitable[None]],
    ) -> None:
        if not block.rows:
            return
        token = current.set(transaction)
        try:
            await run(block.rows)
        except asyncio.CancelledError as error:
            if cancelled():
                raise
            for row in block.rows:  # the handler's own, and its failure
                row.settle_as(Nack(error=error))
        finally:
            current.reset(token)
        for row in block.rows:
            if isinstance(row.outcome, Nack | Reject) and row.outcome.error is not None:
                transaction.note(row.outcome.error)

    async def _lock(self, block: "_Block", transaction: "HandlerTransaction") -> None:
        """Lock the rows whose lease is still held; the others do not start."""
        rows = block.rows
        held = await transaction.lock([(row.id, row.lease_token) for row in rows], self._lease)
        block.rows = [row for row in rows if row.id in held]
        block.lost = [row for row in rows if row.id not in held]
        self._lost(block.lost)
        for row in block.lost:
            row.settle_anew(Release())
        block.started = True
        self._failures = 0

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
        """Commit what the handler did, if it acked; the rows whose outcome the flush writes."""
        if not rows:
            return []
        await transaction.shut()
        if not any(map(_commits, rows)):
            await transaction.prove()
            return rows
        if any(row.lease_lost for row in rows):
            return self._abandoned(rows)
        later = list(filter(self._keeps_key, rows))
        batch = settlements([row for row in rows if row not in later])
        try:
            with self._inflight.writing(batch) as writing:
                result = await transaction.commit(batch)
                if not result.lost:
                    self._inflight.answered(writing, result)
        except Exception as error:  # noqa: BLE001 - a constraint, checked at the session's flush
            return self._not_committed(transaction, rows, error)
        self._lost([row for row in rows if row.id in result.lost])
        return self._abandoned(rows) if result.lost else later

    def _keeps_key(self, row: ClaimedMessage) -> bool:
        """Whether `row` has a key (policy Once) that is given back, or spent, before its outcome is
        written.
        """
        return self._once and row.policy_key is not None and not _ends(row)

    def _not_committed(
        self, transaction: "HandlerTransaction", rows: Rows, error: Exception
    ) -> Rows:
        """What the failed COMMIT means for `rows`; those whose outcome the flush writes."""
        if isinstance(error, UnknownOutcomeError):
            self._unknown(rows, error)
            if isinstance(error.__cause__, asyncio.CancelledError):
                raise error.__cause__ from None
            return []
        if not isinstance(error, TransientStoreError):
            return _failed(rows, error)
        transaction.note(error)
        # The handler sent nothing for so long that the server ended its session: it may do that
        # every time, so it counts as an attempt.
        if transaction.was_silent(error):
            return _failed(rows, error)
        return self._passing(rows, error)

    async def _cut_off(self, transaction: "HandlerTransaction | None", rows: Rows) -> None:
        """The handler was cut off: it may have committed the transaction before, unknown to us."""
        ours = [row for row in rows if not row.lease_lost]
        if ours and transaction is not None and not transaction.proven:
            await self._ended.settle(transaction.locked, ours)

    def _lost(self, rows: Rows) -> None:
        self._inflight.lose(rows, "transaction", "nothing that its handler did is committed")

    def _abandoned(self, rows: Rows) -> Rows:
        """A row of the batch has lost its lease, so that nothing was committed: the acked ones go
        back.
        """
        lost = [row.id for row in rows if row.lease_lost]
        back = [row for row in rows if row.outcome is None or _commits(row)]
        for row in back:
            row.settle_anew(Abandon())
        if others := [row.id for row in back if not row.lease_lost]:
            self._log(logging.WARNING, broken_text(others, lost), message_id=others[0])
        return rows

    def _passing(self, rows: Rows, error: TransientStoreError) -> Rows:
        """The handler has succeeded, and all of it is rolled back: it runs again.

        Not under policy Once, by which the handler of a message with a key runs once, whatever
        becomes of its COMMIT.
        """
        if self._once and any(row.policy_key is not None for row in rows):
            return _failed(rows, error)
        deliveries = max(row.deliveries_count for row in rows)
        pause = backoff(FIRST_PAUSE + deliveries - 1, self._clock)
        for row in rows:
            if row.outcome is None or _commits(row):
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
            f"messages {[i for i, _ in back]} go back: what their handler did "
            f"could not be committed and is rolled back; it runs again in {outcome.delay:.1f} s: "
            f"{outcome.error}",
            message_id=first,
        )

    def _unknown(self, rows: Rows, error: UnknownOutcomeError) -> None:
        """All or nothing was committed. Nothing more may be written: if nothing was, the lease runs
        out.
        """
        self._inflight.lose(rows, "transaction", str(error))


def _commits(row: ClaimedMessage) -> bool:
    """Whether its outcome commits the transaction of `row`."""
    return isinstance(row.outcome, Ack | Relocate)


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
        if _commits(row):
            row.settle_anew(Abandon())


def _failed(rows: Rows, error: Exception) -> Rows:
    """What the handler did is rolled back, so its acks are void; the retry strategy decides."""
    for row in rows:
        if row.outcome is None or _commits(row):
            row.settle_anew(Nack(error=error))
    return rows

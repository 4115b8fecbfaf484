"""A transaction that its handler has ended: only the database can say what became of it."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.outcome import Abandon, Discard, Nack, Reject
from faststream_sqlbroker.core.reasons import TRANSACTION_ENDED
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.exceptions import StoreError, TransactionEndedError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log, backoff, cancelled
from faststream_sqlbroker.flow.shielded import SHIELDED_TIMEOUT, patiently

if TYPE_CHECKING:
    from faststream_sqlbroker.database.parts.handler_locks import HandlerLock
    from faststream_sqlbroker.database.store import Store

Rows = list[ClaimedMessage]

LOOK = 0.2
"""Seconds between two looks whether to stop, while the database does not say what became of a
transaction."""
CLOSING = 1.0
"""Seconds that the question gets to give its connection back, once its answer is no longer waited
for."""


class EndedTransactions:
    """Asks what became of transactions that have ended before their handlers had."""

    def __init__(
        self, store: "Store", inflight: Inflight, log: Log, stopping: Callable[[], bool]
    ) -> None:
        """Share the `inflight` of the subscriber; `stopping` tells whether it is to end."""
        self._store = store
        self._inflight = inflight
        self._log = log
        self._stopping = stopping
        self._clock = inflight.clock

    async def settle(self, lock: "HandlerLock", rows: Rows) -> Rows:
        """Give `rows`, locked by `lock`, the outcome that the database's answer means.

        Cancelled or stopping, we ask for `SHIELDED_TIMEOUT` seconds more. Without an answer nothing
        may be written, neither that it is done nor that it is to be tried again: the leases run
        out.

        Returns:
            The rows whose outcome is known: all or none.
        """
        asking = asyncio.ensure_future(self._was_committed(lock, rows))
        await self._wait_for(asking)
        if _is_answered(asking):
            _settle_ended(rows, committed=asking.result())
        else:
            self._unsaid(rows)
            rows = []
        if cancelled():
            raise asyncio.CancelledError
        if asking.done() and not asking.cancelled():
            asking.result()  # an error that is none of the database's
        return rows

    async def _wait_for(self, asking: asyncio.Task[bool]) -> None:
        # The answer, our cancellation and the stop race. A cancellation is swallowed here, so that
        # an answer on its way still counts; `cancelled` knows of it, and the caller raises it.
        while not (asking.done() or cancelled() or self._stopping()):
            await patiently(asking, LOOK)
        await patiently(asking, SHIELDED_TIMEOUT)
        if not asking.done():
            asking.cancel()
            await patiently(asking, CLOSING)

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


def _is_answered(asking: asyncio.Task[bool]) -> bool:
    return asking.done() and not asking.cancelled() and asking.exception() is None


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

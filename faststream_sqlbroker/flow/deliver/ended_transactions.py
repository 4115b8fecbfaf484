"""Transactions that their handler has ended: only the database knows their result."""

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
from faststream_sqlbroker.flow.loop import Log, backoff, is_task_cancelled
from faststream_sqlbroker.flow.shielded import SHIELDED_TIMEOUT, wait_through_cancel

if TYPE_CHECKING:
    from faststream_sqlbroker.database.parts.handler_locks import HandlerLock
    from faststream_sqlbroker.database.store import Store

Rows = list[ClaimedMessage]

STOP_CHECK_INTERVAL = 0.2
"""Seconds between two checks whether to stop, while the result of a transaction is unknown."""
CLOSE_TIMEOUT = 1.0
"""Seconds for the query to return its connection, once no caller waits for its answer."""


class EndedTransactions:
    """Finds out what became of transactions that ended before their handlers."""

    def __init__(
        self, store: "Store", inflight: Inflight, log: Log, stopping: Callable[[], bool]
    ) -> None:
        """Share the subscriber's `inflight`; `stopping` returns True once the subscriber is to
        stop.
        """
        self._store = store
        self._inflight = inflight
        self._log = log
        self._stopping = stopping
        self._clock = inflight.clock

    async def settle(self, lock: "HandlerLock", rows: Rows) -> Rows:
        """Settle `rows`, locked by `lock`, by the database's answer.

        Called when it is not proven that the transaction was still open at the end: the handler may
        have ended it, it was cut off, or the database failed: only the database knows whether its
        work is committed. After a cancellation or a stop, the query goes on for `SHIELDED_TIMEOUT`
        seconds. Without an answer nothing may be written, neither a success nor a retry: the leases
        expire.

        Returns:
            The rows whose outcome is known: all or none.
        """
        query = asyncio.ensure_future(self._query_committed(lock, rows))
        await self._wait_for(query)
        if query.done() and not query.cancelled() and query.exception() is None:
            _settle_ended(rows, committed=query.result())
        else:
            self._drop_unknown(rows)
            rows = []
        if is_task_cancelled():
            raise asyncio.CancelledError
        if query.done() and not query.cancelled():
            query.result()  # raises an error that is not a database error
        return rows

    async def _wait_for(self, query: asyncio.Task[bool]) -> None:
        """Wait for the answer of `query`; give up some seconds after a stop or a cancellation."""
        # The answer, a cancellation of this task and a stop race. A cancellation is swallowed here,
        # so that an answer on its way still counts; `is_task_cancelled` still returns True, and the
        # caller raises it.
        while not (query.done() or is_task_cancelled() or self._stopping()):
            await wait_through_cancel(query, STOP_CHECK_INTERVAL)
        await wait_through_cancel(query, SHIELDED_TIMEOUT)
        if not query.done():
            query.cancel()
            await wait_through_cancel(query, CLOSE_TIMEOUT)

    async def _query_committed(self, lock: "HandlerLock", rows: Rows) -> bool:
        """Query whether the transaction of `rows` was committed, until the database answers.

        The caller cancels this when it does not want to wait any longer.
        """
        failures = 0
        while True:
            try:
                return await self._store.handlers.was_committed(lock)
            except StoreError as error:
                failures += 1
                pause = backoff(failures, self._clock)
                if failures == 1:  # the result is logged at the end
                    self._log(
                        logging.WARNING,
                        f"the handler of messages {[row.id for row in rows]} ended its "
                        "transaction, and whether it was committed is unknown; the query is "
                        f"repeated until the database answers: {error}",
                        message_id=rows[0].id,
                    )
                await self._inflight.outages.pause(pause)

    def _drop_unknown(self, rows: Rows) -> None:
        """Forget `rows` without writing an outcome, because the database did not answer.

        A written success or retry might be wrong, so the leases expire and the messages are
        delivered again.
        """
        for row in rows:
            row.replace_outcome(Abandon())  # it may be committed: policy Once keeps its key
        self._inflight.drop(rows)
        self._log(
            logging.WARNING,
            "the database did not answer whether the ended transaction of messages "
            f"{[row.id for row in rows]} was committed; their outcomes are not written, and they "
            "are delivered again when their leases expire",
            message_id=rows[0].id,
        )


def _settle_ended(rows: Rows, *, committed: bool) -> None:
    """Settle `rows` whose handler has ended the transaction itself, by a commit or a rollback.

    After a commit, a retry would repeat the committed work, so the message is rejected. After a
    rollback the outcomes stay, and the error says what the handler did.
    """
    for row in rows:
        if committed and not isinstance(row.outcome, Reject | Discard):
            row.replace_outcome(Reject(TRANSACTION_ENDED, TransactionEndedError(_COMMITTED)))
        elif isinstance(row.outcome, Nack) and isinstance(row.outcome.error, TransactionEndedError):
            row.replace_outcome(replace(row.outcome, error=TransactionEndedError(_ROLLED_BACK)))


_COMMITTED = (
    "the handler ended its transaction: commit(), COMMIT or a statement that commits (DDL on MySQL "
    "and MariaDB) committed it before the ack. The handler's work up to the commit stays, so the "
    "message is not retried. Leave the transaction open: the broker commits it with the ack."
)
_ROLLED_BACK = (
    "the handler's transaction ended before the ack: rollback(), ROLLBACK or a caught error that "
    "undoes the whole transaction, such as a deadlock on MySQL and MariaDB, rolled it back. None "
    "of its work is committed. Do not catch such errors, and raise an error to roll back."
)

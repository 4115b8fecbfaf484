"""The end of a subscriber's workers: handlers end, are cancelled, or are abandoned.

An abandoned handler may clean up, and is closed if that takes long.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.own_context import abandon_task
from faststream_sqlbroker.flow.publish_on_ack import CurrentDelivery
from faststream_sqlbroker.flow.shielded import SHIELDED_TIMEOUT

CANCEL_GRACE = 1.0
"""Seconds for a cancelled handler to end, so that its messages are released."""
CLEAN_UP_TIMEOUT = 5.0
"""Seconds for an abandoned handler to clean up before it is closed; a transaction is not kept open
for that.
"""

Workers = set[asyncio.Task[None]]


def get_grace_timeout(graceful_timeout: float | None) -> float | None:
    """Return `graceful_timeout`, or the grace of a cancelled handler if that is longer."""
    return None if graceful_timeout is None else max(graceful_timeout, CANCEL_GRACE)


class WorkerShutdown:
    """Stops the workers that a start of a subscriber has created."""

    def __init__(
        self,
        inflight: Inflight,
        log: Log,
        cancelled: "WeakSet[asyncio.Task[Any]]",
        *,
        handlers: Sequence[str],
        transactional: bool,
        ack_first: bool,
    ) -> None:
        """Add cancelled and abandoned workers to `cancelled`; `handlers` are names for the log."""
        self._inflight = inflight
        self._log = log
        self._cancelled = cancelled
        self._handlers = handlers
        self._transactional = transactional
        self._ack_first = ack_first

    async def stop(self, workers: Sequence[asyncio.Task[None]], timeout: float | None) -> Workers:
        """Stop `workers`, whose handlers get `timeout` seconds; return the abandoned workers.

        A handler that runs on is cancelled, and abandoned if it goes on all the same: its outcome
        is not written any more. A handler in a thread cannot be cancelled, so it is abandoned.
        """
        # Workers of a closed event loop have ended with it.
        workers = [worker for worker in workers if not worker.get_loop().is_closed()]
        if not workers:
            return set()
        _, running = await asyncio.wait(workers, timeout=timeout)
        cancelled: Workers = set()
        for _ in range(2):  # some leave their thread while others are cancelled
            # Messages that a thread works on must not be released, so its worker is not cancelled.
            pending = {worker for worker in running - cancelled if not worker.done()}
            if cancellable := {w for w in pending if self._find_thread_function(w) is None}:
                await self._cancel(cancellable, timeout)
                cancelled |= cancellable
        unfinished_workers = {worker for worker in running if not worker.done()}
        for worker in unfinished_workers:
            self._abandon(worker)
        return unfinished_workers

    async def close_abandoned(self, workers: Workers) -> None:
        """Let handlers of unfinished `workers` clean up; close a handler that goes on for longer.

        To close a coroutine raises GeneratorExit where it waits. A worker that waits for a thread,
        or has a transaction open, is closed immediately.
        """
        at_once = {worker for worker in workers if self._find_thread_function(worker) is not None}
        if self._transactional:
            at_once = workers
        for worker in at_once:
            self._close(worker)
        if other_workers := workers - at_once:
            _, running = await asyncio.wait(other_workers, timeout=CLEAN_UP_TIMEOUT)
            for worker in running:
                self._close(worker)
        if workers:
            await asyncio.wait(workers, timeout=CANCEL_GRACE)

    def _close(self, worker: "asyncio.Task[None]") -> None:
        """Close the coroutine in which `worker`, or the handler's own task, still waits.

        A handler that swallows its cancellation would otherwise run on after the stop.
        """
        current_delivery = self._inflight.current_deliveries.get(worker)
        for task in {
            worker,
            worker
            if current_delivery is None or current_delivery.task is None
            else current_delivery.task,
        }:
            abandon_task(task)

    def _find_thread_function(self, worker: "asyncio.Task[None]") -> str | None:
        """Return the name of the function that `worker` waits for, if that runs in a thread.

        None if the handler runs in the event loop, where it can be cancelled.
        """
        current_delivery = self._inflight.current_deliveries.get(worker)
        return (
            current_delivery.threads[-1]
            if current_delivery is not None and current_delivery.threads
            else None
        )

    async def _cancel(self, running: Workers, graceful_timeout: float | None) -> None:
        """Cancel the workers `running`, and wait up to a few seconds for their end."""
        self._log(
            logging.WARNING,
            f"{len(running)} handlers still run after graceful_timeout={graceful_timeout} "
            "seconds; they are cancelled and their messages released",
        )
        for worker in running:
            self._cancelled.add(worker)
            worker.cancel()
        # The result of a transaction that was cut off is queried; the last flush then writes the
        # outcome.
        shielded = SHIELDED_TIMEOUT if self._transactional else 0.0
        await asyncio.wait(running, timeout=CANCEL_GRACE + shielded)

    def _abandon(self, worker: "asyncio.Task[None]") -> None:
        """Abandon `worker`, whose messages are treated as if the process had died.

        Their outcomes are not written, so they are delivered again when their leases expire; under
        ACK_FIRST they are listed as unknown instead.
        """
        current_delivery = self._inflight.current_deliveries.get(worker)
        self._log_abandoned(current_delivery, self._find_thread_function(worker))
        self._cancelled.add(worker)
        if current_delivery is not None:
            self._inflight.drop(current_delivery.handled_rows)

    def _log_abandoned(
        self, current_delivery: CurrentDelivery | None, function: str | None
    ) -> None:
        """Log the handler that is abandoned, why, and what happens to the messages."""
        reason = "it swallows its cancellation"
        if function is not None:
            reason = "it runs in a thread, which cannot be cancelled"
        if current_delivery is None or not (rows := current_delivery.handled_rows):
            self._log(logging.ERROR, f"a worker that runs no handler is abandoned: {reason}")
            return
        name = function or " or ".join(self._handlers)
        elapsed = self._inflight.clock.monotonic() - current_delivery.started_at
        queues = ", ".join(sorted({repr(row.queue) for row in rows}))
        destination = (
            "listed by admin.unknown()"
            if self._ack_first
            else "delivered again when their leases expire"
        )
        self._log(
            logging.ERROR,
            f"the handler {name!r} is abandoned after {elapsed:.1f} s: {reason}; its messages "
            f"{[row.id for row in rows]} of queue {queues} are {destination}",
            message_id=rows[0].id,
        )

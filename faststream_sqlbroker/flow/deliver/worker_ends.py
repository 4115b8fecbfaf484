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
from faststream_sqlbroker.flow.own_context import give_up
from faststream_sqlbroker.flow.publish_on_ack import CurrentDelivery
from faststream_sqlbroker.flow.shielded import SHIELDED_TIMEOUT

CANCEL_GRACE = 1.0
"""Seconds a cancelled handler gets to end, so that its messages are given back."""
CLEAN_UP = 5.0
"""Seconds that one which is abandoned then may still clean up before it is closed; a transaction is
not kept open for that."""

Workers = set[asyncio.Task[None]]


def at_least_grace(graceful_timeout: float | None) -> float | None:
    """Return `graceful_timeout`, or what a cancelled handler gets if that is longer."""
    return None if graceful_timeout is None else max(graceful_timeout, CANCEL_GRACE)


class WorkerEnds:
    """Ends the workers of one life of a subscriber."""

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
        """Workers that are cancelled or abandoned are added to `cancelled`; `handlers` are the
        names of their handlers.
        """
        self._inflight = inflight
        self._log = log
        self._cancelled = cancelled
        self._handlers = handlers
        self._transactional = transactional
        self._ack_first = ack_first

    async def end(self, workers: Sequence[asyncio.Task[None]], timeout: float | None) -> Workers:
        """End what can be ended of `workers`, whose handlers get `timeout` seconds; the others,
        which are abandoned.
        """
        # Those of a closed event loop have ended with it.
        workers = [worker for worker in workers if not worker.get_loop().is_closed()]
        if not workers:
            return set()
        _, running = await asyncio.wait(workers, timeout=timeout)
        cancelled: Workers = set()
        for _ in range(2):  # some have left their thread while others were cancelled
            # What a thread works on must not be given back.
            pending = {worker for worker in running - cancelled if not worker.done()}
            if cancellable := {w for w in pending if self._thread_of(w) is None}:
                await self._cancel(cancellable, timeout)
                cancelled |= cancellable
        abandoned = {worker for worker in running if not worker.done()}
        for worker in abandoned:
            self._abandon(worker)
        return abandoned

    async def close(self, abandoned: Workers) -> None:
        """Let handlers of `abandoned` workers clean up, and close those that go on for longer."""
        at_once = {worker for worker in abandoned if self._thread_of(worker) is not None}
        if self._transactional:
            at_once = abandoned
        for worker in at_once:
            self._close(worker)
        if others := abandoned - at_once:
            _, running = await asyncio.wait(others, timeout=CLEAN_UP)
            for worker in running:
                self._close(worker)
        if abandoned:
            await asyncio.wait(abandoned, timeout=CANCEL_GRACE)

    def _close(self, worker: "asyncio.Task[None]") -> None:
        here = self._inflight.places.get(worker)
        for task in {worker, worker if here is None or here.task is None else here.task}:
            give_up(task)

    def _thread_of(self, worker: "asyncio.Task[None]") -> str | None:
        """The name of the function that it waits for, if that runs in a thread."""
        here = self._inflight.places.get(worker)
        return here.threads[-1] if here is not None and here.threads else None

    async def _cancel(self, running: Workers, graceful_timeout: float | None) -> None:
        self._log(
            logging.WARNING,
            f"{len(running)} handlers still ran after graceful_timeout={graceful_timeout} "
            "seconds; they are cancelled and their messages given back",
        )
        for worker in running:
            self._cancelled.add(worker)
            worker.cancel()
        # A transaction that was cut off is asked about; what the answer means is then written by
        # the last flush.
        shielded = SHIELDED_TIMEOUT if self._transactional else 0.0
        await asyncio.wait(running, timeout=CANCEL_GRACE + shielded)

    def _abandon(self, worker: "asyncio.Task[None]") -> None:
        """For what the handler of `worker` works on, it is as if the process had died."""
        here = self._inflight.places.get(worker)
        self._tell_abandoned(here, self._thread_of(worker))
        self._cancelled.add(worker)
        if here is not None:
            self._inflight.drop(here.handled)

    def _tell_abandoned(self, here: CurrentDelivery | None, function: str | None) -> None:
        why = "it swallows its cancellation"
        if function is not None:
            why = "it runs in a thread, which nothing can cancel"
        if here is None or not (rows := here.handled):
            self._log(logging.ERROR, f"a worker outside of a handler is abandoned: {why}")
            return
        name = function or " or ".join(self._handlers)
        took = self._inflight.clock.monotonic() - here.began
        queues = ", ".join(sorted({repr(row.queue) for row in rows}))
        later = "listed by admin.unknown()" if self._ack_first else "back when their leases end"
        self._log(
            logging.ERROR,
            f"the handler {name!r} is abandoned after {took:.1f} s: {why}; its messages "
            f"{[row.id for row in rows]} of queue {queues} are {later}",
            message_id=rows[0].id,
        )

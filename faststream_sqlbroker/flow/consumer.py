"""One subscriber's life: its loops, from start to drain."""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.settle import SettleRules
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.fetch import Fetcher
from faststream_sqlbroker.flow.flush import Flusher
from faststream_sqlbroker.flow.inflight import Inflight, release
from faststream_sqlbroker.flow.lease import LeaseKeeper
from faststream_sqlbroker.flow.loop import Log, Loop, backoff
from faststream_sqlbroker.flow.release import StuckReleaser
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.flow.worker import Handle, Worker

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

CANCEL_GRACE = 1.0
"""Seconds a cancelled handler gets to end; one that runs in a thread cannot be cancelled."""
FINAL_FLUSH_TIMEOUT = 10.0
"""Seconds for the last flush; what is not written by then comes back when its lease runs out."""


class Consumer:
    """Fetch, work, flush, renew and release for one subscriber.

    `start` and `stop` may be repeated. `stop` hands back what was not started, lets running handlers end
    for the graceful timeout, cancels the rest, and writes every outcome.
    """

    def __init__(
        self,
        *,
        store: "Store",
        wakeups: Wakeups,
        settings: Any,
        handle: Handle,
        log: Log,
        ack_first: bool = False,
        cancellable: bool = True,
    ) -> None:
        """`settings` are the subscriber's; `handle` gets a row, or a tuple of rows with batch=True.

        `cancellable` is false for handlers that run in a thread: cancelling would only stop waiting for it.
        """
        self._store, self._wakeups, self._settings = store, wakeups, settings
        self._handle, self._log, self._ack_first = handle, log, ack_first
        self._cancellable = cancellable
        self._rules = SettleRules(
            retry_strategy=settings.retry_strategy,
            retain_on_ack=settings.retain_in_archive_on_ack,
            retain_on_reject=settings.retain_in_archive_on_reject,
        )
        self._stopping = True
        self._stop_task: asyncio.Task[None] | None = None
        self._workers: list[asyncio.Task[None]] = []
        self.inflight = Inflight()
        self._build()

    def _build(self) -> None:
        s, log, held = self._settings, self._log, self.inflight
        self._fetcher = Fetcher(self._store, held, s, lambda: self._stopping)
        self._flusher = Flusher(
            self._store, held, log, batch_size=s.flush_batch_size, interval=s.flush_interval
        )
        keeper = LeaseKeeper(self._store, held, log, lease=s.release_stuck_timeout, max_lease=s.max_lease)
        releaser = StuckReleaser(
            self._store, s.queues, log, interval=s.release_stuck_interval, released=self._hint
        )
        self._fetch_loop = Loop("fetch", self._fetcher.tick, log)
        self._flush_loop = Loop("flush", self._flush_tick, log)
        self._lease_loop = Loop("lease", keeper.tick, log)
        self._release_loop = Loop("release-stuck", releaser.tick, log)
        self._flusher.wake = self._flush_loop.wake
        held.on_outcome = self._flusher.outcome_added
        held.on_room = self._fetch_loop.wake

    @property
    def _loops(self) -> tuple[Loop, ...]:
        return self._fetch_loop, self._flush_loop, self._lease_loop, self._release_loop

    @property
    def healthy(self) -> bool:
        """Whether every loop lives and its last tick succeeded, and no worker has died."""
        return all(loop.healthy for loop in self._loops) and not any(w.done() for w in self._workers)

    async def start(self) -> None:
        """Start the loops and the workers; returns at once."""
        if not self._stopping:
            return
        self.inflight = Inflight()
        self._build()
        self._stopping, self._stop_task = False, None
        s = self._settings
        for n in range(s.max_workers):
            worker = Worker(
                self._store, self.inflight, s, self._handle, self._log,
                rules=self._rules, ack_first=self._ack_first,
                stopping=lambda: self._stopping, on_idle=self._flusher.hurry,
            )  # fmt: skip
            self._workers.append(asyncio.create_task(worker.run(), name=f"sqlbroker-worker-{n}"))
        for loop in self._loops:
            loop.start()
        self._wakeups.register(s.queues, self._hint, listen=s.wakeup != "poll")

    def request_stop(self, graceful_timeout: float | None = None) -> None:
        """Begin the stop in the background; safe inside a handler."""
        self._stopping = True
        if self._stop_task is None:
            self._stop_task = asyncio.create_task(self._stop(graceful_timeout))

    async def stop(self, graceful_timeout: float | None = None) -> None:
        """Drain and stop.

        Args:
            graceful_timeout: Seconds for running handlers to end; None waits for them without limit.
        """
        if self._stopping and self._stop_task is None:
            return
        self.request_stop(graceful_timeout)
        if self._stop_task is not None:
            await asyncio.shield(self._stop_task)

    def _hint(self) -> None:
        self._fetcher.hint()
        self._fetch_loop.wake()

    async def _flush_tick(self) -> float | None:
        wait = await self._flusher.tick()
        if self.inflight.wants_room:
            self.inflight.wants_room = False
            self._fetch_loop.wake()
        return wait

    async def _stop(self, graceful_timeout: float | None) -> None:
        self._wakeups.unregister(self._hint)
        # The running claim is waited out: its rows are known and can be handed back.
        await self._fetch_loop.stop()
        await self._release_loop.stop()
        with contextlib.suppress(StoreError):  # their leases run out all the same
            await self._fetcher.release_unanswered()
        self._hand_back_waiting()
        for _ in self._workers:
            self.inflight.waiting.put_nowait(None)
        await self._end_workers(graceful_timeout)
        await self._lease_loop.stop()
        await self._flush_loop.stop()
        await self._final_flush()

    def _hand_back_waiting(self) -> None:
        waiting = self.inflight.waiting
        while not waiting.empty():
            row = waiting.get_nowait()
            if row is not None and not row.lease_lost:
                self.inflight.finish(release(row))
        self._flusher.hurry()

    async def _end_workers(self, graceful_timeout: float | None) -> None:
        workers, self._workers = self._workers, []
        if not workers:
            return
        _, running = await asyncio.wait(workers, timeout=graceful_timeout)
        if not running:
            return
        stuck = await self._cancel(running, graceful_timeout) if self._cancellable else running
        if stuck:
            self._log(
                logging.WARNING,
                f"{len(stuck)} handlers cannot be cancelled; the leases of their messages will run out",
            )

    async def _cancel(
        self, running: "set[asyncio.Task[None]]", graceful_timeout: float | None
    ) -> "set[asyncio.Task[None]]":
        """Cancel; the tasks that go on all the same."""
        self._log(
            logging.WARNING,
            f"{len(running)} handlers still ran after graceful_timeout={graceful_timeout} seconds; they are "
            "cancelled and their messages given back",
        )
        for task in running:
            task.cancel()
        _, stuck = await asyncio.wait(running, timeout=CANCEL_GRACE)
        return stuck

    async def _final_flush(self) -> None:
        failures = 0
        try:
            async with asyncio.timeout(FINAL_FLUSH_TIMEOUT):
                while self.inflight.outcomes:
                    try:
                        await self._flusher.flush_one()
                    except StoreError:
                        failures += 1
                        await asyncio.sleep(backoff(failures))
        except TimeoutError:
            self._log(
                logging.ERROR,
                f"{len(self.inflight.outcomes)} outcomes could not be written while stopping; their messages "
                "come back when their leases run out",
            )

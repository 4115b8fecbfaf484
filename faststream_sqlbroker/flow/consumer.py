"""One subscriber's life: its loops, from start to drain."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.orders import CancelRequest
from faststream_sqlbroker.core.policies import Concurrency
from faststream_sqlbroker.core.rows import Holder
from faststream_sqlbroker.flow.deliver.ack_first import FirstAcks
from faststream_sqlbroker.flow.deliver.cancels import Cancels
from faststream_sqlbroker.flow.deliver.delivery import Handle
from faststream_sqlbroker.flow.deliver.fetch import Fetcher
from faststream_sqlbroker.flow.deliver.flush import Flusher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.leases import LeaseKeeper, ProgressNotes, StuckReleaser
from faststream_sqlbroker.flow.deliver.outcomes import MOST_APART
from faststream_sqlbroker.flow.deliver.policies import key_claims_of
from faststream_sqlbroker.flow.deliver.signals import Signals
from faststream_sqlbroker.flow.deliver.worker import Worker
from faststream_sqlbroker.flow.deliver.worker_ends import WorkerEnds, Workers, at_least_grace
from faststream_sqlbroker.flow.fleet.heartbeat import Heartbeat
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping
from faststream_sqlbroker.flow.fleet.lookout import Lookout
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.flow.fleet.rights import Rights, outcomes_of
from faststream_sqlbroker.flow.loop import LAST_BACKOFF, Log, Loop, backoff, is_told, persist
from faststream_sqlbroker.flow.metrics import metrics_of
from faststream_sqlbroker.flow.settings import ConsumerSettings
from faststream_sqlbroker.flow.wakeup import ALL, Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.core.health import SubscriberHealth
    from faststream_sqlbroker.database.store import Store
    from faststream_sqlbroker.flow.debug_log import DebugLog

FINAL_FLUSH_TIMEOUT = 10.0
"""Most seconds for the last flush; what is not written by then comes back when its lease runs out.
"""


class Consumer:
    """Fetch, work, flush, renew and release for one subscriber.

    `start` and `stop` may be repeated. `stop` hands back what was not started, lets running
    handlers end for the graceful timeout, cancels the rest, and writes every outcome. Handlers that
    go on all the same are abandoned: their messages stay leased.
    """

    def __init__(
        self,
        *,
        store: "Store",
        wakeups: Wakeups,
        settings: ConsumerSettings,
        handle: Handle,
        log: Log,
        ack_first: bool = False,
        cancellable: bool = True,
        handlers: Sequence[str] = (),
        encode: Callable[[Any], Awaitable[tuple[bytes, str | None]]] | None = None,
        heartbeat: Heartbeat | None = None,
        rights: Rights | None = None,
        paused: bool = False,
        recorder: Recorder | None = None,
        lookout: Lookout | None = None,
        housekeeping: Housekeeping | None = None,
        debug: "DebugLog | None" = None,
    ) -> None:
        """`settings` are the subscriber's; `handle` gets a row, or a tuple of rows with batch=True.

        `encode` makes the bodies that handlers move their messages with. `heartbeat` tells the
        fleet of it, and which queues are paused; `paused` starts it without claiming. `rights`
        tells while its outcomes cannot be written. `cancellable` is false for handlers that run in
        a thread: cancelling would only stop waiting for it. `handlers` are their names. `recorder`
        is told of each claim, of each write of outcomes and of what is rare. The subscribers of a
        broker share its `lookout` and `housekeeping`. `debug` tells of single messages.
        """
        self._store = store
        self._wakeups = wakeups
        self._settings = settings
        self._debug = debug
        self._handle = handle if debug is None else debug.handling(handle)
        self._log = log
        self._ack_first = ack_first
        self._cancellable = cancellable
        self._handlers = handlers
        self._encode = encode
        self._heartbeat = heartbeat
        self._lookout = Lookout(store, wakeups.clock) if lookout is None else lookout
        self._housekeeping = (
            Housekeeping(store, log, wakeups.clock) if housekeeping is None else housekeeping
        )
        self._rights = rights
        self._metrics = metrics_of(recorder, settings.queues)
        self.registration = Registration(
            settings,
            paused=paused,
            on_change=self._reopened,
            on_cancel=self._cancel_messages,
            clock=wakeups.clock,
        )
        self._rules = settings.settle_rules
        self._stopping = True
        self._stop_task: asyncio.Task[None] | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._cancelled_workers: WeakSet[asyncio.Task[Any]] = WeakSet()
        """Those that this consumer has cancelled."""
        self._loop_end: asyncio.Task[Any] | None = None
        """It waits for ever, so only our stop or the end of the event loop cancels it."""
        self._dead_workers = 0
        """Workers that have died and are not replaced yet."""
        self._build()

    def _build(self) -> None:
        """Make the parts of one life: nothing of an earlier one, whose handlers may still run in
        threads, reaches them.
        """
        s = self._settings
        log = self._log
        store = self._store
        clock = self._wakeups.clock
        signals = Signals()
        self.inflight = held = Inflight(log, clock, signals, self._metrics)
        held.debug = self._debug
        held.slots.start_is_final = self._cancellable and not s.batch
        if self._heartbeat is not None:
            held.ended = self.registration.ended
        self._keeper = LeaseKeeper(
            store, held, log, lease=s.release_stuck_timeout, max_lease=s.max_lease
        )
        self._cancels = Cancels(
            held, self._rules, log, cancellable=self._cancellable, ack_first=self._ack_first
        )
        self._keys = key_claims_of(store, s.policies)
        self._ends = WorkerEnds(
            held,
            log,
            self._cancelled_workers,
            handlers=self._handlers,
            transactional=s.transactional,
            ack_first=self._ack_first,
        )
        ids = store.correlation_ids
        progress = ProgressNotes(store, log, clock).note
        holder = Holder(self._keeper.extend, self._encode, self._ack_first, log, ids, progress)
        self._fetcher = Fetcher(store, held, s, log, self.registration, holder, self._lookout)
        self._flusher = Flusher(
            store,
            held,
            log,
            batch_size=s.flush_batch_size,
            interval=s.flush_interval,
            outages=self._wakeups.outages,
            on_denied=partial(self.registration.hold, "denied"),
        )
        releaser = StuckReleaser(
            store,
            s.queues,
            log,
            interval=s.release_stuck_interval,
            archive=s.retain_in_archive_on_reject,
            told=s.told_only,
            released=self._released,
            lookout=self._lookout,
            housekeeping=self._housekeeping,
            metrics=self._metrics,
        )
        self._fetch_loop = Loop("fetch", self._fetcher.tick, log, clock)
        self._flush_loop = Loop("flush", self._flush_tick, log, clock)
        self._repeat_loop = Loop("repeat", self._flusher.repeater.tick, log, clock)
        self._lease_loop = Loop("lease", self._keeper.tick, log, clock)
        self._scan_loop = Loop("scan", self._fetcher.ready.scan_in_background, log, clock)
        self._release_loop = Loop("release-stuck", releaser.tick, log, clock)
        self._first: FirstAcks | None = None
        self._starts_loop: Loop | None = None
        listeners = Signals(
            room=self._fetch_loop.wake,
            looked=self._fetch_loop.wake,
            scans_slow=self._scan_loop.wake,
            outcome_added=self._flusher.outcome_added,
            flush_now=self._flusher.hurry,
            flush_due=self._flush_loop.wake,
            apart_added=self._repeat_loop.wake,
            chained=self._wakeups.published,
        )
        if self._ack_first:
            self._first = FirstAcks(
                store,
                held,
                self._rules,
                log,
                lease=s.release_stuck_timeout,
                interval=s.flush_interval,
            )
            self._starts_loop = Loop("starts", self._first.tick, log, clock)
            listeners = replace(listeners, starts_ended=self._starts_loop.wake)
        if s.ordered or any(isinstance(policy, Concurrency) for policy in s.policies):
            # What was written may have kept back the next message of its key, or of all.
            listeners = replace(listeners, settled=self._hint)
        # The parts call the loops, which call the parts: one side is known only now.
        signals.connect(listeners)

    @property
    def _loops(self) -> tuple[Loop, ...]:
        loops = (
            self._fetch_loop,
            self._flush_loop,
            self._repeat_loop,
            self._lease_loop,
            self._release_loop,
            self._scan_loop,
        )
        return loops if self._starts_loop is None else (*loops, self._starts_loop)

    @property
    def healthy(self) -> bool:
        """Whether every loop's last tick succeeded, no worker is dead, nothing is missing, and few
        outcomes are refused or set apart.
        """
        fine = all(loop.healthy for loop in self._loops) and not self._dead_workers
        fine = fine and not any(w.done() for w in self._workers)
        fine = fine and not self.registration.held and self._flusher.repeater.healthy
        return fine and self.inflight.apart_count < MOST_APART

    @property
    def health(self) -> "SubscriberHealth":
        """The subscriber, as an operator sees it."""
        from faststream_sqlbroker.core.health import SubscriberHealth  # noqa: PLC0415

        now = self._wakeups.clock.monotonic()

        def ago(loop: Loop) -> float | None:
            return None if loop.worked_at is None else now - loop.worked_at

        return SubscriberHealth(
            queues=tuple(self._settings.queues),
            worker=self.registration.name,
            healthy=self.healthy,
            last_claim_ago=ago(self._fetch_loop),
            last_flush_ago=ago(self._flush_loop),
            held=len(self.inflight.held),
        )

    @property
    def stopping(self) -> bool:
        """Whether it is about to stop, or has stopped."""
        return self._stopping

    @property
    def orphaned(self) -> bool:
        """Whether the event loop that it ran in was closed before its stop had ended.

        `stop` then writes what is left, in the event loop that runs.
        """
        return self._fetch_loop.orphaned or _cut_off(self._stop_task)

    async def start(self) -> None:
        """Start the loops and the workers; returns at once."""
        if not self._stopping:
            return
        self._begin(known=self._heartbeat is None)
        s = self._settings
        self._loop_end = asyncio.create_task(asyncio.Event().wait(), name="sqlbroker-loop-end")
        for n in range(s.max_workers):
            work = self._keep_working(n)
            self._workers.append(asyncio.create_task(work, name=f"sqlbroker-worker-{n}"))
        for loop in self._loops:
            loop.start(self._wakeups.outages)
        self._lookout.join(self._fetcher, self._release_loop.wake)
        listen = s.wakeup != "poll"
        self._wakeups.register(s.queues, self._hint, listen=listen, told_only=s.told_only)
        if self._heartbeat is not None:
            self._heartbeat.join(self.registration)
        if self._rights is not None:
            archive = self._store.dialect.has_archive
            self._rights.join(
                self.registration, outcomes_of(s, ack_first=self._ack_first, archive=archive)
            )

    def _begin(self, *, known: bool) -> None:
        """Begin a life; `known`: nothing tells which queues are paused, or it has."""
        self.registration.begin(known=known)
        self._build()
        self._stopping = False
        self._stop_task = None

    async def _keep_working(self, number: int) -> None:
        """Run a worker until it is to end, and replace it whenever it dies before."""
        clock = self._wakeups.clock
        inflight = self.inflight
        deaths = 0
        while True:
            worker = self._make_worker()
            began = clock.monotonic()
            try:
                if deaths:
                    await self._pause_after(deaths)
                    began = clock.monotonic()
                return await worker.run()
            except (Exception, asyncio.CancelledError) as error:
                try:
                    task = asyncio.current_task()
                except RuntimeError:
                    raise error from None  # it is closed after its event loop has ended
                # After a stop that could not end it, a start has made other workers.
                if self._must_end_worker(task) or self.inflight is not inflight:
                    raise
                lived_long = clock.monotonic() - began > LAST_BACKOFF
                deaths = 1 if lived_long else deaths + 1
                self._worker_died(number, worker, error, deaths)

    async def _pause_after(self, deaths: int) -> None:
        self._dead_workers += 1
        try:
            await self._wakeups.clock.sleep(backoff(deaths, self._wakeups.clock))
        finally:
            self._dead_workers -= 1

    def _worker_died(self, number: int, worker: Worker, error: BaseException, deaths: int) -> None:
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        worker.give_back_taken(error)
        if is_told(deaths):
            was_cancelled = isinstance(error, asyncio.CancelledError)
            how = "was cancelled, but not by the broker" if was_cancelled else f"failed: {error!r}"
            self._log(
                logging.WARNING if was_cancelled else logging.CRITICAL,
                f"worker {number} {how}; another one takes its place ({deaths} times in a row)",
                exc_info=None if was_cancelled else error,
            )

    def cancel_worker(self, task: "asyncio.Task[Any]") -> None:
        """Cancel the task of a worker, which ends."""
        self._cancelled_workers.add(task)
        task.cancel()

    def _must_end_worker(self, task: "asyncio.Task[Any] | None") -> bool:
        """Whether the cancellation of `task` is meant to end it as a worker.

        Another one comes from its handler. The end of the event loop cancels all tasks together.
        """
        if task in self._cancelled_workers:
            return True
        end = self._loop_end
        return end is not None and (end.cancelled() or end.cancelling() > 0)

    def _make_worker(self) -> Worker:
        return Worker(
            self._store,
            self.inflight,
            self._settings,
            self._handle,
            self._log,
            rules=self._rules,
            hold=self._keeper.hold_for_start,
            first=self._first,
            stopping=lambda: self._stopping,
            must_end=self._must_end_worker,
            on_idle=self._flusher.hurry,
            keys=self._keys,
        )

    def pause(self, paused: bool) -> None:
        """Claim no more and give back what has not started; False ends that."""
        self.registration.pause(paused)
        if self._heartbeat is not None:
            self._heartbeat.wake()

    def request_stop(self, graceful_timeout: float | None = None) -> "asyncio.Task[None]":
        """Begin the stop in the background, as the task returned; safe inside a handler."""
        self._stopping = True
        self.registration.end()
        if self._stop_task is None or _cut_off(self._stop_task):
            self._stop_task = asyncio.create_task(self._stop(graceful_timeout))
        return self._stop_task

    async def stop(self, graceful_timeout: float | None = None) -> None:
        """Drain and stop.

        Args:
            graceful_timeout: Seconds for running handlers to end; None waits for them without
                limit.
        """
        if self._stopping and self._stop_task is None:
            return
        await asyncio.shield(self.request_stop(graceful_timeout))

    def _hint(self, queues: frozenset[str] = ALL) -> None:
        self._fetcher.hint(queues)
        self._fetch_loop.wake()

    def _released(self) -> None:
        self._fetcher.ready.scan_soon()
        self._scan_loop.wake()
        self._hint()

    def _cancel_messages(self, requests: Sequence[CancelRequest]) -> None:
        self._cancels.asked(requests)

    def _reopened(self) -> None:
        self._fetcher.reopened()
        self._released()

    async def _leave(self) -> None:
        if self._rights is not None:
            self._rights.leave(self.registration)
        if self._heartbeat is not None:
            await self._heartbeat.leave(self.registration)

    async def _flush_tick(self) -> float | None:
        wait = await self._flusher.tick()
        # Claims stop while too many outcomes wait: some were written.
        self.inflight.made_room()
        return wait

    async def _stop(self, graceful_timeout: float | None) -> None:
        self._wakeups.unregister(self._hint)
        self._lookout.leave(self._fetcher)
        self._end_input()
        _, abandoned = await asyncio.gather(
            self._end_claims(graceful_timeout), self._end_workers(graceful_timeout)
        )
        # In a closed event loop it has ended, and to cancel it would fail.
        if self._loop_end is not None and not self._loop_end.get_loop().is_closed():
            self._loop_end.cancel()
        await asyncio.gather(self._end_writes(), self._leave(), self._ends.close(abandoned))

    async def _end_claims(self, graceful_timeout: float | None) -> None:
        # The running claim is waited for, so that its rows are known and can be given back.
        limit = at_least_grace(graceful_timeout)
        # A look only reads: nothing is lost if it is cut off, and it may be slow.
        loops = (
            self._fetch_loop.stop(limit),
            self._release_loop.stop(limit),
            self._scan_loop.stop(0),
        )
        await asyncio.gather(*loops)
        self._end_input()

    def _end_input(self) -> None:
        """Give back what has not started; each worker ends when it comes to its sentinel."""
        self.inflight.give_back_waiting()
        for _ in range(self._settings.max_workers):
            self.inflight.waiting.put_nowait(None)

    async def _end_workers(self, graceful_timeout: float | None) -> Workers:
        """End what can be ended; the others, which are abandoned."""
        workers, self._workers = self._workers, []
        return await self._ends.end(workers, graceful_timeout)

    async def _end_writes(self) -> None:
        limit = min(FINAL_FLUSH_TIMEOUT, self._store.statement_timeout)
        # Each is bounded by itself: what hangs, or is refused, keeps none of the others from being
        # written.
        await asyncio.gather(
            self._lease_loop.stop(limit),
            self._end_outcomes(limit),
            self._end_starts(limit),
            self._end_unanswered(limit),
        )

    async def _end_outcomes(self, limit: float) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit
        # A loop that was cancelled is waited for, or it would outlive the stop.
        await self._flush_loop.stop(limit)
        # What is repeated may hang for long: the others do not wait for it.
        repeating = self._repeat_loop.stop(max(0.0, deadline - clock()))
        await asyncio.gather(repeating, self._flusher.empty_until(deadline))
        if (
            not await persist(self._final_flush, deadline, self.inflight.clock)
            and self.inflight.unwritten
        ):
            self._log(
                logging.ERROR,
                f"{len(self.inflight.unwritten)} outcomes could not be written while stopping; "
                f"messages {self.inflight.unwritten} come back when their leases run out",
            )

    async def _final_flush(self) -> None:
        wait: float | None = 0.0
        while wait is not None or self.inflight.queued:
            await self.inflight.clock.sleep(wait or 0.0)
            await self._flusher.empty()
            wait = await self._flusher.repeater.tick()

    async def _end_starts(self, limit: float) -> None:
        deadline = asyncio.get_running_loop().time() + limit
        if self._first is not None and self._starts_loop is not None:
            await self._starts_loop.stop(limit)
            await self._first.stop(deadline)

    async def _end_unanswered(self, limit: float) -> None:
        deadline = asyncio.get_running_loop().time() + limit
        if not await persist(self._fetcher.release_unanswered, deadline, self.inflight.clock):
            self._log(
                logging.WARNING,
                "claims without an answer could not be given back while stopping; what they may "
                "have leased comes back when the leases run out",
            )


def _cut_off(stop: "asyncio.Task[None] | None") -> bool:
    """Whether `stop` was cut off by the end of its event loop."""
    return (
        stop is not None and stop.get_loop().is_closed() and (not stop.done() or stop.cancelled())
    )

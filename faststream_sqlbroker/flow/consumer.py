"""The life of one subscriber: its loops and workers, from start to drain."""

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
from faststream_sqlbroker.core.rows import HandlerServices
from faststream_sqlbroker.flow.deliver.ack_first import AckFirstTracker
from faststream_sqlbroker.flow.deliver.cancels import MessageCanceller
from faststream_sqlbroker.flow.deliver.delivery import Handle
from faststream_sqlbroker.flow.deliver.fetch import Fetcher
from faststream_sqlbroker.flow.deliver.flush import Flusher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.leases import LeaseKeeper, ProgressWriter, StuckReleaser
from faststream_sqlbroker.flow.deliver.outcomes import MAX_QUARANTINED
from faststream_sqlbroker.flow.deliver.policy_starts import create_key_claimer
from faststream_sqlbroker.flow.deliver.signals import Signals
from faststream_sqlbroker.flow.deliver.worker import Worker
from faststream_sqlbroker.flow.deliver.worker_ends import Workers, WorkerShutdown, get_grace_timeout
from faststream_sqlbroker.flow.fleet.heartbeat import Heartbeat
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping
from faststream_sqlbroker.flow.fleet.lookout import SharedPoller
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.flow.fleet.rights import Rights, get_required_activities
from faststream_sqlbroker.flow.loop import LAST_BACKOFF, Log, Loop, backoff, is_logged, retry_until
from faststream_sqlbroker.flow.metrics import create_metrics
from faststream_sqlbroker.flow.settings import ConsumerSettings
from faststream_sqlbroker.flow.wakeup import ALL, Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.core.health import SubscriberHealth
    from faststream_sqlbroker.database.store import Store
    from faststream_sqlbroker.flow.debug_log import DebugLog

FINAL_FLUSH_TIMEOUT = 10.0
"""Maximum seconds for the last flush; outcomes that are not written by then come back with their
leases.
"""


class QueueConsumer:
    """The loops of a subscriber: fetch, work, flush, renew and release.

    `start` and `stop` may be repeated. `stop` releases what was not started, lets running handlers
    end within the graceful timeout, cancels the rest, and writes every outcome. Handlers that go on
    all the same are abandoned: their messages stay leased.
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
        lookout: SharedPoller | None = None,
        housekeeping: Housekeeping | None = None,
        debug: "DebugLog | None" = None,
    ) -> None:
        """Take the subscriber's `settings`; `handle` gets a row, or a tuple of rows with
        batch=True.

        `encode` creates the bodies with which handlers move their messages. `heartbeat` announces
        the subscriber to the fleet and returns the paused queues; `paused` starts it without
        claiming. `rights` holds it while its outcomes cannot be written. `cancellable` is False for
        handlers that run in a thread: a cancellation would only end the wait for the thread.
        `handlers` are their names. `recorder` gets each claim, each write of outcomes and rare
        events. The subscribers of a broker share its `lookout` and `housekeeping`. `debug` logs
        single messages.
        """
        self._store = store
        self._wakeups = wakeups
        self._settings = settings
        self._debug = debug
        self._handle = handle if debug is None else debug.wrap_handler(handle)
        self._log = log
        self._ack_first = ack_first
        self._is_cancellable = cancellable
        self._handlers = handlers
        self._encode = encode
        self._heartbeat = heartbeat
        self._poller = SharedPoller(store, wakeups.clock) if lookout is None else lookout
        self._housekeeping = (
            Housekeeping(store, log, wakeups.clock) if housekeeping is None else housekeeping
        )
        self._rights = rights
        self._metrics = create_metrics(recorder, settings.queues)
        self.registration = Registration(
            settings,
            paused=paused,
            on_change=self._on_queues_changed,
            on_cancel=self._cancel_messages,
            clock=wakeups.clock,
        )
        self._rules = settings.settle_rules
        self._stopping = True
        self._stop_task: asyncio.Task[None] | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._cancelled_workers: WeakSet[asyncio.Task[Any]] = WeakSet()
        """Workers that this consumer has cancelled."""
        self._loop_end: asyncio.Task[Any] | None = None
        """A task that waits for ever, so only a stop or the end of the event loop cancels it."""
        self._dead_workers = 0
        """Number of workers that have died and are not replaced yet."""
        self._build()

    def _build(self) -> None:
        """Build the parts of the subscriber for a new life, from a `start` to the next `stop`.

        Handlers of an earlier life may still run in threads. They refer to the old parts, so
        their late results do not reach the new ones.
        """
        s = self._settings
        log = self._log
        store = self._store
        clock = self._wakeups.clock
        signals = Signals()
        self.inflight = inflight = Inflight(log, clock, signals, self._metrics)
        inflight.debug = self._debug
        inflight.rules = self._rules
        inflight.outages = self._wakeups.outages
        # A slot is the time that a policy gives a message to start. The call of a handler uses it
        # up, except where the real start may come later: in a thread, or in a batch.
        inflight.slots.start_is_final = self._is_cancellable and not s.batch
        if self._heartbeat is not None:
            inflight.ended = self.registration.ended
        self._lease_keeper = LeaseKeeper(
            store, inflight, log, lease=s.release_stuck_timeout, max_lease=s.max_lease
        )
        self._canceller = MessageCanceller(
            inflight, self._rules, log, cancellable=self._is_cancellable, ack_first=self._ack_first
        )
        self._key_claimer = create_key_claimer(store, s.policies)
        self._shutdown = WorkerShutdown(
            inflight,
            log,
            self._cancelled_workers,
            handlers=self._handlers,
            transactional=s.transactional,
            ack_first=self._ack_first,
        )
        ids = store.correlation_ids
        progress = ProgressWriter(store, log, clock).write
        holder = HandlerServices(
            self._lease_keeper.extend, self._encode, self._ack_first, log, ids, progress
        )
        self._fetcher = Fetcher(store, inflight, s, log, self.registration, holder, self._poller)
        self._flusher = Flusher(
            store,
            inflight,
            log,
            batch_size=s.flush_batch_size,
            interval=s.flush_interval,
            on_denied=partial(self.registration.hold, "denied"),
        )
        releaser = StuckReleaser(
            store,
            s.queues,
            log,
            interval=s.release_stuck_interval,
            archive=s.retain_in_archive_on_reject,
            notify_only=s.notify_only,
            on_released=self._on_released,
            poller=self._poller,
            housekeeping=self._housekeeping,
            metrics=self._metrics,
        )
        self._fetch_loop = Loop("fetch", self._fetcher.tick, log, clock)
        self._flush_loop = Loop("flush", self._flush, log, clock)
        self._quarantine_loop = Loop("repeat", self._flusher.quarantine.tick, log, clock)
        self._lease_loop = Loop("lease", self._lease_keeper.tick, log, clock)
        self._scan_loop = Loop("scan", self._fetcher.ready.scan_in_background, log, clock)
        self._release_loop = Loop("release-stuck", releaser.tick, log, clock)
        self._ack_first_tracker: AckFirstTracker | None = None
        self._starts_loop: Loop | None = None
        listeners = Signals(
            capacity_free=self._fetch_loop.wake,
            shared_poll_done=self._fetch_loop.wake,
            scans_slow=self._scan_loop.wake,
            outcome_added=self._flusher.on_outcome_added,
            flush_now=self._flusher.flush_soon,
            flush_due=self._flush_loop.wake,
            outcome_quarantined=self._quarantine_loop.wake,
            chained=self._wakeups.notify_published,
        )
        if self._ack_first:
            self._ack_first_tracker = AckFirstTracker(
                store,
                inflight,
                self._rules,
                log,
                lease=s.release_stuck_timeout,
                interval=s.flush_interval,
            )
            self._starts_loop = Loop("starts", self._ack_first_tracker.tick, log, clock)
            listeners = replace(listeners, starts_ended=self._starts_loop.wake)
        if s.ordered or any(isinstance(policy, Concurrency) for policy in s.policies):
            # A written outcome may have held back the next message of its key, or of all keys.
            listeners = replace(listeners, settled=self._on_hint)
        # The parts call the loops, and the loops call the parts, so the listeners exist only now.
        signals.connect(listeners)

    @property
    def _loops(self) -> tuple[Loop, ...]:
        """All loops of the subscriber; the loop for starts exists only under ACK_FIRST."""
        loops = (
            self._fetch_loop,
            self._flush_loop,
            self._quarantine_loop,
            self._lease_loop,
            self._release_loop,
            self._scan_loop,
        )
        return loops if self._starts_loop is None else (*loops, self._starts_loop)

    @property
    def healthy(self) -> bool:
        """True if all loops and workers are healthy, no right is missing, and few outcomes are
        quarantined.

        A quarantined outcome was refused by the database, or has repeatedly failed to be written,
        and is tried again separately. `is_held` means that outcomes cannot be written at present,
        so nothing is claimed.
        """
        is_healthy = all(loop.healthy for loop in self._loops) and not self._dead_workers
        is_healthy = is_healthy and not any(worker.done() for worker in self._workers)
        is_healthy = (
            is_healthy and not self.registration.is_held and self._flusher.quarantine.healthy
        )
        return is_healthy and self.inflight.quarantined_count < MAX_QUARANTINED

    @property
    def health(self) -> "SubscriberHealth":
        """Health of the subscriber as reported to operators.

        The times are seconds since the last success of a loop, None before the first. `held` is the
        number of messages that are claimed and not settled yet.
        """
        from faststream_sqlbroker.core.health import SubscriberHealth  # noqa: PLC0415

        now = self._wakeups.clock.monotonic()

        def get_age(loop: Loop) -> float | None:
            return None if loop.succeeded_at is None else now - loop.succeeded_at

        return SubscriberHealth(
            queues=tuple(self._settings.queues),
            worker=self.registration.name,
            healthy=self.healthy,
            last_claim_ago=get_age(self._fetch_loop),
            last_flush_ago=get_age(self._flush_loop),
            held=len(self.inflight.held),
        )

    @property
    def is_stopping(self) -> bool:
        """True if the subscriber is about to stop, or has stopped."""
        return self._stopping

    @property
    def is_orphaned(self) -> bool:
        """True if the subscriber's event loop was closed before the stop had ended.

        `stop` then writes what is left, in the event loop that runs.
        """
        return self._fetch_loop.is_orphaned or _is_cut_off(self._stop_task)

    async def start(self) -> None:
        """Start the loops and the workers; return at once, before anything is claimed.

        Then join what the subscribers of a broker share: polls, hints to poll, heartbeats and the
        check of rights. No effect while running.
        """
        if not self._stopping:
            return
        self._start_life(pauses_known=self._heartbeat is None)
        s = self._settings
        self._loop_end = asyncio.create_task(asyncio.Event().wait(), name="sqlbroker-loop-end")
        for number in range(s.max_workers):
            work = self._run_worker(number)
            self._workers.append(asyncio.create_task(work, name=f"sqlbroker-worker-{number}"))
        for loop in self._loops:
            loop.start(self._wakeups.outages)
        self._poller.join(self._fetcher, self._release_loop.wake)
        listen = s.wakeup != "poll"
        self._wakeups.register(s.queues, self._on_hint, listen=listen, notify_only=s.notify_only)
        if self._heartbeat is not None:
            self._heartbeat.join(self.registration)
        if self._rights is not None:
            archive = self._store.dialect.has_archive
            self._rights.join(
                self.registration,
                get_required_activities(s, ack_first=self._ack_first, archive=archive),
            )

    def _start_life(self, *, pauses_known: bool) -> None:
        """Start a new life of the subscriber, with new parts that hold nothing of an earlier life.

        A life lasts from a start to the next stop. `pauses_known` is True if no heartbeat reports
        paused queues; else the first claim waits for the heartbeat.
        """
        self.registration.start(pauses_known=pauses_known)
        self._build()
        self._stopping = False
        self._stop_task = None

    async def _run_worker(self, number: int) -> None:
        """Run a worker until the stop, and replace the worker whenever it dies before.

        A worker dies of a bug, or of a cancellation that came from its handler. Deaths in a row
        lead to growing pauses; a life longer than the longest pause starts the count again.
        """
        clock = self._wakeups.clock
        inflight = self.inflight
        deaths = 0
        while True:
            worker = self._make_worker()
            started_at = clock.monotonic()
            try:
                if deaths:
                    await self._pause_after(deaths)
                    started_at = clock.monotonic()
                return await worker.run()
            except (Exception, asyncio.CancelledError) as error:
                try:
                    task = asyncio.current_task()
                except RuntimeError:
                    raise error from None  # the coroutine is closed after its event loop has ended
                # After a stop that could not end this worker, a start has created other workers.
                if self._must_end_worker(task) or self.inflight is not inflight:
                    raise
                lived_long = clock.monotonic() - started_at > LAST_BACKOFF
                deaths = 1 if lived_long else deaths + 1
                self._handle_worker_death(number, worker, error, deaths)

    async def _pause_after(self, deaths: int) -> None:
        """Pause after `deaths` of a worker in a row, before the next worker starts.

        The subscriber reports itself as unhealthy during the pause.
        """
        self._dead_workers += 1
        try:
            await self._wakeups.clock.sleep(backoff(deaths, self._wakeups.clock))
        finally:
            self._dead_workers -= 1

    def _handle_worker_death(
        self, number: int, worker: Worker, error: BaseException, deaths: int
    ) -> None:
        """Clean up after `error` has ended worker `number`, whose task goes on with a new worker.

        Clear the task's cancellations, which would end the new worker too, and abandon its current
        messages if they have no outcome. Deaths in a row are logged ever more rarely.
        """
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        worker.release_current(error)
        if is_logged(deaths):
            was_cancelled = isinstance(error, asyncio.CancelledError)
            cause = (
                "was cancelled, but not by the broker" if was_cancelled else f"failed: {error!r}"
            )
            self._log(
                logging.WARNING if was_cancelled else logging.CRITICAL,
                f"worker {number} {cause}; a new worker replaces it ({deaths} times in a row)",
                exc_info=None if was_cancelled else error,
            )

    def cancel_worker(self, task: "asyncio.Task[Any]") -> None:
        """Cancel the task of a worker, which ends.

        The task is remembered, because a worker survives any other cancellation, which its handler
        may have caused.
        """
        self._cancelled_workers.add(task)
        task.cancel()

    def _must_end_worker(self, task: "asyncio.Task[Any] | None") -> bool:
        """Return True if the cancellation of `task` is meant to end the worker.

        Then the consumer has cancelled it, or the event loop ends, which cancels all tasks. Any
        other cancellation comes from the handler, and the worker goes on.
        """
        if task in self._cancelled_workers:
            return True
        # While workers run, only the end of the event loop cancels this task, which waits for ever.
        end = self._loop_end
        return end is not None and (end.cancelled() or end.cancelling() > 0)

    def _make_worker(self) -> Worker:
        """Create a worker; the replacement of a dead worker is a new object without old state."""
        return Worker(
            self._store,
            self.inflight,
            self._settings,
            self._handle,
            self._log,
            rules=self._rules,
            renew=self._lease_keeper.renew_for_start,
            first=self._ack_first_tracker,
            stopping=lambda: self._stopping,
            must_end=self._must_end_worker,
            on_idle=self._flusher.flush_soon,
            keys=self._key_claimer,
        )

    def pause(self, paused: bool) -> None:
        """Stop claiming and release what has not started; False resumes.

        The heartbeat is sent at once, so that operators see the change.
        """
        self.registration.pause(paused)
        if self._heartbeat is not None:
            self._heartbeat.wake()

    def request_stop(self, graceful_timeout: float | None = None) -> "asyncio.Task[None]":
        """Start the stop in the background and return the task, the same for a second call.

        A handler may call this, but must not await the task: the stop waits for the handler. A stop
        that the end of its event loop cut off is started again.
        """
        self._stopping = True
        self.registration.mark_stopping()
        if self._stop_task is None or _is_cut_off(self._stop_task):
            self._stop_task = asyncio.create_task(self._stop(graceful_timeout))
        return self._stop_task

    async def stop(self, graceful_timeout: float | None = None) -> None:
        """Drain and stop: end the running handlers and write every outcome.

        Args:
            graceful_timeout: Seconds for running handlers to end; None waits for them without
                limit.
        """
        if self._stopping and self._stop_task is None:
            return  # never started
        # A cancelled caller must not cut off the stop, which others may await, too.
        await asyncio.shield(self.request_stop(graceful_timeout))

    def _on_hint(self, queues: frozenset[str] = ALL) -> None:
        """Claim as soon as `min_fetch_interval` allows, because messages may have arrived in
        `queues`.
        """
        self._fetcher.on_hint(queues)
        self._fetch_loop.wake()

    def _on_released(self) -> None:
        """Poll and claim soon, after expired leases were released or open queues have changed.

        A poll looks which queues have due rows; a claim leases rows. While polls are slow, claims
        begin at the last claimed row, so only a poll finds released rows, whose due times are
        older.
        """
        self._fetcher.ready.scan_soon()
        self._scan_loop.wake()
        self._on_hint()

    def _cancel_messages(self, requests: Sequence[CancelRequest]) -> None:
        self._canceller.cancel(requests)

    def _on_queues_changed(self) -> None:
        self._fetcher.on_queues_changed()
        self._on_released()

    async def _leave(self) -> None:
        """Remove the subscriber from the fleet, after its workers have ended.

        Then other processes no longer count it as alive.
        """
        if self._rights is not None:
            self._rights.leave(self.registration)
        if self._heartbeat is not None:
            await self._heartbeat.leave(self.registration)

    async def _flush(self) -> float | None:
        """Write a batch of outcomes if due; return the seconds until the next tick.

        To flush is to write the outcomes of several handlers in one transaction.
        """
        wait = await self._flusher.tick()
        # Claims pause while too many outcomes wait; this tick may have written some.
        self.inflight.on_capacity()
        return wait

    async def _stop(self, graceful_timeout: float | None) -> None:
        """Stop in this order: end claims and workers, then write the remaining outcomes.

        Each phase has a time limit, except that `graceful_timeout=None` waits for handlers, and for
        a claim or release in progress, without limit. Handlers that go on all the same are
        abandoned, and closed while the last outcomes are written.
        """
        self._wakeups.unregister(self._on_hint)
        self._poller.leave(self._fetcher)
        self._release_input()
        _, unfinished_workers = await asyncio.gather(
            self._end_claims(graceful_timeout), self._end_workers(graceful_timeout)
        )
        # This task notifies workers of the end of the event loop. Only abandoned workers are left,
        # which end at their cancellation without it. In a closed event loop it has ended, and
        # cancelling it would fail.
        if self._loop_end is not None and not self._loop_end.get_loop().is_closed():
            self._loop_end.cancel()
        await asyncio.gather(
            self._end_writes(), self._leave(), self._shutdown.close_abandoned(unfinished_workers)
        )

    async def _end_claims(self, graceful_timeout: float | None) -> None:
        """Stop the loops that claim, poll and release, then release the last claimed rows.

        To release a row is to give up its lease, so that another worker can have it at once.
        """
        # Wait for a claim in progress, so that its rows are known and can be released.
        limit = get_grace_timeout(graceful_timeout)
        # A poll only reads: nothing is lost if it is cut off, and it may be slow.
        loops = (
            self._fetch_loop.stop(limit),
            self._release_loop.stop(limit),
            self._scan_loop.stop(0),
        )
        await asyncio.gather(*loops)
        self._release_input()

    def _release_input(self) -> None:
        """Release rows that no handler has started, and tell every worker to end.

        A worker ends when it takes a None from the buffer of claimed rows, which is after its
        running handler. Called again after the last claim, which may have filled the buffer.
        """
        self.inflight.release_waiting()
        for _ in range(self._settings.max_workers):
            self.inflight.waiting.put_nowait(None)

    async def _end_workers(self, graceful_timeout: float | None) -> Workers:
        """Stop the workers; return the workers that had to be abandoned.

        A worker is abandoned if its handler runs in a thread for longer than the timeout, or goes
        on after its cancellation.
        """
        workers, self._workers = self._workers, []
        return await self._shutdown.stop(workers, graceful_timeout)

    async def _end_writes(self) -> None:
        """Write everything that is still pending in this process, within a time limit.

        That is outcomes, ends of handlers under ACK_FIRST, and the release of rows that a claim
        without an answer may have leased.
        """
        limit = min(FINAL_FLUSH_TIMEOUT, self._store.statement_timeout)
        # Each has its own time limit: a part that hangs, or is refused, does not keep the others
        # from being written.
        await asyncio.gather(
            self._lease_loop.stop(limit),
            self._end_outcomes(limit),
            self._end_starts(limit),
            self._end_unanswered(limit),
        )

    async def _end_outcomes(self, limit: float) -> None:
        """Write the remaining outcomes within `limit` seconds; log the messages without success.

        Such messages are delivered again when their leases expire, even though a handler has run.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit
        # Wait for a cancelled loop, or it would outlive the stop.
        await self._flush_loop.stop(limit)
        # Quarantined outcomes, which have failed before and are repeated separately, may hang for
        # long: the other outcomes do not wait for them.
        repeating = self._quarantine_loop.stop(max(0.0, deadline - clock()))
        flushing = retry_until(self._flusher.flush_all, deadline, self.inflight.clock)
        await asyncio.gather(repeating, flushing)
        if (
            not await retry_until(self._flush_remaining, deadline, self.inflight.clock)
            and self.inflight.unwritten
        ):
            self._log(
                logging.ERROR,
                f"{len(self.inflight.unwritten)} outcomes could not be written while stopping; "
                f"messages {self.inflight.unwritten} are delivered again when their leases expire",
            )

    async def _flush_remaining(self) -> None:
        """Write queued and quarantined outcomes until none is left.

        Quarantined outcomes have failed before; `quarantine.tick` repeats the due ones, and returns
        the seconds until the next is due, or None if none is left.
        """
        wait: float | None = 0.0
        while wait is not None or self.inflight.queued:
            await self.inflight.clock.sleep(wait or 0.0)
            await self._flusher.flush_all()
            wait = await self._flusher.quarantine.tick()

    async def _end_starts(self, limit: float) -> None:
        """Record, under ACK_FIRST, which handlers have ended.

        With ACK_FIRST a message is removed before its handler starts, and a note of the start is
        kept. A note that stays lists the message as unknown: its handler may have been cut off.
        """
        deadline = asyncio.get_running_loop().time() + limit
        if self._ack_first_tracker is not None and self._starts_loop is not None:
            await self._starts_loop.stop(limit)
            await self._ack_first_tracker.stop(deadline)

    async def _end_unanswered(self, limit: float) -> None:
        """Release rows of claims without an answer, within `limit` seconds.

        Such a claim may have been committed although its connection broke. Then its rows are leased
        to this subscriber, which does not know them.
        """
        deadline = asyncio.get_running_loop().time() + limit
        if not await retry_until(self._fetcher.release_unanswered, deadline, self.inflight.clock):
            self._log(
                logging.WARNING,
                "claims without an answer could not be released while stopping; messages that they "
                "may have leased are delivered again when the leases expire",
            )


def _is_cut_off(stop: "asyncio.Task[None] | None") -> bool:
    """Return True if the end of the event loop cut off `stop`, the task of an earlier stop.

    Its outcomes may be unwritten, so another stop must run, in the event loop that runs now.
    """
    return (
        stop is not None and stop.get_loop().is_closed() and (not stop.done() or stop.cancelled())
    )

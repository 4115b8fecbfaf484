"""Hints to poll sooner. They may be early, late, lost or spurious; nothing relies on them.

Inside one process a publish wakes its subscribers directly. Between processes PostgreSQL carries
hints by LISTEN/NOTIFY: the first of a burst goes out at once, later ones together every 10 ms, off
the write path, because a NOTIFY inside a transaction serialises all commits.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.clock import Clock, Timer
from faststream_sqlbroker.database.parts.live_subscribers import STATE_CHANGED
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.loop import Log, Outages, backoff

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

COALESCE_INTERVAL = 0.01
"""Seconds between two notifications, and between two checks of a caller's transaction."""
SECOND_HINT = 0.02
"""Seconds after the end of a caller's transaction at which the hint is sent again."""
CHECK_INTERVAL = 10.0
"""Seconds between two checks of the listening connection, without a statement."""
NOTIFIED_CHECKS_PER_PING = 360
"""Checks per query where subscribers poll only when notified."""
CHECKS_PER_PING = 6
"""Checks of which the last one queries the server: a proxy may keep a connection open whose server
is gone, which TCP would not notice.
"""

ALL: frozenset[str] = frozenset()
"""Placeholder for all queues of a subscriber."""
Hint = Callable[[frozenset[str]], None]
"""Called with the queues in which messages may have arrived, or ALL."""


class Wakeups:
    """Carries hints between publishers and subscribers of a broker."""

    def __init__(self, store: "Store", log: Log, clock: Clock | None = None) -> None:
        """Connect only when a subscriber that listens is registered."""
        self._store = store
        self._log = log
        self.clock = clock or Clock()
        self.outages = Outages(log, self.clock, store.count_answers)
        """Records the database failures of all loops of the broker."""
        self._hints: dict[Hint, frozenset[str]] = {}
        self._notify_only_hints: set[Hint] = set()
        """Hints of subscribers that poll only when notified."""
        self._pending_queues: set[str] = set()
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._watched_transactions: dict[weakref.ref[Any], set[str]] = {}
        """Open transactions of callers, each with the queues it has published into."""
        self._timers: set[Timer] = set()
        self._sent_at = 0.0
        self.channel = store.tables.config.channel
        self.is_listening = False
        self.on_pauses: Callable[[], None] = lambda: None
        """Called when another process may have paused or resumed a queue."""

    def register(
        self, queues: Sequence[str], hint: Hint, *, listen: bool, notify_only: bool = False
    ) -> None:
        """Call `hint` when messages may have arrived in `queues`.

        With `listen`, also for hints of other processes, if the database can carry them. With
        `notify_only` the subscriber polls rarely without a hint; if all do so, the connection is
        queried less often.
        """
        self._hints[hint] = frozenset(queues)
        if notify_only:
            self._notify_only_hints.add(hint)
        if (
            listen
            and self._store.can_listen
            and (self._listener is None or self._listener.done())  # ended with its event loop
        ):
            self._listener = asyncio.create_task(self._listen(), name="sqlbroker-listen")

    def unregister(self, hint: Hint) -> None:
        """Stop calling `hint`."""
        self._hints.pop(hint, None)
        self._notify_only_hints.discard(hint)

    @property
    def notify_only(self) -> bool:
        """True if all subscribers poll only when notified."""
        return bool(self._notify_only_hints) and len(self._notify_only_hints) == len(self._hints)

    @property
    def registered_queues(self) -> frozenset[str]:
        """Queues for which a hint is registered."""
        return frozenset().union(*self._hints.values())

    def wake_all(self) -> None:
        """Call all hints of this process, because messages may have arrived anywhere."""
        self._wake_local(ALL)

    async def stop(self) -> None:
        """End the tasks; pending hints are dropped.

        That loses no message: a hint only makes subscribers poll sooner.
        """
        tasks = [t for t in (self._listener, self._sender, self._watcher) if t is not None]
        # Tasks of another event loop have ended with it.
        tasks = [t for t in tasks if t.get_loop() is asyncio.get_running_loop()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.outages.remove_part(self)
        self._listener = self._sender = self._watcher = None
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._pending_queues.clear()
        self._watched_transactions.clear()

    def notify_published(self, queues: Iterable[str]) -> None:
        """Send hints for a committed publish into `queues`: at once here, soon to other processes.

        Hints to these are collected for up to 10 ms, so that many publishes cost few notifications.
        """
        names = frozenset(queues)
        if self._hints:
            self._wake_local(names)
        if self._store.dialect.can_listen and names:
            self._pending_queues |= names
            if self._sender is None or self._sender.done():
                self._sender = asyncio.create_task(self._send(), name="sqlbroker-notify")

    def notify_after(self, transaction: Any, queues: Iterable[str]) -> None:
        """Send hints for a publish into `queues` when the caller's `transaction` ends.

        There is no signal after COMMIT, so the transaction is checked every 10 ms; the hint goes
        out when it is no longer active, and once more 20 ms later. A rollback costs a spurious
        hint. The reference is weak: the broker must not keep the caller's objects alive.
        """
        self._watched_transactions.setdefault(weakref.ref(transaction), set()).update(queues)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch(), name="sqlbroker-watch")

    def _wake_local(self, queues: frozenset[str]) -> None:
        """Call the hints of this process for `queues`, or every hint if that is ALL."""
        for hint, registered in list(self._hints.items()):
            # ALL is the empty set.
            if not queues or queues & registered:
                hint(queues & registered)

    async def _watch(self) -> None:
        """Check the callers' open transactions every 10 ms; send hints after the end of each.

        A transaction has ended if it is inactive, or if its object is gone (`ref()` is None).
        """
        while self._watched_transactions:
            await self.clock.sleep(COALESCE_INTERVAL)
            ended = [
                ref
                for ref in self._watched_transactions
                if (transaction := ref()) is None or not transaction.is_active
            ]
            if ended:
                queues = frozenset().union(*(self._watched_transactions.pop(ref) for ref in ended))
                self.notify_published(queues)
                self._repeat_hint(queues)

    def _repeat_hint(self, queues: frozenset[str]) -> None:
        """Send the hint for `queues` again soon, after the end of a caller's transaction.

        The transaction may look ended slightly before its COMMIT makes the rows visible. Then the
        first hint made subscribers poll too early.
        """

        def send() -> None:
            self._timers.discard(timer)
            self.notify_published(queues)

        timer = self.clock.call_later(SECOND_HINT, send)
        self._timers.add(timer)

    async def _send(self) -> None:
        """Notify other processes of published queues, together every 10 ms at most.

        The first one after a pause goes out at once. The task ends when nothing is left to send.
        """
        while self._pending_queues:
            await self.clock.sleep(
                max(0.0, self._sent_at + COALESCE_INTERVAL - self.clock.monotonic())
            )
            queues, self._pending_queues = sorted(self._pending_queues), set()
            self._sent_at = self.clock.monotonic()
            try:
                await self._store.notify(self.channel, queues)
            except Exception as error:  # noqa: BLE001 - a hint is not worth a dead task
                self._log(
                    logging.DEBUG, f"could not send a wake-up; subscribers will poll: {error}"
                )

    async def _listen(self) -> None:
        """Listen for notifications of other processes; reconnect after each failure.

        Subscribers poll until then. `alive` checks the connection, and with True queries the
        server, because a proxy may keep a connection open although the server is gone.
        """
        failures = 0
        while True:
            closed = asyncio.Event()
            try:
                async with self._store.listen(self.channel, self._on_notification, closed) as alive:
                    self.is_listening = True
                    failures = 0
                    self.outages.record_success(self)
                    # Notifications sent before LISTEN are lost: poll once.
                    self._wake_local(ALL)
                    self.on_pauses()
                    for number in count(1):
                        # Pause until the next check, but end the pause if the connection is closed:
                        # subscribers that poll only when notified would miss messages.
                        await self.clock.wait_for(closed, CHECK_INTERVAL)
                        interval = NOTIFIED_CHECKS_PER_PING if self.notify_only else CHECKS_PER_PING
                        await alive(number % interval == 0)
            except Exception as error:  # noqa: BLE001 - polling goes on, after any error
                failures += 1
                pause = backoff(failures, self.clock)
                if isinstance(error, StoreError):
                    self.outages.record_failure(self, "listener for wake-ups", error)
                else:
                    text = f"cannot listen for wake-ups, trying again in {pause:.1f} s: {error!r}"
                    self._log(logging.WARNING, text)
                await self.outages.pause(pause)
            finally:
                if self.is_listening:
                    self.is_listening = False
                    # Subscribers that poll only when notified poll by themselves until
                    # notifications arrive again.
                    self._wake_local(ALL)

    def _on_notification(self, payload: str) -> None:
        """Pass a notification on: `payload` is a queue, empty for all, or STATE_CHANGED.

        STATE_CHANGED says that another process may have paused or resumed a queue.
        """
        if payload == STATE_CHANGED:
            self.on_pauses()
            return
        self._wake_local(frozenset((payload,)) if payload else ALL)

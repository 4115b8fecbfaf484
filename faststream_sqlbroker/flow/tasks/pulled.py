"""Single messages that the application pulls from a subscriber, and what it holds of them.

`subscriber.get_one` and `async for message in subscriber` lease one message at a time. The
application settles it, which is written at once. Until then its lease is renewed, for ten leases at
most. A message that the application has dropped is not renewed any more.
"""

import asyncio
import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.outcome import Abandon
from faststream_sqlbroker.core.rows import ClaimedMessage, Holder
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.exceptions import LeaseLostError, TransientStoreError
from faststream_sqlbroker.flow.loop import Log, Loop, backoff
from faststream_sqlbroker.flow.settings import ConsumerSettings
from faststream_sqlbroker.flow.shielded import quietly
from faststream_sqlbroker.flow.tasks.direct_claim import DirectClaimer, DirectClaimRequest

if TYPE_CHECKING:
    from faststream_sqlbroker.core.rows import Settlement
    from faststream_sqlbroker.flow.wakeup import Wakeups

MOST_LEASES = 10
"""For how many leases a message is held that the application does not settle."""
STOP_LIMIT = 3.0
"""Most seconds that a stop waits for a running renewal, before it is cancelled."""


class PulledMessages:
    """What one subscriber's `get_one` and iterations take and hold; a stop ends it for good."""

    def __init__(
        self,
        claimer: DirectClaimer,
        wakeups: "Wakeups",
        settings: ConsumerSettings,
        log: Log,
        encode: Any,
        *,
        paused: bool,
    ) -> None:
        """Nothing is taken yet.

        Args:
            claimer: The broker's.
            wakeups: The broker's.
            settings: Of the subscriber.
            log: The subscriber's.
            encode: As of `Holder`.
            paused: Whether the subscriber is paused.
        """
        self._claimer = claimer
        self._wakeups = wakeups
        self._log = log
        self._clock = wakeups.clock
        self._lease = settings.release_stuck_timeout
        longest = MOST_LEASES * self._lease
        self._longest = min(longest, settings.max_lease or longest)
        self._rules = SettleRules(
            retry_strategy=settings.retry_strategy,
            retain_on_ack=settings.retain_in_archive_on_ack,
            retain_on_reject=settings.retain_in_archive_on_reject,
            dead_letter_queue=settings.dead_letter_queue,
        )
        self._wanted = DirectClaimRequest(
            queues=settings.queues,
            lease=self._lease,
            rules=self._rules,
            most_deliveries=float("inf")
            if settings.max_deliveries is None
            else settings.max_deliveries,
            remove=False,
            listen=settings.wakeup != "poll",
        )
        ids = claimer.correlation_ids
        self._holder = Holder(self._extend, encode, ack_first=False, log=log, correlation_ids=ids)
        self._held: dict[int, tuple[weakref.ref[Any], ClaimedMessage]] = {}
        """Messages that are not settled yet, by the id of their row's object."""
        self._iterated: dict[int, ClaimedMessage] = {}
        """Those of them that an iteration has given out: a stop gives them back."""
        self._waiting: set[asyncio.Timeout] = set()
        """Ended early by `pause` and by `stop`."""
        self._resumed = asyncio.Event()
        self.pause(paused)
        self._stopped = False
        self._loop: Loop | None = None

    @property
    def stopped(self) -> bool:
        """Whether nothing is taken any more."""
        return self._stopped

    def pause(self, paused: bool) -> None:
        """Take nothing while `paused`; what is held stays held."""
        if paused:
            self._resumed.clear()
            self._interrupt()
        else:
            self._resumed.set()

    def _interrupt(self) -> None:
        while self._waiting:
            self._waiting.pop().reschedule(0.0)

    # -- taking --------------------------------------------------------------------------------

    async def take(self, wait: float | None) -> ClaimedMessage | None:
        """The first due message, leased; None if there was none for `wait` seconds (None: no
        limit), or if the subscriber was stopped.

        Cancelled, it leases nothing.

        Raises:
            StoreError: the database refused or could not be reached.
        """
        clock = self._clock.callers
        deadline = None if wait is None else clock.monotonic() + wait
        while not self._stopped:
            left = None if deadline is None else max(0.0, deadline - clock.monotonic())
            row = await self._take_unless_paused(left)
            if row is not None:
                return row
            if deadline is not None and clock.monotonic() >= deadline:
                return None
        return None

    async def _take_unless_paused(self, left: float | None) -> ClaimedMessage | None:
        """None after `left` seconds, or when it was interrupted."""
        # It has no time of its own: `_interrupt` gives it one.
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                self._waiting.add(waiting)
                try:
                    if not self._resumed.is_set():
                        async with self._clock.callers.timeout(left):
                            await self._resumed.wait()
                        return None
                    return await self._claimer.take(self._wanted, left, self._taken)
                finally:
                    self._waiting.discard(waiting)
        except TimeoutError:
            return None

    async def _taken(self, row: ClaimedMessage) -> ClaimedMessage:
        row.holder = self._holder
        return row

    async def next(self) -> ClaimedMessage | None:
        """The first due message, for an iteration; None if the subscriber was stopped.

        While the database fails for a passing reason it is asked again, with growing pauses.

        Raises:
            StoreError: the database refused.
        """
        failures = 0
        outages = self._wakeups.outages
        while not self._stopped:
            try:
                row = await self.take(None)
            except TransientStoreError as error:
                failures += 1
                outages.failed(self, "claim of an iteration", error)
                await self._pause_after(failures)
            else:
                if failures:
                    outages.worked(self)
                if row is not None:
                    self._iterated[id(row)] = row
                return row
        return None

    async def _pause_after(self, failures: int) -> None:
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                self._waiting.add(waiting)
                try:
                    await self._clock.sleep(backoff(failures, self._clock))
                finally:
                    self._waiting.discard(waiting)
        except TimeoutError:
            return

    # -- holding -------------------------------------------------------------------------------

    def hold(self, message: Any, row: ClaimedMessage) -> None:
        """Renew the lease of `row` as long as `message` exists and is not settled."""
        place = id(row)
        held = self._held

        def dropped(_message: object) -> None:
            held.pop(place, None)

        held[place] = weakref.ref(message, dropped), row
        if self._stopped:
            return
        if self._loop is None:
            self._loop = Loop("lease renewal", self.tick, self._log, self._clock)
            self._loop.start(self._wakeups.outages)
        self._loop.wake()

    async def tick(self) -> float | None:
        """Renew what is due; seconds until the next is, None if nothing is held.

        Raises:
            StoreError: call again.
        """
        now = self._clock.monotonic()
        due = [r for _, r in self._held.values() if now >= r.renewed_monotonic + self._lease / 3]
        too_long = now + self._lease - self._longest
        for row in [row for row in due if row.claimed_monotonic < too_long]:
            self._held.pop(id(row), None)
            due.remove(row)
            self._log(
                logging.WARNING,
                f"message {row.id} of queue {row.queue!r} was not settled for so long that its "
                "lease is not renewed any more; it is delivered again when that has run out",
                message_id=row.id,
            )
        if due:
            held = await self._claimer.extend_all(due, self._lease)
            for row in due:
                if row.id not in held:
                    self._lose(row)
        rest = [row.renewed_monotonic + self._lease / 3 for _, row in self._held.values()]
        return max(0.01, min(rest) - self._clock.monotonic()) if rest else None

    def _lose(self, row: ClaimedMessage) -> None:
        if self._held.pop(id(row), None) is None:
            return  # settled in the meantime
        row.lose()
        text = f"lease lost: message {row.id} of queue {row.queue!r} may have another worker"
        self._log(logging.WARNING, text, message_id=row.id)

    async def _extend(self, rows: Sequence[ClaimedMessage], seconds: float) -> bool:
        held = await self._claimer.extend_all(rows, max(seconds, self._lease))
        return all(row.id in held for row in rows)

    # -- settling ------------------------------------------------------------------------------

    async def settle(self, row: ClaimedMessage) -> None:
        """Write what was recorded on `row`, even if the caller is cancelled.

        Raises:
            LeaseLostError: the lease is lost; nothing was written.
            UnknownOutcomeError: it may be written.
            StoreError: nothing was written.
        """
        ended_after = self._clock.monotonic() - row.claimed_monotonic
        written = settle(row, row.outcome, self._rules, ended_after=ended_after)
        if not await self._write(row, written):
            raise LeaseLostError(
                f"lease lost: message {row.id} of queue {row.queue!r} may have another worker, so "
                "nothing was written; release_stuck_timeout is the length of its lease"
            )

    async def give_back(self, row: ClaimedMessage) -> None:
        """Give `row` back, unless its outcome is being written.

        The delivery is charged, no attempt. A lost lease is no error.
        """
        is_held = id(row) in self._iterated or id(row) in self._held
        if not is_held or row.outcome is not None:
            return
        settlement = settle(row, Abandon(), self._rules, ended_after=0.0, attempted=False)
        await quietly(lambda: self._write(row, settlement))

    async def _write(self, row: ClaimedMessage, settlement: "Settlement") -> bool:
        writing = self._claimer.settle(settlement, None, row.queue)
        held = await self._claimer.shielded.run(writing)
        self._held.pop(id(row), None)
        self._iterated.pop(id(row), None)
        return held

    async def finish(self, message: Any, row: ClaimedMessage) -> None:
        """Ack the last message of an iteration, unless it is settled; again while the database
        fails for a passing reason.

        Raises:
            StoreError: the database refused.
        """
        failures = 0
        outages = self._wakeups.outages
        while id(row) in self._iterated and not self._stopped:
            try:
                await message.ack()
            except TransientStoreError as error:
                failures += 1
                outages.failed(self, "ack of an iteration", error)
                await self._pause_after(failures)
            except LeaseLostError as error:
                self._log(logging.WARNING, str(error), message_id=row.id)
                return
            else:
                if failures:
                    outages.worked(self)
                return
        await self.give_back(row)

    async def stop(self) -> None:
        """Take nothing more, give back what iterations hold, and renew no lease any more.

        A message of `get_one` stays leased until its lease ends; the application may still settle
        it.
        """
        self._stopped = True
        self._interrupt()
        loop, self._loop = self._loop, None
        if loop is not None:
            await loop.stop(STOP_LIMIT)
        for row in list(self._iterated.values()):
            await self.give_back(row)
        self._wakeups.outages.left(self)

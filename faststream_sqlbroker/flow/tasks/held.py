"""Messages that the application has leased by `reserve`, `get_one` or an iteration."""

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

from faststream_sqlbroker.core.outcome import Abandon, Outcome
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import settle
from faststream_sqlbroker.exceptions import LeaseLostError, StoreError
from faststream_sqlbroker.flow.loop import Log, Loop, Outages
from faststream_sqlbroker.flow.tasks.direct_claim import DirectClaimer, DirectClaimRequest

if TYPE_CHECKING:
    from faststream_sqlbroker.database.messages.single_claim import Replacement

STOP_LIMIT = 3.0
"""Maximum seconds that a stop waits for a running renewal, before it is cancelled."""


class HeldMessage:
    """A leased message, which is settled or released once.

    Every write names the lease, so it changes nothing once another worker has the message.

    Raises (from every operation that writes):
        LeaseLostError: the lease is lost; nothing was written.
        UnknownOutcomeError: the answer to the COMMIT was lost twice; the outcome may be written.
        StoreError: nothing was written.
    """

    def __init__(
        self, row: ClaimedMessage, request: DirectClaimRequest, claimer: DirectClaimer, hint: str
    ) -> None:
        """Hold `row`, which `claimer` has leased for `request`; `hint` says how to keep a lease."""
        self.row = row
        self.lease = request.lease
        self.outcome: Outcome | None = None
        """The outcome that was written."""
        self._rules = request.rules
        self._claimer = claimer
        self._hint = hint
        self._leased_until = row.renewed_monotonic + request.lease
        self._lock = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """True if the message can be settled, as far as is known."""
        return self.outcome is None and not self.row.lease_lost

    @property
    def is_settling(self) -> bool:
        """True while the outcome is being written."""
        return self._lock.locked()

    @property
    def is_leased(self) -> bool:
        """True if the lease still runs, by this process's clock; the database is not queried."""
        return self.is_open and self._claimer.clock.monotonic() < self._leased_until

    async def extend(self, seconds: float) -> None:
        """Extend the lease to `seconds` from now, never to an earlier time."""
        if self.row.lease_lost or not await self._claimer.extend([self.row], seconds):
            raise self._create_lost_error()
        self._leased_until = max(self._leased_until, self.row.renewed_monotonic + seconds)

    async def settle(
        self, outcome: Outcome, replaced: "Replacement | None" = None, error: str | None = None
    ) -> bool:
        """Write `outcome`, even if the caller is cancelled; return False if another was written
        before.

        A cut-off write would leave the outcome unknown. `replaced` is a new body; `error` is stored
        in `last_error`.
        """
        return await self._claimer.shielded.run(self._settle(outcome, replaced, error))

    async def _settle(
        self, outcome: Outcome, replaced: "Replacement | None", error: str | None
    ) -> bool:
        """Write `outcome` if the lease is held; return False if another was written before.

        The lock lets concurrent calls, such as an ack and the release at the end of a block, write
        one outcome only.
        """
        async with self._lock:
            row = self.row
            if row.lease_lost:
                raise self._create_lost_error()
            if self.outcome is not None:
                return False
            ended_after = self._claimer.clock.monotonic() - row.claimed_monotonic
            settlement = settle(row, outcome, self._rules, ended_after=ended_after)
            settlement.error = settlement.error if error is None else error
            if not await self._claimer.settle(settlement, replaced, row.queue):
                raise self._create_lost_error()
            self.outcome = outcome
            if isinstance(outcome, Abandon):
                # The message is given back. A later outcome must raise, not return False, which
                # would mean that the message was settled before.
                row.mark_lease_lost()
        return True

    async def release(self) -> None:
        """Release the message, unless the outcome is written or being written.

        Called at the end of a block that has not settled it. The delivery is counted, but no
        attempt, unless the retry strategy does not limit attempts. Errors are ignored: if the
        database fails, the lease expires.
        """
        if self.is_open and not self.is_settling:
            with suppress(StoreError, LeaseLostError):
                await self.settle(Abandon())

    def lose(self) -> str:
        """Mark the lease as lost; return a text for the log or the error that says so.

        A marked message is never renewed or settled again.
        """
        row = self.row
        row.mark_lease_lost()
        return f"lease lost: another worker may have message {row.id} of queue {row.queue!r}"

    def _create_lost_error(self) -> LeaseLostError:
        return LeaseLostError(f"{self.lose()}, so nothing was written; {self._hint}")


class LeaseRenewal:
    """Renews the leases of messages that the application has claimed and still refers to."""

    def __init__(
        self, claimer: DirectClaimer, outages: Outages, log: Log, lease: float, max_lease: float
    ) -> None:
        """Renew to `lease` seconds after each third of that, for up to `max_lease` seconds."""
        self._claimer = claimer
        self._outages = outages
        self._log = log
        self._lease = lease
        self._max_lease = max_lease
        self._messages: WeakSet[HeldMessage] = WeakSet()
        self._loop = Loop("lease renewal", self.tick, log, claimer.clock)

    def add(self, message: HeldMessage) -> None:
        """Renew `message` as long as it is referenced and not settled.

        The set is weak: a message that the application forgets without an outcome must come back
        when its lease expires.
        """
        self._messages.add(message)
        if not self._loop.is_running:
            self._loop.start(self._outages)
        self._loop.wake()

    async def tick(self) -> float | None:
        """Renew due leases; return the seconds until the next tick, or None if nothing is held.

        A lease is due after a third of its length. It is no longer renewed once it would last
        longer than `max_lease` since the claim: the application may be stuck.

        Raises:
            StoreError: call again.
        """
        now = self._claimer.clock.monotonic()
        third = self._lease / 3
        due = [
            message for message in self._list_open() if now >= message.row.renewed_monotonic + third
        ]
        for message in [
            message
            for message in due
            if message.row.claimed_monotonic < now + self._lease - self._max_lease
        ]:
            due.remove(message)
            self._messages.discard(message)
            text = (
                f"message {message.row.id} of queue {message.row.queue!r} has not been settled for "
                "so long that its lease is no longer renewed; it is delivered again when the lease "
                "expires"
            )
            self._log(logging.WARNING, text, message_id=message.row.id)
        if due:
            ids = await self._claimer.extend([message.row for message in due], self._lease)
            for message in due:
                if message.row.id not in ids and message.is_open and not message.is_settling:
                    self._log(logging.WARNING, message.lose(), message_id=message.row.id)
        return max(0.01, third / 4) if self._list_open() else None

    def _list_open(self) -> list[HeldMessage]:
        """Return the messages that are still referenced, not settled and not lost."""
        return [message for message in self._messages if message.is_open]

    async def stop(self) -> None:
        """Stop all renewals."""
        await self._loop.stop(STOP_LIMIT)

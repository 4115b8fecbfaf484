"""A message that the application holds, which `reserve`, `get_one` or an iteration has leased."""

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
    from faststream_sqlbroker.database.messages.direct_claim import Replaced

STOP_LIMIT = 3.0
"""Most seconds that a stop waits for a running renewal, before it is cancelled."""


class Held:
    """One message until it is settled or given back, which happens once.

    Every write names the lease, so it changes nothing once another worker has the message.

    Raises (from every operation that writes):
        LeaseLostError: the lease is lost; nothing was written.
        UnknownOutcomeError: the answer to the COMMIT was lost twice; it may be written.
        StoreError: nothing was written.
    """

    def __init__(
        self, row: ClaimedMessage, wanted: DirectClaimRequest, claimer: DirectClaimer, advice: str
    ) -> None:
        """`claimer` has leased `row` as `wanted`; `advice` says how to keep a lease."""
        self.row = row
        self.lease = wanted.lease
        self.ended: Outcome | None = None
        """What was written."""
        self._rules = wanted.rules
        self._claimer = claimer
        self._advice = advice
        self._until = row.renewed_monotonic + wanted.lease
        self._turn = asyncio.Lock()

    @property
    def open(self) -> bool:
        """Whether it can be settled, as far as is known."""
        return self.ended is None and not self.row.lease_lost

    @property
    def settling(self) -> bool:
        """Whether its outcome is being written."""
        return self._turn.locked()

    @property
    def leased(self) -> bool:
        """Whether the lease still runs, by this process's clock; the database is not asked."""
        return self.open and self._claimer.clock.monotonic() < self._until

    async def extend(self, seconds: float) -> None:
        """Let the lease end `seconds` from now, never sooner than it does."""
        if self.row.lease_lost or not await self._claimer.extend([self.row], seconds):
            raise self._lost()
        self._until = max(self._until, self.row.renewed_monotonic + seconds)

    async def settle(
        self, outcome: Outcome, replaced: "Replaced | None" = None, error: str | None = None
    ) -> bool:
        """Write `outcome`, even if the caller is cancelled; false if another was written before.

        `replaced` is a new body; `error` is stored in `last_error`.
        """
        return await self._claimer.shielded.run(self._settle(outcome, replaced, error))

    async def _settle(
        self, outcome: Outcome, replaced: "Replaced | None", error: str | None
    ) -> bool:
        async with self._turn:
            row = self.row
            if row.lease_lost:
                raise self._lost()
            if self.ended is not None:
                return False
            ended_after = self._claimer.clock.monotonic() - row.claimed_monotonic
            settlement = settle(row, outcome, self._rules, ended_after=ended_after)
            settlement.error = settlement.error if error is None else error
            if not await self._claimer.settle(settlement, replaced, row.queue):
                raise self._lost()
            self.ended = outcome
            if isinstance(outcome, Abandon):
                # The next outcome that is chosen must not seem to be written.
                row.lose()
        return True

    async def give_back(self) -> None:
        """Give it back, unless its outcome is written or being written.

        The delivery is charged, no attempt. If the database fails, the lease runs out.
        """
        if self.open and not self.settling:
            with suppress(StoreError, LeaseLostError):
                await self.settle(Abandon())

    def lose(self) -> str:
        """Note that its lease is lost; a text that says so."""
        row = self.row
        row.lose()
        return f"lease lost: message {row.id} of queue {row.queue!r} may have another worker"

    def _lost(self) -> LeaseLostError:
        return LeaseLostError(f"{self.lose()}, so nothing was written; {self._advice}")


class Renewal:
    """Renews the leases of messages that the application has pulled and still refers to."""

    def __init__(
        self, claimer: DirectClaimer, outages: Outages, log: Log, lease: float, longest: float
    ) -> None:
        """To `lease` seconds after each third of that, for up to `longest` seconds."""
        self._claimer = claimer
        self._outages = outages
        self._log = log
        self._lease = lease
        self._longest = longest
        self._all: WeakSet[Held] = WeakSet()
        self._loop = Loop("lease renewal", self.tick, log, claimer.clock)

    def add(self, held: Held) -> None:
        """Renew `held` as long as something refers to it and it is not settled."""
        self._all.add(held)
        if not self._loop.running:
            self._loop.start(self._outages)
        self._loop.wake()

    async def tick(self) -> float | None:
        """Renew what is due; seconds until the next look, None if nothing is held.

        Raises:
            StoreError: call again.
        """
        now = self._claimer.clock.monotonic()
        third = self._lease / 3
        due = [held for held in self._open() if now >= held.row.renewed_monotonic + third]
        for held in [h for h in due if h.row.claimed_monotonic < now + self._lease - self._longest]:
            due.remove(held)
            self._all.discard(held)
            text = (
                f"message {held.row.id} of queue {held.row.queue!r} was not settled for so long "
                "that its lease is not renewed any more; it is delivered again when that has run "
                "out"
            )
            self._log(logging.WARNING, text, message_id=held.row.id)
        if due:
            ids = await self._claimer.extend([held.row for held in due], self._lease)
            for held in due:
                if held.row.id not in ids and held.open and not held.settling:
                    self._log(logging.WARNING, held.lose(), message_id=held.row.id)
        return max(0.01, third / 4) if self._open() else None

    def _open(self) -> list[Held]:
        return [held for held in self._all if held.open]

    async def stop(self) -> None:
        """Renew nothing any more."""
        await self._loop.stop(STOP_LIMIT)

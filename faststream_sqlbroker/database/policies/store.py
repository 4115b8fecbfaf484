"""Claims under scheduling policies, and the keys of `Once`."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import mirror, once, policy_state
from faststream_sqlbroker.database.parts.live_subscribers import process_name
from faststream_sqlbroker.database.parts.policy_holds import Hold, read_holds
from faststream_sqlbroker.database.policies.claims import PolicyClaims
from faststream_sqlbroker.database.policies.read_time import ReadTime
from faststream_sqlbroker.database.policies.removed import Freeing, free, mend_clock_step, removed
from faststream_sqlbroker.database.policies.request import Claim, PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.database.policies.rows import Decided
from faststream_sqlbroker.database.policies.swaps import SwapClaim, looking, swaps
from faststream_sqlbroker.exceptions import StoreError, UnknownOutcomeError


class PolicyStore:
    """Reads and writes the state of policies; each operation is one transaction.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._claims = PolicyClaims(database.dialect, database.clock)

    def tell_decisions(self, decided: Decided) -> None:
        """Let `decided` be told of what claims decide."""
        self._claims.tell_decisions(decided)

    async def claim(
        self, wanted: PolicyClaimRequest, memory: ScanPosition
    ) -> tuple[Claim, ScanPosition]:
        """Lease the messages that the policies let start; and the position for the next claim."""
        began = self._database.clock.monotonic()
        if (swapped := await self._swapped(wanted, memory)) is not None:
            return swapped

        moved = memory

        def claim(connection: Connection) -> Claim:
            nonlocal moved
            # A copy: the transaction may be repeated, and must start at the same position.
            moved = memory.copy()
            return self._claims.claim(connection, wanted, moved)

        try:
            found = await self._database.run(claim, Activity.CONSUME, Activity.STATE)
        except (UnknownOutcomeError, asyncio.CancelledError):
            moved.use.told(moved.told)
            raise
        moved.use.told(moved.told)
        if found.read is not None:
            now = self._database.clock.monotonic()
            moved.note(now - found.read.asked, now - began)
        return found, moved

    async def _swapped(
        self, wanted: PolicyClaimRequest, memory: ScanPosition
    ) -> tuple[Claim, ScanPosition] | None:
        """`claim` without a lock; None: it needs one, and nothing was written."""
        look = looking(self._dialect, wanted) if swaps(wanted) else None
        if look is None:
            return None
        clock = self._database.clock
        asked = clock.monotonic()
        # The wait for a connection counts as time in which the clock may have been read.
        seen = await self._database.run(look, Activity.CONSUME, Activity.STATE, write=False)
        claim = SwapClaim(wanted, seen, ReadTime(seen.now, asked, clock.monotonic()), memory)
        if claim.needs_lock:
            return None
        moved = memory.copy()
        while (swap := claim.next_swap()) is not None:
            swapping = self._dialect.swapping(swap)
            try:
                found = await self._database.run(swapping, Activity.CONSUME, Activity.STATE)
            except asyncio.CancelledError:
                claim.unanswered()
                raise
            except StoreError as error:
                if isinstance(error, UnknownOutcomeError):
                    claim.unanswered()
                    raise
                if not claim.leased:
                    raise
                # Another queue's messages are leased already: no other claim would return them.
                claim.swapped(swap, None)
                break
            claim.swapped(swap, found)
            # One that came too late was quick: it says nothing of how long a slot needs.
            if found is not None:
                moved.note_swap(clock.monotonic() - asked)
        return claim.result(), moved

    async def claim_keys(
        self, rows: Sequence[ClaimedMessage], ttl: float
    ) -> dict[int, tuple[once.Verdict, int | None]]:
        """Claim the keys of `rows` for `ttl` seconds, before their handlers start.

        A repeat with the same leases changes nothing.

        Returns:
            By id, the verdict on each row and the id of the message that has its key.
        """
        table = self._dialect.tables.policy_state
        lock = self._dialect.lock
        return await self._database.run(
            lambda c: once.claim_keys(c, table, lock, rows, ttl, process_name()),
            Activity.CONSUME,
            Activity.STATE,
        )

    async def claim_free_keys(self, rows: Sequence[ClaimedMessage], ttl: float) -> set[int]:
        """Those of `rows` whose keys were free, and are claimed now; `claim_keys` says why not the
        others.

        None of them, and nothing is sent, where the database has no shorter way than `claim_keys`.
        """
        claiming = self._dialect.claiming_free_keys(rows, ttl, process_name())
        return (
            set()
            if claiming is None
            else await self._database.run(claiming, Activity.CONSUME, Activity.STATE)
        )

    async def forget_expired(self, limit: int) -> int:
        """Look at up to `limit` states that have expired, and remove those that nothing needs; at
        how many.
        """
        table = self._dialect.tables.policy_state
        # Mostly there are none, and a transaction that writes has statements of its own.
        if not await self._database.run(
            lambda c: policy_state.has_expired(c, table),
            Activity.CONSUME,
            Activity.STATE,
            write=False,
        ):
            return 0

        def work(connection: Connection) -> int:
            living = partial(mirror.keep_living, connection, self._dialect)
            return policy_state.forget_expired(connection, table, limit, living)

        return await self._database.run(work, Activity.CONSUME, Activity.STATE)

    async def holds(self, queues: Sequence[str]) -> list[Hold]:
        """What may have put messages of `queues` off."""
        table = self._dialect.tables.policy_state
        return await self._database.run(
            lambda c: read_holds(c, table, queues), Activity.CONSUME, Activity.STATE, write=False
        )

    async def removed(self, holds: Sequence[Hold]) -> list[Hold]:
        """Those of `holds` that no live subscriber has any more."""
        if not holds:
            return []
        return await self._database.run(
            partial(removed, self._dialect, holds), Activity.CONSUME, Activity.STATE, write=False
        )

    async def free_removed(self, hold: Hold) -> int | None:
        """Free what waits for a policy that is gone; how many messages. None: try again, as a claim
        of the queue runs.
        """
        found = await self._in_steps(partial(free, self._dialect, self._database.clock, hold))
        return None if found is None else found.freed

    async def mend_clock_step(self, queue: str) -> Freeing | None:
        """Set back what policies of `queue` have put off before the database's clock was. None: try
        again, as a claim of the queue runs.
        """
        mending = partial(mend_clock_step, self._dialect, self._database.clock, queue)
        return await self._in_steps(mending)

    async def _in_steps(self, step: Callable[[Freeing, Connection], Freeing]) -> Freeing | None:
        search = Freeing()
        while True:
            found = await self._database.run(
                partial(step, search), Activity.CONSUME, Activity.STATE
            )
            if found == search:
                return None
            if found.done:
                return found
            search = found

    async def give_back_keys(self, rows: Sequence[ClaimedMessage]) -> None:
        """Free the keys of `rows` that are still claimed by them."""
        table = self._dialect.tables.policy_state
        lock = self._dialect.lock
        await self._database.run(
            lambda c: once.give_back_keys(c, table, lock, rows), Activity.CONSUME, Activity.STATE
        )

"""One look for all subscribers of a process that wait for nothing but time.

Without it each of them would look every `max_fetch_interval`. The first whose time has come looks
at the queues of all that rest. The same statement finds when the first lease of any process ends,
so that the search for expired leases needs none of its own, and it carries the signs of life.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.orders import Orders
from faststream_sqlbroker.core.rows import Around, ReadyPairs
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.fleet.heartbeat import Heartbeat

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

MAX_SILENCE = 1.0
"""Longest pause of a subscriber that is told of messages, while something is due that it could not
claim: no wake-up says when it can.
"""
LONGEST_TRUST = 5.0
"""Seconds for which it is trusted that no other lease ends sooner than the first one found."""
LEASED_INTERVAL = 5.0
"""Seconds from one look to the next of a subscriber that is told, while there are leases: their
ends, and the end of what they keep back, are not told."""
TOLD_INTERVAL = 3600.0
"""Seconds from one look to the next of a subscriber that is told, while there are none."""
LONGEST_EXCUSE = 1.0
"""Most seconds for which a look that is under way is waited for."""
EXCUSED_WAIT = 0.05
"""Fewest seconds until it is asked again whether that look is still under way."""


class Resting(Protocol):
    """A subscriber that claims by looks."""

    @property
    def open(self) -> Sequence[str]:
        """The queues that it looks at."""

    @property
    def all_queues(self) -> Sequence[str]:
        """Its queues, also those that are paused."""

    @property
    def rests(self) -> bool:
        """Whether it waits for nothing but time, as long as it may."""

    @property
    def longest_rest(self) -> float:
        """Seconds from one look to the next."""

    @property
    def looked_at(self) -> float:
        """When its last look ended (monotonic seconds)."""

    def saw(self, found: ReadyPairs) -> None:
        """Another one's look has found this in its open queues."""


@dataclass(frozen=True, slots=True)
class Leases:
    """When the first lease in `queues` ends, as it was found `at` a time (monotonic seconds)."""

    at: float
    queues: frozenset[str]
    ends_in: float | None


class Lookout:
    """Looks for the subscribers of one broker in this process."""

    def __init__(
        self,
        store: "Store",
        clock: Clock,
        heartbeat: Heartbeat | None = None,
        *,
        is_told: Callable[[], bool] = lambda: False,
    ) -> None:
        """The `heartbeat` rides on looks; `is_told` says whether wake-ups of other processes
        arrive now.
        """
        self._store = store
        self._clock = clock
        self._heartbeat = heartbeat
        self._is_told = is_told
        self._members: dict[Resting, Callable[[], None]] = {}
        self._sharing: dict[Resting, Sequence[str]] = {}
        """For whom the look that is under way looks, and at which queues."""
        self._asked_at = float("-inf")
        self._leases = Leases(float("-inf"), frozenset(), None)

    def join(self, member: Resting, on_leases: Callable[[], None] = lambda: None) -> None:
        """`member` takes part in looks of others while it rests; `on_leases` is called when leases
        are found, and there were none before.
        """
        self._members[member] = on_leases

    def leave(self, member: Resting) -> None:
        """No longer."""
        self._members.pop(member, None)
        self._sharing.pop(member, None)

    def looks_for(self, member: Resting) -> bool:
        """Whether a look is under way whose result `member` will see; it need not look itself."""
        # One that hangs is not waited for: another connection may answer.
        excused = min(member.longest_rest, LONGEST_EXCUSE)
        recent = self._clock.monotonic() - self._asked_at < excused
        return recent and self._sharing.get(member) == member.open

    async def look(self, asking: Resting) -> ReadyPairs:
        """Look at the queues of `asking`, which rests, and of all others that rest.

        Raises:
            StoreError: as `Store.ready_pairs`; the others have seen nothing.
        """
        shares = {each: each.open for each in self._members if each.rests and each.open}
        shares[asking] = asking.open
        sharing = self._sharing = dict(shares)
        asked = self._asked_at = self._clock.monotonic()
        try:
            found = await self._ask(list(dict.fromkeys(chain.from_iterable(shares.values()))))
            for member, queues in shares.items():
                # What has been woken or reopened since looks for itself.
                is_same = member is not asking and sharing.get(member) == member.open
                if is_same and self._waits(member, asked):
                    member.saw(_part(found.pairs, queues, len(shares)))
        finally:
            if self._sharing is sharing:
                self._sharing = {}
        return _part(found.pairs, shares[asking], len(shares))

    def _waits(self, member: Resting, asked: float) -> bool:
        """Whether `member` waits for the answer to a look of the time `asked`."""
        # One that has looked since knows more: this look may miss a due time that nothing tells
        # again.
        return member in self._members and member.rests and member.looked_at <= asked

    def wait_when_told(self) -> float:
        """Seconds until the next look of a subscriber that is told, after one that has found
        nothing due.
        """
        if not self._is_told():
            return MAX_SILENCE
        return TOLD_INTERVAL if self._leases.ends_in is None else LEASED_INTERVAL

    async def lease_ends_in(self, queues: Sequence[str], *, told: bool = False) -> float | None:
        """Seconds until the first lease of any process ends, in `queues` or in others of this
        broker's; None without a lease. Known from the last look, unless that is old.

        A subscriber that is `told` looks again whenever there may be new leases.

        Raises:
            StoreError: as `Store.lease_ends_in`.
        """
        known = self._leases
        age = self._clock.monotonic() - known.at
        trust = TOLD_INTERVAL if told and known.ends_in is None else LONGEST_TRUST
        if age > trust or not known.queues >= set(queues):
            asked = self._clock.monotonic()
            leased = self._leased(queues)
            ends_in = await self._store.lease_ends_in(leased)
            known = Leases(asked, frozenset(leased), ends_in)
            self._note(known)
            age = self._clock.monotonic() - asked
        return None if known.ends_in is None else known.ends_in - age

    def released(self) -> None:
        """Leases have been given back: when the next one ends is not known."""
        self._leases = Leases(float("-inf"), frozenset(), None)

    def _leased(self, queues: Sequence[str] = ()) -> list[str]:
        ours = (queue for member in self._members for queue in member.all_queues)
        return list(dict.fromkeys((*queues, *ours)))

    async def _ask(self, queues: Sequence[str]) -> Around:
        asked = self._clock.monotonic()
        leased = self._leased(queues)
        found = await self._look_alive(queues, leased)
        if found is None:
            found = await self._store.look_around(queues, leased)
        self._note(Leases(asked, frozenset(leased), found.lease_ends_in))
        return found

    def _note(self, found: Leases) -> None:
        """Keep `found`, unless it is older than what is known."""
        known = self._leases
        # Of two questions the older may be answered last. It may have missed a lease that no
        # other look would find for an hour.
        if found.at < known.at:
            return
        self._leases = found
        if found.ends_in is not None and known.ends_in is None:
            for on_leases in self._members.values():
                on_leases()

    async def _look_alive(self, queues: Sequence[str], leased: Sequence[str]) -> Around | None:
        """Look with a sign of life, if it is time for one; None if it is not, or has failed."""
        if self._heartbeat is None:
            return None
        async with self._heartbeat.riding() as ride:
            if ride is None:
                return None
            try:
                found = await self._store.look_around(queues, leased, ride.sign)
            except StoreError:
                # Looks do not depend on signs of life, for which a right may be missing.
                ride.failed()
                return None
            ride.succeeded(found.orders or Orders())
            return found


def _part(found: ReadyPairs, queues: Sequence[str], among: int) -> ReadyPairs:
    """What `found` says of `queues`; of the server's time, each `among` so many takes a part."""
    wanted = set(queues)
    part = ReadyPairs(pair for pair in found if pair.queue in wanted)
    part.took = found.took / among
    part.at = found.at
    return part

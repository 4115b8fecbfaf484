"""Which (queue, priority) pairs to claim from, from which due time on, and whether a claim looks
first.

A look finds every pair that has rows and its first due time. Where another session holds a snapshot
for long (a backup, a report), PostgreSQL can remove no dead row, and a look crawls over all that
were ever claimed: 0.3 ms for a thousand of them, and so does each claim. While looks are slow,
claims therefore begin where the last one ended, a little before, and looks go on in the background:
for a twentieth of the time, but every ten seconds at least.
"""

from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import ClaimedMessage, ReadyPair, ReadyPairs
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.wakeup import ALL

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


class Mode(Enum):
    """Whether the next claim looks first; `TRANSITIONS` are the only ways from one to another."""

    START = "looks first: nothing is known yet but priority 0"
    LOOK = "looks first, whatever wakes it"
    IDLE = "looks first, unless a wake-up comes"
    GUESS = (
        "claims from the known pairs of the queues that a wake-up named, looks if it gets nothing"
    )
    FOLLOW = "claims from the pairs that the last look found, and looks when that is old"
    BLIND = "claims from all known pairs: looks are slow, and go on in the background"


class Event(Enum):
    """What leads from one mode to another."""

    WOKEN = "wake-up"
    CHANGED = "other queues are open"
    GUESSED = "the claim is sent"
    LOOKING = "a look is sent"
    FEWER = "fewer rows than asked for"
    QUICK = "a look was quick"
    SLOW = "a look was slow"
    UNANSWERED = "a look failed for a passing reason"
    BROKEN = "a look failed for another reason"


# A look is FOLLOW from the moment it is sent, so that what comes while it runs leads on.
TRANSITIONS: tuple[tuple[Mode, Event, Mode], ...] = (
    (Mode.START, Event.QUICK, Mode.FOLLOW),
    (Mode.START, Event.SLOW, Mode.BLIND),
    (Mode.LOOK, Event.LOOKING, Mode.FOLLOW),
    (Mode.IDLE, Event.LOOKING, Mode.FOLLOW),
    (Mode.IDLE, Event.WOKEN, Mode.GUESS),
    # Not twice without a look between: a pair that is not known may have a higher priority.
    (Mode.GUESS, Event.GUESSED, Mode.LOOK),
    (Mode.FOLLOW, Event.FEWER, Mode.IDLE),
    (Mode.FOLLOW, Event.WOKEN, Mode.GUESS),
    *((mode, Event.CHANGED, Mode.LOOK) for mode in (Mode.IDLE, Mode.GUESS, Mode.FOLLOW)),
    *((mode, Event.SLOW, Mode.BLIND) for mode in (Mode.LOOK, Mode.GUESS, Mode.FOLLOW)),
    *((mode, Event.UNANSWERED, Mode.BLIND) for mode in (Mode.LOOK, Mode.GUESS, Mode.FOLLOW)),
    *((mode, Event.BROKEN, Mode.LOOK) for mode in (Mode.GUESS, Mode.FOLLOW)),
    (Mode.BLIND, Event.QUICK, Mode.FOLLOW),
)
"""(from, event, to); any other event leaves the mode as it is. The diagram in
docs/explanation/fetching.md is generated from it."""

_NEXT = {(source, event): target for source, event, target in TRANSITIONS}


def after(mode: Mode, event: Event) -> Mode:
    """Where `event` leads from `mode`."""
    return _NEXT.get((mode, event), mode)


SCAN_INTERVAL = 1.0
"""Seconds for which known pairs are trusted under load."""
SLOW_LOOK = 0.005
"""Seconds of the server's time from which a look is slow, and for each queue so many more:"""
SLOW_LOOK_PER_QUEUE = 0.00005
"""Seconds that the look at one more queue may take."""
SLOW_SHARE = 20
"""A slow look is followed by this many times its length without one, but for no longer than
`LONGEST_SCAN_INTERVAL`."""
LONGEST_SCAN_INTERVAL = 10.0
"""Seconds; then there is a look, however slow: new priorities are found by it alone."""
LATE_COMMITS = timedelta(seconds=1)
"""Claims begin so much before the last claimed row: what is due earlier, and committed later, waits
for a look."""
MOST_PAIRS = 256
"""Known pairs that are kept, and those of four priorities of each queue."""

Pair = tuple[str, int]
Look = Callable[[], Awaitable[ReadyPairs]]


@dataclass(frozen=True, slots=True)
class Hint:
    """A wake-up that no claim has answered yet."""

    queues: frozenset[str]
    at: float
    """When the first of several came (monotonic seconds)."""


class Ready:
    """What is known of the pairs of one subscriber's queues, and whether that is enough for the
    next claim.
    """

    def __init__(
        self,
        store: "Store",
        queues: Sequence[str],
        clock: Clock | None = None,
        *,
        may_guess: bool = True,
    ) -> None:
        """Take every queue to have messages of priority 0; `may_guess` is false where each claim
        after a wake-up looks.
        """
        self._store = store
        self._queues = queues
        self._clock = clock or Clock()
        self._found = ReadyPairs()
        self._known: dict[Pair, None] = {(queue, 0): None for queue in queues}
        self._begin: dict[Pair, datetime] = {}
        self.looked_at = float("-inf")
        """When the last look ended (monotonic seconds)."""
        self._took = 0.0
        self._turn = 0
        self._restricted = 0
        self._hint: Hint | None = None
        self._on_wake_up = Event.WOKEN if may_guess else Event.CHANGED
        self.mode = Mode.START
        """What the next claim does."""

    @property
    def age(self) -> float:
        """Seconds since the last look."""
        return self._clock.monotonic() - self.looked_at

    def move(self, event: Event) -> None:
        """Go where `event` leads."""
        self.mode = after(self.mode, event)

    def woken(self, queues: frozenset[str]) -> None:
        """Something may have arrived in `queues`."""
        before = self._hint if self.mode is Mode.GUESS else None
        self.move(self._on_wake_up)
        if self.mode is not Mode.GUESS:
            return
        if before is None:
            self._hint = Hint(queues, self._clock.monotonic())
        else:
            every = not before.queues or not queues
            self._hint = Hint(ALL if every else before.queues | queues, before.at)

    def take_hint(self, oldest: float) -> frozenset[str] | None:
        """The queues of the wake-ups since the last claim, to be claimed from at once; None if the
        first came more than `oldest` seconds ago.
        """
        hint, self._hint = self._hint, None
        self.move(Event.GUESSED)
        if hint is None or self._clock.monotonic() - hint.at > oldest:
            return None
        return hint.queues

    def claimed_fewer(self) -> None:
        """A claim found fewer rows than it was to find."""
        self.move(Event.FEWER)

    @property
    def queues(self) -> Sequence[str]:
        """Those that are looked at."""
        return self._queues

    @property
    def nothing_due(self) -> bool:
        """Whether the last look, after the last claim, has found nothing that is due."""
        return self.mode is Mode.IDLE and all(pair.due_in > 0 for pair in self._found)

    def saw(self, found: ReadyPairs) -> None:
        """Another subscriber's look has just found this in `queues`."""
        self.move(Event.LOOKING)
        self.looked_at = self._clock.monotonic()
        self._learn(found, self._restricted)

    async def scan(self, look: Look | None = None) -> None:
        """Look at all queues, by `look` if it is given.

        Raises:
            StoreError: as `Store.ready_pairs`.
        """
        restricted = self._restricted
        self._learn(await self._ask(look), restricted)

    def _learn(self, found: ReadyPairs, restricted: int) -> None:
        self._found = found
        self._took = found.took
        same = restricted == self._restricted
        if not same:
            self._leave_out_others()
        slow = self._took > SLOW_LOOK + SLOW_LOOK_PER_QUEUE * len(self._queues)
        self.move(Event.SLOW if slow else Event.QUICK)
        for pair in self._found:
            self._remember((pair.queue, pair.priority))
        if slow and same:
            self._begin_after(found)
        else:
            self._begin.clear()

    async def _ask(self, look: Look | None) -> ReadyPairs:
        asked = self._clock.monotonic()
        self.move(Event.LOOKING)
        try:
            found = await (self._store.ready_pairs(self._queues) if look is None else look())
        except TransientStoreError:
            # Perhaps because it is slow. Claims go on without; the next look decides.
            self.looked_at = self._clock.monotonic()
            self._took = self.looked_at - asked
            hangs = self._took >= LONGEST_SCAN_INTERVAL
            self.move(Event.SLOW if hangs else Event.UNANSWERED)
            raise
        except BaseException:
            self.move(Event.BROKEN)
            raise
        self.looked_at = self._clock.monotonic()
        return found

    def _begin_after(self, found: ReadyPairs) -> None:
        """Let claims begin where the look has found the first row."""
        if (at := found.at) is None:
            return
        first = {(pair.queue, pair.priority): pair.due for pair in found}
        for pair in self._known:
            begin = min(first.get(pair) or at, at - LATE_COMMITS)
            self._begin[pair] = min(begin, self._begin.get(pair, begin))

    async def scan_in_background(self) -> float | None:
        """Look while claims do without, if it is time; seconds until the next one, None when it
        is not needed.

        Raises:
            StoreError: as `look`.
        """
        if self.mode is Mode.BLIND and self._until_look() <= 0:
            await self.scan()
        return max(0.0, self._until_look()) if self.mode is Mode.BLIND else None

    def scan_soon(self) -> None:
        """Rows that were due long ago may be claimable again."""
        self._took = 0.0

    def _until_look(self) -> float:
        return min(max(SCAN_INTERVAL, SLOW_SHARE * self._took), LONGEST_SCAN_INTERVAL) - self.age

    def due(self) -> list[ReadyPair]:
        """The pairs that had due rows when they were looked at, queues in turn."""
        return [pair for pair in self._in_turn(self._found) if pair.due_in <= 0]

    def known(self, queues: Container[str] | None = None) -> list[ReadyPair]:
        """All pairs (of `queues`) that ever had rows, as far as is remembered, queues in turn."""
        begin = self._begin.get
        asked = [pair for pair in self._known if queues is None or pair[0] in queues]
        return self._in_turn([ReadyPair(*pair, 0.0, since=begin(pair)) for pair in asked])

    def queues_in_turn(self) -> list[str]:
        """The queues, each time beginning with another."""
        self._turn = (self._turn + 1) % max(1, len(self._queues))
        return [*self._queues[self._turn :], *self._queues[: self._turn]]

    def next_due(self) -> list[float]:
        """In how many seconds rows become due that were not yet when they were looked at."""
        age = self.age
        waits = [pair.due_in - age for pair in self._found if pair.due_in > 0]
        # While looks are rare, what has become due since was there for the last claim.
        return (
            [wait for wait in waits if wait > 0]
            if self.mode is Mode.BLIND
            else [max(0.0, wait) for wait in waits]
        )

    def claimed(self, pairs: Sequence[ReadyPair], rows: Sequence[ClaimedMessage]) -> None:
        """`rows` were claimed from `pairs`, of each all that was due before the last of them."""
        if self.mode is not Mode.BLIND:
            return
        last = {(row.queue, row.priority): row for row in rows}
        for asked in pairs:
            pair = asked.queue, asked.priority
            # A look that has ended since the claim began may have found an earlier row.
            if pair in last and self._begin.get(pair) == asked.since:
                self._begin[pair] = last[pair].next_attempt_at - LATE_COMMITS

    def restrict(self, queues: Sequence[str]) -> None:
        """Only these of the subscriber's queues are claimed from now."""
        self._hint = None
        self.move(Event.CHANGED)
        known = {queue for queue, _ in self._known}
        self._queues, self._restricted = queues, self._restricted + 1
        self._known |= {(queue, 0): None for queue in queues if queue not in known}
        self._leave_out_others()

    def _leave_out_others(self) -> None:
        wanted = set(self._queues)
        self._found[:] = [pair for pair in self._found if pair.queue in wanted]
        self._known = {pair: None for pair in self._known if pair[0] in wanted}
        self._begin = {pair: begin for pair, begin in self._begin.items() if pair[0] in wanted}

    def begin_anew(self) -> None:
        """Rows with old due times were given back: let the next claim look at all."""
        self._begin.clear()

    def _remember(self, pair: Pair) -> None:
        self._known.pop(pair, None)
        self._known[pair] = None
        while len(self._known) > max(MOST_PAIRS, 4 * len(self._queues), len(self._found)):
            forgotten = next(iter(self._known))
            del self._known[forgotten]
            self._begin.pop(forgotten, None)

    def _in_turn(self, pairs: list[ReadyPair]) -> list[ReadyPair]:
        if len(self._queues) <= 1:
            return sorted(pairs, key=lambda p: -p.priority)
        self._turn = (self._turn + 1) % len(self._queues)
        rank = {q: (n - self._turn) % len(self._queues) for n, q in enumerate(self._queues)}
        return sorted(pairs, key=lambda p: (rank[p.queue], -p.priority))

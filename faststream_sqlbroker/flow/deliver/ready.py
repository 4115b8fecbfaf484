"""The (queue, priority) pairs to claim from, and whether a claim polls first.

A poll finds every pair that has rows and its first due time. Where another session holds a snapshot
for long (a backup, a report), PostgreSQL cannot remove dead rows, and a poll crawls over all rows
that were ever claimed: 0.3 ms for a thousand of them, and so does each claim. While polls are slow,
claims therefore begin where the last one ended, a little before, and polls go on in the background:
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
    """Mode of the next claim, which may poll first; `TRANSITIONS` lists all changes."""

    START = "polls first: only priority 0 is known so far"
    POLL = "polls first, whatever wakes it"
    IDLE = "polls first, unless a wake-up arrives"
    GUESS = "claims from the known pairs of the queues in a wake-up, polls if it gets no row"
    FOLLOW = "claims from the pairs that the last poll found, polls again when that is old"
    BLIND = "claims from all known pairs; polls are slow and run in the background"


class ModeEvent(Enum):
    """Event that changes the mode."""

    WOKEN = "wake-up"
    CHANGED = "other queues are open"
    GUESSED = "the claim is sent"
    POLLED = "a poll is sent"
    FEWER = "fewer rows than requested"
    QUICK = "a poll was quick"
    SLOW = "a poll was slow"
    UNANSWERED = "a poll failed for a transient reason"
    BROKEN = "a poll failed for another reason"


# The mode is FOLLOW from the moment a poll is sent, so that events during the poll count.
TRANSITIONS: tuple[tuple[Mode, ModeEvent, Mode], ...] = (
    (Mode.START, ModeEvent.QUICK, Mode.FOLLOW),
    (Mode.START, ModeEvent.SLOW, Mode.BLIND),
    (Mode.POLL, ModeEvent.POLLED, Mode.FOLLOW),
    (Mode.IDLE, ModeEvent.POLLED, Mode.FOLLOW),
    (Mode.IDLE, ModeEvent.WOKEN, Mode.GUESS),
    # Not twice without a poll in between: an unknown pair may have a higher priority.
    (Mode.GUESS, ModeEvent.GUESSED, Mode.POLL),
    (Mode.FOLLOW, ModeEvent.FEWER, Mode.IDLE),
    (Mode.FOLLOW, ModeEvent.WOKEN, Mode.GUESS),
    *((mode, ModeEvent.CHANGED, Mode.POLL) for mode in (Mode.IDLE, Mode.GUESS, Mode.FOLLOW)),
    *((mode, ModeEvent.SLOW, Mode.BLIND) for mode in (Mode.POLL, Mode.GUESS, Mode.FOLLOW)),
    *((mode, ModeEvent.UNANSWERED, Mode.BLIND) for mode in (Mode.POLL, Mode.GUESS, Mode.FOLLOW)),
    *((mode, ModeEvent.BROKEN, Mode.POLL) for mode in (Mode.GUESS, Mode.FOLLOW)),
    (Mode.BLIND, ModeEvent.QUICK, Mode.FOLLOW),
)
"""(from, event, to); any other event leaves the mode as it is. The diagram in
docs/explanation/fetching.md is generated from it.
"""

_NEXT = {(source, event): target for source, event, target in TRANSITIONS}


def get_next_mode(mode: Mode, event: ModeEvent) -> Mode:
    """Return the mode to which `event` leads from `mode`."""
    return _NEXT.get((mode, event), mode)


SCAN_INTERVAL = 1.0
"""Seconds for which known pairs are trusted under load."""
SLOW_POLL = 0.005
"""Seconds of server time above which a poll counts as slow, plus `SLOW_POLL_PER_QUEUE` for each
queue."""
SLOW_POLL_PER_QUEUE = 0.00005
"""Seconds that are added to `SLOW_POLL` for each queue."""
SLOW_SHARE = 20
"""Pause after a slow poll, as a multiple of its duration, up to `MAX_SCAN_INTERVAL`."""
MAX_SCAN_INTERVAL = 10.0
"""Maximum seconds between two polls, however slow: only a poll finds new priorities."""
LATE_COMMITS = timedelta(seconds=1)
"""Claims begin this long before the last claimed row. A row that is due earlier, and committed
later, waits for a poll.
"""
MAX_PAIRS = 256
"""Maximum number of known pairs, or four priorities of each queue if that is more."""

Pair = tuple[str, int]
Poll = Callable[[], Awaitable[ReadyPairs]]


@dataclass(frozen=True, slots=True)
class PendingHint:
    """A wake-up that no claim has answered yet."""

    queues: frozenset[str]
    at: float
    """Time when the first of several wake-ups came (monotonic seconds)."""


class ReadyTracker:
    """Known pairs of a subscriber's queues, and the mode of the next claim."""

    def __init__(
        self,
        store: "Store",
        queues: Sequence[str],
        clock: Clock | None = None,
        *,
        can_guess: bool = True,
    ) -> None:
        """Assume that every queue has messages of priority 0.

        `can_guess` is False where each claim after a wake-up polls.
        """
        self._store = store
        self._queues = queues
        self._clock = clock or Clock()
        self._polled_pairs = ReadyPairs()
        self._known_pairs: dict[Pair, None] = {(queue, 0): None for queue in queues}
        self._begin_at: dict[Pair, datetime] = {}
        self.polled_at = float("-inf")
        """Time when the last poll ended (monotonic seconds)."""
        self._poll_duration = 0.0
        self._scan_requested = False
        """True if no poll was sent since `scan_soon`."""
        self._turn = 0
        self._restriction_count = 0
        self._hint: PendingHint | None = None
        self._wake_up_event = ModeEvent.WOKEN if can_guess else ModeEvent.CHANGED
        self.mode = Mode.START
        """Mode of the next claim."""

    @property
    def age(self) -> float:
        """Seconds since the last poll."""
        return self._clock.monotonic() - self.polled_at

    def apply_event(self, event: ModeEvent) -> None:
        """Change the mode by `event`."""
        self.mode = get_next_mode(self.mode, event)

    def add_hint(self, queues: frozenset[str]) -> None:
        """Record a wake-up: messages may have arrived in `queues`.

        In mode GUESS the next claim tries these queues without a poll; wake-ups until then are
        merged, and count from the first. In any other mode the next claim looks at all queues.
        """
        previous = self._hint if self.mode is Mode.GUESS else None
        self.apply_event(self._wake_up_event)
        if self.mode is not Mode.GUESS:
            return
        if previous is None:
            self._hint = PendingHint(queues, self._clock.monotonic())
        else:
            is_all = not previous.queues or not queues  # `ALL` is empty
            self._hint = PendingHint(ALL if is_all else previous.queues | queues, previous.at)

    def take_hint(self, max_age: float) -> frozenset[str] | None:
        """Return and clear the queues of the wake-ups since the last claim.

        None if the first wake-up is older than `max_age` seconds, or if there was none. After this
        guess the next claim polls, because only a poll finds new priorities.
        """
        hint, self._hint = self._hint, None
        self.apply_event(ModeEvent.GUESSED)
        if hint is None or self._clock.monotonic() - hint.at > max_age:
            return None
        return hint.queues

    def record_fewer(self) -> None:
        """Record that a claim found fewer rows than requested.

        The pairs of the last poll are used up then, so the next claim polls first, unless a wake-up
        comes before.
        """
        self.apply_event(ModeEvent.FEWER)

    @property
    def queues(self) -> Sequence[str]:
        """Queues that are polled."""
        return self._queues

    @property
    def has_nothing_due(self) -> bool:
        """True if the last poll, after the last claim, found no due row."""
        return self.mode is Mode.IDLE and all(pair.due_in > 0 for pair in self._polled_pairs)

    def apply_poll_result(self, result: ReadyPairs) -> None:
        """Apply the result of another subscriber's poll, which has just covered `queues`.

        The next claim then needs no poll of its own.
        """
        self.apply_event(ModeEvent.POLLED)
        self.polled_at = self._clock.monotonic()
        self._update_pairs(result, self._restriction_count)

    async def scan(self, poll: Poll | None = None) -> None:
        """Poll all queues for pairs of queue and priority with rows; the result is stored.

        Call `poll` if given: it shares its result with other subscribers of the process.

        Raises:
            StoreError: as `Store.find_ready_pairs`.
        """
        restriction_count = self._restriction_count
        self._update_pairs(await self._query(poll), restriction_count)

    def _update_pairs(self, result: ReadyPairs, restriction_count: int) -> None:
        """Store the `result` of a poll, and choose the mode by the poll's duration.

        `restriction_count` counts changes of the open queues. If it is an old number, the poll was
        sent before such a change: pairs of closed queues are removed, and the poll does not set
        where claims begin to read.
        """
        self._polled_pairs = result
        self._poll_duration = result.duration
        is_current = restriction_count == self._restriction_count
        if not is_current:
            self._remove_other_pairs()
        is_slow = self._poll_duration > SLOW_POLL + SLOW_POLL_PER_QUEUE * len(self._queues)
        self.apply_event(ModeEvent.SLOW if is_slow else ModeEvent.QUICK)
        for pair in self._polled_pairs:
            self._add_known((pair.queue, pair.priority))
        if is_slow and is_current:
            self._set_begin(result)
        else:
            self._begin_at.clear()

    async def _query(self, poll: Poll | None) -> ReadyPairs:
        """Send a poll and record the time; a failure changes the mode, and is raised."""
        started_at = self._clock.monotonic()
        self._scan_requested = False
        # Before the poll: a wake-up that comes during the poll then changes the mode again.
        self.apply_event(ModeEvent.POLLED)
        try:
            result = await (self._store.find_ready_pairs(self._queues) if poll is None else poll())
        except TransientStoreError:
            # Perhaps the poll is slow. Claims go on without it; the next poll decides.
            self.polled_at = self._clock.monotonic()
            self._poll_duration = self.polled_at - started_at
            is_hanging = self._poll_duration >= MAX_SCAN_INTERVAL
            self.apply_event(ModeEvent.SLOW if is_hanging else ModeEvent.UNANSWERED)
            raise
        except BaseException:
            self.apply_event(ModeEvent.BROKEN)
            raise
        self.polled_at = self._clock.monotonic()
        return result

    def _set_begin(self, result: ReadyPairs) -> None:
        """Let claims of each pair begin at the first row that the poll has found.

        Without a row, claims begin a second before the poll, for rows that are committed late. So
        they skip the dead rows of earlier times, which make polls slow.
        """
        if (at := result.at) is None:
            return
        first = {(pair.queue, pair.priority): pair.due_at for pair in result}
        for pair in self._known_pairs:
            begin = min(first.get(pair) or at, at - LATE_COMMITS)
            # An earlier begin stays until a claim has read the rows after it.
            self._begin_at[pair] = min(begin, self._begin_at.get(pair, begin))

    async def scan_in_background(self) -> float | None:
        """Poll while claims do without, if a poll is due; return the seconds until the next poll.

        Claims do without in mode BLIND, because polls are slow. Otherwise claims poll themselves,
        and None is returned: no background poll is needed.

        Raises:
            StoreError: as `Store.find_ready_pairs`.
        """
        if self.mode is Mode.BLIND and self._get_poll_wait() <= 0:
            await self.scan()
        return max(0.0, self._get_poll_wait()) if self.mode is Mode.BLIND else None

    def scan_soon(self) -> None:
        """Let the next background poll come within a second: old rows may be claimable again.

        While polls are slow, claims begin at the last claimed row, so only a poll finds older rows.
        A poll in progress may miss them.
        """
        self._scan_requested = True

    def _get_poll_wait(self) -> float:
        """Return the seconds until the next background poll; a slow poll has a long pause.

        So polls keep the server busy for a twentieth of the time only. But the pause is limited,
        because only a poll finds new priorities.
        """
        pause = 0.0 if self._scan_requested else SLOW_SHARE * self._poll_duration
        return min(max(SCAN_INTERVAL, pause), MAX_SCAN_INTERVAL) - self.age

    def list_due(self) -> list[ReadyPair]:
        """Return the pairs of queue and priority that had due rows at the last poll.

        Each call begins with another queue, so that none is always last.
        """
        return [pair for pair in self._sort_in_turn(self._polled_pairs) if pair.due_in <= 0]

    def list_known(self, queues: Container[str] | None = None) -> list[ReadyPair]:
        """Return all known pairs of queue and priority, or only of `queues`, in rotation.

        A pair is known if it had rows at some poll, as is at first priority 0 of each queue; beyond
        the maximum the oldest are forgotten.
        """
        begin = self._begin_at.get
        pairs = [pair for pair in self._known_pairs if queues is None or pair[0] in queues]
        return self._sort_in_turn([ReadyPair(*pair, 0.0, since=begin(pair)) for pair in pairs])

    def rotate_queues(self) -> list[str]:
        """Return the queues, each time starting with another, so that none is always last."""
        self._turn = (self._turn + 1) % max(1, len(self._queues))
        return [*self._queues[self._turn :], *self._queues[: self._turn]]

    def list_next_due(self) -> list[float]:
        """Return the waits until rows become due that were not due at the last poll (seconds).

        The fetch loop wakes for the shortest wait.
        """
        poll_age = self.age
        waits = [pair.due_in - poll_age for pair in self._polled_pairs if pair.due_in > 0]
        # While polls are rare, rows that have become due since were there for the last claim.
        return (
            [wait for wait in waits if wait > 0]
            if self.mode is Mode.BLIND
            else [max(0.0, wait) for wait in waits]
        )

    def record_claimed(self, pairs: Sequence[ReadyPair], rows: Sequence[ClaimedMessage]) -> None:
        """Let the next claim of each pair begin a little before the last claimed row.

        Only in mode BLIND (polls are slow): a claim has taken all rows of a pair that were due
        before its last row, so the next one need not read over them again.
        """
        if self.mode is not Mode.BLIND:
            return
        last_rows = {(row.queue, row.priority): row for row in rows}
        for claimed_pair in pairs:
            pair = claimed_pair.queue, claimed_pair.priority
            # A poll that has ended since the claim was sent may have found an earlier row.
            if pair in last_rows and self._begin_at.get(pair) == claimed_pair.since:
                self._begin_at[pair] = last_rows[pair].next_attempt_at - LATE_COMMITS

    def set_queues(self, queues: Sequence[str]) -> None:
        """Set the queues from which the subscriber claims from now on.

        Called when the open queues change, for example by a pause, a drain or a hold. The next
        claim polls, except while polls are slow (BLIND). A higher count tells a poll in progress
        that its result is for other queues.
        """
        self._hint = None
        self.apply_event(ModeEvent.CHANGED)
        known_queues = {queue for queue, _ in self._known_pairs}
        self._queues, self._restriction_count = queues, self._restriction_count + 1
        self._known_pairs |= {(queue, 0): None for queue in queues if queue not in known_queues}
        self._remove_other_pairs()

    def _remove_other_pairs(self) -> None:
        """Forget the pairs of queues that are no longer open."""
        queues = set(self._queues)
        self._polled_pairs[:] = [pair for pair in self._polled_pairs if pair.queue in queues]
        self._known_pairs = {pair: None for pair in self._known_pairs if pair[0] in queues}
        self._begin_at = {
            pair: begin for pair, begin in self._begin_at.items() if pair[0] in queues
        }

    def reset_begin(self) -> None:
        """Let the next claim read from the beginning: rows with old due times were released."""
        self._begin_at.clear()

    def _add_known(self, pair: Pair) -> None:
        """Remember `pair` as the latest; forget the oldest pairs beyond the maximum.

        Claims without a poll name every known pair, and producers may use any number of priorities.
        """
        self._known_pairs.pop(pair, None)
        self._known_pairs[pair] = None
        while len(self._known_pairs) > max(
            MAX_PAIRS, 4 * len(self._queues), len(self._polled_pairs)
        ):
            forgotten = next(iter(self._known_pairs))
            del self._known_pairs[forgotten]
            self._begin_at.pop(forgotten, None)

    def _sort_in_turn(self, pairs: list[ReadyPair]) -> list[ReadyPair]:
        """Sort `pairs` by queue and descending priority; each call begins with the next queue.

        So no queue starves while others fill each claim.
        """
        if len(self._queues) <= 1:
            return sorted(pairs, key=lambda p: -p.priority)
        self._turn = (self._turn + 1) % len(self._queues)
        # The queue whose turn it is has rank 0.
        rank = {q: (n - self._turn) % len(self._queues) for n, q in enumerate(self._queues)}
        return sorted(pairs, key=lambda p: (rank[p.queue], -p.priority))

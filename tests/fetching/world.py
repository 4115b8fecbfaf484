"""A fetcher over a database in memory and a time of its own; what happens during a call, and how a
call ends, is said before it."""

import itertools
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.clock import Clock, RealTime
from faststream_sqlbroker.core.outcome import Ack, Defer, Release
from faststream_sqlbroker.core.rows import (
    ClaimedMessage,
    ClaimedMessages,
    PollResult,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.fetch import Fetcher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_writer import write_batch
from faststream_sqlbroker.flow.fleet.lookout import SharedPoller
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.flow.loop import FIRST_BACKOFF, LAST_BACKOFF
from faststream_sqlbroker.flow.wakeup import ALL
from faststream_sqlbroker.subscriber.options import make_settings

EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)
QUEUES = ("a", "b")
LONGEST = 1.0
"""`max_fetch_interval`."""
LEASE = 20.0
HANGS = 12.0
"""Seconds for which a call without an answer may last."""
MOST_AT_ONCE = 200
"""Ticks of one loop at one moment, after which it spins."""


@dataclass
class Row:
    """A message of the queue."""

    id: int
    queue: str
    priority: int
    due: float
    seen_from: float
    """When it was committed, or came back, or became due: from then on it may be claimed."""
    token: UUID | None = None


class World(RealTime):
    """Database, time, and one subscriber without workers: the model takes rows and ends them."""

    def __init__(self, queues: Any = QUEUES, **options: Any) -> None:
        self.now = 100.0
        self.told = options.get("max_fetch_interval", LONGEST) is None
        self.rows: dict[int, Row] = {}
        self.numbers = itertools.count(1)
        self.moods: dict[str, deque[str]] = defaultdict(deque)
        self.during_look: deque[Callable[[], None]] = deque()
        self.calls = 0
        self.closed: set[str] = set()
        self.running: list[ClaimedMessage] = []
        self.settings = make_settings(
            queues,
            {"max_fetch_interval": LONGEST, "max_deliveries": None, "max_workers": 2, **options},
        )
        self.member = Registration(
            self.settings, paused=False, on_change=self._reopened, clock=Clock(self)
        )
        self.held = Inflight(clock=Clock(self))
        store: Any = self
        lookout = SharedPoller(store, Clock(self), has_notifications=lambda: True)
        self.fetcher = Fetcher(store, self.held, self.settings, _quiet, self.member, poller=lookout)
        self.fetch_loop = Steps(self, self.fetcher.tick)
        self.scan_loop = Steps(self, self.fetcher.ready.scan_in_background)
        self.held.signals.capacity_free = self.fetch_loop.wake
        self.held.signals.scans_slow = self.scan_loop.wake
        self.member.start(pauses_known=True)

    # -- time ------------------------------------------------------------------------------------

    def monotonic(self) -> float:  # type: ignore[override]
        return self.now

    def advance(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Let time pass; `each` follows every tick."""
        until = self.now + seconds
        while (loop := min((self.fetch_loop, self.scan_loop), key=lambda one: one.at)).at <= until:
            self.now = max(self.now, loop.at)
            loop.step()
            each()
        self.now = until

    # -- what happens ------------------------------------------------------------------------------

    def put(self, queue: str, priority: int, due_in: float, *, ago: float = 0.0) -> Row:
        """Another session commits a row; only a trigger tells of it."""
        row = Row(
            next(self.numbers), queue, priority, self.now + due_in - ago, self.now + max(0, due_in)
        )
        self.rows[row.id] = row
        self._trigger(queue)
        return row

    def _trigger(self, queue: str) -> None:
        if self.told:
            self.hint(frozenset((queue,)))

    def hint(self, queues: frozenset[str] = ALL) -> None:
        """As `Consumer._on_hint`."""
        self.fetcher.on_hint(queues)
        self.fetch_loop.wake()

    def close(self, queues: set[str]) -> None:
        """These are paused from now, and no others."""
        self.closed = queues
        self.member.update_paused(frozenset(queues))

    def _reopened(self) -> None:
        if hasattr(self, "fetcher"):
            self.fetcher.on_queues_changed()
            self.fetcher.ready.scan_soon()
            self.scan_loop.wake()
            self.hint()

    def take(self) -> None:
        """A free worker takes what waits first."""
        if len(self.running) < self.settings.max_workers and not self.held.waiting.empty():
            row = self.held.waiting.get_nowait()
            assert row is not None
            self.running.append(row)
            self.held.busy += 1
            if self.held.waiting.qsize() <= self.held.low_water:
                self.held.on_capacity()

    def end(self, outcome: Any) -> None:
        """The handler that began first ends."""
        if not self.running:
            return
        row = self.running.pop(0)
        self.held.busy -= 1
        self.held.times.record_end(self.now - 0.001, self.now)
        attempted = not isinstance(outcome, Release)
        rules = SettleRules(retain_on_ack=False)
        self.held.queue_outcome(settle(row, outcome, rules, ended_after=0.0, attempted=attempted))
        self.held.on_capacity()

    def flush(self) -> None:
        """Write all outcomes."""
        while self.held.queued:
            batch = self.held.start_batch(100)
            store: Any = self
            run(write_batch(store, self.held, batch, skip_locked=False))
        self.held.on_capacity()

    def work(self) -> None:
        """Workers take all and ack it."""
        while self.running or not self.held.waiting.empty():
            self.take()
            self.end(Ack())
        self.flush()

    # -- the store ---------------------------------------------------------------------------------

    def _mood(self, call: str) -> str:
        self.calls += 1
        return self.moods[call].popleft() if self.moods[call] else "fine"

    def _happen(self) -> None:
        if self.during_look:
            self.during_look.popleft()()

    def _open(self, row: Row) -> bool:
        return row.token is None

    async def find_ready_pairs(self, queues: Sequence[str]) -> ReadyPairs:
        mood = self._mood("look")
        queues = tuple(queues)
        if mood == "hangs":
            self.now += HANGS
        if mood in {"fails", "hangs"}:
            raise TransientStoreError("down")
        if mood == "broken":
            raise StoreError("refused")
        first: dict[tuple[str, int], float] = {}
        for row in self.rows.values():
            if row.queue in queues and self._open(row):
                pair = row.queue, row.priority
                first[pair] = min(first.get(pair, row.due), row.due)
        found = ReadyPairs(
            ReadyPair(*pair, round(due - self.now, 6), self._time(due))
            for pair, due in first.items()
        )
        found.at = self._time(self.now)
        found.duration = 0.02 if mood == "slow" else 0.0
        self._happen()
        return found

    async def poll_all(
        self, queues: Sequence[str], _leased: Sequence[str], _sign: Any = None
    ) -> PollResult:
        leased = any(row.token is not None for row in self.rows.values())
        return PollResult(await self.find_ready_pairs(queues), LEASE if leased else None)

    async def claim(
        self, pairs: Sequence[ReadyPair], limit: int, _lease: float, token: UUID, **_: Any
    ) -> ClaimedMessages:
        mood = self._mood("claim")
        if mood == "fails":
            raise TransientStoreError("down")
        found = list[Row]()
        for pair in pairs:
            since = pair.since or EPOCH
            due = [
                row
                for row in self.rows.values()
                if (row.queue, row.priority) == (pair.queue, pair.priority)
                and self._open(row)
                and since <= self._time(row.due)
                and round(row.due - self.now, 6) <= 0  # as exact as the databases
            ]
            found += sorted(due, key=lambda row: (row.due, row.id))
        if mood != "unknown, not committed":
            for row in found[:limit]:
                row.token = token
        if mood.startswith("unknown"):
            raise UnknownOutcomeError("no answer")
        self._happen()
        return ClaimedMessages(self._message(row) for row in found[:limit])

    async def release_claim(self, _queues: Sequence[str], token: UUID) -> None:
        for row in self.rows.values():
            if row.token == token:
                row.token = None
                row.seen_from = self.now
                self._trigger(row.queue)

    async def settle(self, parts: Sequence[Settlement], **_: Any) -> SettleResult:
        for part in parts:
            row = self.rows[part.id]
            assert row.token == part.lease_token
            row.token = None
            if part.is_final:
                del self.rows[part.id]
                continue
            if part.delay is not None:
                row.due = self.now + part.delay
            row.seen_from = max(self.now, row.due)
            self._trigger(row.queue)
        return SettleResult({part.id for part in parts}, set())

    def _message(self, row: Row) -> ClaimedMessage:
        assert row.token is not None
        made, due, now = EPOCH, self._time(row.due), self._time(self.now)
        return ClaimedMessage(
            row.id, row.queue, b"", {}, row.priority, None, 0, 1, 1, made, due, None, None, None,
            now, row.token,
        )  # fmt: skip

    def _time(self, seconds: float) -> datetime:
        return EPOCH + timedelta(seconds=seconds)


class Steps:
    """A `Loop` that runs when its time has come."""

    def __init__(self, world: World, tick: Callable[[], Awaitable[float | None]]) -> None:
        self._world = world
        self._tick = tick
        self._next = 0.0
        self._backs_off = False
        self._woken = False
        self._failures = 0
        self._spun = (0.0, 0)

    @property
    def at(self) -> float:
        """When the next tick comes."""
        return self._world.now if self._woken and not self._backs_off else self._next

    def wake(self) -> None:
        """As `Loop.wake`."""
        self._woken = True

    def step(self) -> None:
        """As `Loop._run`: a wake-up does not cut a back-off short."""
        now = self._world.now
        self._spun = (now, self._spun[1] + 1 if self._spun[0] == now else 1)
        assert self._spun[1] < MOST_AT_ONCE, "the loop spins"
        self._woken = False
        self._backs_off = False
        try:
            wait = run(self._tick())
        except StoreError:
            self._failures += 1
            self._backs_off = True
            wait = min(LAST_BACKOFF, FIRST_BACKOFF * 2**self._failures)
        else:
            self._failures = 0
        # Real time goes on even in the shortest pause.
        shortest = 1e-6 if wait else 0.0
        self._next = float("inf") if wait is None else self._world.now + max(wait, shortest)


OUTCOMES = {"ack": Ack(), "postpone": Defer(2.0), "give back": Release()}


def run(work: Awaitable[Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    assert isinstance(work, Coroutine)
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def _quiet(*_: Any, **__: Any) -> None:
    """A log that is not read."""

"""Processes that share a Throttle's slots over a slow or disturbed way to the database, in virtual
time: what they decide is the product's, what comes between is drawn.
"""

import heapq
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from docs.examples.emails.proof import most_within
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.database.policies.slot_use import ReadTime, SlotUse
from faststream_sqlbroker.database.policies.slots import QueueSlots

SECOND = 1_000_000
START = 1_000_000.0
"""Seconds of the database's clock when the world begins."""


@dataclass(frozen=True)
class Disturbance:
    """What happens to a process."""

    statement: tuple[float, float] = (0.001, 0.002)
    """Seconds of a statement there and back, from … to."""
    blocked: tuple[float, float] | None = None
    """Every so many seconds the event loop stands still for so many."""
    kill_every: float | None = None
    skew: float = 0.0
    """How much faster a process's clock is than the database's."""


class States:
    """A row of the policy state, as one claim read it."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known
        self.kept: dict[str, Any] = {}

    def load_states(self, scope: str, keys: Iterable[str]) -> dict[str, Any]:
        return {key: self._known[scope] for key in keys if scope in self._known}

    def save_states(self, scope: str, states: Mapping[str, tuple[Any, int]]) -> None:
        for info, _ in states.values():
            self.kept[scope] = json.loads(json.dumps(info))


class World:
    """Messages without end, the row, and what happens when."""

    def __init__(
        self, throttles: list[Throttle], disturbance: Disturbance, seed: int, processes: int = 3
    ) -> None:
        self.throttles = throttles
        self.disturbance = disturbance
        self.random = random.Random(seed)
        self.now = 0.0
        self.version = 0
        self.row: dict[str, Any] = {}
        self.starts: list[int] = []
        """By the database's clock: microseconds."""
        self.missed = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._processes = [SimulatedProcess(self) for _ in range(processes)]
        if disturbance.kill_every:
            self.at(disturbance.kill_every, self._kill)

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), do))

    def run(self, seconds: float) -> None:
        while self._events[0][0] < seconds:
            self.now, _, do = heapq.heappop(self._events)
            do()

    def clock(self) -> int:
        """The database's."""
        return round((START + self.now) * SECOND)

    def most(self, per: int) -> int:
        """The most starts within `per`, its end excluded."""
        return most_within(sorted(self.starts), per)

    def _kill(self) -> None:
        number = self.random.randrange(len(self._processes))
        self._processes[number].dead = True
        self._processes[number] = SimulatedProcess(self)
        self.at(self.now + (self.disturbance.kill_every or 0.0), self._kill)


class SimulatedProcess:
    """Claims, waits for slots and starts handlers, each after what disturbs it."""

    def __init__(self, world: World, workers: int = 4) -> None:
        self.world = world
        self.dead = False
        self.free = self.workers = workers
        self._phase = world.random.random() * 1.3
        self._rate = 1 + world.random.uniform(-1, 1) * world.disturbance.skew
        clock = Clock()
        clock.monotonic = lambda: self.monotonic
        self.memory = ScanPosition(slot_use=SlotUse(clock))
        self.memory.intake.rates.read_at = float("inf")
        self._later(world.now + world.random.random() * 0.2, self._look)

    @property
    def monotonic(self) -> float:
        """The process's own clock."""
        return 77.0 + self.world.now * self._rate

    def _later(self, when: float, do: Callable[[], None]) -> None:
        """Do it `when`, or as soon as the event loop goes on."""

        def go() -> None:
            if self.dead:
                return
            if (blocked := self.world.disturbance.blocked) is not None:
                every, length = blocked
                left = length - (self.world.now - self._phase) % every
                if left > 1e-9:
                    self.world.at(self.world.now + left, go)
                    return
            do()

        self.world.at(when, go)

    def _ask(self, at_database: Callable[[], Any], answered: Callable[[Any], None]) -> None:
        there, back = (
            self.world.random.uniform(*self.world.disturbance.statement) / 2 for _ in "ab"
        )

        def execute() -> None:
            answer = at_database()
            self._later(self.world.now + back, lambda: answered(answer))

        self.world.at(self.world.now + there, execute)

    def _look(self) -> None:
        if self.free < 1:
            self._later(self.world.now + 0.01, self._look)
            return
        asked = self.monotonic
        world = self.world
        self._ask(
            lambda: (world.clock(), world.version, dict(world.row)),
            lambda answer: self._decide(asked, *answer),
        )

    def _decide(self, asked: float, now: int, version: int, row: dict[str, Any]) -> None:
        wanted = PolicyClaimRequest(
            ["q"], self.free, 60.0, uuid4(), self.world.throttles, starting=self.free
        )
        states = States(row)
        told: dict[tuple[str, str], int] = {}
        read = ReadTime(now, asked, self.monotonic)
        slots = QueueSlots(states, "q", read, wanted, self.memory, told, self.memory.swap_durations)
        granted = slots.grant_slots(self.free, self.free)
        wrote = slots.store_slots(granted)
        look = slots.find_next_scan(granted)
        wait = 0.02 if look is None else max(0.001, (look - now) / SECOND)
        if not wrote:
            self._later(self.world.now + wait, self._look)
            return

        def swap() -> bool:
            if self.world.version != version:
                return False
            self.world.version += 1
            self.world.row |= states.kept
            return True

        def answered(done: bool) -> None:
            if not done:
                self._later(self.world.now + self.world.random.uniform(0, 0.02), self._look)
                return
            self.memory.slot_use.discard_reported(told)
            self.memory.record_swap(self.monotonic - asked)
            rows: list[Any] = [
                SimpleNamespace(id=n, queue="q", slot=None, slot_started=None, report_slot=False)
                for n in range(granted)
            ]
            slots.assign_slots(rows)
            for each in rows:
                self.free -= 1
                wait_for = (each.slot.earliest - self.monotonic) / self._rate
                self._later(self.world.now + wait_for, lambda row=each: self._start(row))  # type: ignore[misc]
            self._later(self.world.now + wait, self._look)

        self._ask(swap, answered)

    def _start(self, row: Any) -> None:
        if not self.memory.slot_use.start(row):
            self.world.missed += 1
            self.free += 1
            return
        self.world.starts.append(self.world.clock())
        self._later(self.world.now + 0.02, self._end)

    def _end(self) -> None:
        self.free += 1

"""The slots of a throttle that keeps messages waiting: those of its queue, or of its scope.

Times are microseconds since 1970.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.live_rates import LiveRates, Place
from faststream_sqlbroker.core.policies.slot_log import SlotLog
from faststream_sqlbroker.core.policies.throttle import (
    dump_slots,
    forget_after,
    load_slots,
    mend_clock,
)
from faststream_sqlbroker.database.policies.slot_use import SlotUse

SHARED_SLOTS = "shared_slots"
"""Scope of the policy state; the key is the name of the budget."""


class States(Protocol):
    """What is stored by (scope, key), in the middle of a claim."""

    def states(self, scope: str, keys: Iterable[str]) -> dict[str, Any]:
        """What is stored under `scope` for each of `keys`."""

    def keep(self, scope: str, states: Mapping[str, tuple[Any, int]]) -> None:
        """Store what is known of each key, and when it may be forgotten."""


class SlotLogs:
    """What is known of slots in one claim, with what this process tells of those that it had."""

    def __init__(
        self, use: SlotUse, rates: LiveRates, now: int, told: dict[Place, int], late: int
    ) -> None:
        """Nothing is known yet; `now` is when the claim read the clock, and its answer may come
        `late` for the first slots (microseconds).

        By place, `told` gets how much of what `use` has to tell is stored by this claim.
        """
        self.use = use
        self.now = now
        self.patience = use.patience(late)
        """How much later than its slot a start may be (microseconds)."""
        self.changed: set[Place] = set()
        """Where something is to be told."""
        self._rates = rates
        self._reported: dict[Place, int] = {}
        self._told = told

    def load(self, policy: Throttle, place: Place, info: Any) -> SlotLog:
        """What is stored at `place`, and what has become of this process's slots since."""
        log = load_slots(policy, info)
        shared = (place[0], "") if policy.key else place
        log.others = self._rates.others(shared, log.others, self.now)
        if back := mend_clock(log, self.now):
            self.use.steps.append((place, back))
            self.changed.add(place)
        # Several queues of one claim may share the place: what was told is in the log.
        if place not in self._told and (count := self.use.report(place, policy, log)):
            self._reported[place] = count
            self.changed.add(place)
        return log

    def dump(self, policy: Throttle, place: Place, log: SlotLog) -> tuple[dict[str, Any], int]:
        """What this claim stores at `place`, and when it may be forgotten."""
        if place in self._reported:
            self._told[place] = self._reported[place]
        info = dump_slots(policy, log, self.now, self.use.worst_lag)
        return info, forget_after(policy, log, self.now)


@dataclass
class Gate:
    """One throttle, and where its slots are stored."""

    policy: Throttle
    place: Place

    def read(self, states: States, logs: SlotLogs) -> SlotLog:
        """From what no other claim changes before this one is written."""
        scope, key = self.place
        return logs.load(self.policy, self.place, states.states(scope, [key]).get(key))

    def keep(self, states: States, logs: SlotLogs, log: SlotLog) -> None:
        """Store `log`."""
        scope, key = self.place
        states.keep(scope, {key: logs.dump(self.policy, self.place, log)})


def gate_of(policy: Throttle, own_scope: str) -> Gate:
    """The gate of `policy`; its state is stored under `own_scope` unless it has a scope itself."""
    return Gate(policy, (own_scope, "") if policy.scope is None else (SHARED_SLOTS, policy.scope))

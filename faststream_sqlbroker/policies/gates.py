"""The slots of a throttle that keeps messages waiting: those of its queue, or of its scope.

Times are microseconds since 1970.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.live_rates import LiveRates
from faststream_sqlbroker.core.policies.slot_log import SlotLog
from faststream_sqlbroker.core.policies.throttle import kept_slots, load_slots

SHARED_SLOTS = "shared_slots"
"""Scope of the policy state; the key is the name of the budget."""


class States(Protocol):
    """What is stored by (scope, key), in the middle of a claim."""

    def states(self, scope: str, keys: Iterable[str]) -> dict[str, Any]:
        """What is stored under `scope` for each of `keys`."""

    def keep(self, scope: str, states: Mapping[str, tuple[Any, int]]) -> None:
        """Store what is known of each key, and when it may be forgotten."""


@dataclass
class Gate:
    """One throttle, and where its slots are stored."""

    policy: Throttle
    scope: str
    key: str = ""
    log: SlotLog = field(default_factory=SlotLog)
    """The slots granted so far, and the options of others that take some."""

    def read(self, states: States, rates: LiveRates, now: int) -> "Gate":
        """From what no other claim changes before this one is written."""
        info = states.states(self.scope, [self.key]).get(self.key)
        self.log = load_slots(info)
        self.log.others = rates.others((self.scope, self.key), self.log.others, now)
        return self

    def keep(self, states: States, granted: Sequence[int]) -> None:
        """Store the slots `granted` by this claim."""
        if granted:
            taken = self.log.copy().add(granted)
            states.keep(self.scope, kept_slots(self.policy, {self.key: taken}))


def gate_of(policy: Throttle, own_scope: str) -> Gate:
    """The gate of `policy`; its state is stored under `own_scope` unless it has a scope itself."""
    if policy.scope is None:
        return Gate(policy, own_scope)
    return Gate(policy, SHARED_SLOTS, policy.scope)

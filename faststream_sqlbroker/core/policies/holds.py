"""Policies that postpone messages by a later due time, and the release after their removal.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.basic import Delay
from faststream_sqlbroker.core.policies.combinations import Policy
from faststream_sqlbroker.core.policies.debounce import Debounce
from faststream_sqlbroker.core.policies.flags import HELD_BURST, HELD_DELAY, POSTPONED
from faststream_sqlbroker.core.policies.keep_last import KeepLast
from faststream_sqlbroker.core.policies.throttle import Throttle

BURSTS = "bursts"
SLOTS = "slots"


def build_holds(policies: Iterable[Policy]) -> dict[str, dict[str, Any]]:
    """Return the postponing policies by name, with the data needed after their removal.

    Messages that a policy has postponed would wait on when no subscriber has the policy any more.
    These notes let the broker find and release them.
    """
    holds: dict[str, dict[str, Any]] = {}
    for policy in policies:
        if isinstance(policy, Delay):
            holds[str(policy)] = {"length": policy.delay}
        elif isinstance(policy, Debounce | KeepLast):
            holds[BURSTS] = {"length": policy.window}
        elif isinstance(policy, Throttle) and policy.when_exceeded != "wait":
            holds[SLOTS] = {}
    return holds


def get_hold_flag(name: str) -> int:
    """Return the flag of the messages postponed by the policy `name`."""
    return {BURSTS: HELD_BURST, SLOTS: POSTPONED}.get(name, HELD_DELAY)


def compute_release_time(
    name: str, info: Mapping[str, Any], live: Iterable[Policy], due: int, now: int
) -> int | None:
    """Return the new due time of a message after the removal of the postponing policy.

    That is now, or None if the due time stays. If the removed policy is a Delay and another Delay
    is among `live`, the shorter of both delays applies: `due` less the old length is when the
    message arrived.
    """
    lengths = [policy.delay for policy in live if isinstance(policy, Delay)]
    if get_hold_flag(name) != HELD_DELAY or not lengths:
        return now
    max_length = max(lengths) + MICROSECONDS
    if due <= now + max_length:
        return None  # the other Delay may have postponed it
    return max(now, due - int(info.get("length", 0)) + max_length)

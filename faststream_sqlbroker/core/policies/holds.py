"""What puts messages off by giving them a later due time, and what becomes of them when it is gone.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from faststream_sqlbroker.core.policies.basic import Delay
from faststream_sqlbroker.core.policies.checks import Policy
from faststream_sqlbroker.core.policies.debounce import Debounce
from faststream_sqlbroker.core.policies.flags import HELD_BURST, HELD_DELAY, PUT_OFF
from faststream_sqlbroker.core.policies.keep_last import KeepLast
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.throttle import Throttle

BURSTS = "bursts"
SLOTS = "slots"


def holds_of(policies: Iterable[Policy]) -> dict[str, dict[str, Any]]:
    """What may put messages off, by name, and what must be known of it afterwards."""
    found: dict[str, dict[str, Any]] = {}
    for policy in policies:
        if isinstance(policy, Delay):
            found[str(policy)] = {"length": policy.delay}
        elif isinstance(policy, Debounce | KeepLast):
            found[BURSTS] = {"length": policy.window}
        elif isinstance(policy, Throttle) and policy.when_exceeded != "wait":
            found[SLOTS] = {}
    return found


def mark_of(name: str) -> int:
    """The mark of messages that it has put off."""
    return {BURSTS: HELD_BURST, SLOTS: PUT_OFF}.get(name, HELD_DELAY)


def freed_at(
    name: str, info: Mapping[str, Any], live: Iterable[Policy], due: int, now: int
) -> int | None:
    """When a message that `name` has put off until `due` is due, now that it is gone; None: as it
    is.

    Of another Delay among `live`, the shorter of both holds.
    """
    lengths = [policy.delay for policy in live if isinstance(policy, Delay)]
    if mark_of(name) != HELD_DELAY or not lengths:
        return now
    longest = max(lengths) + MICROSECONDS
    if due <= now + longest:
        return None  # the other one may have put it off
    return max(now, due - int(info.get("length", 0)) + longest)

"""Standby messages: another message of the same key is to be delivered in their place.

They stay in the queue until this message has started, so that one of them can take its
place if it expires, is cancelled or is moved. Until then their due time is `STANDBY` later than
it would be. Therefore they do not count as waiting, and no other claim finds them.
"""

from collections.abc import Iterable, Sequence

from faststream_sqlbroker.core.policies.flags import HELD_BURST

STANDBY_SECONDS = 220_898_707_200
"""From 1970 to 8970: later than any delay may end (`core.times.MAX_SECONDS`)."""
STANDBY = STANDBY_SECONDS * 1_000_000
"""The same in microseconds."""
MIN_STANDBY_RECHECK = 2 * 1_000_000
"""Minimum time between two checks of a standby message whose target is overdue (microseconds)."""
MAX_STANDBY_RECHECK = 300 * 1_000_000
"""Maximum time between two such checks. In between it equals the time that the target has been
overdue, so that many standby messages do not fill every claim."""
MAX_STANDBY_CHECK_DELAY = 3600 * 1_000_000
"""Maximum time until the check if the target is not due yet: an operator may postpone the target
for years."""


def has_standby_flags(due: int, flags: int) -> bool:
    """Return True if a message with this due time (microseconds) and flags is on standby."""
    return due >= STANDBY and bool(flags & HELD_BURST)


def find_target(targets: Iterable[int], message: int, *, leading: bool) -> int | None:
    """Return the target that is delivered in place of `message`.

    That is the next newer target (leading: the next older one, or the first).
    """
    if leading:
        older = [target for target in targets if target < message]
        return max(older) if older else min(targets, default=None)
    return min((target for target in targets if target > message), default=None)


def find_replacement(messages: Sequence[int], *, leading: bool) -> int | None:
    """Return the standby message that replaces the target, which has expired or was removed."""
    return (min if leading else max)(messages, default=None)


def compute_recheck_time(due: int, now: int, waited: int = 0) -> int:
    """Return the time of the next check of the messages that stand by for a target.

    The target is `due`, or has `waited` and is postponed until `due`. The longer it is overdue, the
    rarer are the checks.
    """
    if due > now and not waited:
        return min(due, now + MAX_STANDBY_CHECK_DELAY)
    pause = min(max(now - due, waited, MIN_STANDBY_RECHECK), MAX_STANDBY_RECHECK)
    return min(max(due, now + pause), now + MAX_STANDBY_CHECK_DELAY)

"""Messages that stand by: a newer one of their key is to be delivered in their place.

They stay in the queue until that one has started, so that one of them can take its place if it
cannot: if it expires, is cancelled or is moved. Until then they are due `STANDBY` later than they
would be. So they are no part of what waits, and no other claim finds them.
"""

from collections.abc import Iterable, Sequence

from faststream_sqlbroker.core.policies.flags import HELD_BURST

STANDBY_SECONDS = 220_898_707_200
"""From 1970 to 8970: later than any delay may end (`core.times.LONGEST_SECONDS`)."""
STANDBY = STANDBY_SECONDS * 1_000_000
"""Microseconds."""
SHORTEST_STANDBY_RECHECK = 2 * 1_000_000
"""Least time until a message is looked at again that stands by for one which is overdue
(microseconds)."""
LONGEST_STANDBY_RECHECK = 300 * 1_000_000
"""The most. In between it is as long as that one has been overdue, so that many messages which
stand by do not fill every claim."""
LATEST_STANDBY_LOOK = 3600 * 1_000_000
"""The same for one that is not due yet: an operator may put it off for years."""


def stands_by(due: int, marks: int) -> bool:
    """Whether a message stands by that is `due` then (microseconds), with these `policy_marks`."""
    return due >= STANDBY and bool(marks & HELD_BURST)


def chosen_for(chosen: Iterable[int], message: int, *, leading: bool) -> int | None:
    """Which of the `chosen` is delivered in the place of `message`: the next newer one (leading:
    the next older one, or the first).
    """
    if leading:
        older = [each for each in chosen if each < message]
        return max(older) if older else min(chosen, default=None)
    return min((each for each in chosen if each > message), default=None)


def stand_in(standing: Sequence[int], *, leading: bool) -> int | None:
    """Which of those that stand by for a message takes its place."""
    return (min if leading else max)(standing, default=None)


def looked_at(due: int, now: int, waited: int = 0) -> int:
    """When to look again at what stands by for a message that is `due`, or is put off until then
    and has `waited`.
    """
    if due > now and not waited:
        return min(due, now + LATEST_STANDBY_LOOK)
    pause = min(max(now - due, waited, SHORTEST_STANDBY_RECHECK), LONGEST_STANDBY_RECHECK)
    return min(max(due, now + pause), now + LATEST_STANDBY_LOOK)

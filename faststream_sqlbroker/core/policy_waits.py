"""How many messages of a queue wait for which policy, as operators see it.

Times are the database's (aware, UTC).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from faststream_sqlbroker.core.policies.throttle import Throttle
from faststream_sqlbroker.core.status import Reason, WaitingMessage

MOST_LOOKED_AT = 1_000
"""Due messages of a queue that are looked at, and as many that are due later."""


@dataclass(frozen=True, slots=True)
class PolicyWait:
    """Messages of one queue that wait for the same reason."""

    code: str
    """As in `Explanation`; docs/howto/operating.md lists the codes."""
    policy: str
    """The policy that they wait for, as its subscriber wrote it, or "ordered=True"."""
    count: int
    due: int
    """How many of them are due."""
    capped: bool
    """Whether there may be more of them: only 1 000 due messages and 1 000 later ones are read."""
    until: datetime | None
    """When the first of them waits no longer; None: not by time, or not known."""
    until_last: datetime | None
    """The same of the last one. Behind a Throttle: the earliest time that its rate allows."""


@dataclass(frozen=True, slots=True)
class PoliciedQueue:
    """What waits for the policies of a queue at one moment."""

    queue: str
    at: datetime
    """The moment: the database's clock."""
    ways: tuple[str, ...]
    """The policies of its live subscribers, one text for each set of them. With more than one, the
    subscribers differ, and no policy is guaranteed."""
    subscribers: int
    """Live subscribers of the queue."""
    due: int
    """Due messages that have not been claimed, up to 1 000."""
    due_capped: bool
    """Whether there are more than that."""
    waits: tuple[PolicyWait, ...]
    """The greatest count first. A message counts once, for the first reason that `explain` lists;
    messages that only wait for a worker are not here."""


Wait = tuple[Reason, WaitingMessage]


def count_waits(
    waits: Iterable[Wait],
    throttles: Iterable[Throttle],
    *,
    due_capped: bool,
    later_capped: bool,
) -> tuple[PolicyWait, ...]:
    """Group messages by the reason why each waits.

    Args:
        waits: One reason a message; those without a policy are left out.
        throttles: The queue's, which start no more than their rate at once.
        due_capped: Whether not all due messages were looked at.
        later_capped: The same for those that are due later.
    """
    by_text = {str(throttle): throttle for throttle in throttles}
    groups: dict[tuple[str, str], list[Wait]] = defaultdict(list)
    for reason, message in waits:
        if reason.policy is not None:
            groups[reason.code, reason.policy].append((reason, message))
    counted = []
    for (code, policy), members in groups.items():
        due = sum(message.next_attempt_at <= message.now for _, message in members)
        capped = bool(due and due_capped) or bool(due < len(members) and later_capped)
        first, last = _ends(members, by_text.get(policy))
        counted.append(PolicyWait(code, policy, len(members), due, capped, first, last))
    return tuple(sorted(counted, key=lambda wait: (-wait.count, wait.code, wait.policy)))


def _ends(
    members: Sequence[Wait], throttle: Throttle | None
) -> tuple[datetime | None, datetime | None]:
    """When the first of `members` waits no longer, and the last."""
    ends = [reason.until for reason, _ in members if reason.until is not None]
    lasts = ends if throttle is None else ends + _last_starts(throttle, members)
    return min(ends, default=None), max(lasts, default=None)


def _last_starts(throttle: Throttle, members: Sequence[Wait]) -> list[datetime]:
    """When the last message of each key may start, or the last of the queue without keys."""
    starts: dict[str | None, list[datetime]] = defaultdict(list)
    for reason, message in members:
        if reason.until is not None:
            starts[message.key if throttle.key else None].append(reason.until)
    return [
        min(times) + timedelta(microseconds=(len(times) - 1) // throttle.rate * throttle.per)
        for times in starts.values()
    ]

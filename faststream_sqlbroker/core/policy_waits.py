"""Count the messages of a queue that wait for each policy.

Times are the database's (aware, UTC).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from faststream_sqlbroker.core.policies.throttle import Throttle
from faststream_sqlbroker.core.status import Reason, WaitingMessage

MAX_SCANNED = 1_000
"""Maximum number of due messages to read from a queue, and of messages that are due later."""


@dataclass(frozen=True, slots=True)
class PolicyWait:
    """Messages of a queue that wait for the same reason."""

    code: str
    """Code of the reason, as in `Explanation`; docs/howto/operating.md lists the codes."""
    policy: str
    """The policy that the messages wait for, as its subscriber wrote it, or "ordered=True"."""
    count: int
    due: int
    """Number of these messages that are due."""
    capped: bool
    """True if there may be more messages: only 1 000 due messages and 1 000 later ones are read."""
    until: datetime | None
    """End of the wait of the first message; None if it does not end by time, or is unknown."""
    until_last: datetime | None
    """End of the wait of the last message. Behind a Throttle: the earliest time that its rate
    allows."""


@dataclass(frozen=True, slots=True)
class PoliciedQueue:
    """A snapshot of the messages that wait for the policies of a queue."""

    queue: str
    at: datetime
    """Time of the snapshot by the database's clock."""
    ways: tuple[str, ...]
    """The policies of the live subscribers, one text for each set of policies. With more than one
    text, the subscribers differ, and no policy is guaranteed."""
    subscribers: int
    """Live subscribers of the queue."""
    due: int
    """Due messages that have not been claimed, up to 1 000."""
    due_capped: bool
    """True if there are more than that."""
    waits: tuple[PolicyWait, ...]
    """Waits with the greatest count first. A message counts once, for the first reason that
    `explain` lists; messages that only wait for a worker are not included."""


MessageWait = tuple[Reason, WaitingMessage]


def count_waits(
    waits: Iterable[MessageWait],
    throttles: Iterable[Throttle],
    *,
    due_capped: bool,
    later_capped: bool,
) -> tuple[PolicyWait, ...]:
    """Group messages by the reason for their wait.

    Args:
        waits: A reason per message; reasons without a policy are left out.
        throttles: Throttles of the queue, which start no more than their rate at once.
        due_capped: True if not all due messages were read.
        later_capped: True if not all messages that are due later were read.
    """
    by_text = {str(throttle): throttle for throttle in throttles}
    groups: dict[tuple[str, str], list[MessageWait]] = defaultdict(list)
    for reason, message in waits:
        if reason.policy is not None:
            groups[reason.code, reason.policy].append((reason, message))
    counted = []
    for (code, policy), members in groups.items():
        due = sum(message.next_attempt_at <= message.now for _, message in members)
        capped = bool(due and due_capped) or bool(due < len(members) and later_capped)
        first, last = _compute_ends(members, by_text.get(policy))
        counted.append(PolicyWait(code, policy, len(members), due, capped, first, last))
    return tuple(sorted(counted, key=lambda wait: (-wait.count, wait.code, wait.policy)))


def _compute_ends(
    members: Sequence[MessageWait], throttle: Throttle | None
) -> tuple[datetime | None, datetime | None]:
    """Return the end of the wait of the first of `members`, and of the last.

    A wait without a known end is ignored. Behind a Throttle the last start also follows from its
    rate.
    """
    ends = [reason.until for reason, _ in members if reason.until is not None]
    last_ends = ends if throttle is None else ends + _compute_last_starts(throttle, members)
    return min(ends, default=None), max(last_ends, default=None)


def _compute_last_starts(throttle: Throttle, members: Sequence[MessageWait]) -> list[datetime]:
    """Return the start of the last message of each key, or of the queue without keys.

    A slot is a start that the Throttle allows. The first `rate` messages start from the next slot
    on (`reason.until`), and `rate` more in each further period.
    """
    starts: dict[str | None, list[datetime]] = defaultdict(list)
    for reason, message in members:
        if reason.until is not None:
            starts[message.key if throttle.key else None].append(reason.until)
    return [
        min(times) + timedelta(microseconds=(len(times) - 1) // throttle.rate * throttle.per)
        for times in starts.values()
    ]

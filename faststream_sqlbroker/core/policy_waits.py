"""How many messages of a queue wait for which policy, as operators see it.

Times are the database's (aware, UTC).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from faststream_sqlbroker.core.status import Reason

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
    capped: bool
    """Whether there may be more of them: only 1 000 due messages and 1 000 later ones are read."""
    until: datetime | None
    """When the first of them waits no longer; None: not by time, or not known."""
    until_last: datetime | None
    """The same of the last one."""


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


def count_waits(
    found: Iterable[tuple[Reason, bool]], *, due_capped: bool, later_capped: bool
) -> tuple[PolicyWait, ...]:
    """Group the reasons of messages, each with whether its message is due.

    Args:
        found: One reason a message; those without a policy are left out.
        due_capped: Whether not all due messages were looked at.
        later_capped: The same for those that are due later.
    """
    groups: dict[tuple[str, str], list[tuple[Reason, bool]]] = {}
    for reason, due in found:
        if reason.policy is not None:
            groups.setdefault((reason.code, reason.policy), []).append((reason, due))
    waits = []
    for (code, policy), members in groups.items():
        untils = [reason.until for reason, _ in members if reason.until is not None]
        capped = any(due_capped if due else later_capped for _, due in members)
        waits.append(
            PolicyWait(
                code=code,
                policy=policy,
                count=len(members),
                capped=capped,
                until=min(untils, default=None),
                until_last=max(untils, default=None),
            )
        )
    return tuple(sorted(waits, key=lambda wait: (-wait.count, wait.code, wait.policy)))

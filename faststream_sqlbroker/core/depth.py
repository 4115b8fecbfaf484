"""How many due messages a queue may have before its publishers are held back.

A process counts a queue now and then, and adds what it publishes itself in between. So the depth is
an estimate, but no publish is held back or refused before a count has found the queue full.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from faststream_sqlbroker.core.checks import one_of, queue_problem, whole_number
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, seconds_or_zero
from faststream_sqlbroker.exceptions import SetupError

WhenFull = Literal["wait", "raise", "drop"]

MOST_DEPTH = 1_000_000
"""The greatest `max_depth`: the count stops there, and takes up to a second."""
FRESH = 1.0
"""Seconds for which a count stands that found room."""
RECHECK = 0.1
"""Seconds after which a queue that was full is counted again, while a publish wants to know."""
CHEAP = 10_000
"""A count up to a limit of no more messages takes milliseconds, so it may be made for each
publish."""
REST = 5.0
"""A process counts again after so many times the length of its last count, so that counting takes
at most a sixth of one connection."""


@dataclass(frozen=True, slots=True)
class MaxDepth:
    """What holds publishers of a queue back: `SqlBroker(max_depth={"orders": MaxDepth(10_000)})`.

    The queue is full while `messages` of its messages are due and not claimed. Those that are not
    due yet, or that a process handles, do not count. Each process counts once a second, and more
    often near the limit, so a fleet may publish somewhat more than `messages`. A count takes up to
    a second, and is not repeated within five times as long: near the limit a publish waits for the
    next one. Synchronous code cannot wait: with a limit above 10 000 it goes without.

    Args:
        messages: From 1 to 1 000 000.
        when_full: What a publish does then. "wait": wait for room; in a transaction of the caller
            it raises instead, as a wait would keep that transaction open. "raise": raise
            `QueueFullError`. "drop": write nothing, return None in place of the id, and tell the
            log and the metrics.
        timeout: Longest wait, after which `QueueFullError` is raised; None is without limit.
    """

    messages: int
    when_full: WhenFull = "wait"
    timeout: Duration | None = 30.0

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            SetupError: one of them is not allowed.
        """
        whole_number("messages of MaxDepth", self.messages, most=MOST_DEPTH)
        one_of("when_full", self.when_full, ("wait", "raise", "drop"))
        self.timeout_seconds  # noqa: B018 - it raises

    @property
    def timeout_seconds(self) -> float | None:
        """`timeout` in seconds."""
        if self.timeout is None:
            return None
        return seconds_or_zero("timeout of MaxDepth", self.timeout)


def checked_depths(given: object) -> dict[str, MaxDepth]:
    """`max_depth` of a broker; a number is a `MaxDepth` of it.

    Raises:
        SetupError: it is no mapping of names of queues to limits.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise SetupError(
            'max_depth must be a mapping of queues to MaxDepth, such as {"orders": '
            f"MaxDepth(10_000)}}, got {given!r}"
        )
    found: dict[str, MaxDepth] = {}
    for queue, limit in given.items():
        if (problem := queue_problem(queue)) is not None:
            raise SetupError(f"max_depth names the queue {short(queue)}: {problem}")
        if isinstance(limit, int) and not isinstance(limit, bool):
            limit = MaxDepth(limit)  # noqa: PLW2901 - the short form of the same
        if not isinstance(limit, MaxDepth):
            raise SetupError(
                f"max_depth of the queue {queue!r} must be a MaxDepth or a whole number, got "
                f"{limit!r}"
            )
        found[queue] = limit
    return found


@dataclass(slots=True)
class DepthEstimate:
    """What one process knows of the depth of one queue; times are its monotonic seconds."""

    limit: int
    found: int = 0
    """What the last count found, up to `limit`."""
    found_at: float = field(default=-inf)
    took: float = 0.0
    """The seconds that it took."""
    added: int = 0
    """Messages published here since then, or about to be."""

    @property
    def is_full(self) -> bool:
        """Whether a publish has to wait; only a count that is `found` full settles it."""
        return self.found + self.added >= self.limit

    def count_in(self, now: float) -> float | None:
        """Seconds until the count that a publish must wait for; None: it need not."""
        since = now - self.found_at
        rest = REST * self.took
        if self.found >= self.limit:
            return 0.0 if since >= max(RECHECK, rest) else None
        if self.is_full:
            # By publishes of this process, which may be handled already: that alone refuses none.
            return max(0.0, rest - since)
        return 0.0 if since >= max(FRESH, rest) else None

    def rests(self, now: float) -> bool:
        """Whether a publish that cannot wait for the next count is to go without one."""
        return self.limit > CHEAP and (self.count_in(now) or 0.0) > 0.0

    def counted(self, depth: int, now: float, took: float) -> None:
        """A count that took so many seconds has found `depth`."""
        self.found = depth
        self.found_at = now
        self.took = took
        self.added = 0

    def add(self, messages: int) -> None:
        """So many messages are about to be written."""
        self.added += messages

    def next_count(self, now: float) -> float:
        """Seconds until a queue that was found full may be counted again."""
        return max(0.0, self.found_at + max(RECHECK, REST * self.took) - now)

"""The number of due messages at which publishers of a queue are held back.

A process counts a queue now and then, and adds its own publishes in between. So the depth is
an estimate, but no publish is held back or refused before a count has found the queue full.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from faststream_sqlbroker.core.checks import check_choice, find_queue_error, validate_integer
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration, parse_non_negative
from faststream_sqlbroker.exceptions import SetupError

WhenFull = Literal["wait", "raise", "drop"]

MAX_COUNTED_DEPTH = 1_000_000
"""Maximum of `max_depth`: the count stops there, and takes up to a second."""
COUNT_LIFETIME = 1.0
"""Seconds for which a count below the limit is valid."""
FULL_RECHECK = 0.1
"""Seconds after which a full queue is counted again, while a publish is waiting."""
CHEAP_COUNT = 10_000
"""A count up to this limit takes milliseconds, so it may be made for each publish."""
REST_FACTOR = 5.0
"""Pause between counts as a multiple of the duration of the last count, so that counting takes at
most a sixth of one connection."""


@dataclass(frozen=True, slots=True)
class MaxDepth:
    """The limit of a queue: `SqlBroker(max_depth={"orders": MaxDepth(10_000)})`.

    The queue is full while `messages` of its messages are due and not claimed. Messages that are
    not due yet, or that a process handles, do not count. Each process counts once a second, and
    more often near the limit, so a fleet may publish somewhat more than `messages`. A count takes
    up to a second, and is not repeated within five times as long: near the limit a publish waits
    for the next count. Synchronous code cannot wait: with a limit above 10 000 it publishes
    without a count.

    Args:
        messages: From 1 to 1 000 000.
        when_full: The reaction of a publish to a full queue. "wait": wait for capacity; in a
            transaction of the caller it raises instead, as a wait would keep that transaction
            open. "raise": raise `QueueFullError`. "drop": write nothing, return None in place of
            the id, and report it to the log and the metrics.
        timeout: Maximum wait, after which `QueueFullError` is raised; None is without limit.
    """

    messages: int
    when_full: WhenFull = "wait"
    timeout: Duration | None = 30.0

    def __post_init__(self) -> None:
        """Validate all values.

        Raises:
            SetupError: a value is not allowed.
        """
        validate_integer("messages of MaxDepth", self.messages, maximum=MAX_COUNTED_DEPTH)
        check_choice("when_full", self.when_full, ("wait", "raise", "drop"))
        self.timeout_seconds  # noqa: B018 - raises if invalid

    @property
    def timeout_seconds(self) -> float | None:
        """`timeout` in seconds."""
        if self.timeout is None:
            return None
        return parse_non_negative("timeout of MaxDepth", self.timeout)


def validate_depths(value: object) -> dict[str, MaxDepth]:
    """Return the broker's option `max_depth` as a dict; a number stands for `MaxDepth(number)`.

    Raises:
        SetupError: the value is not a mapping of queue names to limits.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SetupError(
            'max_depth must be a mapping of queues to MaxDepth, such as {"orders": '
            f"MaxDepth(10_000)}}, got {value!r}"
        )
    depths: dict[str, MaxDepth] = {}
    for queue, limit in value.items():
        if (error := find_queue_error(queue)) is not None:
            raise SetupError(f"max_depth has an invalid queue name {format_value(queue)}: {error}")
        if isinstance(limit, int) and not isinstance(limit, bool):
            limit = MaxDepth(limit)  # noqa: PLW2901 - a number is a short form
        if not isinstance(limit, MaxDepth):
            raise SetupError(
                f"max_depth of the queue {queue!r} must be a MaxDepth or a whole number, got "
                f"{limit!r}"
            )
        depths[queue] = limit
    return depths


@dataclass(slots=True)
class DepthEstimate:
    """A process's estimate of the depth of a queue; times are the process's monotonic seconds."""

    limit: int
    counted_depth: int = 0
    """Result of the last count, up to `limit`."""
    counted_at: float = field(default=-inf)
    count_duration: float = 0.0
    """Duration of the last count in seconds."""
    published: int = 0
    """Messages published by this process since the count, or about to be published."""

    @property
    def is_full(self) -> bool:
        """True if a publish has to wait; only a count can confirm that the queue is full."""
        return self.counted_depth + self.published >= self.limit

    def get_count_delay(self, now: float) -> float | None:
        """Return the seconds until the count that a publish must wait for; None for no wait.

        A count is a query of the queue's due messages; 0 means a count now. A count is valid for a
        second, or a tenth while it found the queue full. Counts also pause for five times the
        duration of the last one, so that they take only a small part of the database's time.
        """
        age = now - self.counted_at
        min_pause = REST_FACTOR * self.count_duration
        if self.counted_depth >= self.limit:
            return 0.0 if age >= max(FULL_RECHECK, min_pause) else None
        if self.is_full:
            # Full only by this process's publishes, which may have been handled already: this alone
            # must not refuse a publish.
            return max(0.0, min_pause - age)
        return 0.0 if age >= max(COUNT_LIFETIME, min_pause) else None

    def can_skip_count(self, now: float) -> bool:
        """Return True if a publish that cannot wait for the next count goes on without a count.

        Synchronous code cannot wait. With a small limit it counts instead, even during the pause
        between two counts, which takes milliseconds.
        """
        return self.limit > CHEAP_COUNT and (self.get_count_delay(now) or 0.0) > 0.0

    def record_count(self, depth: int, now: float, duration: float) -> None:
        """Record a count that took `duration` seconds."""
        self.counted_depth = depth
        self.counted_at = now
        self.count_duration = duration
        self.published = 0

    def add(self, messages: int) -> None:
        """Record that so many messages are about to be written."""
        self.published += messages

    def get_recount_delay(self, now: float) -> float:
        """Return the seconds until a full queue may be counted again, for publishes that wait."""
        return max(
            0.0, self.counted_at + max(FULL_RECHECK, REST_FACTOR * self.count_duration) - now
        )

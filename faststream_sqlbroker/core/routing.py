"""Decide where and when to forward a message without a handler. Pure.

Headers of such a message may contain its destination, and the time before which it must not be
delivered. Other programs write these headers too, so their values are not trusted.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from faststream_sqlbroker.core.checks import find_queue_error, is_number
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import EPOCH, Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

DESTINATION_HEADER = "destination"
"""Header with the name of the queue that a message is intended for."""
PUBLISH_AFTER_HEADER = "publish_after"
"""Header with the time before which the message is not delivered there."""

LOOKUP_HEADER = "lookup"
"""Header with the lookup value of a message with both other headers: its mirror record is removed
on arrival."""

ROUTING_HEADERS = (DESTINATION_HEADER, PUBLISH_AFTER_HEADER, LOOKUP_HEADER)
"""Headers that route a message; they are not copied to messages made from it."""

MAX_HOPS = 32
"""Consecutive hops without a handler after which a message counts as caught in a loop. A choice: no
pipeline should need as many steps."""

MAX_DUE_TIME = datetime(9998, 12, 31, tzinfo=timezone.utc)
"""The latest due time allowed. Delays are added to this time, and the sum must still be a date in
every database, which end with the year 9999."""

_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(?:\.[0-9]{1,9})?")


class Destination(Enum):
    """The type of `DESTINATION`."""

    HEADER = DESTINATION_HEADER

    def __repr__(self) -> str:
        """Return the name of the constant."""
        return "DESTINATION"


DESTINATION = Destination.HEADER
"""Value of `forward_to` that forwards each message to the queue named in its header
`destination`."""


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """The position of a subscriber in a pipeline."""

    pipeline: str
    number: int
    """Number of the step, starting at 1."""
    hops: tuple[str | Destination, ...]
    """The queues of all steps, and the target of the last step, without a router's prefix."""


def get_destination(headers: Mapping[str, Any], source_queues: Collection[str]) -> str:
    """Return the queue that `headers` name.

    Args:
        headers: Headers of a message.
        source_queues: Queues that the message may have come from. Moving it there would be an
            endless loop.

    Raises:
        ValueError: the headers name no queue that the message can be moved to; the text has the
            reason.
    """
    if (name := headers.get(DESTINATION_HEADER)) is None:
        raise ValueError(f"it has no header {DESTINATION_HEADER!r}")
    if (error := find_queue_error(name)) is not None:
        raise ValueError(f"its header {DESTINATION_HEADER!r} is {format_value(name)}: {error}")
    if name in source_queues:
        raise ValueError(
            f"its header {DESTINATION_HEADER!r} names {format_value(name)}, its own queue"
        )
    return str(name)


def parse_publish_after(headers: Mapping[str, Any], created_at: datetime) -> datetime | None:
    """Return the time before which a message with `headers` must not be delivered, or None.

    The header `publish_after` is Unix seconds (a number, or text of one), an RFC 3339 date and time
    with its offset, or a duration such as "1.5h", which counts from `created_at`.

    Raises:
        ValueError: the header has another value, or a time after the year 9998.
    """
    value = headers.get(PUBLISH_AFTER_HEADER)
    if value is None:
        return None
    try:
        due = _parse_time(value, created_at)
    except (ValueError, TypeError, OverflowError):
        # A time beyond the limit leads to the same error.
        due = MAX_DUE_TIME + timedelta(days=1)
    if due > MAX_DUE_TIME:
        raise ValueError(
            f"its header {PUBLISH_AFTER_HEADER!r} must be Unix seconds, a date and time like "
            f'"2030-01-31T08:00:00Z" or a duration like "1.5h", got {format_value(value)}'
        )
    return due


def from_unix_time(seconds: float) -> datetime:
    """Convert seconds since 1970 to an aware datetime (UTC).

    Raises:
        ValueError: NaN.
        OverflowError: no year from 1 to 9999.
    """
    return EPOCH + timedelta(seconds=seconds)


def _parse_time(value: Any, created_at: datetime) -> datetime:
    """Convert a value of the header `publish_after` to an aware datetime (UTC).

    Numbers and text of one are Unix seconds. Other text is tried as a duration that counts from
    `created_at`, then as an RFC 3339 time.

    Raises:
        ValueError: text of another form, or a time without an offset.
        TypeError: neither a number nor text.
        OverflowError: no year from 1 to 9999.
    """
    if is_number(value):
        return from_unix_time(value)
    if not isinstance(value, str):
        raise TypeError(type(value).__name__)
    if _NUMBER.fullmatch(value):
        return from_unix_time(float(value))
    try:
        return created_at + timedelta(seconds=parse_duration(value))
    except SetupError:
        timestamp = datetime.fromisoformat(value.upper())
    if timestamp.utcoffset() is None:
        raise ValueError(value)
    return timestamp.astimezone(timezone.utc)


def find_loop(hops: Iterable[tuple[str, str]]) -> list[str] | None:
    """Return the queues of a loop in the graph of `hops` (from, to), or None if there is none.

    Subscribers that forward to each other in a circle would move a message forever.
    """
    graph = TopologicalSorter[str]()
    for start, end in hops:
        # Add the start first, so that the loop in the error begins where it is first entered.
        graph.add(start)
        graph.add(end, start)
    try:
        graph.prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


# Delay tiers: for relays to brokers without delayed delivery, which have queues of fixed
# durations instead. This broker itself needs no tiers: an index finds what is due.


class Hops(NamedTuple):
    """Consecutive hops of a message through a tier: `times` hops of `seconds` each."""

    seconds: float
    times: int


def next_hop(remaining: Duration, tiers: Iterable[Duration]) -> float | None:
    """Return the tier for a message that still has to wait for `remaining`.

    A tier is a queue of another broker that delays every message by the same duration.

    Args:
        remaining: The rest of its wait.
        tiers: Durations of the tiers, in any order.

    Returns:
        The largest duration that is not longer than `remaining`, else the shortest, in seconds;
        None if nothing remains.

    Raises:
        SetupError: there is no tier, a tier is not longer than 0, or a value is not a duration.
    """
    plan = plan_hops(remaining, tiers)
    return plan[0].seconds if plan else None


def plan_hops(wait: Duration, tiers: Iterable[Duration]) -> list[Hops]:
    """Return all hops of a message that has to wait for `wait`, each chosen as by `next_hop`.

    8 minutes over tiers of 5 and 1 minute are one hop of 5 and three of 1. Together the hops are
    never shorter than `wait`, and longer by less than the shortest tier.

    Args:
        wait: The duration; 0 or less needs no hop.
        tiers: Durations of the tiers, in any order.

    Returns:
        The hops in order, with one entry for each tier used. There is at most one entry more than
        there are tiers.

    Raises:
        SetupError: there is no tier, a tier is not longer than 0, or a value is not a duration.
    """
    sizes = _parse_tiers(tiers)
    # Fractions are exact. Sums of floats could give a hop too few or too many.
    remaining = Fraction(parse_duration(wait, name="wait"))
    plan = list[Hops]()
    for size in sizes:
        times = int(remaining // Fraction(size)) if remaining > 0 else 0
        if times:
            plan.append(Hops(size, times))
            remaining -= times * Fraction(size)
    if remaining > 0:
        last = Hops(sizes[-1], 1)
        if plan and plan[-1].seconds == last.seconds:
            last = Hops(last.seconds, plan.pop().times + 1)
        plan.append(last)
    return plan


def _parse_tiers(tiers: Iterable[Duration]) -> list[float]:
    """Return the tiers in seconds, the longest first.

    Raises:
        SetupError: there is no tier, or a value is not a duration above 0.
    """
    if isinstance(tiers, str) or not isinstance(tiers, Iterable):
        raise SetupError(
            f'tiers must be a list of durations such as ["1m", "5m"], got {format_value(tiers)}'
        )
    sizes = sorted({parse_duration(tier, name="a tier") for tier in tiers}, reverse=True)
    if not sizes:
        raise SetupError("tiers is empty: give the duration of at least one queue")
    if sizes[-1] <= 0:
        raise SetupError(f"a tier must be longer than 0 seconds, got {sizes[-1]!r}")
    return sizes

"""Where messages are forwarded without a handler, and when. Pure.

Headers of such a message may name its destination, and the time before which it must not be
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

from faststream_sqlbroker.core.checks import queue_problem
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import EPOCH, Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

DESTINATION_HEADER = "destination"
"""Header with the name of the queue that a message is meant for."""
PUBLISH_AFTER_HEADER = "publish_after"
"""Header with the time before which it is not delivered there."""

LOOKUP_HEADER = "lookup"
"""Header with the lookup value of a message that has both: its record goes when it arrives."""

OWN_HEADERS = (DESTINATION_HEADER, PUBLISH_AFTER_HEADER, LOOKUP_HEADER)
"""Those that say where a message goes: what is made of it has others."""

MOST_HOPS = 32
"""Hops in a row, without a handler in between, after which a message counts as caught in a
loop. A choice: no pipeline should need as many steps."""

LATEST = datetime(9998, 12, 31, tzinfo=timezone.utc)
"""The latest due time allowed. Delays are added to it, and the sum must still be a date in every
database, which end with the year 9999."""

_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(?:\.[0-9]{1,9})?")


class Destination(Enum):
    """The type of `DESTINATION`."""

    HEADER = DESTINATION_HEADER

    def __repr__(self) -> str:
        """As it is written."""
        return "DESTINATION"


DESTINATION = Destination.HEADER
"""As `forward_to`: to the queue that each message names in its header `destination`."""


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """Which step of which pipeline a subscriber is."""

    pipeline: str
    number: int
    """1 is the first."""
    hops: tuple[str | Destination, ...]
    """The queues of all steps, and where the last one moves its messages, without a router's
    prefix."""


def destination_of(headers: Mapping[str, Any], own: Collection[str]) -> str:
    """The queue that `headers` name.

    Args:
        headers: A message's.
        own: The queues it may have come from. Moving it there would be an endless loop.

    Raises:
        ValueError: they name none that the message can be moved to; the text says why.
    """
    if (name := headers.get(DESTINATION_HEADER)) is None:
        raise ValueError(f"it has no header {DESTINATION_HEADER!r}")
    if (problem := queue_problem(name)) is not None:
        raise ValueError(f"its header {DESTINATION_HEADER!r} is {short(name)}: {problem}")
    if name in own:
        raise ValueError(
            f"its header {DESTINATION_HEADER!r} names {short(name)}, which it came from"
        )
    return str(name)


def due_of(headers: Mapping[str, Any], created_at: datetime) -> datetime | None:
    """The time before which a message with `headers` must not be delivered; None: no limit.

    The header `publish_after` is Unix seconds (a number, or text of one), an RFC 3339 date and time
    with its offset, or a duration such as "1.5h", which counts from `created_at`.

    Raises:
        ValueError: it is something else, or after the year 9998; the text says so.
    """
    value = headers.get(PUBLISH_AFTER_HEADER)
    if value is None:
        return None
    try:
        due = _moment(value, created_at)
    except (ValueError, TypeError, OverflowError):
        due = LATEST + timedelta(days=1)
    if due > LATEST:
        raise ValueError(
            f"its header {PUBLISH_AFTER_HEADER!r} is {short(value)}; Unix seconds, a date and time "
            'like "2030-01-31T08:00:00Z" or a duration like "1.5h" are understood'
        )
    return due


def unix_time(seconds: float) -> datetime:
    """The moment `seconds` after 1970 began, as an aware datetime (UTC).

    Raises:
        ValueError: NaN.
        OverflowError: no year from 1 to 9999.
    """
    return EPOCH + timedelta(seconds=seconds)


def _moment(value: Any, created_at: datetime) -> datetime:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return unix_time(value)
    if not isinstance(value, str):
        raise TypeError(type(value).__name__)
    if _NUMBER.fullmatch(value):
        return unix_time(float(value))
    try:
        return created_at + timedelta(seconds=parse_duration(value))
    except SetupError:
        moment = datetime.fromisoformat(value.upper())
    if moment.utcoffset() is None:
        raise ValueError(value)
    return moment.astimezone(timezone.utc)


def find_loop(hops: Iterable[tuple[str, str]]) -> list[str] | None:
    """A loop in the graph of `hops` (from, to), as the queues on it; None if there is none."""
    graph = TopologicalSorter[str]()
    for start, end in hops:
        # The start first: the loop in the error begins where it is first entered.
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
    """A message passes a tier `times` times in a row and waits `seconds` each time."""

    seconds: float
    times: int


def next_hop(remaining: Duration, tiers: Iterable[Duration]) -> float | None:
    """The tier for a message that still has to wait for `remaining`.

    Args:
        remaining: What is left of its wait.
        tiers: Durations of the tiers, in any order.

    Returns:
        The largest duration that is not longer than `remaining`, else the shortest, in seconds;
        None if nothing remains.

    Raises:
        SetupError: no tier, one that is not longer than 0, or what is no duration.
    """
    plan = plan_hops(remaining, tiers)
    return plan[0].seconds if plan else None


def plan_hops(wait: Duration, tiers: Iterable[Duration]) -> list[Hops]:
    """All hops of a message that has to wait for `wait`: each as `next_hop` says, until nothing
    remains.

    8 minutes over tiers of 5 and 1 minute are one hop of 5 and three of 1. Together the hops are
    never shorter than `wait`, and longer by less than the shortest tier.

    Args:
        wait: How long; 0 or less needs no hop.
        tiers: Durations of the tiers, in any order.

    Returns:
        The hops in order, with one entry for each tier used. There is at most one entry more than
        there are tiers.

    Raises:
        SetupError: no tier, one that is not longer than 0, or what is no duration.
    """
    sizes = _sizes(tiers)
    # Fractions are exact. Sums of floats could give a hop too few or too many.
    left = Fraction(parse_duration(wait, name="wait"))
    plan = list[Hops]()
    for size in sizes:
        times = int(left // Fraction(size)) if left > 0 else 0
        if times:
            plan.append(Hops(size, times))
            left -= times * Fraction(size)
    if left > 0:
        last = Hops(sizes[-1], 1)
        if plan and plan[-1].seconds == last.seconds:
            last = Hops(last.seconds, plan.pop().times + 1)
        plan.append(last)
    return plan


def _sizes(tiers: Iterable[Duration]) -> list[float]:
    """The tiers in seconds, the longest first."""
    if isinstance(tiers, str) or not isinstance(tiers, Iterable):
        raise SetupError(
            f'tiers must be a list of durations such as ["1m", "5m"], got {short(tiers)}'
        )
    sizes = sorted({parse_duration(tier, name="a tier") for tier in tiers}, reverse=True)
    if not sizes:
        raise SetupError("tiers is empty: give the duration of at least one queue")
    if sizes[-1] <= 0:
        raise SetupError(f"a tier must be longer than 0 seconds, got {sizes[-1]!r}")
    return sizes

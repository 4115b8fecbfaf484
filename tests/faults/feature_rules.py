"""Rules for what only a soak has: policies, an operator, a schedule, the time that queues take."""

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

from tests.faults.features import DEAD, DEBOUNCED, DYING, EVERY, ONCE_A_KEY, THROTTLED
from tests.faults.history import Delivery, History
from tests.faults.plan import LIMITED, PER, RATE, key_in
from tests.processes.policy_checks import ROUNDING, SECOND, over_rate

MOST_TIMES = 2
"""How much longer than a plain queue any other may take to drain."""
MAY_BE_DISCARDED = {(DEBOUNCED, "superseded"), (ONCE_A_KEY, "duplicate")}
SLOW = 4.0
"""Seconds of a slow handler: a plain queue may always take so long, and a lease."""


def policies_hold(h: History) -> list[str]:
    """Never more starts than a Throttle's, one of a key that is to start once; what a burst leaves
    out is for a newer one that has started."""
    looks = [d.looked for d in h.deliveries if d.queue == THROTTLED and d.looked is not None]
    unseen = [d.number for d in h.deliveries if d.queue == THROTTLED and d.looked is None]
    found = [f"message {n} was started without a look at its slot" for n in unseen]
    found += over_rate(looks, RATE, PER * SECOND - ROUNDING)
    starts = Counter(key_in(d.queue, d.number) for d in h.deliveries if d.queue == ONCE_A_KEY)
    found += [f"{key!r} was started {times} times" for key, times in starts.items() if times > 1]
    ended = defaultdict(list)
    for row in h.archived:
        if row["queue"] == ONCE_A_KEY:
            ended[key_in(ONCE_A_KEY, row["number"])].append(row["state"])
    found += [
        f"{key!r} ended as {states}"
        for key, states in ended.items()
        if len(states) - states.count("DISCARDED") != 1
    ]
    found += _budget_holds(h)
    rows = {row["id"]: row for row in h.archived if row["queue"] == DEBOUNCED}
    return found + [
        f"message {row['number']} is {row['state']} ({row['reason']} by {row['related_id']})"
        for row in rows.values()
        if row["state"] != "COMPLETED"
        and row["reason"] != "cancelled"
        and not _is_newer_and_started(rows.get(row["related_id"]), row)
    ]


def _budget_holds(h: History) -> list[str]:
    """Of queues with a budget of one, two handlers ran at once that had their leases."""
    broken = []
    running: Delivery | None = None
    for d in sorted(h.deliveries, key=lambda d: d.at):
        stale = d.lost or d.unknown or d.pid in h.killed
        if d.queue not in LIMITED or d.ended_at is None or stale:
            continue
        if running is not None and d.at < (running.ended_at or 0.0):
            broken.append(f"message {d.number} was started while {running.number} had the budget")
        else:
            running = d
    return broken


def _is_newer_and_started(other: dict[str, Any] | None, row: dict[str, Any]) -> bool:
    """Whether `other`, which an operator may have ended since, is newer than `row`."""
    return (
        other is not None
        and other["id"] > row["id"]
        and other["deliveries_count"] > 0
        and key_in(DEBOUNCED, other["number"]) == key_in(DEBOUNCED, row["number"])
    )


def moves_and_cancels_are_final(h: History) -> list[str]:
    """What always fails is in the queue of dead letters, what an operator has ended is DISCARDED,
    and nothing else is without a reason."""
    rows = {row["number"]: row for row in h.archived}
    found = [
        f"message {row['number']} of {DYING!r} is {row['state']}, and not in {DEAD!r}"
        for row in h.archived
        if row["queue"] == DYING and row["reason"] != "cancelled"
    ]
    found += [
        f"message {row['number']} of {row['queue']!r} is DISCARDED: {row['reason']}"
        for row in h.archived
        if row["state"] == "DISCARDED"
        and (row["queue"], row["reason"]) not in MAY_BE_DISCARDED
        and not (row["reason"] == "cancelled" and row["number"] in h.asked)
    ]
    return found + [
        f"message {n} was cancelled, and is {rows[n]['state']}"
        for n in h.cancelled & rows.keys()
        if rows[n]["state"] != "DISCARDED"
    ]


def schedules_are_exactly_once(h: History) -> list[str]:
    """No tick is missing and none is there twice."""
    ticks = Counter(row["number"] for row in h.ticks)
    found = [f"tick {tick} is there {times} times" for tick, times in ticks.items() if times > 1]
    return found + [
        f"no tick between {before} and {after}"
        for before, after in pairwise(sorted(ticks))
        if after - before > EVERY
    ]


def no_queue_is_left_behind(h: History) -> list[str]:
    """Of a soak that counts it: when it is calm, no queue takes more than `MOST_TIMES` as long as a
    plain one."""
    if h.calm_at is None:
        return []
    drained: dict[str, float] = defaultdict(float)
    for d in h.deliveries:
        drained[d.queue] = max(drained[d.queue], (d.ended_at or d.at) - h.calm_at)
    plain = max(drained["plain"], h.lease + SLOW)
    return [
        f"{queue!r} took {seconds:.0f} s to drain, a plain queue {plain:.0f} s"
        for queue, seconds in drained.items()
        if seconds > MOST_TIMES * plain
    ]

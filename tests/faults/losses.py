"""What a failover loses of a history: the rules then hold for what the database has kept.

The application's own rows, committed with its messages, are the truth about what was published.
"""

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from tests.faults.checker import HAVE_FAILED, MAY_BE_COMPLETED
from tests.faults.history import AT_MOST_ONCE, Delivery, History, Loss


def keep_what_is_there(h: History, business: Mapping[int, str]) -> None:
    """Compare `h` with the application's rows (number → queue), and take out of it what the
    database has lost.

    A message without its row was never committed, or has been lost. A delivery that has been lost
    is given again, under the same count or a smaller one. Of others the outcome may have been lost:
    their settle counts as unknown.
    """
    published = set(h.committed) | h.unknown
    gone = published - business.keys()
    h.lost = h.committed.keys() - business.keys()
    h.committed = dict(business)
    h.unknown &= business.keys()
    h.rolled_back |= gone
    if not h.losses:
        return
    rows = {row["number"]: row for row in h.archived}
    groups: dict[int, list[Delivery]] = defaultdict(list)
    for delivery in h.deliveries:
        groups[delivery.number].append(delivery)
    kept: list[Delivery] = []
    for number, all_of_it in groups.items():
        if number in gone:
            # What the new server never had can only have been delivered before.
            kept += [d for d in all_of_it if not is_touched(d, h.losses)]
        else:
            kept += _kept(all_of_it, rows.get(number), h.losses)
    # By identity: a delivery that was given again may be equal to its predecessor.
    known = {id(delivery) for delivery in kept}
    h.forgotten = [delivery for delivery in h.deliveries if id(delivery) not in known]
    touched = {d.number for d in kept if is_touched(d, h.losses)}
    h.listed = {number for number in h.listed if number not in touched}
    # A process says which row has lost its lease: one that was given again may not be meant.
    again = {row for row, numbers in h.rows.items() if len(numbers) > 1}
    h.deliveries = [
        replace(d, unknown=True) if is_touched(d, h.losses) or d.row in again else d
        for d in sorted(kept, key=lambda d: d.at)
    ]


def is_touched(delivery: Delivery, losses: list[Loss]) -> bool:
    """Whether the claim or the outcome of `delivery` may have been lost."""
    return any(
        delivery.claimed < loss.end
        and (delivery.ended_at is None or delivery.ended_at >= loss.start)
        for loss in losses
    )


def _kept(
    deliveries: list[Delivery], row: Mapping[str, Any] | None, losses: list[Loss]
) -> list[Delivery]:
    """Those deliveries of one message that the database may know."""
    touched = [d for d in deliveries if is_touched(d, losses)]
    kept = [d for d in deliveries if not is_touched(d, losses)]
    counts = {d.deliveries for d in kept}
    later = max((d.at for d in deliveries), default=0.0)
    for count in {d.deliveries for d in touched} - counts:
        if row is not None and count > row["deliveries_count"]:
            continue
        given = [d for d in touched if d.deliveries == count]
        best = max(given, key=lambda d: (d.queue == AT_MOST_ONCE or _fits(d, row), d.at))
        # One that was removed, and whose removal was lost, is started again.
        if best.queue != AT_MOST_ONCE or best.at == later:
            kept.append(best)
    return kept


def _fits(delivery: Delivery, row: Mapping[str, Any] | None) -> bool:
    """Whether `delivery` may have ended its message as the archive says."""
    if row is None or row["deliveries_count"] != delivery.deliveries:
        return True
    ends: AbstractSet[str] = MAY_BE_COMPLETED if row["state"] == "COMPLETED" else HAVE_FAILED
    return delivery.ended in ends and not delivery.lost

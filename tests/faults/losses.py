"""What a failover loses of a history: the rules then hold for what the database has kept.

The application's own rows, committed with its messages, are the truth about what was published.
"""

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import groupby, pairwise
from math import inf
from typing import Any

from tests.faults.checker import HAVE_FAILED, MAY_BE_COMPLETED
from tests.faults.history import AT_MOST_ONCE, Delivery, History, Loss


def keep_what_is_there(h: History, business: Mapping[int, str]) -> None:
    """Compare `h` with the application's rows (number → queue), and take out of it what the
    database has lost.

    A message without its row was never committed, or has been lost by a failover that can have lost
    its COMMIT. A delivery that has been lost is given again, under the same count or a smaller one.
    Of others the outcome may have been lost: their settle counts as unknown.
    """
    published = set(h.committed) | h.unknown
    gone = {
        number: [loss for loss in h.losses if _may_lose(loss, *h.commits[number])]
        for number in published - business.keys()
    }
    h.lost = {number for number, losses in gone.items() if number in h.committed and losses}
    # What no failover can have lost must be there.
    known = {n: queue for n, queue in h.committed.items() if n in gone and n not in h.lost}
    h.committed = {**business, **known}
    h.unknown &= business.keys()
    h.rolled_back |= gone.keys()
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
            kept += [d for d in all_of_it if not is_touched(d, h, gone[number])]
        else:
            kept += _kept(all_of_it, rows.get(number), h)
        kept += _given_twice(all_of_it, h.losses)
    # By identity: a delivery that was given again may be equal to its predecessor.
    kept_ids = {id(delivery) for delivery in kept}
    h.forgotten = [delivery for delivery in h.deliveries if id(delivery) not in kept_ids]
    kept = [delivery for delivery in h.deliveries if id(delivery) in kept_ids]
    touched = {d.number for d in kept if is_touched(d, h, h.losses)}
    h.listed = {number for number in h.listed if number not in touched}
    # A report names a process and a row: of one that was given again, either message may be meant.
    doubtful = {
        (d.pid, d.row)
        for d in h.deliveries
        if (d.lost or d.unknown) and len(h.rows.get(d.row, ())) > 1
    }
    h.deliveries = [
        replace(d, unknown=True) if is_touched(d, h, h.losses) or (d.pid, d.row) in doubtful else d
        for d in sorted(kept, key=lambda d: d.at)
    ]


def _may_lose(loss: Loss, sent: float, answered: float) -> bool:
    """Whether `loss` may be of a COMMIT that was sent and answered then."""
    return sent < loss.end and answered >= loss.start


def is_touched(delivery: Delivery, h: History, losses: list[Loss]) -> bool:
    """Whether one of `losses` may be of the claim or of the outcome of `delivery`."""
    written = _written_by(delivery, h)
    return any(_claimed_from(delivery) < loss.end and written >= loss.start for loss in losses)


def _claimed_from(delivery: Delivery) -> float:
    """When `delivery` was given at the earliest."""
    return delivery.claimed if delivery.asked is None else delivery.asked


def _written_by(delivery: Delivery, h: History) -> float:
    """When the outcome of `delivery` was written at the latest.

    A worker writes an outcome within the lease, or says that it is lost. While a process or the
    machine stands still, it does neither.
    """
    if delivery.ended_at is None:
        return inf
    latest = delivery.ended_at + h.lease
    for stall in sorted(h.stalls, key=lambda stall: stall.start):
        if stall.pid in {None, delivery.pid} and delivery.ended_at < stall.end:
            latest += stall.end - stall.start if stall.start < latest else 0.0
    return latest


def _given_twice(deliveries: list[Delivery], losses: list[Loss]) -> list[Delivery]:
    """Those of one message that one server has given under the same count."""
    twice = []
    in_order = sorted(deliveries, key=lambda d: (d.deliveries, _claimed_from(d)))
    for _, same in groupby(in_order, key=lambda d: d.deliveries):
        given = list(same)
        crossed = [
            [x for x in losses if _claimed_from(first) < x.end and then.claimed >= x.down]
            for first, then in pairwise(given)
        ]
        # Each failover lets one more server give a count.
        most = 1 + len({id(loss) for each in crossed for loss in each})
        for both, between in zip(pairwise(given), crossed, strict=True):
            if len(given) > most or not between:
                twice += both
    return twice


def _kept(deliveries: list[Delivery], row: Mapping[str, Any] | None, h: History) -> list[Delivery]:
    """Those deliveries of one message that the database may know."""
    touched = [d for d in deliveries if is_touched(d, h, h.losses)]
    kept = [d for d in deliveries if not is_touched(d, h, h.losses)]
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

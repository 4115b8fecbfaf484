"""One rule for each promise: what in a history breaks it. An empty list is a kept promise."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from tests.faults import feature_rules
from tests.faults.history import AT_MOST_ONCE, FIRST, LAST, Delivery, History
from tests.faults.plan import TRANSACTIONAL, key_of

ORDERED = "ordered"
BATCH = "batch"
ENDED_INSIDE = "transaction_ended"
"""Why a message is FAILED whose handler has committed its transaction itself."""
MAY_BE_COMPLETED = frozenset({"ack", "tried", "caught"})
HAVE_FAILED = frozenset({"nack", "refused", "tried", "caught", "rolled back"})
"""Ends after which the handler may start again."""
MOST_WHILE_FROZEN = 2
"""Starts of a message while no outcome can be written: one by each worker of a cell."""
NOT_KNOWN = "not known"
"""What became of a handler whose process was killed, or whose outcome may not be written."""
UNNOTED = frozenset({"dying"})
"""Queues whose handlers note nothing, as they always fail."""
HEALTH_DELAY = 1.0
"""Seconds for a process to notice a refusal."""


def nothing_lost_nothing_unseen(h: History) -> list[str]:
    """1: what was committed has ended, in one place; what was not committed was never seen."""
    found = [f"message {row['number']} is still {row['state']}" for row in h.live]
    places = Counter(row["number"] for row in (*h.archived, *h.live))
    found += [f"message {n} was committed and is gone" for n in h.committed if not places[n]]
    found += [f"message {n} is there {times} times" for n, times in places.items() if times > 1]
    seen = set(places) | {d.number for d in h.deliveries}
    found += [f"message {n} was rolled back and was seen" for n in seen & h.rolled_back]
    known = set(h.committed) | h.unknown
    return found + [f"message {n} was never published" for n in seen - known - h.rolled_back]


def nothing_stands_still(h: History) -> list[str]:
    """1: what cannot be written or sent now keeps nothing else from being handled, and passes with
    its cause."""
    return list(h.stuck)


def no_start_without_a_reason(h: History) -> list[str]:
    """2: after a start the next needs a nack, a crash, a lost lease, or an unknown settle."""
    found = []
    for number, starts in _by_number(h).items():
        for before, after in itertools.pairwise(starts):
            charged = after.attempts > before.attempts
            excused = before.lost or before.unknown or before.pid in h.killed
            if not (charged or excused or before.ended in HAVE_FAILED):
                found.append(
                    f"message {number} was started as delivery {after.deliveries} by {after.pid}, "
                    f"though delivery {before.deliveries} by {before.pid} ended with {before.ended}"
                )
    return found


def no_repeats_in_vain(h: History) -> list[str]:
    """2: while no outcome can be written, handlers are not started again and again."""
    found = []
    for frozen in h.frozen:
        inside = [
            d for d in h.deliveries if frozen.start <= d.at < frozen.end and d.queue != AT_MOST_ONCE
        ]
        found += [
            f"{d.pid}, which was started while no outcome could be written, started message "
            f"{d.number}"
            for d in inside
            if d.pid in frozen.unfit
        ]
        found += [
            f"message {n} was started {times} times while no outcome could be written"
            for n, times in Counter(d.number for d in inside).items()
            if times > MOST_WHILE_FROZEN
        ]
    return found


def health_is_told(h: History) -> list[str]:
    """A process says that it is not well while outcomes cannot be written, and that it is when they
    can be."""
    found = []
    for frozen in h.frozen:
        found += [
            f"{pid}, which was started while no outcome could be written, said that it was healthy"
            for pid in frozen.unfit & h.health.keys()
            if frozen.brief and any(well and at < frozen.end for at, well in h.health[pid])
        ]
        told = [said for said in h.health.values() if said[0][0] < frozen.start]
        if (
            told
            and not frozen.brief
            and all(_was_healthy(said, frozen.start, frozen.end + HEALTH_DELAY) for said in told)
        ):
            found.append("no process said that it was not healthy while a right was missing")
    # Of these none is killed, unless it does not end.
    newcomers = frozenset[int]().union(*(frozen.unfit for frozen in h.frozen if frozen.brief))
    gone = (h.killed - newcomers) | h.refused
    found += [f"{pid} never said how it was" for pid in newcomers - gone - h.health.keys()]
    last = {pid: said[-1] for pid, said in h.health.items() if pid not in gone}
    return found + [
        f"{pid} is still not healthy" for pid, (_, healthy) in last.items() if not healthy
    ]


def _was_healthy(said: Sequence[tuple[float, bool]], start: float, end: float) -> bool:
    """Whether a process that has said this, each change once, was healthy all the time from `start`
    to `end`."""
    earlier = [healthy for at, healthy in said if at < start]
    return all([*earlier[-1:], *(healthy for at, healthy in said if start <= at < end)])


def stale_workers_change_nothing(h: History) -> list[str]:
    """3: no delivery is given twice, and the archive says what the last delivery ended in."""
    found = []
    given = Counter((d.number, d.deliveries) for d in h.deliveries)
    found += [
        f"delivery {d} of message {n} was started {c} times" for (n, d), c in given.items() if c > 1
    ]
    last = _last(h)
    for row in h.archived:
        number = row["number"]
        count = row["deliveries_count"]
        later = [d.deliveries for d in h.deliveries if d.number == number and d.deliveries > count]
        if later:
            found.append(f"message {number} ended with delivery {count}, but {later} were started")
        ended = last.get((number, count))
        if row["state"] == "COMPLETED" and row["queue"] != AT_MOST_ONCE:
            if ended is None or ended.ended not in MAY_BE_COMPLETED:
                found.append(
                    f"message {number} is COMPLETED, but its delivery {count} ended with {ended}"
                )
            elif ended.lost and not ended.unknown:
                found.append(
                    f"message {number} is COMPLETED by delivery {count}, whose lease was lost"
                )
        elif row["state"] == "FAILED" and ended is not None and ended.ended == "ack":
            found.append(
                f"message {number} is FAILED ({row['reason']}), but its delivery {count} was acked"
            )
    return found


def message_ids_are_of_one_message(h: History) -> list[str]:
    """2: a handler may recognise a message by its `message_id`: no other has the same."""
    return [
        f"{text!r} is the message_id of messages {sorted(numbers)}"
        for text, numbers in h.message_ids.items()
        if len(numbers) > 1
    ]


def failures_have_a_cause(h: History) -> list[str]:
    """8: a message is FAILED only if a handler of it has failed, or did not come to its end."""
    ends: dict[int, set[str | None]] = defaultdict(set)
    for d in (*h.deliveries, *h.forgotten):
        ends[d.number].add(d.ended)
        if d.pid in h.killed or d.unknown:
            ends[d.number].add(NOT_KNOWN)
    return [
        f"message {row['number']} is FAILED ({row['reason']}), and its handlers ended with "
        f"{sorted(map(str, ends[row['number']]))}"
        for row in h.archived
        if row["state"] == "FAILED" and row["queue"] not in UNNOTED
        if not _explains(ends[row["number"]], row["reason"])
    ]


def _explains(ends: AbstractSet[str | None], reason: str) -> bool:
    """Whether handlers that ended so may have made their message FAILED for `reason`."""
    if reason == ENDED_INSIDE:
        return "committed" in ends
    if reason == "unknown_outcome":
        return NOT_KNOWN in ends
    return bool(ends - {"ack", NOT_KNOWN})


def live_holders_keep_their_leases(h: History) -> list[str]:
    """3, its other side: a worker that can renew its lease does not lose it."""
    return [
        f"delivery {d.deliveries} of message {d.number} lost its lease in {d.pid}, "
        "which nothing had disturbed"
        for d in h.deliveries
        if d.lost and d.pid not in h.disturbed and not _stood_still(d, h)
    ]


def excused(h: History) -> int:
    """How many lost leases only a machine that stood still excuses."""
    return sum(d.lost and d.pid not in h.disturbed and _stood_still(d, h) for d in h.deliveries)


def _stood_still(delivery: Delivery, h: History) -> bool:
    """Whether its process stood still while it had the lease."""
    return any(
        stall.pid in {None, delivery.pid}
        and stall.start < delivery.lost_at
        and stall.end > delivery.at - h.lease
        for stall in h.stalls
    )


def at_most_once_is_kept(h: History) -> list[str]:
    """4: ACK_FIRST starts once or never; never only after a crash or an unknown commit."""
    starts = Counter(d.number for d in h.deliveries if d.queue == AT_MOST_ONCE)
    return [
        f"message {n} of ACK_FIRST was started {times} times"
        for n, times in starts.items()
        if times > 1
    ]


def cut_off_starts_are_listed(h: History) -> list[str]:
    """4: a removed message whose handler has not ended is listed; one whose handler has ended is
    not."""
    starts = _by_number(h)
    removed = {
        r["number"] for r in h.archived if r["queue"] == AT_MOST_ONCE and r["state"] == "COMPLETED"
    }
    found = [f"message {n} is listed, and was not removed first" for n in h.listed - removed]
    for row in h.archived:
        number = row["number"]
        if row["queue"] != AT_MOST_ONCE or row["state"] != "COMPLETED":
            continue
        ended = [d for d in starts[number] if d.ended is not None]
        if not ended and number not in h.listed:
            found.append(
                f"message {number} of ACK_FIRST was cut off ({starts[number]}), "
                f"and is not listed: {row}"
            )
        if ended and number in h.listed and ended[0].pid not in h.killed:
            found.append(f"message {number} of ACK_FIRST is listed, but its handler has ended")
    return found


def order_is_kept(h: History) -> list[str]:
    """7: of a key one message at a time, in the order of ids, but for workers that have lost their
    lease."""
    found = []
    keys: defaultdict[str, list[Delivery]] = defaultdict(list)
    for delivery in sorted(h.deliveries, key=lambda d: d.at):
        key = key_of(delivery.number)
        if delivery.queue == ORDERED and key is not None:
            keys[key].append(delivery)
    for key, starts in keys.items():
        for before, after in itertools.combinations(starts, 2):
            if before.number == after.number:
                continue
            # Published by a COMMIT without an answer, it may have come later than its number says.
            if after.number < before.number and not (_stale(after, h) or after.number in h.unknown):
                found.append(
                    f"message {after.number} of {key!r} was started after message {before.number}"
                )
            if (before.ended_at is None or before.ended_at > after.at) and not _stale(before, h):
                found.append(
                    f"message {after.number} of {key!r} was started while {before.number} ran"
                )
    return found


def _stale(delivery: Delivery, h: History) -> bool:
    return delivery.lost or delivery.unknown or delivery.pid in h.killed


def transactions_are_exactly_once(h: History) -> list[str]:
    """5: both effects of each completed message of a transactional subscriber, and none of any
    other.

    But what was before a COMMIT of the handler's own, which is FAILED for it, stays.
    """
    done = {row["number"]: row for row in h.archived if row["queue"] in TRANSACTIONAL}
    last = _last(h)
    starts = Counter(d.number for d in h.deliveries)
    effects = Counter(h.effects)
    found = []
    for number in done.keys() | {number for number, _ in h.effects}:
        first = effects[number, FIRST]
        second = effects[number, LAST]
        state, reason = _end_of(done.get(number))
        if state == "COMPLETED":
            right = (first, second) == (1, 1)
        elif reason == ENDED_INSIDE:
            right = first <= starts[number] and not second
        else:
            right = not first and not second
        if not right:
            found.append(
                f"message {number} is {state} ({reason}) with effects {first} and {second}"
            )
    for number, row in done.items():
        delivery = last.get((number, row["deliveries_count"]))
        inside = delivery is not None and delivery.ended == "committed"
        if inside != (row["reason"] == ENDED_INSIDE) and not (
            inside and row["reason"] == "max_deliveries"
        ):
            found.append(
                f"message {number} is {row['state']} ({row['reason']}), and its handler ended with "
                f"{delivery and delivery.ended}"
            )
    return found


def _end_of(row: Mapping[str, Any] | None) -> tuple[str, str | None]:
    return ("not done", None) if row is None else (row["state"], row["reason"])


def answers_follow_acks(h: History) -> list[str]:
    """6: an answer for each completed message of a chaining subscriber, whole, and for no other."""
    sizes = defaultdict(list)
    for answer in h.answers:
        for number in () if answer.joint else answer.numbers:
            sizes[number].append(answer.size)
    same = sum(1 for answer in h.answers if not answer.numbers)
    found = [f"{same} answers have the same dedup_id"] if same > 1 else []
    wanted = {number: d.answer for number, d in _completed(h).items()}
    for number in wanted.keys() | sizes.keys():
        if number not in wanted:
            found.append(f"message {number} was answered, but is not COMPLETED")
        elif sizes[number] != ([] if wanted[number] is None else [wanted[number]]):
            found.append(
                f"message {number} is COMPLETED with answers of {sizes[number]} bytes, "
                f"not {wanted[number]}"
            )
    return found


def batches_are_answered_whole(h: History) -> list[str]:
    """6: the answer of a batch is there once, with the acks of all its messages, or not at all."""
    wanted = {
        number for number, d in _completed(h).items() if d.queue == BATCH and d.answer is not None
    }
    answered = Counter(number for answer in h.answers if answer.joint for number in answer.numbers)
    found = [
        f"message {n} of a batch is COMPLETED, and {answered[n]} answers of batches are for it"
        for n in wanted
        if answered[n] != 1
    ]
    return found + [
        f"message {n} of a batch was answered, and its ack was not written"
        for n in answered
        if n not in wanted
    ]


def limits_hold(h: History) -> list[str]:
    """8: no start beyond the limits; crashes cost deliveries, not attempts."""
    found = [
        f"message {d.number} was started with {d.attempts} attempts, delivery {d.deliveries}"
        for d in h.deliveries
        if d.attempts >= h.max_attempts or d.deliveries - d.attempts > h.max_deliveries
    ]
    starts = Counter(d.number for d in h.deliveries)
    for row in h.archived:
        attempts = row["attempts_count"]
        number = row["number"]
        # ACK_FIRST charges the attempt before the start, which may then never come.
        charged_first = row["queue"] == AT_MOST_ONCE
        if attempts > row["deliveries_count"] or (attempts > starts[number] and not charged_first):
            found.append(
                f"message {number} was charged {attempts} attempts for {starts[number]} starts"
            )
        if (
            row["state"] == "FAILED"
            and row["reason"] == "max_attempts"
            and attempts < h.max_attempts
        ):
            found.append(f"message {number} gave up after {attempts} attempts")
    return found


RULES: dict[str, Callable[[History], list[str]]] = {
    "1 nothing lost": nothing_lost_nothing_unseen,
    "1 nothing stands still": nothing_stands_still,
    "2 no repeat without a reason": no_start_without_a_reason,
    "2 no repeat in vain": no_repeats_in_vain,
    "2 message_id of one message": message_ids_are_of_one_message,
    "3 stale workers change nothing": stale_workers_change_nothing,
    "3 live holders keep their leases": live_holders_keep_their_leases,
    "4 at most once": at_most_once_is_kept,
    "4 cut-off starts are listed": cut_off_starts_are_listed,
    "5 transactions": transactions_are_exactly_once,
    "6 answers": answers_follow_acks,
    "6 answers of batches": batches_are_answered_whole,
    "7 order": order_is_kept,
    "8 limits": limits_hold,
    "8 no FAILED without a cause": failures_have_a_cause,
    "policies": feature_rules.policies_hold,
    "moves and cancels": feature_rules.moves_and_cancels_are_final,
    "schedules": feature_rules.schedules_are_exactly_once,
    "nothing left behind": feature_rules.no_queue_is_left_behind,
    "health told": health_is_told,
}


def check(history: History) -> dict[str, list[str]]:
    """The violations of each promise."""
    return {name: rule(history) for name, rule in RULES.items()}


def _by_number(h: History) -> dict[int, list[Delivery]]:
    starts: dict[int, list[Delivery]] = defaultdict(list)
    for delivery in sorted(h.deliveries, key=lambda d: (d.deliveries, d.at)):
        starts[delivery.number].append(delivery)
    return starts


def _last(h: History) -> dict[tuple[int, int], Delivery]:
    return {(d.number, d.deliveries): d for d in h.deliveries}


def _completed(h: History) -> dict[int, Delivery]:
    """Completed messages of chaining subscribers, with the delivery that completed them."""
    last = _last(h)
    rows = [
        row for row in h.archived if row["state"] == "COMPLETED" and row["queue"] != AT_MOST_ONCE
    ]
    marks = [(row["number"], row["deliveries_count"]) for row in rows]
    return {mark[0]: last[mark] for mark in marks if mark in last}

"""What scheduling policies promise, checked on what a fleet has left behind: its archive and its
own records.

Times are whole microseconds of the database's clock. Each check returns what is wrong, in one line
each.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.processes.policy_worker import EPOCH, STEP, Start

SECOND = 1_000_000


def micros(at: Any) -> int:
    """A time as it is stored."""
    return int((at - EPOCH) // STEP)


@dataclass
class Left:
    """The rows and records of one queue after the run."""

    rows: list[dict[str, Any]]
    """Its archive, by id."""
    starts: list[Start]
    """By their time."""
    again: list[Start]
    visible: dict[int, int] = field(default_factory=dict)
    """When each message could be seen by others at the latest."""
    killed: int = 0
    """The process that was killed."""

    def of(self, state: str) -> list[dict[str, Any]]:
        """Rows that ended so."""
        return [row for row in self.rows if row["state"] == state]

    @property
    def by_key(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of each key, by id."""
        found = defaultdict(list)
        for row in self.rows:
            if row["key"] is not None:
                found[row["key"]].append(row)
        return found


def nothing_lost(left: Left, published: Iterable[int], states: str = "COMPLETED") -> list[str]:
    """Each message has ended in one of `states`; who ended well was started, and twice only because
    of the kill."""
    wrong = []
    if {row["id"] for row in left.rows} != set(published):
        wrong.append(f"published {sorted(published)}, archived {[row['id'] for row in left.rows]}")
    wrong += [
        f"{row['id']} is {row['state']}: {row['reason']}"
        for row in left.rows
        if row["state"] not in states
    ]
    starts = defaultdict(list)
    for start in left.starts:
        starts[start.id].append(start)
    for row in left.rows:
        own = starts[row["id"]]
        if row["state"] == "COMPLETED" and not own:
            wrong.append(f"{row['id']} is COMPLETED and was never started")
        if len(own) > row["deliveries_count"]:
            wrong.append(f"{row['id']}: {len(own)} starts, {row['deliveries_count']} deliveries")
        for first, then in pairwise(own):
            if first.attempt == then.attempt and first.pid != left.killed:
                wrong.append(f"{row['id']} was started twice, by a process that was not killed")
    return wrong


def delayed(left: Left, delay: int) -> list[str]:
    """No claim before created_at + delay."""
    return _not_before(left, {row["id"]: micros(row["created_at"]) + delay for row in left.rows})


def in_window(left: Left, opens: int, closes: int) -> list[str]:
    """Every claim within the window."""
    wrong = _not_before(left, {row["id"]: opens for row in left.rows})
    return wrong + [
        f"{s.id} was claimed after the window" for s in left.starts if s.acquired >= closes
    ]


def _not_before(left: Left, earliest: dict[int, int]) -> list[str]:
    return [
        f"{s.id} was claimed {(earliest[s.id] - s.acquired) / SECOND} s too early"
        for s in left.starts
        if s.acquired < earliest[s.id]
    ]


def debounced(
    left: Left, window: int, max_wait: int | None = None, *, leading: bool = False
) -> list[str]:
    """Of each burst, as created_at says, its last message (leading: its first) was delivered, and
    no other.

    A message dated before its burst's end, but not certain to be committed by then, may have missed
    it.
    """
    wrong = []
    for key, rows in left.by_key.items():
        messages = [(micros(row["created_at"]), left.visible[row["id"]], row["id"]) for row in rows]
        length = (window, max_wait or NEVER, leading)
        expected = _bursts(messages[1:], length, messages[0][0], messages[0][0], (messages[0][2],))
        delivered = tuple(row["id"] for row in rows if row["state"] == "COMPLETED")
        if delivered not in expected:
            wrong.append(f"{key}: delivered {delivered}, the bursts' are {expected}")
        wrong += superseded(rows, leading=leading)
        runs = [s.id for s in left.starts if s.key == key]
        if sorted(runs) != runs:
            wrong.append(f"{key}: started as {runs}")
    return wrong


NEVER = 1 << 62


def _bursts(
    messages: Sequence[tuple[int, int, int]],
    length: tuple[int, int, bool],
    start: int,
    last: int,
    chosen: tuple[int, ...],
) -> set[tuple[int, ...]]:
    """What may be delivered: `chosen`, the last of them of a burst from `start` to `last`, and what
    comes."""
    window, max_wait, leading = length
    for n, (at, visible, message) in enumerate(messages):
        end = start + window if leading else min(last + window, start + max_wait)
        joined = (*chosen[:-1], chosen[-1] if leading else message)
        if at <= end < visible:
            rest = messages[n + 1 :]
            missed = _bursts(rest, length, at, at, (*chosen, message))
            return missed | _bursts(rest, length, start, at, joined)
        chosen, start = (joined, start) if at <= end else ((*chosen, message), at)
        last = at
    return {chosen}


def superseded(rows: Sequence[dict[str, Any]], *, leading: bool) -> list[str]:
    """Each superseded message names one that has been delivered."""
    by_id = {row["id"]: row for row in rows}
    wrong = []
    for row in rows:
        if row["state"] != "DISCARDED":
            continue
        other = by_id.get(row["related_id"]) if row["reason"] == "superseded" else None
        if (
            other is None
            or other["state"] != "COMPLETED"
            or (other["id"] < row["id"]) is not leading
        ):
            wrong.append(f"{row['id']} is {row['reason']!r}, which was not delivered in its place")
    return wrong


ROUNDING = 10
"""Microseconds: times of a process's clock are floats."""


def throttled(left: Left, rate: int, per: int, *, by_key: bool = False) -> list[str]:
    """No start before its slot, and at most `rate` in any period, by the machine's clock."""
    looks = defaultdict(list)
    wrong = []
    for start in left.starts:
        if start.slot is None:
            wrong.append(f"{start.id} was started without a slot")
            continue
        if start.at < start.slot - 1:
            wrong.append(f"{start.id} was started {start.slot - start.at} µs before its slot")
        if start.looked is None:
            wrong.append(f"{start.id} was started without a look whether its slot was over")
        else:
            looks[start.key if by_key else None].append(start.looked)
    for key, taken in looks.items():
        wrong += [f"{key}: {line}" for line in over_rate(taken, rate, per - ROUNDING)]
    return wrong


def over_rate(starts: Sequence[int], rate: int, per: int) -> list[str]:
    """Periods of length `per` (its end excluded) with more than `rate` of `starts`."""
    ordered = sorted(starts)
    return [
        f"{rate + 1} starts within {(late - early) / SECOND} s"
        for early, late in zip(ordered, ordered[rate:], strict=False)
        if late - early < per
    ]


def once(left: Left, unknown: set[int]) -> list[str]:
    """No key has run twice without having asked for it; what the killed process held is listed, and
    nothing else."""
    wrong = []
    runs = Counter(s.key for s in left.starts)
    asked = Counter(s.key for s in left.again)
    wrong += [
        f"{key} ran {n} times, asked for {asked[key]}"
        for key, n in runs.items()
        if n > 1 + asked[key]
    ]
    failed = {row["id"] for row in left.rows if row["reason"] == "unknown_outcome"}
    if failed != unknown:
        wrong.append(f"FAILED as unknown_outcome: {sorted(failed)}, listed: {sorted(unknown)}")
    going = [(s.id, s.pid, s.attempt) for s in left.again]
    wrong += [
        f"{s.id} is unknown, though {s.pid}, which lives, ran it"
        for s in left.starts
        if s.id in failed and s.pid != left.killed and (s.id, s.pid, s.attempt) not in going
    ]
    for key, rows in left.by_key.items():
        ended = Counter(row["state"] for row in rows)
        if ended["COMPLETED"] + ended["FAILED"] != 1:
            wrong.append(f"{key} ended {dict(ended)}")
    return wrong


def ordered(left: Left) -> list[str]:
    """The starts of each key are in the order of ids."""
    wrong = []
    for key in left.by_key:
        ids = [s.id for s in left.starts if s.key == key]
        if ids != sorted(ids):
            wrong.append(f"{key}: started as {ids}")
    return wrong


def most_at_once(rows: Iterable[dict[str, Any]]) -> int:
    """How many leases were there at the same moment, by the database's clock: from claims to
    archivals."""
    moments = sorted(
        [(micros(row["acquired_at"]), 1) for row in rows]
        + [(micros(row["archived_at"]), -1) for row in rows]
    )
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def rested(left: Left, seconds: float) -> list[str]:
    """After a failure, its process has started nothing for so long (one worker each)."""
    wrong = []
    for pid in {s.pid for s in left.starts}:
        own = sorted((s for s in left.starts if s.pid == pid), key=lambda s: s.monotonic)
        wrong += [
            f"{then.id} was started {then.monotonic - failed.monotonic} s "
            f"after the failure of {failed.id}"
            for failed, then in pairwise(own)
            if failed.attempt == 0 and then.monotonic - failed.monotonic < seconds
        ]
    return wrong

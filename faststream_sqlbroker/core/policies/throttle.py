"""Throttle: at most `rate` starts in any period, for the whole fleet.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from faststream_sqlbroker.core.checks import one_of, whole_number
from faststream_sqlbroker.core.policies import options
from faststream_sqlbroker.core.policies.header import Key, checked_key, key_json, key_text
from faststream_sqlbroker.core.policies.options import MICROSECONDS, microseconds, seconds
from faststream_sqlbroker.core.policies.scopes import checked_scope, scope_text
from faststream_sqlbroker.core.policies.slot_log import Limit, Need, SlotLog
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError

MOST_RATE = 1_000_000
"""Slots in a period."""
MOST_EXACT = 10_000
"""Slots that are kept one by one to grant the next; more would make every claim read and write a
large row."""
GRAINS = 500
"""Above that, the slots of such a part of the period are kept as one number, with the time of the
last of them. So none is forgotten too early, and each at most so much too late."""
BACKOFF_SHARE = 10
"""What was put off comes back within this part of an interval after the next free slot."""
LEAST_BACKOFF = MICROSECONDS // 100
"""10 ms: or within this time, if that is longer."""
LEAST_LAG = MICROSECONDS // 10
"""The least default of `max_lag`, in microseconds: with less, slots of a fast throttle would pass
by while a claim's answer is on its way."""
AHEAD = MICROSECONDS // 5
"""How long before its time a slot is granted (microseconds). So one claim takes several slots, and
no slot passes by while the claim runs."""
SLOT_SHARE = 4
"""What waits for a worker is to start within `max_lag` divided by this: handlers may get slower."""

OTHERS_LIVE = 60 * MICROSECONDS
"""For so long after its last slot, the options of another process hold, too (microseconds)."""

Exceeded = Literal["wait", "backoff", "drop", "dead_letter"]


@dataclass(frozen=True, init=False)
class Throttle:
    """Every attempt takes a slot; in any period of length `per`, at most `rate` slots are granted.

    What is within the rate starts at once: any `rate` messages of a period, also if they come
    together. A smaller `burst` spaces them. The slots are kept in the database, so the limit holds
    for the whole fleet. A handler never starts before its slot. If it cannot start within `max_lag`
    after it, the message gets another slot. A slot that was not used is not granted again.
    """

    rate: int
    per: int
    """Microseconds."""
    key: Key
    burst: int
    when_exceeded: Exceeded
    max_lag: int
    """Microseconds."""
    without_key: str
    scope: str | None

    def __init__(
        self,
        rate: int,
        per: Duration,
        *,
        key: Key = False,
        burst: int | None = None,
        when_exceeded: Exceeded = "wait",
        max_lag: Duration | None = None,
        without_key: Literal["deliver", "dead_letter"] = "deliver",
        scope: str | None = None,
    ) -> None:
        """Say how many, and what happens to messages above the rate.

        Args:
            rate: Most slots in any period, 1 to 1 000 000.
            per: The period.
            key: Whether each key has slots of its own; else all messages of a queue share them.
                `Header("tenant")`: each value of that header.
            burst: Slots that may be granted at the same moment, 1 to `rate`; they count within the
                rate. None is `rate`; 1 spaces slots evenly.
            when_exceeded: "wait" keeps the message until there is a slot, "backoff" puts it off
                until shortly after the next free slot, "drop" discards it, "dead_letter" makes it
                FAILED; the last two with the reason "throttled".
            max_lag: How much later than its slot a handler may start; default one interval (per /
                rate), at least 100 ms.
            without_key: With key=True, what happens to a message without a key: it is handled
                without a limit, or it is FAILED.
            scope: A name that several queues and subscribers share: their slots are one budget.
                None: each queue has slots of its own.

        Raises:
            SetupError: a value out of its range, `without_key` without key=True, or `scope` with
                key=True or a `when_exceeded` other than "wait".
        """
        whole_number("Throttle's rate", rate, most=MOST_RATE)
        period = microseconds("Throttle's per", per)
        checked_key("Throttle's key", key)
        together = rate if burst is None else whole_number("Throttle's burst", burst, most=rate)
        one_of(
            "Throttle's when_exceeded", when_exceeded, ("wait", "backoff", "drop", "dead_letter")
        )
        options.without_key("Throttle", without_key, keyed=bool(key), mend="key=True")
        shared = checked_scope("Throttle", scope, refused=_unshared(key, when_exceeded))
        if period < rate:
            raise SetupError(
                f"Throttle({rate}, per={seconds(period)}) is more than one slot a microsecond, "
                "which no clock tells apart: lower the rate, or leave the policy out"
            )
        lag = (
            max(period // rate, LEAST_LAG)
            if max_lag is None
            else microseconds("Throttle's max_lag", max_lag)
        )
        values = {
            "rate": rate,
            "per": period,
            "key": key,
            "burst": together,
            "when_exceeded": when_exceeded,
            "max_lag": lag,
            "without_key": without_key,
            "scope": shared,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        each = key_text("key", self.key)
        burst = "" if self.burst == self.rate else f", burst={self.burst}"
        exceeded = "" if self.when_exceeded == "wait" else f", when_exceeded={self.when_exceeded}"
        options = f"{each}{burst}{exceeded}{scope_text(self.scope)}"
        return f"Throttle({self.rate}, per={seconds(self.per)}{options})"

    def as_json(self) -> dict[str, Any]:
        """The arguments of an equal policy, as JSON values (`core.policies.stored`). `max_lag`
        is left out: it concerns no other process.
        """
        return {
            "rate": self.rate,
            "per": self.per / MICROSECONDS,
            "key": key_json(self.key),
            "burst": self.burst,
            "when_exceeded": self.when_exceeded,
            "without_key": self.without_key,
            "scope": self.scope,
        }

    @property
    def gates(self) -> bool:
        """Whether a slot belongs to no message: messages wait unclaimed, and the first takes it.

        Else each message gets a slot of its own.
        """
        return self.when_exceeded == "wait" and not self.key

    @property
    def kept(self) -> int:
        """How many of the last slots are needed to find the next."""
        return _kept(self.limit)

    @property
    def limit(self) -> Limit:
        """What decides about slots."""
        return self.rate, self.per, self.burst

    @property
    def grain(self) -> int:
        """Slots within so many microseconds are kept as one number."""
        return _need(self.limit)[1]

    @property
    def backoff(self) -> int:
        """Within how many microseconds after a slot messages come back that were put off."""
        return max(self.per // self.rate // BACKOFF_SHARE, LEAST_BACKOFF)

    def next_slot(self, log: SlotLog, at: int) -> int:
        """When the next slot is, at `at` or later: of the options of all processes that have taken
        slots lately the lowest hold.

        Args:
            log: The last ones granted; at least `kept` of them, or all.
            at: The earliest that is wanted.
        """
        if log.others.keys() <= {self.limit}:
            return max(_next(self.limit, log, at), log.last)
        limits = self._limits(log, at)
        # Each limit may put the slot off. It only moves forward, so the loop ends.
        while (later := max(_next(limit, log, at) for limit in limits)) > at:
            at = later
        return max(at, log.last)

    def room(self, log: SlotLog, at: int) -> int:
        """How many slots may be granted at `at`, where one may."""
        return min(_room(limit, log, at) for limit in self._limits(log, at))

    def _limits(self, log: SlotLog, at: int) -> set[Limit]:
        live = {limit for limit, seen in log.others.items() if seen + OTHERS_LIVE >= at}
        return {self.limit, *live}

    def needs(self, log: SlotLog) -> list[Need]:
        """Which of the last slots this and the other processes need."""
        return [_need(limit) for limit in self._limits(log, log.last)]

    def longest_period(self, log: SlotLog) -> int:
        """For how long a slot counts for this or another process (microseconds)."""
        return max(per for _, per, _ in self._limits(log, log.last))


def _kept(limit: Limit) -> int:
    rate, _, burst = limit
    # If the rate is a multiple of the burst, keeping bursts apart keeps the rate, too.
    return burst if rate % burst == 0 else rate


def _need(limit: Limit) -> Need:
    kept = _kept(limit)
    return kept, 1 if kept <= MOST_EXACT else -(-limit[1] // GRAINS)


def _next(limit: Limit, log: SlotLog, at: int) -> int:
    """The first moment at `at` or later that keeps to `limit`."""
    rate, per, burst = limit
    # One microsecond more than the exact quotient: two slots a whole period apart are not in one
    # period.
    if len(log) >= burst:
        at = max(at, log.nth_last(burst) + burst * per // rate + 1)
    if rate % burst and len(log) >= rate:
        at = max(at, log.nth_last(rate) + per + 1)
    return at


def _room(limit: Limit, log: SlotLog, at: int) -> int:
    """How many more slots `limit` allows at `at`, where `_next` allows one."""
    rate, per, burst = limit
    room = burst - log.count_since(at - burst * per // rate)
    return min(room, rate - log.count_since(at - per)) if rate % burst else room


def _unshared(key: Key, when_exceeded: Exceeded) -> str | None:
    """The option that a scope cannot have."""
    if key:
        return "key=True"
    return None if when_exceeded == "wait" else f"when_exceeded={when_exceeded!r}"


def load_slots(info: Any) -> SlotLog:
    """Slots as `dump_slots` wrote them; anything else counts as none."""
    log = SlotLog()
    if isinstance(info, dict):
        log.add_runs(info.get("slots", ()))
        log.others = {(rate, per, burst): seen for rate, per, burst, seen in info.get("by", ())}
    return log


def dump_slots(policy: Throttle, log: SlotLog) -> dict[str, Any]:
    """The slots that decide about the next, as JSON values."""
    runs = log.runs(policy.needs(log))
    if not runs:
        return {"slots": runs}
    live = {limit: at for limit, at in log.others.items() if at + OTHERS_LIVE >= log.last}
    by = [[*limit, at] for limit, at in sorted({**live, policy.limit: log.last}.items())]
    return {"slots": runs, "next": policy.next_slot(log, log.last), "by": by}


def kept_slots(
    policy: Throttle, logs: Mapping[str, SlotLog]
) -> dict[str, tuple[dict[str, Any], int]]:
    """What is stored of each key's slots, and when it may be forgotten."""
    return {
        key: (dump_slots(policy, log), forget_after(policy, log, log.last))
        for key, log in logs.items()
        if len(log)
    }


def forget_after(policy: Throttle, log: SlotLog, last: int) -> int:
    """When slots of which one was the `last` decide about no other any more: the periods of other
    processes may be longer.
    """
    return last + policy.longest_period(log) + MICROSECONDS


def next_known(info: Any) -> int | None:
    """When the next slot is, by what `dump_slots` wrote; None: nothing is known."""
    return info.get("next") if isinstance(info, dict) else None


def next_slots(
    throttles: Sequence[Throttle], logs: Sequence[SlotLog], at: int, until: int, most: int
) -> list[int]:
    """Up to `most` slots from `at` to `until` that all of `throttles` grant; nothing is written to
    `logs`.
    """
    found: list[int] = []
    logs = [log.copy() for log in logs]
    while len(found) < most:
        slot = at
        # Each throttle may put the slot off, so the search repeats until all agree. The slot only
        # moves forward, and each throttle has a next slot, so the loop ends.
        while (
            later := max(t.next_slot(log, slot) for t, log in zip(throttles, logs, strict=True))
        ) > slot:
            slot = later
        if slot > until:
            break
        # Many at once, as a fast throttle grants some to each claim.
        room = min(t.room(log, slot) for t, log in zip(throttles, logs, strict=True))
        count = min(room, most - len(found))
        found += [slot] * count
        for log in logs:
            log.append(slot, count)
    return found


def first_slot(throttles: Sequence[Throttle], logs: Sequence[SlotLog], at: int) -> int:
    """The first slot at `at` or later that all of `throttles` grant."""
    return next_slots(throttles, logs, at, 1 << 62, 1)[0]

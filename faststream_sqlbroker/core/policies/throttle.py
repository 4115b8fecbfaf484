"""Throttle: at most `rate` starts in any period, for the whole fleet.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from faststream_sqlbroker.core.checks import one_of, whole_number
from faststream_sqlbroker.core.policies import options
from faststream_sqlbroker.core.policies.header import Key, checked_key, key_text
from faststream_sqlbroker.core.policies.options import (
    CLOCK_STEP,
    MICROSECONDS,
    microseconds,
    seconds,
)
from faststream_sqlbroker.core.policies.scopes import checked_scope, scope_text
from faststream_sqlbroker.core.policies.slot_log import Limit, Need, SlotLog, Times
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError

MOST_RATE = 1_000_000
"""Slots in a period."""
MOST_EXACT = 10_000
"""Starts that are kept one by one to grant the next slot; more would make every claim read and
write a large row."""
GRAINS = 500
"""Above that, the starts of such a part of the period are kept as one number, with the time of the
last of them. So none is forgotten too early, and each at most so much too late."""
BACKOFF_FACTOR = 2
"""Each time that a message is put off, it is for so many times as long as before."""
LEAST_BACKOFF = MICROSECONDS // 10
"""100 ms: what is put off first is for one interval (per / rate), or for this if that is longer."""
MOST_BACKOFF = 60 * MICROSECONDS
"""A minute: nothing is put off for longer than the period, or than this if that is longer."""
AHEAD = MICROSECONDS // 5
"""How long before its time a slot is granted (microseconds), and longer where claims take long. So
one claim takes several slots, and no slot passes by while the claim runs."""

OTHERS_LIVE = 60 * MICROSECONDS
"""For so long after its last slot, the options of another process hold, too (microseconds)."""
MOST_REACH = 2 * MICROSECONDS
"""Where claims take long, slots are granted ahead by twice that time, and by no more than this."""
MOST_PATIENCE = 60 * MICROSECONDS
"""However late this process was lately, a start is no more than so much later than its slot."""

Exceeded = Literal["wait", "backoff", "drop", "dead_letter"]


@dataclass(frozen=True, init=False)
class Throttle:
    """Every attempt takes a slot; in any period of length `per`, at most `rate` handlers start.

    What is within the rate starts at once: any `rate` messages of a period, also if they come
    together. A smaller `burst` spaces them. The slots are kept in the database, so the limit holds
    for the whole fleet. A handler never starts before its slot, nor later than the log says that it
    may: then the message goes back, uncharged, and its slot is free for another. How much later
    that is follows from how late this process was; so what a slow process pays is rate, never the
    limit: about `rate` starts in `per` and that time.
    """

    rate: int
    per: int
    """Microseconds."""
    key: Key
    burst: int
    when_exceeded: Exceeded
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
        without_key: Literal["deliver", "dead_letter"] = "deliver",
        scope: str | None = None,
    ) -> None:
        """Say how many, and what happens to messages above the rate.

        Args:
            rate: Most starts in any period, 1 to 1 000 000.
            per: The period. Prefer 10 per second to 1 per 0.1 s: what each start is late costs
                rate, and less of a longer period.
            key: Whether each key has slots of its own; else all messages of a queue share them.
                `Header("tenant")`: each value of that header.
            burst: Slots that may be granted at the same moment, 1 to `rate`; they count within the
                rate. None is `rate`; 1 spaces slots evenly.
            when_exceeded: "wait" keeps the message until there is a slot, "backoff" puts it off for
                a random time that doubles, "drop" discards it, "dead_letter" makes it FAILED; the
                last two with the reason "throttled".
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
        own = {"when_exceeded": when_exceeded, "without_key": without_key, "scope": shared}
        options.assign(self, rate=rate, per=period, key=key, burst=together, **own)

    def __str__(self) -> str:
        each = key_text("key", self.key)
        burst = "" if self.burst == self.rate else f", burst={self.burst}"
        exceeded = "" if self.when_exceeded == "wait" else f", when_exceeded={self.when_exceeded}"
        options = f"{each}{burst}{exceeded}{scope_text(self.scope)}"
        return f"Throttle({self.rate}, per={seconds(self.per)}{options})"

    @property
    def gates(self) -> bool:
        """Whether a slot belongs to no message: messages wait unclaimed, and the first takes it.

        Else each message gets a slot of its own.
        """
        return self.when_exceeded == "wait" and not self.key

    @property
    def limit(self) -> Limit:
        """What decides about slots."""
        return self.rate, self.per, self.burst

    @property
    def grain(self) -> int:
        """Starts within so many microseconds are kept as one number."""
        return _need(self.limit)[1]

    @property
    def reported_to(self) -> int:
        """A reported start counts from the end of so many microseconds: so there are few different
        ones, however many there are.
        """
        return 1 if self.rate <= GRAINS else -(-self.per // GRAINS)

    def backoff(self, before: int) -> int:
        """For how long a message is put off that was put off so many times `before`: as a mean, by
        half of it less or more (microseconds).
        """
        first = max(self.per // self.rate, LEAST_BACKOFF)
        return int(min(first * BACKOFF_FACTOR**before, max(self.per, MOST_BACKOFF)))

    def next_slot(self, log: SlotLog, at: int) -> int:
        """When the next slot is, at `at` or later: of the options of all processes that have taken
        slots lately the lowest hold.

        Args:
            log: All that still counts at `at`.
            at: The earliest that is wanted.
        """
        if log.others.keys() <= {self.limit}:
            return _next(self.limit, log, at)
        limits = self.limits(log, at)
        # Each limit may put the slot off. It only moves forward, so the loop ends.
        while (later := max(_next(limit, log, at) for limit in limits)) > at:
            at = later
        return at

    def room(self, log: SlotLog, at: int) -> int:
        """Count the slots that may be granted at `at`, where one may."""
        return min(_room(limit, log, at) for limit in self.limits(log, at))

    def limits(self, log: SlotLog, at: int) -> set[Limit]:
        """What decides about slots at `at`: also the options of other processes."""
        live = {limit for limit, seen in log.others.items() if seen + OTHERS_LIVE >= at}
        return {self.limit, *live}

    def needs(self, log: SlotLog, now: int) -> list[Need]:
        """For how long this and the other processes need to know of starts."""
        return [_need(limit) for limit in self.limits(log, now)]

    def report(self, log: SlotLog, deadline: int, real: int | None) -> None:
        """What was to start until `deadline` did so at `real`, or did not (None)."""
        grain = max(_need(limit)[1] for limit in (self.limit, *log.others))
        # A log that has forgotten it knows of nothing that it could keep from a slot.
        if log.starts.remove(deadline, grain) and real is not None:
            step = self.reported_to
            log.starts.add(max(real, min(-(-real // step) * step, deadline)))


def _need(limit: Limit) -> Need:
    rate, per, _ = limit
    return per, 1 if rate <= MOST_EXACT else -(-per // GRAINS)


def _next(limit: Limit, log: SlotLog, at: int) -> int:
    """The first moment at `at` or later that keeps to `limit`."""
    rate, per, burst = limit
    # One microsecond more than the exact quotient: two starts a whole period apart are not in one
    # period.
    if len(log.starts) >= rate:
        at = max(at, log.starts.nth_last(rate) + per + 1)
    if burst < rate:
        spaced = _spaced(log)
        at = max(at, spaced.last)
        if len(spaced) >= burst:
            at = max(at, spaced.nth_last(burst) + burst * per // rate + 1)
    return at


def _room(limit: Limit, log: SlotLog, at: int) -> int:
    """How many more slots `limit` allows at `at`, where `_next` allows one."""
    rate, per, burst = limit
    room = rate - log.starts.count_since(at - per)
    if burst < rate:
        room = min(room, burst - _spaced(log).count_since(at - burst * per // rate))
    return room


def _spaced(log: SlotLog) -> Times:
    return log.starts if log.spaced is None else log.spaced


def _unshared(key: Key, when_exceeded: Exceeded) -> str | None:
    """The option that a scope cannot have."""
    if key:
        return "key=True"
    return None if when_exceeded == "wait" else f"when_exceeded={when_exceeded!r}"


def load_slots(policy: Throttle, info: Any) -> SlotLog:
    """What `dump_slots` wrote, of a log that several throttles may share; anything else counts as
    nothing.
    """
    log = SlotLog()
    if isinstance(info, dict):
        log.starts.add_runs(info.get("slots", ()))
        log.others = {(rate, per, burst): seen for rate, per, burst, seen in info.get("by", ())}
        if "spaced" in info:
            log.spaced = Times().add_runs(info["spaced"])
    if log.spaced is None and policy.burst < policy.rate:
        log.spaced = log.starts.copy()
    return log


def dump_slots(policy: Throttle, log: SlotLog, now: int, lag: int = 0) -> dict[str, Any]:
    """What decides about the next slots, as JSON values; and how much later than their slots
    starts were lately (microseconds), for who asks why.
    """
    needs = policy.needs(log, now)
    info: dict[str, Any] = {"slots": log.starts.runs(needs, now)}
    if log.spaced is not None:
        bursts = [burst for _, _, burst in policy.limits(log, now)]
        info["spaced"] = log.spaced.runs(needs, now, max(bursts))
    if len(log):
        live = {limit: at for limit, at in log.others.items() if at + OTHERS_LIVE >= now}
        info["by"] = [[*limit, at] for limit, at in sorted({**live, policy.limit: now}.items())]
        info["next"] = policy.next_slot(log, now)
        info["lag"] = lag
    return info


def mend_clock(log: SlotLog, now: int) -> int:
    """By how many microseconds the database's clock was set back since `log` was written, if that
    can be seen: its last start is moved to `now` then. Else 0.
    """
    ahead = log.starts.last - now
    if ahead <= CLOCK_STEP + AHEAD + MOST_REACH + MOST_PATIENCE:
        return 0
    log.move(-ahead)
    return ahead


def forget_after(policy: Throttle, log: SlotLog, now: int) -> int:
    """When what is known decides about no slot any more: the periods of other processes may be
    longer.
    """
    longest = max(length for length, _ in policy.needs(log, now))
    return max(now, log.starts.last) + longest + MICROSECONDS


@dataclass(frozen=True, slots=True)
class KnownSlots:
    """The part of a stored log that is known without the policy."""

    next: int
    """When the next slot is."""
    lag: int
    """How much later than their slots starts were lately (microseconds)."""


def known_slots(info: Any) -> KnownSlots | None:
    """What `dump_slots` wrote tells; None: nothing."""
    at = info.get("next") if isinstance(info, dict) else None
    return None if at is None else KnownSlots(at, info.get("lag", 0))


def next_slots(
    throttles: Sequence[Throttle],
    logs: Sequence[SlotLog],
    at: int,
    until: int,
    most: int,
    patience: int,
) -> list[int]:
    """Up to `most` slots from `at` to `until` that all of `throttles` grant; they are added to
    `logs`, with starts that may be by `patience` microseconds later.
    """
    found: list[int] = []
    while len(found) < most:
        slot = first_slot(throttles, logs, at)
        if slot > until:
            break
        # Many at once, as a fast throttle grants some to each claim.
        room = min(t.room(log, slot) for t, log in zip(throttles, logs, strict=True))
        count = min(room, most - len(found))
        found += [slot] * count
        for log in logs:
            log.add(slot, slot + patience, count)
    return found


def first_slot(throttles: Sequence[Throttle], logs: Sequence[SlotLog], at: int) -> int:
    """The first slot at `at` or later that all of `throttles` grant."""
    # Each throttle may put the slot off, so the search repeats until all agree. The slot only moves
    # forward, and each throttle has a next slot, so the loop ends.
    while (later := max(t.next_slot(log, at) for t, log in zip(throttles, logs, strict=True))) > at:
        at = later
    return at

"""Throttle: at most `rate` starts in any period, for the complete fleet.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from faststream_sqlbroker.core.checks import check_choice, validate_integer
from faststream_sqlbroker.core.policies import argument_checks
from faststream_sqlbroker.core.policies.argument_checks import (
    CLOCK_STEP,
    MICROSECONDS,
    format_seconds,
    parse_microseconds,
)
from faststream_sqlbroker.core.policies.header import Key, format_key, validate_key
from faststream_sqlbroker.core.policies.scopes import format_scope, validate_scope
from faststream_sqlbroker.core.policies.slot_log import Limit, Need, SlotLog, Times
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError

MAX_RATE = 1_000_000
"""Maximum number of slots in a period."""
MAX_EXACT_STARTS = 10_000
"""Maximum number of starts that are stored individually to grant the next slot; with more, every
claim would read and write a large row."""
GROUPS_PER_PERIOD = 500
"""Above that, starts within this fraction of the period are stored as one number, with the time of
the last start. So no start is forgotten too early, and each at most this much too late."""
BACKOFF_FACTOR = 2
"""Factor by which each backoff is longer than the one before."""
MIN_BACKOFF = MICROSECONDS // 10
"""100 ms. The first backoff is one interval (per / rate), or this if that is longer."""
MAX_BACKOFF = 60 * MICROSECONDS
"""A minute. No backoff is longer than the period, or than this if that is longer."""
SLOT_LEAD = MICROSECONDS // 5
"""Time by which a slot is granted in advance (microseconds); longer where claims take long. So one
claim takes several slots, and no slot passes while the claim runs."""

OTHER_LIMITS_LIFETIME = 60 * MICROSECONDS
"""Time after the last slot of another process during which its options apply too (microseconds)."""
MAX_LOOKAHEAD = 2 * MICROSECONDS
"""Where claims take long, slots are granted ahead by twice that time, but by no more than this."""
MAX_START_DELAY = 60 * MICROSECONDS
"""Maximum delay of a start after its slot, however late this process was recently."""

Exceeded = Literal["wait", "backoff", "drop", "dead_letter"]


@dataclass(frozen=True, init=False)
class Throttle:
    """Every attempt takes a slot; in any period of length `per`, at most `rate` handlers start.

    Messages within the rate start at once: any `rate` messages of a period, also if they come
    together. A smaller `burst` spaces them. The slots are stored in the database, so the limit
    holds for the complete fleet. A handler never starts before its slot, nor later than the stored
    log allows: then the message is released, uncharged, and its slot is free for another message.
    The allowed delay depends on how late this process was; so a slow process costs rate, but never
    breaks the limit: about `rate` starts in `per` and that delay.
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
        """Set the rate, and the handling of messages above the rate.

        Args:
            rate: Maximum number of starts in any period, 1 to 1 000 000.
            per: The period. Prefer 10 per second to 1 per 0.1 s: a late start wastes less of a
                longer period.
            key: If True, each key has slots of its own; else all messages of a queue share them.
                `Header("tenant")`: each value of that header.
            burst: Slots that may be granted at the same time, 1 to `rate`; they count within the
                rate. None is `rate`; 1 spaces slots evenly.
            when_exceeded: "wait" keeps the message until there is a slot, "backoff" postpones it
                for a random time that doubles, "drop" discards it, "dead_letter" makes it FAILED;
                the last two with the reason "throttled".
            without_key: With key=True, what happens to a message without a key: it is handled
                without a limit, or it is FAILED.
            scope: A name shared by several queues and subscribers, whose slots are one budget.
                None: each queue has slots of its own.

        Raises:
            SetupError: a value is out of range, or `without_key` is given without key=True, or
                `scope` with key=True or a `when_exceeded` other than "wait".
        """
        validate_integer("Throttle's rate", rate, maximum=MAX_RATE)
        period = parse_microseconds("Throttle's per", per)
        validate_key("Throttle's key", key)
        max_burst = (
            rate if burst is None else validate_integer("Throttle's burst", burst, maximum=rate)
        )
        check_choice(
            "Throttle's when_exceeded", when_exceeded, ("wait", "backoff", "drop", "dead_letter")
        )
        argument_checks.check_without_key(
            "Throttle", without_key, has_key=bool(key), option="key=True"
        )
        valid_scope = validate_scope(
            "Throttle", scope, conflict=_find_scope_conflict(key, when_exceeded)
        )
        if period < rate:
            raise SetupError(
                f"Throttle({rate}, per={format_seconds(period)}) is more than one slot a "
                "microsecond, the resolution of the clock: lower the rate, or remove the policy"
            )
        other_options = {
            "when_exceeded": when_exceeded,
            "without_key": without_key,
            "scope": valid_scope,
        }
        argument_checks.set_attributes(
            self, rate=rate, per=period, key=key, burst=max_burst, **other_options
        )

    def __str__(self) -> str:
        key = format_key("key", self.key)
        burst = "" if self.burst == self.rate else f", burst={self.burst}"
        exceeded = "" if self.when_exceeded == "wait" else f", when_exceeded={self.when_exceeded}"
        arguments = f"{key}{burst}{exceeded}{format_scope(self.scope)}"
        return f"Throttle({self.rate}, per={format_seconds(self.per)}{arguments})"

    @property
    def gates(self) -> bool:
        """True if slots are not bound to messages.

        Then messages wait unclaimed, and the first takes the slot. Else each message gets a slot of
        its own.
        """
        return self.when_exceeded == "wait" and not self.key

    @property
    def limit(self) -> Limit:
        """The values that decide about slots."""
        return self.rate, self.per, self.burst

    @property
    def grain(self) -> int:
        """Starts within this many microseconds are stored as a single number."""
        return _get_need(self.limit)[1]

    @property
    def reported_to(self) -> int:
        """Resolution of reported starts in microseconds.

        The log stores each different time once, with a count. Starts are rounded up, so that there
        are few different times, however many starts there are.
        """
        return 1 if self.rate <= GROUPS_PER_PERIOD else -(-self.per // GROUPS_PER_PERIOD)

    def backoff(self, before: int) -> int:
        """Return the mean backoff of a message that was postponed `before` times (microseconds).

        The first is one interval (per / rate), but at least `MIN_BACKOFF`; each further one is
        twice as long, up to the period or `MAX_BACKOFF`, whichever is longer. The actual backoff
        differs from the mean by up to a half.
        """
        first = max(self.per // self.rate, MIN_BACKOFF)
        return int(min(first * BACKOFF_FACTOR**before, max(self.per, MAX_BACKOFF)))

    def next_slot(self, log: SlotLog, at: int) -> int:
        """Return the time of the next slot, at `at` or later.

        A slot is the permission to start one handler. Of the options of all processes that have
        taken slots recently, the lowest apply.

        Args:
            log: All starts that still count at `at`.
            at: The earliest acceptable time.
        """
        if log.other_limits.keys() <= {self.limit}:
            return _find_next_slot(self.limit, log, at)
        limits = self.limits(log, at)
        # Each limit may postpone the slot. The slot only moves forward, so the loop ends.
        while (later := max(_find_next_slot(limit, log, at) for limit in limits)) > at:
            at = later
        return at

    def room(self, log: SlotLog, at: int) -> int:
        """Count the slots that may be granted at `at`, a time returned by `next_slot`.

        A slot is the permission to start one handler. A fast throttle grants many at the same time:
        with their number, they are granted in one step.
        """
        return min(_count_free_slots(limit, log, at) for limit in self.limits(log, at))

    def limits(self, log: SlotLog, at: int) -> set[Limit]:
        """Return the limits that apply at `at`, including the limits of other processes.

        A limit is the rate, period and burst of a process. Processes with old and new options may
        run at the same time.
        """
        live = {
            limit for limit, seen in log.other_limits.items() if seen + OTHER_LIMITS_LIFETIME >= at
        }
        return {self.limit, *live}

    def needs(self, log: SlotLog, now: int) -> list[Need]:
        """Return the times for which this and the other processes need the log of starts.

        A need is the length of a period, for which a start counts, and the number of microseconds
        within which starts may be stored as one number. Other processes may have other options.
        """
        return [_get_need(limit) for limit in self.limits(log, now)]

    def report(self, log: SlotLog, deadline: int, real: int | None) -> None:
        """Record the real start of a message with this `deadline`; None if there was no start.

        Until then the log counts the start at its deadline, the latest possible time. The real
        start is earlier, so the next slot is free earlier too. Several starts may have been stored
        with one time; then one of that group is removed.
        """
        grain = max(_get_need(limit)[1] for limit in (self.limit, *log.other_limits))
        # If the log no longer has the start, it is too old to delay any slot.
        if log.starts.remove(deadline, grain) and real is not None:
            # Rounded up to few different times, but not beyond the deadline.
            step = self.reported_to
            log.starts.add(max(real, min(-(-real // step) * step, deadline)))


def _get_need(limit: Limit) -> Need:
    """Return the time for which a start counts under `limit`, and the grain of stored starts.

    Starts within one grain (microseconds) may be stored as one number.
    """
    rate, per, _ = limit
    return per, 1 if rate <= MAX_EXACT_STARTS else -(-per // GROUPS_PER_PERIOD)


def _find_next_slot(limit: Limit, log: SlotLog, at: int) -> int:
    """Return the first time at `at` or later that complies with `limit`.

    Any period may have `rate` starts. A `burst` below the rate also limits the slots of a part of
    the period, in proportion.
    """
    rate, per, burst = limit
    # Add one microsecond, for the burst as well: a period includes both ends, so two starts exactly
    # one period apart would be in one period.
    if len(log.starts) >= rate:
        at = max(at, log.starts.get_nth_last(rate) + per + 1)
    if burst < rate:
        spaced = _get_spaced_times(log)
        at = max(at, spaced.last)
        if len(spaced) >= burst:
            at = max(at, spaced.get_nth_last(burst) + burst * per // rate + 1)
    return at


def _count_free_slots(limit: Limit, log: SlotLog, at: int) -> int:
    """Count the slots that `limit` allows at `at`, a time returned by `_find_next_slot`.

    That is how many starts the period before `at` has less than `rate` and, if a burst limits them,
    its last part less than `burst`.
    """
    rate, per, burst = limit
    free = rate - log.starts.count_since(at - per)
    if burst < rate:
        free = min(free, burst - _get_spaced_times(log).count_since(at - burst * per // rate))
    return free


def _get_spaced_times(log: SlotLog) -> Times:
    """Return the granted slots, whose distance `burst` limits; without a record, the starts."""
    return log.starts if log.spaced is None else log.spaced


def _find_scope_conflict(key: Key, when_exceeded: Exceeded) -> str | None:
    """Return the option that contradicts a scope, or None."""
    if key:
        return "key=True"
    return None if when_exceeded == "wait" else f"when_exceeded={when_exceeded!r}"


def load_slots(policy: Throttle, info: Any) -> SlotLog:
    """Read a log of starts written by `dump_slots`, which several throttles may share.

    Any other value counts as an empty log. A throttle whose burst is below its rate also needs the
    granted slots. If the log was written without them, the starts count as slots.
    """
    log = SlotLog()
    if isinstance(info, dict):
        log.starts.add_runs(info.get("slots", ()))
        log.other_limits = {
            (rate, per, burst): seen for rate, per, burst, seen in info.get("by", ())
        }
        if "spaced" in info:
            log.spaced = Times().add_runs(info["spaced"])
    if log.spaced is None and policy.burst < policy.rate:
        log.spaced = log.starts.copy()
    return log


def dump_slots(policy: Throttle, log: SlotLog, now: int, lag: int = 0) -> dict[str, Any]:
    """Return the log as JSON values, without starts that no longer count.

    `slots`, `spaced` and `by` (the limits of processes that have taken slots recently) decide about
    the next slots. The rest only serves explanations: the next slot, and `lag`, the recent delay of
    starts after their slots (microseconds).
    """
    needs = policy.needs(log, now)
    info: dict[str, Any] = {"slots": log.starts.to_runs(needs, now)}
    if log.spaced is not None:
        bursts = [burst for _, _, burst in policy.limits(log, now)]
        info["spaced"] = log.spaced.to_runs(needs, now, max(bursts))
    if len(log):
        live = {
            limit: at for limit, at in log.other_limits.items() if at + OTHER_LIMITS_LIFETIME >= now
        }
        info["by"] = [[*limit, at] for limit, at in sorted({**live, policy.limit: now}.items())]
        info["next"] = policy.next_slot(log, now)
        info["lag"] = lag
    return info


def repair_clock(log: SlotLog, now: int) -> int:
    """Shift the log if the database's clock was set back since the log was written.

    Without the shift, starts would lie in the future, and no slot would be free until then. Returns
    the shift in microseconds, or 0 if no change of the clock is visible: a start may be logged
    ahead of its time, but only so far. After a shift the last start is at `now`.
    """
    ahead = log.starts.last - now
    if ahead <= CLOCK_STEP + SLOT_LEAD + MAX_LOOKAHEAD + MAX_START_DELAY:
        return 0
    log.shift(-ahead)
    return ahead


def compute_expiry(policy: Throttle, log: SlotLog, now: int) -> int:
    """Return the time from which the log no longer decides about any slot.

    The periods of other processes may be longer.
    """
    max_length = max(length for length, _ in policy.needs(log, now))
    return max(now, log.starts.last) + max_length + MICROSECONDS


@dataclass(frozen=True, slots=True)
class SlotForecast:
    """The part of a stored log that can be read without the policy."""

    next: int
    """Time of the next slot."""
    lag: int
    """Recent delay of starts after their slots (microseconds)."""


def read_forecast(info: Any) -> SlotForecast | None:
    """Return the next slot that a log written by `dump_slots` names; None if there is none.

    Explanations use this, which need not know the policy: why a message waits for a throttle, and
    until when.
    """
    at = info.get("next") if isinstance(info, dict) else None
    return None if at is None else SlotForecast(at, info.get("lag", 0))


def grant_slots(
    throttles: Sequence[Throttle],
    logs: Sequence[SlotLog],
    at: int,
    until: int,
    max_count: int,
    max_delay: int,
) -> list[int]:
    """Grant up to `max_count` slots from `at` to `until` that all `throttles` allow.

    A slot is the permission to start one handler. The slots are added to `logs`, where each start
    counts at its latest possible time, `max_delay` microseconds after the slot.
    """
    slots: list[int] = []
    while len(slots) < max_count:
        slot = find_first_slot(throttles, logs, at)
        if slot > until:
            break
        # Grant several slots at once, because a fast throttle grants many to each claim.
        free = min(t.room(log, slot) for t, log in zip(throttles, logs, strict=True))
        count = min(free, max_count - len(slots))
        slots += [slot] * count
        for log in logs:
            log.add(slot, slot + max_delay, count)
    return slots


def find_first_slot(throttles: Sequence[Throttle], logs: Sequence[SlotLog], at: int) -> int:
    """Return the first slot at `at` or later that all `throttles` allow."""
    # Each throttle may postpone the slot, so repeat until all agree. The slot only moves forward,
    # and each throttle has a next slot, so the loop ends.
    while (later := max(t.next_slot(log, at) for t, log in zip(throttles, logs, strict=True))) > at:
        at = later
    return at

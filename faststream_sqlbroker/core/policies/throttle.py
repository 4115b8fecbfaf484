"""Throttle: at most `rate` starts in any period, for the whole fleet.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from faststream_sqlbroker.core.checks import flag, one_of, whole_number
from faststream_sqlbroker.core.policies import options
from faststream_sqlbroker.core.policies.options import MICROSECONDS, microseconds, seconds
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError

MOST_RATE = 1_000_000
"""Slots of a period: one a microsecond for a period of a second."""
"""Slots in a period; one slot a microsecond is the most that the clock can tell apart."""
MOST_KEPT = 10_000
"""Slots that are kept to grant the next; more would make every claim read and write a large row."""
LEAST_LAG = MICROSECONDS // 10
"""100 ms, in microseconds: what the event loop and the claim may take before a start."""
"""The least default of `max_lag`, in microseconds: with less, slots of a fast throttle would pass
by while a claim's answer is on its way."""
AHEAD = MICROSECONDS // 5
"""How long before its time a slot is granted (microseconds). So one claim takes several slots, and
no slot passes by while the claim runs."""

SLOT_SHARE = 4
"""What waits for a worker is to start within `max_lag` divided by this: handlers may get slower."""

Exceeded = Literal["wait", "backoff", "drop", "dead_letter"]


@dataclass(frozen=True, init=False)
class Throttle:
    """Every attempt takes a slot; in any period of length `per`, at most `rate` slots are granted.

    The slots are kept in the database, so the limit holds for the whole fleet. A handler never
    starts before its slot. If it cannot start within `max_lag` after it, the message gets another
    slot. A slot that was not used is not granted again.
    """

    rate: int
    per: int
    """Microseconds."""
    key: bool
    burst: int
    when_exceeded: Exceeded
    max_lag: int
    """Microseconds."""
    without_key: str

    def __init__(
        self,
        rate: int,
        per: Duration,
        *,
        key: bool = False,
        burst: int = 1,
        when_exceeded: Exceeded = "wait",
        max_lag: Duration | None = None,
        without_key: Literal["deliver", "dead_letter"] = "deliver",
    ) -> None:
        """Say how many, and what happens to messages above the rate.

        Args:
            rate: Most slots in any period, 1 to 1 000 000.
            per: The period.
            key: Whether each key has slots of its own; else all messages of a queue share them.
            burst: Slots that may be granted at the same moment, 1 to `rate`; they count within the
                rate. 1 spaces slots evenly.
            when_exceeded: "wait" keeps the message until there is a slot, "backoff" puts it off by
                one to two periods, "drop" discards it, "dead_letter" makes it FAILED; the last two
                with the reason "throttled".
            max_lag: How much later than its slot a handler may start; default one interval (per /
                rate), at least 100 ms.
            without_key: With key=True, what happens to a message without a key: it is handled
                without a limit, or it is FAILED.

        Raises:
            SetupError: a value out of its range, `without_key` without key=True, or a burst that
                would need more than 10 000 kept slots.
        """
        whole_number("Throttle's rate", rate, most=MOST_RATE)
        period = microseconds("Throttle's per", per)
        flag("Throttle's key", key)
        whole_number("Throttle's burst", burst, most=rate)
        one_of(
            "Throttle's when_exceeded", when_exceeded, ("wait", "backoff", "drop", "dead_letter")
        )
        options.without_key("Throttle", without_key, keyed=key, mend="key=True")
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
            "burst": burst,
            "when_exceeded": when_exceeded,
            "max_lag": lag,
            "without_key": without_key,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.kept > MOST_KEPT:
            raise SetupError(
                f"burst={burst} needs the last {self.kept} slots to grant the next, at most "
                f"{MOST_KEPT} are kept: choose a burst of at most {MOST_KEPT} that divides the "
                f"rate ({rate}), such as 1"
            )

    def __str__(self) -> str:
        each = ", key=True" if self.key else ""
        burst = "" if self.burst == 1 else f", burst={self.burst}"
        exceeded = "" if self.when_exceeded == "wait" else f", when_exceeded={self.when_exceeded}"
        return f"Throttle({self.rate}, per={seconds(self.per)}{each}{burst}{exceeded})"

    @property
    def gates(self) -> bool:
        """Whether a slot belongs to no message: messages wait unclaimed, and the first takes it.

        Else each message gets a slot of its own.
        """
        return self.when_exceeded == "wait" and not self.key

    @property
    def kept(self) -> int:
        """How many of the last slots are needed to find the next."""
        # If the rate is a multiple of the burst, keeping bursts apart keeps the rate, too.
        return self.burst if self.rate % self.burst == 0 else self.rate

    def next_slot(self, slots: Sequence[int], at: int) -> int:
        """When the next slot is, at `at` or later.

        Args:
            slots: The last ones granted, in order; at least `kept` of them, or all.
            at: The earliest that is wanted.
        """
        # One microsecond more than the exact quotient: two slots a whole period apart are not in
        # one period.
        if len(slots) >= self.burst:
            at = max(at, slots[-self.burst] + self.burst * self.per // self.rate + 1)
        if self.rate % self.burst and len(slots) >= self.rate:
            at = max(at, slots[-self.rate] + self.per + 1)
        return max(at, slots[-1]) if slots else at


def load_slots(info: Any) -> list[int]:
    """Slots as `dump_slots` wrote them; anything else counts as none."""
    if not isinstance(info, dict):
        return []
    slots: list[int] = []
    for slot, count in info.get("slots", ()):
        slots += [slot] * count
    return slots


def dump_slots(policy: Throttle, slots: Sequence[int]) -> dict[str, Any]:
    """The slots that decide about the next, as JSON values; equal ones are counted."""
    runs: list[list[int]] = []
    for slot in slots[-policy.kept :]:
        if runs and runs[-1][0] == slot:
            runs[-1][1] += 1
        else:
            runs.append([slot, 1])
    return {"slots": runs, "next": policy.next_slot(slots, slots[-1])} if runs else {"slots": runs}


def kept_slots(
    policy: Throttle, logs: Mapping[str, Sequence[int]]
) -> dict[str, tuple[dict[str, Any], int]]:
    """What is stored of each key's slots, and when it may be forgotten."""
    return {
        key: (dump_slots(policy, log), log[-1] + policy.per + MICROSECONDS)
        for key, log in logs.items()
        if log
    }


def next_known(info: Any) -> int | None:
    """When the next slot is, by what `dump_slots` wrote; None: nothing is known."""
    return info.get("next") if isinstance(info, dict) else None


def next_slots(
    throttles: Sequence[Throttle], logs: Sequence[list[int]], at: int, until: int, most: int
) -> list[int]:
    """Up to `most` slots from `at` to `until` that all of `throttles` grant; nothing is written to
    `logs`.
    """
    found: list[int] = []
    logs = [list(log) for log in logs]
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
        found.append(slot)
        for log in logs:
            log.append(slot)
    return found


def first_slot(throttles: Sequence[Throttle], logs: Sequence[list[int]], at: int) -> int:
    """The first slot at `at` or later that all of `throttles` grant."""
    return next_slots(throttles, logs, at, 1 << 62, 1)[0]

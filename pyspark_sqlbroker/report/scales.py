"""Where a value lies on an axis, and which values the axis names."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

_TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(60 * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(3600 * hours for hours in (1, 2, 3, 6, 12)),
    *(86_400 * days for days in (1, 2, 5, 10, 30, 90, 365, 3650, 36_500)),
)
"""Seconds between two named moments."""

_MOST_NAMED = 9
"""Values that an axis of times names at most."""

_DAY = 86_400
"""Seconds."""

_MINUTE = 60
"""Seconds."""

Tick = tuple[float, str]
"""A place in pixels, and the text there."""


@dataclass(frozen=True)
class Linear:
    """Numbers from 0 to `high`, between two pixels.

    Attributes:
        high: The greatest value.
        start: Pixel of 0.
        end: Pixel of `high`.
        whole: Only whole numbers are named.
        share: Numbers are shares, named in percent.
    """

    high: float
    start: float
    end: float
    whole: bool = False
    share: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (self.end - self.start) * value / (self.high or 1)

    def ticks(self) -> Iterator[Tick]:
        """Some five round numbers."""
        step = _round_step((self.high or 1) / 5)
        if self.whole:
            step = max(1.0, step)
        for number in range(int((self.high or 1) / step + 1e-9) + 1):
            value = number * step
            yield self.at(value), self._named(value)

    def _named(self, value: float) -> str:
        if self.share:
            return f"{100 * value:.4g} %"
        return number_text(value)


def number_text(value: float) -> str:
    """A number with three figures and k, M or G."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _round_step(least: float) -> float:
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= least * (1 - 1e-9))


@dataclass(frozen=True)
class Log:
    """Numbers above 0 between powers of ten; less than the first power lies on it.

    Attributes:
        low: Exponent of the first.
        high: Exponent of the last.
        start: Pixel of the first.
        end: Pixel of the last.
    """

    low: int
    high: int
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> "Log":
        """Whole powers of ten that hold all values above 0."""
        above = [value for value in values if value > 0]
        low = math.floor(math.log10(min(above, default=1.0)))
        high = math.ceil(math.log10(max(above, default=1.0)))
        return cls(low, max(high, low + 1), start, end)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        place = (math.log10(value) if value > 0 else self.low) - self.low
        return self.start + (self.end - self.start) * max(place, 0.0) / (self.high - self.low)

    def ticks(self) -> Iterator[Tick]:
        """The powers of ten."""
        step = 1 + (self.high - self.low) // 8
        for power in range(self.low, self.high + 1, step):
            yield self.at(10.0**power), _power_text(power)


def _power_text(power: int) -> str:
    if power >= 0:
        return number_text(10.0**power)
    thousands = power // 3
    return f"{10 ** (power - 3 * thousands)}{_SMALL.get(thousands, f'e{3 * thousands}')}"


_SMALL = {-1: "m", -2: "µ", -3: "n"}
"""Units of a thousandth and less."""


@dataclass(frozen=True)
class Times:
    """Moments, in seconds since 1970, between two pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a moment."""
        span = (self.high - self.low) or 1.0
        return self.start + (self.end - self.start) * (value - self.low) / span

    def ticks(self) -> Iterator[Tick]:
        """Round moments in UTC, nine at most."""
        span = self.high - self.low
        fitting = (step for step in _TIME_STEPS if span / step <= _MOST_NAMED)
        step = next(fitting, _TIME_STEPS[-1])
        first = math.ceil(self.low / step) * step
        for number in range(int((self.high - first) // step) + 1):
            moment = first + number * step
            yield self.at(moment), _moment_text(moment, step)


def seconds_of(moment: datetime) -> float:
    """Seconds since 1970."""
    return (moment - EPOCH).total_seconds()


def _moment_text(seconds: float, step: float) -> str:
    moment = EPOCH + timedelta(seconds=seconds)
    if step >= _DAY:
        return f"{moment:%Y-%m-%d}"
    return f"{moment:%H:%M:%S}" if step < _MINUTE else f"{moment:%m-%d %H:%M}"

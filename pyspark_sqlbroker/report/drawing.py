"""A chart as SVG within HTML: no script, every text escaped, hints as titles of shapes.

A scale says where a value lies on an axis, and which values the axis names.
"""

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from faststream_sqlbroker.core.text import visible
from faststream_sqlbroker.core.times import EPOCH

WIDTH = 1160
"""Units of the drawing; a browser scales it to the page."""

LEFT = 84
"""Units at the left of the plotted area."""

RIGHT = 16
"""Units at its right."""

TOP = 14
"""Units above it."""

BOTTOM = 34
"""Units below it."""

LONGEST_LABEL = 30
"""Characters of a name on an axis."""

_LETTER = 6.6
"""Width of a letter, about."""

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

_SMALL = {-1: "m", -2: "µ", -3: "n"}
"""Units of a thousandth and less."""

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


def _round_step(least: float) -> float:
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= least * (1 - 1e-9))


def number_text(value: float) -> str:
    """A number with three figures and k, M or G."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


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


def _moment_text(seconds: float, step: float) -> str:
    moment = EPOCH + timedelta(seconds=seconds)
    if step >= _DAY:
        return f"{moment:%Y-%m-%d}"
    return f"{moment:%H:%M:%S}" if step < _MINUTE else f"{moment:%m-%d %H:%M}"


def seconds_of(moment: datetime) -> float:
    """Seconds since 1970."""
    return (moment - EPOCH).total_seconds()


Scale = Linear | Log | Times


def escaped(text: str) -> str:
    """A text of a message as HTML and SVG show it, and nothing else."""
    return html.escape(visible(text))


def shorten(name: str, most: int = LONGEST_LABEL) -> str:
    """The beginning of a long name."""
    return name if len(name) <= most else name[: most - 1] + "…"


class Labels:
    """Names as labels: short, and different where the names are."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """The name's label."""
        if name not in self._labels:
            label = shorten(name)
            number = 1
            while label in self._labels.values():
                number += 1
                label = f"{shorten(name)} ({number})"
            self._labels[name] = label
        return self._labels[name]


class Drawing:
    """Shapes in the order in which they are drawn.

    Attributes:
        height: Units.
        left: Where the plotted area begins.
        bottom: Units below the plotted area.
    """

    def __init__(self, height: float = 340, *, left: float = LEFT, bottom: float = BOTTOM) -> None:
        self.height = height
        self.left = left
        self.bottom = bottom
        self._parts: list[str] = []

    @property
    def right(self) -> float:
        """Where the plotted area ends."""
        return WIDTH - RIGHT

    @property
    def floor(self) -> float:
        """Lower edge of the plotted area."""
        return self.height - self.bottom

    def rect(
        self, x: float, y: float, width: float, height: float, colour: str, hint: str = ""
    ) -> None:
        """A filled rectangle."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"'
        self._add("rect", f'class="mark" {place} fill="{colour}"', hint)

    def hover(self, x: float, width: float, hint: str) -> None:
        """A column of the plotted area that shows nothing but its hint."""
        place = f'x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{self.floor - TOP:.1f}"'
        self._add("rect", f'class="hover" {place}', hint)

    def circle(self, x: float, y: float, size: float, colour: str, hint: str = "") -> None:
        """A filled circle."""
        self._add(
            "circle", f'class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}"', hint
        )

    def bars(self, boxes: Iterable[tuple[float, float, float, float]], colour: str) -> None:
        """Many rectangles (x, y, width, height) as one shape, which takes less room."""
        path = "".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h-{w:.1f}z" for x, y, w, h in boxes)
        self._add("path", f'class="mark" d="{path}" fill="{colour}"', "")

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, dotted: bool) -> None:
        """A line through the points."""
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="2 4"' if dotted else ""
        look = f'fill="none" stroke="{colour}" stroke-width="2"{dash}'
        self._add("path", f'class="mark" d="{path}" {look}', "")

    def text(self, x: float, y: float, text: str, anchor: str = "start", *, turn: int = 0) -> None:
        """A text; `turn` in degrees."""
        turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{escaped(text)}</text>'
        )

    def rows(self, scale: Linear | Log, title: str, *, start: float = TOP) -> None:
        """Lines across the area at the values that a scale names, and the axis' title."""
        for y, name in scale.ticks():
            self._add("path", f'class="grid" d="M{self.left} {y:.1f}H{self.right}"', "")
            self.text(self.left - 8, y + 4, name, "end")
        self.text(16, (start + scale.start) / 2, title, "middle", turn=-90)

    def columns(self, scale: Times | Linear, title: str) -> None:
        """Names below the area, and the axis' title."""
        for x, name in scale.ticks():
            self._add("path", f'class="grid" d="M{x:.1f} {self.floor:.1f}v5"', "")
            self.text(x, self.floor + 17, name, "middle")
        self.text((self.left + self.right) / 2, self.height - 2, title, "middle")

    def names(self, names: Sequence[str], title: str) -> None:
        """A name below each band of the area, turned where they are long."""
        band = (self.right - self.left) / len(names)
        turned = is_turned(names)
        for number, name in enumerate(names):
            x = self.left + band * (number + 0.5)
            y = self.floor + 16
            if turned:
                self.text(x, y, name, "end", turn=-25)
            else:
                self.text(x, y, name, "middle")
        self.text((self.left + self.right) / 2, self.height - 2, title, "middle")

    def _add(self, tag: str, attributes: str, hint: str) -> None:
        lines = "\n".join(escaped(line) for line in hint.split("\n"))
        title = f"<title>{lines}</title>" if hint else ""
        self._parts.append(f"<{tag} {attributes}>{title}</{tag}>")

    def render(self, legend: Iterable[tuple[str, str]] = ()) -> str:
        """The drawing as HTML, below a legend of names and colours."""
        entries = "".join(
            f'<li><svg viewBox="0 0 10 10"><rect width="10" height="10" fill="{colour}"/></svg>'
            f"{escaped(name)}</li>"
            for name, colour in legend
        )
        listed = f'<ul class="legend">{entries}</ul>' if entries else ""
        box = f'viewBox="0 0 {WIDTH} {self.height:.0f}" role="img"'
        return f'{listed}<svg class="chart" {box}>{"".join(self._parts)}</svg>'


def is_turned(names: Sequence[str]) -> bool:
    """Whether the names are too long to stand side by side."""
    band = (WIDTH - LEFT - RIGHT) / max(len(names), 1)
    return max(map(len, names), default=0) * _LETTER > band


def room_for(names: Sequence[str]) -> float:
    """Units below an area with these names."""
    longest = max(map(len, names), default=0)
    return BOTTOM + 8 + (longest * _LETTER * 0.43 if is_turned(names) else 0)

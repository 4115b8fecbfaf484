"""A chart as SVG within HTML: no script, every text escaped, hints as titles of shapes."""

import html
from collections.abc import Iterable, Sequence

from faststream_sqlbroker.core.text import visible
from pyspark_sqlbroker.report.scales import Linear, Log, Times

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

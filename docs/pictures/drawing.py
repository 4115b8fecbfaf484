"""SVG of a stream: arrivals above, starts below, on one axis of time.

A picture has its own background, so that it is legible on any page. It follows the reader's choice
of a dark or a light scheme.
"""

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from docs.pictures.streams import Seen, Stream

WIDTH = 760
LEFT = 96
RIGHT = 24
ARRIVE = 62
START = 132
ROW = 26
"""Between rows of starts that would cover each other."""
RADIUS = 10
FONT = "system-ui, sans-serif"
SCHEMES = {
    "light": {
        "ground": "#ffffff",
        "ink": "#1f2328",
        "quiet": "#57606a",
        "a": "#0550ae",
        "b": "#953800",
        "on": "#ffffff",
        "gone": "#57606a",
        "shade": "#eaeef2",
    },
    "dark": {
        "ground": "#0d1117",
        "ink": "#e6edf3",
        "quiet": "#9198a1",
        "a": "#79c0ff",
        "b": "#ffa657",
        "on": "#0d1117",
        "gone": "#9198a1",
        "shade": "#21262d",
    },
}
"""Colours by their use: `on` is text on the marks of the keys `a` and `b`."""
REASONS = {"superseded": "superseded", "throttled": "dropped", "duplicate": "duplicate"}


def _style() -> str:
    def rules(colours: dict[str, str]) -> str:
        return (
            f".ground{{fill:{colours['ground']}}}.shade{{fill:{colours['shade']}}}"
            f".ink{{fill:{colours['ink']}}}.quiet{{fill:{colours['quiet']}}}"
            f".line{{stroke:{colours['quiet']};fill:none}}"
            f".a{{fill:{colours['a']};stroke:{colours['a']}}}"
            f".b{{fill:{colours['b']};stroke:{colours['b']}}}"
            f".hollow{{fill:{colours['ground']};stroke:{colours['gone']}}}"
            f".on{{fill:{colours['on']}}}"
        )

    dark = f"@media (prefers-color-scheme: dark){{{rules(SCHEMES['dark'])}}}"
    return f"<style>text{{font:13px {FONT}}}{rules(SCHEMES['light'])}{dark}</style>"


def svg(stream: Stream, seen: Seen) -> str:
    """The picture."""
    rows = _rows(stream, [start.at for start in seen.starts], stream.work)
    end_rows = _rows(stream, [end.at for end in seen.ends])
    gone = START + 44 + ROW * max(rows, default=0)
    axis = (gone + ROW * max(end_rows) if seen.ends else gone - 44) + 34
    height = axis + 34
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    label = quoteattr(description(stream, seen))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={label}>',
        f"<title>{escape(stream.title)}</title>",
        _style(),
        f'<rect class="ground" width="{WIDTH}" height="{height}" rx="6"/>',
        *_shades(stream, seen, axis),
        f'<text class="ink" x="12" y="26" font-weight="600">{escape(stream.title)}</text>',
        *_legend(),
        *_lanes(seen, gone),
        *_axis(stream, axis),
        *_messages(stream, seen, rows, [gone + ROW * row for row in end_rows]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _rows(stream: Stream, moments: Sequence[float], length: float = 0.0) -> list[int]:
    """In which row the mark of each moment is drawn, so that none covers another."""
    ends: list[float] = []
    rows = []
    for at in moments:
        begin = _x(stream, at) - RADIUS
        row = next((n for n, end in enumerate(ends) if end <= begin), len(ends))
        ends[row : row + 1] = [max(begin + 2 * RADIUS, _x(stream, at + length))]
        rows.append(row)
    return rows


def _legend() -> Iterator[str]:
    x = WIDTH - RIGHT
    yield f'<text class="quiet" x="{x}" y="26" text-anchor="end">key b</text>'
    yield f'<rect class="b" x="{x - 56}" y="15" width="14" height="14" rx="2"/>'
    yield f'<text class="quiet" x="{x - 74}" y="26" text-anchor="end">key a</text>'
    yield f'<circle class="a" cx="{x - 123}" cy="22" r="8"/>'


def _x(stream: Stream, at: float) -> float:
    inner = WIDTH - LEFT - RIGHT
    return round(LEFT + inner * at / stream.length, 1)


def _shades(stream: Stream, seen: Seen, axis: int) -> Iterator[str]:
    for begin, end in seen.closed:
        x = _x(stream, begin)
        width = round(_x(stream, end) - x, 1)
        height = axis - 36
        yield f'<rect class="shade" x="{x}" y="36" width="{width}" height="{height}"/>'
        yield f'<text class="quiet" x="{x + 4}" y="{axis - 6}">closed</text>'


def _lanes(seen: Seen, gone: int) -> Iterator[str]:
    lanes = [("arrives", ARRIVE), ("starts", START)]
    if seen.ends:
        lanes.append((REASONS[seen.ends[0].reason], gone))
    for name, y in lanes:
        yield f'<text class="quiet" x="12" y="{y + 4}">{name}</text>'


def _axis(stream: Stream, y: int) -> Iterator[str]:
    yield f'<path class="line" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
    step = 1 if stream.clock_hour is None else 2
    for at in range(0, round(stream.length) + 1, step):
        x = _x(stream, at)
        text = f"{at} s" if stream.clock_hour is None else f"{stream.clock_hour + at:02}:00"
        yield f'<path class="line" d="M{x} {y}v5"/>'
        yield f'<text class="quiet" x="{x}" y="{y + 20}" text-anchor="middle">{text}</text>'


def _messages(
    stream: Stream, seen: Seen, rows: Sequence[int], gone: Sequence[int]
) -> Iterator[str]:
    """Lines first, so that no mark is covered."""
    marks: list[str] = []
    for number, arrival in enumerate(stream.arrivals, 1):
        marks += _mark(_x(stream, arrival.at), ARRIVE, number, arrival.key)
    started: set[int] = set()
    for start, row in zip(seen.starts, rows, strict=True):
        arrival = stream.arrivals[start.number - 1]
        x = _x(stream, start.at)
        y = START + ROW * row
        if start.number not in started:
            started.add(start.number)
            yield f'<path class="line" d="M{_x(stream, arrival.at)} {ARRIVE}L{x} {y}"/>'
        if stream.work:
            width = round(_x(stream, start.at + stream.work) - x, 1)
            yield f'<path class="{arrival.key}" d="M{x} {y}h{width}" stroke-width="6"/>'
        marks += _mark(x, y, start.number, arrival.key)
        if start.failed:
            place = f'x="{x}" y="{y + RADIUS + 12}" text-anchor="middle"'
            marks.append(f'<text class="ink" {place}>fails</text>')
    for end, y in zip(seen.ends, gone, strict=True):
        x = _x(stream, end.at)
        begin = _x(stream, stream.arrivals[end.number - 1].at)
        yield f'<path class="line" stroke-dasharray="3 3" d="M{begin} {ARRIVE}L{x} {y}"/>'
        marks += _mark(x, y, end.number, None)
    yield from marks


def _mark(x: float, y: int, number: int, key: str | None) -> Iterator[str]:
    """A circle is of key a, a square of key b, a hollow circle of a message that has gone."""
    if key == "b":
        corner = f'x="{round(x - RADIUS + 1, 1)}" y="{y - RADIUS + 1}"'
        side = 2 * RADIUS - 2
        yield f'<rect class="b" {corner} width="{side}" height="{side}" rx="2"/>'
    else:
        name = "hollow" if key is None else "a"
        yield f'<circle class="{name}" cx="{x}" cy="{y}" r="{RADIUS}"/>'
    colour = "quiet" if key is None else "on"
    yield f'<text class="{colour}" x="{x}" y="{y + 4.5}" text-anchor="middle">{number}</text>'


def description(stream: Stream, seen: Seen) -> str:
    """The same in words."""

    def moment(at: float) -> str:
        if stream.clock_hour is None:
            return f"{at:.3g}"
        return f"{stream.clock_hour + int(at):02}:{round(at % 1 * 60):02}"

    unit = "" if stream.clock_hour is not None else " s"
    keys = sorted({arrival.key for arrival in stream.arrivals})
    arrived = "; ".join(
        f"key {key}: "
        + ", ".join(
            f"{n} at {moment(arrival.at)}{unit}"
            for n, arrival in enumerate(stream.arrivals, 1)
            if arrival.key == key
        )
        for key in keys
    )
    started = ", ".join(
        f"{start.number} at {moment(start.at)}{unit}{' (fails)' if start.failed else ''}"
        for start in seen.starts
    )
    text = f"{stream.title}. Messages arrive: {arrived}. Handlers start: {started}."
    for reason in dict.fromkeys(end.reason for end in seen.ends):
        numbers = ", ".join(str(end.number) for end in seen.ends if end.reason == reason)
        text += f" {REASONS[reason].capitalize()}: {numbers}."
    return text

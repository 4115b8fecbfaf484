"""A report's charts: each is HTML with SVG, or None where there is nothing to draw."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter

from pyspark_sqlbroker.report.drawing import (
    TOP,
    WIDTH,
    Drawing,
    Labels,
    Linear,
    Log,
    Times,
    number_text,
    room_for,
    seconds_of,
    shorten,
)
from pyspark_sqlbroker.report.figures import GOOD_BUCKETS, MOST_ATTEMPTS, Figures, Row

COLOURS = (
    "#3366cc",
    "#e07b39",
    "#2a9d8f",
    "#9b5de5",
    "#c9a227",
    "#d1495b",
    "#4c9f70",
    "#577590",
    "#b56576",
    "#6d6875",
    "#00a6c0",
    "#8a817c",
)
STATES = {"completed": "#2a9d8f", "failed": "#d1495b", "moved": "#e07b39", "discarded": "#adb5bd"}
SPEEDS = {"p50": "#9ecae1", "p90": "#4292c6", "p99": "#08519c", "p999": "#e07b39"}
PHASES = {
    "wait": "wait: due → claimed",
    "work": "work: claimed → handled",
    "total": "total: published → archived",
}
AGES = {
    "under_1h": ("under 1 h", "#f6d5ce"),
    "1h_to_1d": ("1 h to 1 d", "#eda99b"),
    "1d_to_7d": ("1 d to 7 d", "#dd7b6c"),
    "7d_to_30d": ("7 d to 30 d", "#c34a45"),
    "over_30d": ("over 30 d", "#8f1d2c"),
}
SHORTEST = 1e-6
"""Seconds that stand for 0, which a logarithmic axis cannot show."""

SMALL = 8
"""Counts below this get an axis with whole numbers only."""

Part = tuple[str, str, Callable[[Row], float]]
"""A part of a bar: its name, its colour, and its size from a row."""


def throughput(figures: Figures) -> str | None:
    """Stacked bars of queues over time."""
    rows = figures.tables["throughput"]
    if not rows:
        return None
    labels = Labels()
    queues = _queues(figures, rows)
    rates = {(row["queue"], seconds_of(row["bucket"])): row["per_second"] for row in rows}
    sums: dict[float, float] = {}
    for (_, at), rate in rates.items():
        sums[at] = sums.get(at, 0.0) + rate
    starts = sorted(sums)
    drawing = Drawing()
    across = Times(starts[0], starts[-1] + figures.every, drawing.left, drawing.right)
    width = across.at(starts[0] + figures.every) - across.at(starts[0])
    up = Linear(max(sums.values()), drawing.floor, TOP)
    drawing.rows(up, "messages / s")
    drawing.columns(across, "time (UTC)")
    below = dict.fromkeys(starts, 0.0)
    legend = [(labels(queue), _colour(number)) for number, queue in enumerate(queues)]
    for queue, (_, colour) in zip(queues, legend, strict=True):
        boxes = []
        for at in starts:
            rate = rates.get((queue, at), 0.0)
            foot = up.at(below[at])
            below[at] += rate
            top = up.at(below[at])
            boxes.append((across.at(at), top, max(width, 0.5), foot - top))
        drawing.bars((box for box in boxes if box[-1] > 0), colour)
    # A hint for each of thousands of buckets would be larger than the drawing.
    if len(starts) <= 2 * GOOD_BUCKETS:
        for at, hint in _hints(sums, rows, labels).items():
            drawing.hover(across.at(at), max(width, 1), hint)
    return drawing.render(legend)


def _hints(sums: Mapping[float, float], rows: Sequence[Row], labels: Labels) -> dict[float, str]:
    """What each bucket shows under the mouse."""
    hints = {at: f"{whole:,.3g} messages / s" for at, whole in sums.items()}
    for row in rows:
        rate = f"{row['per_second']:,.3g}"
        hints[seconds_of(row["bucket"])] += f"\n{labels(row['queue'])}: {rate}"
    return hints


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def latency(figures: Figures) -> str | None:
    """Percentiles of the three phases by queue."""
    rows = figures.tables["latency"]
    if not rows:
        return None
    labels = Labels()
    queues = _queues(figures, rows)
    names = [labels(queue) for queue in queues]
    drawing = Drawing(600 + room_for(names), bottom=room_for(names))
    part = (drawing.floor - TOP) / len(PHASES)
    for place, (phase, title) in enumerate(PHASES.items()):
        own = {row["queue"]: row for row in rows if row["phase"] == phase}
        values = [max(row[name], SHORTEST) for row in own.values() for name in SPEEDS]
        top = TOP + part * place + 22
        scale = Log.around(values, TOP + part * (place + 1) - 12, top)
        drawing.rows(scale, "seconds", start=top)
        drawing.text(drawing.left, top - 10, title)
        band = (drawing.right - drawing.left) / len(queues)
        for number, queue in enumerate(queues):
            if queue in own:
                x = drawing.left + band * (number + 0.5)
                _speeds(drawing, x, scale, own[queue], labels(queue))
    drawing.names(names, "queue")
    return drawing.render((_percent(name), colour) for name, colour in SPEEDS.items())


def _speeds(drawing: Drawing, x: float, scale: Log, row: Row, label: str) -> None:
    """Marks, not bars: on a logarithmic axis no bar begins at 0."""
    for name, colour in SPEEDS.items():
        hint = f"{label}: {_percent(name)} took at most {row[name]:,.3g} s"
        drawing.circle(x, scale.at(max(row[name], SHORTEST)), 5.5, colour, hint)


def latency_trend(figures: Figures) -> str | None:
    """Median and 99th percentile of all queues over time."""
    rows = figures.tables["latency_trend"]
    if not rows:
        return None
    drawing = Drawing()
    starts = [seconds_of(row["bucket"]) for row in rows]
    across = Times(min(starts), max(starts) + figures.every, drawing.left, drawing.right)
    values = [max(row[name], SHORTEST) for row in rows for name in ("p50", "p99")]
    up = Log.around(values, drawing.floor, TOP)
    drawing.rows(up, "seconds (logarithmic)")
    drawing.columns(across, "time archived (UTC)")
    legend = []
    for phase, colour in (("wait", "#3366cc"), ("work", "#2a9d8f"), ("total", "#6d6875")):
        own = sorted((row for row in rows if row["phase"] == phase), key=lambda row: row["bucket"])
        if own:
            _trend(drawing, (across, up), own, "p50", colour)
            _trend(drawing, (across, up), own, "p99", colour)
        legend.append((f"{phase} (dotted: 50 %, line: 99 %)", colour))
    return drawing.render(legend)


def _trend(
    drawing: Drawing, axes: tuple[Times, Log], rows: Sequence[Row], name: str, colour: str
) -> None:
    """One percentile of one phase."""
    across, up = axes
    points = [
        (across.at(seconds_of(row["bucket"])), up.at(max(row[name], SHORTEST))) for row in rows
    ]
    drawing.line(points, colour, dotted=name == "p50")
    if len(rows) > 2 * GOOD_BUCKETS:
        return
    for (x, y), row in zip(points, rows, strict=True):
        at = f"{row['bucket']:%Y-%m-%d %H:%M:%S}"
        hint = f"{at} {row['phase']} {_percent(name)}: {row[name]:,.3g} s"
        drawing.circle(x, y, 2.5, colour, hint)


def failure_rate(figures: Figures) -> str | None:
    """Failed and moved messages by queue, as a share."""
    rows = [row for row in figures.tables["failure_rate"] if row["rate"] is not None]

    def share(name: str) -> Callable[[Row], float]:
        return lambda row: row[name] / (row["completed"] + row["failed"] + row["moved"])

    return _stacked(
        _by_queue(rows),
        [
            ("failed", STATES["failed"], share("failed")),
            ("to a dead letter queue", STATES["moved"], share("moved")),
        ],
        ("queue", "share of ended messages"),
        share=True,
    )


def top_errors(figures: Figures) -> str | None:
    """The most frequent errors."""
    rows = figures.tables["top_errors"]
    shown = [
        f"{row['queue']}: " + " · ".join(filter(None, (row["error_type"], row["reason"])))
        for row in rows
    ]
    return _ranking(shown, rows, STATES["failed"], "failures")


_ENDS = ("completed", "failed", "discarded")
"""States in which messages end."""


def retry_histogram(figures: Figures) -> str | None:
    """How many attempts messages took, by how they ended."""
    rows = [row for row in figures.tables["retry_histogram"] if row["attempts"] is not None]
    if not rows:
        return None
    counts: Counter[tuple[int, str]] = Counter()
    for row in rows:
        counts.update({(row["attempts"], state): row[state] for state in _ENDS})
    numbers = sorted({row["attempts"] for row in rows})
    drawing = Drawing(bottom=room_for(()))
    up = Log.around([*counts.values(), 1], drawing.floor, TOP)
    drawing.rows(up, "messages (logarithmic)")
    drawing.names([f"{n}+" if n == MOST_ATTEMPTS else str(n) for n in numbers], "attempts")
    band = (drawing.right - drawing.left) / len(numbers)
    width = min(band / 4, 40)
    for (number, state), count in (+counts).items():
        side = width * (_ENDS.index(state) - 1.5)
        x = drawing.left + band * (numbers.index(number) + 0.5) + side
        # A single message must be seen on a logarithmic axis, whose foot is 1.
        top = min(up.at(count), drawing.floor - 3)
        hint = f"{number} attempts, {state}: {count:,} messages"
        drawing.rect(x, top, width, drawing.floor - top, STATES[state], hint)
    return drawing.render((state, STATES[state]) for state in _ENDS)


def dlq_age(figures: Figures) -> str | None:
    """Ages of dead letters by queue."""
    parts = [(shown, colour, itemgetter(name)) for name, (shown, colour) in AGES.items()]
    titles = ("queue in which they failed", "dead letters")
    return _stacked(_by_queue(figures.tables["dlq_age"]), parts, titles)


def hot_keys(figures: Figures) -> str | None:
    """The keys with the most messages."""
    rows = figures.tables["hot_keys"]
    return _ranking([f"{row['queue']}: {row['key']}" for row in rows], rows, COLOURS[0], "messages")


def policy_effects(figures: Figures) -> str | None:
    """What policies and expiry ended, by queue."""
    rows = figures.tables["policy_effects"]
    effects = sorted({row["effect"] for row in rows})
    counts: dict[str, Row] = {}
    for row in rows:
        own = counts.setdefault(row["queue"], dict.fromkeys(effects, 0))
        own[row["effect"]] += row["messages"]
    parts = [
        (effect.replace("_", " "), _colour(number), itemgetter(effect))
        for number, effect in enumerate(effects)
    ]
    return _stacked(counts, parts, ("queue", "messages"))


def _by_queue(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["queue"]: row for row in rows}


def _stacked(
    rows: Mapping[str, Row],
    parts: Sequence[Part],
    titles: tuple[str, str],
    *,
    share: bool = False,
) -> str | None:
    """A bar for each name, made of parts; `titles` are the axes'."""
    if not rows:
        return None
    labels = Labels()
    names = [labels(name) for name in rows]
    drawing = Drawing(330 + room_for(names), bottom=room_for(names))
    most = max(sum(size(row) for _, _, size in parts) for row in rows.values())
    up = Linear(most or 1, drawing.floor, TOP, whole=not share and most < SMALL, share=share)
    drawing.rows(up, titles[1])
    band = (drawing.right - drawing.left) / len(rows)
    width = min(band * 0.7, 90)
    for number, (label, row) in enumerate(zip(names, rows.values(), strict=True)):
        x = drawing.left + band * (number + 0.5) - width / 2
        below = 0.0
        for part, colour, size in parts:
            value = size(row)
            top = up.at(below + value)
            hint = f"{label}, {part}: {_shown(value, share=share)}"
            drawing.rect(x, top, width, up.at(below) - top, colour, hint)
            below += value
    drawing.names(names, titles[0])
    return drawing.render((part, colour) for part, colour, _ in parts)


def _shown(value: float, *, share: bool) -> str:
    return f"{value:.2%}" if share else f"{value:,}"


def _ranking(names: Iterable[str], rows: Sequence[Row], colour: str, what: str) -> str | None:
    """Lying bars, the longest on top, each under its name."""
    if not rows:
        return None
    step = 40
    drawing = Drawing(TOP + step * len(rows) + 36, left=16)
    along = Linear(max(row["messages"] for row in rows), drawing.left, WIDTH - 120, whole=True)
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        y = TOP + step * number
        hint = f"{row['messages']:,} {what} ({row['share']:.1%})"
        drawing.text(drawing.left, y + 10, shorten(name, 120))
        end = along.at(row["messages"])
        drawing.rect(drawing.left, y + 15, end - drawing.left, 14, colour, hint)
        drawing.text(end + 8, y + 27, f"{number_text(row['messages'])} ({row['share']:.1%})")
    drawing.columns(along, what)
    return drawing.render()


def _queues(figures: Figures, rows: Sequence[Row]) -> list[str]:
    """Queues by size; the smaller ones that are shown together come last."""
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row["queue"]] = sizes.get(row["queue"], 0) + row["messages"]
    return sorted(sizes, key=lambda queue: (queue == figures.others, -sizes[queue], queue))


def _percent(name: str) -> str:
    return {"p999": "99.9 %"}.get(name, f"{name[1:]} %")

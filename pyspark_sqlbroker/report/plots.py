"""Draw the charts of a report as SVG by matplotlib, with numbers under the mouse.

`draw_latency`, for example, draws the result `latency` of `spark.analytics`. It receives a frame of
pandas, with times in days since 1970, and returns the names and colours for the legend.
"""

import re
import warnings
from collections.abc import Iterable
from io import StringIO
from itertools import chain, count
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib import colormaps, dates, style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from faststream_sqlbroker.core.text import replace_invisible
from pyspark_sqlbroker.report.figures import DEFAULT_MAX_BUCKETS, MAX_ATTEMPTS, ReportFigures

Colours = dict[str, Any]
"""Labels of a chart, with their colours in matplotlib."""

PHASES = {"wait": "due → claimed", "work": "claimed → handled", "total": "published → archived"}
PERCENTILES = {"p50": "50 %", "p90": "90 %", "p99": "99 %", "p999": "99.9 %"}
PERCENTILE_COLOURS = dict(
    zip(PERCENTILES.values(), ("#9ecae1", "#4292c6", "#08519c", "C1"), strict=True)
)
STATE_COLOURS = {"completed": "C2", "failed": "C5", "discarded": "#adb5bd"}
MIN_SECONDS = 1e-6
"""Seconds that stand for 0, which a logarithmic axis cannot show."""

MAX_LABEL_LENGTH = 30
"""Maximum number of characters of a name on an axis."""

MAX_DAY = 2_932_896
"""Days from 1970 to the end of the year 9999, the maximum of Python's times."""

MAX_ROW_LENGTH = 150
"""Number of characters that fit below an axis side by side."""


def draw(name: str, figures: ReportFigures) -> tuple[Markup, Colours]:
    """Draw a table's chart; return the SVG element and the colours of the legend.

    The table must have rows. Metadata and ids are removed from the SVG.
    """
    file = StringIO()
    # Each chart has its own ids. Browsers have more letters than the font that measures texts.
    settings: list[Any] = ["pyspark_sqlbroker.report.charts", {"svg.hashsalt": name}]
    with style.context(settings, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph ", UserWarning)
        figure = Figure()
        axes = figure.subplots(len(PHASES) if name == "latency" else 1, sharex=True)
        table = pd.DataFrame(figures.tables[name])
        if "bucket" in table:
            table["bucket"] = dates.date2num(table["bucket"])
        # Each chart has a function below, such as draw_latency.
        colours = globals()[f"draw_{name}"](axes, table, figures)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata)
        legend = {label: to_hex(colour) for label, colour in colours.items()}
    svg = file.getvalue().partition('.dtd">')[2]
    # An attribute that contains one kind of quote is in quotes of the other kind.
    hint = re.compile(r"""<g id=(["'])hint (.*?)\1>""", re.DOTALL)
    svg = hint.sub(r'<g class="mark"><title>\2</title>', svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'<path d="[^"]*', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)
    return Markup(svg), legend  # noqa: S704 - matplotlib has escaped the texts


def draw_throughput(axes: Axes, table: Any, figures: ReportFigures) -> Colours:
    """Stack the queues' bars over time: messages a second in each bucket of time.

    The bars are drawn as areas from 0 to the sum so far, the highest first, so that each area is
    one element of the SVG instead of one for each bucket.
    """
    rates = table.pivot_table("per_second", "bucket", "queue")
    rates = rates[[queue for queue in figures.queues if queue in rates]]
    rates.columns = build_labels(rates)
    every = figures.every / 86_400
    sums = [f"{total:,.3g} messages / s" for total in rates.sum(axis=1)]
    _set_time_axis(axes, rates.index, every, "time (UTC)", "messages / s")
    _add_hints(axes, rates.index, every, rates.set_axis(sums), "{:,.3g}")
    edges = np.arange(rates.index[0], rates.index[-1] + 1.5 * every, every)
    tops = rates.cumsum(axis=1).reindex(edges[:-1], method="nearest", tolerance=every / 4)
    colours = {queue: f"C{index}" for index, queue in enumerate(rates)}
    # Each bar hides the lower part of the bar that was drawn before.
    for queue in reversed(colours):
        axes.stairs(tops[queue], edges, fill=True, color=colours[queue])
    return colours


def draw_latency(parts: Any, table: Any, figures: ReportFigures) -> Colours:
    """Draw the percentiles of each phase by queue, as points: no bar begins at 0 seconds."""
    parts[0].figure.set_figheight(8.5)
    queues = [queue for queue in figures.queues if queue in set(table["queue"])]
    names = build_labels(queues)
    for axes, (phase, meaning) in zip(parts, PHASES.items(), strict=True):
        speeds = table[table["phase"] == phase].set_index("queue").reindex(queues)
        speeds = speeds[[*PERCENTILES]].set_axis(names).set_axis([*PERCENTILE_COLOURS], axis=1)
        for percent, colour in PERCENTILE_COLOURS.items():
            axes.plot(speeds[percent].clip(MIN_SECONDS).to_numpy(), "o", ms=11, color=colour)
        axes.set(title=f"{phase}: {meaning}", ylabel="seconds", yscale="log")
        axes.yaxis.set_major_formatter(EngFormatter("s"))
        _add_hints(axes, np.arange(len(names)) - 0.5, 1, speeds, "at most {:,.3g} s")
    _set_names(parts[-1], names, "queue")
    return PERCENTILE_COLOURS


def draw_latency_trend(axes: Axes, table: Any, figures: ReportFigures) -> Colours:
    """Draw the median and the 99th percentile of all queues over time, for each phase.

    Each phase has a colour; the median is dotted. Points are left out if there are many.
    """
    speeds = table.pivot_table(["p50", "p99"], "bucket", "phase")
    speeds.columns = [f"{phase} {PERCENTILES[name]}" for name, phase in speeds]
    every = figures.every / 86_400
    time_labels = [f"{dates.num2date(day):%Y-%m-%d %H:%M:%S}" for day in speeds.index]
    _set_time_axis(axes, speeds.index, every, "time archived (UTC)", "seconds (logarithmic)")
    _add_hints(axes, speeds.index, every, speeds.set_axis(time_labels), "{:,.3g} s")
    axes.set(yscale="log")
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    colours = dict(zip(PHASES, ("C0", "C2", "C9"), strict=True))
    for name in speeds:
        seconds = speeds[name].dropna().clip(MIN_SECONDS)
        line = ":" if name.endswith(" 50 %") else "-"
        mark = "o" if len(speeds) <= 2 * DEFAULT_MAX_BUCKETS else ""
        axes.plot(seconds.index, seconds, mark + line, color=colours[name.split()[0]])
    return {f"{phase} (dotted: 50 %, line: 99 %)": colour for phase, colour in colours.items()}


def draw_failure_rate(axes: Axes, table: Any, _: ReportFigures) -> Colours:
    """Draw failed and moved messages by queue, as a share of the messages that ended.

    Moved messages went to a dead letter queue. Completed ones only count in the total.
    """
    counts = table.set_index("queue")[["failed", "moved", "completed"]]
    percents = 100 * counts.div(counts.sum(axis=1), axis=0)
    percents.columns = ["failed", "to a dead letter queue", "completed"]
    colours = {"failed": "C5", "to a dead letter queue": "C1"}
    _draw_bars(axes, percents[[*colours]], colours, ("queue", "share of ended messages"), "{:.2f}%")
    axes.yaxis.set_major_formatter("{x:.4g} %")
    return colours


def draw_retry_histogram(axes: Axes, table: Any, _: ReportFigures) -> Colours:
    """Draw the number of messages by attempts and final state.

    The last bar has all messages with `MAX_ATTEMPTS` or more attempts.
    """
    counts = table.groupby("attempts")[[*STATE_COLOURS]].sum()
    counts.index = [
        f"{attempts}+" if attempts == MAX_ATTEMPTS else str(attempts) for attempts in counts.index
    ]
    # The axis starts below 1, so that a single message is visible.
    axes.set(yscale="log", ylim=(0.8, None))
    _draw_bars(axes, counts, STATE_COLOURS, ("attempts", "messages (logarithmic)"), "{:,}")
    return STATE_COLOURS


def draw_dlq_age(axes: Axes, table: Any, _: ReportFigures) -> Colours:
    """Draw the ages of dead letters by queue."""
    counts = table.set_index("queue").loc[:, "under_1h":"over_30d"]
    counts.columns = [re.sub("_|(?<=[0-9])(?=[hd])", " ", name) for name in counts]
    reds = colormaps["Reds"](np.linspace(0.15, 0.95, len(counts.columns)))
    colours = dict(zip(counts, reds, strict=True))
    titles = ("queue in which they failed", "dead letters")
    _draw_bars(axes, counts, colours, titles, "{:,}")
    return colours


def draw_policy_effects(axes: Axes, table: Any, _: ReportFigures) -> Colours:
    """Draw by queue how many messages policies and expiry ended."""
    counts = table.pivot_table("messages", "queue", "effect", "sum", fill_value=0, sort=False)
    counts = counts.sort_index(axis=1).rename(columns=lambda name: name.replace("_", " "))
    colours = {name: f"C{index}" for index, name in enumerate(counts)}
    _draw_bars(axes, counts, colours, ("queue", "messages"), "{:,}")
    return colours


def _draw_bars(
    axes: Axes, sizes: Any, colours: Colours, titles: tuple[str, str], value_format: str
) -> None:
    """Draw bars of parts for each row: stacked, or side by side on a logarithmic axis.

    The height of a stacked part would mislead on a logarithmic axis. `titles` are those of both
    axes; `sizes` has a row for each place on the axis and a column for each part.
    """
    is_logarithmic = axes.get_yscale() == "log"
    positions = np.arange(len(sizes))
    width = min(0.7, 0.085 * len(sizes)) / (len(colours) if is_logarithmic else 1)
    bottoms = np.zeros(len(sizes))
    for number, (part, colour) in enumerate(colours.items()):
        shift = width * (number - (len(colours) - 1) / 2) if is_logarithmic else 0
        axes.bar(positions + shift, sizes[part], width, bottoms, color=colour)
        bottoms += 0 if is_logarithmic else sizes[part]
    if not is_logarithmic:
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer="%" not in value_format))
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.set_ylabel(titles[1])
    names = build_labels(sizes.index)
    _add_hints(
        axes,
        positions - 0.5,
        1,
        sizes.set_axis([f"{titles[0]}: {name}" for name in names]),
        value_format,
    )
    _set_names(axes, names, titles[0])


def _add_hints(axes: Axes, starts: Any, width: float, sizes: Any, value_format: str) -> None:
    """Add invisible columns to a chart, which show a row's name and sizes under the mouse.

    matplotlib has no tooltips: the text becomes the id of a column in the SVG, and `draw` makes a
    title of that id.
    """
    # Thousands of hints would be larger than the drawing.
    rows = sizes.iterrows() if len(sizes) <= 2 * DEFAULT_MAX_BUCKETS else ()
    for start, (title, row) in zip(starts, rows, strict=False):
        lines = [
            title,
            *(f"{part}: {value_format.format(size)}" for part, size in row.dropna().items()),
        ]
        text = "\n".join(map(replace_invisible, lines))
        axes.axvspan(start, start + width, color="none", in_layout=False, gid=f"hint {text}")


def _set_time_axis(axes: Axes, days: Any, every: float, x_title: str, y_title: str) -> None:
    """Set an axis of times, from the first bucket to the end of the last."""
    last_day = min(days.max() + every, MAX_DAY)
    axes.set(xlabel=x_title, ylabel=y_title, xlim=(days.min(), last_day))
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.xaxis_date("UTC")


def _set_names(axes: Any, names: list[str], title: str) -> None:
    """Set the names of the columns; rotate long names."""
    axes.set(xlabel=title, xlim=(-0.5, len(names) - 0.5))
    is_rotated = max(map(len, names)) * len(names) > MAX_ROW_LENGTH
    text_style = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if is_rotated else {}
    axes.set_xticks(range(len(names)), names, **text_style)
    axes.figure.set(figheight=axes.figure.get_figheight() + (1 if is_rotated else 0))


def build_labels(names: Iterable[str]) -> list[str]:
    """Shorten names to fit on an axis, and number equal results.

    Two columns of one name would be drawn as one.
    """
    unique_labels: list[str] = []
    for name in names:
        short = replace_invisible(
            name if len(name) <= MAX_LABEL_LENGTH else name[: MAX_LABEL_LENGTH - 1] + "…"
        )
        numbered = (f"{short} ({number})" for number in count(2))
        unique_labels.append(
            next(label for label in chain([short], numbered) if label not in unique_labels)
        )
    return unique_labels

"""A report's plots."""

import html
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from faststream_sqlbroker.core.text import visible
from faststream_sqlbroker.spark.report.figures import MOST_ATTEMPTS, Figures, Row

# Plotly loads its names lazily, which no type checker sees.
go: Any = import_module("plotly.graph_objects")
make_subplots: Any = import_module("plotly.subplots").make_subplots
Figure = Any
"""A `plotly.graph_objects.Figure`."""

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
"""Counts below this get an axis with a mark at each whole number."""

LONGEST_LABEL = 30
"""Characters of a name on an axis."""


def shorten(name: str, most: int = LONGEST_LABEL) -> str:
    """The beginning of a long name, as Plotly's own kind of HTML: it knows no other entities than
    these.
    """
    short = name if len(name) <= most else name[: most - 1] + "…"
    return html.escape(visible(short), quote=False)


class Labels:
    """Names as labels: short, different where the names are, and nothing but text to Plotly, which
    knows tags.
    """

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


def throughput(figures: Figures) -> Figure | None:
    """Stacked bars of queues over time."""
    rows = figures.tables["throughput"]
    labels = Labels()
    plot = go.Figure()
    for number, queue in enumerate(_queues(figures, rows)):
        own = [row for row in rows if row["queue"] == queue]
        plot.add_bar(
            x=[_time(row["bucket"]) for row in own],
            y=[row["per_second"] for row in own],
            width=figures.every * 1000,
            offset=0,
            name=labels(queue),
            marker_color=COLOURS[number % len(COLOURS)],
        )
    plot.update_layout(barmode="stack", bargap=0)
    plot.update_xaxes(title="time (UTC)", type="date")
    plot.update_yaxes(title="messages / s")
    return plot if rows else None


def latency(figures: Figures) -> Figure | None:
    """Percentiles of the three phases by queue."""
    rows = figures.tables["latency"]
    labels = Labels()
    queues = _queues(figures, rows)
    titles = {
        "wait": "wait: due → claimed",
        "work": "work: claimed → handled",
        "total": "total: published → archived",
    }
    plot = make_subplots(
        3, 1, shared_xaxes=True, subplot_titles=list(titles.values()), vertical_spacing=0.07
    )
    for place, phase in enumerate(titles, 1):
        own = {row["queue"]: row for row in rows if row["phase"] == phase}
        for name, colour in SPEEDS.items():
            # Marks, not bars: on a logarithmic axis no bar begins at 0.
            plot.add_scatter(
                row=place,
                col=1,
                name=_percent(name),
                legendgroup=name,
                showlegend=place == 1,
                mode="markers",
                marker={"color": colour, "size": 11, "line": {"color": "white", "width": 1}},
                x=[labels(queue) for queue in queues],
                y=[_seconds(own[queue][name]) if queue in own else None for queue in queues],
            )
    plot.update_xaxes(type="category", range=[-0.5, len(queues) - 0.5])
    plot.update_xaxes(title="queue", row=3)
    plot.update_yaxes(type="log", title="seconds (log)", **_LOG)
    plot.update_layout(height=680, margin_t=80, legend_y=1.05)
    return plot if rows else None


def latency_trend(figures: Figures) -> Figure | None:
    """Median and 99th percentile of all queues over time."""
    rows = figures.tables["latency_trend"]
    plot = go.Figure()
    for phase, colour in (("wait", "#3366cc"), ("work", "#2a9d8f"), ("total", "#6d6875")):
        own = sorted((row for row in rows if row["phase"] == phase), key=lambda row: row["bucket"])
        for name, dash in (("p50", "dot"), ("p99", "solid")):
            plot.add_scatter(
                x=[_time(row["bucket"]) for row in own],
                y=[_seconds(row[name]) for row in own],
                mode="lines+markers",
                marker_size=4,
                line={"color": colour, "dash": dash, "width": 2},
                name=f"{phase} {_percent(name)}",
            )
    plot.update_xaxes(title="time archived (UTC)", type="date")
    plot.update_yaxes(title="seconds (logarithmic)", type="log", **_LOG)
    return plot if rows else None


def failure_rate(figures: Figures) -> Figure | None:
    """Failed and moved messages by queue, as a share."""
    rows = [row for row in figures.tables["failure_rate"] if row["rate"] is not None]
    labels = Labels()
    plot = go.Figure()
    for name, shown in (("failed", "failed"), ("moved", "to a dead letter queue")):
        plot.add_bar(
            x=[labels(row["queue"]) for row in rows],
            y=[row[name] / (row["completed"] + row["failed"] + row["moved"]) for row in rows],
            customdata=[row[name] for row in rows],
            hovertemplate="%{y:.2%}: %{customdata:,} messages",
            name=shown,
            marker_color=STATES[name],
        )
    plot.update_layout(barmode="stack")
    plot.update_xaxes(type="category", title="queue")
    plot.update_yaxes(title="share of ended messages", tickformat=".1~%", rangemode="tozero")
    return plot if rows else None


def top_errors(figures: Figures) -> Figure | None:
    """The most frequent errors."""
    rows = figures.tables["top_errors"]
    shown = [
        f"{row['queue']}: " + " · ".join(filter(None, (row["error_type"], row["reason"])))
        for row in rows
    ]
    return _ranking(shown, rows, STATES["failed"], "failures")


def retry_histogram(figures: Figures) -> Figure | None:
    """How many attempts messages took, by how they ended."""
    rows = figures.tables["retry_histogram"]
    plot = go.Figure()
    numbers = sorted({row["attempts"] for row in rows if row["attempts"] is not None})
    for state in ("completed", "failed", "discarded"):
        plot.add_bar(
            x=[f"{number}+" if number == MOST_ATTEMPTS else str(number) for number in numbers],
            y=[sum(row[state] for row in rows if row["attempts"] == number) for number in numbers],
            name=state,
            marker_color=STATES[state],
        )
    plot.update_layout(barmode="group")
    plot.update_xaxes(title="attempts", type="category")
    plot.update_yaxes(title="messages (logarithmic)", type="log")
    return plot if numbers else None


def dlq_age(figures: Figures) -> Figure | None:
    """Ages of dead letters by queue."""
    rows = figures.tables["dlq_age"]
    labels = Labels()
    plot = go.Figure()
    for name, (shown, colour) in AGES.items():
        plot.add_bar(
            x=[labels(row["queue"]) for row in rows],
            y=[row[name] for row in rows],
            name=shown,
            marker_color=colour,
        )
    plot.update_layout(barmode="stack")
    plot.update_xaxes(type="category", title="queue in which they failed")
    plot.update_yaxes(title="dead letters", **_whole(row["messages"] for row in rows))
    return plot if rows else None


def hot_keys(figures: Figures) -> Figure | None:
    """The keys with the most messages."""
    rows = figures.tables["hot_keys"]
    return _ranking([f"{row['queue']}: {row['key']}" for row in rows], rows, COLOURS[0], "messages")


def policy_effects(figures: Figures) -> Figure | None:
    """What policies and expiry ended, by queue."""
    rows = figures.tables["policy_effects"]
    labels = Labels()
    plot = go.Figure()
    for number, effect in enumerate(sorted({row["effect"] for row in rows})):
        own = [row for row in rows if row["effect"] == effect]
        plot.add_bar(
            x=[labels(row["queue"]) for row in own],
            y=[row["messages"] for row in own],
            name=effect.replace("_", " "),
            marker_color=COLOURS[number % len(COLOURS)],
        )
    plot.update_layout(barmode="stack")
    plot.update_xaxes(type="category", title="queue")
    plot.update_yaxes(title="messages", **_whole(row["messages"] for row in rows))
    return plot if rows else None


def style(plot: Figure) -> Figure:
    """The page's look; what the plot has set itself stays."""
    look = {
        "template": "plotly_white",
        "height": 380,
        "margin": {"l": 70, "r": 20, "t": 40, "b": 50},
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#343a40"},
        "legend": {
            "orientation": "h",
            "y": 1.02,
            "yanchor": "bottom",
            "x": 0,
            "traceorder": "normal",
        },
        "hoverlabel": {"namelength": -1},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#ced4da", "activecolor": "#495057"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }
    styled = go.Figure(plot).update_layout(look).update_layout(plot.layout)
    return styled.update_xaxes(automargin=True).update_yaxes(automargin=True, gridcolor="#e3e7eb")


_LOG: dict[str, Any] = {"exponentformat": "SI", "dtick": "D2"}


def _ranking(names: Iterable[str], rows: Sequence[Row], colour: str, what: str) -> Figure | None:
    """Lying bars, the longest on top."""
    shown = [shorten(name, 2 * LONGEST_LABEL) for name in names]
    plot = go.Figure()
    plot.add_bar(
        x=[row["messages"] for row in rows],
        y=list(range(len(rows))),
        orientation="h",
        marker_color=colour,
        customdata=[row["share"] for row in rows],
        hovertemplate="%{x:,} " + what + " (%{customdata:.1%})<extra></extra>",
    )
    plot.update_layout(height=max(240, 90 + 28 * len(rows)))
    plot.update_xaxes(title=what, rangemode="tozero", **_whole(row["messages"] for row in rows))
    plot.update_yaxes(
        tickvals=list(range(len(rows))), ticktext=shown, autorange="reversed", ticksuffix=" "
    )
    return plot if rows else None


def _whole(numbers: Iterable[int]) -> dict[str, Any]:
    """Options of an axis of counts: whole numbers only."""
    return {"dtick": 1} if max(numbers, default=0) < SMALL else {}


def _queues(figures: Figures, rows: Sequence[Row]) -> list[str]:
    """Queues by size; the smaller ones that are shown together come last."""
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row["queue"]] = sizes.get(row["queue"], 0) + row["messages"]
    return sorted(sizes, key=lambda queue: (queue == figures.others, -sizes[queue], queue))


def _time(moment: Any) -> str:
    """As Plotly reads it, which knows no zones: in UTC."""
    return str(moment.replace(tzinfo=None).isoformat(sep=" "))


def _seconds(value: float | None) -> float | None:
    return None if value is None else max(value, SHORTEST)


def _percent(name: str) -> str:
    return {"p999": "99.9 %"}.get(name, f"{name[1:]} %")

"""A report's page: one file; no text of a message is run as a script."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.resources import files
from string import Template
from typing import Any

from faststream_sqlbroker.core.text import visible
from faststream_sqlbroker.spark.report import plots
from faststream_sqlbroker.spark.report.figures import Figures, Row

_LATENCY = (
    "How long most messages took: 50, 90, 99 and 99.9 % took at most so long. Delays that were "
    "asked for, and the pauses before retries, are no waiting; the total has them."
)
_FAILURES = (
    "Messages that failed for good, as a share of all that were handled to the end. What a dead "
    "letter queue took counts where it came from."
)
_DEAD_LETTERS = (
    "Messages that failed for good and lie in the archive, and those in dead letter queues if the "
    "report was given the live table. Ages are as of the moment that the report was given, or of "
    "the latest time in what it has read."
)
SECTIONS = (
    ("throughput", "Throughput", "Messages settled per second, by queue."),
    ("latency", "Latency by queue", _LATENCY),
    ("latency_trend", "Latency over time", "Median and 99th percentile of all queues together."),
    ("failure_rate", "Failures by queue", _FAILURES),
    ("top_errors", "Top errors", "Reasons and exceptions of failures."),
    ("retry_histogram", "Attempts", "How often messages were tried. 0 never ran."),
    ("dlq_age", "Dead letters by age", _DEAD_LETTERS),
    ("hot_keys", "Hot keys", "The keys with the most messages, and their share of the queue."),
    (
        "policy_effects",
        "Policies and expiry",
        "Messages that ended without their handler having decided it.",
    ),
)
"""Function of `plots`, heading, what it shows."""

_NOTHING = '<p class="none">Nothing in this period.</p>'

SCRIPT = """
"use strict";
addEventListener("error", event => { document.body.dataset.error = event.message; });
const figures = JSON.parse(document.getElementById("figures").textContent);
const options = {
  responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"],
  // Plotly would offer to send the figures to its own servers.
  showSendToCloud: false, showLink: false, sendData: false, plotlyServerURL: "",
};
const draw = ([id, figure]) => Plotly.newPlot(id, figure.data, figure.layout, options);
Promise.all(Object.entries(figures).map(draw)).then(
  drawn => { document.body.dataset.drawn = drawn.length; },
  error => { document.body.dataset.error = String(error); },
);
"""


def render(figures: Figures, title: str) -> str:
    """The page as HTML."""
    made = {name: getattr(plots, name)(figures) for name, _, _ in SECTIONS}
    drawn = {
        name: json.loads(plots.style(plot).to_json())
        for name, plot in made.items()
        if plot is not None
    }
    library: str = import_module("plotly.offline").get_plotlyjs()
    template = (
        files("faststream_sqlbroker.spark.report").joinpath("page.html").read_text(encoding="utf-8")
    )
    return Template(template).substitute(
        policy=_policy(library, SCRIPT),
        title=html.escape(visible(title)),
        period=_period(figures),
        cards=_cards(figures),
        queues=_queues(figures),
        sections="\n".join(
            _section(figures, *section, drawn=section[0] in drawn) for section in SECTIONS
        ),
        # Within a script only "<" could end it.
        figures=json.dumps(drawn).replace("<", "\\u003c"),
        library=library,
        script=SCRIPT,
    )


def _policy(*scripts: str) -> str:
    """What the browser may run: these scripts, and nothing from the network."""
    hashes = (
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    )
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: "
        "blob:; base-uri 'none'; form-action 'none'"
    )


def _period(figures: Figures) -> str:
    first = figures.totals["first"]
    last = figures.totals["last"]
    if first is None:
        return "There are no messages in this period."
    shown = (f"{moment:%Y-%m-%d %H:%M:%S}" for moment in (first, last))
    return f"Archived from {' to '.join(shown)} UTC, in buckets of {_length(figures.every)}."


def _cards(figures: Figures) -> str:
    totals = figures.totals
    phases = {row["phase"]: row for row in figures.tables["latency_all"]}
    ended = totals["completed"] + totals["failed"]
    lost = sum(row["lost_deliveries"] for row in figures.tables["duplicate_deliveries"])
    facts = [
        ("messages", f"{totals['messages']:,}"),
        ("queues", f"{totals['queues']:,}"),
        ("completed", f"{totals['completed']:,}"),
        (
            "failed" + (f" ({totals['failed'] / ended:.2%})" if ended else ""),
            f"{totals['failed']:,}",
        ),
        ("discarded", f"{totals['discarded']:,}"),
        ("payloads", _bytes(totals["bytes"])),
        ("wait, 99 %", _length(phases.get("wait", {}).get("p99"))),
        ("work, 99 %", _length(phases.get("work", {}).get("p99"))),
        ("lost deliveries", f"{lost:,}"),
    ]
    return "\n".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in facts)


def _queues(figures: Figures) -> str:
    speeds = {(row["queue"], row["phase"]): row for row in figures.tables["latency"]}
    failures = {row["queue"]: row for row in figures.tables["failure_rate"]}
    again = sorted(
        figures.tables["duplicate_deliveries"],
        key=lambda row: (row["queue"] == figures.others, -row["messages"], row["queue"]),
    )
    rows = []
    for row in again:
        failed = failures.get(row["queue"], {})
        rate = failed.get("rate")
        times = [
            _length(speeds.get((row["queue"], p), {}).get(q))
            for p in ("wait", "work", "total")
            for q in ("p50", "p99")
        ]
        share = "–" if rate is None else f"{rate:.2%}"
        rows.append(
            [row["queue"], f"{row['messages']:,}", share, *times, f"{row['lost_deliveries']:,}"]
        )
    names = [
        "queue",
        "messages",
        "failed",
        *(f"{p} {q}" for p in ("wait", "work", "total") for q in ("50 %", "99 %")),
    ]
    return _table("queues", [*names, "lost deliveries"], rows) if rows else _NOTHING


def _section(figures: Figures, name: str, heading: str, meaning: str, *, drawn: bool) -> str:
    body = f'<div id="{name}" class="plot"></div>' if drawn else _NOTHING
    if name == "top_errors" and drawn:
        body += _table(
            "errors",
            ["queue", "reason", "messages", "share", "latest example", "at (UTC)"],
            _errors(figures),
        )
    return f"<section><h2>{heading}</h2><p>{meaning}</p>{body}</section>"


def _errors(figures: Figures) -> Iterable[Sequence[str]]:
    for row in figures.tables["top_errors"]:
        example = "–" if row["example"] is None else f"{row['example']} (message {row['last_id']})"
        numbers = f"{row['messages']:,}", f"{row['share']:.1%}"
        yield row["queue"], row["reason"] or "–", *numbers, example, _at(row)


def _at(row: Row) -> str:
    return "–" if row["last_at"] is None else f"{row['last_at']:%Y-%m-%d %H:%M:%S}"


def _table(kind: str, names: Iterable[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(visible(str(cell)))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _length(seconds: float | None) -> str:
    """Three figures and a unit."""
    if seconds is None:
        return "–"
    units = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
    size, unit = next(((size, unit) for size, unit in units if seconds >= size), (1e-6, "µs"))
    return f"{seconds / size:.3g} {unit}"


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:  # noqa: PLR2004 - of a unit in the next
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:,.4g} TiB"

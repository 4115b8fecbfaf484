"""A report's page: one file without a script; texts of messages are shown as they are.

Each error has the command that publishes its messages again.
"""

import hashlib
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from importlib.resources import files
from string import Template
from typing import Any

from faststream_sqlbroker.core.text import visible
from pyspark_sqlbroker.report import plots
from pyspark_sqlbroker.report.drawing import escaped
from pyspark_sqlbroker.report.figures import Before, Figures, Row, error_of

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

_LATEST = datetime(9999, 12, 31, tzinfo=timezone.utc)


class Html(str):
    """Text that is HTML already; all other text is escaped."""

    __slots__ = ()


@dataclass(frozen=True)
class Links:
    """Where a page leads.

    Attributes:
        message: Address of a message with "{id}" in it, as of the dashboard; None is none.
        options: Words of `sqlbroker archive replay` that say where the rows are.
    """

    message: str | None = None
    options: Sequence[str] = ()


def render(figures: Figures, title: str, links: Links = Links()) -> str:
    """The page as HTML."""
    template = files("pyspark_sqlbroker.report").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=escaped(title),
        period=_period(figures),
        cards=_cards(figures),
        queues=_queues(figures),
        sections="\n".join(_section(figures, *section, links) for section in SECTIONS),
    )


def _period(figures: Figures) -> str:
    first = figures.totals["first"]
    if first is None:
        return "There are no messages in this period."
    shown = (
        f"Archived from {_span(figures.totals)} UTC, in buckets of {show_length(figures.every)}."
    )
    if figures.before is None:
        return shown
    if figures.before.totals["first"] is None:
        return f"{shown} There are no messages in the period before."
    return f"{shown} The period before: from {_span(figures.before.totals)} UTC."


def _span(totals: Row) -> str:
    return " to ".join(show_moment(totals[name]) for name in ("first", "last"))


def _cards(figures: Figures) -> str:
    totals = figures.totals
    before = figures.before
    p99 = {row["phase"]: row["p99"] for row in figures.tables["latency_all"]}
    ended = totals["completed"] + totals["failed"]
    lost = sum(row["lost_deliveries"] for row in figures.tables["duplicate_deliveries"])
    facts = [
        ("messages", totals["messages"], "messages", _count),
        ("queues", totals["queues"], "queues", _count),
        ("completed", totals["completed"], "completed", _count),
        (
            "failed" + (f" ({totals['failed'] / ended:.2%})" if ended else ""),
            totals["failed"],
            "failed",
            _count,
        ),
        ("discarded", totals["discarded"], "discarded", _count),
        ("payloads", totals["bytes"], "bytes", show_bytes),
    ]
    cards = [
        _card(name, show(value), None if before is None else (value, before.totals[key], show))
        for name, value, key, show in facts
    ]
    for phase in ("wait", "work"):
        value = p99.get(phase)
        earlier = None if before is None else (value, before.p99.get(phase), show_length)
        cards.append(_card(f"{phase}, 99 %", show_length(value), earlier))
    then = None if before is None else (lost, before.lost, _count)
    cards.append(_card("lost deliveries", _count(lost), then))
    return "\n".join(cards)


def _card(name: str, value: str, earlier: tuple[Any, Any, Callable[[Any], str]] | None) -> str:
    then = ""
    if earlier is not None:
        now, before, show = earlier
        then = f"<small>before: {show(before)}{change(now, before)}</small>"
    return f"<div><b>{value}</b><span>{name}</span>{then}</div>"


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


_SPEEDS = tuple((p, q) for p in ("wait", "work", "total") for q in ("p50", "p99"))
"""Phases and percentiles of the table of queues."""


def _queues(figures: Figures) -> str:
    speeds = {(row["queue"], row["phase"]): row for row in figures.tables["latency"]}
    failures = {row["queue"]: row for row in figures.tables["failure_rate"]}
    again = sorted(
        figures.tables["duplicate_deliveries"],
        key=lambda row: (row["queue"] == figures.others, -row["messages"], row["queue"]),
    )
    rows = []
    for row in again:
        queue = row["queue"]
        times = [show_length(speeds.get((queue, p), {}).get(q)) for p, q in _SPEEDS]
        counts = [f"{row['messages']:,}", _rate(failures.get(queue))]
        if figures.before is not None:
            then = figures.before.rates.get(queue)
            counts = [counts[0], _messages(then), counts[1], _rate(then)]
        rows.append([queue, *counts, *times, f"{row['lost_deliveries']:,}"])
    counted = ["messages", "failed"]
    if figures.before is not None:
        counted = ["messages", "before", "failed", "before"]
    names = ["queue", *counted, *(f"{phase} {name[1:]} %" for phase, name in _SPEEDS)]
    return table("queues", [*names, "lost deliveries"], rows) if rows else _NOTHING


def _messages(rates: Row | None) -> str:
    """How many were archived from the queue: what was moved away was archived elsewhere."""
    return _count(sum(rates[name] for name in ("completed", "failed", "discarded")) if rates else 0)


def _rate(rates: Row | None) -> str:
    rate = None if rates is None else rates["rate"]
    return "–" if rate is None else f"{rate:.2%}"


def _section(figures: Figures, name: str, heading: str, meaning: str, links: Links) -> str:
    draw: Callable[[Figures], str | None] = getattr(plots, name)
    drawn = draw(figures)
    body = _NOTHING if drawn is None else f'<div id="{name}" class="plot">{drawn}</div>'
    if name == "top_errors" and drawn is not None:
        body += _errors(figures, links) + _failures(figures, links)
    return f"<section><h2>{heading}</h2><p>{meaning}</p>{body}</section>"


def _errors(figures: Figures, links: Links) -> str:
    newest: dict[Any, list[int]] = {}
    for row in figures.failures:
        newest.setdefault(error_of(row), []).append(row["id"])
    before = figures.before
    rows = []
    for row in figures.tables["top_errors"]:
        counts = [f"{row['messages']:,}"]
        if before is not None:
            counts.append(_count(before.errors.get(error_of(row))) + _new(row, before))
        ids = newest.get(error_of(row), [])
        rows.append(
            [
                *(row["queue"], row["reason"] or "–", *counts, f"{row['share']:.1%}"),
                *("–" if row["example"] is None else row["example"], show_moment(row["last_at"])),
                Html(" ".join(link(str(each), f"#m{each}") for each in ids)),
                _replay(replay_command(row, figures.totals, links.options)),
            ]
        )
    counted = ["messages"] if before is None else ["messages", "before"]
    names = ["queue", "reason", *counted, "share", "latest example", "at (UTC)"]
    return table("errors", [*names, "latest messages", "publish again"], rows)


def _new(row: Row, before: Before) -> str:
    return "" if error_of(row) in before.errors else " (new)"


def _replay(command: str | None) -> Html:
    if command is None:
        return Html("a name has hidden characters: call replay() in Python")
    return Html(f"<details><summary>command</summary><code>{escaped(command)}</code></details>")


def replay_command(error: Row, totals: Row, options: Sequence[str]) -> str | None:
    """The line for a POSIX shell: it shows what it would publish, then asks.

    The name of its job comes from the error and the period, so that the same line publishes each
    message once, however often it runs.

    Args:
        error: A row of `top_errors`.
        totals: Of the period, with the first and last moment.
        options: More words of the command: where the rows are.

    Returns:
        None where a name has characters that a page cannot show.
    """
    # The last row belongs to the period.
    until = min(totals["last"], _LATEST) + timedelta(microseconds=1)
    times = [totals["first"].isoformat(), until.isoformat()]
    named = [error["queue"], error["reason"] or "", error["error_type"] or ""]
    digest = hashlib.sha256("\0".join((*named, *times)).encode()).hexdigest()
    words = ["sqlbroker", "archive", "replay", "--job", f"report-{digest[:12]}"]
    for name, value in zip(("--failed-in", "--reason", "--error-type"), named, strict=True):
        words.append(f"{name}={value}")
    words += [f"--into={error['queue']}", "--since", times[0], "--until", times[1], *options]
    line = shlex.join(words)
    return line if visible(line) == line else None


def _failures(figures: Figures, links: Links) -> str:
    rows = []
    anchored: set[int] = set()
    for row in figures.failures:
        number = row["id"]
        address = None if links.message is None else links.message.replace("{id}", str(number))
        shown = str(number) if address is None else link(str(number), address)
        # A message may have failed in two queues; an anchor may stand only once.
        anchor = "" if number in anchored else f' id="m{number}"'
        anchored.add(number)
        rows.append(
            [
                *(Html(f"<span{anchor}>{shown}</span>"), row["queue"], row["archived_from"]),
                *("–" if row["key"] is None else row["key"], str(row["attempts_count"])),
                *(show_moment(row["created_at"]), show_moment(row["archived_at"])),
                "–" if row["line"] is None else row["line"],
            ]
        )
    names = ["message", "failed in", "archived from", "key", "attempts"]
    return "<h3>Latest messages of these errors</h3>" + table(
        "failures", [*names, "published (UTC)", "archived (UTC)", "error"], rows
    )


def table(kind: str, names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose class is `kind`."""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: str) -> str:
    return f"<td>{value if isinstance(value, Html) else escaped(value)}</td>"


def link(text: str, address: str) -> str:
    """A link, as HTML."""
    return f'<a href="{escaped(address)}">{escaped(text)}</a>'


def change(now: float | None, before: float | None) -> str:
    """How much more or less it is than before, as a share; nothing where that is no number."""
    return f" ({now / before - 1:+.0%})" if now is not None and before else ""


def show_moment(moment: datetime | None) -> str:
    """In UTC, to the second."""
    return "–" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def show_length(seconds: float | None) -> str:
    """Three figures and a unit."""
    if seconds is None:
        return "–"
    units = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
    size, unit = next(((size, unit) for size, unit in units if seconds >= size), (1e-6, "µs"))
    return f"{seconds / size:.3g} {unit}"


def show_bytes(number: float) -> str:
    """Four figures and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:  # noqa: PLR2004 - of a unit in the next
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:,.4g} TiB"

"""Tables of what was measured, as Markdown: of one command, and of all that are kept in
benchmarks/results."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.compare import Spread, spread
from benchmarks.harness import RESULTS, Result

TITLES = {
    "check_durable": "All targets, quickly, on durable settings",
    "check": "All targets, quickly",
    "own_durable": "Compared with FastStream's dispatch and the raw driver, on durable settings",
    "own": "Compared with FastStream's dispatch and the raw driver",
    "peers_durable": "Compared with other brokers, on durable settings",
    "peers": "Compared with other brokers",
    "scale": "With more rows, queues, bytes and processes",
    "rate": "At a fixed rate",
    "effects": "A handler that inserts a row",
    "requests": "Requests, answered by another process",
    "policies": "Under policies",
    "spark": "The archive in Spark",
    "watching": "Watched by metrics and traces",
}
"""By the names of the results, in the order of the report."""
Content = dict[str, Any]
"""A file of benchmarks/results: machine, rows, results and suites."""


@dataclass(frozen=True)
class Figure:
    """How a figure of a result is shown: multiplied by `factor`, in `unit`."""

    title: str
    unit: str
    factor: float = 1.0
    digits: int = 0

    def shown(self, value: float | None) -> str:
        """`value` as text; a dash for none."""
        return "–" if value is None else f"{value:,.{self.digits}f}"


_MS, _US = ("ms", 1e3, 2), ("µs", 1e6, 1)
FIGURES = {
    "rate": Figure("messages/s", "messages/s"),
    "cpu_each": Figure("CPU of the process, µs a message", *_US),
    "instructions_each": Figure("instructions a message", "instructions"),
    "statements_each": Figure("statements a message", "statements", digits=3),
    "statements": Figure("statements", "statements", digits=0),
    "statements_a_minute": Figure("statements a minute", "statements"),
    "db_cpu_each": Figure("CPU of the server, µs a message", *_US),
    "p50": Figure("latency p50, ms", *_MS),
    "p95": Figure("latency p95, ms", *_MS),
    "p99": Figure("latency p99, ms", *_MS),
    "p50_handler": Figure("publish to handler p50, ms", *_MS),
    "p95_handler": Figure("publish to handler p95, ms", *_MS),
    "p99_handler": Figure("publish to handler p99, ms", *_MS),
    "p50_delivered": Figure("end of publish to handler p50, ms", *_MS),
    "p99_start": Figure("p99 at the start, ms", *_MS),
    "p99_end": Figure("p99 at the end, ms", *_MS),
    "claim_start": Figure("claim at the start, ms", *_MS),
    "claim_end": Figure("claim at the end, ms", *_MS),
    "behind": Figure("publisher late by up to, ms", *_MS),
    "dead_rows": Figure("dead rows", "rows"),
    "wal_bytes": Figure("WAL, bytes a message", "bytes"),
    "claim": Figure("claim of 100, ms", *_MS),
    "look": Figure("look, ms", *_MS),
    "claim_buffers": Figure("buffers of a claim", "buffers"),
    "look_buffers": Figure("buffers of a look", "buffers"),
    "queues": Figure("queues, ms", *_MS),
    "list": Figure("a page of a queue, ms", *_MS),
    "search": Figure("search by error, ms", *_MS),
    "search_archive": Figure("search of the archive by error, ms", *_MS),
    "dead_letters": Figure("dead letters, ms", *_MS),
    "dry_run": Figure("dry run, ms", *_MS),
    "move": Figure("move, ms", *_MS),
    "redrive": Figure("redrive, ms", *_MS),
    "prune": Figure("prune, ms", *_MS),
    "verify": Figure("verify, ms", *_MS),
}
AXES = {
    "ready": "ready rows",
    "subscribed": "queues of the subscriber",
    "payload": "bytes of a body",
    "partitions": "partitions",
}
"""What stands at the x axis of a chart."""


def taken(runs: list[Result], name: str) -> Spread | None:
    """A figure of all rounds, as it is shown; None if it was not measured."""
    values = [run[name] * FIGURES[name].factor for run in runs if run.get(name) is not None]
    return spread(values) if values else None


def tables(content: Content) -> list[str]:
    """The lines of the table of ratios, and of one table for each suite with the same figures."""
    lines = [
        "| figure | wanted | median | spread | rounds |",
        "|---|---|---:|---|---:|",
        *content["rows"],
        "",
    ]
    by_figures: dict[tuple[str, ...], list[str]] = {}
    for suite, about in content["suites"].items():
        by_figures.setdefault(tuple(about["shows"]), []).append(suite)
    for shows, suites in by_figures.items():
        titles = [FIGURES[name].title for name in shows]
        lines += [f"| scenario | what | {' | '.join(titles)} |", f"|---|---|{'---:|' * len(shows)}"]
        for suite in suites:
            for variant, runs in content["results"][suite].items():
                lines.append(f"| {suite} | {variant} | {' | '.join(_medians(runs, shows))} |")
        lines.append("")
    return lines


def _medians(runs: list[Result], shows: Iterable[str]) -> list[str]:
    found = ((FIGURES[name], taken(runs, name)) for name in shows)
    return [figure.shown(value.median if value else None) for figure, value in found]


def about(machine: dict[str, Any]) -> str:
    """What the figures were taken on, in one sentence."""
    packages = (f"{name} {value}" for name, value in machine["packages"].items())
    servers = (
        f"{kind} ({', '.join(f'{name} {value}' for name, value in sorted(settings.items()))})"
        for kind, settings in machine["databases"].items()
    )
    of = (
        f"{machine['taken'][:10]}, commit {machine.get('commit', 'unknown')}, "
        f"{machine['cores']} cores, {machine['cpu']}, Python {machine['python']}"
    )
    return f"{', '.join((of, *packages))}; {'; '.join(servers)}."


def document(which: str, content: Content, level: str = "#", image: str | None = None) -> str:
    """What one command has measured; medians in all tables."""
    lines = [f"{level} {TITLES[which]}", "", about(content["machine"]), "", *tables(content)]
    if image is not None:
        lines += [f"![{TITLES[which]}]({image})", ""]
    return "\n".join(lines)


def kept() -> dict[str, Content]:
    """What the commands have written, by command."""
    files = ((which, RESULTS / f"{which}.json") for which in TITLES)
    return {which: json.loads(file.read_text()) for which, file in files if file.exists()}


def merged(which: str, content: Content) -> Content:
    """`content` of some suites, with what `which` has kept of the others."""
    file = RESULTS / f"{which}.json"
    if not file.exists():
        return content
    before = json.loads(file.read_text())
    rows = {_row_name(row): row for row in (*before["rows"], *content["rows"])}
    parts = ("results", "suites", "counters")
    both = {part: {**before.get(part, {}), **content[part]} for part in parts}
    machine = dict(content["machine"])
    if before["results"].keys() - content["results"].keys():
        for name in ("commit", "code"):
            of_both = {of.get(name, "unknown") for of in (before["machine"], machine)}
            of_both = {part for value in of_both for part in value.split(" and ")}
            machine[name] = " and ".join(sorted(of_both))
    return {**content, "machine": machine, "rows": list(rows.values()), **both}


def _row_name(row: str) -> str:
    return row.split("|")[1].strip()


def origin(contents: dict[str, Content]) -> str:
    """Whether all results are of the same code, in one sentence; else which are of which."""
    by_code: dict[str, list[str]] = {}
    commits = {}
    for which, content in contents.items():
        machine = content["machine"]
        code = machine.get("code", "unknown")
        by_code.setdefault(code, []).append(f"`{which}`")
        commits[code] = machine.get("commit", "unknown")
    if len(by_code) == 1 and "unknown" not in by_code:
        [commit] = commits.values()
        return f"All results are of the same code, that of commit {commit}."
    parts = (
        f"{', '.join(names)} of commit {commits[code]} (code {code})"
        for code, names in by_code.items()
    )
    return f"**The results are of different code**: {'; '.join(parts)}."


def write(contents: dict[str, Content], images: dict[str, str]) -> str:
    """Write benchmarks/results/README.md from the `kept` results and images; returns its text."""
    intro = (
        "# Measurements\n\nEvery ratio is of runs that were taken in turn on one machine, round by "
        "round; the rates themselves say little elsewhere. Written by `python -m benchmarks "
        f"report`. {origin(contents)}\n"
    )
    parts = [
        document(which, content, "##", images.get(which)) for which, content in contents.items()
    ]
    text = "\n".join([intro, *parts])
    (RESULTS / "README.md").write_text(text)
    return text

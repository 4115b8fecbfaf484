"""Measure, compare, and write benchmarks/results: python -m benchmarks [own | peers] [--rounds N] [--messages N].

Every figure is a ratio of runs taken in turn on one machine: the rates themselves say little elsewhere. Ends
with 1 if a target is not reached.
"""

import argparse
import sys
from datetime import datetime, timezone
from typing import Any

from benchmarks import targets
from benchmarks.harness import RESULTS, Result, interleaved, keep, machine
from benchmarks.peers.setup import environment

TITLES = {"own": "Beside FastStream's dispatch and the raw driver", "peers": "Beside other brokers"}


def measure(suites: list[targets.Suite], rounds: int) -> tuple[dict[str, Any], list[str], bool]:
    """Everything measured, the rows of the report, and whether all targets are reached."""
    kept: dict[str, Any] = {}
    rows, all_reached = [], True
    for suite in suites:
        print(f"{suite.name}:", flush=True)
        results = interleaved(suite.variants, rounds)
        kept[suite.name] = results
        for comparison in suite.comparisons:
            row, reached = comparison.verdict(results)
            rows.append(row)
            all_reached = all_reached and reached
            print(f"  {row}", flush=True)
    return kept, rows, all_reached


def report(which: str, kept: dict[str, Any], rows: list[str]) -> str:
    """The result as Markdown."""
    about = machine()
    lines = [
        f"# {TITLES[which]}",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {about['cores']} cores, {about['cpu']}, Python {about['python']}, "
        + ", ".join(f"{name} {value}" for name, value in about["packages"].items())
        + ".",
        "",
        "| figure | wanted | median | spread | rounds |",
        "|---|---|---:|---|---:|",
        *rows,
        "",
        "| scenario | what | messages/s (median) | CPU of the process, µs a message |",
        "|---|---|---:|---:|",
    ]
    for suite, results in kept.items():
        for name, runs in results.items():
            lines.append(f"| {suite} | {name} | {_median(runs, 'rate'):,.0f} | {_cpu(runs):.1f} |")
    return "\n".join([*lines, ""])


def _median(runs: list[Result], figure: str) -> float:
    ordered = sorted(run[figure] for run in runs)
    return float(ordered[len(ordered) // 2])


def _cpu(runs: list[Result]) -> float:
    ordered = sorted(run["cpu"] / run["count"] * 1e6 for run in runs)
    return float(ordered[len(ordered) // 2])


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="?", choices=TITLES, default="own")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each variant, taken in turn")
    parser.add_argument("--messages", type=int, default=60_000, help="messages of a consuming run")
    arguments = parser.parse_args()
    count = arguments.messages
    suites = targets.own(count) if arguments.which == "own" else targets.peers(count, environment)
    kept, rows, reached = measure(suites, arguments.rounds)
    keep(arguments.which, {"results": kept})
    document = RESULTS / f"{arguments.which}.md"
    document.write_text(report(arguments.which, kept, rows))
    print(f"\n{document.read_text()}")
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main())

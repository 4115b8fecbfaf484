"""Measure, compare, and write benchmarks/results: python -m benchmarks [COMMAND] [--rounds N]
[--messages N].

Every figure is a ratio of runs taken in turn on one machine: the rates themselves say little
elsewhere. Ends with 1 if a target is not reached. With `--durable` the databases keep each commit
on disk, and the results are kept apart. `report` measures nothing: it renders what the others have
kept, and brings README.md and docs/explanation/speed.md up to date.
"""

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import charts, quotes, report, scaling, spark_loads, targets
from benchmarks.compare import Suite
from benchmarks.counters import counted
from benchmarks.harness import Result, interleaved, keep, machine
from benchmarks.peers.setup import environment
from benchmarks.policy_targets import policies
from benchmarks.settings import PEERS_SYNCHRONOUS, problems, settings

ROUNDS = {
    "own": 5,
    "peers": 5,
    "scale": 3,
    "rate": 1,
    "effects": 5,
    "requests": 3,
    "watching": 7,
    "check": 3,
    "spark": 5,
    "policies": 3,
}
"""Runs of each variant, if nothing else is said."""


DURABLE = tuple(which for which in ROUNDS if f"{which}_durable" in report.TITLES)
"""Commands that can be run with `--durable`."""


def measure(suites: list[Suite], rounds: int) -> tuple[report.Content, bool]:
    """Everything measured, with the machine's counters, and whether all targets are reached."""
    content: report.Content = {"machine": machine(), "rows": [], "results": {}, "suites": {}}
    content["counters"] = {}
    all_reached = True
    with ThreadPoolExecutor(max_workers=len(suites) or 1) as pool:
        aside = {s.name: pool.submit(_run, s, rounds) for s in suites if s.aside}
        # Those that run aside take longest, so they are told last.
        for suite in sorted(suites, key=lambda suite: suite.aside):
            print(f"{suite.name}:", flush=True)
            running = aside.get(suite.name)
            results, counters = _run(suite, rounds) if running is None else running.result()
            content["results"][suite.name] = results
            content["counters"][suite.name] = counters
            content["suites"][suite.name] = {"shows": suite.shows, "axis": suite.axis}
            for comparison in suite.comparisons:
                row, reached = comparison.verdict(results)
                content["rows"].append(row)
                all_reached = all_reached and reached
                print(f"  {row}", flush=True)
    return content, all_reached


def _run(suite: Suite, rounds: int) -> tuple[dict[str, list[Result]], dict[str, Any]]:
    with counted() as counters:
        results = interleaved(suite.variants, min(rounds, suite.most_rounds or rounds))
    return results, counters


def measure_spark(rounds: int, rows: int) -> tuple[report.Content, bool]:
    """As `measure`, of loads in Spark: their sessions live through all rounds."""
    results = spark_loads.measure(rounds, rows)
    suites = spark_loads.suites()
    verdicts = [c.verdict(results[suite.name]) for suite in suites for c in suite.comparisons]
    told = {suite.name: {"shows": suite.shows, "axis": suite.axis} for suite in suites}
    content = {
        "machine": machine(),
        "rows": [row for row, _ in verdicts],
        "results": results,
        "suites": told,
    }
    return content, all(reached for _, reached in verdicts)


def _suites(arguments: argparse.Namespace) -> list[Suite]:
    count = arguments.messages
    made: dict[str, Callable[[], list[Suite]]] = {
        "own": lambda: targets.own(count),
        "peers": lambda: targets.peers(count, environment),
        "scale": lambda: scaling.scale(count, large=arguments.large),
        "rate": lambda: scaling.rate(arguments.seconds),
        "effects": lambda: targets.effects(2_000),
        "requests": lambda: targets.requests(200),
        "policies": lambda: policies(count // 3),
        "watching": lambda: targets.watching(count),
        "check": lambda: targets.check(count, environment),
    }
    suites = made[arguments.which]()
    if arguments.durable:
        # What has nothing to do commits nothing.
        suites = [suite for suite in suites if not suite.aside]
    if arguments.only is None:
        return suites
    return _chosen(suites, arguments.only)


def _chosen(suites: list[Suite], only: str) -> list[Suite]:
    """Those that `only` names, or whose names have a part of it."""
    chosen = set[str]()
    known = [suite.name for suite in suites]
    for part in (part.strip() for part in only.split(",")):
        found = {part} & set(known) or {name for name in known if part in name}
        if not found:
            raise SystemExit(f"--only {part!r} is in the name of none of: {'; '.join(known)}")
        chosen |= found
    return [suite for suite in suites if suite.name in chosen]


def render() -> int:
    """Draw and write everything that is kept."""
    contents = report.kept()
    if not contents:
        print("Nothing is kept in benchmarks/results yet: measure first, for example `just bench`.")
        return 1
    print(report.write(contents, charts.render(contents)))
    quotes.write(report.kept())
    return 0


def require_durable() -> None:
    """Let the peers keep their commits, too.

    Raises:
        SystemExit: a setting of a database may lose a commit; the text names each.
    """
    os.environ[PEERS_SYNCHRONOUS] = "FULL"
    if lines := problems(settings()):
        cure = "Start servers with `tools.servers run --durable`, and TMPDIR a folder on a disk."
        raise SystemExit("\n".join(["--durable is refused:", *lines, cure]))


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="?", choices=[*ROUNDS, "report"], default="own")
    parser.add_argument(
        "--rounds", type=int, help=f"runs of each variant, taken in turn; default {ROUNDS}"
    )
    parser.add_argument("--messages", type=int, default=60_000, help="messages of a consuming run")
    parser.add_argument("--seconds", type=int, default=300, help="length of each run of `rate`")
    parser.add_argument(
        "--large", action="store_true", help="`scale` with tens of millions of rows, too"
    )
    parser.add_argument(
        "--rows", type=int, default=2_000_000, help="rows of the archive for `spark`"
    )
    parser.add_argument(
        "--only",
        help="parts of names of suites, with commas; what is kept of the others stays",
    )
    parser.add_argument(
        "--durable", action="store_true", help=f"databases lose no commit; of {', '.join(DURABLE)}"
    )
    parser.add_argument("--check", action="store_true", help="only tell the targets, write nothing")
    arguments = parser.parse_args()
    which = arguments.which
    if which == "report":
        return render()
    if arguments.durable and which not in DURABLE:
        parser.error(f"--durable is of {', '.join(DURABLE)}, not of {which}")
    if arguments.durable:
        require_durable()
    rounds = arguments.rounds or ROUNDS[which]
    if which == "spark":
        content, reached = measure_spark(rounds, arguments.rows)
    else:
        content, reached = measure(_suites(arguments), rounds)
    if arguments.check:
        print("\n".join(report.tables(content)))
        return int(not reached)
    which = f"{which}_durable" if arguments.durable else which
    if arguments.only is not None:
        content = report.merged(which, content)
    file = keep(which, content)
    text = report.document(which, content)
    file.with_suffix(".md").write_text(text)
    print(f"\n{text}")
    return int(not reached)


if __name__ == "__main__":
    sys.exit(main())

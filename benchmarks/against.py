"""This tree compared with another revision of it.

python -m benchmarks.against REV [--rounds N] [--messages N] [--kinds K,K] [--least RATIO]

REV is checked out as a git worktree and run by the same interpreter, so with the same packages.
Each side runs its own benchmarks.ours. The two take turns, and each round gives one ratio, so that
a slow minute of the machine affects both alike; what counts is the median of those paired ratios.
Exits with 1 if one of them is below --least.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.compare import Comparison, Suite, over
from benchmarks.harness import ROOT, Variant, interleaved
from tools.servers import VARIABLES, server
from tools.worktree import worktree

LEAST_ROUNDS = 9
"""Fewer ratios have a median that one slow run moves."""
LEAST_RATIO = 0.97
"""What a change may cost without being told."""
NOW = "this tree"
KINDS = ("postgresql", "mariadb", "sqlite")


@dataclass(frozen=True)
class Scenario:
    """What runs on each database."""

    function: str
    """Of benchmarks.ours."""
    scale: float
    """Its messages ÷ those of a consuming run, so that each run takes about as long."""
    options: dict[str, str] = field(default_factory=dict)


SCENARIOS = {
    "consume": Scenario("consume", 1),
    # With fewer messages, start and stop would be most of what is measured.
    "consume in batches": Scenario("consume", 5, {"shape": "batch"}),
    "publish one": Scenario("publish_single", 0.1),
    "publish concurrently": Scenario("publish_concurrent", 0.25),
    "publish in bulk": Scenario("publish_bulk", 1),
}


def suites(rev: str, folder: Path, count: int, kinds: Sequence[str], least: float) -> list[Suite]:
    """One suite for each scenario: the revision in `folder`, and this tree."""
    found = []
    for kind in kinds:
        for title, scenario in SCENARIOS.items():
            scaled = max(1_000, int(count * scenario.scale) // 1_000 * 1_000)
            options = {"count": scaled, **scenario.options}
            variants = [
                Variant(name, scenario.function, kind, options=options, folder=where)
                for name, where in ((NOW, ROOT), (rev, folder))
            ]
            name = f"{kind}: {title}"
            rate = Comparison(f"{name}, messages a second", over(NOW, rev), least, digits=3)
            # Less is better, and is no target: the rate says it.
            cpu = Comparison(f"{name}, CPU of a message", over(NOW, rev, "cpu_each"), digits=3)
            found.append(Suite(name, variants, [rate, cpu]))
    return found


def confirm(folder: Path) -> None:
    """Make sure that a process in `folder` gets its package from there.

    Raises:
        RuntimeError: it gets another, so the comparison would be of one with itself.
    """
    command = [sys.executable, "-c", "import faststream_sqlbroker as p; print(p.__file__)"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    if not Path(done.stdout.strip()).resolve().is_relative_to(folder.resolve()):
        raise RuntimeError(f"a process in {folder} imports {done.stdout.strip()}")


def compare(found: Sequence[Suite], rounds: int) -> bool:
    """Run all, print a row for each comparison; whether every target is reached."""
    rows = []
    all_reached = True
    for suite in found:
        print(f"{suite.name}:", flush=True)
        results = interleaved(suite.variants, rounds)
        for comparison in suite.comparisons:
            row, reached = comparison.verdict(results)
            rows.append(row)
            all_reached = all_reached and reached
    print("\n| this tree ÷ the other | wanted | median | lowest to highest | rounds |")
    print("|---|---|---:|---|---:|", *rows, sep="\n")
    return all_reached


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rev", help="a commit, branch or tag")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS, help="ratios of each scenario")
    parser.add_argument("--messages", type=int, default=20_000, help="messages of a consuming run")
    parser.add_argument("--kinds", default="postgresql", help=f"of {', '.join(KINDS)}; with commas")
    parser.add_argument("--least", type=float, default=LEAST_RATIO, help="least median of a rate")
    args = parser.parse_args(arguments)
    if args.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds must be {LEAST_ROUNDS} or more, got {args.rounds}")
    kinds = args.kinds.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"--kinds must be of {', '.join(KINDS)}, got {args.kinds!r}")
    with ExitStack() as stack:
        for kind in set(kinds) & set(VARIABLES):
            os.environ[VARIABLES[kind]] = stack.enter_context(server(kind))
        folder = stack.enter_context(worktree(args.rev))
        confirm(folder)
        confirm(ROOT)
        found = suites(args.rev, folder, args.messages, kinds, args.least)
        return int(not compare(found, args.rounds))


if __name__ == "__main__":
    sys.exit(main())
